"""Losses of twenty CPU steps, as stored: a change that is not meant to change the computation leaves them as they are.

Meant it to? `REGENERATE_GOLDEN=1 python -m pytest tests/train/test_golden.py` writes them anew; say why in the commit.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.conftest import NO_DROPOUT, Fit, metrics

GOLDEN = Path(__file__).parents[1] / "golden" / "losses_of_20_cpu_steps.json"
NAMES = ("mlm_loss", "nsp_loss", "grad_norm", "learning_rate")


def test_twenty_steps_have_the_stored_losses(fit: Fit) -> None:
    # Without dropout, whose masks are not the same on every kind of CPU.
    run = fit(model=NO_DROPOUT, max_steps=20, log_every=1, peak_lr=5e-3)
    found: dict[str, Any] = {name: [line[name] for line in metrics(run, name)] for name in NAMES}
    found["torch"] = ".".join(torch.__version__.split(".")[:2])
    if os.environ.get("REGENERATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    stored = json.loads(GOLDEN.read_text())
    if found["torch"] != stored["torch"]:
        # torch 2.11 draws other first weights from the same seed than 2.13.
        pytest.skip(f"the stored losses are those of torch {stored['torch']}")
    for name in NAMES:
        assert found[name] == pytest.approx(stored[name], abs=1e-4), name
