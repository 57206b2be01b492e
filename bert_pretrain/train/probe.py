"""The probe: how well a linear classifier labels a few texts from the model's hidden states, at each evaluation.

Logistic regression on the mean of the last hidden states, fitted on a fixed part of a labelled file and scored on the
rest. Nothing random is drawn and no gradient reaches the model, so that training is the same with and without it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.finetune.classify import Classify
from bert_pretrain.finetune.inputs import LabelledInput
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.rng import Permutation
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.inference import Bert, batches_by_length
from bert_pretrain.tools.texts import Text, encoded_groups
from bert_pretrain.train.distributed import reshard_all
from bert_pretrain.train.evaluation import without_compiling
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.resolved import ResolvedRun
from bert_pretrain.train.state import TrainState

KEY = "train.probe"
MIN_ROWS, MAX_ROWS = 10, 10_000
"""More would take longer than the evaluation itself."""
TEST_SHARE = 0.3
WEIGHT_DECAY = 1e-2
"""Of the classifier, on standardised features."""
NEWTON_STEPS = 100


class Probe:
    """The labelled texts of a run, tokenized once; under FSDP all ranks must call `accuracy`."""

    def __init__(self, run: ResolvedRun, state: TrainState, micro_batch_tokens: int) -> None:
        """Read the file that the configuration names.

        Raises:
            UserError: when it cannot be read, or its rows do not make a task.
        """
        if not run.data.rows("validation"):
            raise ConfigError(
                "the data has no validation split, and the probe is part of an evaluation",
                where=KEY,
                remedy="make the data with a validation_fraction above 0, or leave the key out",
            )
        texts, self._labels = _read(str(run.config.train.probe), run.tokenizer)
        self._state, self._micro_batch_tokens = state, micro_batch_tokens
        self._bert = Bert(state.model, run.tokenizer, run.device, run.precision.dtype)
        self._sequences = _tokenized(texts, run.tokenizer, run.data.max_seq_length)
        order = Permutation(len(texts), 0, "probe")(np.arange(len(texts)))
        num_test = max(1, round(TEST_SHARE * len(texts)))
        self._test, self._train = torch.from_numpy(order[:num_test]), torch.from_numpy(order[num_test:])

    def accuracy(self) -> float:
        """Return the share of the texts held out from the classifier that it labels correctly."""
        features = self._features()
        train, test = features[self._train], features[self._test]
        # Standardised by the training part alone; a feature that is constant there says nothing.
        mean, deviation = train.mean(dim=0), train.std(dim=0).clamp_min(1e-6)
        weights = _fit((train - mean) / deviation, self._labels[self._train])
        predicted = F.linear((test - mean) / deviation, weights[:, :-1], weights[:, -1]).argmax(dim=1)
        return float((predicted == self._labels[self._test]).double().mean())

    @torch.no_grad()
    def _features(self) -> Tensor:
        """Return the mean of the last hidden states of each text, (texts, hidden) float64 on the CPU."""
        losses, bert = cast(PretrainingLoss, self._state.losses), self._bert
        was_training = losses.training
        losses.eval()
        features = torch.empty(len(self._sequences), bert.network.config.hidden_size, dtype=torch.float64)
        lengths = np.array([len(each) for each in self._sequences])
        autocast = torch.autocast(bert.device.type, bert.dtype, enabled=bert.dtype != torch.float32)
        with autocast, without_compiling(losses):
            for batch in batches_by_length(lengths, self._micro_batch_tokens):
                packed = bert.pack([self._sequences[index] for index in batch])
                hidden = losses.encode(*packed)  # (tokens, hidden)
                means = torch.segment_reduce(hidden.float(), "mean", lengths=packed[3].diff().long(), axis=0)
                features[torch.from_numpy(batch)] = means.cpu().double()
        reshard_all(losses)
        losses.train(was_training)
        return features


def _read(location: str, tokenizer: Tokenizer) -> tuple[list[Text], Tensor]:
    """Return the texts of a table, and the number of the class of each, (texts,) int64."""
    if not Path(location).is_file():
        raise ConfigError(f"there is no file '{location}'", where=KEY, remedy="name a table with 'text' and 'label'")
    try:
        examples = Classify(Settings(), tokenizer).read(LabelledInput(location, KEY, strict=True))
    except InputError as error:  # its remedies name flags of fine-tuning
        remedy = f"correct it; {KEY} takes a table with the columns 'text' and 'label'"
        raise InputError(error.what, where=error.where, remedy=remedy) from error
    names, labels = np.unique([str(example.label) for example in examples], return_inverse=True)
    if len(names) < 2 or not MIN_ROWS <= len(examples) <= MAX_ROWS:
        raise ConfigError(
            f"it has {len(examples):,} rows of {len(names)} classes",
            where=f"{KEY} {location}",
            remedy=f"give {MIN_ROWS} to {MAX_ROWS:,} rows of at least 2 classes",
        )
    texts = [Text(example.text, location, example.row + 1, "row") for example in examples]
    return texts, torch.from_numpy(labels)


def _tokenized(texts: Sequence[Text], tokenizer: Tokenizer, max_length: int) -> list[np.ndarray]:
    """Return the ids of each text, with [CLS] and [SEP], truncated to the length of the training data."""
    ids = [each for group in encoded_groups(texts, tokenizer) for each in group.ids]
    return [np.concatenate([[tokenizer.cls_id], each[: max_length - 2], [tokenizer.sep_id]]) for each in ids]


def _fit(features: Tensor, labels: Tensor) -> Tensor:
    """Return the weights of a logistic regression with an L2 penalty, (classes, features + 1); the last are biases."""
    weights = nn.Parameter(torch.zeros(int(labels.max()) + 1, features.shape[1] + 1, dtype=features.dtype))
    optimizer = torch.optim.LBFGS([weights], max_iter=NEWTON_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = F.linear(features, weights[:, :-1], weights[:, -1])
        loss: Tensor = F.cross_entropy(logits, labels) + WEIGHT_DECAY * weights[:, :-1].square().sum() / 2
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return weights.detach()
