"""From candidates to a plate: the best that are far enough apart, without what is measured, with controls, and what was left out counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stochflow.design.features import distances
from stochflow.design.generate import DEEP, sharpness

ROWS = "ABCDEFGH"


@dataclass
class Selection:
    """Positions among the candidates, and how many candidates each reason cost."""

    chosen: list[int]
    asked: int
    distance: int
    lost: dict[str, int] = field(default_factory=dict)

    @property
    def short(self) -> int:
        return self.asked - len(self.chosen)

    def sentence(self, candidates: int) -> str:
        """What a short batch was short of."""
        lost = ", ".join(f"{n} {why}" for why, n in self.lost.items() if n)
        return f"the batch has {len(self.chosen)} of the {self.asked} designs asked for: of {candidates} candidates {lost or 'none was left out'}"


def select(
    texts: Sequence[str],
    value: np.ndarray,
    count: int,
    distance: int,
    excluded: set[str],
    taken: Sequence[str] = (),
) -> Selection:
    """The best by `value` that differ from each other and from `taken` in at least `distance` letters."""
    made = Selection(
        [], count, distance, {"are measured or ordered already": 0, f"are closer than {distance} to a better one": 0}
    )
    measured, close = made.lost
    chosen: list[str] = list(taken)
    order = np.argsort(-value, kind="stable")
    open_ = [int(i) for i in order if texts[i] not in excluded]
    made.lost[measured] = len(order) - len(open_)
    while open_ and len(made.chosen) < count:
        block, open_ = open_[:256], open_[256:]
        names = [texts[i] for i in block]
        free = np.ones(len(block), dtype=bool)
        if chosen and distance > 0:
            free = distances(names, chosen).min(1) >= distance
        made.lost[close] += int((~free).sum())
        gap = distances(names, names) if distance > 0 else None
        for j in range(len(block)):
            if not free[j]:
                continue
            made.chosen.append(block[j])
            chosen.append(names[j])
            if len(made.chosen) == count:
                break
            if gap is not None:
                near = free & (gap[j] < distance)
                near[: j + 1] = False
                made.lost[close] += int(near.sum())
                free &= ~near
    return made


def spread(
    texts: Sequence[str],
    value: np.ndarray,
    count: int,
    distance: int | None,
    excluded: set[str],
    taken: Sequence[str] = (),
) -> Selection:
    """`select`; where no distance is asked for, the largest of L/5, ..., 2, 1 letters that fills the batch, and that without
    strings so far below the best that the sharpened acquisition would never draw them.
    """
    if distance is not None:
        return select(texts, value, count, distance, excluded, taken)
    longest = max((len(t) for t in texts), default=1)
    new = value[[t not in excluded for t in texts]]
    least = float(new.max()) - DEEP / sharpness(new, count) if len(new) else 0.0
    for step in range(max(1, longest // 5), 0, -1):
        made = select(texts, value, count, step, excluded, taken)
        if step == 1 or (not made.short and (value[made.chosen] >= least).all()):
            return made
    raise AssertionError("the loop ends at 1")


def wells(count: int) -> list[str]:
    """The well of each design, row by row: A1 to A12, B1, ..., H12; from 97 designs on with the plate's number before it."""
    many = count > 96
    names = [f"{ROWS[i % 96 // 12]}{i % 12 + 1}" for i in range(count)]
    return [f"{i // 96 + 1}:{name}" for i, name in enumerate(names)] if many else names


def clusters(texts: Sequence[str], value: np.ndarray, share: float = 0.7) -> np.ndarray:
    """[N] cluster numbers from 1, best first: a design joins the nearest better one within this share of the mean distance."""
    gap = distances(texts, texts)
    radius = share * float(gap[np.triu_indices(len(texts), 1)].mean()) if len(texts) > 1 else 0.0
    heads: list[int] = []
    found = np.zeros(len(texts), dtype=np.int64)
    for i in np.argsort(-value, kind="stable"):
        near = [h for h in heads if gap[i, h] <= radius]
        if near:
            found[i] = found[min(near, key=lambda h: gap[i, h])]
        else:
            heads.append(int(i))
            found[i] = len(heads)
    return found
