"""Write files and folders atomically, read and write JSON and folders with checksums, and check local paths."""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_pretrain.errors import ConfigError, DataError, OutputError

LOCK = ".lock"
STATUS = "status.json"
CHECKSUMS = "checksums.json"
MAX_JSON_BYTES = 256 << 20
MAX_JSON_DEPTH = 100
_ERRNO = re.compile(r"(?:os error|Errno) (\d+)")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # `errno` of a write for which there is no room
_REPLACED_SUFFIX = ".old.tmp"
_DIGEST_KEY = "content_sha256"


def is_url(location: str) -> bool:
    """Return whether a location is a URL for fsspec, not a local path."""
    return "://" in location


def errno_of(error: BaseException) -> int | None:
    """Return the `errno` of an error. Libraries in Rust and `shutil.copytree` have it only in the message."""
    match = _ERRNO.search(str(error))
    return int(match[1]) if match else getattr(error, "errno", None)


def local_path(location: str | Path, flag: str) -> Path:
    """Return the local path of a path or `file://` URL. Raise ConfigError for other URLs.

    Raise it as well for a path that is not UTF-8, which Arrow and safetensors do not open.
    """
    location = str(location).removeprefix("file://")
    if is_url(location):
        raise ConfigError(
            f"{location} is a URL, but this must be a local path",
            where=flag,
            remedy="give a local path; 'aws s3 sync' or 'rclone copy' copies from and to object stores",
        )
    if location.encode(errors="ignore").decode() != location:
        raise ConfigError(
            f"the path {location} is not UTF-8",
            where=flag,
            remedy="rename the file or folder, or give another path",
        )
    return Path(os.path.expanduser(location))


