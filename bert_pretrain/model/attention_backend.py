"""Choose an attention backend for the device. The Triton kernels are chosen only if they are correct and faster."""

import functools
import importlib.util
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bert_pretrain.config import ModelConfig
from bert_pretrain.errors import ConfigError
from bert_pretrain.model.attention import attend_padded, attend_varlen, has_windows, make_layout
from bert_pretrain.model.short_attention import HEAD_SIZES, MAX_SEQLEN, attend_short

MAX_RELATIVE_ERROR = 0.02  # limit for the Triton kernels against fp32; rounding to bf16 gives 0.002 to 0.004


def choose_attention(
    setting: str,
    device: torch.device,
    dtype: torch.dtype,
    model: ModelConfig,
    *,
    is_training: bool = True,
    longest: int | None = None,
    is_timed: bool = True,
) -> tuple[str, str]:
    """Return the backend for the setting `auto`, `varlen` or `padded`, and the reason.

    `longest` is the maximum length of a sequence, or None if unknown. With it, `auto` may choose the Triton kernels.
    With `is_timed` they must also be faster than flash attention.
    """
    head_size = model.hidden_size // model.num_attention_heads
    dropout_rate = model.attention_probs_dropout_prob if is_training else 0.0
    if setting == "padded":
        return "padded", "as configured"
    obstacle = _varlen_obstacle(device, dtype, head_size, dropout_rate)
    if not obstacle and model.is_modern and not has_windows():
        obstacle = f"flash attention of torch {torch.__version__} has no windows, which ModernBERT needs"
    if setting == "varlen":
        if obstacle:
            raise ConfigError(
                f"attention is 'varlen', but {obstacle}",
                where="train.attention",
                remedy="set it to auto or padded",
            )
        return "varlen", "as configured"
    if obstacle:
        return "padded", obstacle
    reason = "flash attention without padding"
    if longest is None or model.is_modern:  # the Triton kernels have no windows
        return "varlen", reason
    use_short, short_reason = try_short(
        device,
        dtype,
        head_size,
        longest,
        is_timed,
    )
    return ("triton", short_reason) if use_short else ("varlen", f"{reason}; {short_reason}")


def _varlen_obstacle(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    dropout_rate: float,
) -> str:
    """Return why flash attention does not support these settings, or "" if it does."""
    if device.type != "cuda":
        return f"flash attention needs CUDA, the device is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention needs bf16 or fp16, the precision is {str(dtype).removeprefix('torch.')}"
    if dropout_rate > 0:
        return f"flash attention has no dropout, attention_probs_dropout_prob is {dropout_rate:g}"
    if head_size % 8 or head_size > 256:
        return f"flash attention needs a head size that is a multiple of 8, up to 256; here it is {head_size}"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major >= 8 else f"flash attention needs compute capability 8.0, this GPU has {major}.{minor}"


def try_short(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    longest: int,
    is_timed: bool = True,
) -> tuple[bool, str]:
    """Return whether to use the kernels for short sequences, and the reason.

    They must be correct and, with `is_timed`, faster than flash attention.
    """
    if obstacle := _short_obstacle(device, dtype, head_size, longest):
        return False, obstacle
    return _time_short(device, dtype, head_size, longest) if is_timed else (True, "not timed")


@functools.cache
def _short_obstacle(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    longest: int,
) -> str:
    """Return why the kernels for short sequences cannot be used, or an empty string if they run and are correct."""
    if longest > MAX_SEQLEN or head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        return f"the Triton kernels need at most {MAX_SEQLEN} tokens and a head size of {sizes}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        error = short_attention_error(device, dtype, head_size, longest)
    except Exception as exception:  # the kernels may not compile on this GPU or with this version of Triton
        return _failure(exception, device)
    correct = error <= MAX_RELATIVE_ERROR  # False for NaN
    return "" if correct else f"the Triton kernels have a relative error of {error:.2g} on this GPU"


@functools.cache
def _time_short(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    longest: int,
) -> tuple[bool, str]:
    try:
        ratio = _time_ratio_to_flash(device, dtype, head_size, longest)
    except Exception as exception:
        return False, _failure(exception, device)
    return ratio < 1, f"the Triton kernels take {ratio:.2f} of the time of flash attention"


def _failure(exception: Exception, device: torch.device) -> str:
    """Return a description of a failed kernel. Raise `ConfigError` if it made CUDA unusable for this process."""
    what = f"the Triton kernels failed: {type(exception).__name__}: {str(exception).partition(chr(10))[0]}"
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize(device)
    except Exception as error:
        raise ConfigError(what, where="train.attention", remedy="set it to varlen") from error
    return what


def short_attention_error(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    longest: int,
) -> float:
    """Return the larger of the relative errors (by norm) of the context and of its gradient, compared with fp32."""
    lengths = torch.tensor([longest, 1, longest // 2 + 1, longest - longest // 8], device=device)
    bounds = F.pad(lengths.cumsum(0), (1, 0)).int()
    tokens, heads = int(bounds[-1]), 3
    layout = make_layout(bounds, longest, tokens, "padded")
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(
        tokens,
        3,
        heads,
        head_size,
        generator=generator,
    ).to(device, dtype)
    direction = torch.randn(tokens, heads * head_size, generator=generator).to(device, dtype)

    def context_and_gradient(attend: Callable[[Tensor], Tensor], inputs: Tensor) -> list[Tensor]:
        inputs.requires_grad_()
        with torch.enable_grad():
            context = attend(inputs)
            return [context.detach(), *torch.autograd.grad(context, inputs, direction.to(inputs.dtype))]

    ours = context_and_gradient(lambda inputs: attend_short(inputs, bounds, longest).flatten(1), inputs.clone())
    expected = context_and_gradient(lambda inputs: attend_padded(inputs, layout, 0.0), inputs.float())
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(ours, expected, strict=True))


def _time_ratio_to_flash(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    longest: int,
) -> float:
    """Return the time of a forward and backward pass of the kernels, divided by the time of flash attention."""
    heads = max(1, 768 // head_size)
    num_sequences = 2**24 // (heads * head_size * longest)
    tokens = num_sequences * longest
    bounds = torch.arange(
        0,
        tokens + 1,
        longest,
        dtype=torch.int32,
        device=device,
    )
    layout = make_layout(bounds, longest, tokens, "varlen")
    inputs = torch.randn(
        tokens,
        3,
        heads,
        head_size,
        device=device,
        dtype=dtype,
        requires_grad=True,
    )
    direction = torch.randn(tokens, heads * head_size, device=device, dtype=dtype)

    def milliseconds(attend: Callable[[], Tensor]) -> float:
        times = []
        for _ in range(6):  # the first repetition compiles the kernels
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(8):  # enough that the kernels take longer than their launches
                torch.autograd.grad(attend(), inputs, direction)
            end.record()
            torch.cuda.synchronize(device)
            times.append(start.elapsed_time(end))
        return statistics.median(times[1:])

    with torch.enable_grad(), torch.cuda.device(device):
        short_time = milliseconds(lambda: attend_short(inputs, bounds, longest).flatten(1))
        query, key, value = inputs.unbind(1)
        return short_time / milliseconds(lambda: attend_varlen(query, key, value, layout))
