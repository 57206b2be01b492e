"""`run auto`: facts, the plan and its YAML in the output folder; at the end, the forecast next to what came of it."""

import contextlib
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from bert_pretrain.config import Config, duration_text
from bert_pretrain.config_file import load_config
from bert_pretrain.config_keys import inline_yaml
from bert_pretrain.errors import ConfigError
from bert_pretrain.io.files import write_text
from bert_pretrain.io.manifest import check_writable, read_record
from bert_pretrain.plan.facts import MachineFacts, TextFacts, measure_text, read_machine
from bert_pretrain.plan.planner import Plan, make_plan, vocab_size_for
from bert_pretrain.report.curves import names_of_pairs, read_metrics
from bert_pretrain.report.diagnosis import diagnose

PLAN, MACHINE, FORECAST = "plan.yaml", "machine.json", "forecast.json"
CALIBRATION_SHARE, MAX_CALIBRATION_SECONDS = 0.05, 60.0  # limits for timing networks on this machine
MAX_TOKENS_DEVIATION = 0.2  # from the plan; more of it explains another outcome
NO_CAUSES = ("encoding", "seed", "device")  # keys that a forecast does not depend on

Range = tuple[float, float]


class Expected(BaseModel):
    """What `forecast.json` holds: ranges of held-out metrics as they are printed, and what they are computed from."""

    mlm_loss: Range  # nats per masked token
    pair_accuracy: Range | None  # None without pairs
    tokens: float  # of the training, millions
    beyond: str  # what is extrapolated from the measured runs


def planned_config(
    inputs: Sequence[str],
    seconds: float,
    output: Path,
    *,
    settings: Sequence[str] = (),
    flags: Mapping[str, tuple[str, object]] | None = None,
    machine: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Config:
    """Return the configuration of the plan in `output`, which is made first where there is none, and printed.

    `settings` and `flags`, as for `load_config`, win over the plan. `machine` is the name or the file of the facts to
    plan with, instead of timing this machine. With `overwrite`, another plan is made even where there is one; with
    `dry_run`, nothing is written.
    """
    check_writable(output)
    path = output / PLAN
    with contextlib.ExitStack() as stack:
        if path.exists() and not overwrite:
            planned = load_config(path)
            if planned.inputs != tuple(inputs):
                raise ConfigError(
                    f"the plan is for the inputs {', '.join(planned.inputs)}, not for {', '.join(inputs)}",
                    where=str(path),
                    remedy="name the same inputs, another --output, or add --overwrite",
                )
            print(path.read_text(encoding="utf-8") if dry_run else f"the plan is {path}, made before")
        else:
            own = load_config(None, settings, flags)
            text_facts = measure_text(inputs, own.data)
            facts = _facts(machine, text_facts, seconds, own.train.device, dry_run=dry_run)
            plan = make_plan(tuple(inputs), text_facts, facts, seconds)
            print(text := describe(plan))
            if dry_run:  # what is put over the plan is checked all the same
                print(f"# The machine: {facts.model_dump_json()}")
                path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / PLAN
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path.with_name(FORECAST), expected(plan).model_dump_json(indent=1) + "\n")
            write_text(path.with_name(MACHINE), facts.model_dump_json(indent=1) + "\n")
            write_text(path, text)
        # It takes no longer than it says, and no longer than it may.
        time = min(seconds, load_config(path).time or seconds)
        return load_config(path, settings, {**(flags or {}), "time": ("--time", time)})


def _facts(machine: str | None, text: TextFacts, seconds: float, device: str, *, dry_run: bool) -> MachineFacts:
    """Return the named facts, or those of this machine, which is timed where it is another one and the plan is run."""
    from bert_pretrain.plan.timing import device_of, measure_machine  # torch takes a second to import

    if machine is not None:
        facts = read_machine(machine)
        if dry_run or (facts.device, facts.cores, facts.memory_bytes) == device_of(device):
            return facts
        print(f"{facts.name} is another machine than this one, which is timed")
    allowed = min(MAX_CALIBRATION_SECONDS, CALIBRATION_SHARE * seconds)
    return measure_machine(allowed, vocab_size_for(text), device)


def expected(plan: Plan) -> Expected:
    """Return the forecast of a plan, rounded as it is printed."""
    forecast = plan.training.forecast
    (low, high), (worst, best) = forecast.mlm_loss, forecast.nsp_accuracy
    has_pairs = plan.config.data.next_sentence != "none"
    return Expected(
        mlm_loss=(round(low, 2), round(high, 2)),
        pair_accuracy=(round(worst, 2), round(best, 2)) if has_pairs else None,
        tokens=plan.training.tokens,
        beyond=forecast.beyond,
    )


def describe(plan: Plan) -> str:
    """Return the plan as YAML, with what to expect and the reasons as comments."""
    from bert_pretrain.train.schedule import duration

    text, foreseen, pairs = plan.text, expected(plan), ""
    if foreseen.pair_accuracy is not None:
        name, note = (
            ("sentence-order", " (as measured for next sentences)")
            if plan.config.data.next_sentence == "sop"
            else ("NSP", "")
        )
        pairs = f", {name} accuracy {foreseen.pair_accuracy[0]:.0%} to {foreseen.pair_accuracy[1]:.0%}{note}"
    why = f"  # {plan.why_seconds}" if plan.why_seconds else ""
    lines = [
        f"# The plan of 'bert-pretrain run auto' for {duration(plan.seconds)}; 'bert-pretrain run {PLAN}' repeats it.",
        f"# The text: {text.num_bytes / 1e6:,.0f} MB, about {text.documents:,.0f} documents of "
        f"{text.sentences_per_document:g} sentences (median).",
        f"# Expected on held-out text: MLM loss {foreseen.mlm_loss[0]:.2f} to {foreseen.mlm_loss[1]:.2f} nats{pairs}.",
        f"# Expected on classification: {plan.training.forecast.use}.",
        *([f"# Beyond what was measured: {foreseen.beyond}."] if foreseen.beyond else ()),
        f"inputs: {inline_yaml(list(plan.inputs))}",
        f"time: {duration_text(plan.seconds)}{why}",
    ]
    section = ""
    for choice in plan.choices:
        name, _, key = choice.key.rpartition(".")
        if name and name != section:
            lines.append(f"{name}:")
            section = name
        lines.append(f"{'  ' if name else ''}{key}: {inline_yaml(choice.value)}  # {choice.reason}")
    return "\n".join(lines) + "\n"


def compare(output: Path, run: Path, changed: Sequence[str] = ()) -> str | None:
    """Return a line with the forecast, the last held-out metrics, and the likely cause where they are outside.

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
    is_inside = low <= round(value, 2) <= high
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
