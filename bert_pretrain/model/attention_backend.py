"""Which attention a model uses: what fits the device and, for short sequences, what is right and faster there."""

import functools
import importlib.util
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bert_pretrain.errors import ConfigError
from bert_pretrain.model.attention import attend_varlen, layout_of
from bert_pretrain.model.short_attention import LONGEST, WIDTHS, attend_short

MAX_DIFFERENCE = 0.02
"""Largest relative difference between the kernels and attention in fp32; rounding to bf16 gives 0.002 to 0.004."""
TIMED_VALUES, TIMED_CALLS, REPETITIONS = 2**24, 8, 5
"""Elements of the hidden states in a call, calls timed as one, so that the host is ahead, and how often; the median."""


def choose_attention(
    setting: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    hidden_size: int,
    num_heads: int,
    dropout_rate: float,
    longest: int | None = None,
) -> tuple[str, str]:
    """Return the backend for `auto`, `varlen` or `padded`, and the reason for it.

    Where no sequence has more than `longest` tokens, `auto` may choose the kernels for short ones; None where unknown.
    """
    head_size = hidden_size // num_heads
    if setting == "padded":
        return "padded", "as configured"
    obstacle = _varlen_obstacle(device, dtype, head_size, dropout_rate)
    if obstacle is None and setting == "varlen":
        return "varlen", "as configured"
    if obstacle is None:
        is_better, why = (False, "") if longest is None else try_short(device, dtype, head_size, longest)
        return ("triton", why) if is_better else ("varlen", f"flash attention without padding{why and f'; {why}'}")
    if setting == "varlen":
        raise ConfigError(
            f"attention is 'varlen', but {obstacle}", where="train.attention", remedy="set it to auto or padded"
        )
    return "padded", obstacle


def _varlen_obstacle(device: torch.device, dtype: torch.dtype, head_size: int, dropout_rate: float) -> str | None:
    if device.type != "cuda":
        return f"flash attention over packed sequences needs CUDA, the device is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention needs bf16 or fp16, the precision is {str(dtype).removeprefix('torch.')}"
    if dropout_rate > 0:
        return f"it has no dropout, attention_probs_dropout_prob is {dropout_rate:g}"
    if head_size % 8 or head_size > 256:
        return f"flash attention takes heads of a multiple of 8, up to 256 wide; here they are {head_size} wide"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"flash attention needs compute capability 8.0, this card has {major}.{minor}"
    return None


@functools.cache
def try_short(device: torch.device, dtype: torch.dtype, head_size: int, longest: int) -> tuple[bool, str]:
    """Return whether the kernels for short sequences are right here, and faster than flash attention, and why."""
    if longest > LONGEST or head_size not in WIDTHS:
        return False, f"the Triton kernels take {LONGEST} tokens and heads of {', '.join(map(str, WIDTHS))}"
    if importlib.util.find_spec("triton") is None:
        return False, "Triton is not installed"
    try:
        difference = difference_of_short(device, dtype, head_size, longest)
        if not difference <= MAX_DIFFERENCE:  # nor where one is not a number
            return False, f"the Triton kernels are off by {difference:.2g} on this card"
        share = _share_of_flash(device, dtype, head_size, longest)
    except Exception as error:  # a card, or a version of Triton, for which they do not compile
        what = f"the Triton kernels failed here: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if torch.cuda.is_available():
            _check_context(device, what)
        return False, what
    return share < 1, f"the Triton kernels take {share:.2f} of the time of flash attention here"


def _check_context(device: torch.device, what: str) -> None:
    """Refuse to go on where a kernel has left CUDA unusable for this process."""
    try:
        torch.cuda.synchronize(device)
    except Exception as error:
        raise ConfigError(what, where="train.attention", remedy="set it to varlen") from error


def difference_of_short(device: torch.device, dtype: torch.dtype, head_size: int, longest: int) -> float:
    """Return how far context and gradient are from those of attention in fp32, relative to the norm of these."""
    lengths = torch.tensor([longest, 1, longest // 2 + 1, longest - longest // 8], device=device)
    generator = torch.Generator().manual_seed(0)
    shape = (int(lengths.sum()), 3, 3, head_size)
    drawn = torch.randn(*shape, generator=generator).to(device, dtype)
    direction = torch.randn(shape[0], *shape[2:], generator=generator).to(device, dtype)
    sequence = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    mask = sequence[:, None] == sequence[None, :]

    def exact(query_key_value: Tensor) -> Tensor:
        query, key, value = query_key_value.permute(1, 2, 0, 3)  # 3 × (heads, tokens, head size)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(0, 1)

    def with_gradient(attend: Callable[[Tensor], Tensor], inputs: Tensor) -> list[Tensor]:
        inputs.requires_grad_()
        with torch.enable_grad():
            context = attend(inputs)
            return [context.detach(), *torch.autograd.grad(context, inputs, direction.to(inputs.dtype))]

    bounds = F.pad(lengths.cumsum(0), (1, 0)).int()
    found = with_gradient(lambda inputs: attend_short(inputs, bounds, longest), drawn.clone())
    expected = with_gradient(exact, drawn.float())
    pairs = zip(found, expected, strict=True)
    return max(float((ours.float() - theirs).norm() / theirs.norm()) for ours, theirs in pairs)


def _share_of_flash(device: torch.device, dtype: torch.dtype, head_size: int, longest: int) -> float:
    """Return the time of the kernels, forward and backward, over that of flash attention."""
    heads = max(1, 768 // head_size)
    num_sequences = TIMED_VALUES // (heads * head_size * longest)
    tokens = num_sequences * longest
    bounds = torch.arange(0, tokens + 1, longest, dtype=torch.int32, device=device)
    layout = layout_of(bounds, longest, tokens, "varlen")
    inputs = torch.randn(tokens, 3, heads, head_size, device=device, dtype=dtype, requires_grad=True)
    direction = torch.randn(tokens, heads * head_size, device=device, dtype=dtype)

    def milliseconds(attend: Callable[[], Tensor]) -> float:
        times = []
        for _ in range(1 + REPETITIONS):  # in the first one kernels are compiled
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(TIMED_CALLS):
                torch.autograd.grad(attend(), inputs, direction)
            end.record()
            torch.cuda.synchronize(device)
            times.append(begin.elapsed_time(end))
        return statistics.median(times[1:])

    with torch.enable_grad(), torch.cuda.device(device):
        ours = milliseconds(lambda: attend_short(inputs, bounds, longest).flatten(1))
        query, key, value = inputs.unbind(1)
        return ours / milliseconds(lambda: attend_varlen(query, key, value, layout))
