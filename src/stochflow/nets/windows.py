"""Encoders of a series' past: from a window's row number to a vector the policy conditions on.

S seeds    N rows    W steps of a window    E width. Parameters are [S, ...] as everywhere (see `nets`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention

from stochflow.errors import UserError
from stochflow.nets.encoders import Encoder
from stochflow.nets.layers import Embedding, Generators, Linear
from stochflow.nets.policy import Policy
from stochflow.types import PolicyOut
from stochflow.worlds.env import Env
from stochflow.worlds.paths import Paths
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


def attach(policy: Policy, env: Series) -> None:
    """Let a policy read the windows of `env` from now on."""
    if isinstance(policy, PathPolicy):
        policy.use(env)
    else:
        assert isinstance(policy.encoder, WindowEncoder)
        policy.encoder.attach(env)


# a policy that starts from a law over paths ----------------------------------------------------------------------------


class PathPolicy(Policy):
    """Logits are the log-probabilities of the environment's `paths`, plus `share` times the network's.

    The network's head starts at zero, so that at step 0 the policy is that law. `share` 0 leaves the network out.
    """

    def __init__(self, env: Series, *args: Any, **more: Any):
        super().__init__(env, *args, **more)
        self.share: Tensor
        self.register_buffer("share", torch.ones(()))
        with torch.no_grad():
            self.head.weight[..., : env.num_moves] = 0
            self.head.bias[..., : env.num_moves] = 0
        self._laws: dict[torch.device, tuple[Series, Paths, Tensor, Tensor]] = {}

    def use(self, env: Series) -> None:
        """Use the windows and paths of `env` from now on."""
        self.env = env
        self._laws.clear()
        assert isinstance(self.encoder, WindowEncoder)
        self.encoder.attach(env)

    def _law(self) -> tuple[Paths, Tensor, Tensor]:
        """(paths, series of each window, origin of each window) on this device."""
        env = _series(self.env)
        found = self._laws.get(self.device)
        if found is None or found[0] is not env:
            assert env.paths is not None
            w = env.windows
            found = env, env.paths.to(self.device), w.series.to(self.device), w.origin.to(self.device)
            self._laws[self.device] = found
        return found[1:]

    def _start(self, row: Tensor) -> Tensor:
        paths, series, origin = self._law()
        return paths.start(series[row], origin[row])

    def _mixed(self, law: Tensor, net: Tensor) -> Tensor:
        return law + self.share * net

    def forward(self, state, context=None, repeats=False):
        out = super().forward(state, context, repeats)
        paths = self._law()[0]
        weight, chosen = self._start(state[..., 0]), state[..., 1:]
        size = (chosen < self.env.num_moves).sum(-1)
        law = torch.zeros_like(out.forward)
        for t in range(self.env.horizon):
            law = torch.where((size == t).unsqueeze(-1), paths.law(weight, t), law)
            move = chosen[..., t]
            known = (move < self.env.num_moves).unsqueeze(-1)
            weight = torch.where(known, paths.seen(weight, t, move.clamp(max=self.env.num_moves - 1)), weight)
        return PolicyOut(self._mixed(law, out.forward), *out[1:])

    def along(self, traj, context=None, flows=True):
        out = super().along(traj, context, flows)
        law = self._law()[0].along(self._start(traj.states[0][..., 0]), traj.moves)
        if len(out.forward) > len(law):  # finished forecasts, from which nothing is chosen
            law = torch.cat([law, torch.zeros_like(law[:1])])
        return PolicyOut(self._mixed(law, out.forward), *out[1:])

    def begin(self, state, context=None):
        logits, cache = super().begin(state, context)
        weight = self._start(state[..., 0])
        return self._mixed(self._law()[0].law(weight, 0), logits), (cache, weight)

    def advance(self, cache, state, move, t):
        inner, weight = cache
        logits, inner = super().advance(inner, state, move, t)
        paths = self._law()[0]
        weight = paths.seen(weight, t, move)
        return self._mixed(paths.law(weight, t + 1), logits), (inner, weight)
