"""Pseudo-log-likelihoods of texts, and accuracy on minimal pairs (Salazar et al., 2020).

The pseudo-log-likelihood (PLL) of a text is the sum over its tokens of the log-probability that the model gives a token
when it is masked, in nats. A text of n tokens becomes n sequences, and only the masked positions are decoded.
`word-l2r` also masks the next tokens of the same word, which would give the token away (Kauf and Ivanova, 2023).
"""

import contextlib
import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bert_pretrain.config import Config, DataConfig, TrainConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.examples.examples import Examples, Masks
from bert_pretrain.io.files import atomic_path
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.metrics import perplexity
from bert_pretrain.model.bert import Packed
from bert_pretrain.model.sequences import open_bert
from bert_pretrain.ragged import offsets_of, positions_within, spans
from bert_pretrain.text.readers import read_records
from bert_pretrain.text.sources import resolve
from bert_pretrain.text.text_files import ByteRange
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.texts import Text, TextEncoder, Texts, check_output_file, is_empty

METRICS = ("original", "word-l2r")
GOOD, BAD = "sentence_good", "sentence_bad"  # fields of a minimal pair, as in BLiMP (Warstadt et al., 2020)
DEFAULT_GROUP = "UID"  # field with the phenomenon in BLiMP
DECODED_ROWS = 256  # masked positions with logits at the same time: 31 MB in fp32 for 30,522 tokens


def score_texts(
    model: Path,
    inputs: Sequence[str],
    *,
    config: Config,
    skip_empty: bool = False,
    per_token: bool = False,
    output: Path | None = None,
    json_file: Path | None = None,
    **scoring: Any,
) -> dict[str, float]:
    """Score every text of the inputs.

    `scoring` are options of `Scorer`. `output` is a file of JSON lines with the score of each text, and with
    `per_token` of every token. `json_file`, which the caller writes, must not be an input. Return the total `pll` and
    the `pll_per_token` in nats, the `pseudo_perplexity` of the corpus, and the numbers of `texts` and `tokens`
    (without [CLS] and [SEP]).
    """
    scorer = Scorer(model, config.train, **scoring)
    tokenizer = scorer.bert.tokenizer
    texts = Texts(inputs, config.data, tokenizer, skip_empty=skip_empty)
    check_output_file(output, texts.locations)
    check_output_file(json_file, texts.locations, "--json")
    total = 0.0
    num_tokens = 0
    progress = progress_bar(total=texts.num_texts, unit=" texts", unit_scale=True, desc="score")
    with progress as bar, _writer(output) as write:
        for text, ids, scores in scorer.scored(scorer.encoder.groups(texts), bar.update):
            pll = float(scores.sum())
            total += pll
            num_tokens += len(ids)
            record = {
                "source": text.location,
                "row": text.row,
                "text": text.text,
                "tokens": len(ids),
                "pll": round(pll, 6),
                "pll_per_token": round(pll / len(ids), 6),
            }
            if per_token:
                record["token_texts"] = [tokenizer.tokens[index] for index in ids]
                record["token_plls"] = np.round(scores, 6).tolist()
            write(record)
    scorer.encoder.report()
    return {
        "pll": total,
        "pll_per_token": total / num_tokens,
        "pseudo_perplexity": perplexity(-total / num_tokens),
        "texts": texts.num_texts,
        "tokens": num_tokens,
    }


