"""What a run's manifest says of its length, configuration and data, checked before reports and hints read it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from bert_pretrain.errors import DataError, first_problem
from bert_pretrain.storage import manifest

_Count = Annotated[int, Field(ge=0, le=10**15, strict=True)]
_Figure = Annotated[float, Field(ge=0.0, le=1e15, strict=True)]
_Share = Annotated[float, Field(ge=0.0, le=1.0, strict=True)]


class _Length(BaseModel):
    steps: _Count | None = None
    seconds: Annotated[float, Field(ge=1e-9, le=1e15, strict=True)] | None = None


class _Train(BaseModel):
    warmup_ratio: _Share = 0.0
    warmup_steps: _Count | None = None
    schedule_steps: _Count | None = None
    max_grad_norm: _Figure = 1.0


class _Model(BaseModel):
    num_hidden_layers: Annotated[_Count, Field(ge=1)] = 1
    hidden_size: Annotated[_Count, Field(ge=1)] = 1


class _Config(BaseModel):
    train: _Train = _Train()
    model: _Model = _Model()


class _Corpus(BaseModel):
    documents: _Count = 0
    sentences: _Count = 0
    tokens: _Count = 0
    unk_share: _Share = 0.0
    repeated_share: _Share = 0.0
    median_sentences_per_document: _Figure = 0.0


class _Statistics(BaseModel):
    next_sentence: str = ""
    language: str = ""
    vocab_size: _Count | None = None
    corpus: _Corpus = _Corpus()
    unigram_entropy: dict[str, _Figure | None] = {}


class _Data(BaseModel):
    statistics: _Statistics = _Statistics()


class _Metrics(BaseModel):
    sha256: str


class _Record(BaseModel):
    """The types of what is there; the folders of older versions have less."""

    length: _Length = _Length()
    config: _Config = _Config()
    data: _Data = _Data()
    metrics: _Metrics | None = None


def data_statistics_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run's manifest says of its data; nothing for folders of older versions."""
    return (record.get("data") or {}).get("statistics") or {}


def pair_task(record: Mapping[str, Any]) -> str:
    """Return the task of a run's pairs, `nsp` or `sop`; `nsp` where its manifest does not say."""
    return "sop" if data_statistics_of(record).get("next_sentence") == "sop" else "nsp"


def pair_accuracy(records: Iterable[Mapping[str, Any]]) -> str:
    """Return what the accuracy of these runs' pairs is called; figures of both tasks are kept by the names of `nsp`."""
    names = {"nsp": "NSP accuracy", "sop": "sentence-order accuracy"}
    return " or ".join(sorted({names[pair_task(record)] for record in records}))


def read_run_record(run: Path) -> dict[str, Any]:
    """Return the manifest of a run folder, finished or partial; nothing where there is none.

    Raises:
        DataError: when a value that reports read has another type or is out of range.
    """
    record = manifest.read_record(run)
    try:
        _Record.model_validate(record)
    except ValidationError as error:
        raise DataError(
            f"the manifest is broken: {first_problem(error)}",
            where=str(run),
            remedy="restore the file from a copy",
        ) from error
    return record
