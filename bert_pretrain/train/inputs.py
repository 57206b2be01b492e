"""What a run is given, checked without torch: data, output, first weights and teacher, against the configuration.

The command checks it before torch is imported, which takes seconds, so that most mistakes are told within one.
"""

import os
from pathlib import Path

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.model.folder import read_config
from bert_pretrain.parallel.cores import is_first_rank
from bert_pretrain.storage.manifest import check_output

TEACHER = "train.teacher"


def check_inputs(
    config: Config,
    data: Path,
    output: Path,
    *,
    init_from: Path | None = None,
    carry_optimizer: bool = False,
    overwrite: bool = False,
    verify: bool = False,
) -> None:
    """Refuse what `train` would refuse, as far as names, sizes and headers tell, or with `verify` all bytes."""
    folder = DataFolder.open(data, verify=verify and is_first_rank())
    check_output(output, overwrite=overwrite)
    if init_from is not None:
        config = with_model_of(config, init_from)
    elif carry_optimizer:
        raise no_optimizer_to_carry()
    check_sizes(config, folder, int(os.environ.get("WORLD_SIZE", "1")))
    teacher = config.train.teacher
    if teacher is not None and Path(teacher).exists():  # else it is looked for on the Hub
        read_config(Path(teacher), TEACHER)


# What an initial checkpoint need not share with the run: the network computes the same without dropout.
_FREE_OF_MODEL = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")


def with_model_of(config: Config, init_from: Path) -> Config:
    """Take from a model folder what the section `model` leaves open."""
    found, _ = read_config(init_from, "--init-from")
    given = config.model.model_dump(exclude_unset=True)
    for key, value in given.items():
        more_positions = key == "max_position_embeddings" and value > found.max_position_embeddings
        if key not in _FREE_OF_MODEL and value != getattr(found, key) and not more_positions:
            raise ConfigError(
                f"{key} is {value}, that of the weights in {init_from} is {getattr(found, key)}",
                where=f"model.{key}",
                remedy="leave the key out; what the section model does not give is taken from that folder",
            )
    return config.model_copy(update={"model": found.model_copy(update=given)})


def check_sizes(config: Config, folder: DataFolder, num_ranks: int) -> None:
    """Refuse data that does not fit the model, the ranks or itself."""
    if folder.max_seq_length > config.model.max_position_embeddings:
        raise ConfigError(
            f"the data holds examples of up to {folder.max_seq_length} tokens, "
            f"the model has {config.model.max_position_embeddings} positions",
            where="model.max_position_embeddings",
            remedy=f"set it to {folder.max_seq_length} or more, or make data with a smaller data.max_seq_length",
        )
    if not folder.rows("train"):
        raise DataError("the data has no training examples", where=str(folder.path), remedy="make it from more text")
    if config.train.global_batch_size < num_ranks:
        raise ConfigError(
            f"a global batch of {config.train.global_batch_size} examples cannot be shared by {num_ranks} processes",
            where="train.global_batch_size",
            remedy=f"set it to {num_ranks} or more, or start fewer processes",
        )


def no_optimizer_to_carry() -> ConfigError:
    """Return the refusal of --carry-optimizer alone."""
    return ConfigError(
        "there is no optimizer state to carry over",
        where="--carry-optimizer",
        remedy="add --init-from RUN/checkpoints/step-…",
    )
