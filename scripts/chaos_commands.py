"""The commands that a campaign runs, their inputs, made once, and the comparison of what they write.

Every command runs in a folder of the same path, because manifests record paths. What a clock decides is left out of the
comparison: times, rates and what is drawn from them; everything else is compared byte by byte.
"""

import gzip
import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY = """\
vocab: {size: 400, unused_tokens: 9, min_frequency: 1}
data: {max_seq_length: 32, dupe_factor: 2, examples_per_shard: 64, validation_fraction: 0.2}
model:
  {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, max_position_embeddings: 64}
train: {global_batch_size: 16, max_steps: 12, save_every: 4, eval_every: 6, log_every: 2, keep_checkpoints: 2}
"""
VOLATILE_FILES = ("time.json", "checksums.json", "manifest.partial.json", ".lock", "training_args.bin")
"""Clocks and sums of files that hold some, and what a finished output may or may not have."""
VOLATILE_KEYS = re.compile(
    r"second|_time|time_|runtime|per_s$|tokens_per|mfu|flops_per|memory|wait_share|host|pid|date|sha256|^bytes$"
)
_QUANTITY = r"\d[\d,.]*( ?(d|h|min|ms|s|seconds?|minutes?|tokens/s|MB|GB|GFLOPS|TFLOPS|it/s|/s|%))\b"
VOLATILE_TEXT = re.compile(rf"{_QUANTITY}( {_QUANTITY})*")
CHECKPOINT = re.compile(r"checkpoints/step-\d+/")
KEPT_ASIDE = re.compile(r"(^|/)broken-|\.old-\d|(^|/)\.token-store(/|$)")
"""Damaged checkpoints and old outputs, which commands move aside; the token store is a cache."""


