"""Documents from every format, compression and layout, and errors for invalid files."""

import bz2
import csv
import errno
import gzip
import io
import json
import lzma
import os
import random
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from bert_pretrain.config import DataConfig
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.io.manifest import Output
from bert_pretrain.text import documents, readers, sources, text_files
from bert_pretrain.text.documents import cut, read
from bert_pretrain.text.reasons import describe_reasons, join_reasons
from bert_pretrain.text.sources import Source, finer_boundary, resolve
from tests.conftest import claim

TEXTS = ["The first one.\nIt has two lines.", 'Zwei: "Größe", 3.', "第三个文档。\n它也有两行。", "Last 🙂."]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lambda content: lzma.compress(content[:9]) + lzma.compress(content[9:]),  # two streams
    ".zst": lambda content: pa.Codec("zstd").compress(content, asbytes=True),
}


def as_jsonl(texts: Sequence[str]) -> bytes:
    return b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n" for text in texts)


def as_csv(texts: Sequence[str]) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerows([["id", "text"], *([1, text] for text in texts)])
    return file.getvalue().encode()


def as_parquet(texts: Sequence[str]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), sink)
    return bytes(sink.getvalue())


FORMATS: dict[str, Callable[[Sequence[str]], bytes]] = {
    ".txt": lambda texts: "\n\n".join(texts).encode() + b"\n",
    ".jsonl": as_jsonl,
    ".json": as_jsonl,
    ".ndjson": as_jsonl,
    ".csv": as_csv,
    ".parquet": as_parquet,
}


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def sources_of(*inputs: object, **settings: Any) -> list[Source]:
    """Return the sources of some inputs. Their documents end at blank lines, unless `settings` say otherwise."""
    return resolve([str(item) for item in inputs], config_of(settings))


def config_of(settings: dict[str, Any]) -> DataConfig:
    return DataConfig(**{"document_boundary": "blank_line", **settings})


def read_all(*inputs: object, **settings: Any) -> tuple[list[str], Counter[str]]:
    """Return the documents of some inputs, and what was counted."""
    config = config_of(settings)
    counts: Counter[str] = Counter()
    texts, held = [], ""
    for source in sources_of(*inputs, **settings):
        for part in cut(source, documents.PART_BYTES):
            for passage in read(part, config, counts):
                held += passage.text
                if passage.ends_document:
                    # Blanks at the ends of a document mean nothing; a file as a whole keeps them.
                    texts.append(held if config.document_boundary == "file" else held.strip(" \t\r\n\u00a0\u3000"))
                    held = ""
    assert not held
    return texts, +counts


