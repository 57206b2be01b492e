"""The model folder that `train.teacher` names: checked before the run begins, and read."""

from dataclasses import dataclass
from pathlib import Path

import torch

from bert_pretrain.config import ModelConfig, TrainConfig
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.folder import check_model, weights_sha256
from bert_pretrain.model.hub import model_folder
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.model.vocabulary import check_rows, check_same_vocabulary
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.inputs import TEACHER, check_teacher

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
        return load_model(
            self.folder, attention=attention, device=device, dtype=dtype, required=NEEDED, flag=TEACHER
        ).model


def open_teacher(train: TrainConfig, data: DataFolder, tokenizer: Tokenizer) -> TeacherFolder | None:
    """Open what `train.teacher` names; None where there is no teacher.

    Raises:
        UserError: when it holds no BERT, or one of another vocabulary or with too few positions.
    """
    if train.teacher is None:
        return None
    folder = model_folder(train.teacher, TEACHER)
    check_model(folder, TEACHER)
    model, vocab_size = check_teacher(train, data, folder)
    check_same_vocabulary(folder, tokenizer, TEACHER)
    check_rows(folder, vocab_size, tokenizer, TEACHER)
    return TeacherFolder(folder, weights_sha256(folder, TEACHER), model)
