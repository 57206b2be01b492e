"""The command line: one command a stage, and what one does with data and models.

Commands translate flags to a configuration and call the stage; heavy libraries are imported only there, so that
`--help` answers at once. A user's mistake becomes one message and exit code 2, an interruption 130 or 143.
"""

import errno
import functools
import importlib
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from bert_pretrain import __version__
from bert_pretrain.errors import ConfigError, Interrupted, UserError

if TYPE_CHECKING:
    from bert_pretrain.config import Config

app = typer.Typer(
    name="bert-pretrain",
    help="Pretrain a BERT: raw text to a vocabulary, to examples, to a model that opens in transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Inputs = Annotated[list[str], typer.Argument(help="Files, globs, folders, URLs, or dataset:NAME[:config][@split].")]
Output = Annotated[Path, typer.Option("--output", help="The folder to write.")]
ConfigSource = Annotated[
    str | None, typer.Option("--config", help="A YAML file, or a shipped preset such as base or tiny.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set one key of the configuration.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Move another output aside instead of refusing it.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Processes; all cores by default.")]
Scheduler = Annotated[
    str | None,
    typer.Option("--scheduler", metavar="tcp://HOST:PORT", help="Work on the Dask cluster of this scheduler instead."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse text that is not UTF-8 instead of repairing it.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]


_HOW_TO_GO_ON = "the same command, without --overwrite, goes on where it stopped"
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)


def reports_mistakes(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a user's mistake and an interruption of `command` into a message and an exit code."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except UserError as error:
            _leave(f"error: {error}", 2)
        except Interrupted as interruption:
            _leave(interruption.message, interruption.exit_code)
        except KeyboardInterrupt:
            _leave(f"interrupted; {_HOW_TO_GO_ON}", 130)
        except _Terminated:
            _leave(f"terminated; {_HOW_TO_GO_ON}", 143)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                what, remedy = "the disk is full", f"free some space; {_HOW_TO_GO_ON}"
            elif error.errno in _DENIED and error.filename is not None:
                what, remedy = f"cannot use that path: {error.strerror}", "check the path and its permissions"
            else:
                raise
            _leave(f"error: {UserError(what, where=str(error.filename or 'the output'), remedy=remedy)}", 2)

    return wrapped


@app.command()
@reports_mistakes
def vocab(
    inputs: Inputs,
    output: Output,
    config: ConfigSource = None,
    settings: Settings = None,
    vocab_size: Annotated[int | None, typer.Option("--vocab-size", help="Tokens, special ones included.")] = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    strict: Strict = False,
    overwrite: Overwrite = False,
) -> None:
    """Build a WordPiece vocabulary.

    Example: bert-pretrain vocab corpus/*.txt.gz --output vocab --vocab-size 30522
    """
    make_vocab = _load("bert_pretrain.vocab.run", "make_vocab")
    flags = {"vocab.size": ("--vocab-size", vocab_size), "data.strict": ("--strict", strict or None)}
    make_vocab(
        _load_config(config, settings, flags), inputs, output, workers=workers, scheduler=scheduler, overwrite=overwrite
    )


def _weight_of_input(setting: str) -> tuple[str, str]:
    name, _, weight = setting.rpartition("=")
    if not name:
        raise ConfigError(
            f"'{setting}' names no input and weight", where="--weight", remedy="write INPUT=N, such as a.txt=3"
        )
    return name, weight


@app.command()
@reports_mistakes
def make_data(
    inputs: Inputs,
    vocab: Annotated[Path, typer.Option("--vocab", help="The tokenizer folder.")],
    output: Output,
    config: ConfigSource = None,
    settings: Settings = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    store: Annotated[Path | None, typer.Option("--store", help="Where tokenised text is kept for other runs.")] = None,
    validation: Annotated[
        list[str] | None, typer.Option("--validation", metavar="INPUT", help="Hold this input out, not a fraction.")
    ] = None,
    weight: Annotated[
        list[str] | None, typer.Option("--weight", metavar="INPUT=N", help="See an input N times as often as others.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate rows, disk and time from a sample, and write nothing.")
    ] = False,
    strict: Strict = False,
    overwrite: Overwrite = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every byte of a finished output, not only sizes and footers.")
    ] = False,
) -> None:
    """Make examples for training, in shards.

    Example: bert-pretrain make-data corpus/*.txt.gz --vocab vocab --output data --set data.max_seq_length=128
    """
    run_make_data = _load("bert_pretrain.make_data.run", "make_data")
    flags = {
        "data.strict": ("--strict", strict or None),
        "data.validation": ("--validation", validation or None),
        "data.input_weights": ("--weight", dict(map(_weight_of_input, weight)) if weight else None),
    }
    loaded = _load_config(config, settings, flags)
    if dry_run:
        estimate = _load("bert_pretrain.make_data.estimate", "estimate")
        print(estimate(loaded, inputs, vocab).describe(workers or os.cpu_count() or 1))
        return
    run_make_data(
        loaded,
        inputs,
        vocab,
        output,
        workers=workers,
        scheduler=scheduler,
        store=store,
        overwrite=overwrite,
        verify=verify,
    )


@app.command()
@reports_mistakes
def train(
    data: Annotated[Path, typer.Option("--data", help="The data folder.")],
    output: Output,
    config: ConfigSource = None,
    settings: Settings = None,
    init_from: Annotated[
        Path | None, typer.Option("--init-from", help="Start from the weights of a BERT folder.")
    ] = None,
    carry_optimizer: Annotated[
        bool, typer.Option("--carry-optimizer", help="Take optimizer state and step from --init-from as well.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Go on from the newest checkpoint.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what the run would do, need and take.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Train BERT on a data folder.

    Example: bert-pretrain train --data data --output run --config base
    """
    run_train = _load("bert_pretrain.train.run", "train")
    loaded = _load_config(config, settings)
    if loaded.phases:
        print("the phases of the configuration are for 'bert-pretrain run'; this trains by the section train alone")
    run_train(
        loaded,
        data,
        output,
        init_from=init_from,
        carry_optimizer=carry_optimizer,
        resume=resume,
        overwrite=overwrite,
        dry_run=dry_run,
    )


@app.command()
@reports_mistakes
def run(
    config: Annotated[str, typer.Argument(help="A YAML file with inputs and all sections, or a preset.")],
    output: Output,
    settings: Settings = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    overwrite: Overwrite = False,
) -> None:
    """Run all stages and phases from one YAML: OUTPUT/vocab, OUTPUT/data, OUTPUT/train.

    Example: bert-pretrain run my-corpus.yaml --output runs/my-corpus
    """
    run_pipeline = _load("bert_pretrain.pipeline", "run_pipeline")
    run_pipeline(_load_config(config, settings), output, workers=workers, scheduler=scheduler, overwrite=overwrite)


@app.command()
@reports_mistakes
def inspect(
    data: Annotated[Path, typer.Argument(metavar="DATA_DIR", help="A folder that make-data has written.")],
    split: Annotated[str, typer.Option("--split", help="Where the examples come from: train or validation.")] = "train",
    rows: Annotated[int | None, typer.Option("--rows", min=0, help="How many examples to show.")] = None,
    row: Annotated[list[int] | None, typer.Option("--row", help="Show this row; may be repeated.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Draws the rows.")] = 0,
    stats: Annotated[bool, typer.Option("--stats", help="Read all shards: figures, histograms, checks.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write all of it as one page to this file.")] = None,
    workers: Workers = None,
) -> None:
    """Look at a data folder; exit code 1 if it breaks what its configuration promises.

    Example: bert-pretrain inspect data --stats --html data.html
    """
    run_inspect = _load("bert_pretrain.tools.inspect", "inspect")
    is_sound = run_inspect(
        data, split=split, rows=rows, chosen=row or (), seed=seed, stats=stats, html=html, workers=workers
    )
    if not is_sound:
        raise typer.Exit(1)


@app.command()
@reports_mistakes
def evaluate(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    data: Annotated[Path, typer.Option("--data", help="The data folder.")],
    device: Device = "auto",
) -> None:
    """Measure held-out loss and accuracy of a model on a data folder.

    Example: bert-pretrain evaluate run/model --data data
    """
    run_evaluate = _load("bert_pretrain.train.evaluate", "evaluate")
    loaded = _load_config(None, None, {"train.device": ("--device", device)})
    for name, value in run_evaluate(model, data, config=loaded.train).items():
        print(f"{name:<24}{value:>12.4f}")


@app.command()
@reports_mistakes
def fill_mask(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    text: Annotated[str, typer.Argument(help="Text with one or several [MASK].")],
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="How many answers for each blank.")] = 5,
    device: Device = "auto",
) -> None:
    """Fill the blanks of a text.

    Example: bert-pretrain fill-mask run/model "The capital of France is [MASK]."
    """
    run_fill_mask = _load("bert_pretrain.tools.fill_mask", "fill_mask")
    for answers in run_fill_mask(model, text, top_k=top_k, device=device):
        print("  ".join(f"{token} {probability:.1%}" for token, probability in answers))


@app.command()
@reports_mistakes
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    output: Annotated[Path, typer.Option("--output", help="The PNG file to write; the page lies beside it.")],
) -> None:
    """Draw the curves of one or several runs, and write a page that says what is normal to expect.

    Example: bert-pretrain report runs/a/train runs/b/train --output curves.png
    """
    write_report = _load("bert_pretrain.tools.report", "write_report")
    picture, page = write_report(runs, output)
    print(f"curves: {picture}\npage:   {page}")


_WITHOUT_PANDAS = ("bert_pretrain.vocab", "bert_pretrain.make_data")


def _load(module: str, name: str) -> Any:
    """Import what a command needs, with signals held back: inside a half-made import one would be lost, or break it."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        if not module.startswith(_WITHOUT_PANDAS) and importlib.util.find_spec("pandas"):
            importlib.import_module("pandas")  # pyarrow loads it at its first use, whenever that is
        return getattr(importlib.import_module(module), name)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _load_config(
    source: str | None, settings: list[str] | None, flags: Mapping[str, tuple[str, object]] | None = None
) -> "Config":
    from bert_pretrain.config import load_config

    return load_config(source, settings or (), flags)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"bert-pretrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


class _Terminated(BaseException):
    """SIGTERM, raised where the program stands so that everything is closed on the way out."""


def _terminate(_signal: int, _frame: object) -> NoReturn:
    raise _Terminated


def _leave(message: str, code: int) -> NoReturn:
    sys.stdout.flush()
    rank = os.environ.get("RANK", "0")
    print(message if rank == "0" else f"[rank {rank}] {message}", file=sys.stderr)
    raise typer.Exit(code)


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, _terminate)
    code: Any = 0
    try:
        app()
    except _Terminated:  # before a command began
        code = 143
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        traceback.print_exc()
        code = 1
    distributed = sys.modules.get("bert_pretrain.train.distributed")
    if distributed is not None:
        distributed.leave(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)
