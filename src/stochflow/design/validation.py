"""How well a model predicts what it has not seen: grouped folds, the choice of a model, intervals that cover what they say.

N sequences, G groups. Near-identical sequences are one group and are held out together, so nothing is predicted from its twin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.stats import spearmanr
from torch import Tensor

from stochflow.design.features import distances, nearest
from stochflow.design.surrogates import Prediction, Surrogate

IDENTITY = 0.8  # share of equal letters from which two sequences count as near-identical
FOLDS = 5
MOST = 2000  # rows that are cross-validated; of more, a random part
LEVELS = (0.8, 0.95)
BOUNDED = ("forest",)  # never predict beyond the values they were fitted to


def groups_of(texts: Sequence[str], identity: float = IDENTITY) -> np.ndarray:
    """[N] group numbers: each sequence joins the first group whose founder it equals in this share of letters, or founds one."""
    found = np.full(len(texts), -1, dtype=np.int64)
    founders: list[str] = []
    for start in range(0, len(texts), 256):
        block = list(texts[start : start + 256])
        allowed = np.array([math.floor((1 - identity) * len(t) + 1e-9) for t in block])
        for first in range(0, len(founders), 2048):
            part = founders[first : first + 2048]
            open_ = np.flatnonzero(found[start : start + len(block)] < 0)
            if not len(open_):
                break
            close = distances([block[i] for i in open_], part) <= allowed[open_, None]
            hit = close.any(1)
            found[start + open_[hit]] = first + close[hit].argmax(1)
        new: list[int] = []
        within = distances(block, block) <= allowed[:, None]
        for i in range(len(block)):
            if found[start + i] >= 0:
                continue
            near = next((j for j in new if within[i, j]), None)
            if near is None:
                new.append(i)
                found[start + i] = len(founders)
                founders.append(block[i])
            else:
                found[start + i] = found[start + near]
    return found


def grouped(texts: Sequence[str], least: int = FOLDS) -> tuple[np.ndarray, float]:
    """Group numbers [N] of at least so many groups, and the identity from which sequences are one group.

    A library around one or a few parents has fewer groups at `IDENTITY`: then only what is more alike is held together, down to
    sequences that differ in one letter; where even that leaves too few, each sequence is a group, and the identity is 1.
    """
    found = groups_of(texts)
    if len(np.unique(found)) >= least:
        return found, IDENTITY
    some = texts[:: max(1, len(texts) // 300)]
    centre = some[int(distances(some, some).sum(1).argmin())]
    order = np.argsort(-distances(texts, [centre])[:, 0], kind="stable")  # a parent last: it is near to all its mutants
    one_letter = 1 - 1 / max(map(len, texts))
    for identity in sorted({x for x in (0.9, 0.95, one_letter) if x > IDENTITY}):
        found[order] = groups_of([texts[i] for i in order], identity)
        if len(np.unique(found)) >= least:
            return found, identity
    return np.arange(len(texts)), 1.0


def folds_of(groups: np.ndarray, count: int, seed: int) -> np.ndarray:
    """[N] fold numbers: whole groups, the largest first, each into the fold that is smallest so far."""
    names, sizes = np.unique(groups, return_counts=True)
    order = np.random.default_rng(seed).permutation(len(names))
    order = order[np.argsort(-sizes[order], kind="stable")]
    filled, fold = np.zeros(count), np.zeros(len(names), dtype=np.int64)
    for g in order:
        fold[g] = filled.argmin()
        filled[fold[g]] += sizes[g]
    return fold[np.searchsorted(names, groups)]


def held_out(kind: Surrogate, x: Tensor, y: np.ndarray, groups: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sd [N] of each row by a model that has not seen its fold."""
    count = min(FOLDS, len(np.unique(groups)))
    fold = folds_of(groups, count, seed)
    mean, sd = np.empty(len(y)), np.empty(len(y))
    for f in range(count):
        out = fold == f
        p: Prediction = kind.fit(x[~out], y[~out], groups[~out], seed + f).predict(x[out])
        mean[out], sd[out] = p.mean, p.sd
    return mean, sd


