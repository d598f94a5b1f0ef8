"""The parents of a genetic search: the best objects asked about, and the best at a distance from all better ones.

P parents of a seed, L places, K letters. Growing tables are kept in the state, so that a resumed run goes on exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stochflow.training.search.paths import code

DEAD = 0.05  # share of asked objects at the lowest score from which pairs of letters seen only there are avoided
PATIENCE = 500  # objects, or twice the single changes of one, after which a search that has not moved is at rest
MOVED = 0.001  # of the way from the lowest score to the best: how far the mean of the niches must rise to have moved
REMEMBERED = 1 << 20  # objects that are remembered as asked


class Growing(nn.Module):
    """A module whose tensors change their shapes; they are loaded as they were saved, and begin anew where an earlier version saved none."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, start in list(self._buffers.items()):
            if start is not None:
                self._buffers[name] = state.setdefault(prefix + name, start).clone()
        super()._load_from_state_dict(state, prefix, *rest)


class Pairs(Growing):
    """Which neighbouring letters have been seen in an object that scored above the lowest score, and which only below.

    Where an unwritten rule makes whole objects worthless (a forbidden pair), children that break it are avoided without
    asking about them.
    """

    def __init__(self, letters: int):
        super().__init__()
        self.letters = letters
        self.live: Tensor
        self.least: Tensor
        self.only_low: Tensor
        self.lowest: Tensor
        self.counts: Tensor
        self.register_buffer("live", torch.zeros(letters + 1, letters + 1, dtype=torch.bool))
        self.register_buffer("least", torch.zeros(letters + 1, letters + 1, dtype=torch.bool))  # at the lowest score
        # objects at the lowest score that each pair may explain: 1 an object, shared among its pairs seen in no better one
        self.register_buffer("only_low", torch.zeros(letters + 1, letters + 1, dtype=torch.float64))
        self.register_buffer("lowest", torch.tensor(torch.inf, dtype=torch.float64))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.float64))  # at the lowest score; all

    def note(self, objects: Tensor, scores: Tensor) -> None:
        """Objects [n, L] and their scores [n]."""
        if not len(scores):
            return
        low = min(float(self.lowest), float(scores.min()))
        if low < float(self.lowest):  # what was lowest is not any more
            self.lowest.fill_(low)
            self.live |= self.least
            self.least.zero_()
            self.counts[0] = 0
            self.only_low.zero_()
        dead = scores.double() <= low
        self.counts += torch.stack([dead.sum(), torch.tensor(len(scores))]).double()
        alive = objects[~dead]
        self.live[alive[:, :-1], alive[:, 1:]] = True
        left, right = objects[dead, :-1], objects[dead, 1:]
        self.least[left, right] = True
        unseen = ~self.live[left, right]
        weight = unseen / unseen.sum(1, keepdim=True).clamp(min=1)
        self.only_low.index_put_((left, right), weight.double(), accumulate=True)

    @property
    def matter(self) -> bool:
        """Whether many objects have the lowest score, as where a rule makes them worthless, and some have a better one."""
        return DEAD * float(self.counts[1]) <= float(self.counts[0]) < float(self.counts[1])

    def log_chance(self, objects: Tensor) -> Tensor:
        """How likely each object [n, L] is to score above the lowest, as far as its pairs tell: [n] log-probabilities."""
        if not self.matter:
            return torch.zeros(len(objects), dtype=torch.float64)
        table = torch.where(self.live, 0.0, -0.3 - 3 * self.only_low)
        table[self.letters] = 0  # padding follows padding
        table[:, self.letters] = 0
        return table[objects[:, :-1], objects[:, 1:]].sum(1)

    def fill(self, objects: Tensor, free: Tensor) -> Tensor:
        """Objects [n, L] with random letters at the places `free` [n, L]: where pairs matter, such as have been seen together."""
        made, last = objects.clone(), objects.shape[1] - 1
        live = self.live | (not self.matter)
        live[self.letters] = live[:, self.letters] = True
        for i in range(last + 1):
            fits = torch.ones(len(made), self.letters, dtype=torch.bool)
            if i:
                fits = live[made[:, i - 1], : self.letters]
            if i < last:
                fits = fits & (live[: self.letters, made[:, i + 1]].T | free[:, i + 1].unsqueeze(1))
            letter = torch.where(fits, torch.rand(fits.shape), -1.0).argmax(1)
            made[:, i] = torch.where(free[:, i] & fits.any(1), letter, made[:, i])
        return made


