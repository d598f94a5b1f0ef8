"""Random search, a standard genetic algorithm and Markov chains on strings, all asking about different objects alone.

Each is a function of an `Asker`, whose budget ends it, and draws from torch's default generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.training.search.paths import code, free_letters, legal_letters, random_strings
from stochflow.training.search.pool import first_of_each
from stochflow.training.search.variation import Letters, cross
from stochflow.worlds.strings import Strings

STUCK = 200  # rounds without a new object after which a rival gives up
BATCH = 100  # objects asked at once


class Asker:
    """Asks an oracle about different objects of a string environment, at most `calls` of them, and keeps the answers."""

    def __init__(self, env: Any, score: Callable[[Tensor], Tensor], calls: int, start: Tensor | None = None):
        if not isinstance(env, Strings):
            raise UserError(f"the baselines vary strings, and {env!r} builds none")
        least = env.length if env.min_length is None else max(1, env.min_length)
        self.env, self.letters = env, Letters(env.tokens, env.length, least)
        self.score, self.calls, self.start = score, calls, start
        self.known: dict[int, float] = {}
        self.objects: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.rounds = 0  # without anything new

    @property
    def left(self) -> int:
        return self.calls - len(self.known)

    @property
    def going(self) -> bool:
        return self.left > 0 and self.rounds < STUCK

    def random(self, n: int) -> Tensor:
        return random_strings(self.env, self.letters, n)

    def mended(self, made: Tensor) -> Tensor:
        return made if free_letters(self.env) else legal_letters(self.env, made)

    def ask(self, objects: Tensor) -> Tensor:
        """The scores [n] of objects [n, L]; minus infinity for those beyond the budget and those without a score."""
        numbers = code(objects).tolist()
        new: dict[int, int] = {}
        for i, number in enumerate(numbers):
            if number not in self.known and number not in new and len(new) < self.left:
                new[number] = i
        self.rounds = 0 if new else self.rounds + 1
        if new:
            fresh = objects[list(new.values())]
            found = self.score(fresh).double()
            found = torch.where(found.isnan(), -torch.inf, found)  # without a score: the worst there is
            self.objects.append(fresh)
            self.scores.append(found)
            self.known |= dict(zip(new, found.tolist(), strict=True))
        return torch.tensor([self.known.get(n, -torch.inf) for n in numbers], dtype=torch.float64)

    def answers(self) -> tuple[Tensor, Tensor]:
        """All objects asked about [n, L] and their scores [n], in order; minus infinity where there is none."""
        none = torch.empty(0, self.letters.length, dtype=torch.long), torch.empty(0, dtype=torch.float64)  # of no calls
        return torch.cat([none[0], *self.objects]), torch.cat([none[1], *self.scores])


def random_search(asker: Asker) -> None:
    """Uniform strings."""
    if asker.start is not None:
        asker.ask(asker.start)
    while asker.going:
        asker.ask(asker.random(min(1000, asker.left)))


def genetic(asker: Asker, population: int = 100, children: int = 100, rivals: int = 3, share: float = 0.9) -> None:
    """The best `population` different objects breed: tournaments, two-point crossover, one mutation a child on average.

    Parents stay until better ones displace them (truncation); children already known are not asked about again.
    """
    objects = _begin(asker, population)
    scores = asker.ask(objects)
    while asker.going:
        order = scores.argsort(descending=True, stable=True)
        objects, scores = objects[order][:population], scores[order][:population]
        pairs = torch.randint(len(objects), (2, children, rivals)).amin(-1)
        made = asker.mended(cross(asker.letters, objects[pairs[0]], objects[pairs[1]], share))
        numbers = code(made)
        fresh = torch.tensor([n not in asker.known for n in numbers.tolist()])
        made = made[fresh]
        if not len(made):
            asker.rounds += 1
            continue
        found = asker.ask(made)
        objects, scores = torch.cat([objects, made]), torch.cat([scores, found])
        keep = first_of_each(code(objects))
        objects, scores = objects[keep], scores[keep]


def chains(asker: Asker, number: int = 64, cold: float = 0.02) -> None:
    """Metropolis chains side by side, at temperatures of `cold` to ten times that of the range of scores seen."""
    objects = _begin(asker, number)
    scores = asker.ask(objects)
    ladder = torch.logspace(0, 1, len(objects), dtype=torch.float64) * cold
    while asker.going:
        made = cross(asker.letters, objects, objects, 0.0)
        same = (made == objects).all(1)
        place = torch.randint(asker.letters.length, (len(objects), 1))
        other = (objects.gather(1, place) + torch.randint(1, asker.letters.kinds, place.shape)) % asker.letters.kinds
        inside = objects.gather(1, place) < asker.letters.kinds
        moved = objects.scatter(1, place, torch.where(inside, other, asker.letters.kinds))
        made = asker.mended(torch.where(same.unsqueeze(1), moved, made))
        found = asker.ask(made)
        every = torch.cat(asker.scores)
        every = every[every.isfinite()]
        reach = float((every.max() - every.median()).clamp(min=1e-12)) if len(every) else 1.0
        accept = torch.rand(len(found), dtype=torch.float64).log() < (found - scores) / (ladder * reach)
        objects, scores = torch.where(accept.unsqueeze(1), made, objects), torch.where(accept, found, scores)


def _begin(asker: Asker, n: int) -> Tensor:
    """The known objects and strings near them, or random ones."""
    if asker.start is None:
        return asker.random(n)
    near = asker.start.repeat(-(-n // len(asker.start)), 1)
    made = asker.mended(cross(asker.letters, near, near, 0.0))
    return torch.cat([asker.start, made])[: max(n, len(asker.start))]


RIVALS: dict[str, Callable[[Asker], None]] = {"random": random_search, "ga": genetic, "mcmc": chains}
