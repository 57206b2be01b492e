"""The rules that every example of a data folder follows, and the rows that break them.

Each rule is checked on whole arrays of a shard. The rules of layout come first: the tokens of a row that breaks one of
them are not checked.
"""

from dataclasses import dataclass

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.masking import MaskingRule, masking_rule, num_to_mask
from bert_pretrain.text.tokenizer import Tokenizer, is_reserved

Rows = dict[str, np.ndarray]
"""The rows, ascending, that break each rule."""

# What each rule demands, in the order of the checks; filled in from the configuration.
RULES = {
    "columns": "those of masking: {masking} and next_sentence: {next_sentence}",
    "length": "at most {max_seq_length} tokens, and none without text",
    "segments": "segment_b_start leaves text on both sides, or is the length where there is no B",
    "label": "0 or 1",
    "token ids": "every id is in the vocabulary",
    "special tokens": "[CLS] at the beginning, [SEP] after each segment, no special or unused token elsewhere",
    "word starts": "each segment begins with a word, and no token in the middle of a word begins one",
    "masked positions": "ascending, never on [CLS] or [SEP] or after the end",
    "masked tokens": "every original is a WordPiece token or [UNK], never [PAD] or another special token",
    "random replacements": "every one is a real WordPiece token, neither special nor unused",
    "predictions": "{masked_lm_prob:.0%} of the text of each example, rounded, at least 1, at most {max_predictions}",
    "whole words": "all tokens of a word are predicted, or none",
    "words that fit": "no word is left out that the number of predictions had room for",
}


@dataclass(frozen=True)
class Spec:
    """What configuration and vocabulary say of every example."""

    config: DataConfig
    tokenizer: Tokenizer
    masking: MaskingRule
    is_reserved: np.ndarray
    """Whether an id is special or unused, (vocab_size,) bool."""
    may_be_text: np.ndarray
    """Whether an id may occur in text, (vocab_size,) bool: [UNK] may, although it is reserved."""

    @property
    def has_pairs(self) -> bool:
        """Whether an example is `[CLS] A [SEP] B [SEP]`, rather than text with a [SEP] after each document."""
        return self.config.next_sentence != "none"

    def stores_masks(self, split: str) -> bool:
        """Whether the masks of a split are stored, rather than drawn when a batch is made."""
        return self.config.masking == "static" or split == "validation"

    def stores_word_starts(self, split: str) -> bool:
        """Whether a split stores where words begin: for masks still to be drawn over the words of a segmenter."""
        return self.config.word_segmenter is not None and not self.stores_masks(split)


def make_spec(tokenizer: Tokenizer, config: DataConfig) -> Spec:
    """Return what holds for examples made with this tokenizer and configuration."""
    reserved = np.array([is_reserved(token) for token in tokenizer.tokens])
    may_be_text = ~reserved
    may_be_text[tokenizer.unk_id] = True
    return Spec(config, tokenizer, masking_rule(tokenizer, config), reserved, may_be_text)


def check_layout(examples: Examples, spec: Spec, split: str) -> Rows:
    """Return the rows with impossible columns, lengths, positions, ids or labels."""
    lengths, b_start = examples.lengths, examples.segment_b_start.astype(np.int64)
    rows, none = np.arange(len(examples)), np.zeros(0, dtype=np.int64)
    masks, labels, vocab_size = examples.masks, examples.next_sentence_label, spec.tokenizer.vocab_size
    present = (labels is not None, masks is not None, examples.starts_word is not None)
    expected = (spec.has_pairs, spec.stores_masks(split), spec.stores_word_starts(split))
    broken = {"columns": none if present == expected else rows}
    unknown = [_rows_of(np.flatnonzero(examples.input_ids >= vocab_size), examples.offsets)]
    if masks is not None:
        row_of_mask = np.repeat(rows, np.diff(masks.offsets))
        positions = masks.positions.astype(np.int64)
        outside = (positions < 1) | (positions >= lengths[row_of_mask] - 1) | (positions == b_start[row_of_mask] - 1)
        outside[1:] |= (np.diff(positions) <= 0) & (np.diff(row_of_mask) == 0)
        broken["masked positions"] = np.unique(row_of_mask[outside])
        unknown.append(row_of_mask[masks.original_ids >= vocab_size])
    if labels is not None:
        broken["label"] = np.flatnonzero(labels > 1)
    shortest = 5 if spec.has_pairs else 3
    is_divided = (b_start >= 3) & (b_start <= lengths - 2) if spec.has_pairs else b_start == lengths
    return {
        **broken,
        "length": np.flatnonzero((lengths > spec.config.max_seq_length) | (lengths < shortest)),
        "segments": np.flatnonzero(~is_divided),
        "token ids": np.unique(np.concatenate(unknown)),
    }


@dataclass(frozen=True)
class Content:
    """Examples whose layout is sound, and the arrays that several rules look at."""

    examples: Examples
    places: np.ndarray  # (masked,) of the predicted tokens among all tokens
    originals: np.ndarray  # (tokens,) ids before masking
    is_predicted: np.ndarray  # (tokens,) bool
    is_text: np.ndarray  # (tokens,) bool: not the [CLS] and [SEP] of the layout
    maskable: np.ndarray  # (rows,) tokens of text
    num_expected: np.ndarray  # (rows,) predictions by the configuration


