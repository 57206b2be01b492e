"""A run whose gradients stay non-finite: it stops, with a checkpoint from which the step can be computed again.

Seed and step fix the batch and the dropout masks, so the checkpoint is all that is needed.
"""

from pathlib import Path

from bert_pretrain.errors import UserError
from bert_pretrain.train.state import TrainState

MAX_SKIPPED_IN_A_ROW = 30
"""More than a loss scale of fp16 needs to come down from its start to 1; after that, waiting does not help."""


class DivergedError(UserError):
    """A run whose gradients stay non-finite."""


def has_diverged(state: TrainState) -> bool:
    """Whether too many steps in a row were skipped; waits for the device, the same on all ranks."""
    return float(state.sums[-1]) >= MAX_SKIPPED_IN_A_ROW


def diverged(state: TrainState, checkpoint: Path) -> DivergedError:
    """Return the error that ends a run."""
    return DivergedError(
        f"the gradients of {int(state.sums[-1])} steps in a row were not finite; none of them changed the weights",
        where=f"step {state.progress.step}; the state is saved in {checkpoint}",
        remedy="lower train.peak_lr, or look for what is odd in the data; the same command would try again",
    )
