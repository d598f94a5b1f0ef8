"""How good a law, a batch of objects, a set of dynamics or a set of seeds is. Everything is float64.

Laws are [..., N] over the same objects and sum to one; log-weights are [S, B] as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stochflow.errors import UserError, need_number, need_whole
from stochflow.files.memory import need
from stochflow.law.doors import need_tensor, need_two
from stochflow.law.numbers import numbers
from stochflow.noise.dynamics import remembered
from stochflow.ops import masked_mean, pick
from stochflow.types import Terms, Trajectories
from stochflow.worlds.env import Channel, Env

# two laws ---------------------------------------------------------------------------------------------------------


def l1(p: Tensor, q: Tensor) -> Tensor:
    """sum |p - q|, [...]."""
    need_two("p", p, "q", q)
    return (p.double() - q.double()).abs().sum(-1)


def tv(p: Tensor, q: Tensor) -> Tensor:
    """Total variation, half of L1: the largest difference in the probability of any event."""
    return l1(p, q) / 2


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) = sum p log(p/q); infinite where q misses what p has."""
    need_two("p", p, "q", q)
    p, q = torch.broadcast_tensors(p.double(), q.double())
    inside = p > 0
    ratio = torch.where(inside, p, 1).log() - torch.where(inside, q, 1).log()
    return torch.where(inside, p * ratio, 0).sum(-1)


