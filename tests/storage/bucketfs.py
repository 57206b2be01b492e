"""A stand-in for an object store: fsspec's `bucket://`, whose objects lie in the folder that BUCKET_FOLDER names.

As in S3 there are only objects and their names: no folders, no rename, no appending, and an object appears whole or not
at all. It says nothing of what a real store's network and permissions do. Where a file `.full` lies beside the objects,
it takes no more.
"""

import io
import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from fsspec import AbstractFileSystem


class BucketFileSystem(AbstractFileSystem):
    protocol = "bucket"
    cachable = False

    @property
    def folder(self) -> Path:
        return Path(os.environ["BUCKET_FOLDER"])

    def _object(self, path: str) -> Path:
        return self.folder / quote(self._strip_protocol(path), safe="")

    def _names(self) -> list[str]:
        return sorted(unquote(name) for name in os.listdir(self.folder) if not name.startswith("."))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        if self._object(name).is_file():
            return {"name": name, "size": self._object(name).stat().st_size, "type": "file"}
        if any(other.startswith(f"{name}/") for other in self._names()):
            return {"name": name, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        prefix = self._strip_protocol(path) + "/"
        below = [name.removeprefix(prefix) for name in self._names() if name.startswith(prefix)]
        names = sorted({prefix + name.split("/")[0] for name in below})
        if not names:
            names = [self.info(path)["name"]]
        return [self.info(name) for name in names] if detail else names

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        if (self.folder / ".full").exists():
            raise PermissionError("the bucket takes no more")
        whole = self.folder / f".{secrets.token_hex(8)}"
        whole.write_bytes(value)
        whole.rename(self._object(path))

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        self.pipe_file(path2, self._object(path1).read_bytes())

    def rm_file(self, path: str) -> None:
        self._object(path).unlink()

    def rm(self, path: str, recursive: bool = False, **_: Any) -> None:
        for name in self.find(path) if recursive else [path]:
            self.rm_file(name)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        assert mode == "rb", "an object is put whole"
        return io.BytesIO(self._object(path).read_bytes())
