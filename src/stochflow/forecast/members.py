"""The members of the ensemble: filters chosen for each series, regressions, theta and the seasonal naive forecast, and their errors.

N series    T rows    O origins    M members    H steps of the horizon
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stochflow.forecast import autoregression, regression
from stochflow.forecast.smoothing import FORMS, Rates, grid, smooth

if TYPE_CHECKING:
    from stochflow.forecast.location import Ensemble, Plan

CHOSEN_ON = 2500  # last rows on which filters are chosen
BORROWED = 30.0  # rows of its own against which a series of a panel trusts what is best for all
CELLS = 4_000_000  # forecasts of members held at once


def choose(u: np.ndarray, plan: Plan, rows: np.ndarray) -> Rates:
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


def forecasts(
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
        kinds = autoregression.kinds(m)[: own.repeated.shape[1]]
        lines += [autoregression.predict(u, own.repeated[:, k], x, columns, plan.horizon) for k, x in enumerate(kinds)]
        crossed = np.stack(lines, 2)
    extra = np.stack([theta, _naive(u, columns, m, plan.horizon)], 2)
    return np.concatenate([*made, extra, crossed], 2), ones[0]


def autoregressions(u: np.ndarray, plan: Plan) -> np.ndarray:
    """[N, 2, 1 + P] coefficients."""
    return np.stack([autoregression.fit(u, lag) for lag in autoregression.kinds(plan.pair[0])], 1)


def _naive(u: np.ndarray, columns: np.ndarray, m: int, horizon: int) -> np.ndarray:
    """[N, O, H] the value whole seasons before, the last one seen where that is missing."""
    full = autoregression.filled(u)
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


def errors(
    own: Ensemble, u: np.ndarray, start: np.ndarray, columns: np.ndarray, crossed: np.ndarray, truth: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(errors [N, O, M, H], errors one step ahead [N, T]), a few series at a time."""
    members = own.rates.alpha.shape[1] + own.repeated.shape[1] + 4
    step = max(1, CELLS // (len(columns) * members * own.plan.horizon))
    off, one = [], []
    for i in range(0, len(u), step):
        rows = np.arange(i, min(i + step, len(u)))
        made, ones = forecasts(own._own(rows), u[rows], start[rows], columns, crossed[rows])
        off.append((truth[rows][:, :, None] - made).astype(np.float32))
        one.append(ones)
    return np.concatenate(off), np.concatenate(one)
