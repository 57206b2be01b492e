"""A process with the pretended device: it imports everything once, and forks a child for each call of a function."""

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.cuda import memory, traces  # noqa: F401  # imported once, before any fork
from tests.cuda.pretended import pretended_cuda

SECONDS = 600
"""After which a child is taken to hang."""


def serve() -> None:
    """Answer each request, a line of JSON on standard input, with a line: the status its child ended with."""
    with pretended_cuda():  # imports the compiler
        pass
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_run(request))
        _, status = os.waitpid(child, 0)
        print(status, flush=True)


def _run(request: dict[str, Any]) -> int:
    """Call the function and write what it returns, or what went wrong, to files."""
    signal.alarm(SECONDS)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        module, _, function = request["what"].partition(".")
        found = getattr(importlib.import_module(f"tests.cuda.{module}"), function)(*request["arguments"])
        Path(request["result"]).write_text(json.dumps(found))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0
