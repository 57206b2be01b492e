"""The command `run`: run all stages and phases of one configuration, each in its own folder. Skip finished folders."""

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bert_pretrain.config import LENGTHS, Config, duration
from bert_pretrain.errors import ConfigError, DataError, OutputError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.examples import with_error
from bert_pretrain.io import cores
from bert_pretrain.io.manifest import MANIFEST, exclusive, is_restarted, read_manifest, read_record, set_aside
from bert_pretrain.make_data.run import make_data
from bert_pretrain.metrics import read_metrics, value_of
from bert_pretrain.model.architectures import ARCHITECTURES
from bert_pretrain.model.hub import model_folder
from bert_pretrain.plan.time_limit import TimeLimit
from bert_pretrain.report.curves import draw_curves, pair_task_names
from bert_pretrain.report.diagnosis import nothing_learned
from bert_pretrain.text.sources import resolve
from bert_pretrain.train.inputs import TEACHER, check_examples, check_needs, check_network
from bert_pretrain.vocab.run import make_vocab

TIME = "time.json"
# Time reserved for the final model, the curves and the exit of the process: seconds per training, share of `time`.
SECONDS_AFTER_TRAINING = 3.0
SHARE_AFTER_TRAINING = 0.005
MIN_TRAINING_SHARE = 0.1  # of `time`; with less left for training, the run stops
NVIDIA_DRIVER = Path("/dev/nvidiactl")  # without it, nothing is compiled in advance


@contextlib.contextmanager
def working_folder(config: Config, output: Path, *, overwrite: bool = False) -> Iterator[None]:
    """Check the configuration and lock the output. With `overwrite`, move the output of all stages aside."""
    _check(config)
    with exclusive(output):
        if overwrite and not is_restarted():
            resolve(config.inputs, config.data, detect=False)  # fails on a missing input, before the output is moved
            for stage in ("vocab", "data", "train"):
                if (output / stage).exists():
                    with exclusive(output / stage):
                        set_aside(output / stage)
            (output / TIME).unlink(missing_ok=True)
        yield


def _check(config: Config) -> None:
    """Raise an error for a configuration that cannot run here, or for a teacher that cannot be read.

    This happens before hours of work on the data.
    """
    if cores.num_ranks() > 1:
        what = "torchrun starts several processes, but the stages before training need a single one"
        remedy = "run 'bert-pretrain vocab' and 'make-data' in one process, then 'torchrun … -m bert_pretrain train "
        remedy += "--data …' for each phase, the second with --init-from and --carry-optimizer: see docs/scaling.md"
        raise ConfigError(what, where="run", remedy=remedy)
    if not config.inputs:
        raise ConfigError(
            "there are no inputs",
            where="the key 'inputs'",
            remedy="give them after CONFIG, for example corpus/*.txt",
        )
    for phase_config in config.phase_configs:
        data = phase_config.data
        check_needs(phase_config.train, data.max_seq_length)
        check_examples(phase_config, data.max_seq_length, data.next_sentence)
        check_network(phase_config)


@dataclass
class _Phase:
    """One training and its folders: a phase of the configuration, or all of a configuration without phases."""

    config: Config
    data: Path
    run: Path
    time_share: float


def _phases(config: Config, output: Path) -> list[_Phase]:
    if not config.phases:
        return [_Phase(config, output / "data", output / "train", 1.0)]
    phases: list[_Phase] = []
    for phase in config.phases:
        data = output / "data" / phase.name
        run = output / "train" / phase.name
        phases.append(_Phase(config.for_phase(phase), data, run, phase.time_share))
    return phases


def run_pipeline(
    config: Config,
    output: Path,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    overwrite: bool = False,
    seconds_before: float = 0.0,
) -> Path:
    """Build vocabulary, data and model in `output`, and return the final model folder.

    `output` must be a `working_folder`. It gets `vocab`, `data` and `train` (with phases: `data/NAME` and
    `train/NAME`). `seconds_before` is the time that the command has already used of `config.time`. With a
    teacher, the data has the teacher's vocabulary, and there is no `vocab`.
    """
    _check(config)  # again, because `run auto` has planned more of it
    options: dict[str, Any] = {"workers": workers, "scheduler": scheduler, "overwrite": overwrite}
    phases = _phases(config, output)
    with contextlib.ExitStack() as stack:
        limit = None
        if config.time is not None:
            limit = stack.enter_context(TimeLimit(config.time, output / TIME, used_before_open=seconds_before))
        compiler = BackgroundCompiler(phases[0].config)
        if not (phases[-1].data / MANIFEST).exists():
            stack.enter_context(compiler)
        vocab = _vocabulary_of_teacher(phases) or output / "vocab"
        print(f"── vocabulary ── {vocab}")
        if vocab == output / "vocab":
            make_vocab(config, config.inputs, vocab, **options)
        for phase in phases:
            print(f"── data ── {phase.data}")
            make_data(
                phase.config,
                config.inputs,
                vocab,
                phase.data,
                **options,
                store=output / ".token-store",
            )
        compiler.wait()
        model = _train(phases, limit, overwrite=overwrite)
        _show_results([phase.run for phase in phases], model, output)
        if limit is not None:
            print(f"time:   {duration(limit.used)} of {duration(limit.seconds)}")
    return model