def refusal(*inputs: object, **settings: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        read_all(*inputs, **settings)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("ending", FORMATS)
def test_every_format_and_compression_gives_the_same_documents(tmp_path: Path, ending: str, compression: str) -> None:
    path = write(tmp_path / f"a{ending}{compression}", COMPRESS[compression](FORMATS[ending](TEXTS)))
    assert read_all(path) == (TEXTS, Counter())
    if compression and ending == ".jsonl":  # files made by concatenation are read to the end
        halves = [COMPRESS[compression](as_jsonl(half)) for half in (TEXTS[:2], TEXTS[2:])]
        assert read_all(write(path, b"".join(halves)))[0] == TEXTS


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("ending", [".txt", ".csv", ".parquet"])
def test_damaged_compressed_file_is_named_in_the_error(tmp_path: Path, ending: str, compression: str) -> None:
    draw = random.Random(1)
    plain = FORMATS[ending](["".join(draw.choices("abcdefgh ", k=40)) for _ in range(2000)])
    whole = COMPRESS[compression](plain)
    half = len(whole) // 2
    damaged = [whole[:half], plain]
    if compression != ".zst":  # whose checksum is optional
        damaged.append(whole[:half] + bytes(64) + whole[half + 64 :])
    path = tmp_path / f"a{ending}{compression}"
    for content in damaged:
        assert str(path) in refusal(write(path, content)).where


def test_a_full_disk_is_not_a_damaged_file(tmp_path: Path) -> None:
    (source,) = sources_of(write(tmp_path / "a.txt", "text"))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # of a copy that is written while the file is read
    assert sources.damaged(source, full) is full
    assert isinstance(sources.damaged(source, OSError(errno.EIO, "error")), InputError)


def test_folders_globs_and_urls_find_files_in_a_fixed_order(tmp_path: Path, capsys) -> None:
    for name in ("b.txt", "sub/c.txt", "README.md", ".x/._e.txt"):
        write(tmp_path / name, name)
    write(tmp_path / "a.jsonl", as_jsonl(["a.jsonl"]))
    write(tmp_path / "sub/deep/d.txt.gz", gzip.compress(b"d"))
    write(tmp_path / "empty.txt", "")
    assert read_all(tmp_path)[0] == ["a.jsonl", "b.txt", "sub/c.txt", "d"]
    assert read_all(f"{tmp_path}/*.txt")[0] == ["b.txt"]
    assert capsys.readouterr().out.count(f"{tmp_path}/empty.txt") == 2
    assert read_all(f"{tmp_path}/**/*.txt*")[0] == ["b.txt", "sub/c.txt", "d"]
    assert read_all(f"file://{tmp_path}/*.txt", f"file://{tmp_path}/a.jsonl")[0] == ["b.txt", "a.jsonl"]


def test_what_is_not_read_of_a_folder_is_printed(tmp_path: Path, capsys) -> None:
    texts = {"B.TXT": "two", "a.txt": "one", "other/d.txt": "three", "other/time.json": '{"text": "noon"}'}
    texts |= {"sub/manifest.json": '{"text": "a manifest of others"}', "auto/plan.yaml": "", "timed/time.json": "{}"}
    texts |= dict.fromkeys(("auto/forecast.json", "auto/machine.json", "auto/time.json"), "{}")
    for name, text in texts.items():
        write(tmp_path / name, text)
    for name, kind in (("vocab", "vocab"), ("deep/data", "data"), ("timed/vocab", "vocab")):
        claim(tmp_path / name, kind)
        write(tmp_path / name / "train" / "vocab.txt", b"[PAD]\n")
    Output(tmp_path / "vocab", "vocab", {"seed": 1}).publish({})
    (tmp_path / "b.txt").symlink_to("a.txt")
    (tmp_path / "c.txt").symlink_to("nothing")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    assert read_all(tmp_path)[0] == ["two", "one", "three", "noon", "a manifest of others"]
    printed = capsys.readouterr().out
    assert f"not read: 7 outputs of bert-pretrain (first: {tmp_path}/vocab)" in printed
    assert f"not read: 1 links to other files of the folder (first: {tmp_path}/b.txt)" in printed
    assert "not read: 2 links to folders or to nothing (first: " in printed
    assert read_all(tmp_path / "vocab" / "train")[0] == ["[PAD]"]  # if named, it is meant


def test_detection_is_independent_of_the_number_of_tasks(tmp_path: Path, monkeypatch) -> None:
    for number in range(7):
        text = "One line.\nAnd another.\nA third.\n" * (number + 1)
        write(tmp_path / f"{number}.txt", text.encode(("utf-8", "utf-16")[number % 2]))
    settings = {"encoding": "auto", "document_boundary": "auto"}
    alone = sources_of(tmp_path, **settings)
    monkeypatch.setattr(sources, "SOURCES_PER_TASK", 2)
    assert sources_of(tmp_path, **settings) == alone
    assert len({source.encoding for source in alone}) == 2
    assert {source.splitter for source in alone} == {"lines"}
    write(tmp_path / "5.txt.gz", b"no gzip")
    with pytest.raises(InputError, match=r"5\.txt\.gz"):
        sources_of(tmp_path, **settings)


def test_files_of_unclear_layout_follow_the_other_files(tmp_path: Path, monkeypatch) -> None:
    for number in range(24):
        num_long = 2 if number else 5
        block = "a transcript of speech\n" * num_long + "yes\n" * (8 - num_long) + "\n"
        write(tmp_path / f"{number:02}.txt", block * 10)
    write(tmp_path / "short.txt", "no marks\nand no blank line\nat all\n")
    write(tmp_path / "other.txt", "One sentence. And another one.\n\n" * 30)
    write(tmp_path / "rows.jsonl", as_jsonl(TEXTS))
    (alone,) = sources_of(tmp_path / "00.txt", document_boundary="auto")
    assert alone.boundary == "file"
    for per_task in (1000, 5):
        monkeypatch.setattr(sources, "SOURCES_PER_TASK", per_task)
        found = sources_of(tmp_path, document_boundary="auto")
        others = {os.path.basename(source.location): source.boundary for source in found if source.splitter != "lines"}
        assert others == {"other.txt": "file", "rows.jsonl": "record"}


def test_an_input_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    for name in ("a.tar.gz", "a.zip", "a.txt.7z"):
        assert "archive" in refusal(write(tmp_path / name, b"PK")).remedy
    os.mkfifo(tmp_path / "pipe.txt")
    for location in (tmp_path / "pipe.txt", "/dev/null"):
        assert "pipe or device" in refusal(location).remedy
    frame = b"\x28\xb5\x2f\xfd\0\x90" + (5 << 3 | 1).to_bytes(3, "little") + b"hello"  # with a window of 256 MiB
    assert "128 MiB" in refusal(write(tmp_path / "a.txt.zst", frame)).remedy


@pytest.mark.parametrize("second", ["sub/../a.txt", "link.txt", "*.txt"])
def test_an_input_given_twice_is_refused(tmp_path: Path, second: str) -> None:
    write(tmp_path / "a.txt", FORMATS[".txt"](TEXTS))
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    assert "twice" in refusal(tmp_path / "a.txt", os.path.join(tmp_path, second)).what


HOSTILE_TXT = {
    "line ends of Windows": (b"a b.\r\nc.\r\n\r\nd.\r\n", ["a b.\r\nc.", "d."]),
    "blank lines with blanks": (
        "a.\n \t \nb.\n\r\nc.\n\u00a0\nd.\n\u3000 \ne.".encode(),
        ["a.", "b.", "c.", "d.", "e."],
    ),
    "many blank lines": (b"\n\n\na.\n\n \n\n\n\nb.\n\n\n", ["a.", "b."]),
    "a byte order mark": (b"\xef\xbb\xbfa.\n\nb.", ["a.", "b."]),
    "joined files with byte order marks": (b"\xef\xbb\xbfa.\n\n\xef\xbb\xbfb.\n\xef\xbb\xbf\nc.", ["a.", "b.", "c."]),
    "a form feed ends no document": (b"a.\n\x0c\nb.\n\nc.", ["a.\n\x0c\nb.", "c."]),
    "NUL and other controls": (b"a\x00b\x1bc.\n\nd.", ["a\x00b\x1bc.", "d."]),
    "no line end at the end": ("ä".encode(), ["ä"]),
}


@pytest.mark.parametrize(("content", "texts"), HOSTILE_TXT.values(), ids=HOSTILE_TXT)
def test_txt_oddities(tmp_path: Path, content: bytes, texts: list[str]) -> None:
    assert read_all(write(tmp_path / "a.txt", content)) == (texts, Counter())


@pytest.mark.parametrize("compression", ["", ".gz"])
@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".csv"])
def test_invalid_utf8_is_replaced_and_counted_or_refused_by_line(tmp_path, ending, compression, monkeypatch) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 1000)
    texts = [f"text number {number}" for number in range(500)]
    texts[7] = "a real \ufffd"
    content = FORMATS[ending](texts).replace(b"number 400", b"number \xff\xfe00")
    path = write(tmp_path / f"a{ending}{compression}", COMPRESS[compression](content))
    texts[400] = "text number \ufffd\ufffd00"
    assert read_all(path) == (texts, Counter(invalid_utf8_characters=2))
    line = content[: content.index(b"\xff\xfe")].count(b"\n") + 1
    assert refusal(path, strict=True).where == f"{path}: line {line}"


