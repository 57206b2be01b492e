"""Choose compilation and the size of micro-batches."""

import functools
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_pretrain.config import ModelConfig, TrainConfig
from bert_pretrain.io import cores
from bert_pretrain.model.attention import Layout
from bert_pretrain.model.bert import BertForPreTraining, Encoder
from bert_pretrain.train.decoder_loss import BLOCK_ROWS, SOFTMAX_ROWS
from bert_pretrain.train.optimizers import is_hidden_matrix

CPU_MICRO_BATCH_TOKENS = 4096  # more tokens, up to 16,384, are equally fast and need more memory
CPU_ACTIVATION_BYTES = 3 * 2**29  # limit of the activations that a micro-batch on CPU keeps for its backward pass
OPERATIONS_FUSED = 100  # number of operations that Inductor may fuse into one kernel; its default is 30


def choose_compile(setting: bool | str, device: torch.device, attention: str) -> tuple[bool, str]:
    """Return whether to compile layers, and the reason as text."""
    if setting is False:
        return False, "as configured"
    if device.type != "cuda":
        return False, "only useful on CUDA"
    if attention == "padded":
        return False, "attention pads to the longest sequence, so shapes differ between batches"
    if missing := _missing_for_triton():
        return False, f"Triton needs {missing}"
    return True, "shapes are nearly the same in every batch"


def _missing_for_triton() -> str:
    """Return what this machine lacks to compile with Triton, or "" if nothing is missing."""
    if importlib.util.find_spec("triton") is None:
        return "its package"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler"
    # Debian's `posix_local` has no headers; Triton makes the same exception.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    has_headers = Path(sysconfig.get_paths(scheme=scheme)["include"], "Python.h").is_file()
    return "" if has_headers else "Python.h (package python3-dev)"


def compile_layers(
    model: BertForPreTraining,
    backend: str | Callable[..., Any] = "inductor",
    *,
    strict: bool = False,
) -> None:
    """Compile the forward and backward pass of each layer at its first call with gradients.

    All layers share one graph, for any number of tokens and sequences. For the first micro-batch with more than about
    5 million / hidden size tokens, Inductor compiles the graph a second time, with more fusion. `strict` forbids graph
    breaks.
    """
    if cores.owns_process:
        from torch._inductor import config as inductor_config  # slow to import

        # By default the compiler stops after eight versions, splits layers at the size of DDP's buckets, and stores
        # GELU's gradient in fp32. Another program that imports this package keeps its settings.
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.optimize_ddp = False
        if model.mlm_head.bias.device.type == "cuda":
            inductor_config.realize_opcount_threshold = OPERATIONS_FUSED
    layers = [layer for encoder in model.modules() if isinstance(encoder, Encoder) for layer in encoder.layers]
    for module in (model.embeddings, *layers, model.mlm_head):
        module.forward = _compiled(module.forward, backend, strict)


def _compiled(forward: Callable[..., Tensor], backend: str | Callable[..., Any], strict: bool) -> Callable[..., Tensor]:
    """Compile a function for training, with a dynamic first dimension of every input.

    Otherwise the compiler specializes on the first length and recompiles at the second. `dynamic=True` would also make
    the widths of matrices dynamic. Without gradients the layer runs uncompiled, because compiling takes longer than an
    evaluation.
    """
    compiled = torch.compile(forward, backend=backend, fullgraph=strict)

    def marked(*inputs: Tensor | Layout) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        for each in inputs:
            for tensor in vars(each).values() if isinstance(each, Layout) else (each,):
                if isinstance(tensor, Tensor):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
        result: Tensor = compiled(*inputs)
        return result

    return marked


