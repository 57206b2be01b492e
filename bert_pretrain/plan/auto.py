"""`run auto`: measure the facts, write the plan as YAML, and compare its forecast with the result at the end."""

import contextlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from bert_pretrain.config import Config, TrainConfig
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.io.files import json_text, write_text
from bert_pretrain.io.manifest import check_writable, is_restarted, read_record
from bert_pretrain.metrics import read_metrics
from bert_pretrain.plan import timing
from bert_pretrain.plan.facts import MachineFacts, TextFacts, measure_text, read_machine, shipped_facts
from bert_pretrain.plan.planner import MIN_SECONDS, plan_run, vocab_size_for
from bert_pretrain.report.curves import pair_task_names

PLAN = "plan.yaml"
MACHINE = "machine.json"
FORECAST = "forecast.json"
PLANNED = ("bert", "modernbert")  # architectures with measured speeds and losses
CALIBRATION_SHARE = {"cpu": 0.05, "cuda": 0.1}  # largest share of the time for timing networks on this machine
MAX_CALIBRATION_SECONDS = 60.0
# The first `MIN_TIMED_NETWORKS` may exceed CALIBRATION_SHARE if their timing starts within this share of the time.
LATEST_START_SHARE = {"cpu": 0.0, "cuda": 0.2}
Ranges = TypeAdapter(dict[str, tuple[float, float]])  # `forecast.json`: ranges of held-out metrics by name


def planned_config(
    asked: Config,
    output: Path,
    *,
    settings: Sequence[str] = (),
    flags: Mapping[str, tuple[str, object]] | None = None,
    machine: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Config:
    """Return the configuration of the plan in `output`; make and print the plan if there is none.

    Args:
        asked: the configuration from `settings` and `flags` without a plan; it has inputs and a time.
        output: the folder of the run. The plan, its forecast and the facts of the machine are written there.
        settings, flags: as for `load_config`; they override the plan.
        machine: name or file of the machine facts to plan with, instead of timing this machine.
        overwrite: replace an existing plan, unless torchrun or Slurm has restarted the command.
        dry_run: write nothing.

    Raises:
        ConfigError: an existing plan has other inputs, or the time is too short for a plan.
    """
    check_writable(output)
    path = output / PLAN
    overwrite = overwrite and not is_restarted()
    with contextlib.ExitStack() as stack:
        if overwrite and not dry_run:
            path.unlink(missing_ok=True)  # so that a restart does not use the old plan
        if path.exists() and not overwrite and (machine is None or not dry_run):
            _show_existing_plan(path, asked.inputs, machine, dry_run=dry_run)
        else:
            if dry_run:  # written to a temporary folder, so that settings and flags are checked against the plan
                path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / PLAN
            _write_new_plan(path, asked, machine, dry_run=dry_run)
        planned = load_config(path).time
        time = min(filter(None, (asked.time, planned)))  # a plan may need less than the given time
        return load_config(path, settings, {**(flags or {}), "time": ("--time", time)})


def _show_existing_plan(
    path: Path,
    inputs: Sequence[str],
    machine: str | None,
    *,
    dry_run: bool,
) -> None:
    """Print that the plan is used, or in a dry run the plan. Raise `ConfigError` if it has other inputs."""
    planned = load_config(path)
    if planned.inputs != inputs:
        raise ConfigError(
            f"the plan is for the inputs {', '.join(planned.inputs)}, not for {', '.join(inputs)}",
            where=str(path),
            remedy="name the same inputs, another --output, or add --overwrite",
        )
    if dry_run:
        print(f"the existing plan of {path.parent}; --overwrite makes a new one", file=sys.stderr)
        print(path.read_text(encoding="utf-8"))
    else:
        ignored = "" if machine is None else "; --machine is ignored (--overwrite makes a new plan)"
        print(f"using the existing plan {path}{ignored}")


def _write_new_plan(
    path: Path,
    asked: Config,
    machine: str | None,
    *,
    dry_run: bool,
) -> None:
    """Make a plan for the inputs and the time of `asked`. Print it, and write it with its forecast and machine."""
    assert asked.time is not None
    if asked.time < MIN_SECONDS:
        raise ConfigError(
            f"{asked.time:g} seconds are too short for vocabulary, data and training",
            where="--time",
            remedy="allow at least 2m",
        )
    if asked.model.architecture not in PLANNED:
        raise ConfigError(
            f"'run auto' has no speeds and losses of {asked.model.architecture}",
            where="model.architecture",
            remedy=f"set it to {' or '.join(PLANNED)}, or name a preset instead of auto (docs/architectures.md)",
        )
    with contextlib.redirect_stdout(sys.stderr) if dry_run else contextlib.nullcontext():
        text_facts = measure_text(asked.inputs, asked.data)  # a dry run prints only the plan, which is YAML
    facts = _facts(
        machine,
        text_facts,
        asked.time,
        asked.train,
        dry_run=dry_run,
    )
    plan = plan_run(
        asked.inputs,
        text_facts,
        facts,
        asked.time,
        asked.model.architecture,
    )
    print(plan.yaml)
    if dry_run:
        print(f"# The machine: {facts.model_dump_json()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path.with_name(FORECAST), json_text(plan.expected))
    write_text(path.with_name(MACHINE), facts.model_dump_json(indent=1) + "\n")
    write_text(path, plan.yaml)


def _facts(
    machine: str | None,
    text: TextFacts,
    seconds: float,
    train: TrainConfig,
    *,
    dry_run: bool,
) -> MachineFacts:
    """Return the facts of the machine to plan for.

    The facts named by `machine` are used in a dry run, or if they have the device, cores and memory of this machine.
    Otherwise the shipped facts of this card are used, if they exist and `train` leaves attention, precision and
    compilation to the package. In all other cases, this machine is timed.
    """
    device = timing.device_of(train.device)
    if machine is not None:
        facts = read_machine(machine)
        is_same = (facts.device, facts.cores) == (device.type, device.cores) and facts.has_memory(device.memory_bytes)
        if dry_run or is_same:
            return facts
        print(f"{facts.name} is not this machine: the facts of this machine are used")
    has_defaults = (train.attention, train.precision, train.compile) == ("auto", "auto", "auto")
    if has_defaults and (shipped := shipped_facts(device.name, device.memory_bytes, device.cores)) is not None:
        return shipped
    allowed = min(MAX_CALIBRATION_SECONDS, CALIBRATION_SHARE[device.type] * seconds)
    latest_start = LATEST_START_SHARE[device.type] * seconds
    return timing.measure_machine(allowed, vocab_size_for(text), train, latest_start)


def compare(output: Path, run: Path) -> str | None:
    """Return a line that compares the forecast with the last held-out metrics; None if either is missing."""
    try:
        forecast = Ranges.validate_json((output / FORECAST).read_bytes())
        metrics = read_metrics(run)
        pair_accuracy = pair_task_names([read_record(run)])[1]
    except (FileNotFoundError, ValidationError, DataError):  # a finished run must not end with an error
        return None
    forms = {"mlm_loss": ("MLM loss", ".2f", " nats"), "nsp_accuracy": (pair_accuracy, ".0%", "")}
    last = next((line for line in reversed(metrics) if line.get("validation_mlm_loss") is not None), {})
    texts = []
    for name, (title, form, unit) in forms.items():
        value = last.get(f"validation_{name}")
        if value is not None and name in forecast:
            low, high = forecast[name]
            place = "inside" if low <= round(value, 2) <= high else "outside"
            texts.append(f"{title} {value:{form}}{unit}, {place} {low:{form}} to {high:{form}}")
    return f"forecast: {'; '.join(texts)}" if texts else None
