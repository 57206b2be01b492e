"""Model folders in Hugging Face's format: written for our models, and read for any BERT.

On disk a model is `config.json`, `model.safetensors` and the tokenizer's files; in memory, query, key and value are one
matrix and the names are ours. Tied weights are stored once. A pickle is read only if it contains nothing but tensors.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from bert_pretrain.errors import DataError
from bert_pretrain.io.files import seal_folder, write_json
from bert_pretrain.model.attention_backend import choose_attention
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.folder import (
    CONFIG,
    POSITIONS,
    WEIGHTS,
    WORD_EMBEDDINGS,
    check_model,
    check_shape,
    current_name,
    read_config,
    read_weights,
)
from bert_pretrain.model.scale import export_exponent, scale_embeddings
from bert_pretrain.text.tokenizer import Extension, Tokenizer

PRETRAINING = "pretraining"
"""Key of `config.json`: how a model was pretrained, which fine-tuning asks for."""
_ROWS_OF_TOKENS = (WORD_EMBEDDINGS, "cls.predictions.bias")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# Ours -> Hugging Face's, as a prefix of the parameter's name; {} is the number of the layer.
_NAMES = {
    "embeddings.word_embeddings": "bert.embeddings.word_embeddings",
    "embeddings.position_embeddings": "bert.embeddings.position_embeddings",
    "embeddings.token_type_embeddings": "bert.embeddings.token_type_embeddings",
    "embeddings.layer_norm": "bert.embeddings.LayerNorm",
    "encoder.layers.{}.attention.output": "bert.encoder.layer.{}.attention.output.dense",
    "encoder.layers.{}.attention_norm": "bert.encoder.layer.{}.attention.output.LayerNorm",
    "encoder.layers.{}.intermediate": "bert.encoder.layer.{}.intermediate.dense",
    "encoder.layers.{}.output": "bert.encoder.layer.{}.output.dense",
    "encoder.layers.{}.output_norm": "bert.encoder.layer.{}.output.LayerNorm",
    "pooler.dense": "bert.pooler.dense",
    "mlm_head.dense": "cls.predictions.transform.dense",
    "mlm_head.layer_norm": "cls.predictions.transform.LayerNorm",
    "mlm_head": "cls.predictions",
    "nsp_head.dense": "cls.seq_relationship",
}
_FUSED = "encoder.layers.{}.attention.query_key_value"
_FUSED_PARTS = tuple(f"bert.encoder.layer.{{}}.attention.self.{part}" for part in ("query", "key", "value"))


class Loaded(NamedTuple):
    """A model read from a folder, and the tensors that only one of the two has."""

    model: BertForPreTraining
    fresh: list[str]  # Hugging Face's names of tensors that the folder lacks, which were initialized
    unused: dict[str, Tensor]  # of the folder, which a BERT for pretraining does not have, such as another task's head


def save_model(model: BertForPreTraining, folder: Path, tokenizer: Tokenizer) -> None:
    """Write a model folder that opens in `transformers`; `folder` must exist and should not be in use."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_tensors(to_huggingface(weights), model, folder, tokenizer)


def save_tensors(
    tensors: Mapping[str, Tensor],
    model: BertForPreTraining,
    folder: Path,
    tokenizer: Tokenizer,
    pretraining: Mapping[str, Any] | None = None,
) -> None:
    """Write weights, under Hugging Face's names, as `save_model` writes the model's own.

    `pretraining` says by what `optimizer`, in which `language` and on how many `tokens`. The checksums cover what the
    folder holds then; a card that is written later may be edited.
    """
    config = {
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        "vocab_size": model.vocab_size,
        "pad_token_id": tokenizer.pad_id,
        **model.config.model_dump(mode="json"),
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    write_json(folder / CONFIG, config if pretraining is None else {**config, PRETRAINING: pretraining})
    write_tensors(tensors, folder / WEIGHTS)
    tokenizer.save(folder, model.config.max_position_embeddings)
    seal_folder(folder, {CONFIG, WEIGHTS, *tokenizer.files})


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write one safetensors file with the permissions of any new file.

    Safetensors itself writes to a private temporary file, whose permissions the model would keep.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)


