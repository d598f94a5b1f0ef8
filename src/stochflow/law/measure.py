"""How far a policy is from its target: the exact law where the space can be listed, samples where it cannot.

Looking never changes training: everything here draws from a forked random stream. The keys are those of `eval --json`,
`floor --json` and `metrics.jsonl`; figures of several seeds are their median, with `_low` and `_high` beside it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from stochflow.engines.base import Request
from stochflow.engines.choose import walk
from stochflow.errors import need_kind, need_whole
from stochflow.law import floors, metrics
from stochflow.law.by_condition import Condition, law_rows, listed
from stochflow.law.doors import need_task
from stochflow.law.exact import Graph, TargetLaw, exact_law, expected_modes, target_law
from stochflow.law.task_modes import task_modes
from stochflow.learn.buffer import with_scores
from stochflow.learn.entropy import entropy_band, entropy_ratio
from stochflow.learn.evaluate import evaluate
from stochflow.learn.rollout import backward_rollout
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Dynamics, Known
from stochflow.scores.oracles import Cached, Host, refuse_unfinished
from stochflow.training.search.paths import code
from stochflow.types import Task, Trajectories, plain
from stochflow.worlds.env import Enumerable

LISTED = 2_000_000  # states up to which the law is exact
LISTED_SECONDS = 5.0  # what asking a Python oracle about every object may take
QUICK_PROGRAM = 1_000  # states up to which the linear program of a floor is not felt
SAMPLES = 2_000  # objects drawn per seed at each look
DRAWN = 500  # objects drawn per seed, at least, to see whether they repeat themselves: these are not scored
GAMMA = 0.5  # of the entropy ratio that is shown


@contextmanager
def forked(seed: int, device: torch.device) -> Iterator[None]:
    """A random stream of its own; the one outside goes on as if nothing had been drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def listable(env: Enumerable, budget: int | None = None) -> bool:
    """Whether all states fit a list, and the oracle may be asked about all finished objects within its budget."""
    if env.count() > LISTED:
        return False
    compiled = getattr(env, "compiled", None)  # under rules fewer strings are finished than there are beginnings
    return budget is None or (env.count() if compiled is None else compiled.product.strings) <= budget


