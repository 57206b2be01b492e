"""`evaluate`: metrics of a model on a data folder, texts or minimal pairs, as a table and as JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.examples import with_error
from bert_pretrain.io.files import write_json
from bert_pretrain.tools.texts import check_output_file

_SCORING = ("--metric", "--batch-tokens", "--max-length", "--output", "--encoding")
# The options, besides --json, that can be used with each input.
_OPTIONS = {
    "--data": ("--max-length",),
    "--text": (*_SCORING, "--skip-empty", "--per-token", "--text-field"),
    "--pairs": (*_SCORING, "--by"),
}


def evaluate(
    model: Path,
    *,
    config: Config,
    data: Path | None,
    texts: Sequence[str],
    pairs: Sequence[str],
    json: Path | None,
    **options: Any,
) -> None:
    """Evaluate a model on one of data, texts and pairs. Print the metrics, and write them to `json` if given.

    `options` are `metric`, `batch_tokens`, `max_length`, `output`, `skip_empty`, `per_token` and `by`. `text_field` and
    `encoding` are only checked here; their values are in `config`.
    """
    used = {name: value for name, value in options.items() if value}
    _check_options([flag for flag, value in (("--data", data), ("--text", texts), ("--pairs", pairs)) if value], used)
    check_output_file(json, [*texts, *pairs], "--json")
    if json is not None and "output" in used and json.resolve() == used["output"].resolve():
        raise ConfigError(f"--json and --output are both {json}", where="--json", remedy="name another file")
    scoring = {name: value for name, value in used.items() if name not in ("text_field", "encoding")}
    from bert_pretrain.tools.score import score_pairs, score_texts  # imports PyTorch: only after the checks
    from bert_pretrain.train.evaluation import evaluate as evaluate_data

    groups: Mapping[str, Mapping[str, float]] = {}
    if data is not None:
        metrics: Mapping[str, float] = evaluate_data(model, data, config=config.train, **scoring)
    elif pairs:
        metrics, groups = score_pairs(
            model,
            pairs,
            config=config,
            json_file=json,
            **scoring,
        )
    else:
        metrics = score_texts(
            model,
            texts,
            config=config,
            json_file=json,
            **scoring,
        )
    for name, group in groups.items():
        print(f"{name:<54}{group['accuracy']:>8.2%}{group['pairs']:>9,}")
    for name, value in metrics.items():
        shown = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
        if name == "nsp_accuracy":
            shown = with_error(value, metrics["examples"], metrics.get("documents"), ".4f")
        print(f"{name:<24}{shown:>16}")
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        write_json(json, {**metrics, "groups": groups} if groups else metrics)
    if "output" in used:
        print(f"{'scores':<24}{used['output']}")


def _check_options(inputs: list[str], used: Mapping[str, Any]) -> None:
    """Raise ConfigError for other than one input, or for an option that has no effect."""
    if len(inputs) != 1:
        raise ConfigError(
            f"{' and '.join(inputs)} cannot be combined" if inputs else "there is nothing to evaluate on",
            where="MODEL",
            remedy="pass one of --data DIR, --text INPUT or --pairs INPUT",
        )
    for name in used:
        flag = f"--{name.replace('_', '-')}"
        if flag not in _OPTIONS[inputs[0]]:
            allowed = " or ".join(each for each, flags in _OPTIONS.items() if flag in flags)
            raise ConfigError(
                f"{flag} has no effect with {inputs[0]}",
                where=flag,
                remedy=f"remove it, or use it with {allowed}",
            )
    if "per_token" in used and "output" not in used:
        raise ConfigError(
            "token scores are written to a file, but there is no --output",
            where="--per-token",
            remedy="add --output FILE.jsonl",
        )
    if "output" in used and used["output"].suffix != ".jsonl":
        raise ConfigError(
            "scores are written as JSON, one line per text or pair",
            where="--output",
            remedy="use a name that ends in .jsonl",
        )
