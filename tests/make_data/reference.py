"""The algorithm of stage 2 in plain Python, to be read: text to windows, windows to pairs, pairs to masked examples.

The package does the same with arrays, and more: sentences longer than half a window, whole words, other objectives,
shards. `test_reference.py` compares the two by their invariants and statistics; random draws differ.
"""

import random
from dataclasses import dataclass

EXCHANGE_BLOCK = 64


@dataclass
class Window:
    """Consecutive text of one document, divided into A and B."""

    document: int
    a: list[int]
    b: list[int]
    after_b: list[int]
    """The text of the document that follows B."""
    is_cut: bool
    """B was cut to fill the window; otherwise it ends with a sentence."""


@dataclass
class Pair:
    a: list[int]
    b: list[int]
    label: int
    """0: B follows A. 1: B comes from another document. The polarity of google-research/bert."""


def cut_windows(
    document: int, sentences: list[list[int]], max_tokens: int, short_seq_prob: float, draw: random.Random
) -> list[Window]:
    """Cut a document, of sentences of at most half a window each, into windows without skipping any text."""
    windows: list[Window] = []
    first, is_finished = 0, len(sentences) < 2  # a single sentence cannot be divided into A and B
    while not is_finished:
        # A last sentence that is left alone is taken together with the one before.
        first = min(first, len(sentences) - 2)
        # Full windows train best; some shorter ones prepare the model for short inputs (appendix A.2).
        target = draw.randint(2, max_tokens) if draw.random() < short_seq_prob else max_tokens
        target = max(target, len(sentences[first]) + len(sentences[first + 1]))
        text = [token for sentence in sentences[first:] for token in sentence]
        length = min(target, len(text))
        # The sentences that begin inside the window: B begins with any of them but the first.
        begins, begin, last = [], 0, first
        while last < len(sentences) and begin < length:
            begins.append(begin)
            begin, last = begin + len(sentences[last]), last + 1
        split = draw.choice(begins[1:])
        is_finished = length == len(text)
        is_cut = length == target and not is_finished
        windows.append(Window(document, text[:split], text[split:length], text[length:], is_cut))
        # A sentence that the window cut begins the next one.
        first = last if begin == length else last - 1
    return windows


def make_pairs(windows: list[Window], max_tokens: int, draw: random.Random) -> list[Pair]:
    """Assign labels such that neither lengths nor cuts indicate them, and exchange the Bs of those with label 1.

    A label drawn for each window by itself would leave the ratio to chance, and a random B of another length than the
    true one would give its label away. So windows are ordered by the form of their B, of every two neighbours one gets
    a random B, and Bs are exchanged between windows of about the same form.
    """
    order = sorted(range(len(windows)), key=lambda i: (windows[i].is_cut, len(windows[i].b), draw.random()))
    labels = [0] * len(windows)
    for left, right in zip(order[0::2], order[1::2], strict=False):
        labels[draw.choice((left, right))] = 1
    if len(order) % 2:
        labels[order[-1]] = draw.randint(0, 1)
    partner = list(range(len(windows)))
    for is_cut in (False, True):
        members = [i for i in order if labels[i] == 1 and windows[i].is_cut == is_cut]
        for begin in range(0, len(members), EXCHANGE_BLOCK):
            block = members[begin : begin + EXCHANGE_BLOCK]
            for i in block:
                others = [j for j in block if windows[j].document != windows[i].document]
                # Where a document fills its block, any other window will do.
                others = others or [j for j in order if windows[j].document != windows[i].document]
                partner[i] = draw.choice(others)
    pairs = []
    for i, window in enumerate(windows):
        other = windows[partner[i]]
        # Every B, true or random, is cut by one rule: to the length of the window's own B if that was cut, else whole.
        b = (other.b + other.after_b)[: len(window.b)] if window.is_cut else other.b
        pairs.append(Pair(window.a, b[: max_tokens - len(window.a)], labels[i]))
    draw.shuffle(pairs)
    return pairs


def mask(
    input_ids: list[int], special_ids: set[int], mask_id: int, word_pieces: list[int], prob: float, draw: random.Random
) -> tuple[list[int], dict[int, int]]:
    """Return the ids with masks applied, and the original id at each masked position (section 3.1, task 1)."""
    # [CLS] and [SEP] are neither masked nor counted.
    maskable = [position for position, token in enumerate(input_ids) if token not in special_ids]
    chosen = sorted(draw.sample(maskable, max(1, round(prob * len(maskable)))))
    shown = list(input_ids)
    for position in chosen:
        # [MASK] never occurs in fine-tuning: a tenth keeps its token, and a tenth shows a wrong one.
        drawn = draw.random()
        if drawn < 0.8:
            shown[position] = mask_id
        elif drawn < 0.9:
            shown[position] = draw.choice(word_pieces)
    return shown, {position: input_ids[position] for position in chosen}
