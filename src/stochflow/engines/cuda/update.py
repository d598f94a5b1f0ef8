"""Clipping, Adam and the running averages of a block of parameters in two GPU kernels (adam.cu): one sums squares, one does the rest."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stochflow.engines.cuda import driver as cuda_source

BLOCK = 512  # numbers a block of threads updates at least
ENOUGH = (
    284  # blocks: where there would be more, each updates more numbers, because each adds up the sums of squares first
)
LARGE = 2048  # numbers a block, which are then enough
BLOCKS = 8192  # blocks at most, about
PARTS = 512  # sums of squares of all seeds together, about
THREADS = 128


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
        rows.sort(key=lambda row: row[2])  # of each seed as many: their parameters are alike
        return torch.tensor(rows, dtype=torch.int32, device=device)

    return Spans(cut(in_blocks(PARTS)), cut(max(in_blocks(BLOCKS), min(LARGE, in_blocks(ENOUGH)))))


def kernels(device: torch.device, follows: bool) -> tuple[Any, Any] | None:
    """Both, compiled; None where they cannot be had."""
    with torch.cuda.device(device):
        defines, chip = (("THREADS", THREADS), ("FOLLOWS", int(follows))), torch.cuda.get_device_capability(device)
        index = torch.cuda.current_device()
        found = [
            cuda_source.compiled(("common.cuh", "update.cu"), name, defines, 0, chip, index)
            for name in ("squares", "update")
        ]
    return None if None in found else (found[0], found[1])


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
    ends: bool,
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
    the average takes 1 / (1 + step / recent) of the new values, the follower `follow` of them. `norms` [S] are those before clipping. Where this `ends` a
    step, it is counted."""
    found = kernels(values.device, follower is not None)
    assert found is not None
    many = len(where.summed)
    parts, paces = gradient.new_empty(many + 3).split((many, 3))
    block = (THREADS, 1, 1)
    pace = [lr, tau, decay, recent, math.log(beta1), math.log(beta2)]
    found[0]((many + 1, 1, 1), block, [parts, paces, count, gradient, where.summed, step, *pace], 0)
    state = [values, moments[0], moments[1], average, values if follower is None else follower, norms]
    found[1](
        (len(where.updated), 1, 1), block,
        [*state, step, gradient, parts, paces, where.updated, many // len(norms), int(ends), clip, follow, beta1, beta2, eps], 0,
    )  # fmt: skip
