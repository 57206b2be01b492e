"""Pseudo-log-likelihoods of texts, and accuracy on minimal pairs (Salazar et al., 2020).

The pseudo-log-likelihood (PLL) of a text is the sum over its tokens of the log-probability that the model gives a token
when it is masked, in nats. A text of n tokens becomes n sequences, and only the masked positions are decoded.
`word-l2r` also masks the next tokens of the same word, which would give the token away (Kauf and Ivanova, 2023).
"""

import contextlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert_pretrain.config import Config, DataConfig, TrainConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.io.files import atomic_path
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.metrics import perplexity
from bert_pretrain.ragged import offsets_of, positions_within
from bert_pretrain.text.readers import read_records, repair_surrogates
from bert_pretrain.text.sources import resolve
from bert_pretrain.text.text_files import ByteRange
from bert_pretrain.tools.inference import batches_by_length, checked, open_bert, report_truncated
from bert_pretrain.tools.texts import Text, Texts, check_output_file, encoded_groups, is_empty

METRICS = ("original", "word-l2r")
GOOD, BAD = "sentence_good", "sentence_bad"  # fields of a minimal pair, as in BLiMP (Warstadt et al., 2020)
DEFAULT_GROUP = "UID"  # field with the phenomenon in BLiMP
DECODED_ROWS = 256  # masked positions with logits at the same time: 31 MB in fp32 for 30,522 tokens
Progress = Callable[[float], object]  # called with the number of texts in each batch, which can be a fraction


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
    texts = Texts(
        inputs, config.data.text_field, strips_accents=scorer.bert.tokenizer.strips_accents,
        encoding=config.data.encoding, skip_empty=skip_empty,
    )  # fmt: skip
    locations = [source.location for source in texts.sources]
    check_output_file(output, locations)
    check_output_file(json_file, locations, "--json")
    total, num_tokens, names = 0.0, 0, scorer.bert.tokenizer.tokens
    bar_of_texts = progress_bar(total=texts.num_texts, unit=" texts", unit_scale=True, desc="score")
    with bar_of_texts as bar, _writer(output) as write:
        for text, ids, scores in scorer.scored(texts, bar.update):
            pll = float(scores.sum())
            total, num_tokens = total + pll, num_tokens + len(ids)
            record = {"source": text.location, "row": text.row, "text": text.text, "tokens": len(ids)}
            record |= {"pll": round(pll, 6), "pll_per_token": round(pll / len(ids), 6)}
            if per_token:
                record["token_texts"] = [names[index] for index in ids]
                record["token_plls"] = [round(score, 6) for score in scores.tolist()]
            write(record)
    report_truncated(scorer.num_truncated, scorer.bert)
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
    strips_accents = scorer.bert.tokenizer.strips_accents
    pairs = read_pairs(inputs, by, strips_accents=strips_accents, encoding=config.data.encoding)
    texts = [text for good, bad, _ in pairs for text in (good, bad)]
    check_output_file(output, (text.location for text in texts))
    check_output_file(json_file, (text.location for text in texts), "--json")
    scorer.refuse_long(texts)  # before hours of scoring
    correct: dict[str, list[bool]] = defaultdict(list)
    with progress_bar(total=len(pairs), unit=" pairs", unit_scale=True, desc="score") as bar, _writer(output) as write:
        scored = scorer.scored(texts, lambda number: bar.update(number / 2))
        plls = (float(scores.sum()) for _, _, scores in scored)
        for (good, bad, group), pll_good, pll_bad in zip(pairs, plls, plls, strict=True):
            correct[group].append(pll_good > pll_bad)
            record: dict[str, Any] = {"source": good.location, "row": good.row}
            record |= {by or DEFAULT_GROUP: group} if group else {}
            record |= {GOOD: good.text, BAD: bad.text, "pll_good": round(pll_good, 6), "pll_bad": round(pll_bad, 6)}
            write({**record, "correct": pll_good > pll_bad})
    groups = {name: _accuracy(results) for name, results in sorted(correct.items()) if name}
    return _accuracy(list(itertools.chain.from_iterable(correct.values()))), groups


def _accuracy(correct: list[bool]) -> dict[str, float]:
    return {"accuracy": sum(correct) / len(correct), "pairs": len(correct)}


