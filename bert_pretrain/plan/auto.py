"""`run auto`: facts, the plan and its YAML in the output folder; at the end, the forecast next to what came of it."""

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from bert_pretrain.config import Config, TrainConfig, duration_text
from bert_pretrain.config_file import load_config
from bert_pretrain.config_keys import inline_yaml
from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.io.files import json_text, write_text
from bert_pretrain.io.manifest import check_writable, is_restarted, read_record
from bert_pretrain.plan.facts import MachineFacts, TextFacts, measure_text, read_machine, shipped_facts
from bert_pretrain.plan.planner import Plan, check_time, make_plan, vocab_size_for
from bert_pretrain.report.curves import TASKS, names_of_pairs, read_metrics

PLAN, MACHINE, FORECAST = "plan.yaml", "machine.json", "forecast.json"
CALIBRATION_SHARE = {"cpu": 0.05, "cuda": 0.1}  # of the time, for timing networks on this machine; at most
MAX_CALIBRATION_SECONDS = 60.0
PATIENCE_SHARE = {"cpu": 0.0, "cuda": 0.2}  # of the time, within which the first few networks are timed all the same
Ranges = TypeAdapter(dict[str, tuple[float, float]])
"""The content of `forecast.json`: ranges of held-out metrics, by name."""


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
    plan with, instead of timing this machine. With `overwrite`, another plan is made even where there is one, unless
    torchrun or Slurm has started the command again; with `dry_run`, nothing is written.
    """
    check_writable(output)
    path = output / PLAN
    overwrite = overwrite and not is_restarted()
    with contextlib.ExitStack() as stack:
        if overwrite and not dry_run:
            path.unlink(missing_ok=True)  # a restart is to find no plan of another command
        if path.exists() and not overwrite:
            planned = load_config(path)
            if planned.inputs != tuple(inputs):
                raise ConfigError(
                    f"the plan is for the inputs {', '.join(planned.inputs)}, not for {', '.join(inputs)}",
                    where=str(path),
                    remedy="name the same inputs, another --output, or add --overwrite",
                )
            ignored = "" if machine is None else "; --machine is for a new one (--overwrite)"
            print(path.read_text(encoding="utf-8") if dry_run else f"the plan is {path}, made before{ignored}")
        else:
            check_time(seconds)
            own = load_config(None, settings, flags)
            text_facts = measure_text(inputs, own.data)
            facts = _facts(machine, text_facts, seconds, own.train, dry_run=dry_run)
            plan = make_plan(tuple(inputs), text_facts, facts, seconds)
            print(text := describe(plan, facts))
            if dry_run:  # what is put over the plan is checked all the same
                print(f"# The machine: {facts.model_dump_json()}")
                path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / PLAN
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path.with_name(FORECAST), json_text(expected(plan)))
            write_text(path.with_name(MACHINE), facts.model_dump_json(indent=1) + "\n")
            write_text(path, text)
        # It takes no longer than it says, and no longer than it may.
        time = min(seconds, load_config(path).time or seconds)
        return load_config(path, settings, {**(flags or {}), "time": ("--time", time)})


def _facts(machine: str | None, text: TextFacts, seconds: float, train: TrainConfig, *, dry_run: bool) -> MachineFacts:
    """Return the named facts, or those of this machine where that is another one and the plan is run.

    Those of this machine are shipped ones of its card, with the usual attention, or are measured.
    """
    from bert_pretrain.plan.timing import device_of, measure_machine  # torch takes a second to import

    found = device_of(train.device)
    if machine is not None:
        facts = read_machine(machine)
        is_same = (facts.device, facts.cores) == (found.type, found.cores) and facts.has_memory(found.memory_bytes)
        if dry_run or is_same:
            return facts
        print(f"{facts.name} is another machine than this one, whose own facts are used")
    known = shipped_facts(found.name, found.memory_bytes, found.cores) if train.attention == "auto" else None
    if known is not None:
        return known
    allowed = min(MAX_CALIBRATION_SECONDS, CALIBRATION_SHARE[found.type] * seconds)
    patience = PATIENCE_SHARE[found.type] * seconds
    return measure_machine(allowed, vocab_size_for(text), train.device, train.attention, patience)


def expected(plan: Plan) -> dict[str, tuple[float, float]]:
    """Return the forecast of a plan, rounded as it is printed: ranges of nats per masked token, and of accuracy."""
    forecast = plan.training.forecast
    found = {"mlm_loss": forecast.mlm_loss, "nsp_accuracy": forecast.nsp_accuracy}
    if plan.config.data.next_sentence == "none":
        del found["nsp_accuracy"]
    return {name: (round(low, 2), round(high, 2)) for name, (low, high) in found.items()}


def describe(plan: Plan, machine: MachineFacts) -> str:
    """Return the plan as YAML, with what to expect and the reasons as comments."""
    from bert_pretrain.train.schedule import duration

    text, ranges, pairs = plan.text, expected(plan), ""
    timed = sum(speed.is_timed for speed in machine.speeds)
    low, high = ranges["mlm_loss"]
    if accuracy := ranges.get("nsp_accuracy"):
        pairs = f", {TASKS[plan.config.data.next_sentence][1]} {accuracy[0]:.0%} to {accuracy[1]:.0%}"
    why = f"  # {plan.why_seconds}" if plan.why_seconds else ""
    lines = [
        f"# The plan of 'bert-pretrain run auto' for {duration(plan.seconds)}; 'bert-pretrain run {PLAN}' repeats it.",
        f"# The text: {text.num_bytes / 1e6:,.0f} MB, about {text.documents:,.0f} documents of "
        f"{text.sentences_per_document:g} sentences (median).",
        f"# The machine: {machine.name}, {machine.cores} cores; {timed} of {len(machine.speeds)} networks timed "
        f"({machine.source}).",
        f"# Expected on held-out text: MLM loss {low:.2f} to {high:.2f} nats{pairs}.",
        f"# Expected on classification: {plan.training.forecast.use}.",
        *([f"# Beyond what was measured: {beyond}."] if (beyond := plan.training.forecast.beyond) else ()),
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


def compare(output: Path, run: Path) -> str | None:
    """Return a line with the forecast and the last held-out metrics; None without a forecast or held-out rows."""
    try:
        forecast = Ranges.validate_json((output / FORECAST).read_bytes())
    except (FileNotFoundError, ValidationError):  # a comparison is no reason to end a finished run with an error
        return None
    try:
        metrics = read_metrics(run)
    except DataError:
        return None
    last = next((line for line in reversed(metrics) if line.get("validation_mlm_loss") is not None), {})
    texts = []
    for name, (low, high) in forecast.items():
        if (value := last.get(f"validation_{name}")) is not None:
            title, form, unit = (
                ("MLM loss", ".2f", " nats")
                if name == "mlm_loss"
                else (names_of_pairs([read_record(run)])[1], ".0%", "")
            )
            place = "inside" if low <= round(value, 2) <= high else "outside"
            texts.append(f"{title} {value:{form}}{unit}, {place} {low:{form}} to {high:{form}}")
    return f"forecast: {'; '.join(texts)}" if texts else None
