"""Render examples for the terminal and the HTML page: tokens instead of ids, masked tokens, the label in words.

The output has no control characters.
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
    """One token as the model sees it, and its original."""

    shown: str
    original: str
    kind: Kind
    has_space: bool  # whether a space precedes it


class RenderedExample(NamedTuple):
    """One example in readable form."""

    split: str
    row: int
    num_tokens: int
    num_masked: int | None  # None if masks are drawn in training
    label: str  # in words; empty without a label
    segments: list[tuple[str, list[Token]]]  # A, B, or a bullet without pairs; and the text up to [SEP]

    @property
    def predictions(self) -> str:
        """The number of predicted tokens, in words."""
        return "masks drawn in training" if self.num_masked is None else f"{self.num_masked} predicted"


def render_rows(folder: DataFolder, split: str, rows: Sequence[int], tokenizer: Tokenizer) -> list[RenderedExample]:
    """Render rows of a split, in the order of `rows`. Only one shard is in memory at a time."""
    objective = folder.config.next_sentence
    shards, local_rows = locate_rows(folder, split, rows)
    rendered: dict[int, RenderedExample] = {}
    for shard in np.unique(shards).tolist():
        in_shard = np.flatnonzero(shards == shard)
        examples = read_shard(folder.path, folder.shards(split)[shard]).take(local_rows[in_shard])
        for index, row in enumerate(np.asarray(rows)[in_shard].tolist()):
            rendered[row] = _render(examples, index, tokenizer, objective, split=split, row=row)
    return [rendered[row] for row in rows]


def locate_rows(folder: DataFolder, split: str, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the shard of each row of a split, and its row in that shard."""
    first_rows = np.cumsum([0, *(record.rows for record in folder.shards(split))])
    shards = np.searchsorted(first_rows, np.array(rows, dtype=np.int64), side="right") - 1
    return shards, np.array(rows, dtype=np.int64) - first_rows[shards]


def _render(
    examples: Examples, index: int, tokenizer: Tokenizer, objective: str, *, split: str, row: int
) -> RenderedExample:
    """Render one example, as far as possible if it is invalid."""
    ids = examples.input_ids[examples.offsets[index] : examples.offsets[index + 1]].tolist()
    masks, labels, b_start = examples.masks, examples.next_sentence_label, int(examples.segment_b_start[index])
    originals: dict[int, int] = {}  # position -> token id, where a token is predicted
    if masks is not None:
        span = slice(masks.offsets[index], masks.offsets[index + 1])
        originals = dict(zip(masks.positions[span].tolist(), masks.original_ids[span].tolist(), strict=True))
    if b_start < len(ids):
        bounds = [("A", 1, b_start - 1), ("B", b_start, len(ids) - 1)]
    else:
        ends = [end for end in range(1, len(ids)) if ids[end] == tokenizer.sep_id and end not in originals]
        bounds = [("•", start + 1, end) for start, end in itertools.pairwise([0, *ends])]
    return RenderedExample(
        split=split,
        row=row,
        num_tokens=len(ids),
        num_masked=None if masks is None else len(originals),
        label="" if labels is None else LABELS[objective].get(int(labels[index]), f"label {labels[index]}"),
        segments=[(name, _tokens(ids, range(start, end), originals, tokenizer)) for name, start, end in bounds],
    )


def _tokens(ids: list[int], positions: range, originals: dict[int, int], tokenizer: Tokenizer) -> list[Token]:
    tokens: list[Token] = []
    for position in positions:
        shown_id, original_id = ids[position], originals.get(position, ids[position])
        shown, original = _readable(shown_id, tokenizer), _readable(original_id, tokenizer)
        kind: Kind = "mask" if shown_id == tokenizer.mask_id else "kept" if shown_id == original_id else "random"
        has_space = bool(tokens) and _needs_space(tokens[-1].original, original)
        if position not in originals:
            kind = "plain"
            if tokens and not has_space:
                shown = original = shown.removeprefix("##")
        tokens.append(Token(shown, original, kind, has_space))
    return tokens


def _readable(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token without characters that could control a terminal or change the text direction."""
    if token_id >= tokenizer.vocab_size:
        return f"[id {token_id}]"
    return "".join(character if character.isprintable() else "�" for character in tokenizer.tokens[token_id])


def _needs_space(before: str, token: str) -> bool:
    if token.startswith("##") or token in _NO_SPACE_BEFORE or before in _NO_SPACE_AFTER:
        return False
    # There is no space between wide characters, such as Chinese ones.
    return not (before and token and {east_asian_width(before[-1]), east_asian_width(token[0])} <= {"W", "F"})