def read_pairs(
    inputs: Sequence[str], by: str | None, *, strips_accents: bool = False, encoding: str = "utf-8"
) -> list[tuple[Text, Text, str]]:
    """Return the good and the bad sentence of each record of `.jsonl` inputs, and its group.

    The group is the value of the field `by`, which every record must have. Without `by`, it is the value of `UID`, or
    "" if there is none.
    """
    pairs = []
    for source in resolve(inputs, DataConfig(encoding=encoding)):
        if source.format not in ("json", "jsonl"):
            remedy = f"use records with {GOOD} and {BAD}"
            raise InputError("pairs must be in .jsonl", where=source.location, remedy=remedy)
        for record, position in read_records(ByteRange(source), Counter()):
            for field in (GOOD, BAD, by) if by else (GOOD, BAD):
                value = record.get(field)
                is_valid = isinstance(value, str | int if field == by else str)
                if not is_valid or is_empty(str(value), strips_accents=strips_accents):
                    what = f"the record has no text in '{field}' (its fields: {', '.join(list(record)[:8])})"
                    raise InputError(what, where=str(position), remedy="add it, or remove the record")
            texts = (repair_surrogates(record[field]) for field in (GOOD, BAD))
            good, bad = (Text(text, source.location, position.number, "line") for text in texts)
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
    """Holds a model and a scoring metric.

    `batch_tokens` includes padding. `max_length` is that of `length_limit`.
    """

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
        self.bert = open_bert(model, config, ("cls.predictions",), max_length=max_length)
        self.metric = metric
        self.batch_tokens = batch_tokens or self.bert.batch_tokens
        self.num_truncated = 0

    def refuse_long(self, texts: Iterable[Text]) -> None:
        """Raise `InputError` for a text that would be truncated."""
        for group, ids in encoded_groups(texts, self.bert.tokenizer, warns=False):
            for text, text_ids in zip(group, ids, strict=True):
                if len(text_ids) + 2 > self.bert.max_length:
                    what = f"the text has {len(text_ids) + 2} tokens, the model is trained for {self.bert.max_length}"
                    remedy = "split it into sentences, because scores of truncated texts cannot be compared; or read "
                    remedy += "more than the model is trained for with --max-length"
                    raise InputError(f"{what}: {text.text[:60]!r}", where=text.where, remedy=remedy)

    def scored(self, texts: Iterable[Text], on_batch: Progress) -> Iterator[tuple[Text, np.ndarray, np.ndarray]]:
        """Yield each text in order, with its ids truncated to the maximum length and their scores, (tokens,)."""
        max_tokens = self.bert.max_length - 2
        for group, ids in encoded_groups(texts, self.bert.tokenizer):
            self.num_truncated += sum(len(each) > max_tokens for each in ids)
            truncated = [each[:max_tokens] for each in ids]
            yield from zip(group, truncated, self.token_scores(truncated, on_batch), strict=True)

    def token_scores(self, texts: Sequence[np.ndarray], on_batch: Progress) -> list[np.ndarray]:
        """Return the log-probability in nats of each token, given the rest of the text, as (tokens,) float64 per text.

        Texts are ids without [CLS] and [SEP].
        """
        sequences = [self.bert.add_special_tokens(ids) for ids in texts]
        ends = [self._mask_ends(sequence) for sequence in sequences]
        num_tokens = np.array([len(ids) for ids in texts])
        text_of = np.repeat(np.arange(len(texts)), num_tokens)  # (masked,): every token is masked once
        position_of = 1 + positions_within(offsets_of(num_tokens))  # after [CLS]
        scores = np.zeros(len(text_of))
        with self.bert.running():
            for batch in batches_by_length(num_tokens[text_of] + 2, self.batch_tokens):
                copies, labels = [], []
                for text, position in zip(text_of[batch].tolist(), position_of[batch].tolist(), strict=True):
                    copies.append(sequences[text].copy())
                    copies[-1][position : ends[text][position]] = self.bert.tokenizer.mask_id
                    labels.append(sequences[text][position])
                scores[batch] = self._log_probs(copies, position_of[batch], np.array(labels))
                # Slightly less, because tqdm warns if rounding brings the sum above the total.
                on_batch((1 - 1e-9) * float((1 / num_tokens[text_of[batch]]).sum()))
        return np.split(scores, np.cumsum(num_tokens)[:-1])

    def _mask_ends(self, sequence: np.ndarray) -> np.ndarray:
        """Return for each token of `[CLS] … [SEP]` the position after the last token that is masked to score it."""
        next_tokens = np.arange(1, len(sequence) + 1)
        if self.metric == "original":
            return next_tokens
        word_starts = np.flatnonzero(np.append(~self.bert.tokenizer.is_subword[sequence], True))
        return word_starts[np.searchsorted(word_starts, next_tokens)]

    def _log_probs(self, sequences: Sequence[np.ndarray], positions: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the log-probability of one label per sequence at its position, (sequences,) float64."""
        packed = self.bert.pack(sequences)
        masked = packed[3][:-1].long() + torch.from_numpy(positions).to(self.bert.device)
        features = self.bert.network(*packed, masked).mlm_features  # (sequences, hidden)
        targets = torch.from_numpy(labels).to(self.bert.device)[:, None]
        blocks = []
        for begin in range(0, len(labels), DECODED_ROWS):
            block = slice(begin, begin + DECODED_ROWS)
            logits = self.bert.network.decode(features[block]).float()  # (rows, vocabulary)
            blocks.append(logits.gather(1, targets[block]).squeeze(1) - logits.logsumexp(dim=1))
        return checked(torch.cat(blocks)).cpu().double().numpy()
