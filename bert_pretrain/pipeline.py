"""The command `run`: run all stages and phases of one configuration, each in its own folder. Skip finished folders."""

import contextlib
import io
import itertools
import math
import tempfile
import threading
from collections.abc import Iterator, Sequence
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
from bert_pretrain.plan.time_limit import TimeLimit
from bert_pretrain.report.curves import draw_curves, pair_task_names
from bert_pretrain.report.diagnosis import nothing_learned
from bert_pretrain.text.corpus import Corpus, Sample
from bert_pretrain.text.sources import resolve
from bert_pretrain.train.inputs import check_needs, check_positions
from bert_pretrain.vocab.run import make_vocab

TIME = "time.json"
SAMPLE_BYTES = 2 << 20  # of the text, for a dry run
# Time reserved for the final model, the curves and the exit of the process: seconds per training, share of `time`.
SECONDS_AFTER_TRAINING, SHARE_AFTER_TRAINING = 3.0, 0.005
MIN_TRAINING_SHARE = 0.1  # of `time`; with less left for training, the run stops
NVIDIA_DRIVER = Path("/dev/nvidiactl")  # without it, nothing is compiled in advance


@contextlib.contextmanager
def working_folder(config: Config, output: Path, *, overwrite: bool = False) -> Iterator[None]:
    """Check the configuration and lock the output. With `overwrite`, move the output of all stages aside."""
    _check(config)
    with exclusive(output):
        if overwrite and not is_restarted():
            resolve(config.inputs, config.data, detect=False)  # fails on a missing input, before the output is moved
            for folder in filter(Path.exists, (output / stage for stage in ("vocab", "data", "train"))):
                with exclusive(folder):
                    set_aside(folder)
            (output / TIME).unlink(missing_ok=True)
        yield


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
    `train/NAME`). `seconds_before` is the time that the command has already used of `config.time`.
    """
    options: dict[str, Any] = {"workers": workers, "scheduler": scheduler, "overwrite": overwrite}
    with contextlib.ExitStack() as stack:
        limit = None
        if config.time is not None:
            limit = stack.enter_context(TimeLimit(config.time, output / TIME, used_before_open=seconds_before))
        names = [phase.name for phase in config.phases] or [""]
        configs = config.phase_configs
        for phase_config in configs:  # with `run auto`, the plan sets the positions after `_check`
            check_positions(phase_config, phase_config.data.max_seq_length)
        compiler = BackgroundCompiler(configs[0])
        folders = [output / "data" / name for name in names]
        if not (folders[-1] / MANIFEST).exists():
            stack.enter_context(compiler)
        print(f"── vocabulary ── {output / 'vocab'}")
        vocab = make_vocab(config, config.inputs, output / "vocab", **options)
        for phase_config, folder in zip(configs, folders, strict=True):
            print(f"── data ── {folder}")
            make_data(phase_config, config.inputs, vocab, folder, **options, store=output / ".token-store")
        compiler.wait()
        from bert_pretrain.train.run import train  # torch takes seconds to import

        runs = [output / "train" / name for name in names]
        if limit is None:
            configs = with_one_schedule(configs, folders)
        shares = [phase.time_share for phase in config.phases] or [1.0]
        previous: Path | None = None
        model = output
        for number, (phase_config, data, run) in enumerate(zip(configs, folders, runs, strict=True)):
            print(f"── training ── {run}")
            if limit is not None:
                phase_config = _with_time_left(phase_config, limit, run, shares[number:], is_first=number == 0)
            # Phases share one schedule and the optimizer state, except with a time limit.
            carry = previous is not None and limit is None
            model = train(phase_config, data, run, init_from=previous, carry_optimizer=carry, overwrite=overwrite)
            if number + 1 < len(runs):
                previous = model if limit is not None else _last_checkpoint(run)
        _show_results(runs, model, output)
        if limit is not None:
            print(f"time:   {duration(limit.used)} of {duration(limit.seconds)}")
    return model


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


def dry_run(config: Config, *, workers: int | None = None) -> None:
    """Print the plan of each training and an estimate of its cost, from a sample of the text."""
    _check(config)
    from bert_pretrain.train.run import train

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sample = _copy_samples(config, folder)
        samples = [source.location for source in sample.corpus.sources]
        with contextlib.redirect_stdout(io.StringIO()), sample.naming_originals():
            vocab = make_vocab(_for_samples(config), samples, folder / "vocab", workers=workers)
        time_shares = [phase.time_share for phase in config.phases] or [1.0]
        prepared: list[tuple[Config, Path, float]] = []
        for index, (phase_config, time_share) in enumerate(zip(config.phase_configs, time_shares, strict=True)):
            phase_config = _for_samples(phase_config)
            with contextlib.redirect_stdout(io.StringIO()), sample.naming_originals():
                data = make_data(phase_config, samples, vocab, folder / f"data-{index}", workers=workers)
            data_folder = DataFolder.open(data)
            tokens = sample.scale * data_folder.manifest["corpus"]["tokens"]
            print(f"text       about {tokens:,.0f} tokens; vocabulary and examples are estimated from a sample")
            if config.time is not None:
                seconds = config.time * time_share / sum(time_shares)
                phase_config = _with_length(phase_config, time_budget=seconds)
            elif (epochs := phase_config.train.max_epochs) is not None:
                steps = epochs * sample.scale * data_folder.rows("train") / phase_config.train.global_batch_size
                phase_config = _with_length(phase_config, max_steps=max(1, round(steps)))
            prepared.append((phase_config, data, tokens))
        total_steps = sum(phase_config.train.planned_steps or 0 for phase_config, *_ in prepared)
        for phase_config, data, tokens in prepared:
            if len(prepared) > 1 and (phase_steps := phase_config.train.planned_steps) is not None:
                phase_config = _with_length(phase_config, max_steps=phase_steps, schedule_steps=total_steps)
            train(phase_config, data, folder / "run", dry_run=True, corpus_tokens=tokens)


def _copy_samples(config: Config, folder: Path) -> Sample:
    """Copy the start of some inputs to a folder."""
    whole_words = config.vocab.tokens == "words"
    corpus = Corpus.open(config.inputs, config.data, whole_words=whole_words, examine=False, finds_language=False)
    return corpus.training.sample(folder, SAMPLE_BYTES)


def _for_samples(config: Config) -> Config:
    """Return the configuration without phases and without the keys of `data` that do not apply to the samples."""
    # The samples have other names than the inputs and are in UTF-8.
    changes: dict[str, Any] = {"encoding": "utf-8", "validation": (), "input_weights": {}, "fraction": 1.0}
    if isinstance(config.data.document_boundary, dict):
        changes["document_boundary"] = "auto"
    return config.model_copy(update={"phases": (), "data": config.data.model_copy(update=changes)})


def _with_length(config: Config, **length: Any) -> Config:
    """Return the configuration with another length of the training."""
    train = config.train.model_copy(update={**dict.fromkeys(LENGTHS), **length})
    return config.model_copy(update={"train": train})


def _last_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint of a finished phase, which initializes the next phase."""
    from bert_pretrain.train.checkpoint import newest_checkpoint

    checkpoint = newest_checkpoint(run / "checkpoints", changes=False)
    if checkpoint is None:
        what = "the phase has no checkpoint left, but the next phase needs one"
        remedy = "restore it from a copy, or start over with --overwrite (the old folder is moved aside)"
        raise OutputError(what, where=str(run / "checkpoints"), remedy=remedy)
    return checkpoint.path


