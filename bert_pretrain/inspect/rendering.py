"""Render examples for the terminal and the HTML page: tokens instead of ids, masked tokens, the label in words.

The output has no control characters.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_pretrain.errors import DataError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.shards import read_shard
from bert_pretrain.text.tokenizer import Tokenizer

LABELS = {
    "nsp": {0: "B follows A", 1: "B is from another document"},
    "sop": {0: "A and B in order", 1: "A and B swapped"},
}


class Token(NamedTuple):
    """One token as the model sees it, and its original."""

    shown: str
    original: str
    kind: str  # plain, mask, random, or kept
    has_space: bool  # whether a space precedes it

    @property
    def marked(self) -> str:
        """The token as text, with marks if it is predicted."""
        if self.kind == "plain":
            return self.shown
        return f"⟨={self.original}⟩" if self.kind == "kept" else f"⟨{self.shown}→{self.original}⟩"


class RenderedExample(NamedTuple):
    """One example in readable form."""

    split: str
    row: int
    num_tokens: int
    num_masked: int | None  # None if masks are drawn in training
    label: str  # in words; empty without a label
    segments: list[tuple[str, list[Token]]]  # A, B, or a bullet without pairs; and the text up to [SEP]

    @property
    def title(self) -> str:
        """Text such as 'train row 5: 64 tokens, 9 predicted'."""
        predictions = "masks drawn in training" if self.num_masked is None else f"{self.num_masked} predicted"
        return f"{self.split} row {self.row}: {self.num_tokens} tokens, {predictions}"


def render_rows(
    folder: DataFolder,
    split: str,
    rows: Sequence[int],
    tokenizer: Tokenizer,
) -> list[RenderedExample]:
    """Render rows of a split in the order given, without those of damaged shards. Only one shard is in memory."""
    shards, local_rows = locate_rows(folder, split, rows)
    labels = LABELS.get(folder.config.next_sentence, {})
    rendered: dict[int, RenderedExample] = {}
    for shard in np.unique(shards).tolist():
        try:
            examples = read_shard(folder.path, folder.shards(split)[shard])
        except DataError:
            continue
        for index in np.flatnonzero(shards == shard).tolist():
            one = examples.take(local_rows[index : index + 1])
            rendered[index] = _render(
                one,
                tokenizer,
                labels,
                split,
                rows[index],
            )
    return [rendered[index] for index in sorted(rendered)]


def locate_rows(folder: DataFolder, split: str, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the shard of each row of a split, and its row in that shard."""
    first_rows = np.cumsum([0, *(record.rows for record in folder.shards(split))])
    numbers = np.array(rows, dtype=np.int64)
    shards = np.searchsorted(first_rows, numbers, side="right") - 1
    return shards, numbers - first_rows[shards]


def _render(
    one: Examples,
    tokenizer: Tokenizer,
    labels: dict[int, str],
    split: str,
    row: int,
) -> RenderedExample:
    """Render the example of a table of one example, as far as possible if it is invalid."""
    ids = one.input_ids.tolist()
    b_start = int(one.segment_b_start[0])
    originals: dict[int, int] = {}  # position -> token id, where a token is predicted
    if one.masks is not None:
        originals = dict(zip(one.masks.positions.tolist(), one.masks.original_ids.tolist(), strict=True))
    if b_start < len(ids):
        bounds = [("A", 1, b_start - 1), ("B", b_start, len(ids) - 1)]
    else:
        ends = [end for end in range(1, len(ids)) if ids[end] == tokenizer.sep_id and end not in originals]
        bounds = [("•", start + 1, end) for start, end in itertools.pairwise([0, *ends])]
    label = ""
    if one.next_sentence_label is not None:
        number = int(one.next_sentence_label[0])
        label = labels.get(number, f"label {number}")
    return RenderedExample(
        split=split,
        row=row,
        num_tokens=len(ids),
        num_masked=None if one.masks is None else len(originals),
        label=label,
        segments=[(name, _tokens(ids, range(start, end), originals, tokenizer)) for name, start, end in bounds],
    )


def _tokens(
    ids: list[int],
    positions: range,
    originals: dict[int, int],
    tokenizer: Tokenizer,
) -> list[Token]:
    tokens: list[Token] = []
    for position in positions:
        shown = _readable(ids[position], tokenizer)
        original = _readable(originals.get(position, ids[position]), tokenizer)
        has_space = bool(tokens) and not original.startswith("##")
        if position not in originals:
            kind = "plain"
        elif ids[position] == tokenizer.mask_id:
            kind = "mask"
        else:
            kind = "kept" if shown == original else "random"
        if kind == "plain" and tokens:
            shown = original = shown.removeprefix("##")
        tokens.append(Token(shown, original, kind, has_space))
    return tokens


def _readable(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token without characters that could control a terminal or change the text direction."""
    if token_id >= tokenizer.vocab_size:
        return f"[id {token_id}]"
    return "".join(character if character.isprintable() else "�" for character in tokenizer.text_of(token_id))
