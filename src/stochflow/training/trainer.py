"""The loop: act, ask the oracle, learn. One iteration is a function without arguments on static tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stochflow.engines.capture import WARM_UP, Captured, aside
from stochflow.engines.cuda import gradient as balance_kernel
from stochflow.engines.cuda import noise as noise_kernel
from stochflow.engines.flat import FlatParameters
from stochflow.engines.numba import gradient as cpu_balance
from stochflow.engines.numba import many as cpu_recording
from stochflow.engines.numba import noise as cpu_noise
from stochflow.errors import UserError
from stochflow.learn.buffer import Buffer
from stochflow.learn.evaluate import evaluate
from stochflow.learn.objectives import Objective
from stochflow.noise.dynamics import Dynamics
from stochflow.ops import one_thread, zeros
from stochflow.scores import worth
from stochflow.training.sources import OnPolicy, Source
from stochflow.types import Judged, Task, Trajectories, World

FEW_STEPS = 1 << 14  # of a batch: up to there one thread is enough for the operators beside compiled loops
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


class Trainer:
    """Trains policy and dynamics, and keeps a running average of their weights, which is what one evaluates.

    Nothing here knows how many steps are planned: a run is good at any moment and can go on from any moment.
    """

    def __init__(
        self,
        task: Task,
        policy: Any,
        dynamics: Dynamics,
        objective: Objective,
        source: Source,
        *,
        lr: float = 1e-3,
        clip: float = 10.0,
        dynamics_lr: float = 1e-3,
        dynamics_clip: float = 10.0,
        dynamics_buffer: Buffer | None = None,
        dynamics_rounds: int = 1,
        dynamics_sample_size: int = 16,
        capture: bool = True,
        compile: bool = False,
    ):
        self.task, self.policy, self.dynamics, self.objective, self.source = task, policy, dynamics, objective, source
        self.dynamics_buffer, self.dynamics_rounds, self.dynamics_sample_size = (
            dynamics_buffer,
            dynamics_rounds,
            dynamics_sample_size,
        )
        device = policy.device
        self.policy_flat = FlatParameters(policy, lr, clip, follow=objective.bootstraps)
        self.dynamics_flat = (
            FlatParameters(dynamics, dynamics_lr, dynamics_clip) if any(True for _ in dynamics.parameters()) else None
        )
        if self.dynamics_flat is not None and self.dynamics_flat.num_seeds != policy.num_seeds:
            raise UserError(
                f"the policy has {policy.num_seeds} seeds, but the model of the noise has {self.dynamics_flat.num_seeds}: build both from the same seeds"
            )
        self.step = torch.zeros((), dtype=torch.float64, device=device)  # what schedules read
        self.steps_done = 0  # the same on the host
        self._scores, self._scored = (
            0,
            0,
        )  # objects of a batch, and all that the oracle was asked about, both known on the host
        self._asked = torch.zeros((), dtype=torch.long, device=device)  # beyond those, by an objective
        self.raw_stats = torch.zeros(len(STATS) + len(objective.reports), policy.num_seeds, device=device)
        self._none = zeros((policy.num_seeds,), device)
        self.stop_requested = False  # set from a signal handler: what is in flight is finished first
        self.capture = capture
        made: Any = (
            (lambda f: torch.compile(f, dynamic=False)) if compile else (lambda f: f)
        )  # a rollout's step is the source's to compile
        self._judge, self._dynamics_loss = made(self.judge), made(dynamics.loss)
        self._balance = direct_gradient(device.type)
        self._noise = next((module for module in (cpu_noise, noise_kernel) if module.fits(dynamics)), None)
        own = type(source) is OnPolicy and source.walks(task, policy)
        if own and self._balance is not None and (source.steps is None or device.type == "cuda"):
            # steps that were compiled are for the CPU: on a GPU, where a kernel walks, there is nothing to compile
            source.traces = self._balance.fits(task, policy, dynamics, objective, source.batch)
        self._worth: Any = (
            worth.of_all(task, device) if own and source.traces else None
        )  # of the last states, by number,
        self._known = None if self._worth is None else task  # as long as the task is this one
        self._alone: Callable[[], AbstractContextManager[None]] = nullcontext
        if device.type == "cpu" and own and source.traces:
            for flat in (self.policy_flat, self.dynamics_flat):
                if flat is not None:
                    flat.compile()
            if policy.num_seeds * source.batch * task.env.horizon <= FEW_STEPS:
                self._alone = one_thread
        self._at_once = device.type == "cpu"
        self._recording: cpu_recording.Recording | None = None  # many iterations on the CPU, and what they are made of
        self._pool: Any = None  # memory that all recordings share: they are never replayed at once
        self._steps: dict[bool, list[Callable[[], object]]] = {}  # the iteration with and without its figures

    # one iteration ----------------------------------------------------------------------------------------------

    def act(self) -> Trajectories:
        return self.source.act(self.step)

    def score(self, traj: Trajectories) -> Trajectories:
        """The oracle's word on what was built."""
        if self.source.scored:
            return traj
        trace = self._looks_up(traj)
        found = self.task.oracle(traj.states[-1]) if trace is None else self._worth[0][trace.finals]
        self._count(traj)
        return traj._replace(score=found.to(traj.score))

    def _batch(self) -> Trajectories:
        """To learn from. Where its worth is known beforehand, whoever learns looks it up, and scores are for whoever notes them or keeps them."""
        traj = self.act()
        if self._looks_up(traj) is None or self.dynamics_buffer is not None:
            return self.score(traj)
        self._count(traj)
        return traj

    def _looks_up(self, traj: Trajectories) -> Any:
        """The trace by which the worth of these trajectories' last states is looked up; None where it is not."""
        return self.source.trace_of(traj) if self.task is self._known else None

    def _count(self, traj: Trajectories) -> None:
        self._scores = traj.score.numel()
        if (
            traj.moves.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
        ):  # a recording asks nobody; its replays do
            self._scored += self._scores

    def learn(self, traj: Trajectories, note: bool = True) -> None:
        """One step of policy and dynamics; `note`: also write down the figures of this iteration."""
        if self.source.trace_of(traj) is None:
            with self._steady_dynamics():
                loss, figures = self._judge(self.source.mix(traj), note)
            self.policy_flat.differentiate(loss)
        else:
            loss, figures = self._judge_by_trace(traj, note)
        norm = self.policy_flat.update(self.step, ends=self.dynamics_flat is None)
        dynamics_loss, dynamics_norm = self._learn_dynamics(traj, note)
        if note:
            self._note([loss.detach(), dynamics_loss, norm, dynamics_norm], figures)

    def judge(self, batch: Trajectories, note: bool) -> tuple[Tensor, list[Tensor]]:
        """The loss of a batch [S] and, where asked, its figures in the order of STATS from the fifth on; a pure function of weights and batch."""
        needs = self.objective.needs | {"entropy"} if note else self.objective.needs
        terms = evaluate(self.task, self.policy, self.dynamics, batch, self.step, needs)
        world = World(
            self.task,
            self.policy,
            self.dynamics,
            batch,
            self.step,
            self._ask,
            self._steady_policy if self.objective.bootstraps else None,
        )
        loss, extra = self.objective.loss_and_stats(terms, world)
        if not note:
            return loss, []
        log_z = terms.log_flow[0] if terms.log_flow is not None else terms.log_z
        figures = _figures(batch, log_z, terms.log_reward, terms.entropy.sum((0, 2)))
        return loss, [x.detach() for x in (*figures, *[extra[name] for name in self.objective.reports])]

    def _judge_by_trace(self, traj: Trajectories, note: bool) -> tuple[Tensor, list[Tensor]]:
        """The same from what the rollout kept, with the gradient already taken."""
        log_rewards, trace = self._log_rewards(traj), self._looks_up(traj)
        found = self._balance_by_trace(traj, log_rewards, note)
        if not note:
            return self._none, []  # which nobody reads
        assert found.entropy is not None
        assert found.log_flow is not None
        if trace is not None:
            score, log_rewards = self._worth[:, trace.finals]
            traj = traj._replace(score=score)
        return found.loss.mean(1), _figures(traj, found.log_flow, log_rewards, found.entropy.sum(1))

    def _log_rewards(self, traj: Trajectories) -> Tensor:
        """[S, B] of what a rollout with a trace has built; [N] of all states, to be looked up by number, where they are known."""
        if self._looks_up(traj) is not None:
            return self._worth[1]
        with torch.no_grad(), self._alone():
            return self.task.reward(traj.score, traj.states[-1], self.step).float()

    def _balance_by_trace(self, traj: Trajectories, log_rewards: Tensor, note: bool) -> Judged:
        """The gradient into the flat block, and what was found on the way."""
        trace, log_k, known = self.source.trace_of(traj), self._arrivals(traj), self._looks_up(traj) is not None
        return self._balance.gradient(
            self.task, self.policy, self.objective, traj, trace, log_rewards, known, log_k, self.policy_flat, note
        )

    def _arrivals(self, traj: Trajectories) -> Tensor | None:
        """[T, S, B, M]: log P(the realised move | each action) by the model of the noise, with averaged weights as everywhere in a balance;
        None where what is meant happens."""
        if self.dynamics.exact:
            return None
        if self._noise is not None and self.dynamics_flat is not None:
            return self._noise.arrivals(self.dynamics, self.dynamics_flat.averaged(), traj)
        env, here = self.task.env, traj.states[:-1]
        with torch.no_grad(), self._steady_dynamics(), self._alone():
            return self.dynamics.arrivals(here, env.real_moves(env.moves(here)), traj.moves)

    def iterate(self, note: bool = True) -> None:
        """One iteration; on a GPU, from the second on, a replay of its recording. Figures that nobody reads need no noting."""
        device = self.policy.device
        if self.steps_done == 0 and device.type == "cuda":
            aside(self._begin, device)  # where the recording will be: one workspace for products serves both
        elif self.steps_done == 0:
            self._begin()
        else:
            if note not in self._steps:
                self._steps[note] = self._record(note)
            for step in self._steps[note]:
                step()
        self.steps_done += 1

    def _begin(self) -> None:
        """The first iteration, which also starts log Z at what its batch says."""
        traj = self.score(self.act())
        with torch.no_grad():
            if self.source.trace_of(traj) is None:
                terms = evaluate(
                    self.task, self.policy, self.dynamics, traj, self.step, frozenset({"log_move", "log_pb"})
                )
                said = terms.log_reward - (terms.log_move - terms.log_pb).sum(0)
            else:
                said = self._balance_by_trace(traj, self._log_rewards(traj), False).estimate
            self.policy.start_log_z(said.mean(1))
        self.learn(traj)

    def _record(self, note: bool) -> list[Callable[[], object]]:
        """The iteration as functions without arguments: one graph, or two around an oracle on the host."""

        def whole() -> None:
            self.learn(self._batch(), note)

        device = self.policy.device
        if device.type != "cuda" or not self.capture:
            return [whole]
        kept = self.state_dict()
        if self.source.scored or getattr(self.task.oracle, "on_device", False):
            aside(whole, device, WARM_UP)
            self.load_state_dict(kept)
            one = Captured(whole)
            self._scores = 0
            self._pool = one.record(self._pool)
            each = self._scores

            def count() -> None:
                self._scored += each

            return [one, count]
        aside(
            lambda: self.learn(self.act(), note), device, WARM_UP
        )  # nothing: a host oracle is asked for real batches only
        self.load_state_dict(kept)
        act = Captured(self.act)
        self._pool = act.record(self._pool)
        fresh = act.result
        scored = fresh._replace(score=torch.zeros_like(fresh.score))
        learn = Captured(lambda: self.learn(scored, note))
        learn.record(self._pool)
        return [act, lambda: scored.score.copy_(self.score(fresh).score), learn]

    def train(self, until: int, every: int = 100, on_log: Callable[[Trainer], None] | None = None) -> None:
        """Go on until `until` steps are done in all; `on_log` is called every `every` steps and at the end."""
        while self.steps_done < until:
            stops = self.stop_requested
            if stops and self.steps_done % every == 0:
                break
            if not stops and self._go_on(min(every - self.steps_done % every, until - self.steps_done) - 1):
                continue
            due = (self.steps_done + 1) % every == 0 or self.steps_done + 1 == until
            self.iterate(
                note=due or stops
            )  # whoever stops makes one more, with its figures: what is saved says how things stand
            if on_log is not None and due:
                on_log(self)
            if stops:
                break

    def _go_on(self, most: int) -> bool:
        """Some iterations at once, at most so many, of which nobody reads the figures; False: the next one is made alone."""
        source: Any = self.source
        if most <= 0 or not self._at_once or self.steps_done < cpu_recording.BEFORE or type(source) is not OnPolicy:
            return False
        if source.trace is None or not source.traces or not source.walks(self.task, self.policy):
            return False
        flats, room = (self.policy_flat, self.dynamics_flat), source.trace.room
        made_of = (
            self.task,
            self.policy,
            self.dynamics,
            self.objective,
            source,
            *flats,
            self.dynamics_buffer,
            self._noise,
        )
        parts = cpu_recording.Parts(*made_of, self._worth if self.task is self._known else None, room, room.kept)
        if not cpu_recording.fits(parts):
            return False
        if self._recording is None or not self._recording.serves(parts):
            self._recording = cpu_recording.Recording(parts)
        return self._recording.run(self.step.item(), most, self._passed)

    def _passed(self, many: int) -> None:
        """So many iterations were made at once."""
        self.steps_done += many
        self.step += many
        self._scored += many * self.policy.num_seeds * self.source.batch
        for flat in (self.policy_flat, self.dynamics_flat):
            if flat is not None:
                flat.passed(many)

    def _ask(self, states: Tensor, where: Tensor) -> Tensor | None:
        """Log-rewards beyond those of the batch, for objectives that look at children; counted."""
        if not getattr(self.task.oracle, "on_device", False):
            return None
        self._asked += where.sum()
        return self.task.reward(self.task.oracle(states), states, self.step).float()

    def _steady_policy(self, state: Tensor) -> Any:
        """The policy with slowly following weights, beside the one that learns."""
        return functional_call(self.policy, self.policy_flat.followed(), (state,))

    @contextmanager
    def _steady_dynamics(self) -> Iterator[None]:
        """The flows balance against the averaged dynamics: the last step's noise in P would be noise in every balance."""
        if self.dynamics_flat is None:
            yield
            return
        self.dynamics_flat.swap()
        try:
            yield
        finally:  # whatever fails inside, what is saved afterwards is in its place
            self.dynamics_flat.swap()

    def _learn_dynamics(self, fresh: Trajectories, note: bool) -> tuple[Tensor, Tensor]:
        """Only from what really happened; from this batch, or from a buffer of earlier ones. Loss and gradient norm, each [S]."""
        self.dynamics.observe(fresh)
        if self.dynamics_flat is None:  # nothing to learn by gradient: the loss is for whoever reads it
            return self.dynamics.loss(fresh) if note else self._none, self._none
        if self.dynamics_buffer is None:
            return self._dynamics_step(fresh, ends=True)
        self.dynamics_buffer.add(fresh)
        for left in reversed(range(self.dynamics_rounds)):
            loss, norm = self._dynamics_step(self.dynamics_buffer.sample(self.dynamics_sample_size), ends=left == 0)
        return loss, norm

    def _dynamics_step(self, traj: Trajectories, ends: bool) -> tuple[Tensor, Tensor]:
        assert self.dynamics_flat is not None
        if self._noise is not None:
            loss = self._noise.differentiate(self.dynamics, traj, self.dynamics_flat)
        else:
            with self._alone():
                loss = self._dynamics_loss(traj)
                self.dynamics_flat.differentiate(loss)
        return loss.detach(), self.dynamics_flat.update(self.step, ends)

    @torch.no_grad()
    def _note(self, learned: list[Tensor], figures: list[Tensor]) -> None:
        """Figures of this iteration into static memory; `learned` in the order of STATS' first four."""
        finite = (torch.isfinite(learned[0]) & torch.isfinite(learned[2])).float()
        rows = [*learned, *figures[:5], finite, *figures[5:]]
        self.raw_stats.copy_(torch.stack([r.to(self.raw_stats) for r in rows]))

    @property
    def oracle_calls(self) -> int:
        """How often the oracle was asked about an object, so far."""
        return int(self._asked) + self._scored

    @property
    def stats(self) -> dict[str, Tensor]:
        """The last iteration's figures, one a seed [S]; reading them is the one place where the device is waited for."""
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
            "dynamics_buffer": self.dynamics_buffer,
            "objective": self.objective.memory,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that changes, flat by name: weights, averages, optimiser, step, random state, buffers, counts."""
        state: dict[str, Tensor] = {
            "step": self.step.cpu().clone(),
            "oracle_calls": self._asked.cpu() + self._scored,
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
        self._asked.copy_(state["oracle_calls"])
        self._scored = 0
        self.raw_stats.copy_(state["stats"])
        for name, part in self._parts().items():
            if part is not None:
                part.load_state_dict({k[len(name) + 1 :]: v for k, v in state.items() if k.startswith(name + ".")})
        torch.set_rng_state(state["random.cpu"])
        if "random.cuda" in state and self.policy.device.type == "cuda":
            torch.cuda.set_rng_state(state["random.cuda"], self.policy.device)


def _figures(batch: Trajectories, log_z: Tensor, log_reward: Tensor, entropy: Tensor) -> list[Tensor]:
    """In the order of STATS from the fifth on; `entropy` [S] = the sum over all steps."""
    length = batch.alive.sum(0).float()
    return [
        log_z.mean(1),
        batch.score.mean(1),
        log_reward.mean(1),
        length.mean(1),
        entropy / length.sum(1).clamp(min=1),
    ]


def direct_gradient(device: str) -> Any:
    """The module that takes gradients without autograd where it fits; None where there is none."""
    return {"cpu": cpu_balance, "cuda": balance_kernel}.get(device)
