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
from bert_pretrain.make_data import assignment, run
from bert_pretrain.make_data.run import make_data
from bert_pretrain.text import corpus as corpora
from bert_pretrain.text import documents
from bert_pretrain.text.corpus import Corpus, copy_start
from bert_pretrain.text.sources import resolve
from bert_pretrain.vocab.run import make_vocab
from tests.text.test_documents import COMPRESS, FORMATS, write

NUMBERS = {  # of the printed estimate
    "documents": r"corpus +([\d,.]+) documents",
    "tokens": r"documents, ([\d,.]+) tokens",
    "rows": r"training +([\d,.]+) examples",
    "held_out": r"; ([\d,.]+) for validation",
    "times_seen": r"token of the text ([\d,.]+) times",
    "shard_mb": r"disk +([\d,.]+) MB of shards",
    "store_mb": r"([\d,.]+) MB of token store",
}
WHOLE, SAMPLE = 1 << 24, 40_000


def corpus(number: int) -> list[str]:
    draw = random.Random(5)
    words = ["file", "list", "return", "string", "object", "value", "module", "class"]
    return [
        "\n".join(" ".join(draw.choices(words, k=draw.randint(4, 14))) + "." for _ in range(draw.randint(4, 20)))
        for _ in range(number)
    ]


def estimated(config: Config, inputs: list[str], vocab: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    """Return the numbers that a dry run prints."""
    output = Path(inputs[0]).parent / "data"
    make_data(config, inputs, vocab, output, workers=1, dry_run=True)
    assert not output.exists()
    printed = capsys.readouterr().out
    return {name: float(re.search(pattern, printed)[1].replace(",", "")) for name, pattern in NUMBERS.items()}


def make_and_compare(
    found: dict[str, float], config: Config, inputs: list[str], vocab: Path, rel: float, rel_rows: float
) -> DataFolder:
    """Make the data, compare it with the estimate, and return it."""
    data = DataFolder.open(make_data(config, inputs, vocab, Path(inputs[0]).parent / "data", workers=1))
    times_seen = data.manifest["splits"]["train"]["statistics"]["times_text_is_seen"]
    assert found["documents"] == pytest.approx(data.manifest["corpus"]["documents"], rel=rel)
    assert found["tokens"] == pytest.approx(data.manifest["corpus"]["tokens"], rel=rel)
    assert found["rows"] == pytest.approx(data.rows("train"), rel=rel_rows)
    assert found["held_out"] == pytest.approx(data.rows("validation"), rel=0.35, abs=1)
    assert found["times_seen"] == pytest.approx(times_seen, rel=0.1)
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
def test_the_estimate_is_close_to_a_real_run(
    tmp_path, vocab_folder, monkeypatch, capsys, ending, compression, sample
) -> None:
    monkeypatch.setattr(run, "SAMPLE_BYTES", sample)
    array = json.dumps([{"text": text, "n": [{}]} for text in corpus(400)], indent=1).encode()
    content = array if ending == ".json" else FORMATS[ending](corpus(400))
    path = write(tmp_path / f"a{ending}{compression}", COMPRESS[compression](content))
    settings = [f"data.input_weights={{{path}: 1.5}}", "data.max_seq_length=64", "data.validation_fraction=0"]
    config = load_config(settings=[*settings, "data.strict=yes"])
    found = estimated(config, [str(path)], vocab_folder, capsys)
    assert list(tmp_path.iterdir()) == [path]
    exact = 0.02 if sample == WHOLE else 0.25
    data = make_and_compare(found, config, [str(path)], vocab_folder, exact, exact + 0.03)
    store_bytes = sum(file.stat().st_size for file in (tmp_path / ".token-store").rglob("*.npy"))
    shard_bytes = sum(each.bytes for each in data.shards("train"))
    assert found["shard_mb"] == pytest.approx(shard_bytes / 1e6, rel=exact + 0.15)
    assert found["store_mb"] == pytest.approx(store_bytes / 1e6, rel=exact, abs=0.06)


def test_parts_that_are_read_and_held_out_are_estimated(tmp_path, vocab_folder, capsys) -> None:
    path = write(tmp_path / "a.csv", FORMATS[".csv"](corpus(400)))  # cannot be cut
    settings = ["data.fraction=0.1", "data.validation_fraction=0.5", "data.max_seq_length=64"]
    config = load_config(settings=settings)
    found = estimated(config, [str(path)], vocab_folder, capsys)
    make_and_compare(found, config, [str(path)], vocab_folder, 0.02, 0.1)


def test_the_default_holds_out_a_limited_number_of_tokens(tmp_path, vocab_folder, monkeypatch, capsys) -> None:
    shares = [assignment.held_out_share(DataConfig(), tokens) * tokens for tokens in (1e6, 128e6, 1e12)]
    assert shares == pytest.approx([1e4, 1.28e6, 1.28e6])
    assert assignment.held_out_share(DataConfig(validation_fraction=0.02), 1e12) == 0.02
    monkeypatch.setattr(assignment, "MAX_HELD_OUT_TOKENS", 1000)
    path = write(tmp_path / "a.txt", "\n\n".join(corpus(2000)))
    always = ["data.document_boundary=blank_line", "data.dupe_factor=1"]
    documents_held_out = []
    for length in (32, 64):
        config = load_config(settings=[*always, f"data.max_seq_length={length}"])
        found = estimated(config, [str(path)], vocab_folder, capsys)
        data = DataFolder.open(make_data(config, [str(path)], vocab_folder, tmp_path / f"{length}", workers=1))
        held_out = data.manifest["splits"]["validation"]
        assert held_out["tokens"] == pytest.approx(1000, rel=0.5)
        assert found["held_out"] == pytest.approx(held_out["rows"], rel=0.5)
        documents_held_out.append(held_out["statistics"]["documents"])
    assert documents_held_out == [8, 8]


def test_words_that_are_too_long_are_named(tmp_path: Path, capsys) -> None:
    draw = random.Random(3)
    path = write(tmp_path / "dna.txt", "\n".join("".join(draw.choices("ACGT", k=150)) for _ in range(100)))
    config = load_config(settings=["data.document_boundary=line", "data.next_sentence=none"])
    vocab = make_vocab(config, [str(path)], tmp_path / "vocab", workers=1)
    assert "100% of the words are [UNK]\n  hint: a word of more than 100 characters" in capsys.readouterr().out
    make_data(config, [str(path)], vocab, tmp_path / "data", workers=1, dry_run=True)
    make_data(config, [str(path)], vocab, tmp_path / "data", workers=1)
    assert capsys.readouterr().out.count(f"{path} are [UNK]\n  hint: a word of more than 100 characters") == 2


def test_held_out_inputs_have_a_scale_of_their_own(tmp_path, vocab_folder, capsys, monkeypatch) -> None:
    monkeypatch.setattr(run, "SAMPLE_BYTES", SAMPLE)
    train = write(tmp_path / "a.jsonl", FORMATS[".jsonl"](corpus(400)))
    held_out = write(tmp_path / "b.jsonl", FORMATS[".jsonl"](corpus(500)[400:]))
    config = load_config(settings=[f"data.validation=[{held_out}]", "data.max_seq_length=64"])
    found = estimated(config, [str(train)], vocab_folder, capsys)
    make_and_compare(found, config, [str(train)], vocab_folder, 0.25, 0.25)


def test_a_document_longer_than_the_sample_counts_as_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(documents, "MAX_CHARACTERS", 1000)
    path = tmp_path / "long.parquet"
    path.write_bytes(FORMATS[".parquet"](["word " * 1000, "short", "short"]))
    config = DataConfig()
    (source,) = resolve([str(path)], config)
    assert copy_start(source, tmp_path / "sample", 10, config)[1] == pytest.approx(1 / 3)


def test_a_sample_represents_bytes_not_files(tmp_path: Path) -> None:
    (tmp_path / "large.txt").write_text("A line of the large file.\n\n" * 50_000)
    for number in range(50):
        (tmp_path / f"small{number}.txt").write_text("A line of a small file.\n")
    (tmp_path / "copies").mkdir()
    sample = Corpus.open([str(tmp_path)], DataConfig(language="en")).sample(tmp_path / "copies", 200_000)
    copied = sum(source.size for source in sample.corpus.sources)
    assert len(sample.originals) < 5
    assert copied == pytest.approx(200_000, rel=0.05)
    assert sample.scale * copied == pytest.approx(27 * 50_000, rel=0.05)


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


def test_many_small_files_are_estimated_from_some_of_them(tmp_path, vocab_folder, monkeypatch, capsys) -> None:
    for number, text in enumerate(corpus(300)):
        write(tmp_path / "texts" / f"{number:03}.txt", text)
    monkeypatch.setattr(corpora, "MAX_PIECES", 60)
    inputs, config = [str(tmp_path / "texts")], load_config(settings=["data.dupe_factor=3", "data.max_seq_length=64"])
    found = estimated(config, inputs, vocab_folder, capsys)
    data = DataFolder.open(make_data(config, inputs, vocab_folder, tmp_path / "data", workers=1))
    assert found["documents"] == pytest.approx(data.manifest["corpus"]["documents"], rel=0.2)  # large files are sampled
    assert found["rows"] == pytest.approx(data.rows("train"), rel=0.15)


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
        assert "[UNK]\n  hint: check that the vocabulary" in printed
        assert "many documents are a single sentence" in printed
    found = int(re.search(r"; ([\d,]+) for validation", dry)[1])
    assert found == pytest.approx(data.rows("validation"), rel=0.3)
