"""The two pretraining losses as sums over a micro-batch, with the numbers of correct predictions.

The sums are later divided by the number of predictions in the global batch, not in the micro-batch, so that the
gradient does not depend on the division into micro-batches.

The masked language modeling loss computes its gradient in the forward pass, one block of masked rows at a time. The
full logits would be by far the largest tensor of a step, and are never in memory. In training it may use a sampled
softmax, see `candidates.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.candidates import Candidates
from bert_pretrain.train.packing import Batch

# Maximum rows of logits in memory, and of fp32 logits without compilation. Few on CPU, to fit the cache.
BLOCK_ROWS, SOFTMAX_ROWS = {"cpu": 1024, "cuda": 4096}, {"cpu": 64, "cuda": 1024}
ROW_MULTIPLE = 32  # pads masked rows: oneDNN generates code for each shape, and is slower for odd numbers of rows
COLUMN_MULTIPLE = 8  # pads the vocabulary: fast tensor core kernels need rows of logits that are a multiple of 16 bytes
ARGMAX_GROUP = 128
FP16_FACTOR = 128.0  # scales gradients of logits: those of unlikely tokens may be below 6e-8, the minimum of fp16


class LossSums(NamedTuple):
    """Sums over a micro-batch, each a scalar on the model's device."""

    mlm_loss: Tensor  # nats, over masked tokens
    nsp_loss: Tensor  # nats, over sentence pairs; 0 without pairs
    mlm_correct: Tensor
    nsp_correct: Tensor

    def mean(self, num_predictions: float | Tensor, num_pairs: float | Tensor) -> Tensor:
        """Return this micro-batch's part of the mean loss of a global batch. Both counts must be at least 1."""
        return self.mlm_loss / num_predictions + self.nsp_loss / num_pairs


class PretrainingLoss(nn.Module):
    """Model and losses in one module, for DDP to wrap."""

    def __init__(self, model: BertForPreTraining, *, compiled: bool = False) -> None:
        super().__init__()
        self.model, self.compiled = model, compiled

    def forward(self, batch: Batch) -> LossSums:
        return pretraining_loss(self.model, batch, compiled=self.compiled and torch.is_grad_enabled())


def pretraining_loss(model: BertForPreTraining, batch: Batch, *, compiled: bool = False) -> LossSums:
    """Run the model on one micro-batch and return its losses. Without sentence pairs, `nsp_loss` is 0."""
    inputs, weights = (*batch.sequences, batch.masked_positions), _cast_weights(model, compiled)
    features, nsp_logits = functional_call(model, weights, inputs) if weights else model(*inputs)
    features = features[: len(batch.masked_labels)]  # drop dummy rows at the end
    weight, bias = model.embeddings.word_embeddings.weight, model.mlm_head.bias
    labels, candidates = batch.masked_labels, batch.candidates
    mlm_loss, mlm_correct = masked_lm_loss(features, weight, bias, labels, candidates, compiled=compiled)
    if batch.next_sentence_labels is None:
        return LossSums(mlm_loss, torch.zeros_like(mlm_loss), mlm_correct, torch.zeros_like(mlm_correct))
    nsp_logits = nsp_logits[: len(batch.next_sentence_labels)].float()
    nsp_loss = F.cross_entropy(nsp_logits, batch.next_sentence_labels, reduction="sum")
    nsp_correct = (nsp_logits.argmax(dim=1) == batch.next_sentence_labels).sum()
    return LossSums(mlm_loss, nsp_loss, mlm_correct, nsp_correct)


def _cast_weights(model: BertForPreTraining, compiled: bool) -> dict[str, Tensor]:
    """Cast the encoder's matrices and biases to 16 bits, one operation per layer. Return {} to leave it to autocast.

    Compiled layers do not use autocast's cache and would cast each weight with a separate kernel. With activation
    checkpointing, recomputed layers use the original weights, so autocast must cast those.
    """
    if not compiled or not torch.is_autocast_enabled("cuda") or model.encoder.activation_checkpointing:
        return {}
    cast: Any = _Cast.apply
    dtype = torch.get_autocast_dtype("cuda")
    weights: dict[str, Tensor] = {}
    for index, layer in enumerate(model.encoder.layers):
        originals = {name: weight for name, weight in layer.named_parameters() if "norm" not in name}
        names = (f"encoder.layers.{index}.{name}" for name in originals)
        weights |= zip(names, cast(dtype, *originals.values()), strict=True)
    return weights


