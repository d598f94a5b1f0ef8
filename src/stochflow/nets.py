"""Stacked layers, trunks and context encoders.

Every parameter is [S, ...]: S independent networks advance in one operator. Row i is initialised from seeds[i] alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, relu

from stochflow.env import Enumerable, Env
from stochflow.errors import UserError
from stochflow.ops import arange
from stochflow.types import Trajectories

Generators = Sequence[torch.Generator]


class Linear(nn.Module):
    """[S, N, in] -> [S, N, out]."""

    def __init__(self, inputs: int, outputs: int, gens: Generators, gain: float = 1.0):
        super().__init__()
        bound = gain * math.sqrt(3.0 / inputs)  # variance gain^2 / inputs
        self.weight = nn.Parameter(torch.stack([torch.empty(inputs, outputs).uniform_(-bound, bound, generator=g) for g in gens]))
        self.bias = nn.Parameter(torch.zeros(len(gens), 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.shape[1] >= 4 * _SPLIT:
            return _TallLinear.apply(x, self.weight, self.bias)
        return torch.baddbmm(self.bias, x, self.weight)


_SPLIT = 512


class _TallLinear(torch.autograd.Function):
    """A stacked linear layer for many rows on a GPU: its weight gradient is a long sum, and batched products do not
    split long sums over the chip. We split it ourselves: 8.6 ms an iteration became 2.4 at two seeds and 36,000 rows (one trial)."""

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
        to_weight = torch.bmm(left, right).view(seeds, parts[1], wide, -1).sum(1)
        if whole < rows:
            to_weight = torch.baddbmm(to_weight, x[:, whole:].transpose(1, 2), grad[:, whole:])
        to_x = torch.bmm(grad, weight.transpose(1, 2)) if ctx.needs_input_grad[0] else None
        return to_x, to_weight, grad.sum(1, keepdim=True)


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
    if index.is_cuda:  # its gradient adds by atomics; embedding's sorts first, which costs far more at these sizes
        return table.index_select(0, index.flatten()).view(*index.shape, width)
    return embedding(index, table)


class Trunk(nn.Module):
    """From states to hidden vectors. `advance` may keep what it needs of the past in its cache."""

    width: int
    grows: bool = False  # True: `advance` does more at later steps
    numbered: bool = False  # True: it reads each state for itself, and the environment numbers states

    def forward(self, state: Tensor, context: Tensor | None) -> Tensor:
        """[S, N, D] -> [S, N, H]."""
        raise TypeError(f"{type(self).__name__} must define forward(state, context)")

    def along(self, traj: Trajectories, context: Tensor | None) -> Tensor:
        """[n, S, B, H]: every state of a batch in one pass; of trees the last is not asked for, so n is T or T+1."""
        states = traj.states.transpose(0, 1)  # [S, T+1, B, D]
        seeds, steps, batch, _ = states.shape
        wide = None if context is None else context.unsqueeze(1).expand(-1, steps, -1, -1).reshape(seeds, steps * batch, -1)
        hidden = self.forward(states.reshape(seeds, steps * batch, -1), wide)
        return hidden.view(seeds, steps, batch, -1).transpose(0, 1)

    def begin(self, state: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        return self.forward(state, context), context

    def advance(self, cache: Any, state: Tensor, move: Tensor, t: int) -> tuple[Tensor, Any]:
        return self.forward(state, cache), cache


class Net(Protocol):
    """The description of a trunk: a value such as `MLP(128, 2)`."""

    def build(self, env: Env, gens: Generators, context: int) -> Trunk: ...


@dataclass(frozen=True)
class MLP:
    """Fully connected layers on `env.features`."""

    hidden: int = 128
    layers: int = 2

    def build(self, env: Env, gens: Generators, context: int) -> Trunk:
        return _MLPTrunk(env, self.hidden, self.layers, gens, context)


class _MLPTrunk(Trunk):
    def __init__(self, env: Env, hidden: int, layers: int, gens: Generators, context: int):
        super().__init__()
        self.env, self.width, self.numbered = env, hidden, numbers(env)
        first = env.features(env.initial((1,)))
        self.blank = not bool(first.any())  # the initial state has no feature
        inputs = first.shape[-1] + context
        sizes = [inputs] + [hidden] * layers
        self.layers = nn.ModuleList(Linear(a, b, gens, gain=math.sqrt(2.0)) for a, b in pairwise(sizes))

    def forward(self, state, context):
        return self._rest(self._first(state, context))

    def _first(self, state: Tensor, context: Tensor | None) -> Tensor:
        """The first layer before its rectifier."""
        x = self.env.features(state)
        return self.layers[0](x if context is None else torch.cat([x, context], -1))

    def _rest(self, x: Tensor) -> Tensor:
        x = relu(x)
        for i in range(1, len(self.layers)):
            x = relu(self.layers[i](x))
        return x

    def along(self, traj, context):
        """Of long strings over large alphabets, whose flags outnumber the hidden units by far, the first layer is a running sum."""
        states, many = traj.states, self.layers[0].get_parameter("weight").shape[1]
        known = len(states) - 1
        column = self.env.state_dim - self.env.horizon
        flags = None
        if self.env.free and many >= 4 * self.width and known <= self.env.horizon:
            moves = states[-1, ..., column : column + known].movedim(-1, 1)  # [S, T, B]
            flags = self.env.switched(moves, arange(known, moves.device).unsqueeze(-1))
        if flags is None:
            return super().along(traj, context)
        if self.blank and context is None:  # the first layer has nothing to say yet, and no gradient
            begun = self.layers[0].get_parameter("bias").unsqueeze(1).expand(-1, -1, states.shape[2], -1)
        else:
            begun = self._first(states[0], context).unsqueeze(1)
        added = rows(self.layers[0].get_parameter("weight"), flags.clamp(max=many - 1))  # where nothing was ever written, padding
        sums = torch.cat([begun, begun + added.cumsum(1)], 1)
        return self._rest(sums.flatten(1, 2)).view(*sums.shape[:-1], self.width).transpose(0, 1)

    def begin(self, state, context):
        sums = self._first(state, context)
        return self._rest(sums), (context, sums)

    def advance(self, cache, state, move, t):
        """Where a move sets one flag, the first layer is a running sum of that flag's weights."""
        context, sums = cache
        flag = self.env.switched(move, t) if self.env.free else None
        sums = self._first(state, context) if flag is None else sums + rows(self.layers[0].get_parameter("weight"), flag)
        return self._rest(sums), (context, sums)


