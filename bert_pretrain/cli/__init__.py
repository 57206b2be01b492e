"""Command-line interface: register the commands and turn their errors into exit codes.

Each command imports heavy libraries itself, so that `--help` is instant.
"""

import io
import os
import signal
import sys
import traceback
import warnings
from typing import Annotated

import typer

from bert_pretrain import __version__
from bert_pretrain.cli.exits import Terminated, flush_output, reports_errors, terminate
from bert_pretrain.cli.models import embed, evaluate, fill_mask, inspect, report
from bert_pretrain.cli.options import PanelCommand, option
from bert_pretrain.cli.stages import config, make_data, run, train, vocab
from bert_pretrain.cli.tuning import finetune, predict
from bert_pretrain.io import cores
from bert_pretrain.io.cores import num_ranks

app = typer.Typer(
    name="bert-pretrain",
    help="Pretrain a BERT: raw text to a vocabulary, to examples, to a model that opens in transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (vocab, make_data, train, run, config, inspect, evaluate, fill_mask, embed, finetune, predict, report):
    app.command(cls=PanelCommand)(reports_errors(_command))


def _print_version(requested: bool) -> None:
    if requested:
        print(f"bert-pretrain {__version__}")
        raise typer.Exit


_HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate, signal.SIGHUP: terminate}
_VERSION = option(
    "Show the version and exit.",
    None,
    "--version",
    callback=_print_version,
    is_eager=True,
)


@app.callback()
def _options(version: Annotated[bool, _VERSION] = False) -> None:
    pass


def main() -> None:
    """Run the command line and exit with its code. A bug in a single process is raised."""
    _prepare_process()
    code = 0
    try:
        try:
            app(prog_name=app.info.name)  # shell completion needs this name under `python -m`
        finally:
            _restore_default_signals()
    except KeyboardInterrupt:  # outside a command, which handles its own
        code = 130
    except Terminated as interruption:
        code = 128 + interruption.args[0]
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        if num_ranks() == 1 and not _is_compiling():
            raise  # a rank must continue to `shut_down`
        traceback.print_exc()
        code = 1
    if not flush_output():
        code = code or 1
    distributed = sys.modules.get("bert_pretrain.train.distributed")
    if distributed is not None:
        distributed.shut_down(code)
    if _is_compiling():
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _prepare_process() -> None:
    """Set the warnings, streams, signals and libraries of a process that runs only this program."""
    warnings.filterwarnings("ignore", message="clamping frac")  # tqdm warns when a sum of fractions exceeds 1
    for stream in (sys.stdout, sys.stderr):  # the encoding may lack characters of messages and file names
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # its default is to kill; training handles it later
    for stop, handler in _HANDLERS.items():
        # `nohup` ignores SIGHUP, and a shell ignores SIGINT in the background. torchrun ends its ranks nevertheless.
        if signal.getsignal(stop) is not signal.SIG_IGN or "TORCHELASTIC_RUN_ID" in os.environ:
            signal.signal(stop, handler)
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP threads that spin at a barrier make training several times slower next to another busy process.
        # Waking a sleeping thread takes longer than most operations of a small network, so threads spin briefly first.
        # OpenMP reads both variables when torch is loaded.
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # A notebook sets its own backend for the commands of its cells. Pictures in files need none.
    os.environ.pop("MPLBACKEND", None)
    cores.owns_process = True  # allows our commands to configure the allocator and the compiler


def _restore_default_signals() -> None:
    """Let signals end the process directly: as exceptions during the shutdown they would print tracebacks."""
    for number in _HANDLERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _is_compiling() -> bool:
    """Return whether a thread compiles in native code. The interpreter might crash if it ended now."""
    pipeline = sys.modules.get("bert_pretrain.pipeline")
    return pipeline is not None and pipeline.BackgroundCompiler.is_compiling()