def _vocabulary_of_teacher(phases: Sequence[_Phase]) -> Path | None:
    for phase in phases:
        if phase.config.train.teacher is not None:
            return model_folder(phase.config.train.teacher, TEACHER)
    return None


def _train(phases: Sequence[_Phase], limit: TimeLimit | None, *, overwrite: bool) -> Path:
    """Train all phases, each from the weights of the phase before, and return the final model folder.

    Phases share one schedule and the optimizer state, except with a time limit.
    """
    from bert_pretrain.train.run import train  # torch takes seconds to import

    configs = [phase.config for phase in phases]
    if limit is None:
        configs = with_one_schedule(configs, [phase.data for phase in phases])
    previous: Path | None = None
    for number, phase in enumerate(phases):
        print(f"── training ── {phase.run}")
        config = configs[number]
        if limit is not None:
            shares = [later.time_share for later in phases[number:]]
            config = _with_time_left(
                config,
                limit,
                phase.run,
                shares,
                is_first=number == 0,
            )
        carries = limit is None and previous is not None
        model = train(
            config,
            phase.data,
            phase.run,
            init_from=previous,
            carry_optimizer=carries,
            overwrite=overwrite,
        )
        previous = model
        if limit is None and number + 1 < len(phases):
            previous = _last_checkpoint(phase.run)
    return model


def _with_time_left(
    config: Config,
    limit: TimeLimit,
    run: Path,
    shares: Sequence[float],
    *,
    is_first: bool,
) -> Config:
    """Set the time budget of a training from the time that is left.

    `shares` are the relative shares of this training and all later ones. The budget includes the time that the training
    used before an interruption. Raises ConfigError if too little time is left to start the first training. Later
    trainings get the time that is left.
    """
    from bert_pretrain.train.checkpoint import newest_checkpoint

    if (run / MANIFEST).exists():  # finished, so its length must not change
        finished = read_manifest(run, "run", "--output")["config"]["train"]
        return _with_length(config, **{name: finished[name] for name in LENGTHS})
    latest = newest_checkpoint(run / "checkpoints", changes=False)  # `train` repairs the folder under its lock
    left = limit.left - len(shares) * SECONDS_AFTER_TRAINING - SHARE_AFTER_TRAINING * limit.seconds
    if left < MIN_TRAINING_SHARE * limit.seconds and latest is None and is_first:
        what = f"vocabulary and data took {duration(limit.used)} of {duration(limit.seconds)}; "
        what += f"{duration(max(left, 0.0))} are left, too little to train"
        raise ConfigError(
            what,
            where="the key 'time'",
            remedy="allow more time, or use fewer inputs; 'run auto' then also needs --overwrite, for a new plan",
        )
    trained = 0.0 if latest is None else latest.record["progress"]["wall_seconds"]
    return _with_length(config, time_budget=max(shares[0] / sum(shares) * (trained + left), trained + 0.1))


def with_one_schedule(configs: Sequence[Config], folders: Sequence[Path]) -> list[Config]:
    """Return the configurations of all phases with one learning rate schedule, and with steps counted across phases.

    A single configuration is returned as it is. Raise ConfigError if one of several has a time budget, or if the
    warm-up is longer than the schedule.
    """
    from bert_pretrain.train.schedule import run_length

    if len(configs) == 1:
        return list(configs)
    ends: list[int] = []
    for config, folder in zip(configs, folders, strict=True):
        steps = run_length(config.train, DataFolder.open(folder).rows("train")).steps
        if steps is None:
            raise ConfigError(
                "phases share one schedule, which is counted in steps, but one of them has a time budget",
                where="train.time_budget",
                remedy="give every phase max_steps or max_epochs, or train without phases",
            )
        ends.append(steps + (ends[-1] if ends else 0))
    for config in configs:  # check later phases before the first one starts
        config.train.check_warmup(ends[-1])
    return [
        _with_length(config, max_steps=end, schedule_steps=ends[-1]) for config, end in zip(configs, ends, strict=True)
    ]


