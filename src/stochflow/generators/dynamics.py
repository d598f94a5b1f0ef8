"""The model of the noise that a log teaches: a network, on the pairs (thought, letter) that the log has shown."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stochflow.noise.dynamics import Dynamics, Neural, trainable_steps
from stochflow.ops import NEG, masked_log_softmax, pick
from stochflow.types import Trajectories
from stochflow.worlds.strings import Strings


class LogDynamics(Dynamics):
    """P(letter | prefix, thought), zero where the log has never seen that thought become that letter.

    A softmax alone is never zero, and the backward law of the thought may put no mass on what cannot happen: in a world
    without noise the loss would then vanish at a wrong law (docs/source-documents.md, 2). A thought that nobody has had
    yet becomes itself.
    """

    def __init__(self, env: Strings, seed: int, hidden: int, layers: int):
        nn.Module.__init__(self)
        self.env = env
        self.net = Neural(env, [seed], hidden, layers)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(env.num_moves, env.num_moves, dtype=torch.bool))

    def observe(self, traj: Trajectories) -> None:
        met = trainable_steps(self.env, traj)
        pair = (traj.actions.clamp(min=0) * self.env.num_moves + traj.moves)[met]
        self.seen.view(-1)[pair] = True

    def _possible(self, legal: Tensor) -> Tensor:
        """[..., M thoughts, M letters]."""
        itself = torch.eye(self.env.num_moves, dtype=torch.bool, device=legal.device)
        known = torch.where(self.seen.any(1, keepdim=True), self.seen, itself)
        return known & legal.unsqueeze(-2)

    def _table(self, state: Tensor, legal: Tensor) -> Tensor:
        return masked_log_softmax(self.net.logits(state), self._possible(legal))

    def log_probs(self, state, legal, action, memory=None):
        row = action[..., None, None].expand(*action.shape, 1, legal.shape[-1])
        return self._table(state, legal).gather(-2, row).squeeze(-2)

    def arrivals(self, state, legal, move, memory=None):
        table = self._table(state, legal)
        return pick(table, move.unsqueeze(-1).expand(table.shape[:-1]))

    def marginal(self, state, legal, log_pi, memory=None):
        with torch.no_grad():
            table = self._table(state, legal)
        joint = torch.where(legal.unsqueeze(-1), log_pi.unsqueeze(-1) + table, NEG)
        return torch.where(legal, joint.logsumexp(-2).clamp(min=NEG), NEG)
