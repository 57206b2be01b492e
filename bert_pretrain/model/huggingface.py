"""Read and write model folders in Hugging Face's format.

A folder has `config.json`, `model.safetensors` and the tokenizer's files. Our parameters have other names, and fuse
query, key and value into one matrix. Tied weights are stored once. Any folder of a BERT encoder can be read.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bert_pretrain.errors import DataError
from bert_pretrain.io.files import write_checksums, write_json
from bert_pretrain.model.architectures import (
    ARCHITECTURES,
    GENERATOR_CLASS,
    GENERATOR_PARTS,
    OUTPUT_BIAS,
    POSITIONS,
    WORD_EMBEDDINGS,
    current_name,
    huggingface_names,
    huggingface_settings,
    is_own_weight,
    special_token_ids,
)
from bert_pretrain.model.attention_backend import choose_attention
from bert_pretrain.model.bert import BertForPreTraining, ElectraForPreTraining
from bert_pretrain.model.folder import (
    CONFIG,
    GENERATOR,
    GENERATOR_WEIGHTS,
    PRETRAINING,
    TRAINED_LENGTH,
    WEIGHTS,
    check_model,
    check_shape,
    read_config,
    read_weights,
)
from bert_pretrain.text.tokenizer import Extension, Tokenizer

INITIAL_RMS = 0.02  # standard deviation of BERT's initial weights (released code of Devlin et al., 2018)
EXPORTED_RMS = 0.05  # largest root mean square of exported word embeddings, similar to other BERTs
BASE_RATE, BASE_WIDTH = 3e-4, 256  # rate for matrices with `INITIAL_RMS`, measured at a width of 128 (RESULTS.md)
WIDTH_POWER = 2.26  # above `BASE_WIDTH`; width 768 and an RMS of 0.04 give the paper's rate of 5e-5 (appendix A.3)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class LoadedModel(NamedTuple):
    """A model read from a folder, and the differences between the two."""

    model: BertForPreTraining
    missing: list[str]  # names of parameters that the folder lacks; they were initialized
    unused: dict[str, Tensor]  # tensors of the folder that the model lacks, such as the head of another task


def save_model_folder(
    tensors: Mapping[str, Tensor],
    model: BertForPreTraining,
    folder: Path,
    tokenizer: Tokenizer,
    pretraining: Mapping[str, Any] | None = None,
) -> None:
    """Write configuration, weights, tokenizer and their checksums to an existing folder.

    `tensors` have Hugging Face's names. `pretraining`, described at `ResolvedRun.pretraining`, goes into `config.json`.
    Its length is the `model_max_length` of the tokenizer, so `transformers` truncates texts too. A model card is
    written afterwards, so no checksum covers it and it may be edited.
    """
    is_generator = any(name.startswith("generator_") for name in tensors)
    config = {
        "architectures": [GENERATOR_CLASS if is_generator else ARCHITECTURES[model.config.architecture].class_name],
        "model_type": model.config.architecture,
        "vocab_size": model.vocab_size,
        **special_token_ids(tokenizer, model.config.architecture),
        **huggingface_settings(model.config),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    length = model.config.max_position_embeddings
    if pretraining is not None:
        config[PRETRAINING] = pretraining
        length = pretraining[TRAINED_LENGTH]
    write_json(folder / CONFIG, config)
    write_tensors(tensors, folder / WEIGHTS)
    tokenizer.save(folder, length)
    write_checksums(folder, {CONFIG, WEIGHTS, *tokenizer.files})


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file with default permissions. `save_file` makes new files readable by their owner only."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)


class Exported(NamedTuple):
    """Weights under Hugging Face's names."""

    weights: dict[str, Tensor]
    generator: dict[str, Tensor]  # those of ELECTRA's generator without the embeddings; else empty
    exponent: int  # of the scale of `scale_embeddings`


def export_weights(weights: Mapping[str, Tensor], architecture: str) -> Exported:
    """Return weights scaled by `scale_embeddings`."""
    exponent = export_exponent(weights["embeddings.word_embeddings.weight"])
    scaled = scale_embeddings(weights, exponent)
    parts = GENERATOR_PARTS if architecture == "electra" else ()
    generator = {name: scaled.pop(name) for name in list(scaled) if name.startswith(parts)}
    return Exported(to_huggingface(scaled, architecture), to_huggingface(generator, architecture), exponent)


def save_generator(
    exported: Exported,
    model: ElectraForPreTraining,
    folder: Path,
    tokenizer: Tokenizer,
    pretraining: Mapping[str, Any],
) -> None:
    """Write the model folder of ELECTRA's generator."""
    shared = {name: tensor for name, tensor in exported.weights.items() if name.startswith("electra.embeddings.")}
    with torch.device("meta"):
        generator = BertForPreTraining(model.config.generator, model.vocab_size)
    save_model_folder(
        {**shared, **exported.generator},
        generator,
        folder,
        tokenizer,
        pretraining,
    )


