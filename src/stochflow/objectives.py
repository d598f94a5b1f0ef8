"""Training objectives: residuals over `Terms`, written once for deterministic and stochastic worlds.

An objective has no parameters and cannot see the environment; what needs all children overrides `loss(terms, world)`.
The mathematics, and which law each objective converges to, is in docs/method.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stochflow.ops import NEG, masked_log_softmax, masked_mean, pick
from stochflow.types import Terms, World


@dataclass(frozen=True)
class Form:
    """What counts as the forward log-probability of a step: the one place where the treatments of noise differ."""

    name: str
    needs: frozenset[str]
    step: Callable[[Terms], Tensor]  # [T, S, B]
    back_action: bool = False  # wants the learned head for the action given the move


MARGINAL = Form("marginal", frozenset({"log_move"}), lambda t: t.log_move)
JOINT = Form("joint", frozenset({"log_pf", "log_k", "log_pa"}), lambda t: t.log_pf + t.log_k - t.log_pa, back_action=True)
REALISED = Form("realised", frozenset({"log_pf_move"}), lambda t: t.log_pf_move)
INTENDED = Form("intended", frozenset({"log_pf", "log_pa"}), lambda t: t.log_pf - t.log_pa, back_action=True)


class Objective(ABC):
    """`needs` names the terms to fill; `residual` is zero for every trajectory exactly at balance."""

    form: Form = MARGINAL

    @property
    @abstractmethod
    def needs(self) -> frozenset[str]:
        """Fields of `Terms` that the loss reads."""

    @abstractmethod
    def residual(self, t: Terms) -> Tensor:
        """[T, S, B] or [S, B]."""

    def loss(self, t: Terms, world: World) -> Tensor:
        """[S]: mean square of the residual over time and batch, never over seeds."""
        r = self.residual(t)
        if r.dim() == 2:
            return r.square().mean(1)
        return masked_mean(r.square(), t.alive, (0, 2))


@dataclass(frozen=True)
class TrajectoryBalance(Objective):
    """Z prod p(move) = R prod P_B, one residual a trajectory."""

    form: Form = MARGINAL

    @property
    def needs(self):
        return self.form.needs | {"log_pb"}

    def residual(self, t):
        return t.log_z + (self.form.step(t) - t.log_pb).sum(0) - t.log_reward


@dataclass(frozen=True)
class DetailedBalance(Objective):
    """F(s) p(move | s) = F(s') P_B(move | s'), one residual a step; the reward stands in for F at the end."""

    form: Form = MARGINAL

    @property
    def needs(self):
        return self.form.needs | {"log_pb", "log_flow"}

    def residual(self, t):
        return t.log_flow[:-1] + self.form.step(t) - t.log_flow[1:] - t.log_pb


@dataclass(frozen=True)
class SubTrajectoryBalance(Objective):
    """Balance between every two states of a trajectory, i before j, with weight decay^(j - i)."""

    decay: float = 0.9
    form: Form = MARGINAL

    @property
    def needs(self):
        return self.form.needs | {"log_pb", "log_flow"}

    def residual(self, t):
        """[T+1, T+1, S, B]: potential(i) - potential(j), zero where j is past the end or not after i."""
        return self._pairs(t)[0]

    def _pairs(self, t: Terms) -> tuple[Tensor, Tensor]:
        travelled = torch.cat([torch.zeros_like(t.log_flow[:1]), (self.form.step(t) - t.log_pb).cumsum(0)])
        potential = t.log_flow - travelled  # constant along a balanced trajectory
        reached = torch.cat([torch.ones_like(t.alive[:1]), t.alive])  # [T+1, S, B]
        time = torch.arange(len(reached), device=reached.device)
        span = time - time.unsqueeze(1)  # [i, j] = j - i
        valid = reached.unsqueeze(0) & (span > 0)[..., None, None]
        weight = torch.where(valid, (self.decay ** span.clamp(min=1).to(potential))[..., None, None], 0)
        return torch.where(valid, potential.unsqueeze(1) - potential.unsqueeze(0), 0), weight

    def loss(self, t, world):
        r, weight = self._pairs(t)
        return (weight * r.square()).sum((0, 1, 3)) / weight.sum((0, 1, 3)).clamp(min=1e-12)


@dataclass(frozen=True)
class LogVariance(Objective):
    """Variance over the batch of log p(trajectory) - log R: trajectory balance whose log Z is the batch's own mean."""

    form: Form = MARGINAL

    @property
    def needs(self):
        return self.form.needs | {"log_pb"}

    def residual(self, t):
        score = (self.form.step(t) - t.log_pb).sum(0) - t.log_reward
        return score - score.mean(1, keepdim=True)


@dataclass(frozen=True)
class FlowKL(Objective):
    """State-level flow KL: KL(p(.|s) || F(child) P_B / sum) + (log F(s) - log sum)^2 / 2, children's flows detached.

    Alone it reaches the forward-KL optimum where the target is out of reach, whatever the sampling. It asks for the
    reward of every child that is complete and of every visited state that may stop.
    """

    form: Form = MARGINAL

    @property
    def needs(self):
        return frozenset({"law", "log_flow"})

    def residual(self, t):
        return t.log_flow[:-1]  # a state-level loss has no trajectory residual; see `loss`

    def loss(self, t, world):
        kl, gap, usable = flow_kl(t, world)
        return masked_mean(kl + 0.5 * gap.square(), usable, (0, 2))


def flow_kl(t: Terms, world: World) -> tuple[Tensor, Tensor, Tensor]:
    """(KL, log F - log sum of what flows on, where both are known), each [T, S, B]."""
    env = world.task.env
    here = world.trajectories.states[:-1]
    mask = env.moves(here)
    steps, seeds, batch, moves = mask.shape
    move = torch.arange(moves, device=mask.device).expand(mask.shape)
    child = env.step(here.unsqueeze(-2).expand(*mask.shape, here.shape[-1]), move)  # [T, S, B, M, D]
    flat = child.movedim(1, 0).reshape(seeds, -1, child.shape[-1])
    with torch.set_grad_enabled(torch.is_grad_enabled() and not env.tree):  # on a tree nothing of a child is trained here
        out = world.policy(flat)

    def back(x: Tensor) -> Tensor:
        return x.view(seeds, steps, batch, moves, *x.shape[2:]).movedim(0, 1)

    legal = env.real_moves(mask)
    flow = back(out.log_flow).detach()
    complete = legal & env.complete(child)
    usable = t.alive
    reward = world.ask(child, complete & t.alive.unsqueeze(-1))
    if reward is None:
        usable = usable & ~complete.any(-1)
    else:
        flow = torch.where(complete, reward, flow)
    if not env.tree:
        log_pb = masked_log_softmax(back(out.backward), env.parents(child))
        flow = flow + pick(log_pb, move)
    onward = torch.where(legal, flow, NEG)
    if env.stop is not None:
        may_stop = mask[..., env.stop]
        reward = world.ask(here, may_stop & t.alive)
        if reward is None:
            usable = usable & ~may_stop
        else:
            onward = torch.where((move == env.stop) & mask, reward.unsqueeze(-1), onward)
    total = onward.logsumexp(-1)
    law = torch.where(mask, t.law, 0)
    kl = torch.where(mask, law.exp() * (law - (onward - total.unsqueeze(-1))), 0).sum(-1)
    return torch.where(usable, kl, 0), torch.where(usable, t.log_flow[:-1] - total, 0), usable