def exported(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Return weights, given by our own names, as a trained model is exported, and the exponent of their scale."""
    exponent = export_exponent(weights["embeddings.word_embeddings.weight"])
    return to_huggingface(scale_embeddings(weights, exponent)), exponent


def to_huggingface(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors with the names and shapes of our parameters (weights or gradients), in fp32 on the CPU.

    Each fused matrix becomes three.
    """
    renamed = {}
    for name, tensor in tensors.items():
        parts = _huggingface_names(name)
        for part, piece in zip(parts, tensor.float().cpu().chunk(len(parts)), strict=True):
            renamed[part] = piece.contiguous()
    return renamed


def _huggingface_names(name: str) -> list[str]:
    """Return Hugging Face's names of one of our parameters: three for a fused one, in order, else one."""
    module, _, leaf = name.rpartition(".")
    number = re.search(r"\.layers\.(\d+)\.", name)
    layer = number.group(1) if number else ""
    pattern = module.replace(f".layers.{layer}.", ".layers.{}.") if number else module
    modules = _FUSED_PARTS if pattern == _FUSED else (_NAMES[pattern],)
    return [f"{part.format(layer)}.{leaf}" for part in modules]


def load_model(
    folder: Path,
    *,
    attention: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    required: tuple[str, ...] = (),
    flag: str = "MODEL",
) -> Loaded:
    """Read any BERT folder for inference: the model is in evaluation mode, its weights in fp32.

    `required` are prefixes of Hugging Face's names of tensors that the folder must have, such as `cls.`. Matrix
    products are in `dtype`. `flag` is what errors name.
    """
    check_model(folder, flag)
    config, vocab_size = read_config(folder, flag)
    device = torch.device(device)
    size = {"hidden_size": config.hidden_size, "num_heads": config.num_attention_heads}
    backend, _ = choose_attention(attention, device, dtype, **size, dropout_rate=0.0)
    model = BertForPreTraining(config, vocab_size, attention=backend)
    fresh, unused = load_weights(model, folder, flag=flag, seed=0)
    if lacking := [name for name in fresh if required and name.startswith(required)]:
        what = f"{folder} lacks weights that this needs: {', '.join(lacking[:4])}{' …' if len(lacking) > 4 else ''}"
        remedy = "give a model with its pretraining heads, such as one written by 'bert-pretrain train'"
        raise DataError(what, where=flag, remedy=remedy)
    return Loaded(model.to(device).eval(), fresh, unused)


@torch.no_grad()
def load_weights(
    model: BertForPreTraining, folder: Path, *, flag: str, seed: int, extension: Extension | None = None
) -> tuple[list[str], dict[str, Tensor]]:
    """Load the weights of a BERT folder into a model and initialize what the folder lacks.

    `extension` says how the model's vocabulary extends the folder's; None if rows are copied as they are. Where the
    model has more positions, those of the folder are repeated. Returns Hugging Face's names of the tensors initialized,
    and the tensors of the folder that were not used, by name.
    """
    tensors = _normalised(read_weights(folder, flag))
    if extension is not None:
        for name in tensors.keys() & set(_ROWS_OF_TOKENS):
            tensors[name] = _extended(name, tensors[name], extension, folder, flag)
    if POSITIONS in tensors:
        tensors[POSITIONS] = more_positions(tensors[POSITIONS], model.config.max_position_embeddings)
    fresh, drawn, used = [], set(), set()
    for name, parameter in model.named_parameters():
        parts = _huggingface_names(name)
        absent = [part for part in parts if part not in tensors]
        if absent:
            fresh += absent
            drawn.add(name)
            continue
        shape = (parameter.shape[0] // len(parts), *parameter.shape[1:])
        for part, target in zip(parts, parameter.chunk(len(parts)), strict=True):
            check_shape(part, tuple(tensors[part].shape), shape, folder, flag)
            target.copy_(tensors[part])
        used.update(parts)
    model.initialize(seed, drawn)
    return fresh, {name: tensors[name] for name in sorted(set(tensors) - used)}


def more_positions(rows: Tensor, number: int) -> Tensor:
    """Return `number` position embeddings, (number, hidden), by repeating those of `rows`, (positions, hidden).

    Neighbours then keep their distance, which attention has learned, everywhere but at the seams. Fewer are not made.
    """
    return rows if number <= len(rows) else rows[torch.arange(number) % len(rows)]


def _extended(name: str, rows: Tensor, extension: Extension, folder: Path, flag: str) -> Tensor:
    """Return the rows of an extended vocabulary: old ones unchanged, each new one the mean of its old pieces' rows.

    Rows beyond the old vocabulary, with which some models are padded to a round number, belong to no token and are
    dropped.
    """
    if rows.shape[0] < extension.num_old_tokens:
        what = f"the vocabulary has {extension.num_old_tokens} tokens, the tensor {name} only {rows.shape[0]} rows"
        raise DataError(what, where=f"{flag} {folder}", remedy="put the model's own vocabulary there")
    extended = rows.new_empty((extension.num_tokens, *rows.shape[1:]), dtype=torch.float32)
    extended[: extension.num_old_tokens] = rows[: extension.num_old_tokens]
    for index, pieces in extension.pieces.items():
        extended[index] = rows[pieces].float().mean(dim=0)
    return extended


def _normalised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the names in BERT folders of all kinds to those of the current `BertForPreTraining`."""
    renamed = {}
    for old_name, tensor in tensors.items():
        if old_name.endswith("position_ids"):
            continue  # a buffer of older versions, always 0, 1, 2, …
        name = current_name(old_name)
        if name.startswith(("bert.", "cls.")) and (tensor.dtype not in _DTYPES or tensor.layout != torch.strided):
            what = f"its numbers are {tensor.dtype}, {tensor.layout}, which is not supported"
            raise DataError(what, where=old_name, remedy="convert the model to fp32, bf16 or fp16")
        renamed[name] = tensor
    # The decoder is tied to the embeddings; some versions store its two tensors nevertheless.
    decoder, bias = (renamed.pop(f"cls.predictions.decoder.{leaf}", None) for leaf in ("weight", "bias"))
    embeddings = renamed.get(WORD_EMBEDDINGS)
    if decoder is not None and embeddings is not None and not torch.equal(decoder.to(embeddings.dtype), embeddings):
        what = "its output matrix is not its word embeddings (tie_word_embeddings is false); BERT ties the two"
        remedy = "give a BERT with tied embeddings"
        raise DataError(what, where="cls.predictions.decoder.weight", remedy=remedy)
    if bias is not None:
        renamed.setdefault("cls.predictions.bias", bias)
    return renamed
