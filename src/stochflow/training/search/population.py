"""A genetic population beside the policy: its children are asked about with the policy's own draws and learned from."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stochflow.errors import UserError
from stochflow.learn.buffer import join
from stochflow.nets.policy import Policy
from stochflow.training.search.paths import code, free_letters, legal_letters, random_strings, ways_to
from stochflow.training.search.pool import Growing, Pool
from stochflow.training.search.variation import KINDS, Letters, cross, vary
from stochflow.training.sources import Source
from stochflow.types import Task
from stochflow.worlds.strings import Strings

OVER = 4  # candidates made for each child that is asked about
LEARNED = 0.97  # memory of which kinds of change were successful
PRESSURE = 3  # rivals in a tournament of the breeding half


class Breeding(NamedTuple):
    """How children are made."""

    climb: float = 0.5  # share of them by a plain genetic algorithm on the best
    focus: tuple[float, ...] = (0.02, 0.05, 0.15)  # shares of the pool that the others' parents come from, in turn
    near: float = 0.0  # share of the others whose second parent is a near one
    start: int = 150  # objects asked about before there is a population


DEFAULT = Breeding()
EARLY = 3  # generations of random strings before there is a population


class Breeder(Growing):
    """Children for one seed's pool: some by a plain genetic algorithm on the best, the others around all niches.

    The first climb; the others fill the space at a distance, by the kinds of change that worked lately.
    """

    def __init__(self, env: Strings, distance: int | None = None, how: Breeding | None = None):
        super().__init__()
        least = env.length if env.min_length is None else max(1, env.min_length)
        self.env, self.how = env, how or DEFAULT
        self.letters = Letters(env.tokens, env.length, least)
        self.pool = Pool(env.length, env.tokens, distance or default_distance(env.length))
        self.credit: Tensor
        self.register_buffer("credit", torch.ones(len(KINDS), dtype=torch.float64))
        self.kinds = torch.zeros(0, dtype=torch.long)  # of the children that are being asked about,
        self.limits = torch.zeros(0)  # and the scores they should beat

    def offspring(self, n: int) -> Tensor:
        """[n, L] different objects that were not asked about yet (repeated ones where no others are left)."""
        pool = self.pool
        if len(pool.asked) < self.how.start or len(pool.scores) < 2:
            made = random_strings(self.env, self.letters, OVER * n)
            if len(pool.scores):  # half near what is known
                near = pool.objects.long()[torch.randint(len(pool.scores), (OVER * n // 2,))]
                near = vary(self.letters, near, near, torch.full((len(near),), KINDS.index("point")))
                made[: len(near)] = self._mended(near)
            return self._filled(made[pool.choose(made, n)], made, n)
        climbing = round(self.how.climb * n)
        around, kinds, parents = self._around(OVER * (n - climbing))
        chosen = pool.choose(around, n - climbing)
        self.kinds, self.limits = kinds[chosen], pool.scores[parents[chosen]]
        bred = self._bred(OVER * climbing)
        bred = bred[~torch.isin(code(bred), code(around[chosen]))]
        made = torch.cat([around[chosen], bred[pool.choose(bred, climbing)]])
        return self._filled(made, torch.cat([around, bred]), n)

    def _around(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates [n, L] around all niches, the kinds [n] of their change and their first parents [n]."""
        pool, focus = self.pool, self.how.focus
        share = [n // len(focus) + (i < n % len(focus)) for i in range(len(focus))]
        draws = [
            torch.multinomial(weight, 2 * m, replacement=True).view(2, m)
            for weight, m in zip(pool.weights(focus), share, strict=True)
            if m
        ]
        first, second = torch.cat(draws, 1) if draws else torch.zeros(2, 0, dtype=torch.long)
        objects = pool.objects.long()
        if self.how.near > 0:  # of a few random ones the nearest
            others = torch.cat([second.unsqueeze(1), torch.randint(pool.parents, (n, 7))], 1)
            away = (objects[others] != objects[first].unsqueeze(1)).sum(-1)
            away = torch.where(others == first.unsqueeze(1), objects.shape[1] + 1, away)
            nearest = others.gather(1, away.argmin(1, keepdim=True)).squeeze(1)
            second = torch.where(torch.rand(n) < self.how.near, nearest, second)
        chance = 0.75 * self.credit / self.credit.sum() + 0.25 / len(KINDS)
        kinds = torch.multinomial(chance, max(1, n), replacement=True)[:n]
        return self._mended(vary(self.letters, objects[first], objects[second], kinds)), kinds, first

    def _bred(self, n: int) -> Tensor:
        """Candidates [n, L] of tournaments among the best."""
        objects = self.pool.objects.long()
        best = min(self.pool.parents, self.pool.niches)
        pairs = torch.randint(best, (2, n, PRESSURE)).amin(-1)
        return self._mended(cross(self.letters, objects[pairs[0]], objects[pairs[1]]))

    def note(self, scores: Tensor) -> None:
        """The scores [n] of the last children, in their order."""
        if not len(self.kinds):
            return
        better = scores[: len(self.kinds)] > self.limits
        self.credit = self.credit * LEARNED + 0.02
        self.credit.index_add_(0, self.kinds, better.double())
        self.kinds, self.limits = self.kinds[:0], self.limits[:0]

    def _mended(self, made: Tensor) -> Tensor:
        return made if free_letters(self.env) else legal_letters(self.env, made)

    def _filled(self, made: Tensor, others: Tensor, n: int) -> Tensor:
        """[n, L] `made` with others, or else random strings, after it: new ones, and repeated ones where those are not enough."""
        if len(made) == n:
            return made
        for more in (others, random_strings(self.env, self.letters, OVER * n)):
            more = more[~torch.isin(code(more), code(made))]
            made = torch.cat([made, more[self.pool.choose(more, n - len(made))]])
        repeated = made if len(made) else others
        return torch.cat([made, repeated[torch.randint(len(repeated), (n - len(made),))]])


def default_distance(length: int) -> int:
    """How far apart designs count as different: a fifth of their length."""
    return max(2, math.ceil(length / 5))


class Population(Source):
    """Another source's batch with `children` strings a seed from a genetic population beside it.

    The population is what was asked about and scored best, and the best at a distance; children come with a way that
    leads to them, are asked about as any other object, and are not `real` (no noise acted on them). They are data off
    the policy, which a balance objective may learn from: the target law stays what it is.
    """

    static = False  # its tables grow

    def __init__(self, source: Source, task: Task, policy: Policy, children: int, distance: int | None = None):
        super().__init__()
        env = task.env
        if not isinstance(env, Strings):
            raise UserError(f"a population varies strings, and {env!r} builds none: use LocalSearch or no search")
        if children < 2:
            raise UserError(f"children = {children} is no population: give 2 or more")
        self.source, self.task, self.size = source, task, children
        self._policy, self._from = [policy], 0
        how = DEFAULT._replace(start=min(DEFAULT.start, EARLY * children))
        self.each = [Breeder(env, distance, how) for _ in range(policy.num_seeds)]  # one per seed
        self.breeders = nn.ModuleList(self.each)

    def act(self, step):
        own = self.source.act(step)
        self._from = own.score.shape[1]  # sources around this one append to the batch
        made = torch.stack([b.offspring(self.size) for b in self.each])
        return join(own, ways_to(self.task, self._policy[0], made.to(own.score.device)))

    def use(self, engine, word, trace):
        self.source.use(engine, word, None)

    def why_plain(self, task, policy):
        return "the children of a population join the batch"

    def mix(self, traj):
        final, score = traj.states[-1].cpu(), traj.score.cpu()
        for breeder, objects, scores in zip(self.each, final, score, strict=True):
            mine = slice(self._from, self._from + self.size)
            breeder.note(scores[mine])
            breeder.pool.note(objects, scores)
        return self.source.mix(traj)
