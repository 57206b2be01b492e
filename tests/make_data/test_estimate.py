"""A dry run estimates the real run from a sample, and writes nothing."""

import gzip
import json
import random
import re
from pathlib import Path

import pytest

from bert_pretrain.config import Config, DataConfig
from bert_pretrain.config_file import load_config
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.make_data import estimate as module
from bert_pretrain.make_data.estimate import Estimate, estimate, sample_source
from bert_pretrain.make_data.run import make_data
from bert_pretrain.text import documents, sources
from bert_pretrain.text.sources import resolve
from bert_pretrain.text.tokenizer import Tokenizer
from tests.text.test_documents import COMPRESS, FORMATS, as_jsonl, write


def estimated(config: Config, inputs: list[str], vocab: Path) -> Estimate:
    return estimate(config, resolve(inputs, config.data), Tokenizer.load(vocab))


def corpus(number: int) -> list[str]:
    draw = random.Random(5)
    words = ["file", "list", "return", "string", "object", "value", "module", "class"]
    return [
        "\n".join(" ".join(draw.choices(words, k=draw.randint(4, 14))) + "." for _ in range(draw.randint(4, 20)))
        for _ in range(number)
    ]


WHOLE, SAMPLE = 1 << 24, 40_000


def make_and_compare(
    found: Estimate, config: Config, inputs: list[str], vocab: Path, rel: float, rel_rows: float
) -> DataFolder:
    """Make the data, compare it with the estimate, and return it."""
    data = DataFolder.open(make_data(config, inputs, vocab, Path(inputs[0]).parent / "data", workers=1))
    times_seen = data.manifest["splits"]["train"]["statistics"]["times_text_is_seen"]
    assert found.documents == pytest.approx(data.manifest["corpus"]["documents"], rel=rel)
    assert found.tokens == pytest.approx(data.manifest["corpus"]["tokens"], rel=rel)
    assert found.rows == pytest.approx(data.rows("train"), rel=rel_rows)
    assert found.times_seen == pytest.approx(times_seen, rel=0.1)
    return data


@pytest.mark.parametrize(
    ("ending", "compression", "sample"),
    [
        (".txt", "", WHOLE),
        (".txt", ".gz", WHOLE),
        *((ending, "", SAMPLE) for ending in (".txt", ".jsonl", ".csv", ".parquet")),
        *((".txt", compression, SAMPLE) for compression in (".gz", ".bz2", ".xz", ".zst")),
        (".json", ".gz", SAMPLE),
    ],
)
def test_the_estimate_is_close_to_a_real_run(tmp_path, vocab_folder, monkeypatch, ending, compression, sample) -> None:
    monkeypatch.setattr(module, "SAMPLE_BYTES", sample)
    array = json.dumps([{"text": text, "n": [{}]} for text in corpus(400)], indent=1).encode()
    content = array if ending == ".json" else FORMATS[ending](corpus(400))
    path = write(tmp_path / f"a{ending}{compression}", COMPRESS[compression](content))
    settings = [f"data.input_weights={{{path}: 1.5}}", "data.max_seq_length=64", "data.validation_fraction=0"]
    config = load_config(settings=[*settings, "data.strict=yes"])
    found = estimated(config, [str(path)], vocab_folder)
    assert list(tmp_path.iterdir()) == [path]
    exact = 0.02 if sample == WHOLE else 0.25
    data = make_and_compare(found, config, [str(path)], vocab_folder, exact, exact + 0.03)
    store = sum(file.stat().st_size for file in (tmp_path / ".token-store").rglob("*.npy"))
    assert found.shard_bytes == pytest.approx(sum(each.bytes for each in data.shards("train")), rel=exact + 0.1)
    assert found.store_bytes == pytest.approx(store, rel=exact)
    assert found.core_seconds > 0


def test_equal_inputs_are_counted_once(tmp_path, vocab_folder, monkeypatch) -> None:
    for number, text in enumerate(corpus(150)):
        write(tmp_path / "texts" / "a" / f"{number:03}.txt", text)
        write(tmp_path / "texts" / "b" / f"{number:03}.txt", text)
    monkeypatch.setattr(module, "SAMPLE_BYTES", SAMPLE)
    inputs, config = [str(tmp_path / "texts")], load_config(settings=["data.max_seq_length=64"])
    data = make_and_compare(estimated(config, inputs, vocab_folder), config, inputs, vocab_folder, 0.15, 0.15)
    assert data.manifest["corpus"]["documents"] == 300


def test_parts_that_are_read_and_held_out_are_estimated(tmp_path, vocab_folder) -> None:
    path = write(tmp_path / "a.csv", FORMATS[".csv"](corpus(400)))  # cannot be cut
    settings = ["data.fraction=0.1", "data.validation_fraction=0.5", "data.max_seq_length=64"]
    config = load_config(settings=settings)
    make_and_compare(estimated(config, [str(path)], vocab_folder), config, [str(path)], vocab_folder, 0.02, 0.1)


