"""Files: written whole or not at all, JSON and folders with checksums, and what a user's path means."""

import contextlib
import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_pretrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np

LOCK = ".lock"
STATUS = "status.json"
CHECKSUMS = "checksums.json"
MAX_JSON_BYTES = 256 << 20
MAX_JSON_DEPTH = 100
_MAX_INDENTED_BYTES = 1 << 20  # a large one, as the manifest of many inputs, takes ten times as long with indentation
_REPLACED = ".old.tmp"
_DIGEST = "content_sha256"


def is_url(location: str) -> bool:
    """Whether a location is for fsspec rather than the local file system."""
    return "://" in location


def local_path(location: str | Path, flag: str) -> Path:
    """Return the path that a user's path or `file://` URL means; other URLs are refused."""
    location = str(location).removeprefix("file://")
    if is_url(location):
        raise ConfigError(
            f"{location} is a URL, and this must be local",
            where=flag,
            remedy="name a local path; 'aws s3 sync' or 'rclone copy' copies it from or to a store",
        )
    return Path(location)


def did_you_mean(folder: Path, patterns: Sequence[str], file: str) -> str | None:
    """Return a remedy that names the folder inside a given one that was likely meant, None where there is none.

    It is the newest match that holds `file`, of the first of the patterns that has one.
    """
    for pattern in patterns:
        if found := [each for each in folder.glob(pattern) if (each / file).is_file()]:
            return f"did you mean {max(found, key=lambda each: each.stat().st_mtime)}?"
    return None


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary local path, which is moved to `path` on success and removed otherwise.

    Its folder must exist: one that is removed while a command works is not made again.
    """
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
    """Yield a temporary folder, which is flushed to disk and replaces `path` on success, and is removed otherwise.

    The old folder is first moved aside, and moved back by the next writer after a kill in between.
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
                os.replace(path, _temporary_name(path, _REPLACED))
            os.replace(temporary, path)
        except OSError as error:
            # Another machine may have done the same task in the meantime, with the same result.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            _restore(path)
        _flush_to_disk(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary_name(path: Path, ending: str = ".tmp") -> Path:
    # Random, because on a cluster two processes with the same number may write the same file.
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{ending}")


def _restore(path: Path) -> None:
    """Move a folder back that was moved aside, if its successor is not there, or else remove it."""
    for old in path.parent.glob(f".{glob.escape(path.name)}.*{_REPLACED}"):
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(old, path)


def is_bookkeeping(path: Path) -> bool:
    """Whether a file or folder is our lock, the status of a run, or was left by a killed writer."""
    return path.name in (LOCK, STATUS) or (path.name.startswith(".") and path.name.endswith(".tmp"))


def remove_temporaries(folder: Path) -> None:
    """Remove what killed writers of `atomic_path` and `atomic_folder` left in `folder`, and restore what they moved."""
    for old in folder.glob(f".*{_REPLACED}"):
        _restore(folder / old.name[1:].rsplit(".", 3)[0])
    for leftover in folder.glob(".*.tmp"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def move_aside(folder: Path) -> Path:
    """Move the content of a folder to a new folder next to it and return that; the folder keeps its lock.

    Manifests are moved first, so that what an interruption leaves does not look like a finished output.
    """
    folder = folder.resolve()  # `.` has no name of its own
    aside = folder.with_name(f"{folder.name}.old-{datetime.now():%Y%m%d-%H%M%S-%f}")
    aside.mkdir()
    for path in sorted(folder.iterdir(), key=lambda path: (not path.name.startswith("manifest"), path.name)):
        if path.name != LOCK:
            path.rename(str(aside / path.name))
    return aside


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def save_array(path: Path, values: "np.ndarray") -> None:
    """Write an `.npy` file atomically."""
    import numpy as np

    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.save(file, values)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically; bytes of file names that are not UTF-8 are escaped, as JSON escapes them."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, value: object) -> None:
    """Write an indented JSON file atomically."""
    write_text(path, json_text(value))


def json_text(value: object) -> str:
    """Return the content of an indented JSON file."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_checked_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file with a SHA-256 of its own content, which `read_json` checks and leaves out."""
    write_text(path, checked_json_text(value))


def checked_json_text(value: Mapping[str, Any]) -> str:
    """Return the content of a file of `write_checked_json`."""
    body = {**value, _DIGEST: _digest_of(value)}
    text = json.dumps(body, ensure_ascii=False)
    return f"{text}\n" if len(text) > _MAX_INDENTED_BYTES else json_text(body)


def read_json(path: Path, remedy: str = "restore the file from a copy, or write its folder again") -> Any:
    """Read a JSON file, written here or elsewhere."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it is larger than {MAX_JSON_BYTES >> 20} MiB")
        found = parse_json(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and _DIGEST in found and found.pop(_DIGEST) != _digest_of(found):
            raise ValueError("it is damaged: its content is not what was written")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path.name}: {error}", where=str(path), remedy=remedy) from error
    return found


def parse_json(text: str) -> Any:
    """Return the value of JSON text, or raise a ValueError."""
    with contextlib.suppress(RecursionError):
        found = _DECODER.decode(text)
        if text.count("[") + text.count("{") <= MAX_JSON_DEPTH or not _is_deeper(found, MAX_JSON_DEPTH):
            return found
    raise ValueError(f"it is nested deeper than {MAX_JSON_DEPTH} levels")


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in inner)


def _parse_int(digits: str) -> float:
    try:
        return int(digits)
    except ValueError:  # Python limits the digits of a whole number
        return float(digits)


_DECODER = json.JSONDecoder(parse_int=_parse_int)


def _digest_of(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal_folder(folder: Path, written: Collection[str] = ()) -> None:
    """Record the size and SHA-256 of every file that a folder holds now; FileNotFoundError if one `written` is gone."""
    for name in written:
        (folder / name).stat()
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS)
    sums = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in files}
    write_json(folder / CHECKSUMS, sums)


def is_sealed(folder: Path) -> bool:
    """Whether a folder has checksums; those written by others have none."""
    return (folder / CHECKSUMS).is_file()


def damage_of_folder(folder: Path, names: Collection[str] | None = None, *, whole: bool = True) -> str | None:
    """Return how a sealed folder was damaged, None if it was not.

    All files are looked at, or only those named; their bytes are read only if `whole`.
    """
    if not is_sealed(folder):
        return f"{CHECKSUMS} is missing"
    try:
        for name, sums in read_json(folder / CHECKSUMS).items():
            if names is not None and name not in names:
                continue
            size = (folder / name).stat().st_size
            if size != sums["bytes"]:
                return f"{name} has {size:,} bytes instead of {sums['bytes']:,}"
            if whole and sha256_file(folder / name) != sums["sha256"]:
                return f"the SHA-256 of {name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (DataError, OSError, AttributeError, TypeError, KeyError, ValueError) as error:
        return str(error).partition("\n")[0]
    return None
