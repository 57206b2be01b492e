"""What a machine can do: how long a step of training takes, by network and batch. Facts are read from JSON files, too.

Facts of some machines are shipped (`machines/`); `timing.py` measures those of this one.
"""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from bert_pretrain.config import ModelConfig
from bert_pretrain.errors import ConfigError
from bert_pretrain.train.flops import training_flops

MASKED_SHARE = 0.3  # of the tokens, in timed steps and in plans
SHIPPED = Path(__file__).with_name("machines")
BYTES_PER_WEIGHT = 24  # in training: weights, gradients, moments, and casts of them
_Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
_NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Size(NamedTuple):
    """Layers and width of a network; heads are 64 wide, the feed-forward layer four times as wide as the rest."""

    layers: int
    hidden: int

    @property
    def weights(self) -> int:
        """Weights of the matrices inside the encoder."""
        return 12 * self.layers * self.hidden**2

    def model_config(self, length: int) -> ModelConfig:
        """Return the network of this size, without dropout."""
        return ModelConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 64),
            intermediate_size=4 * self.hidden,
            max_position_embeddings=length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )

    def flops_per_token(self, vocab_size: int, length: int) -> float:
        """Return the floating-point operations of a token of training, forward and backward."""
        return training_flops(self.model_config(length), vocab_size, 1.0, length, MASKED_SHARE)


SIZES = tuple(
    Size(layers, hidden) for layers, hidden in ((2, 128), (2, 256), (4, 256), (4, 512), (8, 512), (12, 768), (24, 1024))
)
"""BERT-Tiny to BERT-Large, and one size between the smallest two of Turc et al. (2019)."""


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Speed(_Facts):
    """How fast a network of some size is trained."""

    layers: PositiveInt
    hidden: Annotated[int, Field(gt=0, multiple_of=64)]
    flops_per_second: _Positive  # forward and backward, with large batches
    update_seconds: _NonNegative  # of the optimizers, per step
    launch_seconds: _NonNegative = 0.0  # shortest possible step: the host launches kernels one by one; about 0 on a CPU
    is_timed: bool = True  # False: extrapolated

    @property
    def size(self) -> Size:
        return Size(self.layers, self.hidden)

    def seconds(self, flops: float) -> float:
        """Return the time of a step of so many floating-point operations."""
        return max(self.launch_seconds, flops / self.flops_per_second + self.update_seconds)


class MachineFacts(_Facts):
    """How fast a machine trains, as a JSON file says it."""

    version: Literal[1] = 1
    name: str = "this machine"
    source: str = "measured"
    device: Literal["cpu", "cuda", "mps"] = "cpu"
    cores: PositiveInt  # of the host, for vocabulary and data
    memory_bytes: PositiveInt  # of the device
    speeds: Annotated[tuple[Speed, ...], Field(min_length=1)]

    def speed(self, size: Size) -> Speed:
        """Return the speed of a network."""
        return next(speed for speed in self.speeds if speed.size == size)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Networks that fit into memory, the smallest first."""
        fitting = [one.size for one in self.speeds if BYTES_PER_WEIGHT * one.size.weights < self.memory_bytes]
        return tuple(sorted(fitting or [self.speeds[0].size], key=lambda size: size.weights))

    def tokens_per_second(self, size: Size, vocab_size: int, length: int, batch_tokens: int) -> float:
        """Return the speed of training in batches of so many tokens, without evaluations and checkpoints."""
        flops = batch_tokens * size.flops_per_token(vocab_size, length)
        return batch_tokens / self.speed(size).seconds(flops)


def read_machine(name_or_file: str) -> MachineFacts:
    """Return the facts of a shipped machine, or of a JSON file."""
    path = SHIPPED / f"{name_or_file}.json"
    if not path.is_file():
        path = Path(name_or_file)
    try:
        return MachineFacts.model_validate_json(path.read_bytes())
    except OSError:
        known = ", ".join(sorted(shipped.stem for shipped in SHIPPED.glob("*.json")))
        what, remedy = f"there is no machine '{name_or_file}'", f"choose {known}, or a machine.json of 'run auto'"
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{path} is not a file of machine facts: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        remedy = "write it by 'run auto', which keeps OUTPUT/machine.json"
    raise ConfigError(what, where="--machine", remedy=remedy)
