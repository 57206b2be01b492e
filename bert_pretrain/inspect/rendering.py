"""Examples in readable form: text instead of ids, what was masked and what is shown in its place, the label in words.

Input: rows of a split. Output: `RenderedExample`s without control characters, for the terminal and the page.
"""

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple
from unicodedata import east_asian_width

import numpy as np

from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.text.tokenizer import Tokenizer

Kind = Literal["plain", "mask", "random", "kept"]
LABELS = {
    "nsp": {0: "B follows A", 1: "B is from another document"},
    "sop": {0: "A and B in order", 1: "A and B swapped"},
}
_NO_SPACE_BEFORE = frozenset(".,;:!?%)]}’”…")
_NO_SPACE_AFTER = frozenset("([{“‘")


class Token(NamedTuple):
    """One token as the model sees it, and as it was."""

    shown: str
    original: str
    kind: Kind
    has_space: bool  # whether a space precedes it


class RenderedExample(NamedTuple):
    """One example in readable form."""

    split: str
    row: int
    num_tokens: int
    num_masked: int | None  # None where masks are still to be drawn
    label: str  # in words; empty where there is none
    segments: list[tuple[str, list[Token]]]  # up to each [SEP]: A or B of a pair, otherwise a bullet, and the text

    @property
    def predictions(self) -> str:
        """How many tokens are predicted, in words."""
        return "masks drawn in training" if self.num_masked is None else f"{self.num_masked} predicted"


def render_rows(folder: DataFolder, split: str, rows: Sequence[int], tokenizer: Tokenizer) -> list[RenderedExample]:
    """Return the chosen rows of a split in the order given, reading one shard at a time."""
    objective = folder.config.next_sentence
    shards, places = locate_rows(folder, split, rows)
    rendered: dict[int, RenderedExample] = {}
    for shard in np.unique(shards).tolist():
        chosen = np.flatnonzero(shards == shard)
        examples = read_shard(folder.path, folder.shards(split)[shard]).take(places[chosen])
        for place, row in enumerate(np.asarray(rows)[chosen].tolist()):
            rendered[row] = _render(examples, place, tokenizer, objective, split=split, row=row)
    return [rendered[row] for row in rows]


def locate_rows(folder: DataFolder, split: str, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of the shard of each row of a split, and the row within it."""
    first_rows = np.cumsum([0, *(record.rows for record in folder.shards(split))])
    shards = np.searchsorted(first_rows, np.array(rows, dtype=np.int64), side="right") - 1
    return shards, np.array(rows, dtype=np.int64) - first_rows[shards]


def _render(
    examples: Examples, place: int, tokenizer: Tokenizer, objective: str, *, split: str, row: int
) -> RenderedExample:
    """Return one example; invalid ones too, as far as they can be read."""
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
    return RenderedExample(
        split=split,
        row=row,
        num_tokens=len(ids),
        num_masked=None if masks is None else len(originals),
        label="" if labels is None else LABELS[objective].get(int(labels[place]), f"label {labels[place]}"),
        segments=[(name, _tokens(ids, range(begin, end), originals, tokenizer)) for name, begin, end in bounds],
    )


def _tokens(ids: list[int], places: range, originals: dict[int, int], tokenizer: Tokenizer) -> list[Token]:
    tokens: list[Token] = []
    for place in places:
        shown_id, original_id = ids[place], originals.get(place, ids[place])
        shown, original = _readable(shown_id, tokenizer), _readable(original_id, tokenizer)
        replaced: Kind = "mask" if shown_id == tokenizer.mask_id else "kept" if shown_id == original_id else "random"
        has_space = bool(tokens) and _is_spaced(tokens[-1].original, original)
        if place not in originals and tokens and not has_space:
            shown = original = shown.removeprefix("##")
        tokens.append(Token(shown, original, replaced if place in originals else "plain", has_space))
    return tokens


def _readable(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token without characters that could control a terminal or change the direction of writing."""
    if token_id >= tokenizer.vocab_size:
        return f"[id {token_id}]"
    return "".join(character if character.isprintable() else "�" for character in tokenizer.tokens[token_id])


def _is_spaced(before: str, token: str) -> bool:
    if token.startswith("##") or token in _NO_SPACE_BEFORE or before in _NO_SPACE_AFTER:
        return False
    # Between characters of two columns, such as Chinese ones, there is none.
    return not (before and token and {east_asian_width(before[-1]), east_asian_width(token[0])} <= {"W", "F"})
