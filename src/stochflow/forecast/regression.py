"""A linear forecaster of each step ahead, shared by a panel: recent values, values one and two seasons before the target, the calendar.

    N series    T rows    O origins    H steps ahead    P features
Values are taken relative to the mean of the last season and in units of the series' own spread, so that one regression serves all series.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
FOLDS = 5
MOST_ROWS = 60_000  # of a regression: origins beyond are thinned out evenly
YEAR_WAVES = 3


@dataclass(frozen=True)
class Layout:
    """Which columns a row of the regression has."""

    lags: int
    seasons: tuple[int, ...]  # values this many rows before the target, and twice as many
    waves: tuple[float, ...]  # periods whose sines and cosines at the target are columns
    base: int  # rows whose mean is the reference
    lag: int = (
        0  # 0: values about that mean; else changes over so many rows, forecast about the value whole seasons before
    )


def layout(rows: int, seasons: tuple[int, ...], long: float, horizon: int) -> Layout:
    """What `rows` rows of a series can bear: about one column for every four rows."""
    main = seasons[0] if seasons else 1
    lags = max(1, min(main + 1 if main > 1 else 6, 26, rows // 8))
    usable = tuple(m for m in seasons if m > 1 and rows >= 3 * m + horizon)
    waves = [long / k for k in range(1, YEAR_WAVES + 1)] if long and rows >= 1.5 * long else []
    if main > 2 and rows >= 6 * main:
        waves += [main / k for k in range(1, min(4, main // 2) + 1)]
    return Layout(lags, usable, tuple(waves), max(main, 4) if main > 1 else 8)


def changes(plan: Layout, season: int) -> Layout:
    """The same about the value whole seasons before: changes over a season, which are small where seasons repeat."""
    return Layout(plan.lags, (), (), plan.base, season)


def reference(u: np.ndarray, base: int) -> np.ndarray:
    """[N, T] mean of the last `base` seen values up to each row."""
    seen = np.isfinite(u)
    total = np.cumsum(np.where(seen, u, 0), 1)
    count = np.cumsum(seen, 1)
    total[:, base:] -= np.cumsum(np.where(seen, u, 0), 1)[:, :-base]
    count[:, base:] -= np.cumsum(seen, 1)[:, :-base]
    mean = total / count.clip(min=1)
    empty = count == 0
    if empty.any():  # an outage longer than the base: the last mean before it
        index = np.where(empty, 0, np.arange(u.shape[1]))
        np.maximum.accumulate(index, axis=1, out=index)
        mean = np.take_along_axis(mean, index, 1)
    return mean


class Design:
    """Rows of features for any origins of padded series."""

    def __init__(self, u: np.ndarray, spread: np.ndarray, plan: Layout, start: np.ndarray):
        """`start` [N]: time of the first column, which sets the phase of the waves."""
        self.plan, self.spread, self.start = plan, spread, start
        if plan.lag:
            m = plan.lag
            change = np.full_like(u, np.nan)
            change[:, m:] = u[:, m:] - u[:, :-m]
            self.values_of, self.u = u, change
            self.level = np.zeros_like(u)
        else:
            self.level, self.u = reference(u, plan.base), u
            seen = np.isfinite(u)
            self.long = np.cumsum(np.where(seen, u, 0), 1) / np.cumsum(seen, 1).clip(min=1)  # mean of all rows so far

    def at(self, column: np.ndarray, level: np.ndarray) -> np.ndarray:
        """[N, O] scaled values of columns [O]; 0 where there is none."""
        ok = (column >= 0) & (column < self.u.shape[1])
        x = self.u[:, column.clip(0, self.u.shape[1] - 1)]
        x = (x - level) / self.spread[:, None]
        return np.where(ok & np.isfinite(x), x, 0).clip(-20, 20)

    def common(self, origins: np.ndarray) -> np.ndarray:
        """[N, O, P1]: a constant and the last values."""
        level = self.level[:, origins - 1]
        made = [np.ones((len(self.u), len(origins)))]
        made += [self.at(origins - 1 - i, level) for i in range(self.plan.lags)]
        if not self.plan.lag:
            made.append(((self.long[:, origins - 1] - level) / self.spread[:, None]).clip(-20, 20))
        return np.stack(made, 2)

    def before(self, origins: np.ndarray, h: int) -> np.ndarray:
        """[N, O] what a forecast h steps ahead is counted from."""
        if not self.plan.lag:
            return self.level[:, origins - 1]
        m = self.plan.lag
        at = origins - 1 + h - m * (-(-h // m))
        u = self.values_of
        return np.where(at >= 0, u[:, at.clip(min=0)], np.nan)

    def ahead(self, origins: np.ndarray, h: int) -> np.ndarray:
        """[N, O, P2]: values whole seasons before the target, and the calendar of the target."""
        level = self.level[:, origins - 1]
        made = []
        for m in self.plan.seasons:
            back = m * (-(-h // m))
            made += [self.at(origins - 1 + h - back, level), self.at(origins - 1 + h - back - m, level)]
        for period in self.plan.waves:
            angle = 2 * np.pi * (self.start[:, None] + (origins - 1 + h)[None]) / period
            made += [np.sin(angle), np.cos(angle)]
        return np.stack(made, 2) if made else np.zeros((len(self.u), len(origins), 0))

    def target(self, origins: np.ndarray, h: int) -> np.ndarray:
        """[N, O] scaled value h steps ahead, NaN where it is not known."""
        column = origins - 1 + h
        u = self.values_of if self.plan.lag else self.u
        ok = column < u.shape[1]
        x = u[:, column.clip(max=u.shape[1] - 1)]
        return np.where(ok, (x - self.before(origins, h)) / self.spread[:, None], np.nan)

    def values(self, scaled: np.ndarray, origins: np.ndarray) -> np.ndarray:
        """Scaled forecasts [N, O, H] in the series' own units; counted from the last value where there is nothing seasons before."""
        base = np.stack([self.before(origins, h) for h in range(1, scaled.shape[2] + 1)], 2)
        if self.plan.lag and not np.isfinite(base).all():
            u = self.values_of
            seen = np.where(np.isfinite(u), np.arange(u.shape[1]), 0)
            np.maximum.accumulate(seen, axis=1, out=seen)
            last = np.take_along_axis(u, seen, 1)[:, origins - 1, None]
            base = np.where(np.isfinite(base), base, np.where(np.isfinite(last), last, 0))
        return base + self.spread[:, None, None] * scaled