class _Cast(torch.autograd.Function):
    """Cast several tensors with one operation, and their gradients back to fp32."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        torch._foreach_copy_(results, list(tensors))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        results = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
        torch._foreach_copy_(results, list(gradients))
        return (None, *results)


def masked_lm_loss(
    features: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, candidates: Candidates | None = None, *,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the summed cross-entropy of `features @ weight.T + bias` and the number of correct predictions.

    `features` is (masked, hidden), `weight` (vocabulary, hidden), `bias` (vocabulary,) and `labels` (masked,) int64.
    Rows with the label `IGNORE_INDEX` are skipped. With `candidates`, both results are estimates of a sampled softmax.
    With `compiled`, the softmax on CUDA is a kernel of `torch.compile`.
    """
    if candidates is None:
        return _decoder_loss(features, weight, bias, labels, None, compiled)
    token_ids, log_probabilities = candidates
    number, label_ids = len(token_ids), labels.clamp(min=0)
    selected = torch.cat([token_ids, label_ids])
    rows, biases = weight.index_select(0, selected), bias.index_select(0, selected)
    label_logits = (features.float() * rows[number:]).sum(dim=1) + biases[number:]
    column_of = torch.full_like(bias, number, dtype=torch.int64)  # (vocabulary,)
    column_of[token_ids] = torch.arange(number, device=bias.device)
    label_column = LabelLogits(label_logits, column_of[label_ids])
    targets = torch.where(labels < 0, labels, number)
    candidate_bias = biases[:number] - log_probabilities
    return _decoder_loss(features, rows[:number], candidate_bias, targets, label_column, compiled)


class LabelLogits(NamedTuple):
    """Logits of the labels of a sampled softmax. They form a column after the columns of the candidates."""

    logits: Tensor  # (masked,) float32
    excluded: Tensor  # (masked,) int64: column of the label as a candidate; its own column if it is not a candidate


def _decoder_loss(
    features: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, label_column: LabelLogits | None, compiled: bool
) -> tuple[Tensor, Tensor]:
    """Return the loss and the number of correct predictions.

    With `label_column`, a label is the index of that column, `len(weight)`, or `IGNORE_INDEX`.
    """
    device = features.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    logits, excluded = label_column or (None, None)
    with torch.autocast(device, enabled=False):
        apply: Callable[..., tuple[Tensor, Tensor]] = _DecoderLoss.apply
        return apply(features, weight, bias, logits, labels, excluded, dtype, torch.is_grad_enabled(), compiled)