def jsd(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence in nats, between 0 and log 2."""
    need_two("p", p, "q", q)
    middle = (p.double() + q.double()) / 2
    return (kl(p, middle) + kl(q, middle)) / 2


# log Z and its bounds ---------------------------------------------------------------------------------------------


def log_weights(terms: Terms) -> Tensor:
    """log w = log R + sum_t (log P_B - log p(move)), [S, B] float64.

    With the true channel in `log_move` its mean is a lower bound on log Z for forward trajectories and an upper bound
    for backward ones. With learned dynamics it bounds nothing.
    """
    if terms.log_move is None or terms.log_pb is None:
        raise UserError(
            "log-weights need log_move and log_pb, but these terms lack them: evaluate with needs={'log_move', 'log_pb'}"
        )
    return terms.log_reward.double() + (terms.log_pb.double() - terms.log_move.double()).sum(0)


def elbo(log_w: Tensor) -> Tensor:
    """Lower bound on log Z: the mean log-weight of forward trajectories; [S, B] -> [S]."""
    return log_w.double().mean(-1)


def eubo(log_w: Tensor) -> Tensor:
    """Upper bound on log Z: the mean log-weight of trajectories drawn backwards from the target; [S, B] -> [S]."""
    return log_w.double().mean(-1)


def log_z_estimate(log_w: Tensor) -> Tensor:
    """log mean w over forward trajectories: consistent in feasible and infeasible worlds alike; [S, B] -> [S]."""
    return log_w.double().logsumexp(-1) - math.log(log_w.shape[-1])


def log_z_error(log_w: Tensor, log_z: float) -> Tensor:
    """|log-mean-weight - log Z|, [S]."""
    return (log_z_estimate(log_w) - log_z).abs()


# samples ----------------------------------------------------------------------------------------------------------


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Rank correlation along the last dimension, ties at their mean rank; NaN where one side is constant; [...]."""
    from scipy.stats import rankdata

    need_two("x", x, "y", y)

    def ranks(v: Tensor) -> Tensor:
        r = torch.as_tensor(rankdata(v.double().cpu().numpy(), axis=-1))
        return r - r.mean(-1, keepdim=True)

    a, b = torch.broadcast_tensors(ranks(x), ranks(y))
    return (a * b).sum(-1) / ((a * a).sum(-1) * (b * b).sum(-1)).sqrt()


def top_k_mean(score: Tensor, k: int = 100) -> Tensor:
    """Mean of the k largest scores (of all, where there are fewer; minus infinity is none), [..., B] -> [...]."""
    need_tensor("score", score)
    need_whole("k", k, 1)
    best = score.double().topk(min(k, score.shape[-1]), -1).values
    return torch.where(best.isfinite(), best, 0.0).sum(-1) / best.isfinite().sum(-1).clamp(min=1)


def diversity(states: Tensor) -> Tensor:
    """Mean number of columns in which two different members of a batch differ, [..., B, D] -> [...].

    Exact and linear in B: two members agree in a column with the frequency of equal entries.
    """
    need_tensor("states", states, 2, whole=True)
    flat = states.reshape(-1, *states.shape[-2:])
    batch = flat.shape[1]
    if batch < 2:
        return torch.zeros(states.shape[:-2], dtype=torch.float64)
    low = flat.amin()
    values = int(flat.amax() - low) + 1
    total = torch.zeros(len(flat), dtype=torch.float64)
    for i, rows in enumerate(flat):
        shift = torch.arange(rows.shape[1], device=rows.device) * values
        counts = torch.bincount((rows - low + shift).flatten(), minlength=values * rows.shape[1]).double()
        agree = (counts * (counts - 1)).sum() / (batch * (batch - 1))  # summed over columns, over ordered pairs
        total[i] = rows.shape[1] - agree
    return total.reshape(states.shape[:-2])


def distinct_fraction(states: Tensor) -> Tensor:
    """Number of different members over the size of the batch, [..., B, D] -> [...]."""
    need_tensor("states", states, 2)
    flat = states.reshape(-1, *states.shape[-2:])
    share = [len(rows.unique(dim=0)) / len(rows) for rows in flat]
    return torch.tensor(share, dtype=torch.float64).reshape(states.shape[:-2])


def commonest_fraction(states: Tensor) -> Tensor:
    """The share of the most frequent member of a batch, [..., B, D] -> [...]."""
    need_tensor("states", states, 2)
    flat = states.reshape(-1, *states.shape[-2:])
    share = [int(rows.unique(dim=0, return_counts=True)[1].max()) / len(rows) for rows in flat]
    return torch.tensor(share, dtype=torch.float64).reshape(states.shape[:-2])


class Novelty(NamedTuple):
    """How new a batch is beside a reference set."""

    fraction: float  # members that are not in the reference
    distance: float  # mean Hamming distance to the nearest reference


def novelty(states: Tensor, reference: Tensor, chunk: int = 1024) -> Novelty:
    """Of states [B, D] beside a reference [R, D]; Hamming distances by one-hot products."""
    from torch.nn.functional import one_hot

    for name, value in (("states", states), ("reference", reference)):
        need_tensor(name, value, 2, whole=True)
    need_whole("chunk", chunk, 1)
    if states.dim() != 2 or states.shape[1:] != reference.shape[1:]:
        raise UserError(
            f"states have shape {tuple(states.shape)} and the reference {tuple(reference.shape)}: give [B, D] and [R, D]"
        )
    if not len(states) or not len(reference):
        raise UserError(
            f"novelty compares {len(states)} states with {len(reference)} references: give at least one of each"
        )
    low = min(int(states.min()), int(reference.min()))
    values = max(int(states.max()), int(reference.max())) - low + 1
    known = one_hot(reference - low, values).flatten(1).float()
    nearest = []
    for part in states.split(chunk):
        agree = one_hot(part - low, values).flatten(1).float() @ known.T  # whole numbers below 2^24: float32 is exact
        nearest.append(states.shape[1] - agree.amax(1).double())
    distance = torch.cat(nearest)
    return Novelty(float((distance > 0).double().mean()), float(distance.mean()))


# dynamics ---------------------------------------------------------------------------------------------------------


class DynamicsReport(NamedTuple):
    """How well a model of the noise fits, on real trajectories it was not trained on; each [S]."""

    nll: Tensor  # mean -log P^(move | state, action)
    nll_true: Tensor  # the same under the true channel: what a perfect model has
    kernel_tv: Tensor  # mean total variation between the model's and the true kernel
    law_bound: Tensor  # sum_t E[TV]: the law under the model is at most this far (in TV) from the law under the truth


@torch.no_grad()
def dynamics_report(env: Env, dynamics: Channel, channel: Channel, traj: Trajectories) -> DynamicsReport:
    """Compare a model of the noise with the true channel along real, on-policy trajectories.

    The bound (simulation lemma) is about the policy that made `traj`: steps after the end and STOP are exact and cost nothing.
    """
    here = traj.states[:-1]
    legal = env.real_moves(env.moves(here))
    spoke = traj.alive & traj.real & (traj.actions >= 0)
    if env.stop is not None:
        spoke = spoke & (traj.moves != env.stop)
    action = traj.actions.clamp(min=0)
    model = dynamics.log_probs(here, legal, action, remembered(dynamics, traj)).double()
    truth = channel.log_probs(here, legal, action, remembered(channel, traj)).double()
    gap = torch.where(legal, model.exp() - truth.exp(), 0).abs().sum(-1) / 2  # [T, S, B]
    # the mean over objects of the sum over steps; rows that are not real say nothing about the policy
    rows = traj.real.sum(-1).clamp(min=1)
    return DynamicsReport(
        nll=masked_mean(-pick(model, traj.moves), spoke, (0, 2)),
        nll_true=masked_mean(-pick(truth, traj.moves), spoke, (0, 2)),
        kernel_tv=masked_mean(gap, spoke, (0, 2)),
        law_bound=torch.where(spoke, gap, 0).sum((0, 2)) / rows,
    )


# seeds ------------------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """The median over seeds and where it may lie."""

    median: float
    low: float
    high: float
    seeds: int


def interval(values: Tensor | Sequence[float], level: float = 0.95, resamples: int = 2000) -> Interval:
    """Median with its percentile-bootstrap interval; one value is its own interval. Repeatable: the draws are fixed."""
    import numpy as np
    from scipy.stats import bootstrap

    x = numbers("values", values)
    need_number("level", level, 0)
    need_whole("resamples", resamples, 1)
    need(8.0 * resamples * x.size, f"resampling {x.size} values {resamples} times", "lower resamples")
    if not level < 1:
        raise UserError(f"level is {level}, but it must be a number above 0 and below 1")
    if not x.size:
        raise UserError("an interval needs at least one value, but none was given")
    middle = float(np.median(x))
    if x.size == 1 or not np.isfinite(x).all() or np.ptp(x) == 0:
        spread = (middle, middle) if x.size == 1 or np.isfinite(x).all() else (math.nan, math.nan)
        return Interval(middle, *spread, x.size)
    draws: Any = bootstrap(
        (x,),
        np.median,
        confidence_level=level,
        n_resamples=resamples,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(middle, float(draws.low), float(draws.high), x.size)
