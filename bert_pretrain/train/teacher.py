"""The model folder that `train.teacher` names: checked before the run begins, and read."""

from dataclasses import dataclass
from pathlib import Path

import torch

from bert_pretrain.config import ModelConfig, TrainConfig
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.folder import check_model, read_config, weights_sha256
from bert_pretrain.model.hub import model_folder
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.model.vocabulary import check_rows, check_same_vocabulary
from bert_pretrain.text.tokenizer import Tokenizer

KEY = "train.teacher"
NEEDED = ("bert.embeddings", "bert.encoder", "cls.predictions")


@dataclass(frozen=True)
class TeacherFolder:
    """A teacher on disk that fits the data."""

    folder: Path
    weights_sha256: str
    model: ModelConfig

    def read(self, attention: str, device: torch.device, dtype: torch.dtype) -> BertForPreTraining:
        """Return the teacher with its weights on a device.

        Args:
            attention: the setting.
            device: that the student is on.
            dtype: of the matrix products.

        Raises:
            UserError: when weights are missing or broken.
        """
        return load_model(self.folder, attention=attention, device=device, dtype=dtype, required=NEEDED, flag=KEY).model


def open_teacher(train: TrainConfig, data: DataFolder, tokenizer: Tokenizer) -> TeacherFolder | None:
    """Open what `train.teacher` names; None where there is no teacher.

    Raises:
        UserError: when it holds no BERT, or one of another vocabulary or with too few positions, or FSDP is asked for.
    """
    if train.teacher is None:
        return None
    if train.parallel == "fsdp":
        raise ConfigError(
            "a student with a teacher is not sharded",
            where="train.parallel",
            remedy="set it to ddp: each process then holds student and teacher",
        )
    folder = model_folder(train.teacher, KEY)
    check_model(folder, KEY)
    model, vocab_size = read_config(folder, KEY)
    check_same_vocabulary(folder, tokenizer, KEY)
    check_rows(folder, vocab_size, tokenizer, KEY)
    if model.max_position_embeddings < data.max_seq_length:
        raise ConfigError(
            f"the teacher has {model.max_position_embeddings} positions, the data up to {data.max_seq_length} tokens",
            where=f"{KEY} {folder}",
            remedy="make data with a smaller data.max_seq_length, or take another teacher",
        )
    return TeacherFolder(folder, weights_sha256(folder, KEY), model)
