"""Models of the channel behind one interface: known, counted, learned.

Flow losses detach every model: balance must never be reached by changing the model of the noise.
Models that use the past (`thoughts`) keep it in the channel's memory, as the channels of `memory` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from stochflow.errors import need_seeds
from stochflow.nets.layers import Linear
from stochflow.ops import NEG, keep, masked_log_softmax, masked_mean, pick
from stochflow.types import Trajectories
from stochflow.worlds.env import Channel, Env, need_env


class Dynamics(Channel, nn.Module):
    """A channel with parameters or counts. `loss` trains it by gradient, `observe` by counting."""

    whole = True  # it was built for an environment, whose states it reads

    def loss(self, traj: Trajectories) -> Tensor:
        """[S] cross-entropy of the realised move over real steps."""
        real = trainable_steps(self.env, traj)
        here = traj.states[:-1]
        legal = self.env.real_moves(self.env.moves(here))
        log_p = self.log_probs(here, legal, traj.actions.clamp(min=0), remembered(self, traj))
        return masked_mean(-pick(log_p, traj.moves), real, (0, 2))

    def observe(self, traj: Trajectories) -> None:
        """Update counts; does nothing by default."""

    env: Env


def trainable_steps(env: Env, traj: Trajectories) -> Tensor:
    """[T, S, B] True where a known action passed through the real channel: alive, executed, and not STOP."""
    noisy = traj.alive & traj.real & (traj.actions >= 0)
    return noisy if env.stop is None else noisy & (traj.actions != env.stop)


def remembered(channel: Channel, traj: Trajectories) -> Tensor | None:
    """The channel's memory before each step, [T, S, B, ...]; None for a channel without memory."""
    memory = channel.begin(traj.states[0])
    if memory is None:
        return None
    steps: list[Tensor] = []
    for t in range(traj.moves.shape[0]):
        steps.append(memory)
        memory = channel.remember(memory, traj.states[t], traj.actions[t], traj.moves[t])
        assert memory is not None
    return torch.stack(steps)


class Known(Dynamics):
    """The true channel, for upper bounds and for worlds without noise."""

    def __init__(self, env: Env, channel: Channel):
        nn.Module.__init__(self)
        self.env, self.channel = env, env.applied(channel)

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.channel.exact

    def log_probs(self, state, legal, action, memory=None):
        return self.channel.log_probs(state, legal, action, memory)

    def marginal(self, state, legal, log_pi, memory=None):
        return self.channel.marginal(state, legal, log_pi, memory)

    def arrivals(self, state, legal, move, memory=None):
        return self.channel.arrivals(state, legal, move, memory)

    def begin(self, state):
        return self.channel.begin(state)

    def remember(self, memory, state, action, move):
        return self.channel.remember(memory, state, action, move)


class Tabular(Dynamics):
    """Smoothed counts of (number of legal moves, action, move): exact for any slip, in any dimension."""

    def __init__(self, env: Env, seeds: Sequence[int] = (0,), prior: float = 1.0):
        nn.Module.__init__(self)
        need_env(env)
        need_seeds(seeds)
        self.env, self.prior = env, prior
        m = env.num_moves
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros(len(seeds), m + 1, m, m, dtype=torch.float64))

    def _row(self, legal: Tensor, action: Tensor) -> Tensor:
        """[..., S, B] positions in the flattened (S, n, action) table."""
        seeds, n, m, _ = self.counts.shape
        seed = torch.arange(seeds, device=legal.device).unsqueeze(-1)
        return (seed * n + legal.sum(-1)) * m + action

    def log_probs(self, state, legal, action, memory=None):
        counts = self.counts.view(-1, self.counts.shape[-1])[self._row(legal, action)] + self.prior
        return masked_log_softmax(counts.log().float(), legal)

    def marginal(self, state, legal, log_pi, memory=None):
        m = legal.shape[-1]
        every = torch.arange(m, device=legal.device)
        first = self._row(legal, torch.zeros_like(legal[..., 0], dtype=torch.long))
        row = first.unsqueeze(-1) + every  # [..., M actions]
        counts = self.counts.view(-1, m)[row] + self.prior
        table = masked_log_softmax(counts.log().float(), legal.unsqueeze(-2).expand_as(counts))
        return through(table, legal, log_pi)

    def observe(self, traj):
        real = trainable_steps(self.env, traj)
        here = traj.states[:-1]
        row = self._row(self.env.real_moves(self.env.moves(here)), traj.actions.clamp(min=0))
        place = row * self.counts.shape[-1] + traj.moves
        flat = self.counts.view(-1)
        flat.index_add_(0, place.flatten(), real.flatten().to(flat))

    def loss(self, traj):
        with torch.no_grad():
            return super().loss(traj)


class Neural(Dynamics):
    """A classifier of the realised move from state and action: softmax(W_a h(state) + b_a), all actions in one pass."""

    def __init__(self, env: Env, seeds: Sequence[int] = (0,), hidden: int = 64, layers: int = 1):
        nn.Module.__init__(self)
        need_env(env)
        need_seeds(seeds)
        self.env = env
        gens = [torch.Generator().manual_seed(s + 7919) for s in seeds]  # not the policy's stream
        inputs = env.features(env.initial((1,))).shape[-1]
        sizes = [inputs] + [hidden] * layers
        self.layers = nn.ModuleList(Linear(a, b, gens, gain=2**0.5) for a, b in pairwise(sizes))
        self.head = Linear(sizes[-1], env.num_moves**2, gens, gain=0.1)

    def logits(self, state: Tensor) -> Tensor:
        """[..., S, B, D] -> [..., S, B, M actions, M moves]."""
        lead = state.shape[:-1]
        x = self.env.features(state)
        x = x.movedim(-3, 0).reshape(lead[-2], -1, x.shape[-1])  # [S, N, F]
        for layer in self.layers:
            x = relu(layer(x))
        m = self.env.num_moves
        out = self.head(x).view(lead[-2], *lead[:-2], lead[-1], m, m)
        return out.movedim(0, -4)

    def log_probs(self, state, legal, action, memory=None):
        row = action[..., None, None].expand(*action.shape, 1, legal.shape[-1])
        return masked_log_softmax(self.logits(state).gather(-2, row).squeeze(-2), legal)

    def marginal(self, state, legal, log_pi, memory=None):
        with torch.no_grad():
            logits = self.logits(state)
            table = masked_log_softmax(logits, legal.unsqueeze(-2).expand_as(logits))
        return through(table, legal, log_pi)

    def arrivals(self, state, legal, move, memory=None):
        logits = self.logits(state)
        table = masked_log_softmax(logits, legal.unsqueeze(-2).expand_as(logits))
        return pick(table, move.unsqueeze(-1).expand(table.shape[:-1]))


def through(table: Tensor, legal: Tensor, log_pi: Tensor) -> Tensor:
    """log sum_a pi(a) P(move | a) [..., M] from the table of all actions [..., M, M]."""
    joint = keep(legal.unsqueeze(-1), log_pi.unsqueeze(-1) + table, NEG)
    return keep(legal, joint.logsumexp(-2), NEG)
