"""What `run auto` expected and what came of it: the forecast next to the plan, and one closing line that compares."""

import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from bert_pretrain.io.files import write_text
from bert_pretrain.io.manifest import read_record
from bert_pretrain.plan.planner import Plan
from bert_pretrain.report.curves import names_of_pairs, read_metrics
from bert_pretrain.report.diagnosis import diagnose

FORECAST = "forecast.json"
MAX_TOKENS_DEVIATION = 0.2  # from the plan; more of it explains another outcome
NO_CAUSES = ("encoding", "seed", "device")  # keys that a forecast does not depend on

Range = tuple[float, float]


class Expected(BaseModel):
    """What `forecast.json` holds: ranges of held-out figures as they are printed, and what they rest on."""

    mlm_loss: Range
    """Nats per masked token."""
    pair_accuracy: Range | None
    """None without pairs."""
    tokens: float
    """Of the training, millions."""
    beyond: str
    """In what the plan lies beyond the measured runs."""


def expected(plan: Plan) -> Expected:
    """Return the forecast of a plan, rounded as it is printed."""
    (low, high), (worst, best) = plan.training.forecast.mlm_loss, plan.training.forecast.nsp_accuracy
    has_pairs = plan.config.data.next_sentence != "none"
    return Expected(
        mlm_loss=(round(low, 2), round(high, 2)),
        pair_accuracy=(round(worst, 2), round(best, 2)) if has_pairs else None,
        tokens=plan.training.tokens,
        beyond=plan.training.forecast.beyond,
    )


def write_forecast(plan: Plan, output: Path) -> None:
    """Keep the forecast of a plan in the folder of the run."""
    write_text(output / FORECAST, expected(plan).model_dump_json(indent=1) + "\n")


def compare(output: Path, run: Path, changed: Sequence[str] = ()) -> str | None:
    """Return a line with the forecast, the last held-out figures, and the likely cause where they are outside.

    None where the forecast cannot be read or nothing is held out. `changed` are keys that the user has put over the
    plan.
    """
    try:
        forecast = Expected.model_validate_json((output / FORECAST).read_bytes())
    except (FileNotFoundError, ValidationError):  # a comparison is no reason to end a finished run with an error
        return None
    metrics = read_metrics(run)
    last = next((line for line in reversed(metrics) if line.get("validation_mlm_loss") is not None), None)
    if last is None:
        return None
    record = read_record(run)
    loss, accuracy = last["validation_mlm_loss"], last.get("validation_nsp_accuracy")
    is_inside, text = _placed("MLM loss", loss, forecast.mlm_loss, ".2f", " nats")
    all_inside, is_worse, texts = is_inside, loss > forecast.mlm_loss[1], [text]
    if forecast.pair_accuracy is not None and accuracy is not None:
        is_inside, text = _placed(names_of_pairs([record])[1], accuracy, forecast.pair_accuracy, ".0%")
        all_inside, texts = all_inside and is_inside, [*texts, text]
        is_worse |= accuracy < forecast.pair_accuracy[0]
    line = f"forecast: {'; '.join(texts)}"
    if all_inside:
        return line
    hints = [f"{hint.cause} ({hint.observed})" for hint in diagnose(record, metrics)] if is_worse else []
    tokens = record["progress"]["tokens"] / 1e6
    return f"{line}; likely cause: {_cause(forecast, hints, tokens, changed)}"


def _placed(name: str, value: float, bounds: Range, form: str, unit: str = "") -> tuple[bool, str]:
    """Return whether a figure is inside of a range, at the precision of both as they are printed, and say so."""
    low, high = bounds
    shown = round(value, 2)
    is_inside = low <= shown <= high
    place = "inside" if is_inside else "outside"
    return is_inside, f"{name} {value:{form}}{unit}, {place} {low:{form}} to {high:{form}}"


def _cause(forecast: Expected, hints: Sequence[str], tokens: float, changed: Sequence[str]) -> str:
    if hints:
        return hints[0]
    if causes := [key for key in changed if key.rpartition(".")[2] not in NO_CAUSES]:
        return f"{', '.join(causes)} not as planned"
    if tokens and abs(math.log(tokens / forecast.tokens)) > math.log(1.0 + MAX_TOKENS_DEVIATION):
        seen = f"training saw {tokens:,.2f} million tokens instead of {forecast.tokens:,.2f}"
        return f"{seen} (another speed than measured)"
    if forecast.beyond:
        return f"the plan is beyond what was measured: {forecast.beyond}"
    return "text unlike the corpora that the forecast was measured on"
