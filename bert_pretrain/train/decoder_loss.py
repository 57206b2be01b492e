"""Output layer, softmax and cross-entropy of masked tokens, one block of rows at a time.

The gradient is computed in the forward pass. The full logits would be by far the largest tensor of a step, and are
never in memory.

The distribution of a teacher may be a second target of each row. It is computed for the same rows.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Maximum rows of logits in memory, and of fp32 logits without compilation. Few on CPU, to fit the cache.
BLOCK_ROWS = {"cpu": 1024, "cuda": 4096}
SOFTMAX_ROWS = {"cpu": 64, "cuda": 1024}
ROW_MULTIPLE = 32  # pads masked rows: oneDNN generates code for each shape, and is slower for odd numbers of rows
COLUMN_MULTIPLE = 8  # pads the vocabulary: fast tensor core kernels need rows of logits that are a multiple of 16 bytes
ARGMAX_GROUP = 128
TEMPERATURE = 2.0  # softens the distributions of teacher and student, as in DistilBERT
TEACHER_RATIO = 2.5  # weight of the loss against the teacher's distribution, as a multiple of that against the labels
FP16_FACTOR = 128.0  # scales gradients of logits: those of unlikely tokens may be below 6e-8, the minimum of fp16


class Targets(NamedTuple):
    """The labels of rows of logits. Rows with the label `IGNORE_INDEX` are skipped.

    The labels of a sampled softmax have a column of their own, after the columns of the candidates.
    """

    labels: Tensor  # (rows,) int64: column of the label
    logits: Tensor | None = None  # (rows,) float32: values of the labels' own column
    excluded: Tensor | None = None  # (rows,) int64: column that a row leaves out before its label's logit is written
    teacher_features: Tensor | None = None  # (rows, teacher's hidden)
    teacher_logits: Tensor | None = None  # (rows,) float32: the teacher's `logits`

    def at(self, rows: slice) -> "Targets":
        return Targets(*(None if column is None else column[rows] for column in self))  # type: ignore[arg-type]


class TeacherLayer(NamedTuple):
    """The output layer of a teacher."""

    weight: Tensor  # (columns, teacher's hidden)
    bias: Tensor  # (columns,)
    correction: Tensor  # (columns,) float32: added to the softened logits of teacher and student

    def padded(self, num_columns: int, dtype: torch.dtype) -> "TeacherLayer":
        """Cast the matrix, and append columns of probability 0."""
        missing = num_columns - len(self.bias)
        return TeacherLayer(
            F.pad(self.weight.to(dtype), (0, 0, 0, missing)),
            F.pad(self.bias.float(), (0, missing), value=-torch.inf),
            F.pad(self.correction, (0, missing)),
        )


def decoder_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Targets,
    *,
    teacher: TeacherLayer | None = None,
    compiled: bool = False,
) -> tuple[Tensor, ...]:
    """Return the summed cross-entropy of `features @ weight.T + bias` and the number of correct predictions.

    With a teacher, also return the sum of `_teacher_losses`. The gradient of the cross-entropy then includes
    `TEACHER_RATIO` times that of this sum, which itself has none.

    `features` is (rows, hidden), `weight` (columns, hidden) and `bias` (columns,). With `compiled`, the softmax on CUDA
    is a kernel of `torch.compile`.
    """
    device = features.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    settings = _Settings(
        dtype,
        torch.is_grad_enabled(),
        compiled and device == "cuda" and teacher is None,
        teacher,
    )
    with torch.autocast(device, enabled=False):
        apply: Callable[..., tuple[Tensor, ...]] = _DecoderLoss.apply
        return apply(
            features,
            weight,
            bias,
            targets.logits,
            targets,
            settings,
        )


class _Settings(NamedTuple):
    dtype: torch.dtype  # of the matrix products
    with_gradient: bool
    compiled: bool
    teacher: TeacherLayer | None

    @property
    def factor(self) -> float:
        """Factor of the gradients of logits, which `backward` undoes."""
        return FP16_FACTOR if self.dtype == torch.float16 else 1.0


class _DecoderLoss(torch.autograd.Function):
    """`forward` computes the gradients, `backward` only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor,
        label_logits: Tensor | None,  # `targets.logits`, which have a gradient
        targets: Targets,
        settings: _Settings,
    ) -> tuple[Tensor, ...]:
        num_rows, num_columns = len(features), len(bias)
        # Padding is zero, so it adds nothing to any product.
        rows = _padded(features, ROW_MULTIPLE, settings.dtype)
        decoder = _padded(weight, COLUMN_MULTIPLE, settings.dtype, extra_rows=0 if label_logits is None else 1)
        # Padded columns get probability exp(-inf) = 0 and hence no gradient.
        bias_row = F.pad(bias.float(), (0, len(decoder) - num_columns), value=-torch.inf)
        loss = features.new_zeros((), dtype=torch.float32)
        correct = targets.labels.new_zeros(())
        totals = [loss, correct]
        if settings.teacher is not None:
            settings = settings._replace(teacher=settings.teacher.padded(len(decoder), settings.dtype))
            totals.append(torch.zeros_like(loss))
        d_features = torch.zeros(rows.shape, dtype=features.dtype, device=features.device)
        d_weight: Tensor | None = None
        d_bias = torch.zeros_like(bias_row)
        d_label_logits = None if label_logits is None else torch.zeros_like(label_logits)
        # The labels of a batch's tail are `IGNORE_INDEX`. Without a tail the softmax is faster. On CUDA a tail is
        # assumed, because reading the labels would wait for the device.
        has_tail = features.device.type != "cpu" or bool((targets.labels < 0).any())
        block_rows = BLOCK_ROWS[features.device.type]
        # All blocks share a buffer, because its allocation takes as long as the matrix products.
        buffer = rows.new_empty(min(block_rows, len(rows)), len(decoder))
        for start in range(0, num_rows, block_rows):
            block = slice(start, min(start + block_rows, len(rows)))
            logits = buffer[: block.stop - start]
            torch.mm(rows[block], decoder.t(), out=logits)  # (block, columns), without the bias
            for parts in _softmax(
                logits,
                bias_row,
                targets.at(block),
                d_bias,
                has_tail,
                settings,
            ):
                for total, part in zip(totals, parts, strict=True):
                    total += part
            if settings.with_gradient:  # `logits` now holds its gradient
                d_features[block] = torch.mm(logits, decoder)
                block_d_weight = _product_in_fp32(logits.t(), rows[block])
                d_weight = block_d_weight if d_weight is None else d_weight.add_(block_d_weight)
                if d_label_logits is not None:
                    d_label_logits[block] = logits[: num_rows - start, num_columns]
        if settings.with_gradient:
            d_weight = weight.new_zeros(decoder.shape, dtype=torch.float32) if d_weight is None else d_weight
            ctx.save_for_backward(d_features[:num_rows], d_weight[:num_columns], d_bias[:num_columns], d_label_logits)
            ctx.factor = settings.factor
        ctx.mark_non_differentiable(*totals[1:])
        return tuple(totals)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0] / ctx.factor
        d_features, d_weight, d_bias, d_label_logits = ctx.saved_tensors
        d_label_logits = None if d_label_logits is None else d_label_logits * scale
        return d_features * scale, d_weight.mul_(scale), d_bias.mul_(scale), d_label_logits, None, None


