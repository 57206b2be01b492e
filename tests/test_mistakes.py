"""User errors of every command: exit code 2, one message of three parts, and no changed file."""

import codecs
import gzip
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bert_pretrain.cli import app
from bert_pretrain.io.files import CHECKSUMS

TEXT = "One two.\nThree four.\nFive six.\n\nSeven.\nEight.\nNine.\n"
SPECIAL = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, vocab_folder: Path, data_folder: Path, bert_folder: Path) -> Path:
    """Return a folder with the files and folders that the calls name."""
    place = tmp_path_factory.mktemp("place")
    for name, folder in (("vocab", vocab_folder), ("data", data_folder), ("bert", bert_folder)):
        (place / name).symlink_to(folder)
    (place / "empty").mkdir()
    for name, content in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (place / "vocab-folder" / "vocab.txt").mkdir(parents=True)
    for name, change in CHANGED.items():
        shutil.copytree(place / name.partition("-")[0], place / name)
        change(place / name)
        if name != "bert-sealed":  # otherwise every change would be found by its checksum
            (place / name / CHECKSUMS).unlink(missing_ok=True)
    return place


FILES: dict[str, str | bytes] = {
    "a.txt": TEXT,
    "empty.txt": "",
    "a.pdf": "x",
    "latin.txt": b"caf\xe9.\nOne.\nTwo.\n",
    "utf16.txt": codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"),
    "gbk.txt": "天气很好，我们去看海。".encode("gbk"),
    "cut.json": '[{"text": "a"}, {"text"',
    "damaged.txt.gz": gzip.compress(TEXT.encode())[:-12],
    "a.jsonl": '{"text": "a"}\n{broken\n',
    "list.jsonl": '["a"]\n',
    "number.jsonl": '{"text": 5}\n',
    "fields.jsonl": '{"content": "a"}\n',
    "unclosed.csv": 'text\n"one\ntwo\n',
    "comma.csv": "text\none, two\n",
    "column.csv": "content\none\n",
    "broken.parquet": "PAR1 no PAR1",
    "mine/thesis.txt": "years of work",
    "key.yaml": "data:\n  max_seq_lenght: 5\n",
    "latin.yaml": b"data: {language: caf\xe9}\n",
    "warmup.yaml": "train: {max_steps: 5, warmup_steps: 10}\n",
    "vocab-twice/vocab.txt": f"{SPECIAL}a\na\n",
    "vocab-special/vocab.txt": "a\nb\n",
    "run/metrics.jsonl": "{broken\n",
    "bad.jsonl": '{"sentence_good": "a"}\n',
    "rows.jsonl": '{"text": "good", "label": "a"}\n{"text": "bad", "label": "b"}\n',
    "blank.txt": "one\n\ntwo\n",
}


def _json(name: str, **values: object) -> Callable[[Path], object]:
    """Return a function that changes values in a JSON file of a folder."""
    return lambda folder: (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **values}))


