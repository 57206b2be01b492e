"""The two pretraining losses as sums, with what they predicted right.

Sums, because a micro-batch does not know how many tokens the global batch predicts: divided by the true numbers of the
*global* batch, they give the gradient of one big batch however it is cut. The masked-language-model loss takes its
gradient on the way forward, a block of masked rows at a time, so that the logits never exist as a whole: they are by
far the largest tensor of a step, and on CPU the time goes into moving them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.packing import Batch

BLOCK_ROWS = 1024  # masked rows whose logits exist at once in the precision of the matrix product
SOFTMAX_ROWS = {"cpu": 64, "cuda": BLOCK_ROWS}
"""Rows of a block whose logits exist in fp32: few on CPU, so that they stay in the cache."""
ROW_MULTIPLE = 32
"""Masked rows are padded to a multiple of this: on CPU oneDNN keeps code for every shape of a 16-bit product, and is a
fifth slower where the number of rows is odd."""
COLUMN_MULTIPLE = 8
"""The vocabulary is padded to a multiple of this in the working copies, never in the checkpoint: rows of 16-bit logits
are then multiples of 16 bytes long, without which the tensor cores' fast kernels (TMA, vector loads) cannot be used."""
ARGMAX_GROUP = 128
FP16_FACTOR = 128.0
"""fp16 has no numbers below 6e-8; the gradient of an unlikely token's logit, its probability, needs some room."""


class LossSums(NamedTuple):
    """Sums over a micro-batch, each a scalar on the model's device."""

    mlm_loss: Tensor  # over predicted tokens, nats
    nsp_loss: Tensor  # over pairs, nats; 0 without pairs
    mlm_correct: Tensor
    nsp_correct: Tensor

    def mean(self, num_predictions: float | Tensor, num_pairs: float | Tensor) -> Tensor:
        """Return the part of the loss that this micro-batch adds to a global batch of these numbers, at least 1."""
        return self.mlm_loss / num_predictions + self.nsp_loss / num_pairs


class PretrainingLoss(nn.Module):
    """A model and its losses as one module, for DDP to wrap."""

    def __init__(self, model: BertForPreTraining, *, compiled: bool = False) -> None:
        super().__init__()
        self.model, self.compiled = model, compiled

    def forward(self, batch: Batch) -> LossSums:
        return pretraining_loss(self.model, batch, compiled=self.compiled)


def pretraining_loss(model: BertForPreTraining, batch: Batch, *, compiled: bool = False) -> LossSums:
    """Run the model on one micro-batch and return the sums of both losses, or of the one there is without pairs."""
    inputs, weights = (*batch.sequences, batch.masked_positions), _cast_weights(model, compiled)
    features, nsp_logits = functional_call(model, weights, inputs) if weights else model(*inputs)
    features = features[: len(batch.masked_labels)]  # what follows belongs to a dummy tail
    weight, bias = model.embeddings.word_embeddings.weight, model.mlm_head.bias
    mlm_loss, mlm_correct = masked_lm_loss(features, weight, bias, batch.masked_labels, compiled=compiled)
    if batch.next_sentence_labels is None:
        return LossSums(mlm_loss, torch.zeros_like(mlm_loss), mlm_correct, torch.zeros_like(mlm_correct))
    nsp_logits = nsp_logits[: len(batch.next_sentence_labels)].float()
    nsp_loss = F.cross_entropy(nsp_logits, batch.next_sentence_labels, reduction="sum")
    nsp_correct = (nsp_logits.argmax(dim=1) == batch.next_sentence_labels).sum()
    return LossSums(mlm_loss, nsp_loss, mlm_correct, nsp_correct)


def _cast_weights(model: BertForPreTraining, compiled: bool) -> dict[str, Tensor]:
    """Return the weights of the encoder's products in 16 bits, by one operation a layer; none if autocast does it.

    Compiled layers have no part in autocast's cache, and cast each weight by a kernel of its own. A layer that is
    computed again in the backward pass would find its own weights then, so with checkpointing it is left to them.
    """
    if not compiled or not torch.is_autocast_enabled("cuda") or model.encoder.activation_checkpointing:
        return {}
    cast: Any = _Cast.apply
    dtype = torch.get_autocast_dtype("cuda")
    found: dict[str, Tensor] = {}
    for number, layer in enumerate(model.encoder.layers):
        named = {name: each for name, each in layer.named_parameters() if "norm" not in name}
        names = (f"encoder.layers.{number}.{name}" for name in named)
        found |= zip(names, cast(dtype, *named.values()), strict=True)
    return found


