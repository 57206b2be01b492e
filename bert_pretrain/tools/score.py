"""Pseudo-log-likelihoods of texts, and accuracy on minimal pairs (Salazar et al., 2020).

The pseudo-log-likelihood (PLL) of a text is the sum over its tokens of the log-probability that the model gives each
one where it is masked, in nats. A text of n tokens is n sequences, which run packed with those of other texts, and only
the masked positions are decoded. `word-l2r` also masks the rest of the same word, so that a word of several pieces is
not predicted from its own end (Kauf and Ivanova, 2023).
"""

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bert_pretrain.config import TextField, TrainConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.io.files import atomic_path
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.report.curves import perplexity
from bert_pretrain.text.ragged import offsets_of, positions_within
from bert_pretrain.tools.inference import Bert, batches_by_length, open_bert
from bert_pretrain.tools.minimal_pairs import Pair, read_pairs
from bert_pretrain.tools.texts import Text, Texts, encoded_groups, refuse_input_as_output

METRICS = ("original", "word-l2r")


class Unit(NamedTuple):
    """A unit of log-probabilities."""

    nats: float
    suffix: str
    """Of the names of figures in this unit."""

    def figures(self, **nats: float) -> dict[str, float]:
        """Return figures given in nats, in this unit and under its names."""
        return {f"{name}{self.suffix}": value / self.nats for name, value in nats.items()}


NATS, BITS = Unit(1.0, ""), Unit(math.log(2), "_bits")
DECODED_ROWS = 256
"""Masked positions whose logits exist at once: 31 MB in fp32 for 30,522 tokens."""


@dataclass(frozen=True)
class Scoring:
    """A model and its scoring metric."""

    bert: Bert
    metric: str
    batch_tokens: int


@dataclass(frozen=True)
class Scored:
    """The score of one text."""

    text: Text
    ids: np.ndarray  # (tokens,)
    token_scores: np.ndarray  # (tokens,), in nats

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def pll(self) -> float:
        return float(self.token_scores.sum())


def score_texts(
    model: Path,
    inputs: Sequence[str],
    *,
    config: TrainConfig,
    metric: str = "original",
    batch_tokens: int | None = None,
    text_field: TextField = "text",
    encoding: str = "utf-8",
    skip_empty: bool = False,
    prefix_field: str | None = None,
    per_token: bool = False,
    unit: Unit = NATS,
    output: Path | None = None,
) -> dict[str, float]:
    """Score every text of some inputs by a model.

    Each line of `.txt` is a text. `batch_tokens` run at once, padding included. `prefix_field` is a field of records
    with text before each text: the network sees it, but it is neither masked nor scored, so that scores are conditional
    on it. `output` is a file of JSON lines with the score of each text, and with `per_token` of every token. Returns
    `pll` (of all texts) and `pll_per_token`, in bits with the ending `_bits`, `pseudo_perplexity` (per token, over the
    whole corpus), and the numbers of `texts` and `tokens`, without [CLS], [SEP] and prefixes.
    """
    scoring = _open(model, config, metric, batch_tokens)
    texts = Texts.open(inputs, text_field, encoding=encoding, skip_empty=skip_empty, prefix_field=prefix_field)
    refuse_input_as_output(output, (source.location for source in texts.sources))
    truncated = _check_lengths(scoring, texts, truncates=True)
    total, num_tokens = 0.0, 0
    with progress_bar(total=texts.number, unit=" texts", unit_scale=True, desc="score") as bar, _lines(output) as write:
        for scored in _scored(scoring, texts, bar.update):
            total += scored.pll
            num_tokens += scored.num_tokens
            write(_text_record(scored, unit, scoring.bert.tokenizer.tokens if per_token else None))
    if truncated:
        what = f"{truncated:,} texts longer than the model's {scoring.bert.max_length} positions"
        print(f"truncated  {what}: the score is that of the beginning")
    if texts.num_skipped:
        print(f"skipped    {texts.num_skipped:,} empty texts")
    return {
        **unit.figures(pll=total, pll_per_token=total / num_tokens),
        "pseudo_perplexity": perplexity(-total / num_tokens),
        "texts": texts.number,
        "tokens": num_tokens,
    }