class Best(Growing):
    """The `best` best objects, and up to `niches` at `distance` or more from all better ones."""

    def __init__(self, width: int, distance: int, niches: int = 100, best: int = 300):
        super().__init__()
        self.distance, self.niches, self.best = distance, niches, best
        self.objects: Tensor
        self.scores: Tensor
        self.register_buffer("objects", torch.zeros(0, width, dtype=torch.int16))
        self.register_buffer("scores", torch.zeros(0))

    def admit(self, objects: Tensor, scores: Tensor, lowest: float) -> None:
        """Take in objects [n, L] that are not there yet and their scores [n]; `lowest` of all scores seen."""
        # the newest first among equal scores: a plateau is crossed by neutral changes, which would stop where its first members stay;
        # but where nothing above the lowest is known, they would lead away from where the search began
        parts = [(objects.long(), scores), (self.objects.long(), self.scores)]
        if not bool((scores > lowest).any() | (self.scores > lowest).any()):
            parts.reverse()
        objects, scores = torch.cat([o for o, _ in parts]), torch.cat([s for _, s in parts])
        order = scores.argsort(descending=True, stable=True)
        objects, scores = objects[order], scores[order]
        kept = apart(objects, self.distance, self.niches)
        kept[: self.best] = True
        self.objects, self.scores = objects[kept].to(torch.int16), scores[kept]

    def spread(self, lowest: float) -> float:
        """The mean score of the `niches` at a distance; missing ones count as the lowest."""
        far = self.scores[apart(self.objects, self.distance, self.niches)].double()
        return (float(far.sum()) + lowest * (self.niches - len(far))) / self.niches


