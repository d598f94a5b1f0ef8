"""Where the future of a series is expected, and how wide errors are: a weighted ensemble of statistical forecasters, step by step.

    N series    T rows    O origins    M members    H steps of the horizon
Members are exponential smoothing with four kinds of trend, with and without seasons, the seasonal naive forecast, theta, linear
regressions of values and of changes, shared by all series, and autoregressions of each series. Their weights, the growth of errors with the step, and how errors follow the recent unrest and the level are
learned from rolling origins of the past. What is learned depends on nothing after the last row given, and a forecast on nothing after its origin.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stochflow.forecast import autoregression, members, regression
from stochflow.forecast.members import CELLS, CHOSEN_ON
from stochflow.forecast.scales import Residuals, local, recent_unrest, scales
from stochflow.forecast.smoothing import Rates, grid, smooth
from stochflow.forecast.weights import weights
from stochflow.worlds.series import Track

POWERS = (1.0, 0.5, 0.0)  # of a transformation: as it is, square root, logarithm
LATER = 20.0  # rows' worth by which learning from what came later flatters regressions that are cross-validated
MOST_ORIGINS = 4000  # of a series, from which errors are learned; fewer of each in a panel
MOST_ERRORS = 200_000  # origins of all series together, but at least 200 of each


class Located(NamedTuple):
    """What is expected from R origins, in transformed units."""

    location: np.ndarray  # [R, H]
    scale: np.ndarray  # [R] of an error at its step's unit
    series: np.ndarray  # [R] number of the series; the count of known series where it was not there at fit


# transformations ------------------------------------------------------------------------------------------------------


def forward(y: np.ndarray, power: float) -> np.ndarray:
    if power == 1.0:
        return y
    with np.errstate(all="ignore"):
        return np.log(y) if power == 0.0 else np.sign(y) * np.abs(y) ** power


def backward(u: np.ndarray, power: float) -> np.ndarray:
    if power == 1.0:
        return u
    if power == 0.0:
        return np.exp(np.minimum(u, 700.0))
    return np.sign(u) * np.abs(u) ** (1 / power)


# fitting --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is known before any value is seen."""

    horizon: int
    seasons: tuple[int, ...] = ()  # whole rows of the seasons, shortest first
    long: float = 0.0  # a longer period, shown to the regression as waves
    log: bool | None = None  # True: logarithms; False: values as they are; None: chosen for each series

    @property
    def pair(self) -> tuple[int, int]:
        m = [x for x in self.seasons if x > 1]
        return (m[0] if m else 1, m[1] if len(m) > 1 else 1)

    def warm(self, rows: int) -> int:
        """Rows of a series that no error is learned from."""
        m = self.pair[0]
        return int(max(2, min(max(2 * m, 8), rows // 3)))


@dataclass
class Ensemble:
    """A fitted ensemble: arrays alone, so that it is saved without code."""

    plan: Plan
    names: tuple[str, ...]
    power: np.ndarray  # [N] of the transformation
    rates: Rates  # [N, F]
    spread: np.ndarray  # [N] of the regression's units
    coefficients: np.ndarray  # [H, P] of the regression of values
    growth: np.ndarray  # [H, P'] of the regression of changes
    repeated: np.ndarray  # [N, 2, 1 + lags] of each series' autoregressions of values and of changes
    layout: regression.Layout
    weights: np.ndarray  # [N, M]
    unit: np.ndarray  # [N] spread of errors in units of their step's
    shape: np.ndarray  # [N, H] spread of the errors of a step, relative
    bias: np.ndarray  # [N, H] in standardised units
    quiet: np.ndarray  # [N] usual size of the error one step ahead
    height: np.ndarray  # [N] usual size of the level
    powers: tuple[float, float]  # of the recent unrest, of the level
    anchor: np.ndarray  # [N] least scale of a level, so that one near zero has a scale

    def __post_init__(self) -> None:
        self._place = {name: i for i, name in enumerate(self.names)}

    def number(self, name: str) -> int:
        return self._place.get(name, len(self.names))

    def locate(self, tracks: Sequence[Track], ends: Sequence[np.ndarray]) -> Located:
        """Forecasts of transformed tracks from rows `ends` of each."""
        location, scale, series = [], [], []
        for part, at in _groups(tracks, ends):
            ids = np.array([self.number(t.name) for t in part])
            known = np.where(ids < len(self.names), ids, 0)
            padded, start, offset = pad(part)
            columns = np.unique(np.concatenate([e + o for e, o in zip(at, offset, strict=True)])).astype(np.int64)
            own = self._own(known)
            new = np.flatnonzero(ids == len(self.names)).tolist()
            for i in new:
                own._acquaint(i, padded, int(offset[i] + at[i].min()))
            made, one = members.forecasts(own, padded, start, columns, None)
            for i, (e, o) in enumerate(zip(at, offset.tolist(), strict=True)):
                if i in new:
                    early = one[i, : int(o + e.min())]
                    own.quiet[i] = max(np.sqrt((early**2).sum() / max((early != 0).sum(), 1)), own.anchor[i])
                    own.unit[i] = own.quiet[i] * float(np.median(self.unit / self.quiet))
                rows = np.searchsorted(columns, e + o)
                level = np.abs(regression.reference(padded[i : i + 1], 8)[0, columns - 1])
                unrest = recent_unrest(one[i], columns)
                wide = (own.unit[i] * local(unrest / own.quiet[i], level / own.height[i], self.powers))[rows]
                bias = (own.bias[i] * own.shape[i])[None] * wide[:, None]
                location.append(np.tensordot(made[i][rows], own.weights[i], (1, 0)) + bias)
                scale.append(wide)
                series.append(np.full(len(e), ids[i]))
        return Located(
            np.concatenate(location),
            np.maximum(np.concatenate(scale), np.finfo(np.float64).tiny),
            np.concatenate(series),
        )

    def _acquaint(self, i: int, u: np.ndarray, end: int) -> None:
        """Parameters of a series that was not there at fit, from its own rows before `end`."""
        past = u[i : i + 1, :end]
        past = past[:, np.isfinite(past[0]).argmax() :]
        rates = members.choose(past, self.plan, np.array([past.shape[1]]))
        if rates.alpha.shape == (1, self.rates.alpha.shape[1]):
            for mine, found in zip(self.rates, rates, strict=True):
                mine[i] = found[0]
        self.spread[i], self.anchor[i] = (x[0] for x in _spread(past, self.plan))
        for k, lag in enumerate(autoregression.kinds(self.plan.pair[0])[: self.repeated.shape[1]]):
            self.repeated[i, k] = autoregression.fit(past, lag)[0]
        self.height[i] = max(float(np.nanmean(np.abs(past))), self.anchor[i])
        self.bias[i], self.weights[i] = 0, self.weights.mean(0)

    def _own(self, rows: np.ndarray) -> Ensemble:
        """The same for some of the series."""
        pick = {
            f: getattr(self, f)[rows]
            for f in ("power", "spread", "repeated", "weights", "unit", "shape", "bias", "quiet", "height", "anchor")
        }
        return Ensemble(
            self.plan, tuple(self.names[i] for i in rows), rates=Rates(*[x[rows] for x in self.rates]),
            coefficients=self.coefficients, growth=self.growth, layout=self.layout, powers=self.powers, **pick,
        )  # fmt: skip


def powers(tracks: Sequence[Track], plan: Plan) -> np.ndarray:
    """[N] the transformation of each series: the one under which simple filters find its values likeliest."""
    if plan.log is not None:
        return np.full(len(tracks), 0.0 if plan.log else 1.0)
    rates, _ = grid(plan.pair[0] > 1, False)
    few = (rates.alpha[0] >= 0.1) & (rates.alpha[0] <= 0.8) & np.isin(rates.gamma[0], (0.0, 0.1)) & (rates.phi[0] > 0.9)
    some = Rates(*[x[:, few] for x in rates])
    made = np.ones(len(tracks))
    longest = max(len(t.y) for t in tracks)
    step = max(1, CELLS // (min(longest, CHOSEN_ON) * int(few.sum())))
    for i in range(0, len(tracks), step):
        y = pad(tracks[i : i + step])[0][:, -CHOSEN_ON:]
        made[i : i + step] = _powers(y, some, plan)
    return made


def _powers(y: np.ndarray, rates: Rates, plan: Plan) -> np.ndarray:
    seen = np.isfinite(y)
    low, high = (f(np.where(seen, y, fill), 1) for f, fill in ((np.min, np.inf), (np.max, -np.inf)))
    able = (seen.sum(1) >= 8) & (low >= 0) & (high > low)
    first = seen.argmax(1)
    warm = plan.warm(int(np.median(seen.sum(1)))) + 1
    counted = seen & (np.arange(y.shape[1]) >= (first + warm)[:, None])
    best, chosen = np.full(len(y), np.inf), np.ones(len(y))
    every = np.arange(1, y.shape[1] + 1)
    tiny = np.where(seen, np.maximum(y, 1e-300), 1.0)
    for power in POWERS:
        rows = np.flatnonzero(able & (low > 0) if power == 0.0 else able)
        if not len(rows):
            continue
        one = smooth(forward(y[rows], power), rates, (plan.pair[0], 1), origins=every).one  # [T, R, G]
        good = counted[rows]
        total = good.sum(1).clip(min=1)
        size = ((one**2) * good.T[:, :, None]).sum(0).min(1) / total + 1e-300
        slope = (power - 1) * np.log(tiny[rows]) + np.log(power or 1.0)
        slope = np.where((y[rows] > 0) | (power == 1.0), slope, 0.0)
        worth = 0.5 * np.log(size) - np.where(good, slope, 0).sum(1) / total
        better = worth < best[rows] - (0.02 if power != 1.0 else 0.0)
        best[rows[better]], chosen[rows[better]] = worth[better], power
    return chosen


def fit(tracks: Sequence[Track], power: np.ndarray, plan: Plan) -> tuple[Ensemble, Residuals]:
    """Learn from whole transformed tracks; `power` says how they were."""
    u, start, offset = pad(tracks)
    rows = np.array([len(t.y) for t in tracks])
    rates = members.choose(u, plan, rows)
    spread, floor = _spread(u, plan)
    first = offset + np.array([plan.warm(n) for n in rows])
    last = u.shape[1] - plan.horizon
    columns = np.arange(max(int(first.min()), 1), last + 1)
    most = min(MOST_ORIGINS, max(MOST_ERRORS // len(tracks), 200))
    thin = max(1, -(-len(columns) // most))
    columns = columns[::-1][::thin][::-1]
    shape = regression.layout(int(np.median(rows)), tuple(m for m in plan.seasons if m > 1), plan.long, plan.horizon)
    n = len(tracks)
    found = Ensemble(
        plan, tuple(t.name for t in tracks), power, rates, spread, np.zeros((plan.horizon, 0)), np.zeros((plan.horizon, 0)), members.autoregressions(u, plan), shape, np.zeros((n, 0)),
        np.ones(n), np.ones((n, plan.horizon)), np.zeros((n, plan.horizon)), np.ones(n), np.ones(n), (0.0, 0.0), floor,
    )  # fmt: skip
    short = not len(columns)  # too short for a single error: nothing is learned of it
    if short:
        columns = np.array([last if last > 0 else u.shape[1]])
    lines = []
    for line in (shape, regression.changes(shape, plan.pair[0])):
        design = regression.Design(u, spread, line, start)
        if short:
            width = design.common(columns).shape[2] + design.ahead(columns, 1).shape[2]
            lines.append((np.zeros((plan.horizon, width)), np.zeros((n, 1, plan.horizon))))
        else:
            lines.append(regression.train(design, columns, plan.horizon, first))
    found.coefficients, found.growth = lines[0][0], lines[1][0]
    kinds = autoregression.kinds(plan.pair[0])[: found.repeated.shape[1]]
    repeated = [autoregression.crossed(u, lag, columns, plan.horizon) for lag in kinds]
    crossed = np.stack([*[x[1] for x in lines], *repeated], 2)  # [N, O, 4, H]
    truth = np.stack([_ahead(u, columns, h) for h in range(1, plan.horizon + 1)], 2)  # [N, O, H]
    truth[columns[None] < first[:, None]] = np.nan
    errors, one = members.errors(found, u, start, columns, crossed, truth)
    lines_at = slice(errors.shape[2] - crossed.shape[2], errors.shape[2] - len(repeated))
    errors[:, :, lines_at] *= np.sqrt(1 + LATER / np.maximum(rows, 5))[:, None, None, None]
    found.weights = weights(errors, plan.horizon, floor)
    del crossed
    combined = np.einsum("nomh,nm->noh", errors, found.weights)
    return scales(found, u, columns, combined, one, offset, rows, floor)


def _spread(u: np.ndarray, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """([N] spread of the changes over a season, [N] the least scale of each series)."""
    lag = plan.pair[0] if u.shape[1] > 2 * plan.pair[0] else 1
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a series without two values has no spread
        spread, overall = np.nanstd(u[:, lag:] - u[:, :-lag], axis=1), np.nanstd(u, axis=1)
        size = np.nanmax(np.abs(u), 1)
    floor = np.maximum(1e-6 * np.where(size > 0, size, 1.0), 1e-3 * np.where(np.isfinite(overall), overall, 0))
    return np.maximum(np.where(np.isfinite(spread), spread, 0), floor), floor


def pad(tracks: Sequence[Track]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(values [N, T] ending together, time of the first column [N], columns before each series' first row [N])."""
    longest = max(len(t.y) for t in tracks)
    made = np.full((len(tracks), longest), np.nan)
    for i, t in enumerate(tracks):
        made[i, longest - len(t.y) :] = t.y
    offset = np.array([longest - len(t.y) for t in tracks])
    start = np.array([t.time[-1] - (longest - 1) for t in tracks])
    return made, start, offset


def _ahead(u: np.ndarray, columns: np.ndarray, h: int) -> np.ndarray:
    at = columns - 1 + h
    return np.where(at < u.shape[1], u[:, at.clip(max=u.shape[1] - 1)], np.nan)


def _groups(tracks: Sequence[Track], ends: Sequence[np.ndarray]) -> list[tuple[list[Track], list[np.ndarray]]]:
    """Series that are filtered together: few enough that their forecasts fit into memory."""
    made: list[tuple[list[Track], list[np.ndarray]]] = []
    size = 0
    for track, at in zip(tracks, ends, strict=True):
        if not made or size + len(track.y) > CELLS // 400:
            made.append(([], []))
            size = 0
        made[-1][0].append(track)
        made[-1][1].append(np.asarray(at, dtype=np.int64))
        size += len(track.y)
    return made
