"""Examples as people read them: words instead of ids, what was hidden and what stands in its place, the label in words.

Input: rows of a split. Output: `ExampleView`s, free of control characters, which the terminal and the page draw.
"""

import itertools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bert_pretrain.examples import Examples
from bert_pretrain.shards import DataFolder, read_shard
from bert_pretrain.tokenizer import Tokenizer

Kind = Literal["plain", "mask", "random", "kept"]
LABELS = {
    "nsp": ("B follows A", "B is from another document"),
    "sop": ("A and B in order", "A and B swapped"),
}
_CLINGS_TO_THE_LEFT = frozenset(".,;:!?%)]}’”…")
_CLINGS_TO_THE_RIGHT = frozenset("([{“‘")


@dataclass(frozen=True)
class Piece:
    """One token as the model sees it, and as it was."""

    shown: str
    original: str
    kind: Kind
    is_glued: bool
    """No blank stands before it."""


@dataclass(frozen=True)
class Segment:
    """The text up to a [SEP]."""

    name: str
    """A or B of a pair; otherwise a bullet."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ExampleView:
    """One example to look at."""

    split: str
    row: int
    shard: str
    num_tokens: int
    num_masked: int | None
    """None where masks are still to be drawn."""
    label: str
    """In words; empty where there is none."""
    segments: tuple[Segment, ...]

    @property
    def predictions(self) -> str:
        """How many tokens are predicted, in words."""
        return "masks drawn in training" if self.num_masked is None else f"{self.num_masked} predicted"


def read_views(folder: DataFolder, split: str, rows: Sequence[int], tokenizer: Tokenizer) -> list[ExampleView]:
    """Return the chosen rows of a split in the order given, reading one shard at a time.

    Raises:
        DataError: when a shard is damaged.
    """
    records = folder.shards(split)
    first_rows = np.cumsum([0, *(record.rows for record in records)])
    shards = np.searchsorted(first_rows, rows, side="right") - 1
    objective = folder.manifest["config"]["data"]["next_sentence"]
    views: dict[int, ExampleView] = {}
    for shard in np.unique(shards).tolist():
        record = records[shard]
        here = [row for row, of in zip(rows, shards, strict=True) if of == shard]
        examples = read_shard(folder.path, record).take(np.array(here) - first_rows[shard])
        for place, row in enumerate(here):
            views[row] = view(examples, place, tokenizer, objective, split=split, row=row, shard=record.path)
    return [views[row] for row in rows]


def view(
    examples: Examples, place: int, tokenizer: Tokenizer, objective: str, *, split: str, row: int, shard: str
) -> ExampleView:
    """Return one example; broken ones too, as far as they can be read."""
    ids = examples.input_ids[examples.offsets[place] : examples.offsets[place + 1]].tolist()
    masks, labels, b_start = examples.masks, examples.next_sentence_label, int(examples.segment_b_start[place])
    originals: dict[int, int] = {}
    if masks is not None:
        span = slice(masks.offsets[place], masks.offsets[place + 1])
        originals = dict(zip(masks.positions[span].tolist(), masks.original_ids[span].tolist(), strict=True))
    if b_start < len(ids):
        bounds = [("A", 1, b_start - 1), ("B", b_start, len(ids) - 1)]
    else:
        ends = [place for place in range(1, len(ids)) if ids[place] == tokenizer.sep_id and place not in originals]
        bounds = [("•", begin + 1, end) for begin, end in itertools.pairwise([0, *ends])]
    return ExampleView(
        split=split,
        row=row,
        shard=shard,
        num_tokens=len(ids),
        num_masked=None if masks is None else len(originals),
        label="" if labels is None else _label(objective, int(labels[place])),
        segments=tuple(
            Segment(name, tuple(_pieces(ids, range(begin, end), originals, tokenizer))) for name, begin, end in bounds
        ),
    )


def _label(objective: str, label: int) -> str:
    names = LABELS.get(objective, ())
    return names[label] if label < len(names) else f"label {label}"


def _pieces(ids: list[int], places: range, originals: dict[int, int], tokenizer: Tokenizer) -> list[Piece]:
    pieces: list[Piece] = []
    for place in places:
        shown = _readable(ids[place], tokenizer)
        original = _readable(originals.get(place, ids[place]), tokenizer)
        kind: Kind = "plain"
        if place in originals:
            is_mask, is_kept = ids[place] == tokenizer.mask_id, originals[place] == ids[place]
            kind = "mask" if is_mask else "kept" if is_kept else "random"
        is_glued = not pieces or _is_glued(pieces[-1].original, original)
        if kind == "plain":
            shown = original = shown.removeprefix("##") if is_glued and pieces else shown
        pieces.append(Piece(shown, original, kind, is_glued))
    return pieces


def _readable(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token without characters that could steer a terminal or turn the direction of writing."""
    if token_id >= tokenizer.vocab_size:
        return f"[id {token_id}]"
    return "".join(character if character.isprintable() else "�" for character in tokenizer.tokens[token_id])


def _is_glued(before: str, token: str) -> bool:
    if token.startswith("##") or token in _CLINGS_TO_THE_LEFT or before in _CLINGS_TO_THE_RIGHT:
        return True
    return bool(before and token) and _is_wide(before[-1]) and _is_wide(token[0])


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"


def width_of(text: str) -> int:
    """Return the columns that a text takes in a terminal."""
    return sum(0 if unicodedata.combining(character) else 1 + _is_wide(character) for character in text)