@pytest.mark.parametrize(
    ("line", "strict"),
    [
        ("{broken", False),
        ('{"text": "a"} {"text": "b"}', False),
        ("5", True),
        ('{"text": ["a"]}', True),
        ('{"text": null}', True),
        ("{}", True),
    ],
)
def test_invalid_jsonl_is_refused_with_file_and_line(tmp_path, line, strict, monkeypatch) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 128)
    good = as_jsonl(["a"] * 50).decode()
    path = write(tmp_path / "a.jsonl", f"\n{good}\r\n{line}\n{good}")
    for part_bytes in (documents.PART_BYTES, 300):
        monkeypatch.setattr(documents, "PART_BYTES", part_bytes)
        assert refusal(path, strict=strict).where == f"{path}: line 53"


@pytest.mark.parametrize("line", ["5", '["a"]', '{"text": 12345}', '{"text": ["a"]}', '{"text": {"a": "b"}}'])
def test_records_whose_text_is_not_a_string_are_skipped_and_counted(tmp_path, line) -> None:
    path = write(tmp_path / "a_b.jsonl", as_jsonl(["a"]) + f"{line}\n".encode() + as_jsonl(["a"]) * 199 + line.encode())
    texts, counts = read_all(path)
    assert (texts, describe_reasons(counts)) == (
        ["a"] * 200, [f"2 records whose text is not a string (first: {path}: line 2)"]
    )  # fmt: skip
    readers.check_texts(counts, 200)
    with pytest.raises(InputError, match="2 of 190 records") as caught:
        readers.check_texts(counts, 188)
    assert caught.value.where == f"{path}: line 2"
    again = Counter({f"{readers.NON_STRING} (first: b: line 1)": 3})
    assert join_reasons(counts + again) == {next(iter(counts)): 5}


