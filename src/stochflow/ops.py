"""Small tensor functions that everything else is made of. Masks are finite, so nothing is ever NaN by masking."""

from __future__ import annotations

import torch
from torch import Tensor

ALL_AT_ONCE = 1 << 22  # random numbers of a rollout that are drawn before it begins
FEW = 8  # entries of a law
NEG = -1e9  # the log of "impossible": finite, so that 0 * NEG is 0 and gradients stay finite


def masked_log_softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Log-probabilities over the allowed entries, NEG elsewhere; [..., M]. None: everything is allowed."""
    if mask is None:
        return log_softmax(logits)
    return keep(mask, log_softmax(keep(mask, logits, NEG)), NEG)


def log_softmax(x: Tensor) -> Tensor:
    """Over the last dimension. Of few entries, torch takes one row after the other on a CPU; along the first dimension it takes many
    rows at once, which is five times faster with its gradient."""
    if x.device.type != "cpu" or x.shape[-1] > FEW or x.dim() < 2 or torch.compiler.is_compiling():
        return x.log_softmax(-1)
    return x.movedim(-1, 0).contiguous().log_softmax(0).movedim(0, -1)


def gumbel_argmax(log_p: Tensor) -> Tensor:
    """One draw per row from unnormalised log-probabilities [..., M] -> [...]."""
    return (log_p - log_exponential(log_p)).argmax(-1)


def log_exponential(like: Tensor) -> Tensor:
    """The logarithm of exponential noise of the same shape: logits minus this, and the largest wins (Gumbel's trick)."""
    if like.is_cuda:
        return torch.empty_like(like).exponential_().log_()
    # five times faster on a CPU; a zero among the uniform numbers would be worse than an illegal move
    return torch.rand_like(like).clamp_(min=2**-25).log_().neg_().log_()


def keep(mask: Tensor, x: Tensor, other: float) -> Tensor:
    """x where the mask allows, else the number, which is laid out once: `torch.where` would fill one at every call, a kernel of its own."""
    if torch.compiler.is_compiling():  # there a number costs nothing
        return torch.where(mask, x, other)
    key = (other, x.dtype, x.device)
    if key not in _NUMBERS:
        with torch.inference_mode(False):  # it outlives whoever asks first
            _NUMBERS[key] = torch.tensor(other, dtype=x.dtype, device=x.device)
    return torch.where(mask, x, _NUMBERS[key])


_NUMBERS: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}
_COUNTS: dict[tuple[int, torch.device], Tensor] = {}


def arange(n: int, device: torch.device) -> Tensor:
    """`torch.arange(n)` made once a device: a constant should not cost a kernel at every step."""
    if torch.compiler.is_compiling():
        return torch.arange(n, device=device)
    key = (n, device)
    if key not in _COUNTS:
        with torch.inference_mode(False):
            _COUNTS[key] = torch.arange(n, device=device)
    return _COUNTS[key]


def but(n: int, one: int, device: torch.device) -> Tensor:
    """A mask [n] that allows everything but one entry, made once a device."""
    if torch.compiler.is_compiling():
        return torch.arange(n, device=device) != one
    key = (n, one, device)
    if key not in _BUT:
        with torch.inference_mode(False):
            _BUT[key] = torch.arange(n, device=device) != one
    return _BUT[key]


_BUT: dict[tuple[int, int, torch.device], Tensor] = {}


def always(shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
    """A mask that allows everything, without memory: one True, expanded."""
    if torch.compiler.is_compiling():
        return torch.ones((), dtype=torch.bool, device=device).expand(shape)
    if device not in _TRUE:
        with torch.inference_mode(False):
            _TRUE[device] = torch.ones((), dtype=torch.bool, device=device)
    return _TRUE[device].expand(shape)


_TRUE: dict[torch.device, Tensor] = {}


def zeros(shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros without memory: one, expanded; not to be written into."""
    if torch.compiler.is_compiling():
        return torch.zeros((), device=device).expand(shape)
    if device not in _ZERO:
        with torch.inference_mode(False):
            _ZERO[device] = torch.zeros((), device=device)
    return _ZERO[device].expand(shape)


_ZERO: dict[torch.device, Tensor] = {}


def pick(x: Tensor, index: Tensor) -> Tensor:
    """`x[..., index]` for x [..., M] and index [...]; a negative index (unknown) reads entry 0."""
    return x.gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def masked_mean(x: Tensor, mask: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Mean over the allowed entries; 0 where there is none. Masked entries may hold anything, NaN included."""
    total = keep(mask, x, 0).sum(dims)
    return total / mask.sum(dims).clamp(min=1)


def masked_quantile(x: Tensor, mask: Tensor, q: float) -> Tensor:
    """Quantile along dim 0 of the allowed entries, by linear interpolation and with static shapes.

    Where nothing is allowed the answer is 0.
    """
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
    """A context for operators on few numbers: some call for torch's other threads even so, which then look for work a while and are in the way of ours."""

    def __enter__(self) -> None:
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.threads)