def score_pairs(
    model: Path,
    inputs: Sequence[str],
    *,
    config: TrainConfig,
    metric: str = "original",
    batch_tokens: int | None = None,
    by: str | None = None,
    encoding: str = "utf-8",
    prefix_field: str | None = None,
    unit: Unit = NATS,
    output: Path | None = None,
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Measure for how many minimal pairs a model gives the good sentence the higher pseudo-log-likelihood.

    Inputs are `.jsonl` with `sentence_good` and `sentence_bad`, as BLiMP's. `by` is a field for whose values accuracy
    is reported too; by default `UID` where records have it. All else is as in `score_texts`. Returns `accuracy` (equal
    scores count as wrong) and the number of `pairs`, in total and for every value of the field.
    """
    scoring = _open(model, config, metric, batch_tokens)
    pairs = read_pairs(inputs, by, prefix_field, encoding=encoding)
    correct: dict[str | None, list[bool]] = defaultdict(list)
    refuse_input_as_output(output, (pair.good.location for pair in pairs))
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    _check_lengths(scoring, texts)
    with progress_bar(total=len(pairs), unit=" pairs", unit_scale=True, desc="score") as bar, _lines(output) as write:
        scores = _scored(scoring, texts, lambda number: bar.update(number / 2))
        for pair, good, bad in zip(pairs, scores, scores, strict=True):
            is_correct = good.pll > bad.pll
            correct[pair.group].append(is_correct)
            write(_pair_record(pair, good, bad, is_correct, unit))
    named = {name: correct[name] for name in sorted(name for name in correct if name is not None)}
    every = [each for found in correct.values() for each in found]
    total, *groups = ({"accuracy": sum(each) / len(each), "pairs": len(each)} for each in (every, *named.values()))
    return total, dict(zip(named, groups, strict=True))


def _text_record(scored: Scored, unit: Unit, tokens: Sequence[str] | None) -> dict[str, Any]:
    """Return the record of a text, with the scores of its tokens if the vocabulary is given."""
    figures = unit.figures(pll=scored.pll, pll_per_token=scored.pll / scored.num_tokens)
    record = {
        "source": scored.text.location,
        "row": scored.text.row,
        **_prefix(scored.text),
        "text": scored.text.text,
        "tokens": scored.num_tokens,
        **{name: round(value, 6) for name, value in figures.items()},
    }
    if tokens is not None:
        record["token_texts"] = [tokens[index] for index in scored.ids]
        record[f"token_plls{unit.suffix}"] = [round(score / unit.nats, 6) for score in scored.token_scores.tolist()]
    return record


def _prefix(text: Text) -> dict[str, str]:
    return {} if text.prefix is None else {"prefix": text.prefix}


def _pair_record(pair: Pair, good: Scored, bad: Scored, is_correct: bool, unit: Unit) -> dict[str, Any]:
    return {
        "source": good.text.location,
        "row": good.text.row,
        **({} if pair.group is None else {pair.field: pair.group}),
        **_prefix(good.text),
        "sentence_good": good.text.text,
        "sentence_bad": bad.text.text,
        **{name: round(value, 6) for name, value in unit.figures(pll_good=good.pll, pll_bad=bad.pll).items()},
        "correct": is_correct,
    }


def _open(model: Path, config: TrainConfig, metric: str, batch_tokens: int | None) -> Scoring:
    if metric not in METRICS:
        raise ConfigError(f"the metric is '{metric}'", where="--metric", remedy=f"choose {' or '.join(METRICS)}")
    bert = open_bert(model, config, ("cls.predictions",))
    return Scoring(bert, metric, batch_tokens or bert.batch_tokens)


@contextlib.contextmanager
def _lines(output: Path | None) -> Iterator[Callable[[dict[str, Any]], object]]:
    """Yield a function that writes a record to a file of JSON lines, written whole or not at all; None: no file."""
    if output is None:
        yield lambda record: None
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(output) as temporary, temporary.open("w", encoding="utf-8") as file:
        yield lambda record: file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _check_lengths(scoring: Scoring, texts: Iterable[Text], *, truncates: bool = False) -> int:
    """Return the number of texts that are too long for the model, or refuse them."""
    longest, num_long = scoring.bert.max_length, 0
    for group in encoded_groups(texts, scoring.bert.tokenizer, warns=False):
        for text, ids, prefix in zip(group.texts, group.ids, group.prefixes, strict=True):
            length = len(prefix) + len(ids) + 2
            num_long += length > longest
            if length > longest and (not truncates or len(prefix) + 2 >= longest):
                raise InputError(
                    f"the text has {length} tokens, the model {longest} positions: {text.text[:60]!r}",
                    where=text.where,
                    remedy="split it into sentences; the score of a truncated text is not comparable",
                )
    return num_long


def _scored(scoring: Scoring, texts: Iterable[Text], done: Callable[[float], object]) -> Iterator[Scored]:
    """Yield the scores of texts in their order."""
    for group in encoded_groups(texts, scoring.bert.tokenizer):
        room = scoring.bert.max_length - 2
        kept = [ids[: room - len(prefix)] for ids, prefix in zip(group.ids, group.prefixes, strict=True)]
        scores = token_scores(scoring, kept, group.prefixes, done)
        for text, ids, found in zip(group.texts, kept, scores, strict=True):
            yield Scored(text, ids, found)


def token_scores(
    scoring: Scoring, texts: Sequence[np.ndarray], prefixes: Sequence[np.ndarray], done: Callable[[float], object]
) -> list[np.ndarray]:
    """Return the log-probability of every token of texts, in nats, given the rest of the text and its prefix.

    Texts and prefixes are ids without [CLS] and [SEP]; the results are (tokens,) float64. After every batch, `done` is
    called with the number of texts in it, as a fraction.
    """
    bert = scoring.bert
    sequences = [bert.add_special_tokens(np.concatenate(pair)) for pair in zip(prefixes, texts, strict=True)]
    ends = [_mask_ends(sequence, scoring) for sequence in sequences]
    num_tokens = np.array([len(ids) for ids in texts])
    text_of = np.repeat(np.arange(len(texts)), num_tokens)  # (masked,): each token of each text is masked in turn
    first = np.array([1 + len(prefix) for prefix in prefixes])  # after [CLS]
    position_of = first[text_of] + positions_within(offsets_of(num_tokens))
    lengths = np.array([len(sequence) for sequence in sequences])
    scores = np.zeros(len(text_of))
    with bert.running():
        for batch in batches_by_length(lengths[text_of], scoring.batch_tokens):
            masked = list(zip(text_of[batch].tolist(), position_of[batch].tolist(), strict=True))
            copies = [_masked(sequences[text], position, ends[text][position], bert) for text, position in masked]
            labels = np.array([sequences[text][position] for text, position in masked])
            scores[batch] = _log_probabilities(bert, copies, position_of[batch], labels)
            done(float((1 / num_tokens[text_of[batch]]).sum()))
    return np.split(scores, np.cumsum(num_tokens)[:-1])


def _mask_ends(sequence: np.ndarray, scoring: Scoring) -> np.ndarray:
    """Return for every token of `[CLS] … [SEP]` the end of the tokens that are masked together with it."""
    follows = np.arange(1, len(sequence) + 1)
    if scoring.metric == "original":
        return follows
    word_begins = np.append(~scoring.bert.tokenizer.is_subword[sequence], True)
    begins = np.flatnonzero(word_begins)
    return begins[np.searchsorted(begins, follows)]


def _masked(sequence: np.ndarray, begin: int, end: int, bert: Bert) -> np.ndarray:
    copy = sequence.copy()
    copy[begin:end] = bert.tokenizer.mask_id
    return copy


def _log_probabilities(
    bert: Bert, sequences: Sequence[np.ndarray], positions: np.ndarray, labels: np.ndarray
) -> np.ndarray:
    """Return the log-probability of one label per sequence, at the given position, (sequences,) float64."""
    packed = bert.pack(sequences)
    masked = packed[3][:-1].long() + torch.from_numpy(positions).to(bert.device)
    features = bert.network(*packed, masked).mlm_features  # (sequences, hidden)
    wanted = torch.from_numpy(labels).to(bert.device)[:, None]
    found = []
    for begin in range(0, len(labels), DECODED_ROWS):
        block = slice(begin, begin + DECODED_ROWS)
        logits = bert.network.decode(features[block]).float()  # (rows, vocabulary)
        found.append(logits.gather(1, wanted[block]).squeeze(1) - logits.logsumexp(dim=1))
    return torch.cat(found).cpu().double().numpy()
