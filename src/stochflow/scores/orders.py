"""Open loop: objects are orders, and what counts is what is expected of their making.

`orders` turns a task over strings into one over orders: nothing happens in between, and the score of an order x is
E[y(made) | x], so that log R(x) = beta log E[y(made) | x] under a `Power` reward. docs/orders.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.ops import PerDevice
from stochflow.scores.oracles import Cached, Table, TextOracle, check_scores, count_calls
from stochflow.scores.rewards import Linear, Power
from stochflow.types import Task
from stochflow.worlds.channels import Exact
from stochflow.worlds.rules.env import RuledStrings
from stochflow.worlds.strings import Strings
from stochflow.worlds.synthesis import Synthesis

AT_ONCE = 1 << 22  # made letters that are scored together
QUANTILE = 0.1  # of the scores of what is made


class OpenLoop(NamedTuple):
    """What an oracle over orders was made of."""

    oracle: Any  # the scores of made strings
    env: Strings  # of the orders
    synthesis: Synthesis
    makings: int  # simulated for each order; 0: the expectation is exact
    seed: int
    unscored: float  # the score of a made string whose length the oracle does not know


def orders(
    task: Task,
    synthesis: Synthesis | None = None,
    makings: int = 64,
    seed: int = 0,
    inside: bool = False,
    unscored: float = 0.0,
) -> Task:
    """The task over orders: its channel is exact, and its oracle gives E[score of what is made | order].

    The expectation is exact where the oracle is a `Table`, else the mean of `makings` simulated makings, with the same
    random numbers for every order. `inside` takes E[y^beta]^(1/beta) instead of E[y], so that the reward is E[y^beta].
    Without a `synthesis` it is the task's own channel, each letter by itself. `unscored` is the score of what is made
    where insertions or deletions give it a length that the oracle does not know.
    """
    env = task.env
    if not isinstance(env, Strings):
        raise UserError(f"orders are strings, but this task builds {type(env).__name__}: leave the open loop out")
    made_by = synthesis or Synthesis(env.alphabet, task.channel)
    if made_by.alphabet != env.alphabet:
        raise UserError(
            f"the synthesis makes {made_by.alphabet!r}, but orders are written in {env.alphabet!r}: give the same"
        )
    if makings < 1:
        raise UserError(f"{makings} makings of an order tell nothing: give 1 or more")
    if not math.isfinite(unscored):
        raise UserError(f"the score of what cannot be scored is {unscored}, but it must be finite")
    inner = _Inside.of(task.reward) if inside else None
    oracle: Any = None
    if type(task.oracle) is Table:
        oracle = _exact(task.oracle, env, made_by, inner, unscored)
    loop = OpenLoop(task.oracle, env, made_by, 0 if oracle is not None else makings, seed, unscored)
    if oracle is None:
        kind = SimulatedTexts if isinstance(task.oracle, TextOracle) else Simulated
        oracle = kind(loop, inner)
    oracle.open_loop = getattr(oracle, "loop", loop)
    return task._replace(channel=Exact(), oracle=oracle)


def open_loop_of(oracle: Any) -> OpenLoop | None:
    """What an oracle over orders was made of, through whatever wraps it; None for any other oracle."""
    while oracle is not None:
        found = getattr(oracle, "open_loop", None)
        if found is not None:
            return found
        oracle = getattr(oracle, "oracle", None)
    return None


class _Inside(NamedTuple):
    """A reward taken inside the expectation: its powers are averaged, and turned back into a score."""

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]

    @staticmethod
    def of(reward: Any) -> _Inside:
        if isinstance(reward, Power) and reward.ramp == 0:
            beta, floor = reward.beta, reward.floor
            return _Inside(lambda y: y.double().clamp(min=floor) ** beta, lambda z: z ** (1 / beta))
        if isinstance(reward, Linear):
            return _Inside(lambda y: (reward.beta * y.double()).exp(), lambda z: z.log() / reward.beta)
        raise UserError(
            f"E[y^beta] needs a reward whose exponent stays the same, but this one is {reward!r}: take Power without a ramp, or Linear"
        )


# exact ------------------------------------------------------------------------------------------------------------


def _scores_by_length(table: Table) -> tuple[Strings, dict[int, Tensor]] | None:
    """The table's scores [K^j] of the strings of each length; None where they are not listed in that order."""
    env = table.env
    if not isinstance(env, Strings) or isinstance(env, RuledStrings):
        return None
    bounds = [env.early_count(n) for n in range(env.length + 2)]
    return env, {j: table.scores[bounds[j] : bounds[j + 1]] for j in range(env.length + 1)}


