"""The loop: act, ask the oracle, learn. One iteration is a function without arguments on static tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stochflow.engines.base import Job, Residuals, Rewards, Schedule, Walk
from stochflow.engines.capture import aside
from stochflow.engines.choose import Word, choose
from stochflow.engines.flat import FlatParameters
from stochflow.errors import need_kind, need_number
from stochflow.learn.buffer import with_scores
from stochflow.learn.evaluate import evaluate
from stochflow.learn.objectives import Objective
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Dynamics
from stochflow.ops import zeros
from stochflow.scores import worth
from stochflow.scores.rewards import Sharpening
from stochflow.training import distributed
from stochflow.training.noise import NoiseLearner, NoiseTraining
from stochflow.training.recorded import OracleCalls, recorded
from stochflow.training.search.paths import code
from stochflow.training.sources import OnPolicy, Source, refuse_unknown_actions
from stochflow.types import PolicyOut, Task, Trajectories, World

STATS = (
    "loss",
    "dynamics_loss",
    "grad_norm",
    "dynamics_grad_norm",
    "log_z_learned",
    "mean_score",
    "mean_log_reward",
    "mean_length",
    "entropy",
    "finite",
)


class Iteration(NamedTuple):
    """How an iteration is made."""

    clip: float = 10.0  # largest gradient norm of policy and flow, per seed
    capture: bool = True  # as a CUDA graph, on a GPU
    compile: bool = False  # the loss, and the steps of a plain rollout, by torch.compile
    engine: Word = "auto"  # the word of `--engine`


class Trainer:
    """Trains policy and dynamics, and keeps a running average of their weights, which is what one evaluates.

    Nothing here knows how many steps are planned: a run is good at any moment and can go on from any moment.
    `engines` says which engine was chosen for each operation, and why.
    """

    def __init__(
        self,
        task: Task,
        policy: Policy,
        dynamics: Dynamics,
        objective: Objective,
        source: Source,
        *,
        lr: float = 1e-3,
        noise: NoiseTraining = NoiseTraining(),  # noqa: B008 - frozen
        iteration: Iteration = Iteration(),  # noqa: B008
    ):
        need_kind("task", task, Task, "a Task, as strings_task or grid_task make one")
        need_number("lr", lr, above=0)
        policy.refuse_shared()
        self.task, self.policy, self.dynamics, self.objective, self.source = task, policy, dynamics, objective, source
        self.iteration = iteration
        device = policy.device
        self.policy_flat = FlatParameters(policy, lr, iteration.clip, follow=objective.bootstraps)
        self.noise = NoiseLearner(dynamics, noise, policy.num_seeds)
        self.dynamics_flat = self.noise.flat
        self.step = torch.zeros((), dtype=torch.float64, device=device)  # what schedules read
        self.steps_done = 0  # the same on the host
        self.calls = OracleCalls(device)
        self.raw_stats = torch.zeros(len(STATS) + len(objective.reports), policy.num_seeds, device=device)
        self._zero = zeros((policy.num_seeds,), device)
        self.stop_requested = False  # set from a signal handler: the iteration in flight is finished first
        self._loss: Any = torch.compile(self.loss, dynamic=False) if iteration.compile else self.loss
        plain = source.why_plain(task, policy)
        known = worth.of_all(task, device) if not plain and not isinstance(task.reward, Sharpening) else None
        batch = getattr(source, "batch", 0)
        flats = self.policy_flat, self.dynamics_flat
        self.job = Job(
            task, policy, dynamics, objective, batch, *flats, iteration.compile, plain, noise.buffer is not None, known
        )
        self.engines = choose(self.job, iteration.engine)
        self._needs_actions = not objective.needs.isdisjoint({"log_pf", "log_pa"}) and not isinstance(source, OnPolicy)
        source.use(self.engines.walk, iteration.engine, self.engines.gradient.traces(self.job))
        self.group: distributed.Group | None = None  # the processes that learn together; None: this one alone
        self.pool: Any = None  # memory that all captured graphs share: they are never replayed at once
        self._steps: dict[bool, list[Callable[[], object]]] = {}  # the iteration with and without its statistics

    def join(self, group: distributed.Group) -> None:
        """Learn together with other processes from here on: each walks by itself, gradients are averaged."""
        self.group, self.iteration = group, self.iteration._replace(capture=False)

    # one iteration ----------------------------------------------------------------------------------------------

    def act(self) -> Trajectories:
        """Fresh trajectories, without scores."""
        return self.source.act(self.step)

    def score(self, traj: Trajectories) -> Trajectories:
        """The same with the oracle's scores, counted."""
        if self.source.scored:
            if self.source.asks:
                self._count(traj)
                self._sharpen(traj.score, traj.states[-1])
            return traj
        states = traj.states[-1]
        if self.group is None or getattr(self.task.oracle, "on_device", False):
            found = self.task.oracle(states)
        else:
            found = self.group.guarded(lambda: self.task.oracle(states))
        self._count(traj)  # what fails is not counted: it is asked again
        self._sharpen(found, states)
        return (
            with_scores(traj, found)
            if getattr(self.task.oracle, "on_nan", "") == "skip"
            else traj._replace(score=found.to(traj.score))
        )

    def _sharpen(self, score: Tensor, states: Tensor) -> None:
        if isinstance(self.task.reward, Sharpening):
            self.task.reward.observe(score, code(states))

    def fresh(self) -> Walk:
        """A batch to learn from, with its scores unless they are looked up by state number later."""
        walk = self.source.walk(self.step)
        if self.noise.how.buffer is None and self._numbered(walk) is not None:
            self._count(walk.trajectories)
            return walk
        return walk._replace(trajectories=self.score(walk.trajectories))

    def _numbered(self, walk: Walk) -> Tensor | None:
        """[S, B] numbers of the last states, where scores and rewards of all states are known; else None."""
        known = self.job.worth is not None and self.task is self.job.task and walk.trace is not None
        return walk.trace.final if known and walk.trace is not None else None

    def _count(self, traj: Trajectories) -> None:
        self.calls.count(traj.score, 1 if self.group is None else self.group.ranks)

    def learn(self, batch: Trajectories | Walk, note: bool = True) -> None:
        """One step of policy and dynamics; `note`: also write down the statistics of this iteration."""
        walk = batch if isinstance(batch, Walk) else Walk(batch)
        learned_from = walk.trajectories
        if walk.trace is None:
            learned_from = self.source.mix(learned_from)
            if self._needs_actions and (self.steps_done == 0 or self.policy.device.type == "cpu"):
                refuse_unknown_actions(learned_from)
            with self.noise.averaged():
                loss, figures = self._loss(learned_from, note)
            self.policy_flat.differentiate(loss)
        else:
            loss, figures = self._traced_gradient(walk, note)
        if self.group is not None:
            self.group.average(self.policy_flat, distributed.terms_in(learned_from, self.objective))
        norm = self.engines.update.update(self.policy_flat, self.step, self.dynamics_flat is None)
        dynamics_loss, dynamics_norm = self.noise.learn(self.engines, walk.trajectories, self.step, note, self.group)
        if note:
            self._note([loss.detach(), dynamics_loss, norm, dynamics_norm], figures)

    def loss(self, batch: Trajectories, note: bool) -> tuple[Tensor, list[Tensor]]:
        """The loss of a batch [S] and, if noted, its statistics in the order of STATS from the fifth on."""
        needs = self.objective.needs | {"entropy"} if note else self.objective.needs
        terms = evaluate(self.task, self.policy, self.dynamics, batch, self.step, needs)
        steady = self._following_policy if self.objective.bootstraps else self._present_policy
        world = World(self.task, self.policy, self.dynamics, batch, self.step, self._ask, steady)
        loss, extra = self.objective.loss_and_stats(terms, world)
        if not note:
            return loss, []
        log_z = terms.log_flow[0] if terms.log_flow is not None else terms.log_z
        figures = _figures(batch, log_z, terms.log_reward, terms.entropy.sum((0, 2)))
        return loss, [x.detach() for x in (*figures, *[extra[name] for name in self.objective.reports])]

    def _traced_gradient(self, walk: Walk, note: bool) -> tuple[Tensor, list[Tensor]]:
        """The same from a trace, with the gradient already taken."""
        found, traj = self._residuals(walk, note), walk.trajectories
        if not note:
            return self._zero, []
        assert found.entropy is not None
        assert found.log_flow is not None
        number = self._numbered(walk)
        if number is None:
            log_reward = self._rewards(walk).log
        else:
            assert self.job.worth is not None
            score, log_reward = self.job.worth[:, number]
            traj = traj._replace(score=score)
        return found.loss.mean(1), _figures(traj, found.log_flow, log_reward, found.entropy.sum(1))

    def _residuals(self, walk: Walk, note: bool) -> Residuals:
        log_k = self.noise.arrivals(self.engines, walk.trajectories)
        return self.engines.gradient.gradient(self.job, walk, self._rewards(walk), log_k, note)

    @torch.no_grad()
    def _rewards(self, walk: Walk) -> Rewards:
        if self._numbered(walk) is not None:
            assert self.job.worth is not None
            return Rewards(self.job.worth[1], True)
        traj = walk.trajectories
        return Rewards(self.task.reward(traj.score, traj.states[-1], self.step).float(), False)

    def iterate(self, note: bool = True) -> None:
        """One iteration; on a GPU, from the second on, a replay of its CUDA graph."""
        if self.steps_done == 0:  # on a GPU, on the stream of the capture: one workspace for products serves both
            aside(self._begin, self.policy.device)
        else:
            if note not in self._steps:
                self._steps[note] = recorded(self, note)
            for step in self._steps[note]:
                step()
            self.policy_flat.changed()  # which a replay does not say
        self.steps_done += 1

    def _begin(self) -> None:
        """The first iteration, which also starts log Z from its batch's estimate."""
        walk = self.source.walk(self.step)
        walk = walk._replace(trajectories=self.score(walk.trajectories))
        with torch.no_grad():
            if walk.trace is None:
                needs = frozenset({"log_move", "log_pb"})
                terms = evaluate(self.task, self.policy, self.dynamics, walk.trajectories, self.step, needs)
                estimate = terms.log_reward - (terms.log_move - terms.log_pb).sum(0)
            else:
                estimate = self._residuals(walk, False).log_z_estimate
            start = estimate.mean(1)
            self.policy.start_log_z(start if self.group is None else self.group.mean(start))
        self.learn(walk)

    def train(self, until: int, every: int = 100, on_log: Callable[[Trainer], None] | None = None) -> None:
        """Go on until `until` steps are done in all; `on_log` is called every `every` steps and at the end."""
        while self.steps_done < until:
            stops = self.stop_requested if self.group is None else self.group.any(self.stop_requested)
            if stops and self.steps_done % every == 0:
                break
            left = min(every - self.steps_done % every, until - self.steps_done) - 1
            if not stops and self._many(left):
                continue
            due = (self.steps_done + 1) % every == 0 or self.steps_done + 1 == until
            self.iterate(note=due or stops)  # the last one before a stop is noted: what is saved has its statistics
            if on_log is not None and due:
                on_log(self)
            if stops:
                break

    def _many(self, most: int) -> bool:
        """Several iterations without statistics in one call, at most so many; False: the next one is made alone."""
        source = self.source
        if (
            most <= 0
            or self.group is not None
            or self.task is not self.job.task
            or not isinstance(source, OnPolicy)
            or source.traces is None
        ):
            return False
        schedule = Schedule(self.steps_done, source.exploration(self.step), source.traces)
        made = self.engines.gradient.many(self.job, schedule, most)
        self.steps_done += made
        self.step += made
        self.calls.add(made * self.policy.num_seeds * self.job.batch)
        return made > 0

    def _ask(self, states: Tensor, where: Tensor) -> Tensor | None:
        """Log-rewards beyond those of the batch, for objectives that look at children; counted."""
        if not getattr(self.task.oracle, "on_device", False):
            return None
        self.calls.beyond += where.sum() if self.group is None else self.group.sum(where.sum())
        return self.task.reward(self.task.oracle(states), states, self.step).float()

    def _present_policy(self, state: Tensor) -> PolicyOut:
        """The policy at states of which many are the same."""
        return self.policy(state, repeats=True)

    def _following_policy(self, state: Tensor) -> PolicyOut:
        """The policy with slowly following weights, beside the one that learns."""
        return functional_call(self.policy, self.policy_flat.followed(), (state,), {"repeats": True})

    @torch.no_grad()
    def _note(self, learned: list[Tensor], figures: list[Tensor]) -> None:
        """Statistics of this iteration into static memory; `learned` in the order of STATS' first four."""
        finite = (torch.isfinite(learned[0]) & torch.isfinite(learned[2])).float()
        rows = [*learned, *figures[:5], finite, *figures[5:]]
        found = torch.stack([r.to(self.raw_stats) for r in rows])
        self.raw_stats.copy_(found if self.group is None else self.group.mean(found))

    @property
    def oracle_calls(self) -> int:
        """Objects that the oracle has scored so far."""
        return int(self.calls.total())

    @property
    def stats(self) -> dict[str, Tensor]:
        """The last noted iteration's statistics, per seed [S]; nothing else in training waits for the device."""
        return dict(zip((*STATS, *self.objective.reports), self.raw_stats.cpu(), strict=True))

    # weights and state --------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, policy and dynamics carry their averaged weights."""
        flats = [f for f in (self.policy_flat, self.dynamics_flat) if f is not None]
        for f in flats:
            f.swap()
        try:
            yield
        finally:
            for f in flats:
                f.swap()

    def _parts(self) -> dict[str, nn.Module | FlatParameters | None]:
        return {
            "policy": self.policy_flat,
            "dynamics": self.dynamics_flat,
            "counts": self.dynamics if self.dynamics_flat is None else None,
            "source": self.source,
            "reward": self.task.reward if isinstance(self.task.reward, nn.Module) else None,
            "dynamics_buffer": self.noise.how.buffer,
            "objective": self.objective.memory,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that changes, flat by name: weights, averages, optimiser, step, random state, buffers, counts."""
        state: dict[str, Tensor] = {
            "step": self.step.cpu().clone(),
            "oracle_calls": self.calls.total(),
            "stats": self.raw_stats.cpu().clone(),
            "random.cpu": torch.get_rng_state(),
        }
        if self.policy.device.type == "cuda":
            state["random.cuda"] = torch.cuda.get_rng_state(self.policy.device)
        for name, part in self._parts().items():
            if part is not None:
                state |= {f"{name}.{k}": v.detach().cpu().clone() for k, v in part.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.step.copy_(state["step"])
        self.steps_done = int(state["step"])
        self.calls.load(state["oracle_calls"])
        self.raw_stats[: len(state["stats"])].copy_(state["stats"])  # an earlier version noted fewer
        for name, part in self._parts().items():
            if part is not None:
                part.load_state_dict({k[len(name) + 1 :]: v for k, v in state.items() if k.startswith(name + ".")})
        torch.set_rng_state(state["random.cpu"])
        if "random.cuda" in state and self.policy.device.type == "cuda":
            torch.cuda.set_rng_state(state["random.cuda"], self.policy.device)


def _figures(batch: Trajectories, log_z: Tensor, log_reward: Tensor, entropy: Tensor) -> list[Tensor]:
    """In the order of STATS from the fifth on; `entropy` [S] = the sum over all steps."""
    length = batch.alive.sum(0).float()
    means = [log_z.mean(1), batch.score.mean(1), log_reward.mean(1), length.mean(1)]
    return [*means, entropy / length.sum(1).clamp(min=1)]
