"""`run`: all stages and phases from one YAML, each into its own folder; what is complete is not done again."""

import contextlib
import io
import itertools
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_pretrain.config import LENGTHS, Config
from bert_pretrain.errors import ConfigError, DataError, OutputError, UserError
from bert_pretrain.examples.examples import with_error
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.io.manifest import MANIFEST, exclusive, is_restarted, read_manifest, read_record, set_aside
from bert_pretrain.make_data.estimate import MAX_SOURCES, sample_source
from bert_pretrain.make_data.run import make_data
from bert_pretrain.plan.time_limit import TimeLimit
from bert_pretrain.report.curves import draw_curves, names_of_pairs, read_metrics, value_of
from bert_pretrain.report.diagnosis import nothing_learned
from bert_pretrain.text.sources import evenly_spaced, examined, resolve
from bert_pretrain.train.inputs import check_needs
from bert_pretrain.vocab.run import make_vocab

STAGES, TIME = ("vocab", "data", "train"), "time.json"
MAX_POSITIONS = 512  # of BERT; a model with fewer is told with its limit
SAMPLE_BYTES = 2 << 20  # of the text, for a dry run
SECONDS_AFTER_TRAINING, SHARE_AFTER_TRAINING = 3.0, 0.005
"""Time kept back from each training for the final model, the curves and the end of the process."""
MIN_TRAINING_SHARE = 0.1  # of `config.time`: with less left for training, the run is refused


@contextlib.contextmanager
def working_folder(config: Config, output: Path, *, overwrite: bool = False) -> Iterator[None]:
    """Check what a `run` needs and lock its output, where with `overwrite` all stages are moved aside at once."""
    _check(config)
    with exclusive(output):
        if overwrite and not is_restarted():
            resolve(config.inputs, config.data, looks=False)  # a missing input must not cost the old output
            for folder in filter(Path.exists, (output / name for name in STAGES)):
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
    """Build vocabulary, data and model under `output`; returns the final model folder.

    `output`, a `working_folder`, gets `vocab`, `data` and `train` (with phases: `data/NAME` and `train/NAME`).
    `seconds_before` is what the command has run already, of the time that `config.time` gives.
    """
    place: dict[str, Any] = {"workers": workers, "scheduler": scheduler, "overwrite": overwrite}
    with contextlib.ExitStack() as held:
        limit = None
        if config.time is not None:
            limit = held.enter_context(TimeLimit(config.time, output / TIME, used_before_open=seconds_before))
        print(f"── vocabulary ── {output / 'vocab'}")
        vocab = make_vocab(config, config.inputs, output / "vocab", **place)
        stages = [(phase.name, config.for_phase(phase)) for phase in config.phases] or [("", config)]
        folders = []
        for name, stage in stages:
            folders.append(output / "data" / name)
            print(f"── data ── {folders[-1]}")
            make_data(stage, config.inputs, vocab, folders[-1], **place, store=output / ".token-store")
        from bert_pretrain.train.run import train  # torch takes seconds to import
        from bert_pretrain.train.schedule import duration

        runs = [output / "train" / name for name, _ in stages]
        scheduled = [stage for _, stage in stages]
        if limit is None:
            scheduled = with_one_schedule(scheduled, folders)
        shares = [phase.time_share for phase in config.phases] or [1.0]
        previous: Path | None = None
        model = output
        for number, (stage, data, run) in enumerate(zip(scheduled, folders, runs, strict=True)):
            print(f"── training ── {run}")
            if limit is not None:
                stage = _in_time_left(stage, limit, run, shares[number:], may_refuse=number == 0)
            # By steps, phases share one schedule and the optimizer's state; by the clock, each has its own.
            carry = previous is not None and limit is None
            model = train(stage, data, run, init_from=previous, carry_optimizer=carry, overwrite=overwrite)
            if number + 1 < len(runs):
                previous = model if limit is not None else _last_checkpoint(run)
        _show_results(runs, model, output)
        if limit is not None:
            print(f"time:   {duration(limit.used)} of {duration(limit.seconds)}")
    return model


