"""Where the future of a series is expected, and how wide errors are: a weighted ensemble of statistical forecasters, step by step.

    N series    T rows    O origins    M members    H steps of the horizon
Members are exponential smoothing with four kinds of trend, with and without seasons, the seasonal naive forecast, theta, and linear
regressions of values and of changes, shared by all series. Their weights, the growth of errors with the step, and how errors follow the recent unrest and the level are
learned from rolling origins of the past. What is learned depends on nothing after the last row given, and a forecast on nothing after its origin.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stochflow.forecast import regression
from stochflow.forecast.smoothing import FORMS, Rates, grid, smooth
from stochflow.worlds.series import Track

POWERS = (1.0, 0.5, 0.0)  # of a transformation: as it is, square root, logarithm
CHOSEN_ON = 2500  # last rows on which filters are chosen
MOST_ORIGINS = 4000  # of a series, from which errors are learned; fewer of each in a panel
MOST_ERRORS = 200_000  # origins of all series together, but at least 200 of each
BORROWED = 30.0  # rows of its own against which a series of a panel trusts what is best for all
SPENT = 10.0  # values that choices have used up: errors were a little larger without them
BORROWED_ERRORS = 2.0  # independent errors that the other series of a panel lend to what is known of a series' spread
FEW = 2.0  # share by which n independent errors leave the variance uncertain, times n: Student's intervals beside normal ones
CELLS = 4_000_000  # forecasts of members held at once
UNREST = 0.08  # weight of the newest error in the recent variance
UNREST_POWERS = (0.0, 0.3, 0.6, 1.0)
LEVEL_POWERS = (0.0, 0.5, 1.0)
TRIALS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)  # how much a shock at one step stays in the errors of later ones


class Located(NamedTuple):
    """What is expected from R origins, in transformed units."""

    location: np.ndarray  # [R, H]
    scale: np.ndarray  # [R] of an error at its step's unit
    series: np.ndarray  # [R] number of the series; the count of known series where it was not there at fit


class Residuals(NamedTuple):
    """Errors of the ensemble from the origins that were learned from, standardised."""

    path: np.ndarray  # [P, H]
    series: np.ndarray  # [P]
    origin: np.ndarray  # [P] row before which the forecast begins, in the series' own rows


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
            made, one = own.members(padded, start, columns)
            for i, (e, o) in enumerate(zip(at, offset.tolist(), strict=True)):
                if i in new:
                    early = one[i, : int(o + e.min())]
                    own.quiet[i] = max(np.sqrt((early**2).sum() / max((early != 0).sum(), 1)), own.anchor[i])
                    own.unit[i] = own.quiet[i] * float(np.median(self.unit / self.quiet))
                rows = np.searchsorted(columns, e + o)
                level = np.abs(regression.reference(padded[i : i + 1], 8)[0, columns - 1])
                unrest = _unrest(one[i], columns)
                wide = (own.unit[i] * _local(unrest / own.quiet[i], level / own.height[i], self.powers))[rows]
                bias = (own.bias[i] * own.shape[i])[None] * wide[:, None]
                location.append(np.tensordot(made[i][rows], own.weights[i], (1, 0)) + bias)
                scale.append(wide)
                series.append(np.full(len(e), ids[i]))
        return Located(np.concatenate(location), np.maximum(np.concatenate(scale), 1e-9), np.concatenate(series))

    def _acquaint(self, i: int, u: np.ndarray, end: int) -> None:
        """Parameters of a series that was not there at fit, from its own rows before `end`."""
        past = u[i : i + 1, :end]
        past = past[:, np.isfinite(past[0]).argmax() :]
        rates = _choose(past, self.plan, np.array([past.shape[1]]))
        if rates.alpha.shape == (1, self.rates.alpha.shape[1]):
            for mine, found in zip(self.rates, rates, strict=True):
                mine[i] = found[0]
        self.spread[i], self.anchor[i] = (x[0] for x in _spread(past, self.plan))
        self.height[i] = max(float(np.nanmean(np.abs(past))), self.anchor[i])
        self.bias[i], self.weights[i] = 0, self.weights.mean(0)

    def _own(self, rows: np.ndarray) -> Ensemble:
        """The same for some of the series."""
        pick = {
            f: getattr(self, f)[rows]
            for f in ("power", "spread", "weights", "unit", "shape", "bias", "quiet", "height", "anchor")
        }
        return Ensemble(
            self.plan, tuple(self.names[i] for i in rows), rates=Rates(*[x[rows] for x in self.rates]),
            coefficients=self.coefficients, growth=self.growth, layout=self.layout, powers=self.powers, **pick,
        )  # fmt: skip

    def members(self, u: np.ndarray, start: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """([N, O, M, H] forecasts of the members from columns of padded series, [N, O'] errors one step ahead at every row)."""
        return _members(self, u, start, columns, None)


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
    rates = _choose(u, plan, rows)
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
        plan, tuple(t.name for t in tracks), power, rates, spread, np.zeros((plan.horizon, 0)), np.zeros((plan.horizon, 0)), shape, np.zeros((n, 0)),
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
    crossed = np.stack([x[1] for x in lines], 2)  # [N, O, 2, H]
    truth = np.stack([_ahead(u, columns, h) for h in range(1, plan.horizon + 1)], 2)  # [N, O, H]
    truth[columns[None] < first[:, None]] = np.nan
    errors, one = _errors(found, u, start, columns, crossed, truth)
    found.weights = _weights(errors, plan.horizon, floor)
    del crossed
    combined = np.einsum("nomh,nm->noh", errors, found.weights)
    return _scales(found, u, columns, combined, one, offset, rows, floor)


def _spread(u: np.ndarray, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """([N] spread of the changes over a season, [N] the least scale of each series)."""
    lag = plan.pair[0] if u.shape[1] > 2 * plan.pair[0] else 1
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a series without two values has no spread
        spread, overall = np.nanstd(u[:, lag:] - u[:, :-lag], axis=1), np.nanstd(u, axis=1)
        size = np.nanmax(np.abs(u), 1)
    floor = np.maximum(1e-6 * np.maximum(1.0, size), 1e-3 * np.where(np.isfinite(overall), overall, 0))
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


def _choose(u: np.ndarray, plan: Plan, rows: np.ndarray) -> Rates:
    """For each series and each kind of trend, with and without seasons, the filter with the smallest errors over the horizon."""
    part = u[:, -CHOSEN_ON:]
    steps = tuple(sorted({1, (plan.horizon + 1) // 2, plan.horizon}))
    m, m2 = plan.pair
    length = part.shape[1]
    second = m2 if m2 > 1 and length >= 3 * m2 else 1
    kinds = [(1, 1)] if m == 1 or length < 2 * m + 2 else [(m, second), (1, 1)]
    found = []
    step = max(1, CELLS // (length * 8 + 1))
    for pair in kinds:
        rates, form = grid(pair[0] > 1, pair[1] > 1)
        loss = []
        for i in range(0, len(part), step):
            some = part[i : i + step]
            loss.append(smooth(some, rates, pair, steps, warm=plan.warm(int(np.median(rows)))).loss)
        each = np.concatenate(loss)
        each = each / np.maximum(each.min(1, keepdims=True), 1e-300)
        if len(each) > 1:  # a short series of a panel says little about its own filter
            share = (rows / (rows + BORROWED))[:, None]
            each = share * each + (1 - share) * np.minimum(each, 10.0).mean(0)
        best = np.stack([np.where(form == f, each, np.inf).argmin(1) for f in range(FORMS)], 1)
        found.append(rates.take(best))
    return Rates(*[np.concatenate(x, 1) for x in zip(*found, strict=True)])


def _members(
    own: Ensemble, u: np.ndarray, start: np.ndarray, columns: np.ndarray, crossed: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """All members' forecasts [N, O, M, H] and the errors one step ahead of the first filters [N, T]."""
    plan = own.plan
    m, m2 = plan.pair
    length = u.shape[1]
    every = np.arange(1, length + 1)
    half = own.rates.alpha.shape[1] // FORMS
    made, ones = [], []
    for k in range(half):
        rates = Rates(*[x[:, k * FORMS : (k + 1) * FORMS] for x in own.rates])
        seasonal = half == 2 and k == 0
        pair = (m, m2 if bool(np.any(rates.second > 0)) else 1) if seasonal else (1, 1)
        passed = smooth(u, rates, pair, origins=columns, horizon=plan.horizon)
        made.append(passed.forecast.transpose(1, 0, 2, 3))
        if k == 0:
            ones.append(smooth(u, Rates(*[x[:, :1] for x in rates]), pair, origins=every).one[:, :, 0].T)
            theta = _theta(u, passed.forecast[:, :, 0], columns, m if seasonal else 1)
    if crossed is None:
        both = ((own.layout, own.coefficients), (regression.changes(own.layout, m), own.growth))
        lines = [regression.predict(regression.Design(u, own.spread, x, start), columns, b) for x, b in both]
        crossed = np.stack(lines, 2)
    extra = np.stack([theta, _naive(u, columns, m, plan.horizon)], 2)
    return np.concatenate([*made, extra, crossed], 2), ones[0]


def _naive(u: np.ndarray, columns: np.ndarray, m: int, horizon: int) -> np.ndarray:
    """[N, O, H] the value whole seasons before, the last one seen where that is missing."""
    seen = np.where(np.isfinite(u), np.arange(u.shape[1]), 0)
    np.maximum.accumulate(seen, axis=1, out=seen)
    full = np.take_along_axis(u, seen, 1)
    full = np.where(np.isfinite(full), full, np.nanmean(u, 1, keepdims=True))
    made = []
    for h in range(1, horizon + 1):
        at = columns - 1 + h - m * (-(-h // m))
        made.append(full[:, np.where(at >= 0, at, columns - 1)])
    return np.stack(made, 2)


def _theta(u: np.ndarray, flat: np.ndarray, columns: np.ndarray, m: int) -> np.ndarray:
    """[N, O, H]: the forecast without a trend, and half the slope of a line through the past (of a season's means where there is one)."""
    smooth_u = regression.reference(u, m) if m > 1 else np.where(np.isfinite(u), u, np.nan)
    seen = np.isfinite(smooth_u) & np.isfinite(u)
    t = np.arange(u.shape[1], dtype=np.float64)
    x = np.where(seen, smooth_u - np.where(seen.any(1), np.nanmean(np.where(seen, smooth_u, np.nan), 1), 0)[:, None], 0)
    n, st, sx = seen.cumsum(1), (seen * t).cumsum(1), x.cumsum(1)
    stt, stx = (seen * t * t).cumsum(1), (x * t).cumsum(1)
    under = n * stt - st**2
    slope = np.where(under > 0, (n * stx - st * sx) / np.where(under > 0, under, 1), 0)
    horizon = flat.shape[2]
    return flat.transpose(1, 0, 2) + 0.5 * slope[:, columns - 1, None] * np.arange(1, horizon + 1)


def _errors(
    own: Ensemble, u: np.ndarray, start: np.ndarray, columns: np.ndarray, crossed: np.ndarray, truth: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(errors [N, O, M, H], errors one step ahead [N, T]), a few series at a time."""
    members = own.rates.alpha.shape[1] + 4
    step = max(1, CELLS // (len(columns) * members * own.plan.horizon))
    errors, one = [], []
    for i in range(0, len(u), step):
        rows = np.arange(i, min(i + step, len(u)))
        made, ones = _members(own._own(rows), u[rows], start[rows], columns, crossed[rows])
        errors.append((truth[rows][:, :, None] - made).astype(np.float32))
        one.append(ones)
    return np.concatenate(errors), np.concatenate(one)


# weights and scales ---------------------------------------------------------------------------------------------------


def _weights(errors: np.ndarray, horizon: int, floor: np.ndarray) -> np.ndarray:
    """[N, M], not negative, sum 1: the combination with the smallest squared errors, held towards inverse squared sizes where origins are few."""
    count, origins, members, _ = errors.shape
    step = max(1, CELLS // (origins * members * horizon))
    parts = [_products(errors[i : i + step], floor[i : i + step]) for i in range(0, count, step)]
    own = np.concatenate([p[0] for p in parts])  # [N, M, M]
    many = np.concatenate([p[1] for p in parts]) / horizon  # independent origins
    pool = own.mean(0) / max(float(np.trace(own.mean(0))), 1e-12) * members
    own = own / np.maximum(np.trace(own, axis1=1, axis2=2)[:, None, None], 1e-12) * members
    if count > 1:
        share = (many / (many + 6.0))[:, None, None]
        own = share * own + (1 - share) * pool
    mse = np.maximum(np.diagonal(own, axis1=1, axis2=2), 1e-9)
    start = mse**-2.0
    start /= start.sum(1, keepdims=True)
    hold = 2.0 * members / (many + 1.0) * mse.min(1)
    pulled = own + hold[:, None, None] * np.eye(members)
    made = start.copy()
    rate = 1.0 / np.linalg.norm(pulled, axis=(1, 2))[:, None]
    for _ in range(300):
        slope = np.einsum("nmk,nk->nm", pulled, made) - hold[:, None] * start
        made = _simplex(made - rate * slope)
    made = np.where(made < 0.01, 0, made)
    return made / made.sum(1, keepdims=True)


def _products(errors: np.ndarray, floor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([N, M, M] mean products of the members' standardised errors, [N] origins): outliers are cut, and older origins count less."""
    _, origins, members, _ = errors.shape
    e = errors.transpose(0, 2, 1, 3).astype(np.float64)  # [N, M, O, H]
    seen = np.all(np.isfinite(e), axis=1, keepdims=True)
    w = seen * 0.5 ** (np.arange(origins)[::-1] / max(origins / 2, 1.0))[:, None]
    e = np.where(seen, e, 0)
    with np.errstate(all="ignore"):
        middle = np.sqrt((w * e**2).sum((2, 3)) / w.sum((2, 3)))  # [N, M]
    size = np.where(np.isfinite(middle), middle, 0).min(1)[:, None, None, None] + floor[:, None, None, None]
    step = np.sqrt((w * e**2).sum((1, 2)) / (w.sum((1, 2)) * members).clip(1e-12))  # [N, H]
    step = np.maximum(step / np.maximum(step.mean(1, keepdims=True), 1e-300), 1e-3)
    e = (e / size / step[:, None, None]).clip(-6, 6) * np.sqrt(w)
    flat = e.reshape(len(e), members, -1)
    return flat @ flat.swapaxes(1, 2) / w.sum((2, 3)).clip(1e-12)[..., None], np.any(seen, axis=(1, 3)).sum(1)


def _simplex(x: np.ndarray) -> np.ndarray:
    """The nearest points [N, M] that are not negative and sum to 1."""
    ordered = -np.sort(-x, 1)
    over = (ordered.cumsum(1) - 1) / np.arange(1, x.shape[1] + 1)
    last = (ordered > over).sum(1) - 1
    return np.maximum(x - over[np.arange(len(x)), last][:, None], 0)


def _unrest(one: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """[..., O] size of recent errors one step ahead (rows [..., T]; 0 where nothing was seen) before each column."""
    from scipy.signal import lfilter

    seen = (one != 0).astype(np.float64)
    keep = [1.0, -(1 - UNREST)]
    total, weight = lfilter([UNREST], keep, one**2, axis=-1), lfilter([UNREST], keep, seen, axis=-1)
    long = np.cumsum(one**2, -1) / np.cumsum(seen, -1).clip(min=1)  # a start with few errors leans on their mean
    made = (total + 0.15 * long) / (weight + 0.15)
    return np.sqrt(made)[..., columns - 1]


def _local(unrest: np.ndarray, level: np.ndarray, powers: tuple[float, float]) -> np.ndarray:
    return unrest.clip(0.2, 5.0) ** powers[0] * level.clip(0.05, 20.0) ** powers[1]


def _scales(
    found: Ensemble, u: np.ndarray, columns: np.ndarray, e: np.ndarray, one: np.ndarray, offset: np.ndarray, rows: np.ndarray,
    floor: np.ndarray,
) -> tuple[Ensemble, Residuals]:  # fmt: skip
    """Unit, growth with the step, and dependence on unrest and level of the combined errors [N, O, H]; then the errors without them."""
    count, _, horizon = e.shape
    seen = np.isfinite(e)
    whole = seen.all(2)
    usual = np.sqrt((one**2).sum(1) / (one != 0).sum(1).clip(min=1))
    found.quiet = np.maximum(usual, floor)
    level = np.abs(regression.reference(u, 8))
    found.height = np.maximum(np.nanmean(np.where(np.isfinite(u), level, np.nan), 1), floor)
    unrest = _unrest(one, columns) / found.quiet[:, None]
    height = level[:, columns - 1] / found.height[:, None]
    positive = bool((np.nanmin(u, 1) > 0).all()) and bool((found.power == 1.0).all())
    best, chosen = np.inf, (0.0, 0.0)
    for p in UNREST_POWERS:
        for q in LEVEL_POWERS if positive else (0.0,):
            wide = _local(unrest, height, (p, q))
            worth = _worth(e / wide[..., None], np.log(wide), whole)
            worth += 1.5 * horizon * ((p > 0) + (q > 0))  # overlapping errors are no independent witnesses
            if worth < best:
                best, chosen = worth, (p, q)
    found.powers = chosen
    wide = _local(unrest, height, chosen)
    bare = np.where(seen, e / wide[..., None], 0)
    many = whole.sum(1)
    own = np.sqrt((bare**2).sum(1) / seen.sum(1).clip(min=1))  # [N, H]
    own = np.maximum(own, floor[:, None])
    unit = np.exp(np.log(own).mean(1))
    curve = own / unit[:, None]
    strength = many / horizon
    pooled = (
        np.exp((np.log(curve) * strength[:, None]).sum(0) / max(strength.sum(), 1e-9))
        if strength.sum()
        else np.ones(horizon)
    )
    model = _model(pooled)
    pooled = _blend(pooled, model, float(strength.sum()), 4.0)
    share = (strength / (strength + 8.0))[:, None]
    shape = np.exp(share * np.log(curve) + (1 - share) * np.log(pooled)) if count > 1 else np.tile(pooled, (count, 1))
    unit = np.sqrt((bare**2 / shape[:, None] ** 2 * seen).sum((1, 2)) / seen.sum((1, 2)).clip(min=1))
    overlap = _overlap(pooled)
    own = many / overlap.mean()  # independent errors of each series
    others = own.sum() - own
    lent = BORROWED_ERRORS * others / np.maximum(others + BORROWED_ERRORS, 1e-9)
    late = _late(one, offset + np.array([found.plan.warm(n) for n in rows]), found.quiet)
    typical = np.median(unit[many > 0] / late[many > 0]) if (many > 0).any() else 1.0
    guess = np.maximum(typical * late, floor)
    unit = np.where(many > 0, np.maximum(unit, floor), guess)
    unit = np.exp((own * np.log(unit) + lent * np.log(guess)) / np.maximum(own + lent, 1e-9)) if count > 1 else unit
    found.unit = unit * (1 + SPENT / np.maximum(rows, 5)) ** 0.5
    wider = np.sqrt(1 + FEW * overlap / overlap.mean() / np.maximum(own + lent, 0.25)[:, None])  # [N, H]
    found.shape = shape * wider
    standard = np.where(seen, bare / unit[:, None, None] / shape[:, None], np.nan)
    n = (many / horizon)[:, None]
    mean = np.where(whole[..., None], standard, 0).sum(1) / many[:, None].clip(min=1)
    certain = np.square(mean) * np.maximum(n, 0.5)
    found.bias = mean * np.maximum(0, 1 - 2.0 / np.maximum(certain, 1e-12)) * (n > 3)
    path = standard - found.bias[:, None]
    found.bias /= wider * (found.unit / unit)[:, None]
    series, at = np.nonzero(whole)
    paths = path[series, at]
    return found, Residuals(paths, series, columns[at] - offset[series])


def _worth(e: np.ndarray, log_wide: np.ndarray, whole: np.ndarray) -> float:
    """Minus the log-likelihood of errors [N, O, H] under Student's law with 5 degrees of freedom, its scale fitted for each series and step."""
    x = np.where(whole[..., None], e, np.nan)
    with np.errstate(all="ignore"):
        scale = 1.2 * np.nanmedian(np.abs(x), 1, keepdims=True)
    scale = np.where(np.isfinite(scale) & (scale > 0), scale, 1.0)
    value = np.log(scale) + log_wide[..., None] + 3.0 * np.log1p(np.square(x / scale) / 5.0)
    return float(np.nansum(value))


def _late(one: np.ndarray, first: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """[N] median size of the errors one step ahead [N, T] from columns `first` on, where filters have settled; `usual` where there is none."""
    some = (one != 0) & (np.arange(one.shape[1]) >= first[:, None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a series may have none
        size = np.nanmedian(np.where(some, np.abs(one), np.nan), 1)  # filters may be far off at the start of a few rows
    return np.where(size > 0, size, usual)


def _overlap(curve: np.ndarray) -> np.ndarray:
    """[H] how many neighbouring origins' errors h steps ahead count as one, because they share shocks: 1 for noise, h for a random walk."""
    horizon = len(curve)
    share = min(TRIALS, key=lambda a: float(np.square(np.log(_growing(horizon, a)) - np.log(curve)).sum()))
    made = []
    for h in range(1, horizon + 1):
        shared = share + share**2 * (h - 1 - np.arange(1, h))  # covariances of errors 1 ... h - 1 origins apart
        made.append(1 + 2 * shared.sum() / (1 + share**2 * (h - 1)))
    return np.array(made)


def _growing(horizon: int, share: float) -> np.ndarray:
    """[H] spread of errors in which a share of each shock stays, about 1."""
    made = np.sqrt(1 + np.arange(horizon) * share**2)
    return made / np.exp(np.log(made).mean())


def _model(curve: np.ndarray) -> np.ndarray:
    """The growth [H] of errors in which a share of each shock stays, nearest to a curve."""
    made = [_growing(len(curve), a) for a in TRIALS]
    return min(made, key=lambda x: float(np.square(np.log(x) - np.log(curve)).sum()))


def _blend(curve: np.ndarray, model: np.ndarray, strength: float, hold: float) -> np.ndarray:
    share = strength / (strength + hold)
    return np.exp(share * np.log(curve) + (1 - share) * np.log(model))
