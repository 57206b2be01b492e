"""Checksums of the files of a folder, in `checksums.json` next to them: damage is detected before they are used."""

from collections.abc import Collection
from pathlib import Path

from bert_pretrain.errors import DataError
from bert_pretrain.storage.files import read_json, sha256_file, write_json

CHECKSUMS = "checksums.json"


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
