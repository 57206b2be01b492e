"""A small BERT with a toy vocabulary, and rows that it learns in seconds."""

import csv
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from bert_pretrain.config import TrainConfig
from bert_pretrain.finetune.predict import predict
from bert_pretrain.finetune.rows import LabelledInput
from bert_pretrain.finetune.run import METRICS, TASK_CLASSES, finetune
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.task import Task
from bert_pretrain.io.files import read_json
from bert_pretrain.text.tokenizer import Tokenizer

POSITIONS = 32
FILLERS = ["film", "book", "day", "the", "was", "is", "very"]
WORDS = [*FILLERS, "good", "fine", "bad", "poor", "anna", "berlin", "paris", "who", "where", "?", ".", "##s", *"天气"]
Read = Callable[..., tuple[list[Any], str]]


CPU = TrainConfig(device="cpu", precision="fp32")


@pytest.fixture(scope="session")
def toy_model(make_bert: Callable[..., Path]) -> Path:
    """Write a model folder with random weights. Large weights without dropout learn in fewer steps."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = Tokenizer(tokens, lowercase=True, strip_accents=None, handle_chinese_chars=True)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "max_position_embeddings": POSITIONS}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1}
    return make_bert(tokenizer, seed=1, **sizes, **quiet)


def peer_of(folder: Path, kind: str) -> tuple[Any, Any]:
    """Open model and tokenizer with `transformers`, and check that no weight is missing or unexpected."""
    model, info = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizer(toy_model: Path) -> Tokenizer:
    return Tokenizer.load(toy_model)


@pytest.fixture
def read(tokenizer: Tokenizer, tmp_path: Path, capsys) -> Read:
    """Return a function that writes a file and returns its examples and notes: `read("tag", "eng.train", text)`.

    Without content, it reads the existing file or dataset of the name.
    """

    def read_one(
        task: str | Task,
        name: str,
        content: str | list[Any] | None = None,
        flag: str = "--train",
        settings: dict[str, Any] | None = None,
        **reading: Any,
    ) -> tuple[list[Any], str]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if content is not None:
            text = content if isinstance(content, str) else "\n".join(map(json.dumps, content))
            path.write_text(text, encoding="utf-8", newline="")
        source = LabelledInput(str(path), flag, **reading)
        reader = TASK_CLASSES[task](Settings(**settings or {}), tokenizer) if isinstance(task, str) else task
        examples = reader.read(source)
        return examples, capsys.readouterr().out.replace(f"{flag} {path}: ", "")

    return read_one


@pytest.fixture
def tune(toy_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that fine-tunes on rows and returns the folder: `tune("tag", rows, test=rows, epochs=2)`."""

    def run(
        task: str,
        train: list[dict[str, Any]],
        *,
        model: Path = toy_model,
        validation: list[dict[str, Any]] | None = None,
        test: list[dict[str, Any]] | None = None,
        output: str = "out",
        **settings: Any,
    ) -> Path:
        splits = {"train": train, "validation": validation, "test": test}
        inputs = {name: write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in splits.items() if rows}
        chosen = Settings(**{"learning_rate": 3e-3, "batch_size": 16, **settings})
        return finetune(task, model, **inputs, output=tmp_path / output, settings=chosen, device="cpu")

    return run


def results(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the metrics and the predictions of a fine-tuned model."""
    lines = (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    return read_json(folder / METRICS), [json.loads(line) for line in lines]


def written(model: Path, source: Path | str, name: str = "o.jsonl", **options: Any) -> str:
    """Predict the rows of a file into another file beside it, and return its content."""
    output = Path(source).with_name(name)
    predict(model, str(source), output, config=CPU, **options)
    return output.read_bytes().decode("utf-8-sig")


def predicted(model: Path, source: Path | str, name: str = "o.jsonl", **options: Any) -> list[dict[str, Any]]:
    """Predict the rows of a file and return the written rows."""
    text = written(model, source, name, **options)
    if name.endswith(".csv"):
        return list(csv.DictReader(io.StringIO(text, newline="")))
    return [json.loads(line) for line in text.split("\n") if line]


def reviews(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows whose label depends on the last word."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        label = draw.choice(["pos", "neg"])
        cue = draw.choice(["good", "fine"] if label == "pos" else ["bad", "poor"])
        rows.append({"text": " ".join([*draw.choices(FILLERS, k=draw.randint(1, 6)), cue]), "label": label})
    return rows


def tagged_sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Return tagged sentences, some longer than the positions."""
    draw = random.Random(seed)
    tags = {"anna": "B-PER", "berlin": "B-LOC", "paris": "B-LOC"}
    words = [draw.choices([*FILLERS, *tags], k=draw.randint(2, 50)) for _ in range(count)]
    return [{"tokens": each, "tags": [tags.get(word, "O") for word in each]} for each in words]


def questions(count: int, seed: int) -> list[dict[str, Any]]:
    """Return questions, some without an answer, some with a context longer than the positions."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        asked, name = draw.choice([("who ?", "anna"), ("where ?", "berlin")])
        words = draw.choices(FILLERS, k=draw.randint(3, 40))
        has_answer = draw.random() < 0.8
        if has_answer:
            words.insert(draw.randint(0, len(words)), name)
        context = " ".join(words)
        answers = {"text": [name] * has_answer, "answer_start": [context.index(name)] if has_answer else []}
        rows.append({"id": f"{seed}-{number}", "question": asked, "context": context, "answers": answers})
    return rows


def write_rows(path: Path | str, rows: list[dict[str, Any]]) -> str:
    """Write rows as JSONL and return the path."""
    Path(path).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)
