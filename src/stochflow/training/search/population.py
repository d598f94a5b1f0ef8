"""A genetic population beside the policy: its children are asked about with the policy's own draws and learned from."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stochflow.errors import UserError
from stochflow.learn.buffer import join
from stochflow.nets.policy import Policy
from stochflow.scores.rewards import Sharpening
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

    climb: float = 0.25  # share of them by a plain genetic algorithm on the best
    focus: tuple[float, ...] = (0.02, 0.05, 0.15)  # shares of the pool that the others' parents come from, in turn
    even: float = 0.3  # share of the others whose kind of change is any, however seldom it worked lately
    kinds: int = len(KINDS)  # how many of the kinds of change, the first ones
    anew: bool = True  # whether a search at rest is put aside and another begun
    start: int = 150  # objects asked about before there is a population


DEFAULT = Breeding()
FOREVER = 1 << 60
FIRST = 10.0  # mean rank of the parents before there is a population
SELDOM = 4  # another source has a turn in one batch of so many while the law still moves
EARLY = 3  # generations of random strings before there is a population


class Breeder(Growing):
    """Children for one seed's pool: some by a plain genetic algorithm on the best, the others around all niches.

    The first climb; the others fill the space at a distance, mostly by the kinds of change that worked lately.
    """

    def __init__(self, env: Strings, distance: int | None = None, how: Breeding | None = None):
        super().__init__()
        least = env.length if env.min_length is None else max(1, env.min_length)
        self.env, self.how = env, how or DEFAULT
        self.letters = Letters(env.tokens, env.length, least)
        self.pool = Pool(env.length, env.tokens, distance or default_distance(env.length))
        if not self.how.anew:
            self.pool.patience = FOREVER
        self.credit: Tensor
        self.register_buffer("credit", torch.ones(self.how.kinds, dtype=torch.float64))
        self.kinds = torch.zeros(0, dtype=torch.long)  # of the children that are being asked about,
        self.limits = torch.zeros(0)  # and the scores they should beat

    def _load_from_state_dict(self, state, prefix, *rest):
        if len(state.get(prefix + "credit", self.credit)) != len(self.credit):  # an earlier version had other kinds
            del state[prefix + "credit"]
        super()._load_from_state_dict(state, prefix, *rest)

    def offspring(self, n: int) -> Tensor:
        """[n, L] different objects that were not asked about yet (repeated ones where no others are left)."""
        pool = self.pool
        if int(pool.clock[0]) < self.how.start or pool.flat or len(pool.scores) < 2:
            made = random_strings(self.env, self.letters, OVER * n)
            if pool.pairs.matter:
                made = pool.pairs.fill(made, made < self.letters.kinds)
            if len(pool.scores):  # half near the best that is known
                rank = torch.empty(OVER * n // 2).exponential_(1 / FIRST).long()
                near = pool.objects.long()[rank.clamp(max=len(pool.scores) - 1)]
                near = vary(self.letters, near, near, torch.full((len(near),), KINDS.index("point")))
                made[: len(near)] = near
            made = self._mended(made)
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
        chance = (1 - self.how.even) * self.credit / self.credit.sum() + self.how.even / self.how.kinds
        kinds = torch.multinomial(chance, max(1, n), replacement=True)[:n]
        made = vary(self.letters, objects[first], objects[second], kinds, pool.pairs.fill)
        return self._mended(made), kinds, first

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


class Population(Growing, Source):
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
        self.rest: Tensor
        self.width: Tensor
        self.register_buffer("rest", torch.zeros((), dtype=torch.long))  # batches until the other source's next turn
        self.register_buffer("width", torch.zeros((), dtype=torch.long))  # how many objects it gave
        how = DEFAULT._replace(start=min(DEFAULT.start, EARLY * children))
        self.each = [Breeder(env, distance, how) for _ in range(policy.num_seeds)]  # one per seed
        self.breeders = nn.ModuleList(self.each)

    def act(self, step):
        own = None if int(self.rest) else self.source.act(step)
        self._from = 0 if own is None else own.score.shape[1]  # sources around this one append to the batch
        made = torch.stack([b.offspring(self.size + (int(self.width) if own is None else 0)) for b in self.each])
        ways = ways_to(self.task, self._policy[0], made.to(self._policy[0].device))
        return ways if own is None else join(own, ways)

    def use(self, engine, word, trace):
        self.source.use(engine, word, None)

    def why_plain(self, task, policy):
        return "the children of a population join the batch"

    def mix(self, traj):
        final, score = traj.states[-1].cpu(), traj.score.cpu()
        size = self.size + (0 if self._from else int(self.width))
        mine = slice(self._from, self._from + size)
        own = torch.zeros(score.shape[1], dtype=torch.bool)
        own[mine] = True
        for breeder, objects, scores in zip(self.each, final, score, strict=True):
            breeder.note(scores[mine])
            breeder.pool.note(objects, scores, own)
        if not self._from:
            self.rest -= 1
            return traj
        self.width.fill_(self._from)
        self.rest.fill_(SELDOM - 1 if self._moving else 0)
        return self.source.mix(traj)

    @property
    def _moving(self) -> bool:
        """Whether the target is still being sharpened: a policy that is to learn a law needs draws of its own."""
        reward = self.task.reward
        return isinstance(reward, Sharpening) and not bool(reward.frozen)