class _DecoderLoss(torch.autograd.Function):
    """Output layer, softmax and cross-entropy; `forward` computes the gradients, `backward` only scales them."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor, label_logits: Tensor | None,
        labels: Tensor, excluded: Tensor | None, dtype: torch.dtype, with_gradient: bool, compiled: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        num_rows, num_tokens = len(labels), len(bias)
        # Padding is zero, so it adds nothing to any product.
        rows = _padded(features, ROW_MULTIPLE, dtype)
        decoder = _padded(weight, COLUMN_MULTIPLE, dtype, extra_rows=0 if label_logits is None else 1)
        # Padded columns get probability exp(-inf) = 0 and hence no gradient.
        bias_row = F.pad(bias.float(), (0, len(decoder) - num_tokens), value=-torch.inf)
        factor = FP16_FACTOR if dtype == torch.float16 else 1.0
        loss, correct = features.new_zeros((), dtype=torch.float32), labels.new_zeros(())
        d_features = torch.zeros(rows.shape, dtype=features.dtype, device=features.device)
        d_bias = torch.zeros_like(bias_row)
        d_weight: Tensor | None = None
        d_label_logits = None if label_logits is None else torch.zeros_like(label_logits)
        # The labels of a batch's tail are `IGNORE_INDEX`. Without a tail the softmax is faster. On CUDA a tail is
        # assumed, because reading the labels would wait for the device.
        has_tail = labels.device.type != "cpu" or bool((labels < 0).any())
        block_rows, softmax_rows = BLOCK_ROWS[features.device.type], SOFTMAX_ROWS[features.device.type]
        # All blocks share a buffer, because its allocation takes as long as the matrix products.
        buffer = rows.new_empty(min(block_rows, len(rows)), len(decoder))
        for start in range(0, num_rows, block_rows):
            block = slice(start, min(start + block_rows, len(rows)))
            logits = buffer[: block.stop - start]
            torch.mm(rows[block], decoder.t(), out=logits)  # (block, columns), without the bias
            targets = labels[block]  # excludes padding rows
            label_column: tuple[Tensor, ...] = ()
            if label_logits is not None and excluded is not None:
                label_column = label_logits[block], excluded[block]
            if compiled and features.device.type == "cuda":
                results = [_compiled_softmax()(logits[: len(targets)], bias_row, targets, factor, *label_column)]
                # Eight equal rows of ones, because a product with one row is slower.
                d_bias += _product_in_fp32(rows.new_ones(8, len(logits)), logits)[0]
            else:
                parts = (torch.split(each, softmax_rows) for each in (logits[: len(targets)], targets, *label_column))
                settings = factor, d_bias if with_gradient else None, has_tail
                results = [
                    _softmax_in_place(part, bias_row, part_labels, *settings, *part_column)
                    for part, part_labels, *part_column in zip(*parts, strict=True)
                ]
            for part_loss, part_correct in results:
                loss += part_loss
                correct += part_correct
            if with_gradient:  # `logits` now holds its gradient
                d_features[block] = torch.mm(logits, decoder)
                block_d_weight = _product_in_fp32(logits.t(), rows[block])
                d_weight = block_d_weight if d_weight is None else d_weight.add_(block_d_weight)
                if d_label_logits is not None:
                    d_label_logits[block] = logits[: len(targets), num_tokens]
        if with_gradient:
            d_weight = weight.new_zeros(decoder.shape, dtype=torch.float32) if d_weight is None else d_weight
            ctx.save_for_backward(d_features[:num_rows], d_weight[:num_tokens], d_bias[:num_tokens], d_label_logits)
            ctx.factor = factor
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0] / ctx.factor
        d_features, d_weight, d_bias, d_label_logits = ctx.saved_tensors
        d_label_logits = None if d_label_logits is None else d_label_logits * scale
        return d_features * scale, d_weight.mul_(scale), d_bias.mul_(scale), d_label_logits, *[None] * 5


def _padded(matrix: Tensor, multiple: int, dtype: torch.dtype, extra_rows: int = 0) -> Tensor:
    """Cast a matrix to `dtype`, and append `extra_rows` rows of zeros and more up to a multiple of `multiple` rows."""
    missing = extra_rows + -(len(matrix) + extra_rows) % multiple
    if not missing:
        return matrix.to(dtype)
    padded = matrix.new_empty(len(matrix) + missing, matrix.shape[1], dtype=dtype)
    padded[: len(matrix)] = matrix
    padded[len(matrix) :] = 0.0
    return padded


@functools.cache
def _compiled_softmax(backend: str | Callable[..., Any] = "inductor") -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `_fused_softmax_in_place`, compiled for any number of rows and a fixed vocabulary."""
    softmax = torch.compile(_fused_softmax_in_place, backend=backend, fullgraph=True)

    def compiled(
        logits: Tensor, bias: Tensor, labels: Tensor, factor: float, *label_column: Tensor
    ) -> tuple[Tensor, Tensor]:
        for tensor in (logits, labels, *label_column):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return softmax(logits, bias, labels, factor, *label_column)

    return compiled