def to_huggingface(tensors: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """Convert our weights or gradients to Hugging Face's names and shapes, in fp32 on the CPU."""
    renamed = {}
    for name, tensor in tensors.items():
        parts = huggingface_names(name, architecture)
        for part, piece in zip(parts, tensor.float().cpu().chunk(len(parts)), strict=True):
            renamed[part] = piece.contiguous()
    return renamed


def load_model(
    folder: Path,
    *,
    attention: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    required: tuple[str, ...] = (),
    flag: str = "MODEL",
) -> LoadedModel:
    """Load any BERT folder in evaluation mode, with fp32 weights and an attention backend for autocast to `dtype`.

    Raise `DataError` if a part in `required`, such as `mlm_head`, lacks weights. Errors name `flag`.
    """
    check_model(folder, flag)
    config, vocab_size = read_config(folder, flag)
    device = torch.device(device)
    backend, _ = choose_attention(
        attention,
        device,
        dtype,
        config,
        is_training=False,
    )
    model = BertForPreTraining(config, vocab_size, attention=backend)
    missing, unused = load_weights(model, folder, flag=flag, seed=0)
    if needed := [name for name in missing if name.startswith(required)]:
        example = huggingface_names(needed[0], config.architecture)[0]
        if example.startswith("generator_"):
            raise DataError(
                f"{folder} is an ELECTRA's discriminator, which has no head for masked tokens",
                where=flag,
                remedy=f"name the folder of its generator, such as {folder.parent / GENERATOR}",
            )
        raise DataError(
            f"{folder} lacks {len(needed)} required weights, such as {example}",
            where=flag,
            remedy="use a model with its pretraining heads, such as one written by 'bert-pretrain train'",
        )
    return LoadedModel(model.to(device).eval(), missing, unused)


@torch.no_grad()
def load_weights(
    model: BertForPreTraining,
    folder: Path,
    *,
    flag: str,
    seed: int,
    extension: Extension | None = None,
) -> tuple[list[str], dict[str, Tensor]]:
    """Load the weights of a BERT folder into a model and initialize parameters that the folder lacks.

    With `extension`, the model's vocabulary extends the folder's. If the model has more positions, the folder's are
    repeated. The generator of an ELECTRA in training is read from the folder next to it, or from the checkpoint.
    Return the names of the initialized parameters, and the unused tensors of the folder by name.
    """
    architecture = model.config.architecture
    own = _prepared(
        read_weights(folder, flag),
        model,
        folder,
        flag,
        extension,
    )
    generator: dict[str, Tensor] = {}
    generator_parts: tuple[str, ...] = ()
    if isinstance(model, ElectraForPreTraining):
        generator_parts = GENERATOR_PARTS
        generator = _prepared(
            _read_generator(folder, flag),
            model,
            folder,
            flag,
            extension,
        )
    missing: list[str] = []
    used: set[str] = set()
    for name, parameter in model.named_parameters():
        tensors = generator if name.startswith(generator_parts) else own
        parts = huggingface_names(name, architecture)
        if not tensors.keys() >= set(parts):
            missing.append(name)
            continue
        shape = (parameter.shape[0] // len(parts), *parameter.shape[1:])
        for part, target in zip(parts, parameter.chunk(len(parts)), strict=True):
            check_shape(
                part,
                tuple(tensors[part].shape),
                shape,
                folder,
                flag,
            )
            target.copy_(tensors[part])
        used.update(parts)
    model.initialize(seed, set(missing))
    return missing, {name: own[name] for name in sorted(set(own) - used)}


def _read_generator(folder: Path, flag: str) -> dict[str, Tensor]:
    """Return the weights of the generator that belongs to a discriminator, or nothing if there is none."""
    if (folder / GENERATOR_WEIGHTS).is_file():  # in a checkpoint, whose checksums have been compared
        return load_file(folder / GENERATOR_WEIGHTS)
    sibling = folder.parent / GENERATOR
    if not (sibling / CONFIG).is_file():
        return {}
    check_model(sibling, flag)
    return read_weights(sibling, flag)


def _prepared(
    weights: dict[str, Tensor],
    model: BertForPreTraining,
    folder: Path,
    flag: str,
    extension: Extension | None,
) -> dict[str, Tensor]:
    """Return weights with current names, and with the rows of the model's vocabulary and positions."""
    architecture = model.config.architecture
    tensors = _with_current_names(weights, architecture, f"{flag} {folder}")
    if extension is not None:
        by_token = [name for ours in (WORD_EMBEDDINGS, OUTPUT_BIAS) for name in huggingface_names(ours, architecture)]
        for name in tensors.keys() & set(by_token):
            tensors[name] = _extend_rows(
                name,
                tensors[name],
                extension,
                folder,
                flag,
            )
    num_positions = model.config.max_position_embeddings
    if not model.config.is_modern:
        (positions,) = huggingface_names(POSITIONS, architecture)
        if positions in tensors and len(tensors[positions]) < num_positions:
            # Repetition keeps the relative distances that attention has learned, except at the seams.
            tensors[positions] = tensors[positions][torch.arange(num_positions) % len(tensors[positions])]
    return tensors


def _extend_rows(
    name: str,
    rows: Tensor,
    extension: Extension,
    folder: Path,
    flag: str,
) -> Tensor:
    """Return the rows of an extended vocabulary. The row of a new token is the mean of the rows of its old pieces.

    Rows beyond the old vocabulary, which pad some models to a round number, are dropped.
    """
    if rows.shape[0] < extension.num_old_tokens:
        raise DataError(
            f"the vocabulary has {extension.num_old_tokens} tokens, the tensor {name} only {rows.shape[0]} rows",
            where=f"{flag} {folder}",
            remedy="put the vocabulary that the model was trained with into its folder",
        )
    extended = rows.new_empty((extension.num_tokens, *rows.shape[1:]), dtype=torch.float32)
    extended[: extension.num_old_tokens] = rows[: extension.num_old_tokens]
    for index, pieces in extension.pieces.items():
        extended[index] = rows[pieces].float().mean(dim=0)
    return extended


def _with_current_names(tensors: dict[str, Tensor], architecture: str, where: str) -> dict[str, Tensor]:
    """Rename the tensors of a BERT folder to Hugging Face's current names, without the decoder's copy of tied weights.

    Raise DataError for an unsupported dtype or layout, for NaN and infinity, and for an untied decoder.
    """
    renamed = {}
    for old_name, tensor in tensors.items():
        if old_name.endswith("position_ids"):
            continue  # a buffer of older versions: 0, 1, 2, …
        name = current_name(old_name, architecture)
        if tensor.dtype in _DTYPES and tensor.layout == torch.strided:
            # Unlike `isfinite`, `aminmax` needs no memory. Both of its results are NaN if a number is NaN.
            if tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
                raise DataError(
                    f"the tensor {old_name} has NaN or infinity",
                    where=where,
                    remedy="use a model whose training did not diverge",
                )
        elif is_own_weight(name, architecture):
            raise DataError(
                f"{tensor.dtype} with {tensor.layout} is not supported",
                where=old_name,
                remedy="convert the model to fp32, bf16 or fp16",
            )
        renamed[name] = tensor
    # The decoder is tied to the embeddings, but some versions also store its weight and bias.
    decoder_name = ARCHITECTURES[architecture].decoder
    decoder = renamed.pop(decoder_name, None)
    (word_embeddings,) = huggingface_names(WORD_EMBEDDINGS, architecture)
    embeddings = renamed.get(word_embeddings)
    if decoder is not None and embeddings is not None and not torch.equal(decoder.to(embeddings.dtype), embeddings):
        raise DataError(
            "the output matrix differs from the word embeddings (tie_word_embeddings is false); BERT ties them",
            where=decoder_name,
            remedy="use a BERT with tied embeddings",
        )
    bias = renamed.pop(decoder_name.replace("weight", "bias"), None)
    if bias is not None:
        (output_bias,) = huggingface_names(OUTPUT_BIAS, architecture)
        renamed.setdefault(output_bias, bias)
    return renamed


def rms(weight: Tensor) -> float:
    return float(weight.detach().float().square().mean().sqrt())


def fine_tuning_rate(encoder: nn.Module, hidden_size: int) -> float:
    """Return AdamW's learning rate for an encoder, from its width and the RMS of its matrices, to one digit."""
    scale = rms(torch.cat([weight.detach().flatten() for weight in encoder.parameters() if weight.dim() == 2]))
    width_factor = min(1.0, BASE_WIDTH / hidden_size) ** WIDTH_POWER
    return float(f"{BASE_RATE * width_factor * scale / INITIAL_RMS:.0e}")


def export_exponent(word_embeddings: Tensor) -> int:
    """Return the smallest k >= 0 for which word embeddings times 2^-k have an RMS of at most `EXPORTED_RMS`."""
    size = rms(word_embeddings)
    return max(0, math.ceil(math.log2(size / EXPORTED_RMS))) if math.isfinite(size) and size > 0 else 0


def scale_embeddings(tensors: Mapping[str, Tensor], exponent: int) -> dict[str, Tensor]:
    """Multiply all embeddings by 2^-exponent without changing the outputs. Names are those of our parameters.

    Layer normalization after the embeddings removes the factor. The decoder shares the word embeddings, so its input is
    multiplied by 2^exponent. Powers of two are exact, so the negative exponent restores the same weights.
    """
    factors = {f"embeddings.{kind}_embeddings.weight": 2.0**-exponent for kind in ("word", "position", "token_type")}
    factors |= {f"mlm_head.layer_norm.{leaf}": 2.0**exponent for leaf in ("weight", "bias")}
    return {name: tensor * factors[name] if name in factors else tensor for name, tensor in tensors.items()}
