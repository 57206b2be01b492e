"""Check the inputs of a run against its configuration: data, output, initial weights and teacher.

This module does not import torch, which takes seconds, so the command reports most mistakes within a second.
"""

import importlib
from pathlib import Path

from bert_pretrain.config import Config, TrainConfig
from bert_pretrain.errors import ConfigError, DataError, needs_extra
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.io.cores import num_ranks
from bert_pretrain.io.manifest import check_output
from bert_pretrain.model.folder import check_model, check_rows, check_same_vocabulary, read_config
from bert_pretrain.model.hub import model_folder

TEACHER = "train.teacher"
# Values of `train.init`, the best first, of the networks that do not have all.
INITIAL_WEIGHTS = {"albert": ("normal",), "electra": ("positional_heads", "normal")}


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
    """Open the data and complete the section `model` of the configuration. Raise `UserError` if inputs do not fit.

    Check only names, sizes and headers. With `verify`, also check all bytes of the data.
    """
    folder = DataFolder.open(data, verify=verify)
    check_output(output, overwrite=overwrite)
    if init_from is not None:
        check_model(init_from, "--init-from", verify_hashes=False)
        config = _with_model_of(config, init_from, carry_optimizer=carry_optimizer)
    elif carry_optimizer:
        raise ConfigError(
            "there is no checkpoint to take the optimizer state from",
            where="--carry-optimizer",
            remedy="add --init-from RUN/checkpoints/step-…",
        )
    check_network(config, is_new=init_from is None)
    _check_sizes(config, folder)
    check_needs(config.train, folder.max_seq_length)
    if config.train.teacher is not None:
        teacher = model_folder(config.train.teacher, TEACHER)
        tokenizer = folder.tokenizer()
        check_same_vocabulary(teacher, tokenizer, TEACHER)
        check_rows(teacher, read_config(teacher, TEACHER)[1], tokenizer, TEACHER)
    return config, folder


def check_needs(train: TrainConfig, max_seq_length: int) -> None:
    """Check that the packages of the trackers are installed, and that the teacher can be read and has enough positions.

    Without distillation, a teacher may have fewer positions than the longest examples.
    """
    for tracker in train.trackers:
        with needs_extra(tracker, "its curves", where="train.trackers"):
            importlib.import_module(tracker)
    if train.teacher is None:
        return
    positions = read_config(model_folder(train.teacher, TEACHER), TEACHER)[0].max_position_embeddings
    if train.distillation and positions < max_seq_length:
        raise ConfigError(
            f"examples have up to {max_seq_length} tokens, but the teacher has only {positions} positions",
            where=TEACHER,
            remedy="name another teacher, or make data with a smaller data.max_seq_length",
        )


def check_network(config: Config, *, is_new: bool = True) -> None:
    """Check that the network fits the objective and, if it has no weights yet, the initial weights."""
    model, train = config.model, config.train
    if model.is_electra != (train.objective == "electra"):
        raise ConfigError(
            f"the objective is {train.objective}, but the network is {model.architecture}",
            where="train.objective",
            remedy="set both train.objective and model.architecture to electra, or neither",
        )
    if model.is_electra and train.teacher is not None:
        raise ConfigError(
            "an ELECTRA has no teacher: its objective is not that of masked tokens",
            where="train.teacher",
            remedy="remove the key, or set train.objective to mlm",
        )
    if model.is_electra and model.embedding_width > model.hidden_size:
        raise ConfigError(
            f"embedding_size {model.embedding_width} is above hidden_size {model.hidden_size}",
            where="model.embedding_size",
            remedy=f"set it to at most {model.hidden_size}",
        )
    possible = INITIAL_WEIGHTS.get(model.architecture, (train.init,))
    if is_new and train.init not in possible:
        raise ConfigError(
            f"the network is {model.architecture}, which cannot start with {train.init}",
            where="train.init",
            remedy=f"set it to {possible[0]}",
        )


def check_examples(config: Config, max_seq_length: int, next_sentence: str) -> None:
    """Check that the model has a position for each token of the longest examples, and a head for their pairs."""
    if config.model.is_modern and next_sentence != "none":
        raise ConfigError(
            f"the examples are sentence pairs ({next_sentence}), but a ModernBERT has no head for them",
            where="model.architecture",
            remedy="make the data with --set data.next_sentence=none",
        )
    positions = config.model.max_position_embeddings
    if max_seq_length > positions:
        raise ConfigError(
            f"examples have up to {max_seq_length} tokens, but the model has only {positions} positions",
            where="model.max_position_embeddings",
            remedy=f"set it to {max_seq_length} or more, or make data with a smaller data.max_seq_length",
        )


def _with_model_of(config: Config, init_from: Path, *, carry_optimizer: bool) -> Config:
    """Take the unset keys of the section `model` from a model folder, and check that the other keys agree with it.

    The model may have more positions than the folder, unless it takes the optimizer state, which lacks the new ones.
    """
    old, _ = read_config(init_from, "--init-from")
    set_keys = config.model.model_dump(exclude_unset=True)
    model = old.model_copy(update=set_keys)
    may_differ = {"hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range", "global_rope_theta"}
    if model.max_position_embeddings > old.max_position_embeddings and not carry_optimizer:
        may_differ.add("max_position_embeddings")
    for key, value in set_keys.items():
        if key not in may_differ and value != getattr(old, key):
            raise ConfigError(
                f"{key} is {value}, but the weights in {init_from} have {getattr(old, key)}",
                where=f"model.{key}",
                remedy=f"remove the key; it is then taken from {init_from}",
            )
    return config.model_copy(update={"model": model})


def _check_sizes(config: Config, folder: DataFolder) -> None:
    """Check the data against the positions of the model and the global batch against the number of processes."""
    batch, ranks = config.train.global_batch_size, num_ranks()
    check_examples(config, folder.max_seq_length, folder.config.next_sentence)
    if not folder.rows("train"):
        raise DataError("the data has no training examples", where=str(folder.path), remedy="make it from more text")
    if batch < ranks:
        raise ConfigError(
            f"a global batch of {batch} examples cannot be shared by {ranks} processes",
            where="train.global_batch_size",
            remedy=f"set it to {ranks} or more, or start fewer processes",
        )
