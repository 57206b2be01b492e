"""Models are downloaded by name from a server with the Hub's routes: only data, never a pickle."""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file
from typer.testing import CliRunner

import bert_pretrain
from bert_pretrain.cli import app
from bert_pretrain.errors import DataError
from bert_pretrain.model.hub import model_folder, name_of_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Local server with the Hub's routes for downloads, and a folder for each repository."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Path] = {}
        self.downloaded: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        is_listing = parts[:2] == ["api", "models"]
        owner, name, route, revision, *rest = parts[2:] if is_listing else parts
        folder = self.server.repositories.get(f"{owner}/{name}")
        if folder is None or revision not in ("main", COMMIT):
            self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound" if folder is None else "RevisionNotFound"})
        elif is_listing:
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            names = {str(path.relative_to(folder)): path for path in files}
            about = {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": [{"rfilename": each} for each in names]}
            tree = [{"type": "file", "path": n, "size": p.stat().st_size, "oid": n} for n, p in names.items()]
            self._send(json.dumps(about if route == "revision" else tree).encode())
        else:
            content = folder.joinpath(*rest).read_bytes()
            if self.command == "GET":
                self.server.downloaded.append("/".join(rest))
            tag = hashlib.sha1(content).hexdigest()
            self._send(content, 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'})

    do_HEAD = do_GET

    def _send(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A local server instead of the Hub, and an empty cache."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def published(bert_folder: Path, hub: Hub, tmp_path: Path) -> Path:
    """The folder of `org/name`: a model, a pickle, code and a large file."""
    folder = shutil.copytree(bert_folder, tmp_path / "published")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    for name in ("pytorch_model.bin", "modeling.py", "tf_model.h5", "optimizer.pt"):
        (folder / name).write_text("not to be downloaded")
    hub.repositories["org/name"] = folder
    return folder


def test_only_data_is_downloaded_and_only_once(published: Path, hub: Hub, bert_folder: Path, monkeypatch) -> None:
    for name in ("org/name", "org/name@main", f"org/name@{COMMIT}"):
        folder = model_folder(name, "MODEL")
        assert (folder / "model.safetensors").read_bytes() == (bert_folder / "model.safetensors").read_bytes()
    assert sorted(hub.downloaded) == sorted({path.name for path in bert_folder.iterdir()} - {"README.md"})
    assert name_of_folder(folder) == "org/name"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_folder("org/name", "MODEL") == folder  # from the cache


def test_commands_and_functions_accept_a_name(published: Path, bert_folder: Path) -> None:
    results = [CliRunner().invoke(app, ["fill-mask", name, "[MASK]"]) for name in ("org/name", str(bert_folder))]
    assert [result.exit_code for result in results] == [0, 0]
    assert results[0].stdout == results[1].stdout
    opened = bert_pretrain.load_model("org/name", device="cpu")
    weights = load_file(bert_folder / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    assert (opened.network.embeddings.word_embeddings.weight == weights).all()


def test_failed_downloads_raise(published: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(name: str, word: str) -> None:
        with pytest.raises(DataError, match=word):
            model_folder(name, "--init-from")

    attempt("org/other", "RepositoryNotFound")
    attempt("org/name@v9", "RevisionNotFound")
    (published / "model.safetensors").unlink()
    attempt("org/name", "no safetensors")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    attempt("org/new", "LocalEntryNotFound")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    attempt("org/new", "LocalEntryNotFound")


def test_paths_are_never_looked_up(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    for path in ("runs/a", "runs/mistyped", "name", "a/b/c", "./a/b", "../a", "/a/b", str(tmp_path / "x")):
        assert model_folder(path, "MODEL") == Path(path)
    assert hub.downloaded == []


@pytest.mark.parametrize(
    ("command", "files", "expected"),
    [
        ("fill-mask {} [MASK]", ("model/config.json", "checkpoints/step-10/config.json"), "model"),
        ("fill-mask {} [MASK]", ("train/128/model/config.json", "train/512/model/config.json"), "train/512/model"),
        ("fill-mask {} [MASK]", ("checkpoints/step-10/config.json", "checkpoints/step-20/config.json"), "step-20"),
        ("make-data a.txt --vocab {} --output new", ("vocab/vocab.txt",), "vocab"),
        ("train --data {} --output new", ("data/manifest.json",), "data"),
    ],
)
def test_run_folder_error_names_the_folder_in_it(
    tmp_path: Path,
    data_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    files: tuple[str, ...],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(files):
        (tmp_path / name).parent.mkdir(parents=True)
        content = (data_folder / "manifest.json").read_text() if "manifest" in name else "{}"
        (tmp_path / name).write_text(content)
        os.utime((tmp_path / name).parent, (number, number))
    result = CliRunner().invoke(app, command.format(tmp_path).split())
    assert result.exit_code == 2
    assert re.search(rf"did you mean \S+{expected}\?", " ".join(result.output.split()))
