"""Training objectives: residuals over `Terms`, written once for deterministic and stochastic worlds.

An objective has no parameters and cannot see the environment; what needs all children overrides `loss(terms, world)`.
The mathematics, and which law each objective converges to, is in docs/method.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stochflow.errors import UserError
from stochflow.learn.entropy import (
    Band,
    EntropyAverage,
    check_gamma,
    entropy_balance_loss,
    entropy_band,
    mean_entropy_ratio,
    normalised_entropy,
    state_kl,
    temperature,
)
from stochflow.learn.forms import HEAD, INTENDED, JOINT, MARGINAL, PUBLISHED, REALISED, Form
from stochflow.ops import NEG, keep, masked_log_softmax, masked_mean, pick
from stochflow.types import Terms, World

__all__ = [
    "HEAD",
    "INTENDED",
    "JOINT",
    "MARGINAL",
    "PUBLISHED",
    "REALISED",
    "SGFNKL",
    "DetailedBalance",
    "FlowKL",
    "Form",
    "LogVariance",
    "Objective",
    "SubTrajectoryBalance",
    "TrajectoryBalance",
    "TrajectoryKL",
    "flow_kl",
]


class Objective(ABC):
    """`needs` names the terms to fill; `residual` is zero for every trajectory if and only if flows balance."""

    form: Form = MARGINAL
    reports: tuple[str, ...] = ()  # names of the figures that `loss_and_stats` gives beside the loss
    bootstraps: bool = False  # targets use the network's own flows of children: evaluate them with averaged weights
    on_policy: bool = False  # valid for the policy's own trajectories alone: no exploration, no replay
    memory: nn.Module | None = None  # state kept from batch to batch, saved with the run

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
        square = r.square().mean(1) if r.dim() == 2 else masked_mean(r.square(), t.alive, (0, 2))
        return self.form.complete(square, world)

    def loss_and_stats(self, t: Terms, world: World) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [S] and the figures named in `reports`, each [S] and without gradient."""
        return self.loss(t, world), {}


@dataclass(frozen=True)
class TrajectoryBalance(Objective):
    """Z prod p(move) = R prod P_B, one residual per trajectory."""

    form: Form = MARGINAL

    @property
    def needs(self):
        return self.form.needs | {"log_pb"}

    def residual(self, t):
        return t.log_z + (self.form.step(t) - t.log_pb).sum(0) - t.log_reward


@dataclass(frozen=True)
class DetailedBalance(Objective):
    """F(s) p(move | s) = F(s') P_B(move | s'), one residual per step; the reward replaces F at the end."""

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
        """Residuals and weights of all pairs (i, j), each [T+1, T+1, S, B]."""
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
        square = (weight * r.square()).sum((0, 1, 3)) / weight.sum((0, 1, 3)).clamp(min=1e-12)
        return self.form.complete(square, world)


@dataclass(frozen=True)
class LogVariance(Objective):
    """Variance over the batch of log p(trajectory) - log R: trajectory balance whose log Z is the batch's own mean."""

    form: Form = MARGINAL

    @property
    def needs(self):
        return self.form.needs | {"log_pb"}

    def residual(self, t):
        score = self._score(t)
        return score - score.mean(1, keepdim=True)

    def _score(self, t: Terms) -> Tensor:
        return (self.form.step(t) - t.log_pb).sum(0) - t.log_reward

    def loss(self, t, world):
        if world.task.env.contexts is None:
            return super().loss(t, world)
        # every condition has a log Z of its own: the mean is over its trajectories
        row = world.trajectories.states[0, ..., 0]
        same = (row.unsqueeze(2) == row.unsqueeze(1)).to(t.log_reward)  # [S, B, B]
        score = self._score(t)
        centred = score - (same @ score.unsqueeze(-1)).squeeze(-1) / same.sum(-1)
        return self.form.complete(centred.square().mean(1), world)


