"""Open a fine-tuned folder, and compute the outputs of its head.

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
from bert_pretrain.examples.examples import Examples
from bert_pretrain.finetune.task import Window
from bert_pretrain.io.files import read_json
from bert_pretrain.model.bert import Packed
from bert_pretrain.model.folder import CONFIG, read_config
from bert_pretrain.model.sequences import Bert, mean_of_sequences, open_bert, sequences_of

_HEADS = {  # class of `transformers`: the task, and the linear layer of its head
    "BertForSequenceClassification": ("classify", "classifier"),
    "BertForTokenClassification": ("tag", "classifier"),
    "BertForQuestionAnswering": ("answer", "qa_outputs"),
    "ModernBertForSequenceClassification": ("classify", "classifier"),
    "ModernBertForTokenClassification": ("tag", "classifier"),
    "ModernBertForQuestionAnswering": ("answer", "classifier"),
    "AlbertForSequenceClassification": ("classify", "classifier"),
    "AlbertForTokenClassification": ("tag", "classifier"),
    "AlbertForQuestionAnswering": ("answer", "qa_outputs"),
    "ElectraForSequenceClassification": ("classify", "classifier.out_proj"),
    "ElectraForTokenClassification": ("tag", "classifier"),
    "ElectraForQuestionAnswering": ("answer", "qa_outputs"),
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
    has_mean: bool = False  # whether a ModernBERT classifies the mean of the hidden states, not that of [CLS]
    dense: tuple[Tensor, ...] = ()  # weight and bias of the layer before, with GELU, when an ELECTRA classifies

    @staticmethod
    def open(folder: Path, config: TrainConfig, max_length: int | None = None) -> "FinetunedBert":
        """Open a fine-tuned folder like `open_bert`."""
        read_config(folder, "MODEL")
        settings = read_json(folder / CONFIG)
        names = settings.get("architectures")
        class_name = str(names[0])[:80] if isinstance(names, list) and names else "model without a class"
        if class_name not in _HEADS:
            raise DataError(
                f"{folder} is a {class_name}, which has no head for a task",
                where="MODEL",
                remedy=f"fine-tune it first, or {_REMEDY}",
            )
        task, layer = _HEADS[class_name]
        is_electra = class_name.startswith("Electra")
        required: tuple[str, ...] = ("pooler",) if task == "classify" and not is_electra else ()
        if class_name.startswith("Modern"):
            required = ("mlm_head.dense", "mlm_head.layer_norm")
        bert = open_bert(folder, config, required, max_length=max_length)
        weight = bert.unused.get(f"{layer}.weight")
        bias = bert.unused.get(f"{layer}.bias")
        names = ("classifier.dense.weight", "classifier.dense.bias") if is_electra and task == "classify" else ()
        dense = [bert.unused[name] for name in names if name in bert.unused]
        hidden = bert.network.config.hidden_size
        is_complete = len(dense) == len(names) and all(tensor.shape[-1] == hidden for tensor in dense)
        if weight is None or bias is None or weight.shape != (*bias.shape, hidden) or not len(bias) or not is_complete:
            raise DataError(
                f"{folder} has no layer '{layer}' for a hidden size of {hidden}",
                where="MODEL",
                remedy=_REMEDY,
            )
        labels = [] if task == "answer" else _labels_of(settings, task, len(bias), folder / CONFIG)
        is_multi_label = task == "classify" and settings.get("problem_type") == "multi_label_classification"
        weight = weight.to(bert.device).float()
        bias = bias.to(bert.device).float()
        has_mean = settings.get("classifier_pooling") == "mean"
        return FinetunedBert(
            bert,
            task,
            labels,
            weight,
            bias,
            is_multi_label,
            has_mean,
            tuple(tensor.to(bert.device).float() for tensor in dense),
        )

    def logits(
        self,
        windows: Sequence[Window],
        bar: Any,
        num_rows: int,
        batch_tokens: int | None = None,
    ) -> Any:
        """Return the float32 outputs of the head for every window, in order, and advance the bar by `num_rows`.

        The result is a list of (outputs,) for `classify`, a list of (tokens, outputs) for `tag`, or the start and end
        logits for `answer`, as two lists of (tokens,).
        """
        rows_per_window = num_rows / len(windows) * (1 - 1e-9)  # rounding must not exceed the total
        ids = [window.input_ids for window in windows]
        sequences = sequences_of(ids, [window.token_type_ids for window in windows])
        num_outputs = np.ones_like(sequences.lengths) if self.task == "classify" else sequences.lengths

        def head(packed: Packed, _: Examples) -> Tensor:
            hidden = self.bert.network.encode(packed)  # (tokens, hidden)
            if self.task == "classify":
                hidden = self._pooled(hidden, packed.cu_seqlens)  # (windows, hidden)
            if self.bert.network.config.is_modern:
                hidden = self.bert.network.mlm_head(hidden)
            if self.dense:
                hidden = F.gelu(F.linear(hidden, *self.dense))
            return F.linear(hidden, self.weight, self.bias)

        def on_batch(rows: np.ndarray) -> None:
            bar.update(len(rows) * rows_per_window)

        outputs = self.bert.run(
            sequences,
            head,
            num_outputs,
            on_batch,
            batch_tokens,
        )
        if self.task == "classify":
            return list(outputs)
        parts = np.split(outputs, sequences.offsets[1:-1])
        if self.task == "tag":
            return parts
        return [part[:, 0] for part in parts], [part[:, 1] for part in parts]

    def _pooled(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return what the head classifies, (windows, hidden), from the hidden states, (tokens, hidden)."""
        pooler = self.bert.network.pooler
        if pooler is not None:
            return pooler(hidden, cu_seqlens)
        if self.has_mean:
            return mean_of_sequences(hidden, cu_seqlens)
        return hidden.index_select(0, cu_seqlens[:-1])


def _labels_of(
    settings: Mapping[str, Any],
    task: str,
    num_outputs: int,
    path: Path,
) -> list[str]:
    """Return the names of the classes or tags in `config.json`, or an empty list for regression."""
    problem_type = settings.get("problem_type")
    is_one_number = num_outputs == 1 and problem_type != "multi_label_classification"
    if task == "classify" and (problem_type == "regression" or is_one_number):
        return []
    default_names = {str(index): f"LABEL_{index}" for index in range(num_outputs)}  # `transformers` does not write them
    names = settings.get("id2label", default_names)
    is_complete = isinstance(names, dict) and names.keys() == default_names.keys()
    if not is_complete or not all(isinstance(label, str) for label in names.values()):
        raise DataError(
            f"id2label does not name the {num_outputs} outputs of the head",
            where=str(path),
            remedy="restore the file from a copy",
        )
    return [names[index] for index in default_names]
