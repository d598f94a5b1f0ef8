"""Encoders of a series' past: from a window's row number to a vector the policy conditions on.

S seeds    N rows    W steps of a window    E width. Parameters are [S, ...] as everywhere (see `nets`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention

from stochflow.errors import UserError
from stochflow.nets.encoders import Encoder
from stochflow.nets.layers import Embedding, Generators, Linear
from stochflow.nets.policy import Policy
from stochflow.worlds.env import Env
from stochflow.worlds.series import Series, Windows


class Norm(nn.Module):
    """Layer norm with a scale and a shift for each seed, [S, ..., E]."""

    def __init__(self, width: int, seeds: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(seeds, 1, width))
        self.shift = nn.Parameter(torch.zeros(seeds, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        flat = torch.nn.functional.layer_norm(x, shape[-1:]).view(shape[0], -1, shape[-1])
        return torch.addcmul(self.shift, flat, self.scale).view(shape)


def _apply(layer: Linear, x: Tensor) -> Tensor:
    """A stacked layer on [S, ..., in]."""
    return layer(x.reshape(x.shape[0], -1, x.shape[-1])).view(*x.shape[:-1], -1)


def _series(env: Env) -> Series:
    if not isinstance(env, Series):
        raise UserError(
            f"a window encoder reads the windows of a Series environment, but was given {env!r}: use nets.MLPEncoder"
        )
    return env


class WindowEncoder(Encoder):
    """An encoder whose windows can be exchanged: trained on some rows, applied to others."""

    def attach(self, env: Series) -> None:
        """Use the windows of `env` from now on; its layout must be that of the environment it was built for."""
        raise TypeError(f"{type(self).__name__} must define attach(env)")


# fully connected ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowMLP:
    """Fully connected layers on all fields of a window: the small choice."""

    hidden: int = 64
    layers: int = 2

    def build(self, env: Env, gens: Generators) -> Encoder:
        return _WindowMLP(_series(env), self, gens)


class _WindowMLP(WindowEncoder):
    def __init__(self, env: Series, spec: WindowMLP, gens: Generators):
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.empty(0), persistent=False)
        self.attach(env)
        self.width = spec.hidden
        sizes = [self.table.shape[1]] + [spec.hidden] * spec.layers
        self.layers = nn.ModuleList(Linear(a, b, gens, gain=math.sqrt(2.0)) for a, b in pairwise(sizes))

    def attach(self, env):
        assert env.contexts is not None
        self.table = env.contexts.to(self.table.device)

    def forward(self, row):
        x = self.table[row]
        for layer in self.layers:
            x = relu(layer(x))
        return x


# transformer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowTransformer:
    """Self-attention over the steps of a window.

    A step is its real features with their masks, its categories, and its time: sinusoids of its age in real-valued
    steps, so that irregular stamps and gaps are distinguished, and the phase of the seasons. Steps without any seen
    value are masked. One more token, made of the static covariates, attends to the window; its vector is the context.
    """

    width: int = 32
    layers: int = 2
    heads: int = 2

    def build(self, env: Env, gens: Generators) -> Encoder:
        if self.width % self.heads:
            raise UserError(
                f"a transformer of width {self.width} cannot be split into {self.heads} heads: "
                "make one divide the other"
            )
        return _WindowTransformer(_series(env), self, gens)


class _WindowTransformer(WindowEncoder):
    WAVES = 8  # sinusoids of the age, with periods from 2 steps to four windows

    def __init__(self, env: Series, spec: WindowTransformer, gens: Generators):
        super().__init__()
        w = env.windows
        self.width, self.heads = spec.width, spec.heads
        for name in Windows._fields[:7]:
            self.register_buffer(f"w_{name}", torch.empty(0), persistent=False)
        self.waves: Tensor
        longest = 4.0 * w.age.shape[1]
        self.register_buffer(
            "waves", 2 * math.pi / (2.0 * (longest / 2.0) ** torch.linspace(0, 1, self.WAVES)), persistent=False
        )
        self.attach(env)
        seeds = len(gens)
        step = 2 * w.values.shape[-1] + 2 * self.WAVES + w.phase.shape[-1]
        self.step_in = Linear(step, spec.width, gens)
        self.static_in = Linear(w.static.shape[-1] + 1, spec.width, gens)
        self.categories = nn.ModuleList(Embedding(n, spec.width, gens, std=0.3) for n in env.sizes)
        self.static_categories = nn.ModuleList(Embedding(n, spec.width, gens, std=0.3) for n in env.static_sizes)
        self.blocks = nn.ModuleList(_Block(spec.width, spec.heads, gens) for _ in range(spec.layers))
        self.out = Norm(spec.width, seeds)

    def attach(self, env):
        for name in Windows._fields[:7]:
            setattr(self, f"w_{name}", getattr(env.windows, name).to(self.waves.device))

    def forward(self, row):
        w_values, w_seen, w_categories, w_age, w_phase, w_static, w_static_categories = (
            getattr(self, f"w_{name}")[row] for name in Windows._fields[:7]
        )
        angle = w_age.unsqueeze(-1) * self.waves  # [S, N, W, waves]
        x = _apply(self.step_in, torch.cat([w_values, w_seen.float(), angle.sin(), angle.cos(), w_phase], -1))
        for i, table in enumerate(self.categories):
            x = x + table(w_categories[..., i])
        static = torch.cat([w_static, torch.ones_like(w_static[..., :1])], -1)
        reader = _apply(self.static_in, static)
        for i, table in enumerate(self.static_categories):
            reader = reader + table(w_static_categories[..., i])
        x = torch.cat([reader.unsqueeze(2), x], 2)  # [S, N, 1 + W, E]
        present = torch.cat([torch.ones_like(w_seen[..., :1, 0]), w_seen.any(-1)], -1)  # [S, N, 1 + W]
        for block in self.blocks[:-1]:
            x = block(x, x, present)
        return self.out(
            self.blocks[-1](x[:, :, :1], x, present).squeeze(2)
        )  # of the last block only the reader is used


class _Block(nn.Module):
    """Pre-norm attention and a feed-forward layer; there may be fewer queries than steps."""

    def __init__(self, width: int, heads: int, gens: Generators):
        super().__init__()
        seeds = len(gens)
        self.heads = heads
        self.before, self.between = Norm(width, seeds), Norm(width, seeds)
        self.query, self.key_value = Linear(width, width, gens), Linear(width, 2 * width, gens)
        self.merge = Linear(width, width, gens, gain=0.5)
        self.up = Linear(width, 2 * width, gens, gain=math.sqrt(2.0))
        self.down = Linear(2 * width, width, gens, gain=0.5)

    def forward(self, x: Tensor, steps: Tensor, present: Tensor) -> Tensor:
        """x [S, N, Q, E] attends to steps [S, N, W, E] where present [S, N, W]; [S, N, Q, E]."""

        def split(t: Tensor) -> Tensor:  # [S, N, n, E] -> [S, N, heads, n, E / heads]
            return t.unflatten(-1, (self.heads, -1)).transpose(2, 3)

        normed = self.before(steps)
        queries = normed if x is steps else normed[:, :, : x.shape[2]]
        key, value = _apply(self.key_value, normed).chunk(2, -1)
        mask = present[:, :, None, None, :]
        seen = scaled_dot_product_attention(
            split(_apply(self.query, queries)).flatten(0, 1),
            split(key).flatten(0, 1),
            split(value).flatten(0, 1),
            attn_mask=mask.flatten(0, 1),
        )
        x = x + _apply(self.merge, seen.transpose(1, 2).flatten(2).view(*x.shape))
        return x + _apply(self.down, gelu(_apply(self.up, self.between(x))))


# cached contexts ------------------------------------------------------------------------------------------------------


class Remembered(Encoder):
    """A cache of the vectors of all rows: drawing a thousand futures of a window then encodes it once."""

    def __init__(self, encoder: Encoder, rows: int, device: torch.device):
        super().__init__()
        self.width = encoder.width
        seeds = next(encoder.parameters()).shape[0]
        with torch.no_grad():
            every = torch.arange(rows, device=device).expand(seeds, rows)
            self.vectors = torch.cat([encoder(part) for part in every.split(1024, 1)], 1)

    def forward(self, row):
        return self.vectors.gather(1, row.unsqueeze(-1).expand(*row.shape, self.width))


@contextmanager
def remembering(policy: Policy, rows: int) -> Iterator[None]:
    """A context in which the policy's encoder is replaced by a cache of its vectors."""
    kept = policy.encoder
    assert kept is not None
    policy.encoder = Remembered(kept, rows, policy.device)
    try:
        yield
    finally:
        policy.encoder = kept