def train(design: Design, origins: np.ndarray, horizon: int, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(coefficients [H, P], cross-validated forecasts [N, O, H] in the series' own units).

    Folds are blocks of time; rows before `first` [N] (too little past) are left out. A forecast is made without the origins of its own fold and
    without those whose targets overlap the fold's: neighbours of a slow series would tell its values.
    """
    count = len(design.u)
    fold = np.minimum(np.arange(len(origins)) * FOLDS // max(len(origins), 1), FOLDS - 1)
    common = design.common(origins)
    usable = origins[None] >= first[:, None]
    thin = max(1, -(-count * len(origins) // MOST_ROWS))
    chosen = np.zeros_like(usable)
    chosen[:, ::thin] = usable[:, ::thin]
    coefficients = []
    made = np.full((count, len(origins), horizon), np.nan)
    for h in range(1, horizon + 1):
        x = np.concatenate([common, design.ahead(origins, h)], 2)
        y = design.target(origins, h)
        good = chosen & np.isfinite(y)
        y = np.where(np.isfinite(y), y, 0).clip(-20, 20)
        whole = _products(x, y, good)
        size = max(whole[2], 1)
        unit = np.eye(x.shape[2])
        unit[0, 0] = 1e-3  # the constant is hardly shrunk
        apart = []  # of each fold: what origins tell whose targets do not overlap those of the fold
        for k in range(FOLDS):
            here = origins[fold == k]
            near = (
                (origins > here[0] - h) & (origins < here[-1] + h) if len(here) else np.zeros(len(origins), dtype=bool)
            )
            close = _products(x[:, near], y[:, near], good[:, near])
            apart.append((whole[0] - close[0], whole[1] - close[1], max(whole[2] - close[2], 1)))
        best, forecast, kept = np.inf, made[:, :, h - 1], 0.0
        for penalty in PENALTIES:
            trial = np.zeros((count, len(origins)))
            for k, (gram, right, rows) in enumerate(apart):
                b = np.linalg.solve(gram + penalty * rows * unit, right)
                at = fold == k
                trial[:, at] = x[:, at] @ b
            off = np.abs(trial - y)[good].mean() if good.any() else 0.0
            if off < best:
                best, forecast, kept = off, trial, penalty
        made[:, :, h - 1] = forecast
        coefficients.append(np.linalg.solve(whole[0] + kept * size * unit, whole[1]))
    return np.stack(coefficients), design.values(made, origins)


def _products(x: np.ndarray, y: np.ndarray, good: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """(X'X [P, P], X'y [P], rows) of features [N, O, P] and targets [N, O], over the good ones."""
    part = x[good]
    return part.T @ part, part.T @ y[good], len(part)


def predict(design: Design, origins: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """[N, O, H] forecasts in the series' own units."""
    common = design.common(origins)
    steps = [np.concatenate([common, design.ahead(origins, h)], 2) @ b for h, b in enumerate(coefficients, 1)]
    return design.values(np.stack(steps, 2), origins)
