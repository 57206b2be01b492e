"""`evaluate`: metrics of a model on a data folder, on texts, or on minimal pairs, as a table and as JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.examples import with_error
from bert_pretrain.io.files import write_json


def evaluate(
    model: Path,
    *,
    config: Config,
    data: Path | None,
    texts: Sequence[str],
    pairs: Sequence[str],
    json: Path | None,
    metric: str | None = None,
    batch_tokens: int | None = None,
    output: Path | None = None,
    skip_empty: bool = False,
    by: str | None = None,
    prefix_field: str | None = None,
    per_token: bool = False,
    bits: bool = False,
) -> None:
    """Evaluate a model on one of data, texts and pairs, print the metrics, and write them to `json` if given."""
    of_texts: dict[str, Any] = {"--skip-empty": skip_empty, "--per-token": per_token}
    of_both = {
        "--metric": metric, "--batch-tokens": batch_tokens, "--output": output, "--prefix-field": prefix_field,
        "--bits": bits,
    }  # fmt: skip
    _check_flags({"--data": data, "--text": texts, "--pairs": pairs}, of_texts, {"--by": by}, of_both)
    if data is not None:
        from bert_pretrain.train.evaluation import evaluate as evaluate_data

        _report(evaluate_data(model, data, config=config.train), {}, json)
        return
    from bert_pretrain.tools.score import BITS, NATS, score_pairs, score_texts

    options: dict[str, Any] = {
        "config": config.train,
        "metric": metric or "original",
        "batch_tokens": batch_tokens,
        "output": output,
        "prefix_field": prefix_field,
        "unit": BITS if bits else NATS,
        "encoding": config.data.encoding,
    }
    if pairs:
        figures, groups = score_pairs(model, pairs, by=by, **options)
    else:
        options |= {"text_field": config.data.text_field, "skip_empty": skip_empty, "per_token": per_token}
        figures, groups = score_texts(model, texts, **options), {}
    _report(figures, groups, json)
    if output is not None:
        print(f"{'scores':<24}{output}")


def _check_flags(
    subjects: Mapping[str, Any], of_texts: Mapping[str, Any], of_pairs: Mapping[str, Any], of_both: Mapping[str, Any]
) -> None:
    given = [flag for flag, value in subjects.items() if value]
    if len(given) != 1:
        raise ConfigError(
            f"there is {' and '.join(given) or 'nothing'} to evaluate on",
            where="MODEL",
            remedy="give one of --data DIR, --text INPUT or --pairs INPUT",
        )
    for modes, flags in ((("--text", "--pairs"), of_both), (("--text",), of_texts), (("--pairs",), of_pairs)):
        for flag, value in flags.items():
            if value and given[0] not in modes:
                what = f"{flag} has no meaning with {given[0]}"
                raise ConfigError(what, where=flag, remedy=f"leave it out; it is for {modes[0]}")
    if of_texts["--per-token"] and of_both["--output"] is None:
        what, remedy = "the scores of tokens are written to a file", "add --output FILE.jsonl"
        raise ConfigError(what, where="--per-token", remedy=remedy)


def _report(figures: Mapping[str, float], groups: Mapping[str, Mapping[str, float]], json: Path | None) -> None:
    for name, group in groups.items():
        print(f"{name:<54}{group['accuracy']:>8.2%}{group['pairs']:>9,}")
    for name, value in figures.items():
        shown = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
        if name == "nsp_accuracy":
            shown = with_error(value, int(figures["examples"]), ".4f")
        print(f"{name:<24}{shown:>16}")
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        write_json(json, {**figures, **({"groups": groups} if groups else {})})