class _Cast(torch.autograd.Function):
    """Cast many tensors at once, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        torch._foreach_copy_(found, list(tensors))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
        torch._foreach_copy_(found, list(gradients))
        return (None, *found)


def masked_lm_loss(
    features: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, *, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of `features @ weight.T + bias`, and how many labels have the largest logit.

    `features` are (masked, hidden), `weight` (vocabulary, hidden), `bias` (vocabulary,), `labels` (masked,) int64, with
    `IGNORED` where nothing is predicted. If `compiled`, the softmax of a block is one kernel that the compiler makes.
    """
    device = features.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    with torch.autocast(device, enabled=False):
        loss, correct = _decoder_loss(features, weight, bias, labels, dtype, torch.is_grad_enabled(), compiled)
    return loss, correct


class _DecoderLoss(torch.autograd.Function):
    """Decoder, softmax and cross-entropy in one; `backward` only scales what `forward` has computed."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        dtype: torch.dtype,
        with_gradient: bool,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        num_rows, num_tokens = len(labels), len(bias)
        # The padding is zero, and so are its logits and their gradients: it adds nothing to any product.
        rows = _padded(features, ROW_MULTIPLE, dtype)
        decoder = _padded(weight, COLUMN_MULTIPLE, dtype)
        # exp(-inf) is 0: the columns of the padding have no probability, and hence no gradient.
        bias_row = F.pad(bias.float(), (0, len(decoder) - num_tokens), value=-torch.inf)
        factor = FP16_FACTOR if dtype == torch.float16 else 1.0
        loss, correct = features.new_zeros((), dtype=torch.float32), labels.new_zeros(())
        d_features = torch.zeros(rows.shape, dtype=features.dtype, device=features.device)
        d_bias = torch.zeros_like(bias_row)
        d_weight: Tensor | None = None
        softmax_in_place = _compiled_softmax() if compiled else _softmax_in_place
        # The host may look at labels on CPU only, where leaving out the factors saves time.
        has_tail = labels.device.type != "cpu" or bool((labels < 0).any())
        # Room for one block, used again by every block: fresh memory this large costs as much as the products.
        room = rows.new_empty(min(BLOCK_ROWS, len(rows)), len(decoder))
        num_softmax_rows = SOFTMAX_ROWS.get(features.device.type, BLOCK_ROWS)
        for start in range(0, num_rows, BLOCK_ROWS):
            block = slice(start, min(start + BLOCK_ROWS, len(rows)))
            logits = room[: block.stop - start]
            torch.mm(rows[block], decoder.t(), out=logits)  # (block, columns), the bias still to be added
            targets = labels[block]  # of the real rows
            parts = (torch.split(each, num_softmax_rows) for each in (logits[: len(targets)], targets))
            for part, part_labels in zip(*parts, strict=True):
                part_loss, part_correct = softmax_in_place(
                    part, bias_row, part_labels, factor, d_bias if with_gradient else None, has_tail
                )
                loss += part_loss
                correct += part_correct
            if with_gradient:
                # `logits` now holds the gradient with respect to the logits.
                d_features[block] = torch.mm(logits, decoder)
                block_d_weight = _product_in_fp32(logits.t(), rows[block])
                d_weight = block_d_weight if d_weight is None else d_weight.add_(block_d_weight)
        if with_gradient:
            d_weight = weight.new_zeros(decoder.shape, dtype=torch.float32) if d_weight is None else d_weight
            ctx.save_for_backward(d_features[:num_rows], d_weight[:num_tokens], d_bias[:num_tokens])
            ctx.factor = factor
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        scale = gradients[0] / ctx.factor
        d_features, d_weight, d_bias = ctx.saved_tensors
        return d_features * scale, d_weight.mul_(scale), d_bias.mul_(scale), None, None, None, None


def _padded(matrix: Tensor, multiple: int, dtype: torch.dtype) -> Tensor:
    """Return a matrix in another type, with rows of zeros up to a multiple of some number of rows."""
    missing = -len(matrix) % multiple
    if not missing:
        return matrix.to(dtype)
    padded = matrix.new_empty(len(matrix) + missing, matrix.shape[1], dtype=dtype)
    padded[: len(matrix)] = matrix
    padded[len(matrix) :] = 0.0
    return padded


@functools.cache
def _compiled_softmax(backend: str | Callable[..., Any] = "inductor") -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `_softmax_in_place` compiled once for any number of rows; the vocabulary is a constant of the kernel."""
    softmax = torch.compile(_softmax_in_place, backend=backend, fullgraph=True)

    def compiled(logits: Tensor, bias: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        for tensor in (logits, labels):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return softmax(logits, bias, labels, *rest)

    return compiled


_decoder_loss: Callable[..., tuple[Tensor, Tensor]] = _DecoderLoss.apply


def _softmax_in_place(
    logits: Tensor, bias: Tensor, labels: Tensor, factor: float, d_bias: Tensor | None, has_tail: bool
) -> tuple[Tensor, Tensor]:
    """Return loss and correct counts of some rows, and turn their logits into `factor` times their gradient.

    `logits`, (rows, columns), lack `bias`, (columns,) fp32, -inf in the columns that pad the vocabulary; `labels` are
    (rows,) int64. The gradient's sum over rows is added to `d_bias`, (columns,); without it nothing is overwritten.
    With `has_tail`, rows may be labelled `IGNORED`, and have no loss and no gradient.
    """
    targets = labels[:, None]
    is_real = targets >= 0
    if has_tail:
        targets = targets.clamp(min=0)
    wide = logits.float().add_(bias)  # (rows, columns): the softmax is taken in fp32
    likeliest = _argmax(wide)
    target_logits, largest = wide.gather(1, targets), wide.gather(1, likeliest)
    correct = (likeliest == labels[:, None]).sum()
    probabilities = wide.softmax(dim=1)
    # The largest probability is 1 / sum(exp(logit - largest)), which is never near 0.
    losses = largest - probabilities.gather(1, likeliest).log() - target_logits
    loss = (losses.where(is_real, 0.0) if has_tail else losses).sum()
    if d_bias is not None:
        probabilities.scatter_add_(1, targets, torch.full_like(largest, -1.0))
        gradient = probabilities.mul_(factor) if factor != 1.0 else probabilities
        if has_tail:
            gradient *= is_real
        d_bias += gradient.sum(dim=0)
        logits.copy_(gradient)
    return loss, correct


def _product_in_fp32(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two matrices of any precision in fp32: fp16 overflows where many rows add up."""
    if left.dtype == torch.float32:
        return torch.mm(left, right)
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    # On CPU no product of 16 bits gives 32; bf16 at least has their range.
    return torch.mm(left, right).float() if left.dtype == torch.bfloat16 else torch.mm(left.float(), right.float())


def _argmax(values: Tensor) -> Tensor:
    """Return the index of the first largest value of each row, (rows, 1)."""
    rows, columns = values.shape
    if values.device.type != "cpu" or columns < 2 * ARGMAX_GROUP:
        return values.argmax(dim=1, keepdim=True)
    # On CPU the largest value is found eight times faster than its index, so search groups of columns first.
    whole = columns - columns % ARGMAX_GROUP
    largest = values[:, :whole].view(rows, -1, ARGMAX_GROUP).amax(dim=2)  # (rows, groups)
    # The last group may overlap the one before, which wins a tie: it comes first.
    largest = torch.cat([largest, values[:, -ARGMAX_GROUP:].amax(dim=1, keepdim=True)], dim=1)
    begin = (largest.argmax(dim=1, keepdim=True) * ARGMAX_GROUP).clamp(max=columns - ARGMAX_GROUP)  # (rows, 1)
    group = values.gather(1, begin + torch.arange(ARGMAX_GROUP))  # (rows, ARGMAX_GROUP)
    return begin + group.argmax(dim=1, keepdim=True)
