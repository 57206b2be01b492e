"""A fine-tuned folder for inference: BERT without padding, the head of its task, and the names of the head's outputs.

The folders are those of `finetune`, and of `transformers` with the same classes. In fp32 the outputs are those of
`transformers`, up to rounding.
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
from bert_pretrain.tools.inference import Bert, batches_by_length, open_bert

_HEADS = {
    "BertForSequenceClassification": ("classify", "classifier"),
    "BertForTokenClassification": ("tag", "classifier"),
    "BertForQuestionAnswering": ("answer", "qa_outputs"),
}
"""The task, and the name of its linear layer, by the class of `transformers` that `config.json` names."""
_REMEDY = "give a folder that 'bert-pretrain finetune' has written, or one of " + ", ".join(_HEADS)


@dataclass(frozen=True)
class FinetunedBert:
    """A BERT with the head of a task: `classify`, `tag` or `answer`."""

    bert: Bert
    task: str
    labels: list[str]
    """The names of the outputs; empty for a regression and for `answer`."""
    weight: Tensor  # (outputs, hidden)
    bias: Tensor  # (outputs,)
    has_lists: bool = False
    """Whether a text may have several labels, or none."""

    @staticmethod
    def open(folder: Path, config: TrainConfig) -> "FinetunedBert":
        """Open a fine-tuned folder; `config` gives device, precision and attention."""
        read_config(folder, "MODEL")
        settings = read_json(folder / CONFIG)
        task, layer = _head_of(settings, folder)
        bert = open_bert(folder, config, ("bert.pooler",) if task == "classify" else ())
        weight, bias = (bert.unused.get(f"{layer}.{name}") for name in ("weight", "bias"))
        hidden = bert.network.config.hidden_size
        if weight is None or bias is None or weight.shape != (*bias.shape, hidden) or not len(bias):
            what = f"{folder} has no layer '{layer}' for a hidden size of {hidden}"
            raise DataError(what, where="MODEL", remedy=_REMEDY)
        labels = [] if task == "answer" else _labels_of(settings, len(bias), folder)
        has_lists = task == "classify" and settings.get("problem_type") == "multi_label_classification"
        head = weight.to(bert.device).float(), bias.to(bert.device).float()
        return FinetunedBert(bert, task, labels, *head, has_lists=has_lists)

    def logits(self, windows: Sequence[Window], bar: Any, num_rows: int, batch_tokens: int | None = None) -> Any:
        """Return the outputs of the head for every window, in their order and in float32.

        For `classify` these are a list of (outputs,), for `tag` of (tokens, outputs), for `answer` two lists of
        (tokens,), scores of the start and of the end. The bar advances by the `num_rows` rows that the windows show.
        """
        lengths = np.array([len(window.input_ids) for window in windows])
        found: list[np.ndarray] = [np.empty(0)] * len(windows)
        with self.bert.running():
            for batch in batches_by_length(lengths, batch_tokens or self.bert.batch_tokens):
                ids, types = (
                    [np.array(getattr(windows[index], name)) for index in batch]
                    for name in ("input_ids", "token_type_ids")
                )
                packed = self.bert.pack(ids, types)
                hidden, sizes = self.bert.network.encode(*packed), lengths[batch]  # (tokens, hidden)
                if self.task == "classify":
                    hidden, sizes = (
                        self.bert.network.pooler(hidden, packed[3]),
                        np.ones_like(sizes),
                    )  # (windows, hidden)
                outputs = F.linear(hidden, self.weight, self.bias).float().cpu().numpy()
                if not np.isfinite(outputs).all():
                    what = "the outputs of the network are not finite"
                    remedy = "if this was training: it has diverged, give a smaller --learning-rate, with --overwrite"
                    raise DataError(what, where="MODEL", remedy=f"{remedy}; otherwise --precision fp32")
                for index, part in zip(batch, np.split(outputs, np.cumsum(sizes)[:-1]), strict=True):
                    found[index] = part
                bar.update(len(batch) * num_rows / len(windows))
        if self.task == "answer":
            return [each[:, 0] for each in found], [each[:, 1] for each in found]
        return [each[0] for each in found] if self.task == "classify" else found


def _head_of(settings: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    found = settings.get("architectures")
    name = found[0] if isinstance(found, list) and found else None
    if not isinstance(name, str) or name not in _HEADS:
        what = f"{folder} holds {str(name)[:80]}, which has no head for a task" if name else f"{folder} names no head"
        raise DataError(what, where="MODEL", remedy=f"fine-tune it first, or {_REMEDY}")
    return _HEADS[name]


def _labels_of(settings: Mapping[str, Any], count: int, folder: Path) -> list[str]:
    """Return the names of classes or tags, none for a regression; `transformers` leaves its own defaults out."""
    is_multi_label = settings.get("problem_type") == "multi_label_classification"
    if settings.get("problem_type") == "regression" or (count == 1 and not is_multi_label):
        return []
    names = settings.get("id2label", {str(number): f"LABEL_{number}" for number in range(count)})
    is_whole = isinstance(names, dict) and names.keys() == {str(number) for number in range(count)}
    if not is_whole or not all(isinstance(label, str) for label in names.values()):
        what = f"its id2label does not name the {count} outputs of the head"
        raise DataError(what, where=str(folder / CONFIG), remedy="restore the file from a copy")
    return [names[str(number)] for number in range(count)]
