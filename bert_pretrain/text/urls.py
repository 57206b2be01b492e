"""Inputs by URL, through fsspec: which files there are, and what changes when one of them does."""

from typing import Any

from bert_pretrain.errors import InputError

# File systems' names for what changes with a file, the best first.
_VERSIONS = ("ETag", "etag", "blob_id", "Content-MD5", "mtime", "LastModified", "Last-Modified", "updated", "modified")


def matching_urls(url: str) -> list[str]:
    """Return the URLs that match a pattern, in order, or the URL itself if it is none."""
    filesystem, path = _open_filesystem(url)
    try:
        paths = sorted(filesystem.glob(path)) if any(character in url for character in "*?[") else [path]
    except Exception as error:
        raise _unreachable(url, error) from error
    if not paths:
        raise InputError("no file matches the URL", where=url, remedy="check the pattern")
    return [filesystem.unstrip_protocol(entry) for entry in paths]


def size_and_version(url: str) -> tuple[int | None, str]:
    """Return the size of a file in bytes if it is known, and what changes with its content, "" if nothing tells it."""
    filesystem, path = _open_filesystem(url)
    try:
        info = filesystem.info(path)
    except Exception as error:
        raise _unreachable(url, error) from error
    return info.get("size"), next((f"{key}:{info[key]}" for key in _VERSIONS if info.get(key)), "")


def _open_filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except Exception as error:  # each file system has errors of its own
        raise _unreachable(url, error) from error
    return filesystem, path


def _unreachable(url: str, error: Exception) -> InputError:
    remedy = "check the address and access"
    if isinstance(error, ImportError):
        remedy = "pip install 'bert-pretrain[http]'" if url.startswith("http") else "install the package it names"
    return InputError(f"cannot reach the URL: {str(error) or type(error).__name__}", where=url, remedy=remedy)
