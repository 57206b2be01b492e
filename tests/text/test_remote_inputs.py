"""Inputs by URL, from a server on localhost."""

import http.server
import re
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import InputError, OutputError
from bert_pretrain.make_data.run import make_data
from bert_pretrain.text import documents
from bert_pretrain.vocab.run import make_vocab
from tests.conftest import one_sentence_a_line

from .test_documents import COMPRESS, FORMATS, TEXTS, read_all, refusal, sources_of


class Server(http.server.ThreadingHTTPServer):
    """A web server with files in memory and configurable failures."""

    sends_parts = True
    changes_after_gets = 1 << 30
    missing_bytes = 0
    status = 200
    num_gets = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.headers = {"ETag": '"1"'}
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, name = self.server, self.path.removeprefix("/")
        server.num_gets += self.command == "GET"
        if name not in server.files or server.status != 200:
            self.send_error(404 if server.status == 200 else server.status)
            return
        content, status, headers = server.files[name], 200, dict(server.headers)
        if server.num_gets > server.changes_after_gets:
            headers["ETag"] = '"2"'
        if server.sends_parts:
            headers["Accept-Ranges"] = "bytes"
            if asked := self.headers.get("Range"):
                first, last = asked.removeprefix("bytes=").split("-")
                end = min(int(last or len(content)), len(content) - 1)
                headers["Content-Range"] = f"bytes {first}-{end}/{len(content)}"
                content, status = content[int(first) : end + 1], 206
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) - server.missing_bytes])

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("sends_parts", [True, False], ids=["parts of files", "whole files only"])
def test_every_format_and_compression_is_read_from_a_server(server: Server, sends_parts: bool) -> None:
    server.sends_parts = sends_parts
    for ending, write in FORMATS.items():
        for compression, compress in COMPRESS.items():
            name = f"a{ending}{compression}"
            server.files[name] = compress(write(TEXTS))
            assert read_all(f"{server.url}/{name}") == (TEXTS, Counter()), name


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_large_remote_file_is_cut_into_parts(server, monkeypatch, ending) -> None:
    texts = [f"Document {number}." + f" {number}" * 1000 for number in range(4000)]
    server.files["a" + ending] = FORMATS[ending](texts)
    monkeypatch.setattr(documents, "PART_BYTES", len(server.files["a" + ending]) // 80)
    assert read_all(f"{server.url}/a{ending}")[0] == texts
    (source,) = sources_of(f"{server.url}/a{ending}")
    assert len(documents.cut(source, documents.PART_BYTES)) > 3


@pytest.mark.parametrize("headers", [{"ETag": '"1"', "Last-Modified": "now"}, {}])
def test_version_of_a_remote_file_is_its_etag_or_reported_missing(server: Server, capsys, headers) -> None:
    server.headers, server.files["a.txt"] = headers, FORMATS[".txt"](TEXTS)
    (source,) = sources_of(f"{server.url}/a.txt")
    assert (source.size, source.version) == (len(server.files["a.txt"]), 'ETag:"1"' if headers else "")
    assert ("no version" in capsys.readouterr().out) == (not headers)
    for status in (200, 403, 500):
        server.status = status  # 200: it lives, but has no such file
        assert refusal(f"{server.url}/b.txt").where == f"{server.url}/b.txt"


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".csv", ".parquet", ".txt.gz", ".jsonl.zst"])
@pytest.mark.parametrize("sends_parts", [True, False])
def test_broken_connection_is_reported_with_the_url(server: Server, ending: str, sends_parts: bool) -> None:
    server.sends_parts, server.missing_bytes = sends_parts, 7
    kind, compression = re.fullmatch(r"(\.\w+)(\.\w+)?", ending).groups(default="")
    server.files["a" + ending] = COMPRESS[compression](FORMATS[kind](TEXTS))
    url = f"{server.url}/a{ending}"
    assert url in refusal(url).where


SETTINGS = ["data.max_seq_length=32", "data.dupe_factor=1", "data.document_boundary=blank_line"]


def test_changed_remote_file_is_refused(server, tmp_path, english_documents, vocab_folder) -> None:
    server.files["english.txt"] = one_sentence_a_line(english_documents[:20]).encode()
    config, inputs = load_config(settings=SETTINGS), [f"{server.url}/english.txt"]
    data = make_data(config, inputs, vocab_folder, tmp_path / "there" / "data", workers=1)
    server.headers = {"ETag": '"1.5"'}
    with pytest.raises(OutputError, match="version"):
        make_data(config, inputs, vocab_folder, data, workers=1)
    server.changes_after_gets = 1
    for run, more in ((make_vocab, ()), (make_data, (vocab_folder,))):
        server.num_gets = 0
        with pytest.raises(InputError, match="changed while it was read"):
            run(config, inputs, *more, tmp_path / run.__name__, workers=1)
    assert not list((tmp_path / ".token-store").glob("*/part-*"))
