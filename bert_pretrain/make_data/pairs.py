"""Next-sentence pairs (Devlin et al., 2018, section 3.1, task 2): windows of text, cut in A and B, half the Bs swapped.

Labels are dealt, not tossed, and cannot be told from mere form. Every window is cut and split before its label is
known; then the windows are put in order of the form of their B, each two neighbours get one label of either kind, and
those with label 1 exchange their Bs with others of the same form from other documents.
"""

import bisect
from dataclasses import dataclass

import numpy as np

from bert_pretrain.make_data.token_store import Text, split_long

NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]
EXCHANGE_BLOCK = 64


@dataclass(frozen=True)
class Windows:
    """Windows of text; all but `document` are places in `Text.ids`."""

    document: np.ndarray  # (windows,) int64: which document it comes from
    a_start: np.ndarray  # (windows,) int64
    b_start: np.ndarray  # (windows,) int64: also where A ends
    b_end: np.ndarray  # (windows,) int64
    text_end: np.ndarray  # (windows,) int64: how far the text after B goes
    is_cut: np.ndarray  # (windows,) bool: B was cut to fill the window; otherwise it ends where a sentence does
    splits_sentence: np.ndarray  # (windows,) bool: A and B meet inside a sentence longer than half a window

    def __len__(self) -> int:
        return len(self.document)

    @property
    def b_lengths(self) -> np.ndarray:
        return self.b_end - self.b_start


@dataclass(frozen=True)
class Pairs:
    """Token spans of A and B with their labels; places in `Text.ids`."""

    a_start: np.ndarray  # (pairs,) int64
    a_lengths: np.ndarray  # (pairs,) int64
    b_start: np.ndarray  # (pairs,) int64
    b_lengths: np.ndarray  # (pairs,) int64
    labels: np.ndarray  # (pairs,) uint8: 0 = B follows A, 1 = B comes from another document
    a_document: np.ndarray  # (pairs,) int64
    b_document: np.ndarray  # (pairs,) int64