def _fused_softmax_in_place(
    logits: Tensor, bias: Tensor, labels: Tensor, factor: float,
    label_logits: Tensor | None = None, excluded: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Do the same as `_softmax_in_place` without `d_bias`, in one kernel.

    The caller sums the 16-bit gradient over rows by a matrix product, which is faster than a sum in a kernel.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    is_target = columns == labels[:, None]  # nowhere if `IGNORE_INDEX`
    fp32_logits = logits.float() + bias  # (rows, columns); the compiler does not store it
    if label_logits is not None and excluded is not None:
        fp32_logits = fp32_logits.masked_fill(columns == excluded[:, None], -torch.inf)
        fp32_logits = torch.where(is_target, label_logits[:, None], fp32_logits)
    is_real = labels >= 0
    largest = fp32_logits.amax(dim=1, keepdim=True)
    exponentials = (fp32_logits - largest).exp()
    sums = exponentials.sum(dim=1, keepdim=True)
    target_logits = fp32_logits.masked_fill(~is_target, 0.0).sum(dim=1)
    loss = ((largest + sums.log())[:, 0] - target_logits).masked_fill(~is_real, 0.0).sum()
    correct = (fp32_logits.argmax(dim=1) == labels).sum()
    gradient = (exponentials / sums - is_target.float()) * factor
    logits.copy_(gradient.masked_fill(~is_real[:, None], 0.0))
    return loss, correct


def _softmax_in_place(
    logits: Tensor, bias: Tensor, labels: Tensor, factor: float, d_bias: Tensor | None, has_tail: bool,
    label_logits: Tensor | None = None, excluded: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the summed loss and the number of correct rows, and replace the logits by `factor` times their gradient.

    `logits` is (rows, columns) without the bias; `bias` is (columns,) fp32 and -inf in padded columns; `labels` is
    (rows,) int64. The sum of these gradients over rows is added to `d_bias`, (columns,). If `d_bias` is None, there is
    no gradient. `has_tail` allows rows with the label `IGNORE_INDEX`, which have neither loss nor gradient. The last
    two arguments are those of `LabelLogits`.
    """
    targets = labels[:, None]
    is_real = targets >= 0
    if has_tail:
        targets = targets.clamp(min=0)
    fp32_logits = logits.float().add_(bias)  # (rows, columns)
    if label_logits is not None and excluded is not None:
        fp32_logits.scatter_(1, excluded[:, None], -torch.inf).scatter_(1, targets, label_logits[:, None])
    likeliest = _argmax(fp32_logits)
    target_logits, largest = fp32_logits.gather(1, targets), fp32_logits.gather(1, likeliest)
    correct = (likeliest == labels[:, None]).sum()
    probabilities = fp32_logits.softmax(dim=1)
    # The largest probability is 1 / sum(exp(logit - largest)), which is never near 0, so its log is accurate.
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
    """Return the product of two matrices in fp32, because sums over many rows overflow fp16."""
    if left.dtype == torch.float32:
        return torch.mm(left, right)
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    # CPU products of 16-bit matrices are 16-bit. bf16 cannot overflow and is cast after the product, fp16 before.
    return torch.mm(left, right).float() if left.dtype == torch.bfloat16 else torch.mm(left.float(), right.float())


def _argmax(values: Tensor) -> Tensor:
    """Return the index of the first largest value of each row, (rows, 1)."""
    rows, columns = values.shape
    if values.device.type != "cpu" or columns < 2 * ARGMAX_GROUP:
        return values.argmax(dim=1, keepdim=True)
    # On CPU `amax` is 8 × faster than `argmax`, so find the group of columns with the largest value first.
    in_groups = columns - columns % ARGMAX_GROUP
    largest = values[:, :in_groups].view(rows, -1, ARGMAX_GROUP).amax(dim=2)  # (rows, groups)
    # The last group may overlap the one before it. On a tie argmax returns the earlier one.
    largest = torch.cat([largest, values[:, -ARGMAX_GROUP:].amax(dim=1, keepdim=True)], dim=1)
    begin = (largest.argmax(dim=1, keepdim=True) * ARGMAX_GROUP).clamp(max=columns - ARGMAX_GROUP)  # (rows, 1)
    group = values.gather(1, begin + torch.arange(ARGMAX_GROUP))  # (rows, ARGMAX_GROUP)
    return begin + group.argmax(dim=1, keepdim=True)
