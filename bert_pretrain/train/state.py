"""The complete state of a run: saved in a checkpoint, and restored on resume."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.flops import batch_flops
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.optimizers import Optimizers
from bert_pretrain.train.packing import GlobalBatch

LOSS_SCALE_GROWTH_STEPS = 2000


@dataclass
class Progress:
    """Counts and times of a run. `--carry-optimizer` carries over the counts of another run, but not its times."""

    step: int = 0
    examples: int = 0
    examples_before: int = 0  # examples of other data, seen before --carry-optimizer
    tokens: int = 0
    elapsed_seconds: float = 0.0  # in training steps, without evaluations and checkpoints
    wall_seconds: float = 0.0  # since the making of the initial weights; a time budget limits this
    warmup_start: float = 0.0  # `wall_seconds` after the first evaluation and the slow steps at the start
    longest_seconds: dict[str, float] = field(default_factory=dict)  # by activity; a time budget reserves their sum


@dataclass
class IntervalCounts:
    """Counts kept on the host since the last log line.

    `timed_` fields and `waited_seconds` exclude the slow steps after a start, see `loop.Loop`.
    """

    steps: int = 0
    own_tokens: int = 0  # on this rank
    attended_slots: int = 0  # positions that attention computes on this rank: `own_tokens`, dummies and padding
    timed_examples: int = 0
    timed_tokens: int = 0
    timed_flops: float = 0.0
    timed_seconds: float = 0.0
    waited_seconds: float = 0.0


class LossScale(NamedTuple):
    """Dynamic loss scaling for fp16, with the constants of `torch.amp.GradScaler` (Micikevicius et al., 2018)."""

    scale: Tensor  # () float32
    good_steps: Tensor  # () int32, steps without an overflow since the scale last changed

    @staticmethod
    def start(device: torch.device) -> "LossScale":
        return LossScale(torch.tensor(2.0**16, device=device), torch.tensor(0, dtype=torch.int32, device=device))

    def update(self, overflowed: Tensor) -> None:
        """Halve the scale after an overflow. Double it after `LOSS_SCALE_GROWTH_STEPS` steps without an overflow."""
        good_steps = torch.where(overflowed, 0, self.good_steps + 1)
        grows = good_steps >= LOSS_SCALE_GROWTH_STEPS
        growth = torch.where(grows, 2.0, 1.0)
        self.scale.mul_(torch.where(overflowed, 0.5, growth))
        self.good_steps.copy_(torch.where(grows, 0, good_steps))


class StepSums(NamedTuple):
    """Metrics of one step, or their sums since the last log line.

    On the device they are one float64 tensor, (extras + 10,). It begins with the extras, if there are any.
    """

    mlm_loss: float
    nsp_loss: float
    mlm_correct: float
    nsp_correct: float
    predictions: float
    pairs: float
    skipped: float
    loss: float
    grad_norm: float
    skipped_in_a_row: float  # up to now; a log line does not reset it
    extras: Sequence[float] = ()  # the number of tokens and the extra sums of a loss that has some

    @staticmethod
    def read(sums: Tensor) -> "StepSums":
        """Copy the sums to the host. Wait for the device."""
        values = sums.tolist()
        return StepSums(*values[-10:])._replace(extras=values[:-10])


@dataclass
class TrainState:
    """Everything that changes during a run."""

    model: BertForPreTraining
    network: nn.Module  # the model with its losses, wrapped by `distributed.parallelize`
    optimizers: Optimizers
    loss_scale: LossScale | None  # None unless the precision is fp16
    progress: Progress = field(default_factory=Progress)
    interval: IntervalCounts = field(default_factory=IntervalCounts)

    def __post_init__(self) -> None:
        extras = self.losses.extras
        size = 10 + (1 + len(extras) if extras else 0)
        # (extras + 10,): `StepSums` since the last log line, in float64, so that counts are exact
        self.sums = torch.zeros(size, dtype=torch.float64, device=next(self.model.parameters()).device)

    @property
    def losses(self) -> PretrainingLoss:
        """The model with its losses, without the DDP wrapper."""
        return cast(PretrainingLoss, getattr(self.network, "module", self.network))

    def count(self, batch: GlobalBatch) -> None:
        """Count a finished step."""
        self.progress.step += 1
        self.progress.examples += batch.num_sequences
        self.progress.tokens += batch.num_tokens
        self.interval.steps += 1
        for micro in batch.micro_batches:
            self.interval.own_tokens += micro.num_tokens
            if self.model.attention_backend == "padded":
                num_sequences = len(micro.cu_seqlens) - 1
                self.interval.attended_slots += num_sequences * micro.max_seqlen
            else:
                self.interval.attended_slots += len(micro.input_ids)

    def count_time(
        self,
        batch: GlobalBatch,
        seconds: float,
        waited_seconds: float,
    ) -> None:
        """Count the time of a step for the rates of the interval."""
        self.interval.timed_examples += batch.num_sequences
        self.interval.timed_tokens += batch.num_tokens
        num_outputs = batch.num_outputs(self.model.vocab_size)
        self.interval.timed_flops += batch_flops(batch, self.model.config, num_outputs)
        self.interval.timed_seconds += seconds
        self.interval.waited_seconds += waited_seconds

    def start_interval(self) -> None:
        self.sums[:-1].zero_()  # keep the last one, `skipped_in_a_row`
        self.interval = IntervalCounts()

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors except the weights, on their device, under names independent of parameter order."""
        tensors = {"interval/sums": self.sums}
        for name, parameter in self.model.named_parameters():
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"optimizer/{name}/{key}"] = value
        if self.loss_scale is not None:
            tensors |= {f"loss_scale/{name}": tensor for name, tensor in self.loss_scale._asdict().items()}
        return tensors

    def load_tensors(self, tensors: dict[str, Tensor], *, only_optimizers: bool = False) -> None:
        """Load saved `tensors()`, or only those of the optimizers, whose earlier state is dropped."""
        owners: dict[Tensor, torch.optim.Optimizer] = {}
        for optimizer in self.optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                owners |= dict.fromkeys(group["params"], optimizer)
        others = {} if only_optimizers else self.tensors()
        for full_name, tensor in tensors.items():
            if full_name.startswith("optimizer/"):
                name, _, key = full_name.removeprefix("optimizer/").rpartition("/")
                parameter = self.model.get_parameter(name)
                # Copy: safetensors may return a view of the mapped file, which may be deleted with its checkpoint.
                owners[parameter].state[parameter][key] = tensor.to(parameter.device, copy=True)
            elif full_name in others:
                others[full_name].copy_(tensor)
