"""The command line: a command for each stage, and others for data folders and models.

The commands are in `stages.py`, `models.py` and `tuning.py`; they are registered here, and errors
become exit codes. Heavy libraries are imported only by the command that needs them, so that `--help` is instant.
"""

import io
import os
import signal
import sys
import traceback
import warnings
from typing import Annotated, Any

import typer

from bert_pretrain import __version__
from bert_pretrain.cli.exits import Terminated, flush_output, reports_errors, terminate
from bert_pretrain.cli.models import embed, evaluate, fill_mask, inspect, report
from bert_pretrain.cli.options import SuggestingCommand
from bert_pretrain.cli.stages import config, make_data, run, train, vocab
from bert_pretrain.cli.tuning import finetune, predict
from bert_pretrain.io import cores

_NAME = "bert-pretrain"

app = typer.Typer(
    name=_NAME,
    help="Pretrain a BERT: raw text to a vocabulary, to examples, to a model that opens in transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (vocab, make_data, train, run, config, inspect, evaluate, fill_mask, embed, finetune, predict, report):
    app.command(cls=SuggestingCommand)(reports_errors(_command))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"bert-pretrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    warnings.filterwarnings("ignore", message="clamping frac")  # of tqdm, where fractions are summed
    for stream in (sys.stdout, sys.stderr):  # whose encoding may lack a character of ours or of a file's name
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, terminate)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on a command can be told of it
    if "OMP_WAIT_POLICY" not in os.environ:  # a user's own value wins
        # OpenMP's threads should sleep at a barrier: next to one busy process, threads that spin made training three
        # times slower and more. But waking them takes longer than most operations of a small network, so they spin for
        # some microseconds first, as many turns as this says. OpenMP reads both when torch is loaded.
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    cores.owns_process = True
    code: Any = 0
    try:
        try:
            app(prog_name=_NAME)  # otherwise completion under `python -m` would be for that name
        finally:
            _end_at_signals()
    except (Terminated, KeyboardInterrupt) as interruption:  # before a command began, or after its end
        code = 143 if isinstance(interruption, Terminated) else 130
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        traceback.print_exc()
        code = 1
    if not flush_output():
        code = code or 1  # as for any write to a pipe without a reader
    distributed = sys.modules.get("bert_pretrain.train.distributed")
    if distributed is not None:
        distributed.shut_down(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)


def _end_at_signals() -> None:
    """Let signals end the process at once: their exceptions, in what is left to do, would be tracebacks."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