def test_a_sample_of_one_document_is_scaled_to_several(tmp_path, vocab_folder, monkeypatch) -> None:
    long = " ".join(f"Sentence number {number} of one long text." for number in range(400))
    path = write(tmp_path / "a.jsonl", as_jsonl([f"{long} {number}" for number in range(8)]))
    config = load_config(settings=["data.max_seq_length=64", "data.validation_fraction=0"])
    whole = estimated(config, [str(path)], vocab_folder)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 10)
    assert estimated(config, [str(path)], vocab_folder).rows == pytest.approx(whole.rows, rel=0.15)


def test_a_document_longer_than_the_sample_counts_as_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(documents, "MAX_CHARACTERS", 1000)
    path = tmp_path / "long.parquet"
    path.write_bytes(FORMATS[".parquet"](["word " * 1000, "short", "short"]))
    config = DataConfig()
    (source,) = resolve([str(path)], config)
    assert sample_source(source, tmp_path / "sample", 10, config)[1] == pytest.approx(1 / 3)


def test_the_fraction_counts_only_where_an_input_is_cut(tmp_path: Path) -> None:
    text = "\n\n".join(corpus(300)).encode() * 10
    sizes = {"small.txt": text[:100_000], "large.txt": text, "packed.txt.gz": gzip.compress(text)}
    config = DataConfig(fraction=0.1)
    found = {}
    for name, content in sizes.items():
        (tmp_path / name).write_bytes(content)
        (source,) = resolve([str(tmp_path / name)], config)
        found[name] = (source.fraction_read, len(documents.cut(source, 1 << 25)))
    assert {name: share for name, (share, _) in found.items()} == {"small.txt": 1, "large.txt": 0.1, "packed.txt.gz": 1}
    assert [number for _, number in found.values()] == [1, 2, 1]


@pytest.mark.parametrize("ending", [".json", ".csv"])
def test_a_dry_run_detects_the_format_of_its_samples(tmp_path, vocab_folder, ending: str) -> None:
    rows = [{"id": 1, "text": text} for text in corpus(40)]
    path = tmp_path / f"a{ending}"
    if ending == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("id;text\n" + "".join(f'1;"{row["text"]}"\n' for row in rows))
    make_data(load_config("tiny"), [str(path)], vocab_folder, tmp_path / "data", dry_run=True)
    assert not (tmp_path / "data").exists()


def test_a_dry_run_opens_few_of_many_small_files(tmp_path, vocab_folder, monkeypatch, capsys) -> None:
    for number, text in enumerate(corpus(300)):
        write(tmp_path / "texts" / f"{number:03}.txt", text)
    monkeypatch.setattr(module, "MAX_SOURCES", 60)
    opened, open_input = [], sources.open_input
    monkeypatch.setattr(sources, "open_input", lambda location: (opened.append(location), open_input(location))[1])
    inputs, config = [str(tmp_path / "texts")], load_config(settings=["data.dupe_factor=3", "data.max_seq_length=64"])
    make_data(config, inputs, vocab_folder, tmp_path / "data", dry_run=True)
    assert len(set(opened)) < 100
    found = dict(re.findall(r"(training|token of the text) +([\d.,]+)", capsys.readouterr().out))
    data = DataFolder.open(make_data(config, inputs, vocab_folder, tmp_path / "data", workers=1))
    times_seen = data.manifest["splits"]["train"]["statistics"]["times_text_is_seen"]
    assert float(found["training"].replace(",", "")) == pytest.approx(data.rows("train"), rel=0.15)
    assert float(found["token of the text"]) == pytest.approx(times_seen, rel=0.15)
    assert times_seen > 3.1


def test_a_dry_run_writes_nothing_and_warns_like_a_real_run(tmp_path: Path, vocab_folder: Path, capsys) -> None:
    texts = [f"Number {n} ① ㎏ ① 語. Second sentence of it.\n\n{n} is alone." for n in range(300)]
    path = write(tmp_path / "a.txt", "\n\n".join(texts) + "\n")
    settings = ["data.document_boundary=blank_line", "data.next_sentence=sop", "data.validation_fraction=0.1"]
    config = load_config(settings=["data.max_seq_length=32", "data.dupe_factor=1", *settings])
    make_data(config, [str(path)], vocab_folder, tmp_path / "data", workers=1, dry_run=True)
    dry, bar = capsys.readouterr()
    assert "100%" in bar
    assert list(tmp_path.iterdir()) == [path]
    data = DataFolder.open(make_data(config, [str(path)], vocab_folder, tmp_path / "data", workers=1))
    for printed in (dry, capsys.readouterr().out):
        assert "[UNK]; check" in printed
        assert "many documents are a single sentence" in printed
    found = int(re.search(r"; ([\d,]+) for validation", dry)[1])
    assert found == pytest.approx(data.rows("validation"), rel=0.3)
