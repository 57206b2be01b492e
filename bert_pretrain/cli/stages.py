"""Commands of the three stages, `run` for all stages together, and `config` to print the configuration.

Each command turns its flags into a configuration and calls the stage.
"""

from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from bert_pretrain import __version__
from bert_pretrain.cli import options as cli
from bert_pretrain.cli.options import argument, bert_folder, key, key_flags, option, presets, switch
from bert_pretrain.errors import ConfigError
from bert_pretrain.io.files import local_path

if TYPE_CHECKING:
    from bert_pretrain.config import Config


def vocab(
    inputs: cli.Inputs,
    output: cli.Output,
    config: cli.ConfigSource = None,
    settings: cli.Settings = None,
    vocab_size: Annotated[int | None, key("--vocab-size")] = None,
    extend: Annotated[Path | None, option("Extend the vocabulary of this model folder.", "FOLDER")] = None,
    add_tokens: Annotated[int | None, key("--add-tokens")] = None,
    tokens: Annotated[str | None, key("--tokens")] = None,
    lowercase: Annotated[bool | None, key("--lowercase")] = None,
    workers: cli.Workers = None,
    scheduler: cli.Scheduler = None,
    strict: cli.Strict = None,
    encoding: cli.Encoding = None,
    overwrite: cli.Overwrite = False,
) -> None:
    """Build a WordPiece vocabulary, or extend an existing one.

    With --tokens words every word is a token, for text that is already tokenized, such as DNA k-mers.

    Example: bert-pretrain vocab corpus/*.txt.gz --output vocab
    """
    from bert_pretrain.config_file import load_config
    from bert_pretrain.model.hub import model_folder
    from bert_pretrain.vocab.run import make_vocab

    if extend is not None and vocab_size is not None:
        raise ConfigError(
            "--vocab-size cannot be used with --extend",
            where=f"--vocab-size {vocab_size}",
            remedy="use --add-tokens N instead",
        )
    flags = key_flags(
        tokens=tokens,
        vocab_size=vocab_size,
        add_tokens=add_tokens,
        lowercase=None if extend else lowercase,
        strict=strict,
        encoding=encoding,
    )
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


def make_data(
    inputs: cli.Inputs,
    vocab: Annotated[str, option("The tokenizer folder.", "FOLDER")],
    output: cli.Output,
    config: cli.ConfigSource = None,
    settings: cli.Settings = None,
    workers: cli.Workers = None,
    scheduler: cli.Scheduler = None,
    store: Annotated[str | None, option("Folder of the token store, which runs may share.", "FOLDER")] = None,
    validation: Annotated[list[str] | None, key("--validation")] = None,
    weight: Annotated[list[str] | None, key("--weight")] = None,
    dry_run: Annotated[bool, switch("--dry-run", "Only estimate rows, disk space and time from a sample.")] = False,
    strict: cli.Strict = None,
    encoding: cli.Encoding = None,
    lowercase: cli.Lowercase = None,
    overwrite: cli.Overwrite = False,
    verify: Annotated[bool, switch("--verify", "Check all bytes of a finished output, not only sizes.")] = False,
) -> None:
    """Make training examples from text.

    Example: bert-pretrain make-data corpus/*.txt.gz --vocab vocab --output data
    """
    from bert_pretrain.config_file import load_config
    from bert_pretrain.make_data.run import make_data as run_make_data
    from bert_pretrain.model.hub import model_folder

    flags = key_flags(strict=strict, encoding=encoding, validation=validation or None, weight=weight or None)
    run_make_data(
        load_config(config, settings, flags),
        inputs,
        model_folder(local_path(vocab, "--vocab"), "--vocab"),
        local_path(output, "--output"),
        workers=workers,
        scheduler=scheduler,
        store=None if store is None else local_path(store, "--store"),
        overwrite=overwrite,
        verify=verify,
        lowercase=lowercase,
        dry_run=dry_run,
    )


def train(
    data: Annotated[str, option("The data folder.", "FOLDER")],
    output: cli.Output,
    config: cli.ConfigSource = None,
    settings: cli.Settings = None,
    steps: cli.Steps = None,
    time: Annotated[str | None, key("--time")] = None,
    learning_rate: cli.LearningRate = None,
    batch_size: cli.BatchSize = None,
    device: cli.TrainingDevice = None,
    init_from: Annotated[Path | None, option("Start from the weights of a model folder.", "FOLDER")] = None,
    carry_optimizer: Annotated[bool, switch("--carry-optimizer", "Also load optimizer state and step.")] = False,
    teacher: Annotated[str | None, key("--teacher")] = None,
    dry_run: Annotated[bool, switch("--dry-run", "Only print the settings and an estimate of the time.")] = False,
    overwrite: cli.Overwrite = False,
    verify: Annotated[bool, switch("--verify", "Check all bytes of the data before the first step.")] = False,
) -> None:
    """Train BERT on a data folder.

    Example: bert-pretrain train --data data --output run --config base
    """
    from bert_pretrain.config_file import load_config
    from bert_pretrain.train.inputs import check_inputs

    for setting in settings or ():
        if setting.startswith(("data.", "data=", "vocab.", "vocab=")):
            raise ConfigError(
                "the data is already made, so this has no effect",
                where=f"--set {setting}",
                remedy="set it in make-data or vocab",
            )
    flags = key_flags(
        steps=steps,
        learning_rate=learning_rate,
        batch_size=batch_size,
        device=device,
        time=time,
        teacher=teacher,
    )
    loaded = load_config(config, settings, flags, with_phases=False)
    run_folder = local_path(output, "--output")
    init_folder = None if init_from is None else bert_folder(init_from, "--init-from")
    options: dict[str, Any] = {"init_from": init_folder, "carry_optimizer": carry_optimizer, "overwrite": overwrite}
    data_folder = local_path(data, "--data")
    check_inputs(
        loaded,
        data_folder,
        run_folder,
        **options,
        verify=verify,
    )  # before the import of torch
    from bert_pretrain.train.run import train as run_train

    run_train(
        loaded,
        data_folder,
        run_folder,
        **options,
        dry_run=dry_run,
    )


