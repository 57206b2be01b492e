"""`evaluate`: metrics of a model on a data folder, on texts, or on minimal pairs, as a table and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError
from bert_pretrain.storage.files import write_json


@dataclass(frozen=True)
class Scores:
    """Flags for scoring texts and pairs; None where not given."""

    metric: str | None
    batch_tokens: int | None
    output: Path | None
    skip_empty: bool
    by: str | None
    prefix_field: str | None = None
    per_token: bool = False
    bits: bool = False


def evaluate(
    model: Path,
    *,
    config: Config,
    data: Path | None,
    texts: Sequence[str],
    pairs: Sequence[str],
    scores: Scores,
    json: Path | None,
) -> None:
    """Evaluate a model on one of data, texts and pairs, print the metrics, and write them to `json` if given."""
    _check_flags(data, texts, pairs, scores)
    if data is not None:
        from bert_pretrain.train.evaluation import evaluate as evaluate_data

        _report(evaluate_data(model, data, config=config.train), {}, json)
        return
    from bert_pretrain.tools.score import BITS, NATS, score_pairs, score_texts

    options: dict[str, Any] = {
        "config": config.train,
        "metric": scores.metric or "original",
        "batch_tokens": scores.batch_tokens,
        "output": scores.output,
        "prefix_field": scores.prefix_field,
        "unit": BITS if scores.bits else NATS,
        "encoding": config.data.encoding,
    }
    if pairs:
        figures, groups = score_pairs(model, pairs, by=scores.by, **options)
    else:
        field, skip_empty = config.data.text_field, scores.skip_empty
        options |= {"text_field": field, "skip_empty": skip_empty, "per_token": scores.per_token}
        figures, groups = score_texts(model, texts, **options), {}
    _report(figures, groups, json)
    if scores.output is not None:
        print(f"{'scores':<24}{scores.output}")


def _check_flags(data: Path | None, texts: Sequence[str], pairs: Sequence[str], scores: Scores) -> None:
    given = [flag for flag, value in (("--data", data), ("--text", texts), ("--pairs", pairs)) if value]
    if len(given) != 1:
        raise ConfigError(
            f"there is {' and '.join(given) or 'nothing'} to evaluate on",
            where="MODEL",
            remedy="give one of --data DIR, --text INPUT or --pairs INPUT",
        )
    belong = {
        "--metric": (scores.metric, ("--text", "--pairs")),
        "--batch-tokens": (scores.batch_tokens, ("--text", "--pairs")),
        "--output": (scores.output, ("--text", "--pairs")),
        "--skip-empty": (scores.skip_empty, ("--text",)),
        "--by": (scores.by, ("--pairs",)),
        "--prefix-field": (scores.prefix_field, ("--text", "--pairs")),
        "--per-token": (scores.per_token, ("--text",)),
        "--bits": (scores.bits, ("--text", "--pairs")),
    }
    for flag, (value, modes) in belong.items():
        if value and given[0] not in modes:
            what = f"{flag} has no meaning with {given[0]}"
            raise ConfigError(what, where=flag, remedy=f"leave it out; it is for {modes[0]}")
    if scores.per_token and scores.output is None:
        what, remedy = "the scores of tokens are written to a file", "add --output FILE.jsonl"
        raise ConfigError(what, where="--per-token", remedy=remedy)


def _report(figures: Mapping[str, float], groups: Mapping[str, Mapping[str, float]], json: Path | None) -> None:
    for name, group in groups.items():
        print(f"{name:<54}{group['accuracy']:>8.2%}{group['pairs']:>9,}")
    for name, value in figures.items():
        print(f"{name:<24}{value:>16,.4f}" if isinstance(value, float) else f"{name:<24}{value:>16,}")
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        write_json(json, {**figures, **({"groups": groups} if groups else {})})
