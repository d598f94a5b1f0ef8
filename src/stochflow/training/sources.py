"""Where a training batch comes from: the policy's own rollouts, a log, or a mixture with replay.

A source `act`s (trajectories, scored or not) and, once the oracle has answered, `mix`es.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stochflow.engines.base import Engine, Request, Traces, Walk
from stochflow.engines.capture import recording
from stochflow.engines.choose import Word, walk
from stochflow.errors import UserError
from stochflow.learn.buffer import Buffer, join
from stochflow.learn.rollout import compiled_steps
from stochflow.nets.policy import Policy
from stochflow.types import Fading, Task, Trajectories


class Source(nn.Module):
    """`scored`: its trajectories carry their scores already, so the oracle is not asked."""

    scored = False
    asks = False  # scored by the oracle all the same, so that its calls count
    static = True  # its batches have one shape and are made without the host, so that an iteration can be recorded
    traces: Traces | None = None  # where walks are traced for a gradient without autograd

    def act(self, step: Tensor) -> Trajectories:
        raise TypeError(f"{type(self).__name__} must define act(step)")

    def walk(self, step: Tensor) -> Walk:
        """What `act` returns and, where it is kept, the trace it came with."""
        return Walk(self.act(step))

    def mix(self, traj: Trajectories) -> Trajectories:
        return traj

    def why_plain(self, task: Task, policy: Policy) -> str:
        """Why its batches are not fresh rollouts of this policy alone, so that no trace serves; "": they are."""
        return f"batches come from {type(self).__name__}"

    def use(self, engine: Engine, word: Word, traces: Traces | None) -> None:
        """Walk by this engine, with traces there; a source that does not walk has no use for either."""


class OnPolicy(Source):
    """Rollouts of the policy with exploration explore / (1 + step / tau): it dies out without a planned end.

    `temper` gives the temperature that flattens the policy beside that: pi^(1/temper).
    """

    def __init__(
        self,
        task: Task,
        policy: Policy,
        batch: int,
        explore: float = 0.0,
        tau: float = 100.0,
        temper: Callable[[], Tensor] | None = None,
        compile: bool = False,
    ):
        super().__init__()
        self.temper, self.steps = temper, compiled_steps(policy) if compile else None
        self.task, self.batch, self.explore, self.tau = task, batch, explore, tau
        self._policy = [policy]  # in a list, so that its weights are not saved with the source's
        self._engine: Engine | None = None
        self._word: Word = "auto"
        self.key: Tensor
        self.register_buffer(
            "key", torch.zeros(1, dtype=torch.long, device=policy.device)
        )  # of a kernel's random numbers
        self.register_load_state_dict_pre_hook(_keep_key)

    def why_plain(self, task, policy):
        if type(self) is not OnPolicy:
            return super().why_plain(task, policy)
        if self.task.env is not task.env or self._policy[0] is not policy:
            return "batches come from another policy or environment"
        return "the policy is flattened while it explores" if self.temper is not None else ""

    def use(self, engine, word, traces):
        self._engine, self._word, self.traces = engine, word, traces

    def exploration(self, step: Tensor) -> Fading | None:
        """The probability of a uniform action at this step; None: none."""
        return Fading(self.explore, self.tau, step) if self.explore > 0 else None

    def act(self, step):
        return self.walk(step).trajectories

    def walk(self, step):
        policy = self._policy[0]
        temper = None if self.temper is None else self.temper()
        request = Request(
            self.task, policy, self.batch, self.exploration(step), temper, self.rows(policy), self.steps, self.traces
        )
        if self._engine is None or self.traces is None:
            return walk(request, self._word)
        if self.traces.keyed:
            self.key = self.key.to(policy.device)
            if not recording():  # a recorded walk has new random numbers at every step
                self.key.random_(2**31 - 1)
            request = request._replace(key=self.key, step=step)
        return self._engine.walk(request)

    def rows(self, policy: Policy) -> Tensor | None:
        """A random context for each trajectory; None where there are no contexts."""
        if self.task.env.contexts is None:
            return None
        count = len(self.task.env.contexts)
        return torch.randint(count, (policy.num_seeds, self.batch), device=policy.device)


def _keep_key(source: OnPolicy, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """A run of an earlier version has no key; one that ran on a CPU never drew it."""
    found = state.setdefault(f"{prefix}key", source.key)
    if source.traces is not None and source.traces.keyed and not bool(found.any()):
        state[f"{prefix}key"] = torch.randint(2**31 - 1, (1,))


class Logged(Source):
    """Recorded trajectories, drawn with replacement."""

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


def refuse_unknown_actions(traj: Trajectories) -> None:
    """UserError where a step that is to be learned from has no action (-1): its chance under the policy is not known."""
    if bool((traj.alive & (traj.actions < 0)).any()):
        raise UserError(
            "trajectories whose actions are unknown (-1) were given to an objective over actions and moves: "
            "take tb, db, subtb or logvar in the marginal form, which need the moves alone"
        )


class Mixed(Source):
    """Another source's batch with `replay` trajectories from a buffer beside it; the fresh ones enter the buffer."""

    def __init__(self, source: Source, buffer: Buffer, replay: int):
        super().__init__()
        self.source, self.buffer, self.replay = source, buffer, replay
        self.scored, self.asks, self.static = source.scored, source.asks, source.static

    def act(self, step):
        return self.source.act(step)

    def use(self, engine, word, traces):
        self.source.use(engine, word, None)

    def why_plain(self, task, policy):
        return "replayed trajectories join the batch"

    def mix(self, traj):
        traj = self.source.mix(traj)
        self.buffer.add(traj)
        return join(traj, self.buffer.sample(self.replay))
