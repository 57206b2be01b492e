"""Commands of the three stages, and `run`, which runs all of them from one YAML file.

They translate flags into a configuration and call the stage. A signature is the list of flags, however long.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bert_pretrain.cli.loading import (
    bert_folder,
    importing,
    load_config,
    model_folder,
    seconds_since_start,
)
from bert_pretrain.cli.options import (
    BatchSize,
    ConfigSource,
    Encoding,
    Inputs,
    LearningRate,
    Lowercase,
    Output,
    Overwrite,
    Scheduler,
    Settings,
    Steps,
    Strict,
    Time,
    TrainingDevice,
    Workers,
    presets,
    training_flags,
)
from bert_pretrain.errors import ConfigError
from bert_pretrain.storage.paths import local_path

if TYPE_CHECKING:
    from bert_pretrain.config import Config

AUTO = "auto"


def vocab(
    inputs: Inputs,
    output: Output,
    config: ConfigSource = None,
    settings: Settings = None,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", metavar="N", help="Tokens, special ones included.")
    ] = None,
    extend: Annotated[
        Path | None,
        typer.Option("--extend", metavar="FOLDER", help="Add words to the vocabulary of this BERT's folder."),
    ] = None,
    add_tokens: Annotated[
        int | None,
        typer.Option("--add-tokens", metavar="N", help="With --extend: how many; default: all unused slots."),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="wordpiece|words", help="Pieces of words, or whole words.")
    ] = None,
    lowercase: Lowercase = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    strict: Strict = False,
    encoding: Encoding = None,
    overwrite: Overwrite = False,
) -> None:
    """Build a WordPiece vocabulary, or extend an existing one.

    With --tokens words every word is a token: for text that is tokenized already, such as DNA k-mers.

    Example: bert-pretrain vocab corpus/*.txt.gz --output vocab
    """
    with importing(with_pandas=False):
        from bert_pretrain.vocab.run import make_vocab
    misplaced = ("--vocab-size", vocab_size) if extend else ("--add-tokens", add_tokens)
    if misplaced[1] is not None:
        raise ConfigError(
            f"{misplaced[0]} has no meaning {'with' if extend else 'without'} --extend",
            where=f"{misplaced[0]} {misplaced[1]}",
            remedy="use --add-tokens N instead" if extend else "add --extend FOLDER, or leave it out",
        )
    if tokens == "words" and lowercase is not None:
        raise ConfigError(
            "whole words are taken as they are",
            where=f"--{'' if lowercase else 'no-'}lowercase --tokens words",
            remedy="leave one of the two out",
        )
    flags = {
        "vocab.tokens": ("--tokens", tokens),
        "vocab.size": ("--vocab-size", vocab_size),
        "vocab.add_tokens": ("--add-tokens", add_tokens),
        "vocab.lowercase": ("--lowercase", None if extend else lowercase),
        "data.strict": ("--strict", strict or None),
        "data.encoding": ("--encoding", encoding),
    }
    make_vocab(
        load_config(config, settings, flags),
        inputs,
        local_path(output, "--output"),
        extend=None if extend is None else model_folder(extend, "--extend"),
        lowercase=lowercase,
        workers=workers,
        scheduler=scheduler,
        overwrite=overwrite,
    )


def _weight_of_input(setting: str) -> tuple[str, str]:
    name, _, weight = setting.rpartition("=")
    if not name:
        raise ConfigError(
            f"'{setting}' is not an input and a weight", where="--weight", remedy="write INPUT=N, such as a.txt=3"
        )
    return name, weight


def make_data(
    inputs: Inputs,
    vocab: Annotated[str, typer.Option("--vocab", metavar="FOLDER", help="The tokenizer folder.")],
    output: Output,
    config: ConfigSource = None,
    settings: Settings = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    store: Annotated[
        Path | None, typer.Option("--store", metavar="FOLDER", help="Folder of tokenized text, for other runs.")
    ] = None,
    validation: Annotated[
        list[str] | None,
        typer.Option("--validation", metavar="INPUT", help="Hold out this input, not a fraction."),
    ] = None,
    weight: Annotated[
        list[str] | None, typer.Option("--weight", metavar="INPUT=N", help="Use an input N times as often as others.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate rows, disk and time from a sample, and write nothing.")
    ] = False,
    strict: Strict = False,
    encoding: Encoding = None,
    lowercase: Lowercase = None,
    overwrite: Overwrite = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every byte of a finished output, not only sizes and footers.")
    ] = False,
) -> None:
    """Make training examples, in shards.

    Example: bert-pretrain make-data corpus/*.txt.gz --vocab vocab --output data
    """
    with importing(with_pandas=False):
        from bert_pretrain.make_data.run import make_data as run_make_data
    flags = {
        "data.strict": ("--strict", strict or None),
        "data.encoding": ("--encoding", encoding),
        "data.validation": ("--validation", validation or None),
        "data.input_weights": ("--weight", dict(map(_weight_of_input, weight)) if weight else None),
    }
    run_make_data(
        load_config(config, settings, flags),
        inputs,
        model_folder(local_path(vocab, "--vocab"), "--vocab"),
        local_path(output, "--output"),
        workers=workers,
        scheduler=scheduler,
        store=store,
        overwrite=overwrite,
        verify=verify,
        lowercase=lowercase,
        dry_run=dry_run,
    )


def train(
    data: Annotated[str, typer.Option("--data", metavar="FOLDER", help="The data folder.")],
    output: Output,
    config: ConfigSource = None,
    settings: Settings = None,
    steps: Steps = None,
    time: Time = None,
    learning_rate: LearningRate = None,
    batch_size: BatchSize = None,
    device: TrainingDevice = None,
    init_from: Annotated[
        Path | None, typer.Option("--init-from", metavar="FOLDER", help="Start from the weights of a BERT folder.")
    ] = None,
    carry_optimizer: Annotated[
        bool, typer.Option("--carry-optimizer", help="Take optimizer state and step along, too.")
    ] = False,
    teacher: Annotated[
        str | None, typer.Option("--teacher", metavar="MODEL", help="Take first weights from a larger BERT's folder.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Continue from the newest checkpoint.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print settings and time of the run.")] = False,
    overwrite: Overwrite = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every byte of the data before the first step.")
    ] = False,
) -> None:
    """Train BERT on a data folder.

    Example: bert-pretrain train --data data --output run --config base
    """
    flags = training_flags(steps, learning_rate, batch_size, device, time)
    flags["train.teacher"] = ("--teacher", teacher)
    loaded = load_config(config, settings, flags, with_phases=False)
    data_folder = local_path(data, "--data")
    run_folder = local_path(output, "--output")
    first = None if init_from is None else bert_folder(init_from, "--init-from")
    with importing(with_pandas=False):
        from bert_pretrain.train.inputs import check_inputs
    check_inputs(
        loaded,
        data_folder,
        run_folder,
        init_from=first,
        carry_optimizer=carry_optimizer,
        overwrite=overwrite,
        verify=verify,
    )
    with importing():
        from bert_pretrain.train.run import train as run_train
    run_train(
        loaded,
        data_folder,
        run_folder,
        init_from=first,
        carry_optimizer=carry_optimizer,
        resume=resume,
        overwrite=overwrite,
        dry_run=dry_run,
    )


def run(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="YAML files or presets such as base, joined by commas; auto plans.",
            autocompletion=presets,
        ),
    ],
    output: Output,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="As for vocab; they replace the key inputs of CONFIG."),
    ] = None,
    settings: Settings = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="1h30m", help="Time for all stages; auto plans for it.")
    ] = None,
    steps: Steps = None,
    learning_rate: LearningRate = None,
    batch_size: BatchSize = None,
    device: TrainingDevice = None,
    encoding: Encoding = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the plan, or size and time of each training.")
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="With auto: plan for this machine, such as h100."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Run all stages and phases from one configuration.

    The stages write OUTPUT/vocab, OUTPUT/data and OUTPUT/train.

    Example: bert-pretrain run auto corpus/*.txt.gz --time 1h --output runs/mine

    Example: bert-pretrain run tiny corpus/*.txt.gz --output runs/tiny

    Example: bert-pretrain run my-corpus.yaml --output runs/my-corpus
    """
    with importing():
        from bert_pretrain.pipeline import dry_run as run_dry
        from bert_pretrain.pipeline import run_pipeline
    folder = local_path(output, "--output")
    if inputs and any(setting.partition("=")[0] == "inputs" for setting in settings or ()):
        raise ConfigError(
            "inputs are given as arguments and by --set",
            where=f"{inputs[0]} and --set inputs",
            remedy="keep one of the two",
        )
    flags = {
        "inputs": ("INPUT", inputs or None),
        "time": ("--time", time),
        "data.encoding": ("--encoding", encoding),
        **training_flags(steps, learning_rate, batch_size, device),
    }
    if config == AUTO:
        loaded = _planned(inputs or [], folder, settings, flags, machine, overwrite=overwrite, dry_run=dry_run)
        if loaded is None:
            return
    else:
        if machine is not None:
            raise ConfigError("--machine is for 'run auto'", where="--machine", remedy="leave it out")
        loaded = load_config(config, settings, flags)
        if dry_run:
            run_dry(loaded, workers=workers)
            return
    model = run_pipeline(
        loaded,
        folder,
        workers=workers,
        scheduler=scheduler,
        overwrite=overwrite,
        seconds_before=seconds_since_start(),
    )
    if config == AUTO:
        _compare_with_forecast(folder, model.parent, settings or [], flags)


def _planned(
    inputs: list[str],
    output: Path,
    settings: list[str] | None,
    flags: Mapping[str, tuple[str, object]],
    machine: str | None,
    *,
    overwrite: bool,
    dry_run: bool,
) -> "Config | None":
    """Return the configuration that `run auto` plans, or None where it shall only be shown."""
    from bert_pretrain.plan import auto

    own = load_config(None, settings, flags)
    if not inputs or own.time is None:
        raise ConfigError(
            "auto needs the text and the time",
            where="run auto",
            remedy="write for example: run auto corpus/*.txt.gz --time 1h --output runs/mine",
        )
    rest = {key: given for key, given in flags.items() if key not in ("inputs", "time")}
    planned = auto.planned_config(
        inputs, own.time, output, settings=settings or (), flags=rest, machine=machine, overwrite=overwrite,
        dry_run=dry_run,
    )  # fmt: skip
    return None if dry_run else planned


def _compare_with_forecast(
    output: Path, run: Path, settings: list[str], flags: Mapping[str, tuple[str, object]]
) -> None:
    """Print what the plan expected and what came of it."""
    from bert_pretrain.plan.outcome import compare

    given = [key for key, (_, value) in flags.items() if value is not None and key not in ("inputs", "time")]
    if line := compare(output, run, [*(setting.partition("=")[0] for setting in settings), *given]):
        print(line)