def test_odd_values_of_json_and_csv(tmp_path: Path) -> None:
    lines = ['{"text": null}', '{"text": ""}', '{"text": " \\n"}', '{"text": "half \\ud83d a pair"}', '{"text": "ok"}']
    found, counts = read_all(write(tmp_path / "a.jsonl", "\n".join(lines)))
    assert found == ["half ? a pair", "ok"]
    assert counts == {"empty_documents": 3, "documents_with_lone_surrogates": 1}
    path = write(tmp_path / "a.csv", b'\xef\xbb\xbftext,n\r\n"a\r\n""b""",1\r\n\r\nshort\r\n,4\r\n')
    assert read_all(path) == (['a\r\n"b"', "short"], Counter(empty_documents=1, blank_lines=1))
    path = write(tmp_path / "b.csv", b'n,text\n1,"two\nlines"\n2,"a"b\n3,more\n')
    assert refusal(path).where == f"{path}: line 4"


def test_records_without_the_text_field_are_skipped_and_counted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(readers, "MAX_WITHOUT_FIELD", 20)
    without = b'{"title": "a"}\n'
    path = write(tmp_path / "a.jsonl", without * 19 + as_jsonl(TEXTS) + without * 500 + b'{"text": null}\n')
    for part_bytes in (documents.PART_BYTES, 1000):  # in a later part, all records may be without
        monkeypatch.setattr(documents, "PART_BYTES", part_bytes)
        assert read_all(path) == (TEXTS, Counter(records_without_text_field=519, empty_documents=1))
    error = refusal(write(tmp_path / "b.jsonl", without * 20 + as_jsonl(TEXTS)))
    assert "title" in error.what
    assert error.where == f"{tmp_path}/b.jsonl: line 1"


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
def test_several_text_fields_are_joined_by_blank_lines(tmp_path: Path, ending: str) -> None:
    rows = [{"subject": "One", "n": "1", "body": "Two.\nThree."}, {"subject": None, "n": "2", "body": "Four."}]
    path, table = tmp_path / f"a{ending}", pa.Table.from_pylist(rows)
    if ending == ".parquet":
        pq.write_table(table, path)
    elif ending == ".csv":
        pa.csv.write_csv(table, path)
    else:
        write(path, json.dumps([rows[0], {"body": "Four."}]) if ending == ".json" else "\n".join(map(json.dumps, rows)))
    assert read_all(path, text_field=("subject", "body")) == (["One\n\nTwo.\nThree.", "Four."], Counter())
    assert read_all(path, text_field=("body", "title"))[0][1] == "Four."  # where inputs differ
    assert "body" in refusal(path, text_field=("title", "summary")).what


def test_odd_parquet_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    large, coded = pa.array(TEXTS, pa.large_string()), pa.array(TEXTS).dictionary_encode()
    for column in (large, coded, [None, *TEXTS, None, "  "]):
        pq.write_table(pa.table({"text": column}), path, row_group_size=2)
        assert read_all(path)[0] == TEXTS
    for value, kind in ((b"a", "bytes"), (["a"], "list")):
        pq.write_table(pa.table({"text": [value]}), path)
        assert f"text ({kind})" in refusal(path).what
    pq.write_table(pa.table({"text": ["a"] * 5 + ["b"], "n": range(6)}), path)
    for strict in (False, True):
        what = refusal(path, text_field="n", strict=strict).what
        assert "none of the first 6 records has a string" in what


