"""What a notebook needs: open a data folder, a tokenizer, a model; train.

Each call takes what the commands take, and raises `UserError` where they would leave with exit code 2. Heavy libraries
are imported by the call that needs them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_pretrain.errors import InputError
from bert_pretrain.places import local_place, place

if TYPE_CHECKING:
    from torch import Tensor

    from bert_pretrain.model.bert import BertForPreTraining
    from bert_pretrain.shards import DataFolder
    from bert_pretrain.tokenizer import Tokenizer
    from bert_pretrain.tools.inference import Bert, Packed


def load_data(folder: str | Path) -> "DataFolder":
    """Open a data folder, its manifest and shards checked against one another.

    The result has `manifest`, `config`, `rows(split)`, `tokenizer()`, and `dataset()`, the examples in `datasets`.

    Raises:
        DataError: when the folder is unfinished or is not what its manifest says.
    """
    from bert_pretrain.shards import DataFolder

    return DataFolder.open(local_place(str(folder), "load_data", remedy="copy it first"), "load_data")


def load_tokenizer(folder: str | Path) -> "Tokenizer":
    """Open a tokenizer or model folder; `encode_text` gives the ids of a text, `decode` the text of ids.

    Raises:
        DataError: when the folder holds no tokenizer of a BERT.
    """
    from bert_pretrain.tokenizer import Tokenizer

    return Tokenizer.load(place(str(folder)), "load_tokenizer")


def load_model(folder: str | Path, *, device: str = "auto", precision: str = "fp32") -> "Model":
    """Open any BERT folder with its tokenizer.

    Args:
        folder: written here or by Hugging Face's tools.
        device: auto, cpu, cuda or cuda:N.
        precision: of the matrix products: fp32, bf16, fp16 or auto.

    Raises:
        UserError: when the folder holds no BERT with its pretraining heads, or the device is not there.
    """
    from bert_pretrain.config import load_config
    from bert_pretrain.tools.inference import open_bert

    flags = {"train.device": ("device", device), "train.precision": ("precision", precision)}
    return Model(open_bert(Path(folder), load_config(flags=flags).train, ("cls.predictions",)))


def pretrain(
    data: str | Path,
    output: str | Path,
    config: str | Path | None = None,
    *,
    model: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Train a BERT as `bert-pretrain train` does, and return the path of the final model folder.

    The same call again goes on, or finds its work done. Interrupting the kernel saves a checkpoint first.

    Args:
        data: a data folder.
        output: the run folder.
        config: a shipped preset such as "tiny", or the path of a YAML file.
        model: keys of the section `model` to set, such as `{"num_hidden_layers": 4}`.
        train: keys of the section `train`, such as `{"max_steps": 1000}`.
        options: `init_from`, `carry_optimizer`, `resume`, `overwrite` and `dry_run`, as the command has them.

    Raises:
        UserError: when folders or settings do not fit each other.
        Interrupted: after the checkpoint that an interruption asked for.
    """
    from bert_pretrain.config import load_config
    from bert_pretrain.train.run import train as run

    flags = {
        f"{section}.{key}": (f"{section}['{key}']", value)
        for section, values in (("model", model), ("train", train))
        for key, value in (values or {}).items()
    }
    if options.get("init_from") is not None:
        options["init_from"] = Path(options["init_from"])
    remedy = "copy it, or name a local folder"
    places = (local_place(str(folder), name, remedy=remedy) for folder, name in ((data, "data"), (output, "output")))
    return run(load_config(config, flags=flags, with_phases=False), *places, **options)


@dataclass(frozen=True)
class Model:
    """A model that takes texts, in which `[MASK]` is the mask; texts run in batches, without padding."""

    bert: "Bert"

    @property
    def network(self) -> "BertForPreTraining":
        """The PyTorch module, for what is not offered here."""
        return self.bert.network

    @property
    def tokenizer(self) -> "Tokenizer":
        return self.bert.tokenizer

    def hidden_states(self, texts: Sequence[str]) -> "list[Tensor]":
        """Return the last hidden states of each text, (tokens, hidden) fp32 on the CPU, [CLS] and [SEP] included.

        Raises:
            InputError: when a text is longer than the model's positions.
        """
        return self._run(texts, lambda packed: self.network.encode(*packed))

    def logits(self, texts: Sequence[str]) -> "list[Tensor]":
        """Return the masked-language-model logits at every token of each text, (tokens, vocabulary) fp32 on the CPU.

        Raises:
            InputError: when a text is longer than the model's positions.
        """

        def decode(packed: "Packed") -> "Tensor":
            return self.network.decode(self.network.mlm_head(self.network.encode(*packed)))

        return self._run(texts, decode)

    def _run(self, texts: Sequence[str], compute: Callable[["Packed"], "Tensor"]) -> "list[Tensor]":
        import numpy as np
        import torch

        from bert_pretrain.tools.fill_mask import encode_text_and_masks
        from bert_pretrain.tools.inference import batches_by_length

        if isinstance(texts, str):
            raise InputError("texts is a single text", where=repr(texts[:60]), remedy="give a list of texts")
        sequences = [encode_text_and_masks(text, self.tokenizer) for text in texts]
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        for number in np.flatnonzero(lengths > self.bert.max_length).tolist():
            raise InputError(
                f"text {number} has {lengths[number]} tokens, the model has {self.bert.max_length} positions",
                where=repr(texts[number][:60]),
                remedy="shorten it, or cut it up",
            )
        found: dict[int, Tensor] = {}
        with self.bert.running():
            for batch in batches_by_length(lengths, self.bert.batch_tokens):
                computed = compute(self.bert.pack([sequences[index] for index in batch])).float().cpu()
                parts = torch.split(computed, lengths[batch].tolist())
                found.update(zip(batch.tolist(), parts, strict=True))
        return [found[index] for index in range(len(sequences))]