def _check(config: Config) -> None:
    """Raise ConfigError for a configuration that cannot run here."""
    if cores.num_ranks() > 1:
        what = "torchrun starts several processes, but the stages before training need a single one"
        remedy = "run 'bert-pretrain vocab' and 'make-data' in one process, then 'torchrun … -m bert_pretrain train "
        remedy += "--data …' for each phase, the second with --init-from and --carry-optimizer: see docs/scaling.md"
        raise ConfigError(what, where="run", remedy=remedy)
    if not config.inputs:
        remedy = "give them after CONFIG, for example corpus/*.txt"
        raise ConfigError("there are no inputs", where="the key 'inputs'", remedy=remedy)
    for phase_config in config.phase_configs:
        check_needs(phase_config.train)  # before hours of work on the data
        check_positions(phase_config, phase_config.data.max_seq_length)


def _with_time_left(config: Config, limit: TimeLimit, run: Path, shares: Sequence[float], *, is_first: bool) -> Config:
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
        remedy = "allow more time, or use fewer inputs; 'run auto' then also needs --overwrite, for a new plan"
        raise ConfigError(what, where="the key 'time'", remedy=remedy)
    trained = 0.0 if latest is None else latest.record["progress"]["wall_seconds"]
    return _with_length(config, time_budget=max(shares[0] / sum(shares) * (trained + left), trained + 0.1))


