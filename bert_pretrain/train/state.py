"""The state of a run, whole: what a checkpoint saves and a resumed run continues from."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.batches import GlobalBatch
from bert_pretrain.train.flops import batch_flops
from bert_pretrain.train.optimizer import Optimizers
from bert_pretrain.train.step import LossScale


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    first_step: int = 0
    """Where this data begins: 0, or the step that was carried over from another run."""
    examples: int = 0
    tokens: int = 0
    elapsed_seconds: float = 0.0
    """In training steps, without evaluations and checkpoints."""


@dataclass
class IntervalCounts:
    """What the host knows of the steps since the last log line."""

    steps: int = 0
    examples: int = 0
    tokens: int = 0
    attended_slots: int = 0
    """Places that attention computed; equal to `tokens` where it does not pad."""
    flops: float = 0.0
    seconds: float = 0.0
    waited_seconds: float = 0.0


@dataclass(frozen=True)
class StepSums:
    """Sums over the steps since the last log line, as they lie in one tensor on the device."""

    mlm_loss: float
    nsp_loss: float
    mlm_correct: float
    nsp_correct: float
    predictions: float
    pairs: float
    skipped: float
    loss: float
    grad_norm: float

    @staticmethod
    def zeros(device: torch.device) -> Tensor:
        """Return the empty sums, (9,) float64: exact for counts, and the same in every order of reading."""
        return torch.zeros(len(fields(StepSums)), dtype=torch.float64, device=device)

    @staticmethod
    def read(sums: Tensor) -> "StepSums":
        """Read the sums, which waits for the device."""
        return StepSums(*sums.tolist())


@dataclass
class TrainState:
    """Everything that changes while a run goes on."""

    model: BertForPreTraining
    optimizers: Optimizers
    loss_scale: LossScale | None
    """None unless the precision is fp16."""
    sums: Tensor  # (9,) float64: `StepSums` since the last log line
    progress: Progress
    interval: IntervalCounts

    @staticmethod
    def start(model: BertForPreTraining, optimizers: Optimizers, loss_scale: LossScale | None) -> "TrainState":
        """Return the state of a run before its first step."""
        device = next(model.parameters()).device
        return TrainState(model, optimizers, loss_scale, StepSums.zeros(device), Progress(), IntervalCounts())

    def count(self, batch: GlobalBatch, waited_seconds: float) -> None:
        """Note a step that has been computed."""
        self.progress.step += 1
        self.progress.examples += batch.num_sequences
        self.progress.tokens += batch.num_tokens
        interval, model = self.interval, self.model
        interval.steps += 1
        interval.examples += batch.num_sequences
        interval.tokens += batch.num_tokens
        pads = model.attention_backend == "padded"
        interval.attended_slots += sum(
            micro.num_sequences * micro.max_seqlen if pads else micro.num_tokens for micro in batch.micro_batches
        )
        interval.flops += batch_flops(batch, model.config, model.vocab_size)
        interval.waited_seconds += waited_seconds

    def count_seconds(self, seconds: float) -> None:
        """Note time spent in training steps."""
        self.progress.elapsed_seconds += seconds
        self.interval.seconds += seconds

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors but the weights, on the CPU, by names that do not depend on the order of parameters."""
        tensors = {"interval/sums": self.sums}
        for name, parameter in self.model.named_parameters():
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"optimizer/{name}/{key}"] = value
        if self.loss_scale is not None:
            tensors["loss_scale/scale"] = self.loss_scale.scale
            tensors["loss_scale/good_steps"] = self.loss_scale.good_steps
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `tensors` gave."""
        self.load_optimizer(tensors)
        self.sums.copy_(tensors["interval/sums"])
        if self.loss_scale is not None:
            self.loss_scale.scale.copy_(tensors["loss_scale/scale"])
            self.loss_scale.good_steps.copy_(tensors["loss_scale/good_steps"])

    def load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        """Take back the optimizers' state alone."""
        parameters = dict(self.model.named_parameters())
        owners = {
            parameter: optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for optimizer in self.optimizers:
            optimizer.state.clear()
        for full_name, tensor in tensors.items():
            kind, _, rest = full_name.partition("/")
            if kind == "optimizer":
                name, _, key = rest.rpartition("/")
                parameter = parameters[name]
                # A copy: what safetensors returns may lie in the mapped file, which goes away with the checkpoint.
                owners[parameter].state[parameter][key] = tensor.to(parameter.device, copy=True)