class Pool(Best):
    """The parents of one seed, of the search that is under way.

    Where a search has come to a rest, its parents are put aside and another begins anew; where that has come to a rest
    as well, the two are joined.
    """

    def __init__(self, width: int, letters: int, distance: int, niches: int = 100, best: int = 300):
        super().__init__(width, distance, niches, best)
        self.pairs = Pairs(letters)
        self.aside = Best(width, distance, niches, best)
        self.patience = max(PATIENCE, 2 * width * (letters - 1))
        self.asked: Tensor
        self.clock: Tensor
        self.mark: Tensor
        self.register_buffer("asked", torch.zeros(0, dtype=torch.long))  # sorted numbers of all objects asked about
        self.register_buffer("clock", torch.zeros(2, dtype=torch.long))  # objects noted: in this search; since it moved
        self.register_buffer("mark", torch.tensor(-torch.inf, dtype=torch.float64))  # its spread when it last moved

    def note(self, objects: Tensor, scores: Tensor, own: Tensor | None = None) -> None:
        """Take in answers: objects [n, L], scores [n]; `own` [n]: which came of these parents, all where it is not given."""
        fresh = first_of_each(code(objects))
        fresh = fresh[~self.known(objects[fresh])]
        objects, scores = objects[fresh], scores[fresh].float()
        own = torch.ones(len(fresh), dtype=torch.bool) if own is None or not len(self.aside.scores) else own[fresh]
        self.pairs.note(objects, scores)
        self.asked = torch.cat([self.asked, code(objects)])[-REMEMBERED:].sort().values
        lowest = float(self.pairs.lowest)
        self.admit(objects[own], scores[own], lowest)
        if not bool(own.all()):
            self.aside.admit(objects[~own], scores[~own], lowest)
        self.clock += len(fresh)
        self._turn(lowest)

    def _turn(self, lowest: float) -> None:
        """Put these parents aside, or join them with those put aside, where they have not moved for long."""
        spread = self.spread(lowest)
        if not len(self.scores) or spread > float(self.mark) + MOVED * (float(self.scores[0]) - lowest):
            self.mark.fill_(spread)
            self.clock[1] = 0
        elif int(self.clock[1]) >= self.patience and not self.flat:
            rested = self.aside.objects, self.aside.scores
            if len(rested[1]):
                self.admit(*rested, lowest)
                self.aside.objects, self.aside.scores = rested[0][:0], rested[1][:0]
            else:
                self.aside.objects, self.aside.scores = self.objects, self.scores
                self.objects, self.scores = self.objects[:0], self.scores[:0]
                self.clock[0] = 0
            self.clock[1] = 0
            self.mark.fill_(-torch.inf)

    @property
    def flat(self) -> bool:
        """Whether none of the parents is better than the lowest score."""
        return not bool((self.scores > self.pairs.lowest).any())

    def known(self, objects: Tensor) -> Tensor:
        """[n] whether each object was asked about."""
        if not len(self.asked):
            return torch.zeros(len(objects), dtype=torch.bool)
        number = code(objects)
        place = torch.searchsorted(self.asked, number).clamp(max=len(self.asked) - 1)
        return self.asked[place] == number

    @property
    def parents(self) -> int:
        """How many of the objects, the best first, may become parents: not those at the lowest score, where many are there."""
        alive = int((self.scores > self.pairs.lowest).sum())
        return alive if alive and self.pairs.matter else len(self.scores)

    def weights(self, focus: Sequence[float]) -> Tensor:
        """[F, P] chances of becoming a parent: by rank (`focus` = share of the pool that counts), shared among near ones."""
        count = self.parents
        scores, objects = self.scores[:count], self.objects[:count]
        _, inverse, sizes = (-scores).unique(return_inverse=True, return_counts=True)
        rank = (sizes.cumsum(0) - sizes)[inverse].double()
        near = (1 - distances(objects, self.pairs.letters) / self.distance).clamp(min=0).sum(1)
        return torch.exp(-rank / (torch.tensor(focus, dtype=torch.float64).unsqueeze(1) * count)) / near

    def choose(self, candidates: Tensor, n: int) -> Tensor:
        """Positions of at most n different candidates [m, L] that were not asked about yet, likely ones first."""
        new = first_of_each(code(candidates))
        new = new[~self.known(candidates[new])]
        chance = self.pairs.log_chance(candidates[new])
        race = chance - torch.rand(len(new), dtype=torch.float64).clamp(min=1e-12).log().neg().log()
        return new[race.argsort(descending=True, stable=True)[:n]]


def distances(objects: Tensor, letters: int) -> Tensor:
    """[n, n] in how many places objects [n, L] differ, as a product of matrices."""
    hot = torch.nn.functional.one_hot(objects.long(), letters + 1).flatten(1).float()
    return objects.shape[1] - hot @ hot.T


def first_of_each(numbers: Tensor) -> Tensor:
    """Positions of the first of each number, in order."""
    ordered, where = numbers.sort(stable=True)
    new = torch.ones(len(numbers), dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return where[new].sort().values


def apart(objects: Tensor, distance: int, most: int) -> Tensor:
    """[n] which objects (the best first) are at least `distance` from every one taken before; at most so many."""
    rows = objects.numpy()
    free = np.ones(len(rows), dtype=bool)
    taken = np.zeros(len(rows), dtype=bool)
    for _ in range(most):
        if not free.any():
            break
        i = int(free.argmax())
        taken[i] = True
        free &= (rows != rows[i]).sum(1) >= distance
    return torch.from_numpy(taken)
