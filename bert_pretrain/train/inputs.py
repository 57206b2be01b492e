"""What a run is given, checked without torch: data, output, first weights and teacher, against the configuration.

The command checks it before torch is imported, which takes seconds, so that most mistakes are reported within one.
"""

import importlib
import os
from pathlib import Path

from bert_pretrain.config import Config, TrainConfig
from bert_pretrain.errors import ConfigError, DataError, needs_extra
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.io.manifest import check_output
from bert_pretrain.model.folder import check_model, read_config

TEACHER = "train.teacher"
_FREE_OF_MODEL = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
"""Keys that may differ from those of an initial checkpoint: without dropout the network computes the same."""


def check_inputs(
    config: Config,
    data: Path,
    output: Path,
    *,
    init_from: Path | None = None,
    carry_optimizer: bool = False,
    overwrite: bool = False,
    verify: bool = False,
) -> tuple[Config, DataFolder]:
    """Return the data, and the configuration with all of its section `model`.

    What does not fit is refused, as far as names, sizes and headers tell, or with `verify` all bytes of the data.
    """
    folder = DataFolder.open(data, verify=verify)
    check_output(output, overwrite=overwrite)
    if init_from is not None:
        check_model(init_from, "--init-from", verify_hashes=False)
        config = _with_model_of(config, init_from, carry_optimizer=carry_optimizer)
    elif carry_optimizer:
        raise ConfigError(
            "there is no optimizer state to carry over",
            where="--carry-optimizer",
            remedy="add --init-from RUN/checkpoints/step-…",
        )
    _check_sizes(config, folder)
    check_needs(config.train)
    return config, folder


def check_needs(train: TrainConfig) -> None:
    """Check what a training needs besides its data: packages of trackers, and a teacher."""
    for tracker in train.trackers:
        with needs_extra(tracker, "its curves", where="train.trackers"):
            importlib.import_module(tracker)
    if train.teacher is not None and Path(train.teacher).exists():  # else it is looked for on the Hub
        read_config(Path(train.teacher), TEACHER)


def _with_model_of(config: Config, init_from: Path, *, carry_optimizer: bool) -> Config:
    """Take from a model folder what the section `model` leaves open.

    There may be more positions than in the folder, unless the optimizer's state, which lacks them, is carried over.
    """
    found, _ = read_config(init_from, "--init-from")
    given = config.model.model_dump(exclude_unset=True)
    model = found.model_copy(update=given)
    has_more_positions = model.max_position_embeddings > found.max_position_embeddings
    for key, value in given.items():
        may_differ = key == "max_position_embeddings" and has_more_positions and not carry_optimizer
        if key not in _FREE_OF_MODEL and value != getattr(found, key) and not may_differ:
            raise ConfigError(
                f"{key} is {value}, that of the weights in {init_from} is {getattr(found, key)}",
                where=f"model.{key}",
                remedy="leave the key out; what the section model does not give is taken from that folder",
            )
    return config.model_copy(update={"model": model})


def _check_sizes(config: Config, folder: DataFolder) -> None:
    """Refuse data that does not fit the model, the ranks or itself."""
    batch, num_ranks = config.train.global_batch_size, int(os.environ.get("WORLD_SIZE", "1"))
    if folder.max_seq_length > config.model.max_position_embeddings:
        raise ConfigError(
            f"the data holds examples of up to {folder.max_seq_length} tokens, "
            f"the model has {config.model.max_position_embeddings} positions",
            where="model.max_position_embeddings",
            remedy=f"set it to {folder.max_seq_length} or more, or make data with a smaller data.max_seq_length",
        )
    if not folder.rows("train"):
        raise DataError("the data has no training examples", where=str(folder.path), remedy="make it from more text")
    if batch < num_ranks:
        raise ConfigError(
            f"a global batch of {batch} examples cannot be shared by {num_ranks} processes",
            where="train.global_batch_size",
            remedy=f"set it to {num_ranks} or more, or start fewer processes",
        )
