"""Context encoders: from a context row number to a vector the policy conditions on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch import Tensor, nn
from torch.nn.functional import relu

from stochflow.nets.layers import Generators, Linear
from stochflow.worlds.conditioned import Contexts
from stochflow.worlds.env import Env


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
        self._contexts = Contexts(env)  # read at each call: they may change without another network
        self.width = spec.hidden
        assert env.contexts is not None
        sizes = [env.contexts[0].numel()] + [spec.hidden] * spec.layers
        self.layers = nn.ModuleList(Linear(a, b, gens, gain=math.sqrt(2.0)) for a, b in pairwise(sizes))

    def forward(self, row):
        x = self._contexts(row.device)[row]
        for layer in self.layers:
            x = relu(layer(x))
        return x