class Yardstick:
    """What a policy on this task is measured against: target, floor and modes, computed once and when first needed."""

    def __init__(self, task: Task, device: torch.device, samples: int = SAMPLES, budget: int | None = None):
        """`samples` are drawn a seed at each look; a space of more objects than the oracle's `budget` is not listed."""
        need_task(task)
        need_kind("device", device, torch.device, 'a device, such as torch.device("cpu")')
        need_whole("samples", samples, 1)
        if budget is not None:
            need_whole("budget", budget, 0)
        self.device, self.samples, self.budget = device, samples, budget
        # a Python oracle is asked about each object once
        self.task = task._replace(oracle=Cached(task.oracle)) if isinstance(task.oracle, Host) else task
        self.fast = bool(getattr(task.oracle, "on_device", False))
        self.exact = self._listable()

    def _listable(self) -> bool:
        env = self.task.env
        if not isinstance(env, Enumerable) or env.contexts is not None or not listable(env, self.budget):
            return False
        first = env.initial((1,), torch.zeros(1, dtype=torch.long, device=self.device))
        if self.task.channel.begin(first) is not None:
            return False
        if self.fast:
            return True
        states = env.all_states()
        ends = states[env.complete(states)][:64].to(self.device)
        begun = time.perf_counter()
        self.task.oracle(ends)
        return (time.perf_counter() - begun) / len(ends) * env.count() < LISTED_SECONDS

    @cached_property
    def graph(self) -> Graph:
        return Graph(self.task.env, device=self.device)

    @cached_property
    def target(self) -> TargetLaw:
        return target_law(self.graph, self.task)

    @cached_property
    def floor(self) -> floors.Floor:
        return floors.floor(self.task, self.graph, self.target)

    @cached_property
    def modes(self) -> Tensor | None:
        at = task_modes(self.task)
        return None if at is None else at.to(self.device)

    @cached_property
    def conditions(self) -> list[Condition]:
        """Of a task with conditions each one listed; none where that is too much for the oracle or for us."""
        return listed(self.task, self.device) if self.fast else []

    @property
    def floor_is_quick(self) -> bool:
        return self.exact and (self.task.channel.exact or self.graph.is_tree or len(self.graph) <= QUICK_PROGRAM)

    def floor_figures(self, objective: str, backward: str) -> dict[str, Any]:
        """What stands beside every measured law."""
        if not self.exact:
            why = "the space is too large to list, or its oracle too slow to ask about all of it"
            if self.task.env.contexts is not None:
                why = (
                    "each condition has a floor of its own, see `stochflow floor`"
                    if self.conditions
                    else f"with its conditions {why}"
                )
            return dict.fromkeys(("floor_tv", "floor_kind", "floor_tv_reverse_kl", "limit_tv", "naive_tv", "log_z")) | {
                "floor_reason": why
            }
        limit = floors.limit_tv(objective, self.floor, backward)
        return {**self.floor.brief(), "floor_reason": self.floor.reason, "limit_tv": limit}

    @torch.no_grad()
    def measure(
        self, policy: Policy, dynamics: Dynamics, seed: int, final: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, Any], Trajectories]:
        """Figures per seed [S], figures of the task, and the sample they were taken from.

        A slow oracle whose space is not listed is asked about the sample only at the end (`final`).
        """
        task, env = self.task, self.task.env
        each: dict[str, Tensor] = {}
        known: dict[str, Any] = {"samples": self.samples}
        with forked(seed, self.device):
            traj = walk(Request(task, policy, self.samples)).trajectories
            refuse_unfinished(env, traj.states[-1])  # as an oracle in Python does; a tensor function scores anything
            if self.exact or self.fast or final:
                found = task.oracle(traj.states[-1]).to(traj.score)
                if bool(found.isnan().all(1).any()):  # of some seed nothing drawn has a score: there is no figure of it
                    traj, known["unscored"] = traj._replace(score=found), True
                else:
                    traj = with_scores(traj, found)
                    each |= self._from_sample(policy, traj)
            if not task.channel.exact and not isinstance(dynamics, Known):
                fit = metrics.dynamics_report(env, dynamics, task.channel, traj)
                each |= {
                    "dynamics_nll": fit.nll,
                    "dynamics_nll_true": fit.nll_true,
                    "dynamics_tv": fit.kernel_tv,
                    "dynamics_bound": fit.law_bound,
                }
            if self.exact:
                of_law, fixed = self._from_law(policy, traj)
                each |= of_law
                known |= fixed
            elif final and self.conditions:
                known["conditions"] = law_rows(task, policy, self.conditions)
            more = traj if self.samples >= DRAWN else walk(Request(task, policy, DRAWN)).trajectories
            last = more.states[-1]
            each |= {"distinct": metrics.distinct_fraction(last), "commonest": metrics.commonest_fraction(last)}
        return each, known | {"drawn": last.shape[1]}, traj

    def _from_sample(self, policy: Policy, traj: Trajectories) -> dict[str, Tensor]:
        log_w = self._log_weights(policy, traj)
        terms = evaluate(self.task, policy, Known(self.task.env, self.task.channel), traj, None, frozenset({"entropy"}))
        band = entropy_band(terms.entropy, terms.choices, traj.alive)
        log_z, share = by_condition(
            log_w, traj.states[0, ..., 0] if self.task.env.contexts is not None else torch.zeros_like(log_w).long()
        )
        return {
            "elbo": metrics.elbo(log_w),
            "log_z_estimate": log_z,
            "ess": share,
            "sample_score": traj.score.double().mean(1),
            "top_score": metrics.top_k_mean(_once(traj)),
            "diversity": metrics.diversity(traj.states[-1]),
            "band_high": band.high,
            "band_low": band.low,
            "entropy_ratio": entropy_ratio(band.high, band.low, GAMMA),
        }

    def _log_weights(self, policy: Policy, traj: Trajectories) -> Tensor:
        """With the true channel, whatever the model of it: only then do they bound log Z."""
        truth = Known(self.task.env, self.task.channel)
        terms = evaluate(self.task, policy, truth, traj, None, frozenset({"log_move", "log_pb"}))
        return metrics.log_weights(terms)

    def _from_law(self, policy: Policy, traj: Trajectories) -> tuple[dict[str, Tensor], dict[str, Any]]:
        graph, target = self.graph, self.target
        law = exact_law(graph, self.task.channel, policy)  # [S, N]
        ends = graph.terminal
        wanted = target.target
        distance = metrics.l1(law, wanted)
        each = {
            "tv": distance / 2,
            "l1": distance,
            "mean_l1": distance / int(ends.sum()),
            "kl_target_model": metrics.kl(wanted, law),
            "kl_model_target": metrics.kl(law, wanted),
            "jsd": metrics.jsd(law, wanted),
            "spearman": metrics.spearman(law[:, ends], target.log_reward[ends]),
            "log_z_error": metrics.log_z_error(self._log_weights(policy, traj), target.log_z),
        }
        drawn = torch.multinomial(wanted, policy.num_seeds * self.samples, replacement=True)
        back = backward_rollout(self.task, policy, graph.states[drawn].view(policy.num_seeds, self.samples, -1))
        each["eubo"] = metrics.eubo(self._log_weights(policy, scored(self.task, back)))
        if self.modes is None:
            return each, {}
        hit = [torch.isin(self.modes, found).sum() for found in self.task.env.index(traj.states[-1])]  # type: ignore[attr-defined]
        each["modes"] = torch.stack(hit).double()
        each["expected_modes"] = expected_modes(law, self.modes, self.samples)
        return each, {"modes_all": len(self.modes)}


