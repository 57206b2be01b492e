"""The complete state of a run: saved in a checkpoint, and restored on resume."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.flops import batch_flops
from bert_pretrain.train.optimizers import Optimizers
from bert_pretrain.train.packing import GlobalBatch
from bert_pretrain.train.step import LossScale, StepSums


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

    `timed_` fields and `waited_seconds` exclude the slow steps after a start, see `loop.fit`.
    """

    steps: int = 0
    own_tokens: int = 0  # on this rank
    attended_slots: int = 0  # positions that attention computes on this rank: `own_tokens`, dummies and padding
    timed_examples: int = 0
    timed_tokens: int = 0
    timed_flops: float = 0.0
    timed_seconds: float = 0.0
    waited_seconds: float = 0.0


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
        self.sums = StepSums.zeros(next(self.model.parameters()).device)  # (10,): `StepSums` since the last log line

    @property
    def losses(self) -> nn.Module:
        """The model with its losses, without the DDP wrapper."""
        if isinstance(self.network, nn.parallel.DistributedDataParallel):
            return self.network.module
        return self.network

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

    def count_time(self, batch: GlobalBatch, seconds: float, waited_seconds: float) -> None:
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
            tensors |= {f"loss_scale/{name}": tensor for name, tensor in self.loss_scale.tensors().items()}
        return tensors

    def load_tensors(self, tensors: dict[str, Tensor], *, only_optimizers: bool = False) -> None:
        """Load saved `tensors()`, or only those of the optimizers, whose earlier state is dropped."""
        owners: dict[Tensor, torch.optim.Optimizer] = {}
        for optimizer in self.optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                owners |= dict.fromkeys(group["params"], optimizer)
        for full_name, tensor in tensors.items():
            kind, _, rest = full_name.partition("/")
            name, _, key = rest.rpartition("/")
            if kind == "optimizer":
                parameter = self.model.get_parameter(name)
                # Copy: safetensors may return a view of the mapped file, which may be deleted with its checkpoint.
                owners[parameter].state[parameter][key] = tensor.to(parameter.device, copy=True)
            elif only_optimizers:
                continue
            elif kind == "interval":
                self.sums.copy_(tensor)
            elif self.loss_scale is not None:
                self.loss_scale.tensors()[key].copy_(tensor)
