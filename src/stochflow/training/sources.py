"""Where a training batch comes from: the policy's own rollouts, a log, or a mixture with replay.

A source `act`s (trajectories, scored or not) and, once the oracle has spoken, `mix`es.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stochflow.engines.cuda import walk as rollout_kernel
from stochflow.engines.numba import walk as cpu_walk
from stochflow.learn.buffer import Buffer, join
from stochflow.learn.rollout import compiled_steps, rollout
from stochflow.types import Fading, Task, Trajectories


class Source(nn.Module):
    """`scored`: its trajectories carry their scores already, so the oracle is not asked."""

    scored = False

    def act(self, step: Tensor) -> Trajectories:
        raise TypeError(f"{type(self).__name__} must define act(step)")

    def mix(self, traj: Trajectories) -> Trajectories:
        return traj

    def trace_of(self, traj: Trajectories) -> Any:
        """What the network made of these trajectories' states, if that was kept and the weights are those that walked."""
        return None


class OnPolicy(Source):
    """Rollouts of the policy with exploration explore / (1 + step / tau): it dies out, and no one needs to know the end.

    `temper` says by what the policy is flattened, beside that: pi^(1/temper).
    """

    def __init__(
        self,
        task: Task,
        policy: Any,
        batch: int,
        explore: float = 0.0,
        tau: float = 100.0,
        temper: Callable[[], Tensor] | None = None,
        kernel: bool = True,
        compile: bool = False,
    ):
        super().__init__()
        self.temper, self.kernel, self.steps = temper, kernel, compiled_steps(policy) if compile else None
        self.task, self.batch, self.explore, self.tau = task, batch, explore, tau
        self.traces = False  # whoever learns from a batch at once may ask for what the network made of each state
        self._last: list[Any] = [None, None]  # the trace of the last batch, and the states that it had
        self._policy = [policy]  # held, not owned: its weights are the trainer's to save
        self.key: Tensor
        self.register_buffer(
            "key", torch.zeros(1, dtype=torch.long, device=policy.device)
        )  # of a kernel's random numbers
        self.register_load_state_dict_pre_hook(_keep_its_key)

    def act(self, step):
        policy = self._policy[0]
        explore = Fading(self.explore, self.tau, step) if self.explore > 0 else None
        temper = None if self.temper is None else self.temper()
        row = self.rows(policy)
        last, self._last[:] = self.trace, (None, None)
        if self.traces and self.kernel and temper is None:
            found: Any = None
            if policy.device.type == "cuda":
                self.key = self.key.to(policy.device)
                # what is recorded has other random numbers at every step with the same key
                if not torch.cuda.is_current_stream_capturing():
                    self.key.random_(2**31 - 1)
                found = rollout_kernel.traced_walk(self.task, policy, self.batch, explore, self.key, step)
            else:
                found = cpu_walk.traced_walk(self.task, policy, self.batch, explore, last)
            if found is not None:
                self._last[:] = found[1], found[0].states
                return found[0]
        return rollout(
            self.task, policy, self.batch, row=row, explore=explore, temper=temper, kernel=self.kernel, steps=self.steps
        )

    @property
    def trace(self) -> Any:
        return self._last[0]

    def trace_of(self, traj):
        return self.trace if traj.states is self._last[1] else None

    def moved_on(self, trace: Any) -> None:
        """Others have walked since, in the same memory: the last batch's trace is no more."""
        self._last[:] = trace, None

    def walks(self, task: Task, policy: Any) -> bool:
        """Whether it is this policy that walks, and in this world: what it keeps of the way is then of use to whoever trains it."""
        return self.task.env is task.env and self._policy[0] is policy

    def rows(self, policy: Any) -> Tensor | None:
        """A random context for each trajectory; None where there are no contexts."""
        if self.task.env.contexts is None:
            return None
        count = len(self.task.env.contexts)
        return torch.randint(count, (policy.num_seeds, self.batch), device=policy.device)


def _keep_its_key(source: Any, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Where a run of an earlier version has none; on a GPU also where one on a CPU never drew any."""
    found = state.setdefault(f"{prefix}key", source.key)
    if source.traces and source.key.is_cuda and not bool(found.any()):
        state[f"{prefix}key"] = torch.randint(2**31 - 1, (1,))


class Logged(Source):
    """Trajectories that somebody recorded, drawn with replacement."""

    scored = True

    def __init__(self, log: Trajectories, batch: int):
        super().__init__()
        self.log, self.batch = log, batch

    def act(self, step):
        log = self.log
        seeds, size = log.score.shape
        chosen = torch.randint(size, (seeds, self.batch), device=log.score.device)

        def draw(x: Tensor) -> Tensor:  # [T, S, N, ...] -> [T, S, B, ...]
            index = chosen.view(1, seeds, self.batch, *[1] * (x.dim() - 3)).expand(x.shape[0], -1, -1, *x.shape[3:])
            return x.gather(2, index)

        score, real = log.score.gather(1, chosen), log.real.gather(1, chosen)
        return Trajectories(draw(log.states), draw(log.actions), draw(log.moves), draw(log.alive), score, real)


class Mixed(Source):
    """Another source's batch with `replay` trajectories from a buffer beside it; the fresh ones enter the buffer."""

    def __init__(self, source: Source, buffer: Buffer, replay: int):
        super().__init__()
        self.source, self.buffer, self.replay = source, buffer, replay
        self.scored = source.scored

    def act(self, step):
        return self.source.act(step)

    def mix(self, traj):
        traj = self.source.mix(traj)
        self.buffer.add(traj)
        return join(traj, self.buffer.sample(self.replay))