def score_pairs(
    model: Path,
    inputs: Sequence[str],
    *,
    config: Config,
    by: str | None = None,
    output: Path | None = None,
    json_file: Path | None = None,
    **scoring: Any,
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Measure the share of minimal pairs in which the good sentence has the higher pseudo-log-likelihood.

    Inputs are `.jsonl` with `sentence_good` and `sentence_bad`. The other parameters are those of `score_texts`.
    Return the `accuracy` and the number of `pairs`, first of all pairs, then of each value of the field `by`, or of
    `UID` if records have it and `by` is None. Equal scores count as wrong.
    """
    scorer = Scorer(model, config.train, **scoring)
    pairs = read_pairs(inputs, by, config.data, scorer.bert.tokenizer)
    texts = [text for good, bad, _ in pairs for text in (good, bad)]
    check_output_file(output, (text.location for text in texts))
    check_output_file(json_file, (text.location for text in texts), "--json")
    remedy = "split it into sentences, because scores of truncated texts cannot be compared; or read more than the "
    remedy += "model is trained for with --max-length"
    groups = list(scorer.encoder.groups(texts, too_long=remedy))  # errors come before hours of scoring
    correct: dict[str, list[bool]] = defaultdict(list)
    with progress_bar(total=len(pairs), unit=" pairs", unit_scale=True, desc="score") as bar, _writer(output) as write:
        scored = scorer.scored(groups, lambda number: bar.update(number / 2))
        plls = (float(scores.sum()) for _, _, scores in scored)
        for (good, bad, group), pll_good, pll_bad in zip(pairs, plls, plls, strict=True):
            correct[group].append(pll_good > pll_bad)
            write(
                {
                    "source": good.location,
                    "row": good.row,
                    **({by or DEFAULT_GROUP: group} if group else {}),
                    GOOD: good.text,
                    BAD: bad.text,
                    "pll_good": round(pll_good, 6),
                    "pll_bad": round(pll_bad, 6),
                    "correct": pll_good > pll_bad,
                }
            )
    scorer.encoder.report()
    results = [each for values in correct.values() for each in values]
    return _accuracy(results), {name: _accuracy(values) for name, values in sorted(correct.items()) if name}


def _accuracy(correct: list[bool]) -> dict[str, float]:
    return {"accuracy": sum(correct) / len(correct), "pairs": len(correct)}


def read_pairs(
    inputs: Sequence[str],
    by: str | None,
    config: DataConfig,
    tokenizer: Tokenizer,
) -> list[tuple[Text, Text, str]]:
    """Return the good and the bad sentence of each record of `.jsonl` inputs, and its group.

    The group is the value of the field `by`, which every record must have. Without `by`, it is the value of `UID`, or
    "" if there is none.
    """
    pairs = []
    for source in resolve(inputs, config):
        if source.format not in ("json", "jsonl"):
            raise InputError(
                "pairs must be in .jsonl",
                where=source.location,
                remedy=f"use records with {GOOD} and {BAD}",
            )
        for record, position in read_records(ByteRange(source), Counter()):
            for field in (GOOD, BAD, by) if by else (GOOD, BAD):
                value = record.get(field)
                is_valid = isinstance(value, str | int if field == by else str)
                if not is_valid or is_empty(str(value), tokenizer):
                    raise InputError(
                        f"the record has no text in '{field}' (its fields: {', '.join(list(record)[:8])})",
                        where=str(position),
                        remedy="add it, or remove the record",
                    )
            good, bad = (Text(record[field], source.location, position.number, "line") for field in (GOOD, BAD))
            group = record.get(by or DEFAULT_GROUP)
            pairs.append((good, bad, "" if group is None else str(group)))
    if not pairs:
        raise InputError("there are no pairs", where=", ".join(inputs), remedy=f"add records with {GOOD} and {BAD}")
    return pairs


@contextlib.contextmanager
def _writer(output: Path | None) -> Iterator[Callable[[dict[str, Any]], object]]:
    """Yield a function that writes a record as a JSON line to `output`, atomically, or that does nothing for None."""
    if output is None:
        yield lambda record: None
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(output) as temporary, temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        yield lambda record: file.write(json.dumps(record, ensure_ascii=False) + "\n")


class Scorer:
    """Holds a model and a scoring metric. `max_length` is that of `length_limit`."""

    def __init__(
        self,
        model: Path,
        config: TrainConfig,
        metric: str = "original",
        batch_tokens: int | None = None,
        max_length: int | None = None,
    ) -> None:
        if metric not in METRICS:
            raise ConfigError(f"unknown metric '{metric}'", where="--metric", remedy=f"choose {' or '.join(METRICS)}")
        self.bert = open_bert(model, config, ("mlm_head",), max_length=max_length)
        self.encoder = TextEncoder(self.bert)
        self._metric = metric
        self._batch_tokens = batch_tokens

    def scored(
        self,
        groups: Iterable[tuple[list[Text], Examples]],
        on_texts: Callable[[float], object],
    ) -> Iterator[tuple[Text, np.ndarray, np.ndarray]]:
        """Yield each text with its ids and their log-probabilities in nats, given the rest of the text, (tokens,).

        Neither has [CLS] and [SEP]. `on_texts` gets the number of texts of each batch, which can be a fraction.
        """
        for group, sequences in groups:
            copies = MaskedCopies(sequences, self.bert.tokenizer, masks_words=self._metric == "word-l2r")
            num_tokens = sequences.lengths - 2

            def on_batch(rows: np.ndarray, share: np.ndarray = 1 / num_tokens[copies.text_of]) -> None:
                # Slightly less, because tqdm warns if rounding brings the sum above the total.
                on_texts((1 - 1e-9) * float(share[rows].sum()))

            num_outputs = np.ones_like(copies.lengths)
            scores = self.bert.run(
                copies,
                self._head,
                num_outputs,
                on_batch,
                self._batch_tokens,
            ).astype(np.float64)
            ids = np.split(sequences.input_ids, sequences.offsets[1:-1])
            for text, text_ids, text_scores in zip(
                group, ids, np.split(scores, np.cumsum(num_tokens)[:-1]), strict=True
            ):
                yield text, text_ids[1:-1], text_scores

    def _head(self, packed: Packed, sequences: Examples) -> Tensor:
        """Return the log-probability of the original token at each mask, (masks,)."""
        assert sequences.masks is not None
        masked = torch.from_numpy(sequences.masked_indices).to(self.bert.device)
        labels = torch.from_numpy(sequences.masks.original_ids.astype(np.int64)).to(self.bert.device)
        features = self.bert.network(packed, masked).mlm_features  # (masks, hidden)
        losses = []
        for begin in range(0, len(labels), DECODED_ROWS):
            rows = slice(begin, begin + DECODED_ROWS)
            logits = self.bert.network.decode(features[rows]).float()  # (rows, vocabulary)
            losses.append(F.cross_entropy(logits, labels[rows], reduction="none"))
        return -torch.cat(losses)


class MaskedCopies:
    """A copy of a text for each of its tokens, in which this token is masked. Copies are made when they are taken.

    With `masks_words`, the following tokens of the same word are masked too.
    """

    def __init__(
        self,
        texts: Examples,
        tokenizer: Tokenizer,
        *,
        masks_words: bool,
    ) -> None:
        num_tokens = texts.lengths - 2
        self._texts = texts
        self._mask_id = tokenizer.mask_id
        self.text_of = np.repeat(np.arange(len(texts)), num_tokens)  # (copies,)
        self.lengths = texts.lengths[self.text_of]
        self._positions = 1 + positions_within(offsets_of(num_tokens))  # of the scored token, after [CLS]
        self._num_masked = np.ones_like(self._positions)
        if masks_words:
            tokens = texts.offsets[self.text_of] + self._positions  # indices into the ids of all texts
            word_starts = np.flatnonzero(~tokenizer.is_subword[texts.input_ids])
            self._num_masked = word_starts[np.searchsorted(word_starts, tokens + 1)] - tokens

    def take(self, rows: np.ndarray) -> Examples:
        """Return copies, whose only mask with a label is the scored token."""
        copies = self._texts.take(self.text_of[rows])
        scored = copies.offsets[:-1] + self._positions[rows]
        labels = copies.input_ids[scored]
        copies.input_ids[spans(scored, self._num_masked[rows])] = self._mask_id
        masks = Masks(self._positions[rows], labels, offsets=np.arange(len(rows) + 1))
        return dataclasses.replace(copies, masks=masks)