def _exact(table: Table, env: Strings, synthesis: Synthesis, inner: _Inside | None, unscored: float) -> Table | None:
    """The table of expected scores; None where it would be too large."""
    listed = _scores_by_length(table)
    if listed is None:
        raise UserError(
            "what a synthesiser makes need not meet the rules, so its table must hold the scores of all strings: "
            "make it with plain Strings"
        )
    home, scores = listed
    there = inner.there if inner else torch.Tensor.double
    values = {j: torch.where(s.isnan(), unscored, s) for j, s in scores.items() if not bool(s.isnan().all())}
    other = float(there(torch.tensor(unscored)))
    found = []
    least = env.length if env.min_length is None else env.min_length
    for n in range(least, env.length + 1):
        expected = synthesis.expect({j: there(v) for j, v in values.items()}, n, other)
        if expected is None:
            return None
        found.append(inner.back(expected) if inner else expected)
    return Table(home, torch.cat(found))  # without marks: a mode of the scores is none of what is expected


# simulated --------------------------------------------------------------------------------------------------------


class Simulated:
    """The mean score of simulated makings, of a tensor oracle."""

    open_loop: OpenLoop

    def __init__(self, loop: OpenLoop, inner: _Inside | None = None):
        self.loop, self.inner = loop, inner
        self.on_device = bool(getattr(loop.oracle, "on_device", False))
        self.calls = 0
        draws = loop.synthesis.draws(loop.makings, loop.env.length, loop.seed)
        self._fixed = PerDevice(draws, *loop.synthesis._by_chance)

    def __call__(self, state: Tensor) -> Tensor:
        count_calls(self, state)
        loop = self.loop
        flat = state.reshape(-1, state.shape[-1])
        rows = max(1, AT_ONCE // (loop.makings * state.shape[-1]))
        found = [self._mean(part) for part in flat.split(rows)]
        return torch.cat(found).float().reshape(state.shape[:-1])

    def _mean(self, state: Tensor) -> Tensor:
        score = made_scores(self.loop, state, *self._fixed(state.device))
        if self.inner is None:
            return score.mean(0)
        return self.inner.back(self.inner.there(score).mean(0))


def made_scores(loop: OpenLoop, state: Tensor, draws: Tensor, letters: Tensor, chances: Tensor) -> Tensor:
    """The scores of what is made of orders [N, D], each so many times, [R, N] float64."""
    env = loop.env
    made, size = loop.synthesis.make_states(state, draws, (letters, chances))
    made = made[..., : env.length]
    least = env.length if env.min_length is None else env.min_length
    known = (size >= least) & (size <= env.length)
    score = loop.oracle(torch.where(known.unsqueeze(-1), made, state)).double()
    return torch.where(known, score, loop.unscored)


class SimulatedTexts(TextOracle):
    """The mean score of simulated makings, of an oracle over texts; it is asked once about each made string."""

    open_loop: OpenLoop

    def __init__(self, loop: OpenLoop, inner: _Inside | None = None):
        asked = loop.oracle if isinstance(loop.oracle, Cached) else Cached(loop.oracle)
        self.loop, self.inner, self.env = loop._replace(oracle=asked), inner, loop.env

    @property
    def calls(self) -> int:  # type: ignore[override]
        """Made strings that were scored."""
        return self.loop.oracle.calls

    def cancel(self) -> None:
        self.loop.oracle.cancel()

    def raw(self, texts: list[str]) -> list[float]:
        scores = text_scores(self.loop, texts).T  # [R, N]
        mean = scores.mean(0) if self.inner is None else self.inner.back(self.inner.there(scores).mean(0))
        return mean.tolist()


def text_scores(loop: OpenLoop, texts: Sequence[str]) -> Tensor:
    """The scores of what is made of each text, [N, R] float64."""
    env = loop.env
    least = env.length if env.min_length is None else env.min_length
    made = loop.synthesis.make(texts, loop.makings, loop.seed)
    known = list(dict.fromkeys(t for each in made for t in each if least <= len(t) <= env.length))
    values = loop.oracle.raw(known)
    check_scores(known, values)
    score = dict(zip(known, values, strict=True))
    found = [[score.get(t, loop.unscored) for t in each] for each in made]
    return torch.tensor(found, dtype=torch.float64).reshape(len(texts), loop.makings)


# what to expect of a design ---------------------------------------------------------------------------------------


class Prospects(NamedTuple):
    """What to expect of each design, [N] float64."""

    exact: Tensor  # the chance that it comes out as ordered
    expected: Tensor  # the mean score of what is made
    low: Tensor  # its 10 % quantile
    makings: int  # simulated for each; 0: mean and quantile are exact


@torch.no_grad()
def prospects(
    oracle: Any,
    env: Strings,
    synthesis: Synthesis,
    texts: Sequence[str],
    makings: int = 256,
    seed: int = 0,
    unscored: float = 0.0,
) -> Prospects:
    """What to expect of each text when it is ordered; `oracle` scores what is made.

    Exact where the oracle is a table and lengths stay as they are, else from simulated makings with common random numbers.
    """
    return look_ahead(OpenLoop(oracle, env, synthesis, makings, seed, unscored), texts)


@torch.no_grad()
def look_ahead(loop: OpenLoop, texts: Sequence[str]) -> Prospects:
    """The same of an open loop; one whose expectation is exact but whose quantile is not simulates 256 makings."""
    chance = loop.synthesis.chance_exact(texts)
    listed = _scores_by_length(loop.oracle) if type(loop.oracle) is Table else None
    if listed is not None and loop.synthesis.keeps_length:
        mean, low = torch.zeros(len(texts), dtype=torch.float64), torch.zeros(len(texts), dtype=torch.float64)
        for n in {len(t) for t in texts}:
            at = torch.tensor([i for i, t in enumerate(texts) if len(t) == n])
            mean[at], low[at] = _of_table(listed[1][n], loop, [texts[i] for i in at.tolist()])
        return Prospects(chance, mean, low, 0)
    loop = loop._replace(makings=loop.makings or 256)
    if isinstance(loop.oracle, TextOracle):
        scores = text_scores(loop, texts).T
    else:
        state = loop.env.encode(texts)
        draws = loop.synthesis.draws(loop.makings, loop.env.length, loop.seed)
        rows = max(1, AT_ONCE // (loop.makings * loop.env.length))
        parts = [made_scores(loop, part, draws, *loop.synthesis._by_chance) for part in state.split(rows)]
        scores = torch.cat(parts, 1) if parts else torch.zeros(loop.makings, 0, dtype=torch.float64)
    return Prospects(chance, scores.mean(0), scores.quantile(QUANTILE, 0, interpolation="lower"), loop.makings)


def _of_table(scores: Tensor, loop: OpenLoop, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Mean and quantile [N] of the scores [K^n] under the exact law of what is made of texts of one length n."""
    scores = torch.where(scores.isnan(), loop.unscored, scores)
    value, place = scores.sort()
    found = []
    for part in torch.from_numpy(loop.synthesis.encode(texts)).split(max(1, AT_ONCE // len(scores))):
        law = torch.ones(len(part), 1, dtype=torch.float64)
        for letters in part.T:
            law = (law.unsqueeze(2) * loop.synthesis.table[letters].unsqueeze(1)).flatten(1)
        reached = law[:, place].cumsum(1) >= QUANTILE
        found.append(torch.stack([law @ scores, value[reached.to(torch.uint8).argmax(1)]]))
    mean, low = torch.cat(found, 1)
    return mean, low
