"""Training of sentence vectors by `sentence-transformers`: a BERT, the mean of its outputs, and a loss on cosines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerModelCardData,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MultipleNegativesRankingLoss

from bert_pretrain.errors import DataError
from bert_pretrain.finetune.similarity import Comparison, Similarity
from bert_pretrain.finetune.task import Job
from bert_pretrain.finetune.training import diverged, training_arguments, with_callbacks
from bert_pretrain.model.folder import read_config
from bert_pretrain.train.device.hardware import Precision

DROPOUT = 0.1
"""The best rate that Gao et al. (2021) tried, section 3; without dropout there is nothing to learn from texts alone."""
SCALE = 20.0
"""Of cosines before the softmax: a temperature of 0.05, that of Gao et al. (2021)."""


class SentenceLearner:
    """The `Learner` of `similarity`."""

    def __init__(self, job: Job, task: Similarity) -> None:
        self.job = job
        self.task = task
        self.model: SentenceTransformer | None = None

    def make_trainer(self, folder: Path, precision: Precision) -> Any:
        job, task = self.job, self.task
        transformers.set_seed(job.settings.seed)  # of a pooler that the folder may lack
        self.model = _open(job.model, job.device, _dropout(job, task))
        self.model.max_seq_length = job.settings.max_length
        train = job.examples["train"]
        columns = {"anchor": [row.text for row in train], "positive": [row.pair or row.text for row in train]}
        if task.kind == "scores":
            columns["score"] = [row.label for row in train]
        # Among other pairs, the same text would be a negative of itself.
        sampler = {"batch_sampler": "no_duplicates"} if task.kind == "pairs" else {}
        trainer = SentenceTransformerTrainer(
            model=self.model,
            args=training_arguments(
                SentenceTransformerTrainingArguments, job, folder, len(train), precision, **sampler
            ),
            train_dataset=Dataset.from_dict(columns),
            loss=(CoSENTLoss if task.kind == "scores" else MultipleNegativesRankingLoss)(self.model, scale=SCALE),
            evaluator=_Evaluator(self._validate) if task.main_metric else None,
        )
        return with_callbacks(trainer)

    def save(self, folder: Path) -> None:
        assert self.model is not None
        assert self.job.settings.max_length is not None
        self.model.save_pretrained(str(folder), create_model_card=False)
        self.job.tokenizer.save(folder, self.job.settings.max_length)

    def predict(self, folder: Path) -> dict[str, list[Any]]:
        model = _open(folder, self.job.device, {})
        return {split: self._compare(model, split) for split in self.job.examples if split != "train"}

    def is_scored(self, split: str) -> bool:
        return self.task.is_scored(self.job.examples[split])

    def _validate(self, model: SentenceTransformer) -> dict[str, float]:
        return self.task.score(self.job.examples["validation"], self._compare(model, "validation"))

    def _compare(self, model: SentenceTransformer, split: str) -> list[Comparison]:
        """Return the comparisons of a split; raises `ConfigError` when vectors are not finite."""
        examples = self.job.examples[split]
        texts = list(dict.fromkeys(text for example in examples for text in (example.text, example.pair)))
        found = model.encode(
            texts, batch_size=self.job.settings.batch_size, show_progress_bar=False, normalize_embeddings=True
        )
        if not np.isfinite(found).all():
            raise diverged()
        return self.task.compare(examples, dict(zip(texts, found, strict=True)))


class _Evaluator(BaseEvaluator):
    """The library's form of a function that scores a model."""

    def __init__(self, score: Callable[[SentenceTransformer], dict[str, float]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.score = score

    def __call__(self, model: Any, *_: Any, **__: Any) -> dict[str, float]:
        return self.score(model)


def _dropout(job: Job, task: Similarity) -> dict[str, float]:
    """Return the keys of `config.json` to change."""
    rate = job.settings.dropout
    if rate is None and task.kind == "texts" and read_config(job.model, "MODEL")[0].hidden_dropout_prob == 0:
        print(f"the model has no dropout, which texts alone need: {DROPOUT} while training (--dropout)")
        rate = DROPOUT
    return {} if rate is None else {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}


def _open(folder: Path, device: torch.device, changes: dict[str, float]) -> SentenceTransformer:
    """Return the model of a folder, with the mean over tokens where the folder does not say otherwise.

    Raises:
        DataError: when the library cannot open it.
    """
    try:
        return SentenceTransformer(
            str(folder),
            device=str(device),
            config_kwargs=changes,
            model_kwargs={"dtype": torch.float32},
            model_card_data=SentenceTransformerModelCardData(generate_widget_examples=False),
        )
    except Exception as error:  # it reads what we do not, and raises what it finds
        what, remedy = f"sentence-transformers cannot open {folder}: {error}", "name a folder that holds a BERT"
        raise DataError(what, where="MODEL", remedy=remedy) from error