def _softmax(
    logits: Tensor,
    bias: Tensor,
    targets: Targets,
    d_bias: Tensor,
    has_tail: bool,
    settings: _Settings,
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the results of `_softmax_in_place` for parts of a block.

    The block may have rows of padding after those of `targets`. Their gradient is that of zeros, which is zero.
    """
    num_rows = len(targets.labels)
    if settings.compiled:
        yield _compiled_softmax()(logits[:num_rows], bias, targets, settings.factor)
        # Eight equal rows of ones, because a product with one row is slower.
        d_bias += _product_in_fp32(logits.new_ones(8, len(logits)), logits)[0]
        return
    part_rows = SOFTMAX_ROWS[logits.device.type]
    for start in range(0, num_rows, part_rows):
        part = slice(start, min(start + part_rows, num_rows))
        yield _softmax_in_place(
            logits[part],
            bias,
            targets.at(part),
            settings.factor,
            d_bias if settings.with_gradient else None,
            has_tail,
            settings.teacher,
        )


def _padded(
    matrix: Tensor,
    multiple: int,
    dtype: torch.dtype,
    extra_rows: int = 0,
) -> Tensor:
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
        logits: Tensor,
        bias: Tensor,
        targets: Targets,
        factor: float,
    ) -> tuple[Tensor, Tensor]:
        for tensor in (logits, *targets):
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return softmax(logits, bias, targets, factor)

    return compiled


def _fused_softmax_in_place(
    logits: Tensor,
    bias: Tensor,
    targets: Targets,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """Do the same as `_softmax_in_place` without `d_bias`, in one kernel.

    The caller sums the 16-bit gradient over rows by a matrix product, which is faster than a sum in a kernel.
    """
    labels = targets.labels
    columns = torch.arange(logits.shape[1], device=logits.device)
    is_target = columns == labels[:, None]  # nowhere if `IGNORE_INDEX`
    fp32_logits = logits.float() + bias  # (rows, columns); the compiler does not store it
    if targets.logits is not None and targets.excluded is not None:
        fp32_logits = fp32_logits.masked_fill(columns == targets.excluded[:, None], -torch.inf)
        fp32_logits = torch.where(is_target, targets.logits[:, None], fp32_logits)
    is_real = labels >= 0
    largest = fp32_logits.amax(dim=1, keepdim=True)
    exponentials = (fp32_logits - largest).exp()
    sums = exponentials.sum(dim=1, keepdim=True)
    target_logits = fp32_logits.masked_fill(~is_target, 0.0).sum(dim=1)
    losses = (largest + sums.log())[:, 0] - target_logits
    loss = losses.masked_fill(~is_real, 0.0).sum()
    correct = (fp32_logits.argmax(dim=1) == labels).sum()
    gradient = (exponentials / sums - is_target.float()) * factor
    logits.copy_(gradient.masked_fill(~is_real[:, None], 0.0))
    return loss, correct


def _softmax_in_place(
    logits: Tensor,
    bias: Tensor,
    targets: Targets,
    factor: float,
    d_bias: Tensor | None,
    has_tail: bool,
    teacher: TeacherLayer | None = None,
) -> tuple[Tensor, ...]:
    """Return the summed loss and the number of correct rows, and replace the logits by `factor` times their gradient.

    `logits` is (rows, columns) without the bias; `bias` is (columns,) fp32 and -inf in padded columns. The sum of these
    gradients over rows is added to `d_bias`, (columns,). If `d_bias` is None, there is no gradient. `has_tail` allows
    rows with the label `IGNORE_INDEX`, which have neither loss nor gradient.
    """
    labels = targets.labels[:, None]
    is_real = labels >= 0
    columns = labels.clamp(min=0) if has_tail else labels
    fp32_logits = logits.float().add_(bias)  # (rows, columns)
    if targets.logits is not None and targets.excluded is not None:
        fp32_logits.scatter_(1, targets.excluded[:, None], -torch.inf)
        fp32_logits.scatter_(1, columns, targets.logits[:, None])
    likeliest = _argmax(fp32_logits)
    correct = (likeliest == labels).sum()
    largest = fp32_logits.gather(1, likeliest)
    target_logits = fp32_logits.gather(1, columns)
    probabilities = fp32_logits.softmax(dim=1)
    # The largest probability is 1 / sum(exp(logit - largest)), which is never near 0, so its log is accurate.
    losses = largest - probabilities.gather(1, likeliest).log() - target_logits
    loss = (losses.where(is_real, 0.0) if has_tail else losses).sum()
    results = [loss, correct]
    if teacher is not None:
        teacher_losses, teacher_gradient = _teacher_losses(fp32_logits, targets, teacher)
        results.append(teacher_losses.where(is_real[:, 0], 0.0).sum())
    if d_bias is not None:
        gradient = probabilities.scatter_add_(1, columns, torch.full_like(largest, -1.0))
        if teacher is not None:
            gradient.add_(teacher_gradient, alpha=TEACHER_RATIO * TEMPERATURE)
        if factor != 1.0:
            gradient *= factor
        if has_tail:
            gradient *= is_real
        d_bias += gradient.sum(dim=0)
        logits.copy_(gradient)
    return tuple(results)


def _teacher_losses(logits: Tensor, targets: Targets, teacher: TeacherLayer) -> tuple[Tensor, Tensor]:
    """Return the loss of each row against the teacher's distribution, (rows,), and its gradient, (rows, columns).

    It is KL(teacher || student) of softened distributions, times the square of the temperature, which keeps the scale
    of the gradient (Hinton et al., 2015, section 2). The gradient is divided by the temperature.
    """
    assert targets.teacher_features is not None
    teacher_logits = F.linear(targets.teacher_features.to(teacher.weight.dtype), teacher.weight).float()
    teacher_logits.add_(teacher.bias)
    if targets.teacher_logits is not None and targets.excluded is not None:
        teacher_logits.scatter_(1, targets.excluded[:, None], -torch.inf)
        teacher_logits.scatter_(1, targets.labels.clamp(min=0)[:, None], targets.teacher_logits[:, None])
    log_q = torch.add(teacher.correction, logits, alpha=1.0 / TEMPERATURE).log_softmax(dim=1)
    log_p = torch.add(teacher.correction, teacher_logits, alpha=1.0 / TEMPERATURE).log_softmax(dim=1)
    p = log_p.exp()
    terms = log_p.sub_(log_q).mul_(p).nan_to_num_(0.0)  # both logarithms are -inf in columns that are left out
    return TEMPERATURE**2 * terms.sum(dim=1), log_q.exp_().sub_(p)


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
