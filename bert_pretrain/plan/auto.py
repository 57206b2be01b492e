"""`run auto`: facts of the text and of the machine, the plan, and its YAML in the output folder."""

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bert_pretrain.config import Config, duration_text
from bert_pretrain.config_file import load_config
from bert_pretrain.config_keys import inline_yaml
from bert_pretrain.errors import ConfigError
from bert_pretrain.io.files import write_text
from bert_pretrain.io.manifest import check_writable
from bert_pretrain.plan.machine_facts import MachineFacts, read_machine
from bert_pretrain.plan.outcome import expected, write_forecast
from bert_pretrain.plan.planner import Plan, make_plan, vocab_size_for
from bert_pretrain.plan.text_facts import TextFacts, measure_text

PLAN, MACHINE = "plan.yaml", "machine.json"
CALIBRATION_SHARE, MAX_CALIBRATION_SECONDS = 0.05, 60.0  # limits for timing networks on this machine


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
    if path.exists() and not overwrite:
        planned = load_config(path)
        if planned.inputs != tuple(inputs):
            raise ConfigError(
                f"the plan is for the inputs {', '.join(planned.inputs)}, not for {', '.join(inputs)}",
                where=str(path),
                remedy="name the same inputs, another --output, or add --overwrite",
            )
        print(path.read_text(encoding="utf-8") if dry_run else f"the plan is {path}, made before")
        return _load(path, seconds, settings, flags)
    own = load_config(None, settings, flags)
    text_facts = measure_text(inputs, own.data)
    facts = _facts(machine, text_facts, seconds, own.train.device, dry_run=dry_run)
    plan = make_plan(tuple(inputs), text_facts, facts, seconds)
    print(text := describe(plan))
    if dry_run:
        print(f"# The machine: {facts.model_dump_json()}")
    with contextlib.ExitStack() as stack:
        if dry_run:  # what is put over the plan is checked all the same
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / PLAN
        path.parent.mkdir(parents=True, exist_ok=True)
        write_forecast(plan, path.parent)
        write_text(path.with_name(MACHINE), facts.model_dump_json(indent=1) + "\n")
        write_text(path, text)
        return _load(path, seconds, settings, flags)


def _load(
    path: Path, seconds: float, settings: Sequence[str], flags: Mapping[str, tuple[str, object]] | None
) -> Config:
    """Return a plan with what is put over it; it takes no longer than it says, and no longer than it may."""
    planned = load_config(path).time
    allowed = seconds if planned is None else min(seconds, planned)
    return load_config(path, settings, {**(flags or {}), "time": ("--time", allowed)})


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


def describe(plan: Plan) -> str:
    """Return the plan as YAML, with what to expect and the reasons as comments."""
    from bert_pretrain.train.schedule import duration

    forecast, text = plan.training.forecast, plan.text
    low, high = expected(plan).mlm_loss
    why = f"  # {plan.why_seconds}" if plan.why_seconds else ""
    lines = [
        f"# The plan of 'bert-pretrain run auto' for {duration(plan.seconds)}; 'bert-pretrain run {PLAN}' repeats it.",
        f"# The text: {text.num_bytes / 1e6:,.0f} MB, about {text.documents:,.0f} documents of "
        f"{text.sentences_per_document:g} sentences (median).",
        f"# Expected on held-out text: MLM loss {low:.2f} to {high:.2f} nats{_pairs(plan)}.",
    ]
    lines.append(f"# Expected on classification: {_use(plan)}.")
    if forecast.beyond:
        lines.append(f"# Beyond what was measured: {forecast.beyond}.")
    lines += [f"inputs: {inline_yaml(list(plan.inputs))}", f"time: {duration_text(plan.seconds)}{why}"]
    section = ""
    for choice in plan.choices:
        name, _, key = choice.key.partition(".")
        if not key:
            lines.append(f"{name}: {inline_yaml(choice.value)}  # {choice.reason}")
            continue
        if name != section:
            lines.append(f"{name}:")
            section = name
        lines.append(f"  {key}: {inline_yaml(choice.value)}  # {choice.reason}")
    return "\n".join(lines) + "\n"


def _use(plan: Plan) -> str:
    """Return what to expect of use, and of more time where that is not enough."""
    use, better_after = plan.training.forecast.use, plan.better_after
    if use.is_better or better_after is None:  # None: no measured model was
        return str(use)
    return f"{use}; with {duration_text(better_after)} on this machine, better"


def _pairs(plan: Plan) -> str:
    if (accuracy := expected(plan).pair_accuracy) is None:
        return ""
    low, high = accuracy
    if plan.config.data.next_sentence == "sop":
        return f", sentence-order accuracy {low:.0%} to {high:.0%} (as measured for next sentences)"
    return f", NSP accuracy {low:.0%} to {high:.0%}"