def with_one_schedule(configs: Sequence[Config], folders: Sequence[Path]) -> list[Config]:
    """Return the configurations of all phases with one learning rate schedule, and with steps counted across phases."""
    from bert_pretrain.train.schedule import run_length

    if len(configs) == 1:
        return list(configs)
    lengths = (
        run_length(config.train, DataFolder.open(folder).rows("train")).steps
        for config, folder in zip(configs, folders, strict=True)
    )
    phase_steps = [steps for steps in lengths if steps is not None]
    if len(phase_steps) < len(configs):
        what = "phases share one schedule, which is counted in steps, but one of them has a time budget"
        remedy = "give every phase max_steps or max_epochs, or train without phases"
        raise ConfigError(what, where="train.time_budget", remedy=remedy)
    total = sum(phase_steps)
    shared = [
        _with_length(config, max_steps=end, schedule_steps=total)
        for config, end in zip(configs, itertools.accumulate(phase_steps), strict=True)
    ]
    for config in shared:  # check later phases before the first one starts
        config.train.check_warmup(total)
    return shared


def _show_results(runs: Sequence[Path], model: Path, output: Path) -> None:
    """Print validation metrics before and after training, draw the curves, and show how to load the model."""
    records = [read_record(run) for run in runs]
    title = pair_task_names(records)[1]
    reason = "there is no validation split, so nothing was evaluated"
    try:
        metrics = [read_metrics(run) for run in runs]
    except DataError as error:  # the run itself has finished
        metrics, reason = [[] for _ in runs], f"no metrics: {error}"
    evaluations = [[line for line in lines if "validation_mlm_loss" in line] for lines in metrics]
    print(f"\nheld out            MLM loss   MLM accuracy   {title}" if any(evaluations) else f"\n{reason}")
    for run, lines in zip(runs, evaluations, strict=True):
        for when, line in zip(("before", "after"), (lines[0], lines[-1]) if lines else (), strict=False):
            label = f"{run.name} {when}" if len(runs) > 1 else when
            names = ("validation_mlm_loss", "validation_mlm_accuracy")
            loss, masked = (math.nan if line[name] is None else line[name] for name in names)
            pairs = line["validation_nsp_accuracy"]  # None without pairs
            counts = line.get("validation_examples"), line.get("validation_documents")
            shown = "–" if pairs is None else with_error(pairs, *counts)
            print(f"{label:<18}{loss:>8.3f} nats{masked:>12.1%}{shown:>{len(title) + 3}}")
    if draw_curves(runs, output / "curves.png"):
        print(f"\ncurves: {output / 'curves.png'}")
    positions = value_of(records[-1], "config.model.max_position_embeddings") or 512
    limit = f" (texts of at most {positions} tokens)" if positions < 512 else ""  # fewer than BERT
    print(
        f"model:  {model}{limit}\n\n"
        "    from transformers import AutoModelForPreTraining, AutoTokenizer\n"
        f'    model, tokenizer = (x.from_pretrained("{model}") for x in (AutoModelForPreTraining, AutoTokenizer))\n'
    )
    if warning := nothing_learned(records[-1], metrics[-1]):
        print(warning)
