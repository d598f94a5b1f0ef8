"""Channels with memory: the law of the next move depends on earlier actions, or on a hidden regime.

A memory of realised moves alone would be a function of the state and need no channel of its own. Both memories here are
sufficient: given (state, action, memory) the next move is independent of the rest of the past, so the law stays
exact (`exact_memory`). A step whose action is unknown (-1) does not change the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.ops import NEG, pick
from stochflow.worlds.channels import Slip
from stochflow.worlds.env import Channel, Env


class Fatigue(Channel):
    """Slip whose probability grows with the number of slips so far: min(limit, alpha + growth * slips).

    The memory is that number, [..., 1].
    """

    def __init__(self, alpha: float = 0.1, growth: float = 0.3, limit: float = 0.9):
        self.alpha, self.limit = Slip(alpha).alpha, Slip(limit).alpha  # checked as probabilities
        if growth < 0 or alpha > limit:
            raise UserError(
                f"fatigue grows from alpha = {alpha} by growth = {growth} up to limit = {limit}: "
                "give growth >= 0 and alpha <= limit"
            )
        self.growth = float(growth)

    def begin(self, state):
        return torch.zeros_like(state[..., :1])

    def remember(self, memory, state, action, move):
        assert memory is not None
        return memory + ((action >= 0) & (move != action)).unsqueeze(-1)

    def log_probs(self, state, legal, action, memory=None):
        slip = self._slip(memory)
        chosen = torch.arange(legal.shape[-1], device=legal.device) == action.unsqueeze(-1)
        p = (1 - slip) * chosen + slip / legal.sum(-1, keepdim=True).clamp(min=1)
        return torch.where(legal & (p > 0), p.clamp(min=1e-30).log(), NEG)

    def marginal(self, state, legal, log_pi, memory=None):
        slip = self._slip(memory)
        pi = torch.where(legal, log_pi, NEG).exp()
        p = (1 - slip) * pi + slip * pi.sum(-1, keepdim=True) / legal.sum(-1, keepdim=True).clamp(min=1)
        return torch.where(legal & (p > 0), p.clamp(min=1e-30).log(), NEG)

    def _slip(self, memory: Tensor | None) -> Tensor | float:
        """The present probability of a slip, [..., 1]; alpha without a memory."""
        if memory is None:
            return self.alpha
        return (self.alpha + self.growth * memory.float()).clamp(max=self.limit)

    def __repr__(self) -> str:
        return f"Fatigue(alpha={self.alpha}, growth={self.growth}, limit={self.limit})"


class Regime(Channel):
    """A hidden regime that switches: each regime is a channel, kept from step to step with probability `stay`.

    The memory is the belief [..., R] over the regime of the next step, by Bayes' rule from actions and moves. Drawing
    moves by the belief and then updating it gives the same law, step by step, as drawing the regime itself.
    """

    def __init__(self, env: Env, channels: Sequence[Channel], stay: float = 0.9, start: Sequence[float] | None = None):
        if len(channels) < 2:
            raise UserError(f"a hidden regime needs at least two channels to switch between, not {len(channels)}")
        if not 0 <= stay <= 1:
            raise UserError(f"stay = {stay} is the probability of keeping the regime: give a number between 0 and 1")
        self.env, self.channels, self.stay = env, tuple(channels), float(stay)
        count = len(self.channels)
        self.start = [1 / count] * count if start is None else [float(p) for p in start]
        if len(self.start) != count or min(self.start) < 0 or abs(sum(self.start) - 1) > 1e-6:
            raise UserError(f"start = {self.start} must be {count} probabilities that sum to 1, one per regime")

    def begin(self, state):
        return torch.stack([torch.full_like(state[..., 0], p, dtype=torch.float64) for p in self.start], -1)

    def log_probs(self, state, legal, action, memory=None):
        belief = self.begin(state) if memory is None else memory
        p = (belief.unsqueeze(-1) * self._each(state, legal, action).exp()).sum(-2)
        return torch.where(legal & (p > 0), p.clamp(min=1e-30).log(), NEG).float()

    def remember(self, memory, state, action, move):
        assert memory is not None
        noisy = action >= 0 if self.env.stop is None else (action >= 0) & (action != self.env.stop)  # STOP is exact
        every = self._each(state, self.env.real_moves(self.env.moves(state)), torch.where(noisy, action, 0))
        likelihood = pick(every, move.unsqueeze(-1).expand(every.shape[:-1])).exp()  # [..., R]
        weight = memory * likelihood
        total = weight.sum(-1, keepdim=True)
        seen = torch.where(noisy.unsqueeze(-1) & (total > 0), weight / total.clamp(min=1e-300), memory)
        leave = (1 - self.stay) / (len(self.channels) - 1)
        return leave + (self.stay - leave) * seen

    def _each(self, state: Tensor, legal: Tensor, action: Tensor) -> Tensor:
        """log P(move | action) under each regime, [..., R, M] float64."""
        return torch.stack([c.log_probs(state, legal, action) for c in self.channels], -2).double()

    def __repr__(self) -> str:
        return f"Regime([{', '.join(map(repr, self.channels))}], stay={self.stay})"