def choose_micro_batch_tokens(
    config: TrainConfig,
    model: BertForPreTraining,
    max_seq_length: int,
    device: torch.device,
    dtype: torch.dtype,
    num_ranks: int = 1,
    teacher: BertForPreTraining | None = None,
) -> int:
    """Return the maximum number of tokens of a micro-batch: as configured, or as many as fit into memory.

    `teacher` is that of a distillation. Its weights may be on the device "meta".
    """
    if config.micro_batch_tokens != "auto":
        return config.micro_batch_tokens
    batch_tokens = -(-config.global_batch_size // num_ranks) * max_seq_length
    kept, backward, kept_at_logits = activation_bytes_per_token(
        model,
        max_seq_length,
        dtype,
        config.activation_checkpointing,
    )
    if device.type == "cpu":
        max_tokens = min(CPU_MICRO_BATCH_TOKENS, CPU_ACTIVATION_BYTES // (kept + backward))
    else:
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached by PyTorch
        # `state_bytes` includes the weights, which may be on the device already.
        free += sum(4 * each.numel() for each in model.parameters() if each.device.type == "cuda")
        if teacher is not None:  # its hidden states are freed before those of the student are kept
            free -= (4 + dtype.itemsize) * teacher.num_parameters + logits_bytes(teacher, dtype)
        used_share = 0.8  # the estimate is within 15 % of the peak, and memory is fragmented
        room = used_share * (free - state_bytes(config, model, dtype))
        # The logits of a block and the backward pass of a layer do not exist at the same time.
        with_logits = (room - used_share * logits_bytes(model, dtype)) / kept_at_logits
        max_tokens = int(min(with_logits, room / (kept + backward)))
    return max(max_seq_length, min(max_tokens, batch_tokens))


def state_bytes(config: TrainConfig, model: BertForPreTraining, dtype: torch.dtype) -> int:
    """Return the bytes of weights, their copies in 16 bits, gradients and the optimizer state."""
    moments = 0
    for name, parameter in model.named_parameters():
        is_muons = config.optimizer == "muon" and is_hidden_matrix(name)
        moments += parameter.numel() * (4 if is_muons else 8)
    copies = 2 if dtype.itemsize == 2 else 0
    return moments + (8 + copies) * model.num_parameters


def logits_bytes(model: BertForPreTraining, dtype: torch.dtype) -> int:
    """Return the bytes that the masked-language-model loss needs on CUDA for a block of masked positions.

    They are the logits of a block in `dtype`, two fp32 copies of `SOFTMAX_ROWS` rows of logits, the matrix of the
    decoder in `dtype`, and two fp32 gradients of this matrix.
    """
    rows = dtype.itemsize * BLOCK_ROWS["cuda"] + 8 * SOFTMAX_ROWS["cuda"]
    return model.vocab_size * (rows + (dtype.itemsize + 8) * model.config.embedding_width)


def activation_bytes_per_token(
    model: BertForPreTraining,
    max_seq_length: int,
    dtype: torch.dtype,
    checkpointing: bool = False,
) -> tuple[int, int, int]:
    """Return the bytes per token kept for the backward pass, what one layer's backward pass adds, and what is kept when
    the logits of masked tokens are computed.

    A layer of hidden size H and intermediate size I keeps per token: the inputs of its layer norms in fp32 (8 H bytes);
    inputs of matrix products, query, key, value and output projection (7 H values); inputs and outputs of GELU (2 I
    values); dropout masks (2 H bytes). ModernBERT also keeps turned queries and keys, the gate and its product, and its
    hidden states in fp32. Attention with padding also keeps its padded context, and one row of probabilities per head;
    dropout adds a copy of the row and a mask. With activation checkpointing, all layers keep their input (H values) and
    one layer at a time keeps the rest. ELECTRA also keeps those of its generator, whose logits are computed first, and
    2 H values in the discriminator's head. Tests compare the estimate with traces of steps.
    """
    config = model.config
    estimate = functools.partial(
        _activation_bytes,
        attention=model.attention_backend,
        max_seq_length=max_seq_length,
        width=dtype.itemsize,
        checkpointing=checkpointing,
    )
    kept, backward = estimate(config)
    if not config.is_electra:
        return kept, backward, kept
    generator, _ = estimate(config.generator)
    return kept + generator + 2 * dtype.itemsize * config.hidden_size, backward, generator


def _activation_bytes(
    config: ModelConfig,
    *,
    attention: str,
    max_seq_length: int,
    width: int,
    checkpointing: bool,
) -> tuple[int, int]:
    """Return the bytes per token of one encoder. `width` is that of an activation in bytes."""
    hidden = config.hidden_size
    masks = 2 if config.hidden_dropout_prob > 0 else 0
    layer = (8 + 7 * width + masks) * hidden + 2 * width * config.intermediate_size
    input_bytes = width * hidden
    if config.is_modern:
        layer += width * hidden + 2 * width * config.intermediate_size
        input_bytes = 4 * hidden
    if attention == "padded":
        row = 2 * width + 1 if config.attention_probs_dropout_prob > 0 else width
        layer += width * hidden + row * config.num_attention_heads * max_seq_length
    ends = 8 * hidden  # the embeddings before and after layer norm, and the few masked positions in the head
    backward = 10 * hidden  # the gradients of hidden states and of an intermediate activation
    if checkpointing:
        return config.num_hidden_layers * input_bytes + ends, layer + backward
    return config.num_hidden_layers * layer + ends, backward
