"""Clipping, Adam and the running averages of a block of parameters in two GPU kernels: one sums squares, one does the rest.

Only `flat` imports this file, and only on a GPU: it needs Triton, which comes with PyTorch's CUDA builds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512  # numbers at a time
PARTS = 512  # sums of squares, about: every block adds them up


class Spans(NamedTuple):
    """Stretches of the parameters, each of one seed: [n, 3] int32 of first, last + 1 and seed."""

    summed: Tensor
    updated: Tensor


def spans(pieces: list[tuple[int, int, int]], device: torch.device) -> Spans:
    """From pieces (first, last + 1, seed) of any length."""
    many = sum(last - first for first, last, _ in pieces)

    def cut(size: int) -> Tensor:
        rows = [(at, min(at + size, last), seed) for first, last, seed in pieces for at in range(first, last, size)]
        return torch.tensor(rows, dtype=torch.int32, device=device)

    return Spans(cut(BLOCK * triton.cdiv(many, PARTS * BLOCK)), cut(BLOCK))


@triton.jit
def _squares(parts, count, gradient, summed, BLOCK: tl.constexpr):
    """The sum of squares of each span; the first program also counts the step."""
    p = tl.program_id(0)
    if p == 0:
        tl.store(count, tl.load(count) + 1)
    start, last = tl.load(summed + 3 * p), tl.load(summed + 3 * p + 1)
    total = tl.zeros([BLOCK], tl.float32)
    while start < last:
        i = start + tl.arange(0, BLOCK)
        g = tl.load(gradient + i, mask=i < last, other=0.0)
        total += g * g
        start += BLOCK
    tl.store(parts + p, tl.sum(total, 0))


@triton.jit
def _update(
    values, mean, square, average, follower, norms,  # changed in place; norms [S] are written
    gradient, parts, count, summed, updated, step, num_parts, clip, rate, tau, decay, recent, follow,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, FOLLOWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0)
    first, last, seed = tl.load(updated + 3 * p), tl.load(updated + 3 * p + 1), tl.load(updated + 3 * p + 2)
    part = tl.arange(0, PARTS)
    mine = (part < num_parts) & (tl.load(summed + 3 * part + 2, mask=part < num_parts, other=-1) == seed)
    norm = tl.sqrt(tl.sum(tl.load(parts + part, mask=mine, other=0.0), 0))
    tl.store(norms + seed, norm)  # by all of a seed's programs, the same
    scale = tl.minimum(clip / tl.maximum(norm, 1e-12), 1.0)
    now = tl.load(step)
    taken = tl.load(count).to(tl.float64)
    lr = rate * tl.exp(-decay * tl.log(1 + now / tau))
    weight = (1 / (1 + now / recent)).to(tl.float32)
    whole = (lr / (1 - tl.exp(taken * tl.log(taken * 0 + BETA1)))).to(tl.float32)
    root = tl.sqrt(1 - tl.exp(taken * tl.log(taken * 0 + BETA2))).to(tl.float32)

    i = first + tl.arange(0, BLOCK)
    inside = i < last
    g = tl.load(gradient + i, mask=inside, other=0.0) * scale
    m = tl.load(mean + i, mask=inside, other=0.0)
    m += (1 - BETA1) * (g - m)
    v = BETA2 * tl.load(square + i, mask=inside, other=0.0) + (1 - BETA2) * g * g
    x = tl.load(values + i, mask=inside, other=0.0) - whole * m / (tl.sqrt(v) / root + EPS)
    a = tl.load(average + i, mask=inside, other=0.0)
    tl.store(mean + i, m, mask=inside)
    tl.store(square + i, v, mask=inside)
    tl.store(values + i, x, mask=inside)
    tl.store(average + i, a + weight * (x - a), mask=inside)
    if FOLLOWS:
        f = tl.load(follower + i, mask=inside, other=0.0)
        tl.store(follower + i, f + follow * (x - f), mask=inside)


def works() -> bool:
    """Whether Triton can compile here: it wants a C compiler and a chip that is not too old."""
    try:
        one = torch.ones(1, device="cuda")
        _squares[(1,)](one, one, one, torch.tensor([0, 1, 0], dtype=torch.int32, device="cuda"), BLOCK=BLOCK)
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def update(
    values: Tensor,
    gradient: Tensor,
    moments: Tensor,
    average: Tensor,
    follower: Tensor | None,
    norms: Tensor,
    count: Tensor,
    where: Spans,
    step: Tensor,
    *,
    clip: float,
    lr: float,
    tau: float,
    decay: float,
    recent: float,
    follow: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> None:
    """One step of everything, in place but for the gradient: each seed's gradient is scaled to a norm of at most `clip`, Adam's rate is lr / (1 + step / tau)^decay,
    the average takes 1 / (1 + step / recent) of the new values, the follower `follow` of them. `norms` [S] are those before clipping."""
    many = len(where.summed)
    parts = gradient.new_empty(many)
    _squares[(many,)](parts, count, gradient, where.summed, BLOCK=BLOCK, num_warps=4)
    _update[(len(where.updated),)](
        values, moments[0], moments[1], average, follower, norms,
        gradient, parts, count, where.summed, where.updated, step, many, clip, lr, tau, decay, recent, follow,
        BETA1=beta1, BETA2=beta2, EPS=eps, FOLLOWS=follower is not None, PARTS=triton.next_power_of_2(many), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
