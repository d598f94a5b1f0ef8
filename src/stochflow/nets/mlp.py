"""Fully connected trunks on the environment's features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from stochflow.errors import need_whole
from stochflow.nets.layers import Generators, Linear, Trunk, rows
from stochflow.ops import arange
from stochflow.worlds.env import Env, numbers


@dataclass(frozen=True)
class MLP:
    """Fully connected layers on `env.features`."""

    hidden: int = 128
    layers: int = 2

    def build(self, env: Env, gens: Generators, context: int) -> Trunk:
        need_whole("hidden of a network", self.hidden, 1)
        need_whole("layers of a network", self.layers, 0)
        return MLPTrunk(env, self.hidden, self.layers, gens, context)


class MLPTrunk(Trunk):
    """ReLU layers [S, N, F + C] -> [S, N, hidden]; where a move sets one feature, the first layer is a running sum."""

    def __init__(self, env: Env, hidden: int, layers: int, gens: Generators, context: int):
        super().__init__()
        self.env, self.width, self.numbered = env, hidden, numbers(env)
        first = env.features(env.initial((1,)))
        self.blank = not bool(first.any())  # all features of the initial state are zero
        inputs = first.shape[-1] + context
        sizes = [inputs] + [hidden] * layers
        self.layers = nn.ModuleList(Linear(a, b, gens, gain=math.sqrt(2.0)) for a, b in pairwise(sizes))

    def forward(self, state, context):
        return self._rest(self._first(state, context))

    def _first(self, state: Tensor, context: Tensor | None) -> Tensor:
        """The first layer before its ReLU, [S, N, hidden]."""
        x = self.env.features(state)
        return self.layers[0](x if context is None else torch.cat([x, context], -1))

    def _rest(self, x: Tensor) -> Tensor:
        """The ReLU of the first layer and all further layers."""
        x = relu(x)
        for i in range(1, len(self.layers)):
            x = relu(self.layers[i](x))
        return x

    def along(self, traj, context):
        """[n, S, B, H]; with far more features than hidden units (long strings, large alphabets) the first layer is a
        running sum over the moves.
        """
        states, many = traj.states, self.layers[0].get_parameter("weight").shape[1]
        known = len(states) - 1
        column = self.env.state_dim - self.env.horizon
        flags = None
        if self.env.free and many >= 4 * self.width and known <= self.env.horizon:
            moves = states[-1, ..., column : column + known].movedim(-1, 1)  # [S, T, B]
            flags = self.env.switched(moves, arange(known, moves.device).unsqueeze(-1))
        if flags is None:
            return super().along(traj, context)
        if self.blank and context is None:  # the first layer is its bias, and its weights have no gradient
            begun = self.layers[0].get_parameter("bias").unsqueeze(1).expand(-1, -1, states.shape[2], -1)
        else:
            begun = self._first(states[0], context).unsqueeze(1)
        # clamped: padding stands where a move was never made
        added = rows(self.layers[0].get_parameter("weight"), flags.clamp(max=many - 1))
        sums = torch.cat([begun, begun + added.cumsum(1)], 1)
        return self._rest(sums.flatten(1, 2)).view(*sums.shape[:-1], self.width).transpose(0, 1)

    def begin(self, state, context):
        sums = self._first(state, context)
        return self._rest(sums), (context, sums)

    def advance(self, cache, state, move, t):
        """As `Trunk.advance`; where a move sets one feature, its weights are added to the first layer."""
        context, sums = cache
        flag = self.env.switched(move, t) if self.env.free else None
        if flag is None:
            sums = self._first(state, context)
        else:
            sums = sums + rows(self.layers[0].get_parameter("weight"), flag)
        return self._rest(sums), (context, sums)
