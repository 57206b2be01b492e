"""The command line: one command a stage, and what one does with data and models.

The commands are in `stages.py`, `models.py` and `tuning.py`; here they are put in order, and a mistake becomes an exit
code. Heavy libraries are imported only by the command that needs them, so that `--help` answers at once.
"""

import os
import signal
import sys
import traceback
from typing import Annotated, Any

import typer

from bert_pretrain import __version__
from bert_pretrain.cli.exits import Terminated, reports_mistakes, terminate
from bert_pretrain.cli.models import embed, evaluate, fill_mask, inspect, report
from bert_pretrain.cli.stages import make_data, run, train, vocab
from bert_pretrain.cli.tuning import finetune

_NAME = "bert-pretrain"

app = typer.Typer(
    name=_NAME,
    help="Pretrain a BERT: raw text to a vocabulary, to examples, to a model that opens in transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (vocab, make_data, train, run, inspect, evaluate, fill_mask, embed, finetune, report):
    app.command()(reports_mistakes(_command))


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


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, terminate)
    code: Any = 0
    try:
        app(prog_name=_NAME)  # by any other name, `python -m` too, completion would be written for that
    except Terminated:  # before a command began
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