@dataclass(frozen=True)
class Command:
    """A command of the campaign."""

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...]
    """Files and folders that are copied from the prepared ones."""
    outputs: tuple[str, ...]
    prints_result: bool = False
    """Whether its standard output is compared, too."""
    checks: tuple[str, ...] = ()
    """Flags with which a finished output is checked whole."""
    ranks: int = 1
    """Processes that train together."""
    share: float = 1.0
    """How often it is drawn; commands that take long are drawn less often."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


COMMANDS: tuple[Command, ...] = (
    Command(
        "vocab", _words("vocab text --output vocab --config tiny.yaml --workers 1"), ("text", "tiny.yaml"), ("vocab",)
    ),
    Command(
        "vocab --extend",
        _words("vocab text --output more --extend model --config tiny.yaml --add-tokens 5 --workers 1"),
        ("text", "model", "tiny.yaml"),
        ("more",),
    ),
    Command(
        "make-data",
        _words("make-data text --vocab vocab --output data --config tiny.yaml --workers 1"),
        ("text", "vocab", "tiny.yaml"),
        ("data",),
        checks=("--verify",),
    ),
    Command("train", _words("train --data data --output run --config tiny.yaml"), ("data", "tiny.yaml"), ("run",)),
    Command(
        "train (2 ranks)",
        _words("train --data data --output run --config tiny.yaml"),
        ("data", "tiny.yaml"),
        ("run",),
        ranks=2,
    ),
    Command(
        "train --init-from",
        _words("train --data data --output run --config tiny.yaml --init-from model --set train.max_steps=8"),
        ("data", "model", "tiny.yaml"),
        ("run",),
    ),
    Command(
        "train --teacher",
        _words("train --data data --output run --config tiny.yaml --teacher model --set train.max_steps=8"),
        ("data", "model", "tiny.yaml"),
        ("run",),
        share=0.5,
    ),
    Command("run", _words("run tiny.yaml text --output all --workers 1"), ("text", "tiny.yaml"), ("all",), share=0.5),
    Command("inspect", _words("inspect data --stats --html page.html --workers 1"), ("data",), ("page.html",), True),
    Command(
        "evaluate --data", _words("evaluate model --data data --json found.json"), ("model", "data"), ("found.json",)
    ),
    Command(
        "score",
        _words("evaluate model --text lines.txt --output scores.jsonl"),
        ("model", "lines.txt"),
        ("scores.jsonl",),
    ),
    Command(
        "evaluate --pairs",
        _words("evaluate model --pairs pairs.jsonl --json found.json"),
        ("model", "pairs.jsonl"),
        ("found.json",),
    ),
    Command("fill-mask", ("fill-mask", "model", "the [MASK] of a river", "--json"), ("model",), (), True),
    Command("embed", _words("embed model lines.txt --output vectors.npy"), ("model", "lines.txt"), ("vectors.npy",)),
    Command(
        "embed --level token",
        _words("embed model lines.txt --output vectors.parquet --level token"),
        ("model", "lines.txt"),
        ("vectors.parquet",),
    ),
    Command(
        "finetune classify",
        _words("finetune classify model --train rows.jsonl --output tuned --epochs 2 --batch-size 16 --max-length 24"),
        ("model", "rows.jsonl"),
        ("tuned",),
    ),
    Command(
        "finetune tag",
        _words("finetune tag model --train tags.jsonl --output tuned --epochs 2 --batch-size 16 --max-length 24"),
        ("model", "tags.jsonl"),
        ("tuned",),
        share=0.5,
    ),
    Command(
        "finetune answer",
        _words("finetune answer model --train squad.json --output tuned --epochs 1 --batch-size 16 --max-length 32"),
        ("model", "squad.json"),
        ("tuned",),
        share=0.5,
    ),
    Command(
        "predict",
        _words("predict tuned rows.jsonl --output predictions.jsonl"),
        ("tuned", "rows.jsonl"),
        ("predictions.jsonl",),
    ),
    Command("report", _words("report run --output curves.png"), ("run",), ("curves.png", "curves.html")),
)


def write_inputs(folder: Path) -> None:
    """Write a corpus in several formats, a configuration, and rows for fine-tuning and evaluation."""
    draw = random.Random(13)
    syllables = [a + b for a in "bdfklmnprst" for b in ("a", "e", "i", "o", "u")]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(300)]
    words += ["the", "of", "a", "river"]

    def sentence(count: int | None = None) -> str:
        return " ".join(draw.choices(words, k=count or draw.randint(5, 12))) + "."

    def document() -> list[str]:
        return [sentence() for _ in range(draw.randint(3, 9))]

    (folder / "text").mkdir()
    plain = "\n\n".join("\n".join(document()) for _ in range(40)) + "\n"
    (folder / "text" / "a.txt").write_text(plain)
    records = "".join(json.dumps({"text": " ".join(document())}) + "\n" for _ in range(40))
    (folder / "text" / "b.jsonl.gz").write_bytes(gzip.compress(records.encode(), mtime=0))
    _write_parquet(folder / "text" / "c.parquet", [" ".join(document()) for _ in range(40)])
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "lines.txt").write_text("".join(sentence() + "\n" for _ in range(12)))
    pairs = [{"sentence_good": sentence(6), "sentence_bad": sentence(6)} for _ in range(6)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    rows = [{"text": sentence(), "label": "abc"[number % 3]} for number in range(60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tagged = [{"tokens": draw.choices(words, k=6), "tags": ["O", "B-X", "I-X", "O", "B-Y", "O"]} for _ in range(60)]
    (folder / "tags.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tagged))
    (folder / "squad.json").write_text(json.dumps(_questions(sentence)))


def _write_parquet(path: Path, texts: Sequence[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": texts}), path)


def _questions(sentence: Callable[[int], str]) -> dict[str, Any]:
    paragraphs = []
    for number in range(24):
        context = sentence(14)
        word = context.split()[number % 12]
        answer = {"text": word, "answer_start": context.index(word)}
        paragraphs.append({"context": context, "qas": [{"id": str(number), "question": "which?", "answers": [answer]}]})
    return {"data": [{"title": "", "paragraphs": paragraphs}]}


def copy(path: Path, target: Path) -> None:
    """Copy a file or a folder."""
    if path.is_dir():
        shutil.copytree(path, target, symlinks=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def files_of(path: Path) -> list[Path]:
    """Return a file, or the files of a folder, in a fixed order."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.is_symlink()) if path.is_dir() else []


def digest(folder: Path, outputs: Sequence[str]) -> dict[str, str]:
    """Return what outputs hold, by path; without what depends on a clock."""
    found = {}
    for output in outputs:
        for file in files_of(folder / output):
            name = file.relative_to(folder).as_posix()
            if file.name not in VOLATILE_FILES and not KEPT_ASIDE.search(name):
                found[name] = hashlib.sha256(comparable(file)).hexdigest()
    checkpoints = {match.group() for name in found if (match := CHECKPOINT.search(name))}
    for old in sorted(checkpoints)[:-1]:  # which ones are kept depends on where a run was interrupted
        found = {name: value for name, value in found.items() if old not in name}
    return found


def comparable(file: Path) -> bytes:
    """Return the bytes of a file without what depends on a clock."""
    content = file.read_bytes()
    if file.suffix == ".png":
        return b""  # holds times on its axes; that it exists is compared
    if file.suffix in (".json", ".jsonl"):
        try:
            lines = content.decode().splitlines() if file.suffix == ".jsonl" else [content.decode()]
            return "\n".join(json.dumps(_without_times(json.loads(line))) for line in lines).encode()
        except (ValueError, RecursionError):
            return content
    if file.suffix in (".md", ".html", ".txt") and file.name != "vocab.txt":
        return without_times(content.decode(errors="replace")).encode()
    return content


def without_times(text: str) -> str:
    """Return a text without durations, rates and sizes."""
    return VOLATILE_TEXT.sub("", text)


def _without_times(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_times(item) for key, item in value.items() if not VOLATILE_KEYS.search(key)}
    return [_without_times(item) for item in value] if isinstance(value, list) else value