@dataclass(frozen=True)
class TrajectoryKL(Objective):
    """KL(P || target), up to log Z, of whole trajectories: score function with a leave-one-out baseline.

    Its gradient is that of on-policy trajectory balance, so it ends where KL(P || target) is least. It needs the
    policy's own trajectories; from a log use `LogVariance`, which has the same gradient on-policy in the mean.
    """

    on_policy = True

    @property
    def needs(self):
        return frozenset({"log_move", "log_pb"})

    def residual(self, t):
        return (t.log_move - t.log_pb).sum(0) - t.log_reward

    def loss(self, t, world):
        """[S]: the value is the batch's estimate of KL(P || target) - log Z, which is minus the ELBO."""
        r = self.residual(t)
        others = (r.sum(1, keepdim=True) - r) / max(r.shape[1] - 1, 1)  # zero where the batch is a single trajectory
        score = (r - others).detach() * t.log_move.sum(0)
        # a learned P_B has a direct gradient: it is part of the target
        surrogate = (score - t.log_pb.sum(0)).mean(1)
        return r.detach().mean(1) + surrogate - surrogate.detach()


@dataclass(frozen=True)
class FlowKL(Objective):
    """State-level flow KL: KL(p(.|s) || F(child) P_B / sum) + (log F(s) - log sum)^2 / 2, children's flows detached.

    Alone it reaches the per-state optimum where the target is out of reach, whatever the sampling. It asks for the
    reward of every child that is complete and of every visited state that may stop. A backward policy, where there is a
    choice of parents, learns by likelihood to be the reversal of the forward one, which it is at balance.
    """

    form: Form = MARGINAL

    reports = ("kl",)
    bootstraps = True

    @property
    def needs(self):
        return frozenset({"law", "log_flow", "log_pb"})

    def residual(self, t):
        return t.log_flow[:-1]  # for its shape alone: a state-level loss has no residual of trajectories, see `loss`

    def loss(self, t, world):
        return self.loss_and_stats(t, world)[0]

    def loss_and_stats(self, t, world):
        kl, gap, usable = flow_kl(t, world)
        reverse = masked_mean(-t.log_pb, t.alive, (0, 2))
        reverse = reverse - reverse.detach()  # its gradient only: the loss stays zero at balance
        loss = masked_mean(kl + 0.5 * gap.square(), usable, (0, 2)) + reverse
        return loss, {"kl": masked_mean(kl.detach(), usable, (0, 2))}


@dataclass(frozen=True)
class SGFNKL(Objective):
    """Stochastic detailed balance + weight * r_gamma * (flow KL + flow gap): the documents' SGFN-KL, with a sound KL.

    r_gamma is detached and positive, and both parts are zero exactly at balance, so where the target can be reached
    this objective reaches it. Where it cannot, the mixture ends at neither part's limit. Several `gammas` are averaged.
    """

    gammas: tuple[float, ...] = (0.5,)
    weight: float = 1.0
    form: Form = JOINT
    per_step: bool = False  # one band, and so one ratio, per time step
    balance_weight: float = 0.0  # of `entropy_balance_loss` at the first step; falls as 1 / (1 + step / balance_tau)
    balance_tau: float = 100.0
    memory: EntropyAverage | None = None

    reports = ("entropy_high", "entropy_low", "r_gamma", "kl", "kl_adjusted", "kl_part")

    def __post_init__(self) -> None:
        if not self.gammas:
            raise UserError("SGFN-KL was given no gamma: give at least one, above 0 and at most 1")
        for gamma in self.gammas:
            check_gamma(gamma)
        if not self.weight >= 0:
            raise UserError(f"the weight of the KL term is {self.weight}, but it must be 0 or more")

    @property
    def needs(self):
        return self.form.needs | {"log_pb", "log_flow", "law", "entropy"}

    def residual(self, t):
        return DetailedBalance(self.form).residual(t)

    def loss(self, t, world):
        return self.loss_and_stats(t, world)[0]

    def loss_and_stats(self, t, world):
        balance = self.form.complete(masked_mean(self.residual(t).square(), t.alive, (0, 2)), world)
        kl, gap, usable = flow_kl(t, world)
        band = self.band(t)
        r = mean_entropy_ratio(band.high, band.low, self.gammas)  # [S], or [T, S]
        added = self.weight * masked_mean(r.unsqueeze(-1) * (kl + 0.5 * gap.square()), usable, (0, 2))
        loss = balance + added
        if self.balance_weight > 0:
            share = normalised_entropy(t.entropy, t.choices)
            weight = self.balance_weight / (1 + (0 if world.step is None else world.step) / self.balance_tau)
            gamma = sum(self.gammas) / len(self.gammas)
            loss = loss + weight * entropy_balance_loss(share, t.alive & (t.choices > 1), r, gamma)
        mean_kl = masked_mean(kl.detach(), usable, (0, 2))
        high, low, ratio = ((x.mean(0) if self.per_step else x) for x in (band.high, band.low, r))
        return loss, {
            "entropy_high": high,
            "entropy_low": low,
            "r_gamma": ratio,
            "kl": mean_kl,
            "kl_adjusted": mean_kl - ratio.log(),
            "kl_part": added.detach(),  # of the loss
        }

    def band(self, t: Terms) -> Band:
        """The entropy band of a batch, averaged with earlier ones where there is a memory."""
        band = entropy_band(t.entropy.detach(), t.choices, t.alive, self.per_step)
        return band if self.memory is None else self.memory(band)

    def temper(self) -> Tensor:
        """The temperature [S, 1, 1] of exploration: the averaged ratio of earlier batches, 1 before the first."""
        if self.memory is None or self.per_step:
            raise UserError(
                "exploring by the entropy ratio needs the ratio of earlier batches: "
                "give the objective an EntropyAverage(seeds)"
            )
        return temperature(mean_entropy_ratio(*self.memory.band, self.gammas))


