"""The algorithm of stage 2 in plain Python, written to be read: from text to windows, pairs and masked examples.

The functions of `make_data/pairs.py` have the same names. They do the same with arrays, and also handle long sentences,
whole words, other objectives and shards. `test_reference.py` compares invariants and statistics. Random draws differ.
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
    after_b: list[int]  # the text of the document after B
    is_cut: bool  # B was cut to fill the window; otherwise it ends with a sentence


@dataclass
class Pair:
    a: list[int]
    b: list[int]
    label: int  # 0: B follows A; 1: B comes from another document; as in google-research/bert


def cut_at_length(
    document: int, sentences: list[list[int]], max_tokens: int, short_seq_prob: float, draw: random.Random
) -> list[Window]:
    """Cut a document into windows without skipping any text. Sentences have at most half a window."""
    windows: list[Window] = []
    first, is_finished = 0, len(sentences) < 2  # a single sentence cannot be divided into A and B
    while not is_finished:
        # A single last sentence is joined with the one before.
        first = min(first, len(sentences) - 2)
        # Full windows train best. Some shorter ones prepare the model for short inputs (appendix A.2).
        target = draw.randint(2, max_tokens) if draw.random() < short_seq_prob else max_tokens
        target = max(target, len(sentences[first]) + len(sentences[first + 1]))
        text = [token for sentence in sentences[first:] for token in sentence]
        length = min(target, len(text))
        # B starts with any sentence that starts inside the window, except the first.
        begins, begin, last = [], 0, first
        while last < len(sentences) and begin < length:
            begins.append(begin)
            begin, last = begin + len(sentences[last]), last + 1
        split = draw.choice(begins[1:])
        is_finished = length == len(text)
        is_cut = length == target and not is_finished
        windows.append(Window(document, text[:split], text[split:length], text[length:], is_cut))
        # A sentence that was cut starts the next window.
        first = last if begin == length else last - 1
    return windows


def exchange_segment_b(windows: list[Window], max_tokens: int, draw: random.Random) -> list[Pair]:
    """Give half of the windows the label 1 and a B from another document, so that lengths and cuts hide the label.

    A random B of another length would reveal its label, so windows are sorted by cut and length of B.
    """
    order = sorted(range(len(windows)), key=lambda i: (windows[i].is_cut, len(windows[i].b), draw.random()))
    labels = balance_labels(order, draw)
    partner = {}
    for is_cut in (False, True):
        members = [i for i in order if labels[i] == 1 and windows[i].is_cut == is_cut]
        for begin in range(0, len(members), EXCHANGE_BLOCK):
            block = members[begin : begin + EXCHANGE_BLOCK]
            partner |= choose_partners(block, order, windows, draw)
    pairs = []
    for i, window in enumerate(windows):
        b = exchange(window, windows[partner.get(i, i)])
        pairs.append(Pair(window.a, b[: max_tokens - len(window.a)], labels[i]))
    draw.shuffle(pairs)
    return pairs


def balance_labels(order: list[int], draw: random.Random) -> list[int]:
    """Give one of every two neighbours the label 1. Independent labels would not be balanced."""
    labels = [0] * len(order)
    for left, right in zip(order[0::2], order[1::2], strict=False):
        labels[draw.choice((left, right))] = 1
    if len(order) % 2:
        labels[order[-1]] = draw.randint(0, 1)
    return labels


def choose_partners(block: list[int], order: list[int], windows: list[Window], draw: random.Random) -> dict[int, int]:
    """Choose a window of another document for each window of a block, which have similar Bs."""
    partner = {}
    for i in block:
        others = [j for j in block if windows[j].document != windows[i].document]
        # If the block has one document only, take any window of another document.
        others = others or [j for j in order if windows[j].document != windows[i].document]
        partner[i] = draw.choice(others)
    return partner


def exchange(window: Window, other: Window) -> list[int]:
    """Return the B of another window for a window.

    True and random Bs follow one rule: as long as the window's B if that was cut, else with all tokens.
    """
    if window.is_cut:
        return (other.b + other.after_b)[: len(window.b)]
    return other.b


def mask(
    input_ids: list[int], special_ids: set[int], mask_id: int, word_pieces: list[int], prob: float, draw: random.Random
) -> tuple[list[int], dict[int, int]]:
    """Return the masked ids, and the original id at each masked position (section 3.1, task 1)."""
    # [CLS] and [SEP] are neither masked nor counted.
    maskable = [position for position, token in enumerate(input_ids) if token not in special_ids]
    chosen = sorted(draw.sample(maskable, max(1, round(prob * len(maskable)))))
    shown = list(input_ids)
    for position in chosen:
        # [MASK] does not occur in fine-tuning, so 10 % of the tokens stay and 10 % become random ones.
        drawn = draw.random()
        if drawn < 0.8:
            shown[position] = mask_id
        elif drawn < 0.9:
            shown[position] = draw.choice(word_pieces)
    return shown, {position: input_ids[position] for position in chosen}