@dataclass(frozen=True)
class Lookup:
    """An embedding of the whole state beside an MLP: capacity by memory, for spaces of up to a million states.

    A rough landscape must be memorised; a row a state does it faster than width does.
    """

    hidden: int = 64
    layers: int = 2
    width: int = 64

    def build(self, env: Env, gens: Generators, context: int) -> Trunk:
        return _LookupTrunk(env, self, gens, context)


class _LookupTrunk(Trunk):
    def __init__(self, env: Any, spec: Lookup, gens: Generators, context: int):
        super().__init__()
        if not hasattr(env, "index"):
            raise UserError("the lookup trunk needs an environment that can be enumerated: use --net mlp here")
        self.env, self.numbered = env, numbers(env)
        self.mlp = _MLPTrunk(env, spec.hidden, spec.layers, gens, context)
        self.table = Embedding(interior(env), spec.width, gens, std=1.0 / math.sqrt(spec.width))
        self.width = spec.hidden + spec.width

    def forward(self, state, context):
        return self._join(self.mlp(state, context), self.env.index(state))

    def begin(self, state, context):
        row = self.env.index(state)
        hidden, inner = self.mlp.begin(state, context)
        return self._join(hidden, row), (inner, row)

    def advance(self, cache, state, move, t):
        inner, row = cache
        follow = getattr(self.env, "next_index", None)  # one multiplication where the order of states knows it
        row = self.env.index(state) if follow is None else follow(row, move)
        hidden, inner = self.mlp.advance(inner, state, move, t)
        return self._join(hidden, row), (inner, row)

    def _join(self, hidden: Tensor, row: Tensor) -> Tensor:
        return torch.cat([hidden, self.table(row.clamp(max=self.table.weight.shape[1] - 1))], -1)


def inner_mlp(trunk: Any) -> Any:
    """The MLP of a trunk: itself, or the one beside a look-up table."""
    return trunk.mlp if type(trunk) is _LookupTrunk else trunk


def numbers(env: Any) -> bool:
    """Whether states have numbers, of 64 bits, by a formula: to list them all would cost more than it saves."""
    return isinstance(env, Enumerable) and env.contexts is None and type(env).count is not Enumerable.count and env.count() < 2**62


def interior(env: Any) -> int:
    """How many states come before the first complete one, or all of them: only states with a choice need a row."""
    complete = env.complete(env.all_states())
    first = int(complete.to(torch.uint8).argmax())
    return first if bool(complete[first:].all()) else len(complete)


class Encoder(nn.Module):
    """From context rows [S, N] to vectors [S, N, C]."""

    width: int

    def forward(self, row: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} must define forward(row)")


class EncoderNet(Protocol):
    """The description of a context encoder: a value such as `MLPEncoder(64)`."""

    def build(self, env: Env, gens: Generators) -> Encoder: ...


@dataclass(frozen=True)
class MLPEncoder:
    """Fully connected layers on the flattened context."""

    hidden: int = 64
    layers: int = 2

    def build(self, env: Env, gens: Generators) -> Encoder:
        return _MLPEncoder(env, self, gens)


class _MLPEncoder(Encoder):
    def __init__(self, env: Env, spec: MLPEncoder, gens: Generators):
        super().__init__()
        assert env.contexts is not None
        self.table: Tensor
        self.register_buffer("table", env.contexts.flatten(1).float(), persistent=False)
        self.width = spec.hidden
        sizes = [self.table.shape[1]] + [spec.hidden] * spec.layers
        self.layers = nn.ModuleList(Linear(a, b, gens, gain=math.sqrt(2.0)) for a, b in pairwise(sizes))

    def forward(self, row):
        x = self.table[row]
        for layer in self.layers:
            x = relu(layer(x))
        return x