def run(
    config: cli.RunConfig,
    output: cli.Output,
    inputs: Annotated[list[str] | None, argument("INPUT", "Inputs as for vocab, instead of those of CONFIG.")] = None,
    settings: cli.Settings = None,
    time: Annotated[str | None, option("Time limit of all stages; auto plans the run for it.", "1h30m")] = None,
    steps: cli.Steps = None,
    learning_rate: cli.LearningRate = None,
    batch_size: cli.BatchSize = None,
    device: cli.TrainingDevice = None,
    encoding: cli.Encoding = None,
    workers: cli.Workers = None,
    scheduler: cli.Scheduler = None,
    dry_run: Annotated[bool, switch("--dry-run", "With auto: only print the plan.")] = False,
    machine: Annotated[str | None, option("With auto: plan for another machine, such as h100.", "NAME|FILE")] = None,
    overwrite: cli.Overwrite = False,
) -> None:
    """Run all stages and phases from one configuration.

    The outputs are OUTPUT/vocab, OUTPUT/data and OUTPUT/train.

    Example: bert-pretrain run auto corpus/*.txt.gz --time 1h --output runs/mine

    Example: bert-pretrain run tiny corpus/*.txt.gz --output runs/tiny

    Example: bert-pretrain run my-corpus.yaml --output runs/my-corpus
    """
    from bert_pretrain import pipeline
    from bert_pretrain.config_file import load_config

    folder = local_path(output, "--output")
    flags = key_flags(steps=steps, learning_rate=learning_rate, batch_size=batch_size, device=device, encoding=encoding)
    if inputs:
        flags["inputs"] = ("INPUT", inputs)
    if time is not None:
        flags["time"] = ("--time", time)
    is_auto = config == "auto"
    loaded = load_config(None if is_auto else config, settings, flags, where="CONFIG")
    _check_run(loaded, is_auto=is_auto, steps=steps, machine=machine, dry_run=dry_run)
    if is_auto:
        from bert_pretrain.plan import auto  # imports torch

        plan = partial(auto.planned_config, loaded, folder, settings=settings or (), flags=flags, machine=machine)
    if dry_run:
        plan(overwrite=overwrite, dry_run=True)
        return
    with pipeline.working_folder(loaded, folder, overwrite=overwrite):
        model = pipeline.run_pipeline(
            plan(overwrite=overwrite) if is_auto else loaded,
            folder,
            workers=workers,
            scheduler=scheduler,
            overwrite=overwrite,
            seconds_before=monotonic() - cli.STARTED,
        )
        if is_auto and (comparison := auto.compare(folder, model.parent)):
            print(comparison)


def _check_run(
    loaded: "Config",
    *,
    is_auto: bool,
    steps: str | None,
    machine: str | None,
    dry_run: bool,
) -> None:
    """Raise ConfigError for options of `run` that do not fit together."""
    if is_auto and (not loaded.inputs or loaded.time is None):
        raise ConfigError(
            "auto needs input text and a time",
            where="run auto",
            remedy="write for example: run auto corpus/*.txt.gz --time 1h --output runs/mine",
        )
    if machine is not None and not is_auto:
        raise ConfigError("--machine works only with 'run auto'", where="--machine", remedy="leave it out")
    if dry_run and not is_auto:
        raise ConfigError(
            "--dry-run works only with 'run auto'",
            where="--dry-run",
            remedy="use the --dry-run of make-data and of train, or 'run auto'",
        )
    if steps is not None and loaded.time is not None:
        raise ConfigError("--steps has no effect with a time", where="--steps", remedy="leave out --steps or --time")


def config(
    preset: Annotated[
        str | None,
        argument("PRESET", "Presets or YAML files, joined by commas; omit for the defaults.", autocompletion=presets),
    ] = None,
) -> None:
    """Print every key of the configuration with value and meaning.

    The output is a YAML file for run or --config.

    Example: bert-pretrain config base > mine.yaml
    """
    from bert_pretrain.config_file import load_config
    from bert_pretrain.config_keys import as_commented_yaml

    text = as_commented_yaml(load_config(preset, where="PRESET"))
    print(f"# {preset or 'The defaults'}, as bert-pretrain {__version__} reads it.\n\n{text}", end="")
