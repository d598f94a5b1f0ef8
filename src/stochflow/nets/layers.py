"""Stacked layers and the trunk interface.

Every parameter is [S, ...]: S independent networks advance in one operator. Row i is initialised from seeds[i] alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from stochflow.ops import arange
from stochflow.types import Trajectories
from stochflow.worlds.env import Env

Generators = Sequence[torch.Generator]
_SPLIT = 512  # rows of a partial weight gradient


class Linear(nn.Module):
    """[S, N, in] -> [S, N, out]."""

    def __init__(self, inputs: int, outputs: int, gens: Generators, gain: float = 1.0):
        super().__init__()
        bound = gain * math.sqrt(3.0 / inputs)  # variance gain^2 / inputs
        self.weight = nn.Parameter(
            torch.stack([torch.empty(inputs, outputs).uniform_(-bound, bound, generator=g) for g in gens])
        )
        self.bias = nn.Parameter(torch.zeros(len(gens), 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.shape[1] >= 4 * _SPLIT:
            return _TallLinear.apply(x, self.weight, self.bias)
        return torch.baddbmm(self.bias, x, self.weight)


class _TallLinear(torch.autograd.Function):
    """A stacked linear layer for many rows on a GPU.

    Its weight gradient is a long sum, which batched products do not split over the chip; here it is split into parts of
    `_SPLIT` rows: 8.6 ms per iteration became 2.4 at two seeds and 36,000 rows (one trial).
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias, x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        seeds, rows, wide = x.shape
        whole = rows // _SPLIT * _SPLIT
        parts = (seeds, whole // _SPLIT, _SPLIT)
        left = x[:, :whole].reshape(*parts, wide).flatten(0, 1).transpose(1, 2)
        right = grad[:, :whole].reshape(*parts, grad.shape[-1]).flatten(0, 1)
        weight_grad = torch.bmm(left, right).view(seeds, parts[1], wide, -1).sum(1)
        if whole < rows:
            weight_grad = torch.baddbmm(weight_grad, x[:, whole:].transpose(1, 2), grad[:, whole:])
        x_grad = torch.bmm(grad, weight.transpose(1, 2)) if ctx.needs_input_grad[0] else None
        return x_grad, weight_grad, grad.sum(1, keepdim=True)


class Embedding(nn.Module):
    """Row numbers [S, ...] -> [S, ..., width], each seed in its own table."""

    def __init__(self, rows: int, width: int, gens: Generators, std: float = 0.02):
        super().__init__()
        self.weight = nn.Parameter(torch.stack([torch.empty(rows, width).normal_(0, std, generator=g) for g in gens]))

    def forward(self, index: Tensor) -> Tensor:
        return rows(self.weight, index)


def rows(weight: Tensor, index: Tensor) -> Tensor:
    """Rows [S, ...] of stacked tables [S, R, width], each seed from its own: [S, ..., width]."""
    seeds, many, width = weight.shape
    if seeds > 1:
        index = index + (arange(seeds, index.device) * many).view(-1, *[1] * (index.dim() - 1))
    table = weight.view(seeds * many, width)
    # the gradient of index_select adds by atomics; embedding's sorts first, which costs far more at these sizes
    if index.is_cuda:
        return table.index_select(0, index.flatten()).view(*index.shape, width)
    return embedding(index, table)


class Trunk(nn.Module):
    """From states to hidden vectors; `begin` and `advance` do so step by step, with a cache of the past."""

    width: int
    grows: bool = False  # True: `advance` does more at later steps
    numbered: bool = False  # True: a hidden vector depends on its state alone, and the environment numbers states

    def forward(self, state: Tensor, context: Tensor | None) -> Tensor:
        """[S, N, D] -> [S, N, H]."""
        raise TypeError(f"{type(self).__name__} must define forward(state, context)")

    def along(self, traj: Trajectories, context: Tensor | None) -> Tensor:
        """[n, S, B, H]: every state of a batch in one pass; of trees the last is left out, so n is T or T+1."""
        states = traj.states.transpose(0, 1)  # [S, T+1, B, D]
        seeds, steps, batch, _ = states.shape
        if context is not None:
            context = context.unsqueeze(1).expand(-1, steps, -1, -1).reshape(seeds, steps * batch, -1)
        hidden = self.forward(states.reshape(seeds, steps * batch, -1), context)
        return hidden.view(seeds, steps, batch, -1).transpose(0, 1)

    def begin(self, state: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        """Hidden vectors [S, B, H] of the first states [S, B, D], and the cache for `advance`."""
        return self.forward(state, context), context

    def advance(self, cache: Any, state: Tensor, move: Tensor, t: int) -> tuple[Tensor, Any]:
        """The same for the states after `move` [S, B] at step t."""
        return self.forward(state, cache), cache


class Net(Protocol):
    """The description of a trunk: a value such as `MLP(128, 2)`."""

    def build(self, env: Env, gens: Generators, context: int) -> Trunk: ...