def _once(traj: Trajectories) -> Tensor:
    """Scores [S, B] of different objects: minus infinity where a seed has drawn the object before."""
    number = code(traj.states[-1])
    ordered, where = number.sort(dim=1, stable=True)
    twice = torch.zeros_like(ordered, dtype=torch.bool)
    twice[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.where(torch.zeros_like(twice).scatter_(1, where, twice), -torch.inf, traj.score)


def by_condition(log_w: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """log Z as the weights [S, B] estimate it, and the effective share of the sample; [S], [S].

    Every condition (`row` [S, B]) has a Z of its own, and a mean of all weights would be that of the largest: each is estimated from its
    own samples, and the result is their mean over the samples, as the mean log-weight (ELBO) and the learned log Z are.
    """
    found = []
    for weights, rows in zip(log_w.double(), row, strict=True):
        _, place = rows.unique(return_inverse=True)
        same = place.unsqueeze(0) == torch.arange(int(place.max()) + 1, device=place.device).unsqueeze(
            1
        )  # [conditions, B]
        each = torch.where(same, weights, -math.inf)
        count = same.sum(1)
        total = each.logsumexp(1)
        effective = (2 * total - (2 * each).logsumexp(1)).exp()  # of each condition's samples
        found.append(torch.stack([((total - count.log()) * count).sum(), effective.sum()]) / len(weights))
    made = torch.stack(found)
    return made[:, 0], made[:, 1]


def scored(task: Task, traj: Trajectories) -> Trajectories:
    """With the oracle's scores."""
    return with_scores(traj, task.oracle(traj.states[-1]).to(traj.score))


def summarise(each: dict[str, Tensor], known: dict[str, Any]) -> dict[str, Any]:
    """One record of JSON values: medians, and intervals and the single values where there are several seeds."""
    record: dict[str, Any] = dict(known)
    if "tv" in each and known.get("floor_tv") is not None:
        each = each | {"excess_tv": each["tv"] - known["floor_tv"]}  # may be negative, and is never clamped
    per_seed = {}
    for key, values in each.items():
        row = values.double().cpu()
        found = metrics.interval(row)
        record[key] = found.median
        if len(row) > 1:
            record |= {f"{key}_low": found.low, f"{key}_high": found.high}
            per_seed[key] = row.tolist()
    if per_seed:
        record["seeds"] = per_seed
    for key in (
        "tv",
        "l1",
        "mean_l1",
        "kl_target_model",
        "kl_model_target",
        "log_z_error",
        "modes",
        "expected_modes",
        "excess_tv",
    ):
        record.setdefault(key, None)
    return plain(record)


def not_better(new: float | None, old: float | None) -> bool:
    """Whether a figure (lower is better) does not improve on the best so far."""
    return new is None or not math.isfinite(new) or (old is not None and new >= old)
