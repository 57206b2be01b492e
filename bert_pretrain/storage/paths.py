"""Paths that a user gives: which are URLs, which must be local, and which folder was likely meant."""

from collections.abc import Sequence
from pathlib import Path

from bert_pretrain.errors import ConfigError


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