def _with_length(config: Config, **length: Any) -> Config:
    """Return the configuration with another length of the training."""
    train = config.train.model_copy(update={**dict.fromkeys(LENGTHS), **length})
    return config.model_copy(update={"train": train})


def _last_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint of a finished phase, which initializes the next phase."""
    from bert_pretrain.train.checkpoint import newest_checkpoint

    checkpoint = newest_checkpoint(run / "checkpoints", changes=False)
    if checkpoint is None:
        raise OutputError(
            "the phase has no checkpoint left, but the next phase needs one",
            where=str(run / "checkpoints"),
            remedy="restore it from a copy, or start over with --overwrite (the old folder is moved aside)",
        )
    return checkpoint.path


def _show_results(runs: Sequence[Path], model: Path, output: Path) -> None:
    """Print validation metrics before and after training, draw the curves, and show how to load the model."""
    records = [read_record(run) for run in runs]
    reason = "there is no validation split, so nothing was evaluated"
    try:
        metrics = [read_metrics(run) for run in runs]
    except DataError as error:  # the run itself has finished
        metrics = [[] for _ in runs]
        reason = f"no metrics: {error}"
    evaluations = [[line for line in lines if "validation_mlm_loss" in line] for lines in metrics]
    pair_title = pair_task_names(records)[1]
    print(f"\nheld out            MLM loss   MLM accuracy   {pair_title}" if any(evaluations) else f"\n{reason}")
    for run, lines in zip(runs, evaluations, strict=True):
        name = f"{run.name} " if len(runs) > 1 else ""
        if lines:
            print(_row(f"{name}before", lines[0], len(pair_title)))
            print(_row(f"{name}after", lines[-1], len(pair_title)))
    if draw_curves(runs, output / "curves.png"):
        print(f"\ncurves: {output / 'curves.png'}")
    positions = value_of(records[-1], "config.model.max_position_embeddings") or 512
    limit = f" (texts of at most {positions} tokens)" if positions < 512 else ""  # fewer than BERT
    auto_class = ARCHITECTURES[value_of(records[-1], "config.model.architecture") or "bert"].auto_class
    print(
        f"model:  {model}{limit}\n\n"
        f"    from transformers import {auto_class}, AutoTokenizer\n"
        f'    model, tokenizer = (x.from_pretrained("{model}") for x in ({auto_class}, AutoTokenizer))\n'
    )
    if warning := nothing_learned(records[-1], metrics[-1]):
        print(warning)


def _row(label: str, line: Mapping[str, Any], width: int) -> str:
    """Return a row of the table: losses and accuracies of one evaluation. A loss that is not finite is null."""
    loss = line["validation_mlm_loss"]
    accuracy = line["validation_mlm_accuracy"]
    pairs = "–"
    if line["validation_nsp_accuracy"] is not None:
        counts = line.get("validation_examples"), line.get("validation_documents")
        pairs = with_error(line["validation_nsp_accuracy"], *counts)
    return (
        f"{label:<18}{math.nan if loss is None else loss:>8.3f} nats"
        f"{math.nan if accuracy is None else accuracy:>12.1%}{pairs:>{width + 3}}"
    )


class BackgroundCompiler:
    """While this context is open, a thread compiles the training step, if there is an NVIDIA driver.

    Errors are ignored: training raises them again. After an error of the work in the context, a command ends without
    waiting for the thread, see `is_compiling`.
    """

    _THREAD_NAME = "compile ahead"

    def __init__(self, config: Config) -> None:
        self._config, self._is_closed = config, False
        self._thread = threading.Thread(target=self._compile, name=self._THREAD_NAME, daemon=True)

    def __enter__(self) -> Self:
        if self._config.train.device != "cpu" and NVIDIA_DRIVER.exists():
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._is_closed = True
        if kind is None or not cores.owns_process:
            self.wait()

    @classmethod
    def is_compiling(cls) -> bool:
        """Return whether a thread compiles, so that the interpreter may crash if it ends."""
        return any(thread.name == cls._THREAD_NAME for thread in threading.enumerate())

    def wait(self) -> None:
        """Wait for the thread. After the end of the context, the thread stops after its current part."""
        if self._thread.is_alive():
            self._thread.join()

    def _compile(self) -> None:
        with contextlib.suppress(Exception):
            from bert_pretrain.plan.timing import compile_ahead

            for _ in compile_ahead(self._config):
                if self._is_closed:
                    break
