"""Acting while the oracle works: up to `lag` batches are in flight, and training goes on with the oldest.

A batch is then learned from by a policy up to `lag` steps younger than the one that drew it: off-policy, which balance objectives
allow. What is in flight is part of the state, so that a run goes on exactly.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stochflow.engines.base import Walk
from stochflow.errors import UserError
from stochflow.training.sources import Source
from stochflow.types import Task, Trajectories

PREFIX = "flight."


@dataclass
class _Waiting:
    """A batch in flight; `answer` is None before it is submitted to the oracle, and after the oracle failed."""

    traj: Trajectories
    answer: Future[Tensor] | None = None


class Ahead(Source):
    """Another source's batches, scored `lag` batches ahead in a thread of their own."""

    scored = True
    static = False
    asks = True  # its oracle calls count

    def __init__(self, source: Source, task: Task, lag: int, device: torch.device):
        super().__init__()
        self.source, self.task, self.lag, self.device = source, task, lag, device
        self._flight: deque[_Waiting] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def act(self, step):
        return self.walk(step).trajectories

    def walk(self, step):
        before = list(self._flight)
        for waiting in self._flight:  # after a failure, or read back from a checkpoint
            waiting.answer = waiting.answer or self._submit(waiting.traj)
        while len(self._flight) <= self.lag:
            traj = self.source.act(step)
            self._flight.append(_Waiting(traj, self._submit(traj)))
        first = self._flight[0]
        assert first.answer is not None
        try:
            score = first.answer.result()
        except BaseException as error:  # as it was before this step: what was drawn in it will be drawn again
            if isinstance(error, UserError):
                self.settle()  # the later ones fail as it did, and none is asked behind the back of what comes now
            first.answer = None
            self._flight = deque(before)
            raise
        self._flight.popleft()
        return Walk(first.traj._replace(score=score.to(first.traj.score)))

    def _submit(self, traj: Trajectories) -> Future[Tensor]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "oracle")  # one after another, as without a lag
        return self._thread.submit(self.task.oracle, traj.states[-1])

    def settle(self) -> None:
        """Wait for what is in flight, so that its answers are kept; what fails now is asked again later."""
        wait([w.answer for w in self._flight if w.answer is not None])

    def use(self, engine, word, traces):
        self.source.use(engine, word, None)

    def mix(self, traj):
        return self.source.mix(traj)

    def why_plain(self, task, policy):
        return "batches wait for their oracle while training goes on"

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        state = dict(super().state_dict(*args, **kwargs))
        for place, waiting in enumerate(self._flight):
            state |= {f"{PREFIX}{place}.{name}": value for name, value in waiting.traj._asdict().items()}
        return state

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        inner = {name: value for name, value in state.items() if not name.startswith(PREFIX)}
        result = super().load_state_dict(inner, *args, **kwargs)
        places = sorted({int(name.split(".")[1]) for name in state if name.startswith(PREFIX)})
        self._flight.clear()
        for place in places:
            fields = {name: state[f"{PREFIX}{place}.{name}"].to(self.device) for name in Trajectories._fields}
            self._flight.append(_Waiting(Trajectories(**fields)))
        return result
