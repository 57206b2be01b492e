"""Progress bars with rate and time left, on standard error; in a log, where nobody watches, a line now and then."""

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(**options: Any) -> Any:
    """Return a tqdm bar with the given options; in a log it is drawn every ten seconds at most."""
    return tqdm(dynamic_ncols=True, mininterval=0.2 if sys.stderr.isatty() else 10.0, **options)
