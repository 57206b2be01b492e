"""Pairs of A and B with balanced labels, such that lengths and boundaries give no hint of the label.

Next sentence (Devlin et al., 2018, section 3.1, task 2): windows are ordered by the boundary type and length of their
B, of every two neighbours one gets the label 1, and these exchange their Bs with windows of the same boundary type and
about the same length from other documents. Sentence order (Lan et al., 2019, section 3.1): windows with the label 1
swap their own A and B.
"""

import numpy as np

from bert_pretrain.make_data.segments import Segments, make_pairs
from bert_pretrain.make_data.token_store import ShardText

NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]
EXCHANGE_BLOCK = 64


def exchange_bs(windows: Segments, text: ShardText, max_tokens: int, rng: np.random.Generator) -> Segments:
    """Give half of the windows (±1) the label 1, and a B of another document.

    Windows from donor slices of the text are not paired; they only offer their Bs. A ValueError says that all windows
    come from one document.
    """
    assert windows.is_cut is not None
    slices = text.slices_of(windows.starts[0::2])
    document, num_own = text.documents[slices], int(np.searchsorted(slices, text.num_own_slices))
    # Boundary type: whether B was cut at its end, and whether it begins inside a sentence.
    boundary = 2 * windows.is_cut + ~text.begins_sentence(windows.starts[1::2])
    order = np.lexsort((rng.random(len(windows)), windows.lengths[1::2], boundary))
    own = order[order < num_own]
    labels = _balanced_labels(len(windows), own, rng)
    partner = np.arange(len(windows))
    for kind in range(4):
        members = own[(labels[own] == 1) & (boundary[own] == kind)]
        partner[members] = _permute(members, document, rng)
    unpaired = np.flatnonzero((labels == 1) & (document[partner] == document))
    if len(unpaired):
        partner[unpaired] = _fallback_partners(unpaired, order, boundary, document, rng)
    return _cut_bs(windows, text, partner[:num_own], labels[:num_own], max_tokens, rng)


def swap_halves(windows: Segments, rng: np.random.Generator) -> Segments:
    """Give half of the windows (±1) the label 1, and swap their A and B."""
    starts, lengths = windows.starts.reshape(-1, 2), windows.lengths.reshape(-1, 2)
    order = np.lexsort((rng.random(len(windows)), lengths[:, 0] - lengths[:, 1]))
    labels = _balanced_labels(len(windows), order, rng)
    columns = np.stack([labels, 1 - labels], axis=1)  # 0: the first half, 1: the second
    starts, lengths = (np.take_along_axis(values, columns, axis=1) for values in (starts, lengths))
    return make_pairs(starts[:, 0], lengths[:, 0], starts[:, 1], lengths[:, 1], labels)


def _balanced_labels(number: int, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return labels (number,) uint8 of which each two neighbours in `order` have one of either kind; others have 0."""
    labels = np.zeros(number, dtype=np.uint8)
    coins = rng.integers(0, 2, (len(order) + 1) // 2, dtype=np.uint8)
    labels[order[0::2]] = coins
    labels[order[1::2]] = 1 - coins[: len(order) // 2]
    return labels


def _permute(members: np.ndarray, document: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Permute windows, in order of length, within blocks, so that few keep a partner of their own document.

    In a block sorted by document, a shift by the size of the largest document's group leaves no window in its own
    group, unless that group is more than half of the block; the windows left over need a fallback.
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


def _fallback_partners(
    unpaired: np.ndarray, order: np.ndarray, boundary: np.ndarray, document: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Find, for windows whose document dominates, the nearest of another document in order of length.

    Its B is then used more than once, as in sampling with replacement. Where none is near, any other one is taken.
    """
    partners = unpaired.copy()
    for kind in np.unique(boundary[unpaired]):
        line = order[boundary[order] == kind]
        owners = document[line]
        changes = np.flatnonzero(owners[1:] != owners[:-1]) + 1  # where a run of one document ends
        places = np.flatnonzero(np.isin(line, unpaired))
        run = np.searchsorted(changes, places, side="right")
        bounds = np.concatenate([[-len(line)], changes, [2 * len(line)]])
        before, behind = bounds[run] - 1, bounds[run + 1]
        nearest = np.where(places - before <= behind - places, before, behind)
        is_near = np.abs(nearest - places) <= 4 * EXCHANGE_BLOCK
        is_near &= (nearest >= 0) & (nearest < len(line))
        partners[np.searchsorted(unpaired, line[places[is_near]])] = line[nearest[is_near]]
    for row in np.flatnonzero(document[partners] == document[unpaired]):
        others = np.flatnonzero(document != document[unpaired[row]])
        if len(others) == 0:
            raise ValueError("all windows come from one document")
        alike = others[boundary[others] // 2 == boundary[unpaired[row]] // 2]
        partners[row] = rng.choice(alike if len(alike) else others)
    return partners


def _cut_bs(
    windows: Segments,
    text: ShardText,
    partner: np.ndarray,
    labels: np.ndarray,
    max_tokens: int,
    rng: np.random.Generator,
) -> Segments:
    """Cut every B, own or exchanged, by one rule: to the length of the window's own B if that was cut, else whole."""
    assert windows.is_cut is not None
    own = np.arange(len(partner))
    a_lengths, b_starts, b_lengths = windows.lengths[0::2], windows.starts[1::2], windows.lengths[1::2]
    begins_sentence = text.begins_sentence(b_starts)
    starts, whole = b_starts[partner], b_lengths[partner]
    # A window that meets its B inside a sentence does so after an exchange too, wherever the other B begins.
    inside = ~begins_sentence[own] & begins_sentence[partner]
    skipped = rng.integers(1, np.maximum(2, whole[inside]))
    skipped = np.minimum(skipped, whole[inside] - 1)  # something of it must be left
    starts[inside] += skipped
    whole[inside] -= skipped
    available = text.slice_ends[text.slices_of(starts)] - starts
    lengths = np.where(windows.is_cut[own], np.minimum(b_lengths[own], available), whole)
    lengths = np.minimum(lengths, max_tokens - a_lengths[own])
    return make_pairs(windows.starts[0::2][own], a_lengths[own], starts, lengths, labels)
