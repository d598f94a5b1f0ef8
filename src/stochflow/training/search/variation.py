"""Children of strings: crossover, shifted segments, indels and point mutations of letters [n, L], padded at the end.

Everything draws from torch's default generator. N candidates, L places, K letters; the padding is K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("segment", "shift", "indel", "point", "uniform", "renewal")  # how a child differs from its parent
RENEWED = (0.25, 0.5, 1.0, 1.0)  # shares of the places where parents differ that get new letters, one of them at a time


class Letters(NamedTuple):
    """What a child must be made of."""

    kinds: int  # K
    length: int  # longest
    least: int  # shortest; equal to `length` where all strings have one length

    def fill(self, objects: Tensor, free: Tensor) -> Tensor:
        """Objects [n, L] with random letters at the places `free` [n, L]."""
        return torch.where(free, torch.randint(self.kinds, objects.shape), objects)


Fill = Callable[[Tensor, Tensor], Tensor]  # objects [n, L] and places [n, L] -> the objects with new letters there


def uniform(letters: Letters, n: int) -> Tensor:
    """[n, L] random strings, of random lengths where lengths differ."""
    made = torch.randint(letters.kinds, (n, letters.length))
    size = torch.randint(letters.least, letters.length + 1, (n, 1))
    return torch.where(torch.arange(letters.length) < size, made, letters.kinds)


def vary(letters: Letters, first: Tensor, second: Tensor, kinds: Tensor, fill: Fill | None = None) -> Tensor:
    """A child [n, L] of each pair of parents [n, L] by the kind [n] (a number of `KINDS`); it equals neither.

    A renewal keeps what both parents have and tries new letters, those of `fill`, in many of the other places at once.
    """
    n, length = first.shape
    place, kind = torch.arange(length), kinds.unsqueeze(1)
    segment = _segment(n, length)
    child = torch.where(segment & (kind == 0), second, first)
    child = torch.where((torch.rand(n, length) < 0.5) & (kind == 4), second, child)
    reach = max(1, length // 2)
    source = place - torch.randint(-reach, reach + 1, (n, 1))
    inside = (source >= 0) & (source < length)
    donor = torch.where(torch.rand(n, 1) < 0.5, first, second)
    shifted = donor.gather(1, source.clamp(0, length - 1))
    child = torch.where(segment & inside & (kind == 1), shifted, child)
    child = torch.where(kind == 2, _indel(letters, child), child)
    child = tidy(letters, child)
    new = (kinds == 5).nonzero().flatten()
    free = (first[new] != second[new]) & (first[new] < letters.kinds)
    free &= torch.rand(free.shape) < torch.tensor(RENEWED)[torch.randint(len(RENEWED), (len(new), 1))]
    child[new] = (fill or letters.fill)(first[new], free)
    same = (child == first).all(1) | (child == second).all(1)
    few, many = torch.tensor([0.0, 0.0, 1.0, 2.0]), torch.tensor([1.0, 1.0, 2.0, 4.0])
    rate = torch.where(kinds == 3, many[torch.randint(4, (n,))], few[torch.randint(4, (n,))])
    count = torch.poisson(rate).long().clamp(min=0)
    count = torch.where(kinds == 5, 0, count)
    return _mutate(letters, child, torch.where(same | (kinds == 3), count.clamp(min=1), count))


def cross(letters: Letters, first: Tensor, second: Tensor, share: float = 0.9) -> Tensor:
    """Two-point crossover of that share, then each letter changes with chance 1 / length; as a textbook's genetic algorithm."""
    n, length = first.shape
    child = torch.where(_segment(n, length) & (torch.rand(n, 1) < share), second, first)
    changed = (torch.rand(n, length) < 1 / length) & (child < letters.kinds)
    child = torch.where(changed, torch.randint(letters.kinds, (n, length)), child)
    if letters.least < letters.length:  # and a tenth gain or lose a letter
        child = torch.where(torch.rand(n, 1) < 0.1, _indel(letters, child), child)
    return tidy(letters, child)


def tidy(letters: Letters, child: Tensor) -> Tensor:
    """Letters moved together to the front, and random ones added to what is too short."""
    if letters.least == letters.length and not bool((child == letters.kinds).any()):
        return child
    child = child.gather(1, (child == letters.kinds).long().argsort(dim=1, stable=True))
    missing = (child == letters.kinds) & (torch.arange(letters.length) < letters.least)
    return torch.where(missing, torch.randint(letters.kinds, child.shape), child)


def _segment(n: int, length: int) -> Tensor:
    cut = torch.randint(length + 1, (n, 2)).sort(1).values
    place = torch.arange(length)
    return (place >= cut[:, :1]) & (place < cut[:, 1:])


def _indel(letters: Letters, child: Tensor) -> Tensor:
    """One letter out and one in elsewhere, so that what lies between moves by one; one of the two alone where lengths differ."""
    n, length = child.shape
    place = torch.arange(length)
    size = (child != letters.kinds).sum(1, keepdim=True).clamp(min=1)
    out = (torch.rand(n, 1) * size).long()
    into = (torch.rand(n, 1) * size).long()
    if letters.least < letters.length:
        which = torch.randint(3, (n, 1))  # both, out alone, in alone
        out = torch.where(which == 2, length - 1, out)
        into = torch.where(which == 1, length - 1, into)
    left = ((out <= place) & (place < into)).long()
    right = ((into < place) & (place <= out)).long()
    moved = child.gather(1, (place + left - right).clamp(0, length - 1))
    new = torch.randint(letters.kinds, (n, 1))
    if letters.least < letters.length:
        new = torch.where(which == 1, letters.kinds, new)
    return torch.where(place == into, new, moved)


def _mutate(letters: Letters, child: Tensor, count: Tensor) -> Tensor:
    """`count` [n] letters of each child replaced by other ones."""
    here = child < letters.kinds
    order = torch.where(here, torch.rand(child.shape), 2.0).argsort(1).argsort(1)
    hit = (order < count.unsqueeze(1)) & here
    other = (child + torch.randint(1, letters.kinds, child.shape)) % letters.kinds
    return torch.where(hit, other, child)