def read_content(examples: Examples, spec: Spec) -> Content:
    """Return examples with what was there before masking, and which tokens are text; at least one example."""
    originals, is_predicted = examples.input_ids.copy(), np.zeros(len(examples.input_ids), dtype=bool)
    places = np.zeros(0, dtype=np.int64)
    if examples.masks is not None:
        places = examples.masked_indices
        originals[places] = examples.masks.original_ids
        is_predicted[places] = True
    first = examples.offsets[:-1]
    # Without pairs, a [SEP] may be anywhere: a document ends there.
    is_text = np.ones(len(originals), dtype=bool) if spec.has_pairs else originals != spec.tokenizer.sep_id
    is_text[first] = is_text[examples.offsets[1:] - 1] = False
    if spec.has_pairs:
        is_text[first + examples.segment_b_start - 1] = False
    maskable = np.add.reduceat(is_text, first, dtype=np.int64)
    return Content(examples, places, originals, is_predicted, is_text, maskable, num_to_mask(maskable, spec.masking))


def check_content(content: Content, spec: Spec) -> Rows:
    """Return the rows whose tokens or masks break a rule."""
    broken = {"special tokens": _special_tokens(content, spec)}
    if content.examples.starts_word is not None:
        broken["word starts"] = _word_starts(content, content.examples.starts_word, spec)
    if content.examples.masks is not None:
        broken |= _masks(content, spec)
        broken |= _whole_words(content, spec) if spec.masking.whole_word else {}
    return broken


def _special_tokens(content: Content, spec: Spec) -> np.ndarray:
    """Return the rows with a special or unused token in the text, or without a [CLS] or [SEP] of the layout."""
    ids, is_text, first = content.examples.input_ids, content.is_text, content.examples.offsets[:-1]
    is_wrong = ~is_text & (ids != spec.tokenizer.sep_id)
    is_wrong[1:] |= ~is_text[1:] & ~is_text[:-1]  # a segment without text
    is_wrong[first] = ids[first] != spec.tokenizer.cls_id
    is_wrong |= is_text & ~content.is_predicted & ~spec.may_be_text[content.originals]
    return np.unique(_rows_of(np.flatnonzero(is_wrong), content.examples.offsets))


def _word_starts(content: Content, starts_word: np.ndarray, spec: Spec) -> np.ndarray:
    """Return the rows in which a segment does not begin with a word, or a token that cannot begin a word does."""
    begins_segment = content.is_text & np.append(True, ~content.is_text[:-1])
    continues = spec.masking.is_subword[content.examples.input_ids] & ~begins_segment
    is_wrong = (begins_segment & ~starts_word) | (starts_word & (~content.is_text | continues))
    return np.unique(_rows_of(np.flatnonzero(is_wrong), content.examples.offsets))


def _masks(content: Content, spec: Spec) -> Rows:
    """Return the rows whose number of predictions is wrong, or that predict or insert a token that may not be."""
    masks = content.examples.masks
    assert masks is not None
    counts, expected = np.diff(masks.offsets), content.num_expected
    is_miscounted = (counts < 1) | (counts > expected) if spec.masking.whole_word else counts != expected
    row_of_mask = np.repeat(np.arange(len(counts)), counts)
    shown = content.examples.input_ids[content.places]
    is_random = (shown != spec.tokenizer.mask_id) & (shown != masks.original_ids)
    return {
        "predictions": np.flatnonzero(is_miscounted),
        "masked tokens": np.unique(row_of_mask[~spec.may_be_text[masks.original_ids]]),
        "random replacements": np.unique(row_of_mask[is_random & spec.is_reserved[shown]]),
    }


def _whole_words(content: Content, spec: Spec) -> Rows:
    """Return the rows in which a word is predicted in part, or was left out although it fits.

    Where not even the shortest word fits into the number of tokens to predict, one token of a word is predicted. The
    words of a segmenter, which finished examples do not store, consist of the words seen here: these are not predicted
    in part either, but may be left out.
    """
    is_text, offsets = content.is_text, content.examples.offsets
    begins = ~spec.masking.is_subword[content.originals] | ~is_text
    begins[1:] |= ~is_text[:-1]  # a segment may begin inside a word
    starts = np.flatnonzero(begins)
    rows = _rows_of(starts, offsets)
    # [CLS] and [SEP] count as words too long to fit.
    sizes = np.where(is_text[starts], np.diff(np.append(starts, len(is_text))), len(is_text))
    predicted = np.add.reduceat(content.is_predicted, starts, dtype=np.int64)
    counts = np.add.reduceat(content.is_predicted, offsets[:-1], dtype=np.int64)
    is_segmented = spec.config.word_segmenter is not None
    shortest = np.minimum.reduceat(sizes, np.searchsorted(starts, offsets[:-1]))
    is_exception = (is_segmented | (shortest > content.num_expected)) & (counts == 1)
    in_part = (predicted > 0) & (predicted < sizes) & ~is_exception[rows]
    broken = {"whole words": np.unique(rows[in_part])}
    if not is_segmented:
        left_out = (predicted == 0) & (sizes <= (content.num_expected - counts)[rows])
        broken["words that fit"] = np.unique(rows[left_out])
    return broken


def _rows_of(places: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the row of each place among all tokens."""
    return np.searchsorted(offsets, places, side="right") - 1
