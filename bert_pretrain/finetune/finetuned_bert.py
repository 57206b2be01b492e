"""Inference with a fine-tuned folder, without padding.

Reads folders written by `finetune`, and folders of the same model classes written by `transformers`. In fp32, the
outputs equal those of `transformers` up to rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import DataError
from bert_pretrain.finetune.task import Window
from bert_pretrain.io.files import read_json
from bert_pretrain.model.folder import CONFIG, read_config
from bert_pretrain.tools.inference import Bert, batches_by_length, checked, open_bert

_HEADS = {  # class of `transformers`: the task, and the linear layer of its head
    "BertForSequenceClassification": ("classify", "classifier"),
    "BertForTokenClassification": ("tag", "classifier"),
    "BertForQuestionAnswering": ("answer", "qa_outputs"),
}
_REMEDY = "use a folder written by 'bert-pretrain finetune', or a model of the class " + ", ".join(_HEADS)


@dataclass(frozen=True)
class FinetunedBert:
    """A BERT with the head of a task."""

    bert: Bert
    task: str
    labels: list[str]  # names of the outputs; empty for regression and for `answer`
    weight: Tensor  # (outputs, hidden)
    bias: Tensor  # (outputs,)
    is_multi_label: bool = False

    @staticmethod
    def open(folder: Path, config: TrainConfig, max_length: int | None = None) -> "FinetunedBert":
        """Open a fine-tuned folder like `open_bert`."""
        read_config(folder, "MODEL")
        settings = read_json(folder / CONFIG)
        names = settings.get("architectures")
        cls_name = names[0] if isinstance(names, list) and names else None
        if not isinstance(cls_name, str) or cls_name not in _HEADS:
            what = f"is a {str(cls_name)[:80]}, which has no head for a task" if cls_name else "names no model class"
            raise DataError(f"{folder} {what}", where="MODEL", remedy=f"fine-tune it first, or {_REMEDY}")
        task, layer = _HEADS[cls_name]
        required = ("bert.pooler",) if task == "classify" else ()
        bert = open_bert(folder, config, required, max_length=max_length)
        weight, bias = (bert.unused.get(f"{layer}.{name}") for name in ("weight", "bias"))
        hidden = bert.network.config.hidden_size
        if weight is None or bias is None or weight.shape != (*bias.shape, hidden) or not len(bias):
            what = f"{folder} has no layer '{layer}' for a hidden size of {hidden}"
            raise DataError(what, where="MODEL", remedy=_REMEDY)
        labels = [] if task == "answer" else _labels_of(settings, task, len(bias), folder / CONFIG)
        is_multi_label = task == "classify" and settings.get("problem_type") == "multi_label_classification"
        head = weight.to(bert.device).float(), bias.to(bert.device).float()
        return FinetunedBert(bert, task, labels, *head, is_multi_label)

    def logits(self, windows: Sequence[Window], bar: Any, num_rows: int, batch_tokens: int | None = None) -> Any:
        """Return the float32 outputs of the head for every window, in order, and advance the bar by `num_rows`.

        The result is a list of (outputs,) for `classify`, a list of (tokens, outputs) for `tag`, or the start and end
        logits for `answer`, as two lists of (tokens,).
        """
        lengths = np.array([len(window.input_ids) for window in windows])
        results: list[np.ndarray] = [np.empty(0)] * len(windows)
        with self.bert.running():
            for batch in batches_by_length(lengths, batch_tokens or self.bert.batch_tokens):
                ids = [np.array(windows[index].input_ids) for index in batch]
                types = [np.array(windows[index].token_type_ids) for index in batch]
                packed = self.bert.pack(ids, types)
                hidden, sizes = self.bert.network.encode(*packed), lengths[batch]  # (tokens, hidden)
                if self.task == "classify":
                    hidden = self.bert.network.pooler(hidden, packed[3])  # (windows, hidden)
                    sizes = np.ones_like(sizes)
                outputs = checked(F.linear(hidden, self.weight, self.bias)).float().cpu().numpy()
                for index, part in zip(batch, np.split(outputs, np.cumsum(sizes)[:-1]), strict=True):
                    results[index] = part
                bar.update(len(batch) / len(windows) * num_rows * (1 - 1e-9))  # rounding must not exceed the total
        if self.task == "answer":
            return [each[:, 0] for each in results], [each[:, 1] for each in results]
        return [each[0] for each in results] if self.task == "classify" else results


def _labels_of(settings: Mapping[str, Any], task: str, num_outputs: int, path: Path) -> list[str]:
    """Return the names of the classes or tags in `config.json`, or an empty list for regression."""
    problem_type = settings.get("problem_type")
    is_one_number = num_outputs == 1 and problem_type != "multi_label_classification"
    if task == "classify" and (problem_type == "regression" or is_one_number):
        return []
    default_names = {str(index): f"LABEL_{index}" for index in range(num_outputs)}  # `transformers` does not write them
    names = settings.get("id2label", default_names)
    is_complete = isinstance(names, dict) and names.keys() == default_names.keys()
    if not is_complete or not all(isinstance(label, str) for label in names.values()):
        what = f"id2label does not name the {num_outputs} outputs of the head"
        raise DataError(what, where=str(path), remedy="restore the file from a copy")
    return [names[index] for index in default_names]