def flow_kl(t: Terms, world: World) -> tuple[Tensor, Tensor, Tensor]:
    """(KL, log F - log of the summed outflow, mask of the states where both are known), each [T, S, B].

    A state counts where the flow of each of its children is known: a finished child by its reward, which the world may
    not know (NaN), any other by the network.
    """
    env = world.task.env
    here = world.trajectories.states[:-1]
    mask = env.moves(here)
    steps, seeds, batch, moves = mask.shape
    move = torch.arange(moves, device=mask.device).expand(mask.shape)
    child = env.step(here.unsqueeze(-2).expand(*mask.shape, here.shape[-1]), move)  # [T, S, B, M, D]
    legal = env.real_moves(mask)
    complete = legal & env.complete(child)
    # of a tree the network has nothing to say of a complete child: it is asked about the parent, which it reads anyway
    asked = torch.where(complete.unsqueeze(-1), here.unsqueeze(-2), child) if env.tree else child
    flat = asked.movedim(1, 0).reshape(seeds, -1, child.shape[-1])
    steady = world.policy if world.steady is None else world.steady
    with torch.no_grad():  # children are targets: an F and a P_B trained on one another drift together
        out = steady(flat)

    def back(x: Tensor) -> Tensor:
        return x.view(seeds, steps, batch, moves, *x.shape[2:]).movedim(0, 1)

    flow = back(out.log_flow)
    usable = t.alive
    reward = world.ask(child, complete & t.alive.unsqueeze(-1))
    if reward is None:
        usable = usable & ~complete.any(-1)
    else:
        usable = usable & ~(complete & reward.isnan()).any(-1)
        flow = torch.where(complete, reward.nan_to_num(), flow)
    if not env.tree:
        log_pb = masked_log_softmax(back(out.backward), env.parents(child))
        flow = flow + pick(log_pb, move)
    onward = keep(legal, flow, NEG)
    if env.stop is not None:
        may_stop = mask[..., env.stop]
        reward = world.ask(here, may_stop & t.alive)
        if reward is None:
            usable = usable & ~may_stop
        else:
            usable = usable & ~(may_stop & reward.isnan())
            onward = torch.where((move == env.stop) & mask, reward.nan_to_num().unsqueeze(-1), onward)
    kl = state_kl(t.law, onward, mask | ~usable.unsqueeze(-1))
    gap = t.log_flow[:-1] - onward.logsumexp(-1)
    return keep(usable, kl, 0), keep(usable, gap, 0), usable
