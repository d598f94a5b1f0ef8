"""The condition under which objects are drawn: a row of the run's table, or values between its rows.

Values between the rows are one more row while a batch is drawn and scored; the trained run keeps its own table.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.law.measure import scored
from stochflow.scores.oracles import TextOracle
from stochflow.scores.rewards import Default, Linear, Power, Sharpening
from stochflow.types import Task, Trajectories
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.env import Env

log = logging.getLogger("stochflow")
NEAR = 1e-6  # values this close are the same
TOLD = 8  # conditions and columns that a sentence names
BY_SCORE = (Default, Linear, Power, Sharpening)  # rewards that look at the score alone


class Under:
    """Draws of a task under the condition that a text names; under all of its conditions where the text is empty."""

    def __init__(self, task: Task, condition: str):
        self.task = task
        self.row: int | None = None
        self.values: Tensor | None = None  # of a condition that was not learned
        self._known: tuple[bool, bool] | None = None  # whether score and log-reward are, under it
        if condition:
            self.row, self.values = meant(task, condition)
        self.name = "" if self.values is None else _told(self.values)
        if self.values is not None:
            log.warning(
                "condition %s was not among the %d that were learned: it lies between them, and the policy draws under it by what it "
                "learned of those around it",
                self.name,
                self.row,
            )

    @contextmanager
    def table(self) -> Iterator[None]:
        """The environment's table holds the condition, for as long as this lasts."""
        if self.values is None:
            yield
            return
        assert isinstance(self.task.env, Conditioned)
        with self.task.env.with_row(self.values):
            yield

    def rows(self, seeds: int, batch: int, device: torch.device) -> Tensor | None:
        """The row of each draw; None: any."""
        return None if self.row is None else torch.full((seeds, batch), self.row, device=device)

    def scored(self, drawn: Trajectories) -> tuple[Trajectories, Task]:
        """The draws with what is known of their score, and the task that knows as much; what is not known is NaN."""
        if self.values is None:
            return scored(self.task, drawn), self.task
        if self._known is None:
            self._known = self._judge(drawn.states[-1])
        score, reward = self._known
        task = self.task if reward else self.task._replace(reward=_nothing)
        return (scored(task, drawn) if score else drawn._replace(score=torch.full_like(drawn.score, math.nan))), task

    def told(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row of the output: a condition that was not learned stands there by its values, what is not known is blank."""
        if self.values is None or self._known is None:
            return row
        score, reward = self._known
        blank = ({} if score else {"score": None}) | ({} if reward else {"log_reward": None})
        return row | blank | {"condition": self.name}

    def _judge(self, final: Tensor) -> tuple[bool, bool]:
        """Whether score and log-reward can be had under the condition; what cannot is said."""
        env, oracle, reward, values = self.task.env, self.task.oracle, self.task.reward, self.values
        assert isinstance(env, Conditioned)
        assert values is not None
        final = final.cpu()  # where a number beyond a table is an error that can be caught
        spread = torch.linspace(0.5, 1.0, final[..., 0].numel()).view(final.shape[:-1])
        # texts do not hold the condition
        score = isinstance(oracle, TextOracle) or follows(oracle, env, values, final)
        known = score and (type(reward) in BY_SCORE or follows(lambda s: reward(spread, s, None), env, values, final))
        if not known:
            log.warning(
                "the columns %s are left blank under %s: the %s of this task keeps a table of its own for the learned conditions, and "
                "must read env.contexts at each call to know others",
                "log_reward" if score else "score and log_reward",
                self.name,
                "reward" if score else "oracle",
            )
        return score, known


def _nothing(score: Tensor, state: Tensor, step: Any = None) -> Tensor:
    return torch.full_like(score, math.nan)


def follows(ask: Callable[[Tensor], Tensor], env: Conditioned, values: Tensor, final: Tensor) -> bool:
    """Whether what is asked of finished states reads the environment's table and has none of its own.

    A learned row that is shown again under a new number must give what it gives under its own; and there is an answer
    under the new `values`.
    """
    first = final[..., :1]
    try:
        for row in (0, len(env.contexts) - 1):
            with env.with_row(env.contexts[row]) as new:
                old, again = (ask(torch.cat([torch.full_like(first, r), final[..., 1:]], -1)) for r in (row, new))
            if not torch.equal(old, again):
                return False
        with env.with_row(values) as new:
            found = ask(torch.cat([torch.full_like(first, new), final[..., 1:]], -1))
        return bool(found.isfinite().all())
    except Exception:  # whatever a stranger's function says to a row that it does not know
        return False


# what is meant ------------------------------------------------------------------------------------------------------


def meant(task: Task, condition: str) -> tuple[int, Tensor | None]:
    """The row of the condition that is meant, and its values where it is a new one.

    What has precedence: the values of a learned condition, then a whole number as the number of one, then values
    between the learned ones.
    """
    env = task.env
    if env.contexts is None:
        raise UserError(f"--condition {condition!r} was given, but this task has no conditions: leave it out")
    table = env.contexts.double().flatten(1)
    try:
        values = torch.tensor([float(word) for word in condition.split(",")], dtype=torch.float64)
    except ValueError:
        values = torch.full((1,), math.nan)
    whole = len(values) == table.shape[1] and bool(values.isfinite().all())
    if whole:
        near = (table - values).abs().amax(1)
        if float(near.min()) < NEAR:
            return int(near.argmin()), None
    between = whole and continuous(env, task)
    number = float(values[0])
    if len(values) == 1 and number in range(len(table)) and not (between and "." in condition):
        if between and float(table.min()) < number < float(table.max()):
            log.warning(
                "condition %s is taken for the number of %s: write %.1f for the value",
                condition,
                _told(table[int(number)]),
                number,
            )
        return int(number), None
    if between:
        _refuse_outside(table, values, condition)
        return len(table), values.to(env.contexts.dtype)
    some = "; ".join(_told(row) for row in table[:TOLD])
    more = f" and {len(table) - TOLD} more" if len(table) > TOLD else ""
    raise UserError(
        f"--condition {condition!r} is none of the run's {len(table)} conditions ({some}{more}): give one of them"
    )


def continuous(env: Env, task: Task) -> bool:
    """Whether conditions between the learned ones mean something: real numbers, which nothing else has a table for."""
    return (
        type(env) is Conditioned
        and env.contexts.is_floating_point()
        and env.contexts.dim() == 2
        and not task.channel.whole
    )


def _refuse_outside(table: Tensor, values: Tensor, condition: str) -> None:
    """UserError where a value, or the sum that all learned conditions share, leaves what was learned."""
    low, high = table.amin(0), table.amax(0)
    room = NEAR * (1 + table.abs().amax(0))
    none = f"--condition {condition!r} is none of the run's {len(table)} conditions and does not lie between them"
    if bool(((values < low - room) | (values > high + room)).any()):
        ends = [f"{a:g} to {b:g}" for a, b in zip(low[:TOLD].tolist(), high[:TOLD].tolist(), strict=True)]
        more = ", ..." if len(low) > TOLD else ""
        raise UserError(f"{none}: they run from {', '.join(ends)}{more}, and the policy knows nothing beyond")
    sums = table.sum(1)
    together = 10 * float(room.sum())
    if float(sums.max() - sums.min()) <= together < abs(float(values.sum() - sums.mean())):
        raise UserError(
            f"{none}: the values of each of them sum to {float(sums.mean()):g}, and these to {float(values.sum()):g}"
        )


def _told(values: Tensor) -> str:
    return ",".join(f"{v:g}" for v in values.tolist()[:TOLD]) + (",..." if len(values) > TOLD else "")
