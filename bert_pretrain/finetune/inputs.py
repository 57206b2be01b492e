"""An input of labelled rows, and what was repaired in it or left out.

Files as benchmarks distribute them have flaws: empty rows, stray tags, answers that are not where they should be. What
has one meaning is repaired, other rows are left out, and both are counted by reason for one message.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from bert_pretrain.config import check_encoding
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.finetune.settings import FORMATS
from bert_pretrain.io.inputs import COMPRESSIONS
from bert_pretrain.text.hub_datasets import is_dataset

_BY_ENDING = {f".{name}": name for name in FORMATS} | {".ndjson": "jsonl", ".txt": ""}
R = TypeVar("R")
E = TypeVar("E")


class UnusableRow(InputError):
    """A row that cannot be used: it is left out and counted, or refused with `--strict`."""


@dataclass
class LabelledInput:
    """What to read and how; collects what was repaired or left out."""

    location: str
    """A file, a URL, a folder saved by `datasets`, or `dataset:NAME[:config][@split]`."""
    flag: str
    """It named the input. It chooses the split of a dataset with several, and rows of `--test` may have no label."""
    format: str | None = None
    """One of `FORMATS`; None: as the ending says."""
    columns: tuple[str, ...] = ()
    """The columns of CSV or TSV without a header; after a last `...` rows may have more, which are ignored."""
    encoding: str = "utf-8"
    """Of text, as `data.encoding`."""
    strict: bool = False
    """Refuse instead of repairing and leaving out."""
    names_text: bool = False
    """Whether `--text-field` named the column of the text."""
    repairs: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    """The position of the first row that was left out for a reason."""
    said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.has_more_columns = self.columns[-1:] == ("...",)
        self.columns = self.columns[:-1] if self.has_more_columns else self.columns
        if self.format is not None and self.format not in FORMATS:
            what, remedy = f"there is no format '{self.format}'", f"choose one of {', '.join(FORMATS)}"
            raise ConfigError(what, where="--format", remedy=remedy)
        try:
            check_encoding(self.encoding)
        except ValueError as error:
            remedy = "name the encoding of the file, or leave it out for UTF-8"
            raise ConfigError(str(error), where="--encoding", remedy=remedy) from error

    @property
    def ending(self) -> str:
        """The ending of the file, without that of a compression."""
        compression = next((ending for ending in COMPRESSIONS if self.location.endswith(ending)), "")
        return Path(self.location.removesuffix(compression)).suffix.lower()

    @property
    def kind(self) -> str:
        """The format: "dataset", that given, or that of the ending; "" if the ending tells none."""
        if is_dataset(self.location) or Path(self.location).is_dir():
            return "dataset"
        return _BY_ENDING.get(self.ending, "") if self.format is None else self.format

    def say(self, what: str) -> None:
        """Print a line about the input, once, although it may be read twice."""
        if what not in self.said:
            self.said.add(what)
            print(f"{self.flag} {self.location}: {what}")

    def leave_out(self, error: UnusableRow) -> None:
        """Count a row that is left out, by reason."""
        self.left_out[error.what] += 1
        self.first.setdefault(error.what, error.where)

    def repair(self, what: str, error: InputError) -> None:
        """Count a repair, said in the plural; with `strict` raise the error instead."""
        if self.strict:
            raise error
        self.repairs[what] += 1

    def usable(self, rows: Iterable[R], make: Callable[[int, R], E]) -> list[E]:
        """Return what `make(number, row)` makes of each row; those for which it raises `UnusableRow` are left out."""
        made: list[E] = []
        first: UnusableRow | None = None
        for number, row in enumerate(rows):
            try:
                made.append(make(number, row))
            except UnusableRow as error:
                if self.strict:
                    raise
                first = first or error
                self.leave_out(error)
        unusable = self.left_out.total()
        if first and unusable > len(made):
            what = f"{first.what}; {unusable:,} of {unusable + len(made):,} rows cannot be used"
            raise InputError(what, where=first.where, remedy=first.remedy)
        return made

    def summary(self, remark: str = " (--strict refuses this)") -> str:
        """Return one message with all counts, "" if nothing was repaired or left out."""
        found = [f"{what}: {count:,}" for what, count in self.repairs.items()]
        for what, count in self.left_out.items():
            found.append(f"left out, since {what}: {count:,} ({self.first[what].removeprefix(f'{self.location}: ')})")
        return f"{self.flag} {self.location}: {'; '.join(found)}{remark}" if found else ""
