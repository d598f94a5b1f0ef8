"""Small tensor functions that everything else is made of. Masks are finite, so masking never makes a NaN."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ALL_AT_ONCE = 1 << 22  # random numbers of a rollout that are drawn before it begins
FEW = 8  # entries of a row up to which `log_softmax` works along the first dimension on a CPU
NEG = -1e9  # the log of "impossible": finite, so that 0 * NEG is 0 and gradients stay finite


def masked_log_softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Log-probabilities over the allowed entries, NEG elsewhere; [..., M]. None: everything is allowed."""
    if mask is None:
        return log_softmax(logits)
    return keep(mask, log_softmax(keep(mask, logits, NEG)), NEG)


def log_softmax(x: Tensor) -> Tensor:
    """Log-softmax over the last dimension, [..., M] -> [..., M].

    Of few entries, torch takes one row after the other on a CPU; along the first dimension it takes many rows at once,
    which is five times faster with its gradient.
    """
    if x.device.type != "cpu" or x.shape[-1] > FEW or x.dim() < 2 or torch.compiler.is_compiling():
        return x.log_softmax(-1)
    return x.movedim(-1, 0).contiguous().log_softmax(0).movedim(0, -1)


def gumbel_argmax(log_p: Tensor) -> Tensor:
    """One draw per row from unnormalised log-probabilities [..., M] -> [...]."""
    return (log_p - log_exponential(log_p)).argmax(-1)


def log_exponential(like: Tensor) -> Tensor:
    """The logarithm of exponential noise, of the same shape: the argmax of logits minus this is a draw (Gumbel-max)."""
    if like.is_cuda:
        return torch.empty_like(like).exponential_().log_()
    # five times faster on a CPU; a uniform number of 0 would give +inf, below an illegal move's NEG
    return torch.rand_like(like).clamp_(min=2**-25).log_().neg_().log_()


_CONSTANTS: dict[tuple[object, ...], Tensor] = {}


def _constant(key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
    """What `make` gives, made once per key: a constant should not cost a kernel at every step."""
    if torch.compiler.is_compiling():
        return make()
    if key not in _CONSTANTS:
        with torch.inference_mode(False):  # the cached tensor outlives the call that made it
            _CONSTANTS[key] = make()
    return _CONSTANTS[key]


def keep(mask: Tensor, x: Tensor, other: float) -> Tensor:
    """x where the mask allows, else `other`, as a cached tensor: `torch.where` would fill a new one at every call."""
    if torch.compiler.is_compiling():  # compiled code holds the number as a literal
        return torch.where(mask, x, other)
    dtype, device = x.dtype, x.device
    number = _constant((other, dtype, device), lambda: torch.tensor(other, dtype=dtype, device=device))
    return torch.where(mask, x, number)


def arange(n: int, device: torch.device) -> Tensor:
    """`torch.arange(n)`, cached per device; not to be written into."""
    return _constant(("arange", n, device), lambda: torch.arange(n, device=device))


def but(n: int, one: int, device: torch.device) -> Tensor:
    """A mask [n] that allows everything but one entry, cached per device."""
    return _constant(("but", n, one, device), lambda: torch.arange(n, device=device) != one)


def always(shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
    """A mask that allows everything, without memory: one True, expanded."""
    return _constant(("true", device), lambda: torch.ones((), dtype=torch.bool, device=device)).expand(shape)


def zeros(shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros without memory: one 0, expanded; not to be written into."""
    return _constant(("zero", device), lambda: torch.zeros((), device=device)).expand(shape)


class PerDevice:
    """Constant tensors with one copy per device, made at its first call: a CUDA graph records no copy from the host."""

    def __init__(self, *tensors: Tensor):
        self.tensors = tensors
        self.copies: dict[torch.device, tuple[Tensor, ...]] = {}

    def __call__(self, device: torch.device) -> tuple[Tensor, ...]:
        """The tensors on this device."""
        if device not in self.copies:
            with torch.inference_mode(False):
                self.copies[device] = tuple(x.to(device) for x in self.tensors)
        return self.copies[device]


def pick(x: Tensor, index: Tensor) -> Tensor:
    """`x[..., index]` for x [..., M] and index [...]; a negative index (unknown) reads entry 0."""
    return x.gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def masked_mean(x: Tensor, mask: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Mean over the allowed entries; 0 where there is none. Masked entries may hold anything, NaN included."""
    total = keep(mask, x, 0).sum(dims)
    return total / mask.sum(dims).clamp(min=1)


def masked_quantile(x: Tensor, mask: Tensor, q: float) -> Tensor:
    """Quantile along dim 0 of the allowed entries, by linear interpolation with static shapes; 0 if there is none."""
    count = mask.sum(0)  # [...]
    ordered = keep(mask, x, float("inf")).sort(0).values
    place = q * (count - 1).clamp(min=0).to(x.dtype)
    low = place.floor().long()
    high = torch.minimum(low + 1, (count - 1).clamp(min=0))
    below = ordered.gather(0, low.unsqueeze(0)).squeeze(0)
    above = ordered.gather(0, high.unsqueeze(0)).squeeze(0)
    value = below + (place - low) * (above - below)
    return keep(count > 0, value, 0)


class one_thread:
    """A context for operators on few numbers, in which torch uses one thread.

    Some operators wake torch's thread pool for any size, and its threads then spin for a while and slow down our own.
    """

    def __enter__(self) -> None:
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.threads)
