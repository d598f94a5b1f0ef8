"""What is wanted of the measured columns: directions, weights, thresholds; from predictions of several columns to one.

N sequences, C columns, K draws. Values are oriented (larger is better) and scaled, so that 0 and 1 are the 5 % and 95 %
quantiles of what was measured; weights then mean what they say whatever the units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stochflow.design.surrogates import Prediction
from stochflow.errors import UserError

Goal = Literal["maximise", "minimise"]
LINEAR = 0.05  # share of the plain weighted sum, so that what is dominated is never as good


@dataclass(frozen=True)
class Column:
    """One measured column."""

    name: str
    goal: Goal = "maximise"
    weight: float = 1.0
    threshold: float | None = None  # in the column's units: at least (maximise) or at most (minimise) this

    def __post_init__(self) -> None:
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise UserError(
                f'the weight of "{self.name}" is {self.weight}, but it must be above 0: leave the column out instead'
            )

    @property
    def sign(self) -> float:
        return 1.0 if self.goal == "maximise" else -1.0

    def describe(self) -> str:
        side = "at least" if self.goal == "maximise" else "at most"
        limit = "" if self.threshold is None else f", {side} {self.threshold:g}"
        return f"{self.goal} {self.name}{limit}"


@dataclass(frozen=True)
class Scale:
    """Where 0 and 1 of each column lie, from what was measured."""

    low: np.ndarray  # [C] oriented
    size: np.ndarray  # [C]

    @staticmethod
    def of(columns: Sequence[Column], values: np.ndarray) -> Scale:
        """From measured values [N, C] in their own units."""
        low, size = np.zeros(len(columns)), np.ones(len(columns))
        for c, column in enumerate(columns):
            there = column.sign * values[~np.isnan(values[:, c]), c]
            a, b = np.quantile(there, [0.05, 0.95])
            low[c], size[c] = a, (b - a) if b > a else (np.ptp(there) or 1.0)
        return Scale(low, size)

    def oriented(self, c: int, column: Column, p: Prediction) -> Prediction:
        """A prediction in units of the scale, larger is better."""
        shift, by = self.low[c], self.size[c]
        return Prediction((column.sign * p.mean - shift) / by, p.sd / by, (column.sign * p.draws - shift) / by)

    def values(self, columns: Sequence[Column], values: np.ndarray) -> np.ndarray:
        """Measured values [N, C] in units of the scale."""
        return (values * np.array([c.sign for c in columns]) - self.low) / self.size


def combined(
    columns: Sequence[Column], scale: Scale, found: Sequence[Prediction], preference: np.ndarray
) -> Prediction:
    """One prediction of the utility under a preference [C] (non-negative, sum 1).

    Several columns: u = -max_c w_c (1 - z_c) + 0.05 sum_c w_c z_c, the augmented Chebyshev utility, which reaches every point
    of a Pareto front, also where it is hollow; mean and sd over the draws.
    """
    made = [scale.oriented(c, column, p) for c, (column, p) in enumerate(zip(columns, found, strict=True))]
    if len(made) == 1:
        return made[0]
    draws = max(len(p.draws) for p in made)
    z = np.stack([p.draws[np.arange(draws) % len(p.draws)] for p in made])  # [C, K, N]
    u = utility(z, preference)
    centre = utility(np.stack([p.mean for p in made]), preference)
    return Prediction(centre, u.std(0, ddof=1), u)


def utility(z: np.ndarray, preference: np.ndarray) -> np.ndarray:
    """[C, ...] scaled values -> [...]."""
    w = preference.reshape(-1, *[1] * (z.ndim - 1))
    return -(w * (1 - z)).max(0) + LINEAR * (w * z).sum(0)


def chance_met(columns: Sequence[Column], found: Sequence[Prediction], widths: Sequence[np.ndarray]) -> np.ndarray:
    """[N] the chance that every threshold is met, columns taken as independent and normal with these widths."""
    from scipy.special import ndtr

    chance = np.ones(len(found[0].mean))
    for column, p, width in zip(columns, found, widths, strict=True):
        if column.threshold is not None:
            chance = chance * ndtr(column.sign * (p.mean - column.threshold) / np.maximum(width, 1e-300))
    return chance


def preferences(columns: Sequence[Column], count: int, seed: int) -> np.ndarray:
    """[count, C] preferences: the columns' own weights first, then Dirichlet draws around them."""
    weights = np.array([c.weight for c in columns])
    weights = weights / weights.sum()
    if len(columns) == 1:
        return np.ones((count, 1))
    drawn = np.random.default_rng(seed).dirichlet(weights * len(columns), max(count - 1, 0))
    return np.concatenate([weights[None], drawn])[:count]


def pareto(columns: Sequence[Column], values: np.ndarray) -> np.ndarray:
    """[N] bool: rows that no other row equals or beats in every column and beats in one; rows with a gap are not on the front."""
    z = values * np.array([c.sign for c in columns])
    whole = ~np.isnan(z).any(1)
    front = whole.copy()
    for i in np.flatnonzero(whole):
        front[i] = not ((z[whole] >= z[i]).all(1) & (z[whole] > z[i]).any(1)).any()
    return front


def hypervolume(columns: Sequence[Column], values: np.ndarray, reference: np.ndarray) -> float | None:
    """Volume that the rows dominate above the reference point [C] (in the columns' units); None without moocore."""
    try:
        import moocore
    except ImportError:
        return None
    sign = np.array([c.sign for c in columns])
    rows = values[~np.isnan(values).any(1)]
    return float(moocore.hypervolume(-rows * sign, ref=-reference * sign)) if len(rows) else 0.0