def did_you_mean(folder: Path, patterns: Sequence[str], file: str) -> str | None:
    """Return a remedy that names the subfolder of `folder` that the user probably meant, or None.

    The patterns are tried in order. If subfolders with a file `file` match a pattern, the newest of them is named.
    """
    for pattern in patterns:
        if matches := [match for match in folder.glob(pattern) if (match / file).is_file()]:
            return f"did you mean {max(matches, key=lambda match: match.stat().st_mtime)}?"
    return None


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` on success. The parent folder must exist."""
    temporary = _temporary_name(path)
    try:
        yield temporary
        _flush_to_disk(temporary)
        os.replace(temporary, path)
        _flush_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which replaces `path` on success.

    The old folder is first moved aside. If the process is killed before the replacement, the next writer restores it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _restore(path)
    temporary = _temporary_name(path)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _flush_to_disk(file)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.replace(path, _temporary_name(path, _REPLACED_SUFFIX))
            os.replace(temporary, path)
        except OSError as error:
            # Another machine may have finished the same task in the meantime, with the same result.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            _restore(path)
        _flush_to_disk(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary_name(path: Path, suffix: str = ".tmp") -> Path:
    # Random, because a process id may occur on several machines of a cluster.
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{suffix}")


def temporaries_of(path: Path, suffix: str = ".tmp") -> list[Path]:
    """Return the temporary paths of writers of `path`, not those of `path.other`."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}{re.escape(suffix)}")
    return [each for each in path.parent.glob(f".*{suffix}") if name.fullmatch(each.name)]


def _restore(path: Path) -> None:
    """Restore the old folder if its replacement is missing. Otherwise remove the old folder."""
    for old in temporaries_of(path, _REPLACED_SUFFIX):
        if not path.exists():
            os.replace(old, path)
        elif old.is_symlink():
            old.unlink()
        else:
            shutil.rmtree(old, ignore_errors=True)


def is_bookkeeping(path: Path) -> bool:
    """Return whether a path is our lock, the status of a run, or a temporary path of a killed writer."""
    return path.name in (LOCK, STATUS) or (path.name.startswith(".") and path.name.endswith(".tmp"))


def remove_temporaries(folder: Path) -> None:
    """Remove temporary paths that killed writers left in `folder`, and restore the folders that they moved aside."""
    for old in folder.glob(f".*{_REPLACED_SUFFIX}"):
        _restore(folder / old.name[1:].rsplit(".", 3)[0])
    for leftover in folder.glob(".*.tmp"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems cannot flush folders
            raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. Bytes of file names that are not UTF-8 are escaped, for example as `\\udcff`."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_file(path: Path, content: bytes) -> None:
    """Write a file that the user has named, atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise OutputError(
            f"cannot write the file: {error.strerror}",
            where=str(path),
            remedy="choose a path that you may write to",
        ) from error


def write_json(path: Path, value: object) -> None:
    """Write an indented JSON file atomically."""
    write_text(path, json_text(value))


def json_text(value: object) -> str:
    """Return a value as indented JSON text."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_checked_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically, with a SHA-256 of its content that `read_json` checks and removes."""
    write_text(path, checked_json_text(value))


def checked_json_text(value: Mapping[str, Any]) -> str:
    """Return the text that `write_checked_json` writes."""
    body = {**value, _DIGEST_KEY: json_digest(value)}
    text = json.dumps(body, ensure_ascii=False)
    return f"{text}\n" if len(text) > 1 << 20 else json_text(body)  # indenting takes ten times as long


def read_json(path: Path, remedy: str = "restore the file from a copy, or write its folder again") -> Any:
    """Read a JSON file, ours or another program's, and check its SHA-256 if it has one."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it is larger than {MAX_JSON_BYTES >> 20} MiB")
        value = parse_json(path.read_text(encoding="utf-8"))
        if isinstance(value, dict) and _DIGEST_KEY in value and value.pop(_DIGEST_KEY) != json_digest(value):
            raise ValueError("it is damaged: its content differs from what was written")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path.name}: {error}", where=str(path), remedy=remedy) from error
    return value


def parse_json(text: str) -> Any:
    """Parse JSON text. Raise ValueError if it is invalid or nested too deeply."""
    with contextlib.suppress(RecursionError):
        value = _DECODER.decode(text)
        if text.count("[") + text.count("{") <= MAX_JSON_DEPTH or not _is_deeper(value, MAX_JSON_DEPTH):
            return value
    raise ValueError(f"it is nested deeper than {MAX_JSON_DEPTH} levels")


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in inner)


def _parse_int(digits: str) -> float:
    try:
        return int(digits)
    except ValueError:  # Python limits the number of digits
        return float(digits)


_DECODER = json.JSONDecoder(parse_int=_parse_int)


def json_digest(value: object) -> str:
    """Return the SHA-256 of a JSON value in hexadecimal. It depends on the order of keys."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path, written: Collection[str] = ()) -> None:
    """Record the size and SHA-256 of every file in a folder. Raise FileNotFoundError if one in `written` is missing."""
    for name in written:
        (folder / name).stat()
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS)
    write_json(folder / CHECKSUMS, checksums_of(folder, names))


def checksums_of(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the size and SHA-256 of files in a folder, by name."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)} for name in names}


def has_checksums(folder: Path) -> bool:
    """Return whether a folder has checksums. Folders that other programs wrote have none."""
    return (folder / CHECKSUMS).is_file()


def damage_of_folder(folder: Path, names: Collection[str] | None = None, *, check_hashes: bool = True) -> str | None:
    """Describe the first damage of a folder with checksums, or return None if there is none.

    Checks all files, or only those in `names`. Without `check_hashes`, compares only the sizes.
    """
    if not has_checksums(folder):
        return f"{CHECKSUMS} is missing"
    try:
        checksums = read_json(folder / CHECKSUMS)
        if names is not None:
            checksums = {name: sums for name, sums in checksums.items() if name in names}
    except (DataError, AttributeError) as error:
        return str(error).partition("\n")[0]
    return damage_of_files(folder, checksums, check_hashes=check_hashes)


def damage_of_files(folder: Path, checksums: Any, *, check_hashes: bool = True) -> str | None:
    """Describe the first difference of files in a folder from `checksums_of`, or return None if there is none."""
    try:
        for name, sums in checksums.items():
            if Path(name).name != name:  # of another folder
                return f"{CHECKSUMS} names {name!r}, which is not in the folder"
            if not (folder / name).is_file():  # a device may be endless
                return f"{name} is missing"
            size = (folder / name).stat().st_size
            if size != sums["bytes"]:
                return f"{name} has {size:,} bytes instead of {sums['bytes']:,}"
            if check_hashes and sha256_file(folder / name) != sums["sha256"]:
                return f"the SHA-256 of {name} has changed"
    except (OSError, AttributeError, TypeError, KeyError, ValueError) as error:
        return str(error)
    return None