def _shortened(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


# Copies of the folder before the hyphen, each with one fault.
CHANGED: dict[str, Callable[[Path], object]] = {
    "vocab-added": _json("tokenizer.json", added_tokens=7),
    "vocab-lower": _json("tokenizer_config.json", do_lower_case="maybe"),
    "data-unfinished": lambda folder: (folder / "manifest.json").rename(folder / "manifest.partial.json"),
    "data-old": _json("manifest.json", format_version=0),
    "data-kind": _json("manifest.json", kind="run"),
    "bert-none": lambda folder: (folder / "config.json").unlink(),
    "bert-huge": _json("config.json", num_hidden_layers=10**9),
    "bert-gpt": _json("config.json", model_type="gpt2"),
    "bert-weights": lambda folder: (folder / "model.safetensors").unlink(),
    "bert-sealed": _shortened("model.safetensors"),
}
OUTPUTS = ("v", "d", "r", "o", ".token-store")

MISTAKES = {  # a call, and the place that its message names
    # inputs
    "missing input": ("vocab missing.txt --output v", "missing.txt"),
    "a pattern that nothing matches": ("vocab *.zst --output v", "*.zst"),
    "folder without text": ("vocab empty --output v", "empty"),
    "empty input": ("vocab empty.txt --output v", "empty.txt"),
    "unknown ending": ("vocab a.pdf --output v", "a.pdf"),
    "unknown protocol": ("vocab nosuch://a.txt --output v", "nosuch://a.txt"),
    "another encoding": ("vocab utf16.txt --output v", "utf16.txt"),
    "no encoding": ("vocab gbk.txt --output v --encoding gb18031", "--encoding"),
    "json array that is cut off": ("vocab cut.json --output v", "cut.json: record 2"),
    "cut archive": ("vocab damaged.txt.gz --output v", "damaged.txt.gz"),
    "broken jsonl": ("vocab a.jsonl --output v", "a.jsonl: line 2"),
    "record that is a list": ("vocab list.jsonl --output v", "list.jsonl: record 1"),
    "text that is a number": ("vocab number.jsonl --output v", "number.jsonl: line 1"),
    "unclosed quote": ("vocab unclosed.csv --output v", "unclosed.csv: line 2"),
    "comma outside of quotes": ("vocab comma.csv --output v", "comma.csv: line 2"),
    "no such column": ("vocab column.csv --output v", "column.csv"),
    "not parquet": ("vocab broken.parquet --output v", "broken.parquet"),
    # whole words
    "no such tokens": ("vocab a.txt --output v --tokens bpe", "--tokens"),
    "pieces of words extended by whole words": ("vocab a.txt --output v --extend bert --tokens words", "vocab.tokens"),
    # configuration
    "unknown key": ("vocab a.txt --output v --config key.yaml", "key.yaml:2"),
    "unknown preset": ("vocab a.txt --output v --config nosuch", "--config"),
    "YAML in another encoding": ("vocab a.txt --output v --config latin.yaml", "latin.yaml"),
    "warm-up longer than the run": ("train --data data --output r --config warmup.yaml", "warmup.yaml:1"),
    "key in brackets": ("vocab a.txt --output v --set train['steps']=5", "--set train[steps]"),
    "two lengths": ("train --data mine --output r --steps 5 --time 1h", "--steps and --time"),
    "no such device": ("run tiny a.txt --output r --device tpu", "--device"),
    "flag overruled by phases": ("run base a.txt --output r --steps 5", "--steps"),
    "no inputs": ("run tiny --output r", "inputs"),
    "auto without time": ("run auto a.txt --output r", "run auto"),
    "dry run of a preset": ("run tiny a.txt --output r --dry-run", "--dry-run"),
    "machine of a preset": ("run tiny a.txt --output r --machine h100", "--machine"),
    # outputs
    "foreign output": ("vocab a.txt --output mine", "--output"),
    "output is a file": ("vocab a.txt --output a.txt", "--output"),
    "training inside a file": ("train --data data --output a.txt/r --config tiny", "a.txt"),
    "a vocabulary by URL": ("vocab a.txt --output memory://v", "--output"),
    "data by URL": ("train --data memory://d --output r", "--data"),
    # vocabularies
    "value out of range": ("vocab a.txt --output v --vocab-size 3", "--vocab-size"),
    "size too small": ("vocab a.txt --output v --vocab-size 50", "vocab.size"),
    "extension of nothing": ("vocab a.txt --output v --extend mine", "--extend"),
    "no vocabulary": ("make-data a.txt --vocab nosuch --output d", "--vocab"),
    "not a vocabulary": ("make-data a.txt --vocab mine --output d", "--vocab"),
    "vocab.txt is a folder": ("make-data a.txt --vocab vocab-folder --output d", "vocab-folder"),
    "token twice": ("make-data a.txt --vocab vocab-twice --output d --lowercase", "vocab.txt"),
    "no special token": ("make-data a.txt --vocab vocab-special --output d --lowercase", "vocab.txt"),
    "casing that is neither": ("make-data a.txt --vocab vocab-lower --output d", "tokenizer_config.json"),
    "casing contradicted": ("make-data a.txt --vocab vocab --output d --no-lowercase", "--no-lowercase"),
    "added tokens that are a number": ("make-data a.txt --vocab vocab-added --output d", "tokenizer.json"),
    # data
    "too few documents": ("make-data a.txt --vocab vocab --output d", "a.txt"),
    "weight of nothing": ("make-data a.txt --vocab vocab --output d --weight a.txt", "--weight"),
    "weight that is none": ("make-data a.txt --vocab vocab --output d --weight a.txt=x", "--weight"),
    "weight of another input": ("make-data a.txt --vocab vocab --output d --weight b.txt=2", "data.input_weights"),
    "missing validation": ("make-data a.txt --vocab vocab --output d --validation b.txt", "b.txt"),
    "no data": ("train --data nosuch --output r", "--data"),
    "vocabulary for data": ("train --data vocab --output r", "--data"),
    "settings of made data": ("train --data data --output r --set data.masking=dynamic", "--set data.masking=dynamic"),
    "unfinished data": ("train --data data-unfinished --output r", "--data"),
    "data of another version": ("inspect data-old", "manifest.json"),
    "data of another kind": ("inspect data-kind", "manifest.json"),
    "no such split": ("inspect data --split nosuch", "--split"),
    "not a page": ("inspect data --html notes.txt", "--html"),
    "no such row": ("inspect data --row 10000000", "--row"),
    # training
    "optimizer of nothing": ("train --data data --output r --carry-optimizer", "--carry-optimizer"),
    "first weights of nothing": ("train --data data --output r --init-from mine", "--init-from"),
    "teacher of nothing": ("train --data data --output r --teacher mine", "train.teacher"),
    "too few positions": (
        "train --data data --output r --set model.max_position_embeddings=16",
        "model.max_position_embeddings",
    ),
    # models
    "a model that is neither here nor on the Hub": ("fill-mask nosuch/model [MASK]", "MODEL"),
    "tokens without a file": ("evaluate bert --text a.txt --per-token", "--per-token"),
    "no model": ("fill-mask nosuch [MASK]", "MODEL"),
    "no [MASK]": ("fill-mask bert word", "TEXT"),
    "no config.json": ("fill-mask bert-none [MASK]", "MODEL"),
    "too many layers": ("fill-mask bert-huge [MASK]", "MODEL"),
    "another architecture": ("fill-mask bert-gpt [MASK]", "config.json"),
    "no weights": ("fill-mask bert-weights [MASK]", "MODEL"),
    "cut weights of our own": ("fill-mask bert-sealed [MASK]", "MODEL"),
    "metrics over the texts": ("evaluate bert --text a.txt --json a.txt", "--json"),
    "metrics over the scores": ("evaluate bert --text a.txt --output o.jsonl --json o.jsonl", "--json"),
    "no name for a picture": ("report run --output .", "--output"),
    "no such card": ("evaluate bert --text a.txt --device cuda:99999999999", "--device"),
    "nothing to evaluate": ("evaluate bert", "MODEL"),
    "two things to evaluate": ("evaluate bert --text a.txt --pairs bad.jsonl", "MODEL"),
    "metric of data": ("evaluate bert --data data --metric original", "--metric"),
    "empty pairs": ("evaluate bert --pairs bad.jsonl --skip-empty", "--skip-empty"),
    "tokens of pairs": ("evaluate bert --pairs bad.jsonl --per-token --output o.jsonl", "--per-token"),
    "no such precision": ("evaluate bert --text a.txt --precision fp8", "--precision"),
    "unknown metric": ("evaluate bert --text a.txt --metric nosuch", "--metric"),
    "group of texts": ("evaluate bert --text a.txt --by UID", "--by"),
    "pairs in a text file": ("evaluate bert --pairs a.txt", "a.txt"),
    "empty text": ("evaluate bert --text blank.txt", "blank.txt: line 2"),
    "unknown pooling": ("embed bert a.txt --output v.npy --pooling max", "--pooling"),
    "unknown level": ("embed bert a.txt --output v.npy --level word", "--level"),
    "unknown kind of vectors": ("embed bert a.txt --output v.txt", "--output"),
    "vectors of tokens as a matrix": ("embed bert a.txt --output v.npy --level token", "--output"),
    "tokens pooled": ("embed bert a.txt --output v.parquet --level token --pooling cls", "--pooling"),
    "length beyond the positions": ("embed bert a.txt --output v.npy --max-length 1000", "--max-length"),
    "broken metrics": ("report run --output c.png", "metrics.jsonl:1"),
    # fine-tuning
    "no such task": ("finetune translate bert --train rows.jsonl --output o", "TASK"),
    "rows for another architecture": ("finetune classify bert-gpt --train rows.jsonl --output o", "config.json"),
    "rows of unknown ending": ("finetune classify bert --train a.pdf --output o", "a.pdf"),
    "rows given twice": ("finetune classify bert --train rows.jsonl --train a.csv --output o", "--train a.csv"),
    "no such format of rows": ("finetune classify bert --train rows.jsonl --output o --format xml", "--format"),
    "columns of records": ("finetune classify bert --train rows.jsonl --output o --columns text", "--train rows.jsonl"),
    "columns of words": ("finetune tag bert --train a.tsv --output o --columns tokens,tags", "a.tsv"),
    "no label column": ("finetune classify bert --train rows.jsonl --output o --label-field l", "rows.jsonl: line 1"),
    "rate below zero": ("finetune classify bert --train rows.jsonl --output o --learning-rate -1", "--learning-rate"),
    "flag of another task": ("finetune classify bert --train rows.jsonl --output o --stride 4", "--stride"),
    "predictions of a model without a head": ("predict bert rows.jsonl --output o.jsonl", "MODEL"),
    "predictions over the rows": ("predict bert rows.jsonl --output rows.jsonl", "--output"),
    "predictions of no format": ("predict bert rows.jsonl --output o.xlsx", "--output"),
    "model by URL": ("finetune classify bert --train rows.jsonl --output memory://o", "--output"),
}


@pytest.mark.parametrize(("call", "where"), MISTAKES.values(), ids=MISTAKES)
def test_user_error_prints_one_message_and_changes_nothing(place: Path, call, where: str, monkeypatch) -> None:
    monkeypatch.chdir(place)
    if re.match("(make-data|train|run auto) ", call):  # a dry run finds the same error and writes nothing
        times = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
        check_message(f"{call} --dry-run", where)
        assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == times
    before = _content(place)
    check_message(call, where)
    assert _content(place) == before


def check_message(call: str, where: str) -> None:
    result = CliRunner().invoke(app, shlex.split(call))
    assert (result.exit_code, type(result.exception)) == (2, SystemExit), result.output
    message = result.stderr[result.stderr.index("error: ") :].rstrip()
    assert message.count("\n  where: ") == message.count("\n  hint: ") == 1
    assert where in message.split("\n  where: ")[1].split("\n  hint: ")[0]
    assert not re.search(r"Traceback|Error\(|site-packages", message)
    assert not re.search(r"(?i)input should|pattern '|\\d|\[A-Z", message)
    assert len(message) < 2000


def _content(place: Path) -> dict[Path, bytes]:
    """Return all files with their bytes, except links and unfinished outputs."""
    files = (path for path in place.rglob("*") if path.is_file() and path.relative_to(place).parts[0] not in OUTPUTS)
    return {path: path.read_bytes() for path in files}


WITHOUT_TORCH = (
    "train --data nosuch --output r",
    "train --data data --output a.txt --config tiny",
    "train --data data --output r --init-from mine",
    "run tiny --output r",
    "fill-mask bert-huge [MASK]",
    "evaluate nosuch --text a.txt",
    "embed bert-none a.txt --output v.npy",
    "finetune translate bert --train rows.jsonl --output o",
    "predict nosuch rows.jsonl --output o.jsonl",
)


def test_errors_that_need_no_torch_are_reported_before_its_import(place: Path) -> None:
    program = f"""
import shlex, sys
from bert_pretrain.cli import main
for call in {WITHOUT_TORCH!r}:
    sys.argv = ["bert-pretrain", *shlex.split(call)]
    try:
        main()
    except SystemExit as error:
        print("torch" in sys.modules, error.code)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=place, capture_output=True, text=True)
    assert done.stdout.splitlines()[-len(WITHOUT_TORCH) :] == ["False 2"] * len(WITHOUT_TORCH), done.stderr
