"""Pairs of A and B with labels that are dealt, not tossed, and cannot be told from mere form.

Next sentence (Devlin et al., 2018, section 3.1, task 2): windows are put in order of the form of their B, each two
neighbours get one label of either kind, and those with label 1 exchange their Bs with others of the same form from
other documents. Sentence order (Lan et al., 2019, section 3.1): those with label 1 swap their own A and B.
"""

from dataclasses import dataclass

import numpy as np

from bert_pretrain.make_data.windows import Windows

NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]
EXCHANGE_BLOCK = 64


@dataclass(frozen=True)
class Pairs:
    """Token spans of A and B with their labels; places in `Text.ids`."""

    a_start: np.ndarray  # (pairs,) int64
    a_lengths: np.ndarray  # (pairs,) int64
    b_start: np.ndarray  # (pairs,) int64
    b_lengths: np.ndarray  # (pairs,) int64
    labels: np.ndarray  # (pairs,) uint8: 0 = B follows A; 1 = B comes from another document, or stands before A
    a_document: np.ndarray  # (pairs,) int64
    b_document: np.ndarray  # (pairs,) int64


def deal_pairs(windows: Windows, max_tokens: int, num_own: int, rng: np.random.Generator) -> Pairs:
    """Deal equally many labels 0 and 1 (±1) to the first `num_own` windows, and exchange the Bs of the latter.

    The windows after those only lend their Bs, to a shard that would otherwise hold one document.

    Raises:
        ValueError: when all windows come from one document, so that no B of another exists.
    """
    form = 2 * windows.is_cut + windows.splits_sentence
    order = np.lexsort((rng.random(len(windows)), windows.b_lengths, form))
    own = order[order < num_own]
    labels = _deal_labels(len(windows), own, rng)
    partner = np.arange(len(windows))
    for kind in range(4):
        members = own[(labels[own] == 1) & (form[own] == kind)]
        partner[members] = _exchange(members, windows.document, rng)
    stuck = np.flatnonzero((labels == 1) & (windows.document[partner] == windows.document))
    if len(stuck):
        partner[stuck] = _borrow(stuck, order, form, windows.document, rng)
    return _pairs(windows, partner, labels, max_tokens, num_own, rng)


def deal_orders(windows: Windows, rng: np.random.Generator) -> Pairs:
    """Deal equally many labels 0 and 1 (±1), and swap A and B of the windows with label 1."""
    a_lengths = windows.b_start - windows.a_start
    order = np.lexsort((rng.random(len(windows)), a_lengths - windows.b_lengths))
    labels = _deal_labels(len(windows), order, rng)
    is_swapped = labels == 1
    return Pairs(
        a_start=np.where(is_swapped, windows.b_start, windows.a_start),
        a_lengths=np.where(is_swapped, windows.b_lengths, a_lengths),
        b_start=np.where(is_swapped, windows.a_start, windows.b_start),
        b_lengths=np.where(is_swapped, a_lengths, windows.b_lengths),
        labels=labels,
        a_document=windows.document,
        b_document=windows.document,
    )


def _deal_labels(number: int, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return labels (number,) uint8 of which each two neighbours in `order` have one of either kind; others have 0."""
    labels = np.zeros(number, dtype=np.uint8)
    coins = rng.integers(0, 2, (len(order) + 1) // 2, dtype=np.uint8)
    labels[order[0::2]] = coins
    labels[order[1::2]] = 1 - coins[: len(order) // 2]
    return labels


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
