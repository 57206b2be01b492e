"""Progress bars with rate and remaining time, on standard error; in a log file, a line every ten seconds."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress_bar(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """Return a tqdm bar with the given options, perhaps over items."""
    return tqdm(items, dynamic_ncols=True, mininterval=0.2 if sys.stderr.isatty() else 10.0, **options)
