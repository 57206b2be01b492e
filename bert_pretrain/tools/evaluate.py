"""`evaluate`: metrics of a model on a data folder, on texts, or on minimal pairs, as a table and as JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.examples import with_error
from bert_pretrain.io.files import write_json
from bert_pretrain.tools.texts import refuse_input_as_output

_SCORED = ("--text", "--pairs")
_SUBJECTS_OF = {
    "--metric": _SCORED,
    "--batch-tokens": _SCORED,
    "--output": _SCORED,
    "--skip-empty": ("--text",),
    "--per-token": ("--text",),
    "--by": ("--pairs",),
}
"""Inputs with which each flag is allowed."""


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
    """Evaluate a model on one of data, texts and pairs, print the metrics, and write them to `json` if given.

    `options` are `metric`, `batch_tokens`, `output`, `skip_empty`, `per_token` and `by`.
    """
    given = {name: value for name, value in options.items() if value}
    subjects = [flag for flag, value in (("--data", data), ("--text", texts), ("--pairs", pairs)) if value]
    if len(subjects) != 1:
        what = f"there is {' and '.join(subjects) or 'nothing'} to evaluate on"
        raise ConfigError(what, where="MODEL", remedy="give one of --data DIR, --text INPUT or --pairs INPUT")
    for flag in (f"--{name.replace('_', '-')}" for name in given):
        if subjects[0] not in _SUBJECTS_OF[flag]:
            what, remedy = f"{flag} has no meaning with {subjects[0]}", f"it is for {' and '.join(_SUBJECTS_OF[flag])}"
            raise ConfigError(what, where=flag, remedy=f"leave it out; {remedy}")
    if "per_token" in given and "output" not in given:
        what, remedy = "the scores of tokens are written to a file", "add --output FILE.jsonl"
        raise ConfigError(what, where="--per-token", remedy=remedy)
    refuse_input_as_output(json, [*texts, *pairs], "--json")
    if json is not None and "output" in given and json.resolve() == given["output"].resolve():
        raise ConfigError(f"{json} is that of --output too", where="--json", remedy="name another file")
    if data is not None:
        from bert_pretrain.train.evaluation import evaluate as evaluate_data

        _report(evaluate_data(model, data, config=config.train), {}, json)
        return
    from bert_pretrain.tools.score import score_pairs, score_texts

    if pairs:
        metrics, groups = score_pairs(model, pairs, config=config, **given)
    else:
        metrics, groups = score_texts(model, texts, config=config, **given), {}
    _report(metrics, groups, json)
    if "output" in given:
        print(f"{'scores':<24}{given['output']}")


def _report(metrics: Mapping[str, float], groups: Mapping[str, Mapping[str, float]], json: Path | None) -> None:
    for name, group in groups.items():
        print(f"{name:<54}{group['accuracy']:>8.2%}{group['pairs']:>9,}")
    for name, value in metrics.items():
        shown = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
        if name == "nsp_accuracy":
            shown = with_error(value, int(metrics["examples"]), ".4f")
        print(f"{name:<24}{shown:>16}")
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        write_json(json, {**metrics, **({"groups": groups} if groups else {})})