@pytest.mark.parametrize("layout", ["lines", "paragraphs", "wrapped"])
@pytest.mark.parametrize("language", ["en", "zh", "auto"])
def test_layout_is_detected(tmp_path: Path, english_documents, chinese_documents, language, layout: str) -> None:
    sentences, joint = (english_documents, " ") if language == "en" else (chinese_documents, "")
    texts = [("\n" if layout == "lines" else joint).join(document) for document in sentences]
    if layout == "wrapped":  # Chinese has no blanks to break at
        texts = [textwrap.fill(text, 72 if joint else 35) for text in texts]
    path = write(tmp_path / "a.txt", "\n\n".join(texts) + "\n")
    (source,) = sources_of(path, language=language, document_boundary="auto")
    expected = ("blank_line", "lines") if layout == "lines" else ("file", "sentencex")
    assert (source.boundary, source.splitter) == expected
    (source,) = sources_of(path, document_boundary="line", sentence_splitter="sentencex")
    assert (source.boundary, source.splitter) == ("line", "sentencex")


ENDS = ["\n"] * 5 + ["\n\n"] * 3
ENDS += ["\r\n", "\n \t\n", "\n\n\n", "\n\r\n", "\n\x0c\n", "\n\u3000\n", "\n\u00a0\n", "\x0b\n", "\n" * 9]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_cutting_a_file_into_parts_keeps_its_documents(tmp_path, monkeypatch, seed, kind) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice("字a é") * draw.randint(0, 40) + draw.choice(ENDS) for _ in range(400))
    path = write(tmp_path / f"a{kind}", text if kind == ".txt" else as_jsonl(text.split("\n")))
    (source,) = sources_of(path)
    assert len(cut(source, documents.PART_BYTES)) == 1
    whole = read_all(path)
    for part_bytes, block_bytes in [(300, 1 << 20), (1000, 64), (77, 100)]:
        monkeypatch.setattr(documents, "PART_BYTES", part_bytes)
        monkeypatch.setattr(text_files, "BLOCK_BYTES", block_bytes)
        parts = cut(source, part_bytes)
        assert len(parts) > 5
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == path.stat().st_size
        assert read_all(path) == whole


def test_fraction_of_small_files_is_read(tmp_path: Path) -> None:
    text = "A line of text.\n\n" * 60_000
    for name in ("a.txt", "b.txt"):
        write(tmp_path / name, text)
    parts = [part for source in sources_of(tmp_path, fraction=0.25) for part in cut(source, documents.PART_BYTES)]
    assert sum(part.num_bytes for part in parts) == pytest.approx(0.25 * 2 * len(text), rel=0.05)


def test_document_boundary_can_be_set_for_one_input(tmp_path: Path) -> None:
    prose, lines = write(tmp_path / "prose.txt", "One. Two.\n\nThree.\n"), write(tmp_path / "lines.txt", "ACGT\nACCT\n")
    boundary = load_config(settings=[f"data.document_boundary={lines}=line"]).data.document_boundary
    found = sources_of(prose, lines, document_boundary=boundary)
    assert [source.boundary for source in found] == ["file", "line"]
    assert "blank_line" in finer_boundary(found)
    assert finer_boundary(found[1:]) == ""  # nothing divides lines
    with pytest.raises(ConfigError, match="not an input"):
        sources_of(prose, document_boundary=boundary)
    empty = write(tmp_path / "folder" / "empty.txt", "")  # is not read
    write(tmp_path / "folder" / "a.txt", "alone")
    assert read_all(tmp_path / "folder", document_boundary={str(empty): "line"})[0] == ["alone"]


def test_a_pattern_reads_folders_and_links_to_nothing_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "One.")
    write(tmp_path / "1990s" / "b.txt", "Two.")
    write(tmp_path / "pictures" / "x.png", "")
    write(tmp_path / "output" / "vocab.txt", "[PAD]\n")
    write(tmp_path / "output" / "manifest.json", json.dumps({"kind": "vocab", "identity": {}}))
    # Neither an output nor a folder without text is read.
    assert read_all(f"{tmp_path}/*")[0] == ["Two.", "One."]
    (tmp_path / "d.txt").symlink_to("nothing")
    assert "neither a file nor a folder" in refusal(f"{tmp_path}/*").what
