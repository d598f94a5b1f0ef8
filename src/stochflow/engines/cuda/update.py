"""Clipping, Adam and the averages of a block of parameters in two kernels (update.cu): one sums squares, one does the rest."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stochflow.engines.cuda.driver import Kernel, kernel
from stochflow.engines.flat import FlatParameters

BLOCK = 512  # numbers that a block of threads updates at least
ENOUGH = 284  # blocks: beyond, each updates more numbers, because each adds up the sums of squares first
LARGE = 2048  # numbers per block, at most for that reason
BLOCKS = 8192  # blocks at most, about
PARTS = 512  # sums of squares of all seeds together, about
THREADS = 128
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


class Spans(NamedTuple):
    """Stretches of the parameters, each of one seed: [n, 3] int32 of first, last + 1 and seed."""

    summed: Tensor
    updated: Tensor


def spans(pieces: list[tuple[int, int, int]], device: torch.device) -> Spans:
    """From pieces (first, last + 1, seed) of any length."""
    many = sum(last - first for first, last, _ in pieces)

    def in_blocks(count: int) -> int:
        return BLOCK * -(-many // (count * BLOCK))

    def cut(size: int) -> Tensor:
        rows = [(at, min(at + size, last), seed) for first, last, seed in pieces for at in range(first, last, size)]
        rows.sort(key=lambda row: row[2])  # the same number for each seed: their parameters are alike
        return torch.tensor(rows, dtype=torch.int32, device=device)

    return Spans(cut(in_blocks(PARTS)), cut(max(in_blocks(BLOCKS), min(LARGE, in_blocks(ENOUGH)))))


def kernels(flat: FlatParameters) -> tuple[Kernel, Kernel]:
    """Both, compiled."""
    defines = {"THREADS": THREADS, "FOLLOWS": flat.follower is not None}
    squares, update = (kernel("update.cu", name, defines, 0, flat.device) for name in ("squares", "update"))
    return squares, update


@torch.no_grad()
def update(flat: FlatParameters, where: Spans, step: Tensor, ends: bool) -> Tensor:
    """One step in place: each seed's gradient is scaled to a norm of at most `clip`; Adam's rate is lr / (1 + step / TAU)^decay,
    the average takes 1 / (1 + step / RECENT) of the new values, the follower FOLLOW of them. Where this `ends` an iteration,
    `step` is counted. The norms before clipping [S]."""
    squares, move = kernels(flat)
    many = len(where.summed)
    parts, rates = flat.grad.new_empty(many + 3).split((many, 3))
    curve = [float(x) for x in (flat.lr, flat.TAU, flat.decay, flat.RECENT)]
    squares(
        (many + 1, 1, 1),
        THREADS,
        [parts, rates, flat.adam_step, flat.grad, where.summed, step, *curve, math.log(BETA1), math.log(BETA2)],
    )
    follower = flat.values if flat.follower is None else flat.follower
    state = [flat.values, flat.moments[0], flat.moments[1], flat.average, follower, flat.norms, step]
    numbers = [many // flat.num_seeds, int(ends), float(flat.clip), flat.FOLLOW, BETA1, BETA2, EPS]
    move((len(where.updated), 1, 1), THREADS, [*state, flat.grad, parts, rates, where.updated, *numbers])
    flat.changed()
    return flat.norms