def dry_run(config: Config, *, workers: int | None = None) -> None:
    """Print what each training of a configuration would do and take, from a sample of the text."""
    _check(config)
    from bert_pretrain.train.run import train

    with tempfile.TemporaryDirectory() as name:
        folder, inputs = Path(name), list[str]()
        sources = [source for source in resolve(config.inputs, config.data, looks=False) if not source.is_validation]
        whole_words = config.vocab.tokens == "words"
        chosen = evenly_spaced(sources, min(len(sources), MAX_SOURCES))
        chosen = [examined(source, config.data, whole_words=whole_words) for source in chosen]
        shares = []
        for number, source in enumerate(chosen):
            inputs.append(f"{folder}/{number}.{source.format if source.format in ('txt', 'csv', 'tsv') else 'jsonl'}")
            shares.append(sample_source(source, Path(inputs[-1]), SAMPLE_BYTES // len(chosen), config.data)[1])
        sizes = [os.path.getsize(sample) for sample in inputs]
        # With few inputs a fraction of each is read; with many, the sources are that fraction already.
        whole = sum(source.fraction * size / share for source, size, share in zip(chosen, sizes, shares, strict=True))
        scale = len(sources) / len(chosen) * whole / max(1, sum(sizes))
        # The samples are in UTF-8, under other names.
        reading: dict[str, Any] = {"encoding": "utf-8", "validation": (), "input_weights": {}, "fraction": 1.0}
        if isinstance(config.data.document_boundary, dict):
            reading["document_boundary"] = "auto"
        stages = [(config.for_phase(phase), phase.time_share) for phase in config.phases] or [(config, 1.0)]
        for index, (stage, time_share) in enumerate(stages):
            stage = stage.model_copy(update={"phases": (), "data": stage.data.model_copy(update=reading)})
            with contextlib.redirect_stdout(io.StringIO()):
                vocab = make_vocab(stage, inputs, folder / "vocab", workers=workers)
                data = make_data(stage, inputs, vocab, folder / f"data-{index}", workers=workers)
            found = DataFolder.open(data)
            tokens = scale * found.manifest["corpus"]["tokens"]
            print(f"text       about {tokens:,.0f} tokens; the vocabulary and the examples are of a sample")
            if config.time is not None:
                time_share /= sum(share for _, share in stages)
                stage = _with_length(stage, time_budget=time_share * config.time)
            elif (epochs := stage.train.max_epochs) is not None:
                steps = epochs * scale * found.rows("train") / stage.train.global_batch_size
                stage = _with_length(stage, max_steps=max(1, round(steps)))
            train(stage, data, folder / "run", dry_run=True, corpus_tokens=tokens)


def _with_length(config: Config, **length: Any) -> Config:
    """Return a configuration whose training has this length instead of its own."""
    train = config.train.model_copy(update={**dict.fromkeys(LENGTHS), **length})
    return config.model_copy(update={"train": train})


def _last_checkpoint(run: Path) -> Path:
    """Return the checkpoint of a finished phase, from which the next one continues."""
    from bert_pretrain.train.checkpoint import newest_checkpoint

    found = newest_checkpoint(run / "checkpoints", changes=False)
    if found is None:
        raise OutputError(
            "the phase has no checkpoint left, from which the next one continues",
            where=str(run / "checkpoints"),
            remedy="restore it from a copy, or start over with --overwrite (the old folder is moved aside)",
        )
    return found.path


def _check(config: Config) -> None:
    """Refuse what cannot be run."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "torchrun starts several processes, and the stages before training are for one",
            where="run",
            remedy="run 'bert-pretrain vocab' and 'make-data' in one process, then 'torchrun … -m bert_pretrain train "
            "--data …' for each phase, the second with --init-from and --carry-optimizer: see docs/scaling.md",
        )
    if not config.inputs:
        raise ConfigError(
            "no inputs are given", where="the key 'inputs'", remedy="name them after CONFIG, for example corpus/*.txt"
        )
    for stage in [config.for_phase(phase) for phase in config.phases] or [config]:
        check_needs(stage.train)  # before hours of work on the data


def _in_time_left(config: Config, limit: TimeLimit, run: Path, shares: Sequence[float], *, may_refuse: bool) -> Config:
    """Give a training its share of the time that it and those after it have, on top of what it has had already.

    It may have begun before an interruption. `shares` are those of this training and of those after it, relative to one
    another. Too little time is an error only with `may_refuse`: once something is trained, the rest is as short as it
    must be.
    """
    from bert_pretrain.train.checkpoint import newest_checkpoint
    from bert_pretrain.train.schedule import duration

    if (run / MANIFEST).exists():  # finished: it stays as long as it is
        budget = read_manifest(run, "run", "--output")["config"]["train"]["time_budget"]
    else:
        latest = newest_checkpoint(run / "checkpoints")
        left = limit.left - len(shares) * SECONDS_AFTER_TRAINING - SHARE_AFTER_TRAINING * limit.seconds
        if left < MIN_TRAINING_SHARE * limit.seconds and latest is None and may_refuse:
            raise ConfigError(
                f"vocabulary and data took {duration(limit.used)} of {duration(limit.seconds)}; "
                f"{duration(max(left, 0.0))} are left, too little to train",
                where="the key 'time'",
                remedy="allow more time, or name fewer inputs",
            )
        trained = latest.record["progress"]["wall_seconds"] if latest is not None else 0.0
        budget = max(shares[0] / sum(shares) * (trained + left), trained + 0.1)
    return _with_length(config, time_budget=budget)


def with_one_schedule(stages: Sequence[Config], folders: Sequence[Path]) -> list[Config]:
    """Let phases count their steps on from one another, under one learning-rate schedule over all of them."""
    from bert_pretrain.train.schedule import run_length

    lengths = (
        run_length(stage.train, DataFolder.open(folder).rows("train")).steps
        for stage, folder in zip(stages, folders, strict=True)
    )
    own = [steps for steps in lengths if steps is not None]
    if len(own) < len(stages):
        if len(stages) == 1:
            return list(stages)
        raise ConfigError(
            "phases share one schedule, which is counted in steps, and one of them has a time budget",
            where="train.time_budget",
            remedy="give every phase max_steps or max_epochs, or train without phases",
        )
    shared = [
        _with_length(stage, max_steps=steps, schedule_steps=sum(own))
        for stage, steps in zip(stages, itertools.accumulate(own), strict=True)
    ]
    for stage in shared:  # before the first phase begins, not when a later one does
        stage.train.check_warmup(sum(own))
    return shared


def _show_results(runs: Sequence[Path], model: Path, output: Path) -> None:
    """Print held-out metrics before and after, draw the curves, and say how to open the model."""
    records = [read_record(run) for run in runs]
    title = names_of_pairs(records)[1]
    nothing = "nothing was held out, so nothing was evaluated"
    try:
        metrics = [read_metrics(run) for run in runs]
    except DataError as error:  # must not cost a finished run
        metrics, nothing = [[] for _ in runs], f"no metrics: {error}"
    evaluations = [[line for line in lines if "validation_mlm_loss" in line] for lines in metrics]
    print(f"\nheld out            MLM loss   MLM accuracy   {title}" if any(evaluations) else f"\n{nothing}")
    for run, lines in zip(runs, evaluations, strict=True):
        for when, line in zip(("before", "after"), (lines[0], lines[-1]) if lines else (), strict=False):
            label = f"{run.name} {when}" if len(runs) > 1 else when
            names = ("validation_mlm_loss", "validation_mlm_accuracy")
            loss, masked = (math.nan if line[name] is None else line[name] for name in names)
            pairs = line["validation_nsp_accuracy"]  # None without pairs
            shown = "–" if pairs is None else with_error(pairs, line.get("validation_examples"))
            print(f"{label:<18}{loss:>8.3f} nats{masked:>12.1%}{shown:>{len(title) + 3}}")
    try:
        print(f"\ncurves: {draw_curves(list(runs), output / 'curves.png')}")
    except UserError as error:  # matplotlib is an extra
        print(f"\nno curves drawn: {error}")
    positions = value_of(records[-1], "config.model.max_position_embeddings") or MAX_POSITIONS
    limit = f" (texts of at most {positions} tokens)" if positions < MAX_POSITIONS else ""
    print(
        f"model:  {model}{limit}\n\n"
        "    from transformers import AutoModelForPreTraining, AutoTokenizer\n"
        f'    model, tokenizer = (x.from_pretrained("{model}") for x in (AutoModelForPreTraining, AutoTokenizer))\n'
    )
    if warning := nothing_learned(records[-1], metrics[-1]):
        print(warning)
