"""An MLP beside an embedding with one row per state: capacity by memory, for spaces of up to a million states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.nets.layers import Embedding, Generators, Trunk
from stochflow.nets.mlp import MLPTrunk
from stochflow.worlds.env import Enumerable, Env, numbers

MOST_ROWS = 1 << 22  # states that a table may have to list


@dataclass(frozen=True)
class Lookup:
    """An embedding of the whole state beside an MLP: capacity by memory, for spaces of up to a million states.

    A rough landscape must be memorised; one row per state does it faster than width does.
    """

    hidden: int = 64
    layers: int = 2
    width: int = 64

    def build(self, env: Env, gens: Generators, context: int) -> Trunk:
        return LookupTrunk(env, self, gens, context)


class LookupTrunk(Trunk):
    """Hidden vectors of the MLP `mlp` beside rows of the embedding `table`, [S, N, hidden + width]."""

    def __init__(self, env: Env, spec: Lookup, gens: Generators, context: int):
        super().__init__()
        if not isinstance(env, Enumerable):
            raise UserError("the lookup trunk needs an environment that can be enumerated: use --net mlp here")
        self.env, self.numbered = env, numbers(env)
        if env.count() > MOST_ROWS:
            other = "transformer" if hasattr(env, "thoughts") else "mlp"
            size = env.count() * spec.width * len(gens) * 20 / 2**30  # weight, gradient, two moments, average
            raise UserError(
                f"a look-up table of all {env.count():,} states of {env!r} would take {size:,.0f} GB in training: use --net {other} here"
            )
        self.mlp = MLPTrunk(env, spec.hidden, spec.layers, gens, context)
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
        follow = getattr(self.env, "next_index", None)  # one multiplication, where the order of states allows it
        row = self.env.index(state) if follow is None else follow(row, move)
        hidden, inner = self.mlp.advance(inner, state, move, t)
        return self._join(hidden, row), (inner, row)

    def _join(self, hidden: Tensor, row: Tensor) -> Tensor:
        return torch.cat([hidden, self.table(row.clamp(max=self.table.weight.shape[1] - 1))], -1)


def inner_mlp(trunk: Any) -> Any:
    """The MLP of a trunk: itself, or the one beside an embedding."""
    return trunk.mlp if type(trunk) is LookupTrunk else trunk


def interior(env: Enumerable) -> int:
    """Rows needed: the states before the first complete one, where all after it are complete; else all states."""
    complete = env.complete(env.all_states())
    first = int(complete.to(torch.uint8).argmax())
    return first if bool(complete[first:].all()) else len(complete)