# intervals ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """From a model's own sd to the width of an interval.

    s = sqrt(noise^2 + (stretch * sd)^2) is fitted to held-out errors by likelihood; an interval is mean +- q * s, where q is the
    conformal quantile of |error| / s over held-out groups. It holds for a new group that is exchangeable with those measured.
    """

    noise: float
    stretch: float
    quantiles: dict[float, float | None]  # by level; None: too few groups for it
    groups: int

    def width(self, sd: np.ndarray) -> np.ndarray:
        return np.sqrt(self.noise**2 + (self.stretch * sd) ** 2)

    def interval(self, mean: np.ndarray, sd: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray] | None:
        """Lower and upper ends; None where there are too few groups for this level."""
        q = self.quantiles.get(level)
        if q is None:
            return None
        return mean - q * self.width(sd), mean + q * self.width(sd)


def calibrate(y: np.ndarray, mean: np.ndarray, sd: np.ndarray, groups: np.ndarray) -> Calibration:
    """From held-out predictions."""
    error = y - mean
    size = float(np.sqrt((error**2).mean())) or 1e-9
    spread = float(np.sqrt((sd**2).mean())) or 1e-9

    def minus_log_likelihood(p: np.ndarray) -> float:
        variance = np.exp(2 * p[0]) * size**2 + np.exp(2 * p[1]) * (size / spread * sd) ** 2 + 1e-12 * size**2
        return float((0.5 * np.log(variance) + 0.5 * error**2 / variance).mean())

    found = minimize(minus_log_likelihood, np.log([0.7, 0.7]), method="L-BFGS-B", bounds=[(-6, 2)] * 2).x
    noise, stretch = float(np.exp(found[0]) * size), float(np.exp(found[1]) * size / spread)
    ratio = np.abs(error) / np.sqrt(noise**2 + (stretch * sd) ** 2)
    count = len(np.unique(groups))
    return Calibration(noise, stretch, {level: group_quantile(ratio, groups, level) for level in LEVELS}, count)


def group_quantile(ratio: np.ndarray, groups: np.ndarray, level: float) -> float | None:
    """The conformal quantile when a new group comes: every group weighs 1 / (G + 1), shared by its rows; the rest is infinite.

    (Lee, Barber and Willett 2023, hierarchical conformal prediction.) None where G + 1 < 1 / (1 - level).
    """
    names, at, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    weight = 1 / ((len(names) + 1) * sizes[at])
    order = np.argsort(ratio, kind="stable")
    total = weight[order].cumsum()
    reached = np.flatnonzero(total >= level - 1e-12)
    return float(ratio[order[reached[0]]]) if len(reached) else None


def coverage(y: np.ndarray, low: np.ndarray, high: np.ndarray, groups: np.ndarray) -> float:
    """Share of values inside their interval, each group counted once."""
    inside = ((y >= low) & (y <= high)).astype(float)
    names, at = np.unique(groups, return_inverse=True)
    return float(np.mean([inside[at == g].mean() for g in range(len(names))]))


# all of it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """One model on held-out groups."""

    name: str
    rmse: float
    r2: float
    rank: float  # Spearman, NaN where the model says the same of all
    calibration: Calibration
    y: np.ndarray = field(repr=False)
    mean: np.ndarray = field(repr=False)
    sd: np.ndarray = field(repr=False)
    groups: np.ndarray = field(repr=False)

    def figures(self) -> dict[str, Any]:
        """As JSON."""
        known = {"model": self.name, "rmse": self.rmse, "r2": self.r2, "rank_correlation": self.rank}
        return known | {"rows": len(self.y), "groups": self.calibration.groups}


def check(kind: Surrogate, x: Tensor, y: np.ndarray, groups: np.ndarray, seed: int) -> Checked:
    """Cross-validate one surrogate."""
    mean, sd = held_out(kind, x, y, groups, seed)
    rmse = float(np.sqrt(((y - mean) ** 2).mean()))
    rank = float(spearmanr(y, mean).statistic) if np.ptp(mean) > 0 and np.ptp(y) > 0 else math.nan
    r2 = 1 - rmse**2 / float(y.var()) if y.var() > 0 else math.nan
    return Checked(kind.name, rmse, r2, rank, calibrate(y, mean, sd, groups), y, mean, sd, groups)


def choose(kinds: Sequence[Surrogate], x: Tensor, y: np.ndarray, groups: np.ndarray, seed: int) -> list[Checked]:
    """All of them, the chosen one first: the smallest held-out error, but a model that cannot predict above what it has seen
    (a forest) only where it is better by more than two standard errors of the difference: it cannot say what to try next.
    """
    found = sorted((check(kind, x, y, groups, seed) for kind in kinds), key=lambda c: c.rmse)
    other = next((c for c in found if c.name not in BOUNDED), None)
    if found[0].name in BOUNDED and other is not None:
        gain = (other.y - other.mean) ** 2 - (found[0].y - found[0].mean) ** 2
        if gain.mean() <= 2 * gain.std(ddof=1) / math.sqrt(len(gain)):
            found.remove(other)
            found.insert(0, other)
    return found


def coverage_table(found: Checked, seed: int) -> list[dict[str, float | int | None]]:
    """Per level, the coverage of groups that the interval was not made from: quantiles of one half, tested on the other, ten times."""
    names = np.unique(found.groups)
    rng = np.random.default_rng(seed)
    ratio = np.abs(found.y - found.mean) / found.calibration.width(found.sd)
    rows: list[dict[str, float | int | None]] = []
    for level in LEVELS:
        shares = []
        for _ in range(10):
            half = np.isin(found.groups, rng.permutation(names)[: len(names) // 2])
            q = group_quantile(ratio[half], found.groups[half], level) if half.any() and not half.all() else None
            if q is not None:
                shares.append(coverage(ratio[~half], np.zeros(1), np.full(1, q), found.groups[~half]))
        wanted = found.calibration.quantiles[level]
        rows.append({"level": level, "covered": float(np.mean(shares)) if shares else None, "q": wanted})
    return rows


def by_distance(texts: Sequence[str], found: Checked, seed: int) -> list[dict[str, float | int]]:
    """Held-out error by the distance to the nearest sequence that the model had seen: where it begins to extrapolate."""
    count = min(FOLDS, len(np.unique(found.groups)))
    fold = folds_of(found.groups, count, seed)
    far = np.zeros(len(texts), dtype=np.int64)
    for f in range(count):
        out = fold == f
        known = [t for t, o in zip(texts, out, strict=True) if not o]
        far[out] = nearest([t for t, o in zip(texts, out, strict=True) if o], known)[1]
    edges = np.unique(np.quantile(far, [0, 0.25, 0.5, 0.75, 1], method="nearest"))
    rows: list[dict[str, float | int]] = []
    for i, upper in enumerate(edges):
        here = (far <= upper) & (far > (edges[i - 1] if i else -1))
        if here.sum() >= 3:
            rmse = float(np.sqrt(((found.y - found.mean)[here] ** 2).mean()))
            rows.append({"from": int(far[here].min()), "to": int(upper), "rows": int(here.sum()), "rmse": rmse})
    return rows
