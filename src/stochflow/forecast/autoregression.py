"""Autoregressions of a series' changes, or of its values, each series by itself; forecasts follow from one another.

    N series    T rows    O origins    H steps ahead    P lags
`regression` learns every step ahead by itself, which needs many rows; here one step is learned and repeated.
"""

from __future__ import annotations

import numpy as np

MOST_LAGS = 3
CELLS = 4_000_000  # values whose autoregressions are learned at once
FOLDS = 5  # blocks of time
LEAST_ROWS = 4  # for each coefficient
PULL = 1.0  # rows that say that a change tells nothing of the next
STEADY = 0.98  # the largest root of the changes; that of the values is 1


def kinds(season: int) -> tuple[int, ...]:
    """Of which there are autoregressions: of changes over one row and over a season; of the values (0) where there are no seasons."""
    return (1, season) if season > 1 else (0, 1)


def series(u: np.ndarray, lag: int) -> np.ndarray:
    """[N, T] the values (0), or the changes over so many rows."""
    if not lag:
        return u
    made = np.full_like(u, np.nan)
    made[:, lag:] = u[:, lag:] - u[:, :-lag]
    return made


def crossed(u: np.ndarray, lag: int, columns: np.ndarray, horizon: int) -> np.ndarray:
    """[N, O, H] forecasts from columns, each learned without the rows that it and its neighbours in a block of time foretell."""
    made = np.full((len(u), len(columns), horizon), np.nan)
    for at in np.array_split(np.arange(len(columns)), FOLDS):
        if len(at):
            known = np.ones(u.shape[1], dtype=bool)
            known[columns[at[0]] : columns[at[-1]] + horizon] = False
            made[:, at] = predict(u, fit(u, lag, known), lag, columns[at], horizon)
    return made


def fit(u: np.ndarray, lag: int, known: np.ndarray | None = None) -> np.ndarray:
    """[N, 1 + P] constants and coefficients, of the order with the least corrected criterion of Akaike; of the `known` rows alone."""
    step = max(1, CELLS // u.shape[1])
    if len(u) > step:
        return np.concatenate([fit(u[i : i + step], lag, known) for i in range(0, len(u), step)])
    x = series(u, lag)
    good = np.isfinite(x) if known is None else np.isfinite(x) & known
    n = good.sum(1)
    centre = np.where(good, x, 0).sum(1) / n.clip(min=1)
    x = x - centre[:, None]
    unit = np.sqrt(np.where(good, x**2, 0).sum(1) / n.clip(min=1))
    x = x / np.where(unit > 0, unit, 1.0)[:, None]
    made = _least_squares(x, good, PULL if lag else 0.0)
    slopes = _steadied(made[:, 1:], STEADY if lag else 1.0)
    constant = made[:, :1] * unit[:, None] + centre[:, None] * (1 - slopes.sum(1, keepdims=True))
    return np.concatenate([constant, slopes], 1)


def _least_squares(x: np.ndarray, good: np.ndarray, pull: float) -> np.ndarray:
    """[N, 1 + P] of standardised series, which are foretold in the `good` rows; coefficients are pulled to 0 by so many rows."""
    rows = np.stack([np.ones_like(x), *[_back(x, i) for i in range(1, MOST_LAGS + 1)]], 2)  # [N, T, 1 + P]
    good = good & np.isfinite(rows).all(2)
    rows, y = np.where(good[..., None], rows, 0), np.where(good, x, 0)
    n = good.sum(1)
    gram, right, size = rows.swapaxes(1, 2) @ rows, np.einsum("ntp,nt->np", rows, y), (y**2).sum(1)
    made, best = np.zeros((len(x), 1 + MOST_LAGS)), np.full(len(x), np.inf)
    for k in range(1, MOST_LAGS + 2):
        penalty = np.diag([1e-6, *[pull + 1e-6] * (k - 1)])
        b = np.linalg.solve(gram[:, :k, :k] + penalty, right[:, :k, None])[..., 0]
        left = size - 2 * (b * right[:, :k]).sum(1) + np.einsum("np,npq,nq->n", b, gram[:, :k, :k], b)
        spare = (n - k - 2).clip(min=0.1)
        worth = n * np.log(np.maximum(left / n.clip(min=1), 1e-12)) + 2 * (k + 1) * n / spare
        better = (worth < best) & (n >= LEAST_ROWS * k)
        best[better] = worth[better]
        made[better, :k] = b[better]
    return made


def _back(x: np.ndarray, i: int) -> np.ndarray:
    made = np.full_like(x, np.nan)
    made[:, i:] = x[:, :-i]
    return made


def _steadied(slopes: np.ndarray, most: float) -> np.ndarray:
    """Coefficients [N, P] whose largest root is `most`, where it was larger."""
    count, lags = slopes.shape
    companion = np.zeros((count, lags, lags))
    companion[:, 0] = slopes
    companion[:, np.arange(1, lags), np.arange(lags - 1)] = 1
    largest = np.abs(np.linalg.eigvals(companion)).max(1)
    return slopes * np.minimum(1.0, most / np.maximum(largest, 1e-9))[:, None] ** np.arange(1, lags + 1)


def predict(u: np.ndarray, coefficients: np.ndarray, lag: int, columns: np.ndarray, horizon: int) -> np.ndarray:
    """[N, O, H] forecasts from columns, each from the one before."""
    x = series(u, lag)
    lags = coefficients.shape[1] - 1
    constant, slopes = coefficients[:, :1], coefficients[:, 1:]
    usual = constant[:, 0] / np.maximum(1 - slopes.sum(1), 0.02)
    past = []
    for i in range(lags):
        at = columns - 1 - i
        before = np.where(at >= 0, x[:, at.clip(min=0)], np.nan)
        past.append(np.where(np.isfinite(before), before, usual[:, None]))
    made: list[np.ndarray] = []
    full = filled(u) if lag else u
    for h in range(1, horizon + 1):
        new = constant + sum(slopes[:, i : i + 1] * past[i] for i in range(lags))
        past = [new, *past[:-1]]
        if not lag:
            made.append(new)
        else:
            at = columns - 1 + h - lag
            before = made[h - 1 - lag] if h > lag else full[:, np.where(at >= 0, at, columns - 1)]
            made.append(before + new)
    return np.stack(made, 2)


def filled(u: np.ndarray) -> np.ndarray:
    """Values, the last one seen where one is missing, the mean of the series before the first."""
    seen = np.where(np.isfinite(u), np.arange(u.shape[1]), 0)
    np.maximum.accumulate(seen, axis=1, out=seen)
    full = np.take_along_axis(u, seen, 1)
    return np.where(np.isfinite(full), full, np.nanmean(u, 1, keepdims=True))