def cut_windows(
    text: Text, documents: np.ndarray, max_tokens: int, short_seq_prob: float, rng: np.random.Generator
) -> tuple[Windows, int]:
    """Cut spans of text into windows of `max_tokens`, or of a random shorter target, and split each at a sentence end.

    No text is passed over: a sentence that a window cut begins the next one, and a last sentence that is left alone is
    taken together with the one before. A sentence longer than half a window is divided for the purpose.

    Args:
        text: the spans.
        documents: the document of each span, (spans,).
        max_tokens: tokens of A and B together at most.
        short_seq_prob: the share of windows with a target between 2 and `max_tokens` (appendix A.2 of the paper trains
            mostly on full windows; google-research/bert makes a tenth of them shorter).

    Returns:
        the windows, and the number of spans without any because they are a single sentence.
    """
    starts_array, first_pieces = split_long(text.sentence_starts, max_tokens // 2)
    continues = np.ones(len(starts_array), dtype=bool)
    continues[first_pieces[:-1]] = text.is_continuation
    draws = len(starts_array) + len(documents)
    is_short = rng.random(draws) < short_seq_prob
    targets = np.where(is_short, rng.integers(2, max_tokens + 1, draws), max_tokens).tolist()
    splits = rng.random(draws).tolist()
    starts: list[int] = starts_array.tolist()
    begins = first_pieces[text.span_sentences[:-1]].tolist()
    owns = first_pieces[text.span_sentences[:-1] + text.span_own_sentences].tolist()
    ends = first_pieces[text.span_sentences[1:]].tolist()
    any_continues = bool(continues[:-1].any())
    rows: list[tuple[int, int, int, int, int, bool, bool]] = []
    single_sentences = 0
    for span, (begin, own, last) in enumerate(zip(begins, owns, ends, strict=True)):
        text_end = starts[last]
        position = begin
        if last - begin < 2:
            single_sentences += 1
            continue
        while position < own:
            if position + 1 == last:
                position -= 1
            draw = len(rows)
            start = starts[position]
            wanted = start + targets[draw]
            end = min(max(wanted, starts[position + 2]), text_end)
            after = bisect.bisect_left(starts, end, position + 2)  # the first sentence that begins at `end` or later
            split = position + 1 + int(splits[draw] * (after - position - 1))
            if any_continues and continues[split]:
                whole = [place for place in range(position + 1, after) if not continues[place]]
                split = whole[int(splits[draw] * len(whole))] if whole else split
            is_cut = wanted == end and end < text_end
            rows.append((span, start, starts[split], end, text_end, is_cut, bool(continues[split])))
            if end == text_end:
                break
            position = after if starts[after] == end else after - 1
    columns = np.array(rows, dtype=np.int64).reshape(-1, 7).T
    windows = Windows(
        documents[columns[0]],
        columns[1],
        columns[2],
        columns[3],
        columns[4],
        columns[5].astype(bool),
        columns[6].astype(bool),
    )
    return windows, single_sentences


def deal_pairs(windows: Windows, max_tokens: int, num_own: int, rng: np.random.Generator) -> Pairs:
    """Deal equally many labels 0 and 1 (±1) to the first `num_own` windows, and exchange the Bs of the latter.

    The windows after those only lend their Bs, to a shard that would otherwise hold one document.

    Raises:
        ValueError: when all windows come from one document, so that no B of another exists.
    """
    form = 2 * windows.is_cut + windows.splits_sentence
    order = np.lexsort((rng.random(len(windows)), windows.b_lengths, form))
    own = order[order < num_own]
    labels = np.zeros(len(windows), dtype=np.uint8)
    coins = rng.integers(0, 2, (num_own + 1) // 2, dtype=np.uint8)
    labels[own[0::2]] = coins
    labels[own[1::2]] = 1 - coins[: num_own // 2]
    partner = np.arange(len(windows))
    for kind in range(4):
        members = own[(labels[own] == 1) & (form[own] == kind)]
        partner[members] = _exchange(members, windows.document, rng)
    stuck = np.flatnonzero((labels == 1) & (windows.document[partner] == windows.document))
    if len(stuck):
        partner[stuck] = _borrow(stuck, order, form, windows.document, rng)
    return _pairs(windows, partner, labels, max_tokens, num_own, rng)


def _exchange(members: np.ndarray, document: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Permute windows, in order of length, within blocks, so that few meet their own document.

    In a block sorted by document, a shift by the size of the largest document's group leaves nobody in its own group,
    unless that group is more than half of the block; those keep a partner of their own document.
    """
    partners = members.copy()
    num_blocks = max(1, len(members) // EXCHANGE_BLOCK)
    for block in np.array_split(np.arange(len(members)), num_blocks):
        if len(block) < 2:
            continue
        owners = document[members[block]]
        by_document = block[np.lexsort((rng.random(len(block)), owners))]
        largest = np.unique(owners, return_counts=True)[1].max()
        partners[by_document] = members[np.roll(by_document, -int(largest))]
    return partners


def _borrow(
    stuck: np.ndarray, order: np.ndarray, form: np.ndarray, document: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Find, for windows whose document dominates, one of the nearest form from another document.

    Its B is then used more than once, as sampling with replacement would. Where no form comes near, any will do.
    """
    partners = stuck.copy()
    for kind in np.unique(form[stuck]):
        line = order[form[order] == kind]
        owners = document[line]
        changes = np.flatnonzero(owners[1:] != owners[:-1]) + 1  # where a run of one document ends
        places = np.flatnonzero(np.isin(line, stuck))
        run = np.searchsorted(changes, places, side="right")
        bounds = np.concatenate([[-len(line)], changes, [2 * len(line)]])
        before, behind = bounds[run] - 1, bounds[run + 1]
        nearest = np.where(places - before <= behind - places, before, behind)
        near = np.abs(nearest - places) <= 4 * EXCHANGE_BLOCK
        near &= (nearest >= 0) & (nearest < len(line))
        partners[np.searchsorted(stuck, line[places[near]])] = line[nearest[near]]
    for row in np.flatnonzero(document[partners] == document[stuck]):
        others = np.flatnonzero(document != document[stuck[row]])
        if len(others) == 0:
            raise ValueError("all windows come from one document")
        alike = others[form[others] // 2 == form[stuck[row]] // 2]
        partners[row] = rng.choice(alike if len(alike) else others)
    return partners


def _pairs(
    windows: Windows, partner: np.ndarray, labels: np.ndarray, max_tokens: int, num_own: int, rng: np.random.Generator
) -> Pairs:
    """Cut every B, own or exchanged, by one rule: to the length of the window's own B if that was cut, else whole."""
    own, partner = np.arange(num_own), partner[:num_own]
    a_lengths = windows.b_start[own] - windows.a_start[own]
    b_start = windows.b_start[partner].copy()
    # A window that meets its partner inside a sentence begins there too, whatever the partner's own split is.
    inside = windows.splits_sentence[own] & ~windows.splits_sentence[partner]
    skipped = rng.integers(1, np.maximum(2, windows.b_lengths[partner][inside]))
    b_start[inside] += np.minimum(skipped, windows.b_lengths[partner][inside] - 1)  # something of it must be left
    whole = windows.b_end[partner] - b_start
    available = windows.text_end[partner] - b_start
    b_lengths = np.where(windows.is_cut[own], np.minimum(windows.b_lengths[own], available), whole)
    return Pairs(
        a_start=windows.a_start[own],
        a_lengths=a_lengths,
        b_start=b_start,
        b_lengths=np.minimum(b_lengths, max_tokens - a_lengths),
        labels=labels[own],
        a_document=windows.document[own],
        b_document=windows.document[partner],
    )
