"""Exponential smoothing of many series at once: level, damped trend and up to two seasons, by error correction.

    N series    T rows    G parameter sets    H steps ahead    m rows of a season
One pass over the rows gives the forecasts from every origin, because the state after row t knows nothing later.
Corrections begin as those of a mean, or of a line, of the rows seen so far, and are never smaller than the filter's own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ALPHAS = (0.03, 0.1, 0.2, 0.35, 0.55, 0.8, 1.0)
TRENDS = (  # of each form: (share of the level's correction, damping)
    ((0.0, 1.0),),
    ((0.2, 0.9),),
    ((0.08, 0.97),),
    ((0.001, 1.0), (0.05, 1.0), (0.3, 1.0), (1.0, 1.0)),  # from a drift to a slope that is the last change
)
GAMMAS = (0.02, 0.1, 0.25, 0.5)
SECOND = (0.03, 0.15)
FORMS = len(TRENDS)


class Rates(NamedTuple):
    """Parameters of G filters, each [N or 1, G]; `gamma` and `second` are 0 where there is no such season."""

    alpha: np.ndarray
    beta: np.ndarray
    phi: np.ndarray
    gamma: np.ndarray
    second: np.ndarray

    def take(self, best: np.ndarray) -> Rates:
        """The sets `best` [N, F] of each series."""
        return Rates(*[np.take_along_axis(np.broadcast_to(x, (len(best), x.shape[1])), best, 1) for x in self])


def grid(seasonal: bool, second: bool) -> tuple[Rates, np.ndarray]:
    """(rates [1, G], form [G]): every combination; a form is a kind of trend."""
    gammas = GAMMAS if seasonal else (0.0,)
    seconds = SECOND if second else (0.0,)
    sets = [
        (a, b, phi, g, s, form)
        for form, kinds in enumerate(TRENDS)
        for b, phi in kinds
        for a in ALPHAS
        for g in gammas
        for s in seconds
    ]
    made = np.array([x[:5] for x in sets]).T
    return Rates(*made[:, None, :]), np.array([x[5] for x in sets])


def profile(u: np.ndarray, m: int, cycles: int = 4) -> np.ndarray:
    """[N, m] additive seasonal indices by column number modulo m, from the first few cycles of each series [N, T]."""
    count, length = u.shape
    if m <= 1 or length < m:
        return np.zeros((count, max(m, 1)))
    first = np.isfinite(u).argmax(1)
    made = np.zeros((count, m))
    for start in np.unique(first):
        rows = np.flatnonzero(first == start)
        part = u[rows, start : start + cycles * m]
        whole = part.shape[1] // m
        if whole < 1:
            continue
        blocks = part[:, : whole * m].reshape(len(rows), whole, m)
        with np.errstate(all="ignore"):
            centre = np.nanmean(blocks, 2)
        slope = np.zeros(len(rows))
        if whole > 1:
            change = np.diff(centre, axis=1)
            known = np.isfinite(change)
            slope = np.where(known, change, 0).sum(1) / known.sum(1).clip(min=1) / m
        line = centre[..., None] + slope[:, None, None] * (np.arange(m) - (m - 1) / 2)
        off = blocks - line
        known = np.isfinite(off)
        index = np.where(known, off, 0).sum(1) / known.sum(1).clip(min=1)
        shrunk = index * whole / (whole + 0.5)
        made[rows] = np.roll(shrunk - shrunk.mean(1, keepdims=True), start, axis=1)
    return made


class Smoothed(NamedTuple):
    """What a pass leaves."""

    loss: np.ndarray  # [N, G] mean absolute error over the steps asked for, in units of the series' spread
    forecast: np.ndarray  # [O, N, G, H] from the origins asked for
    one: np.ndarray  # [O, N, G] error of the value that was predicted one step before the origin


def smooth(
    u: np.ndarray,
    rates: Rates,
    seasons: tuple[int, int],
    steps: tuple[int, ...] = (),
    origins: np.ndarray | None = None,
    horizon: int = 0,
    warm: int = 0,
) -> Smoothed:
    """Filters over series [N, T]; NaN rows leave the state to its own forecast.

    `steps`: forecasts so far ahead are scored from every origin after row `warm` of each series' own rows.
    `origins` (rows before the first forecast step, increasing): forecasts 1 ... `horizon` are kept from there.
    """
    count, length = u.shape
    sets = rates.alpha.shape[1]
    m, m2 = seasons
    first = np.isfinite(u).argmax(1)
    level = np.repeat(u[np.arange(count), first][:, None], sets, 1)
    index = profile(u, m)
    level = level - index[np.arange(count), first % max(m, 1)][:, None]
    season = np.repeat(index.T[:, :, None], sets, 2) * (rates.gamma > 0)  # [m, N, G]
    if m2 > 1:
        bare = u - np.tile(index, (1, -(-length // max(m, 1))))[:, :length]
        extra = profile(bare, m2)
        double = np.repeat(extra.T[:, :, None], sets, 2) * (rates.second > 0)
    else:
        double = np.zeros((1, count, sets))
    trend = np.zeros((count, sets))
    sloped = rates.beta > 0
    alpha, phi = rates.alpha, rates.phi
    gamma, second = rates.gamma * (1 - 0.5 * alpha), rates.second * (1 - 0.5 * alpha)
    with np.errstate(all="ignore"):
        spread = np.nanmean(np.abs(np.diff(u, axis=1)), 1)
    spread = np.where(np.isfinite(spread) & (spread > 0), spread, 1.0)[:, None]
    loss, scored = np.zeros((count, sets)), np.zeros((count, 1))
    keep = {} if origins is None else {int(o): i for i, o in enumerate(origins)}
    out = np.zeros((len(keep), count, sets, horizon), dtype=np.float64)
    one = np.zeros((len(keep), count, sets))
    reach = _reach(phi, max((*steps, horizon, 1)))
    for t in range(length):
        here, there = season[t % max(m, 1)], double[t % max(m2, 1)]
        x = u[:, t : t + 1]
        expected = level + phi * trend + here + there
        error = np.where(np.isfinite(x), x - expected, 0.0)
        n = np.maximum(t - first, 1)[:, None]  # changes seen
        least = np.where(sloped, 2 * (2 * n + 1) / ((n + 1) * (n + 2)), 1 / (n + 1))
        gain = np.maximum(alpha, least)
        level = level + phi * trend + gain * error
        trend = phi * trend + sloped * gain * np.maximum(rates.beta, 1 / n) * error
        if m > 1:
            here += gamma * error
        if m2 > 1:
            there += second * error
        started = (t >= first + warm)[:, None]
        for h in steps:
            if t + h < length:
                made = level + reach[h - 1] * trend + season[(t + h) % max(m, 1)] + double[(t + h) % max(m2, 1)]
                off = np.abs(u[:, t + h : t + h + 1] - made) / spread
                good = started & np.isfinite(off)
                loss += np.where(good, np.minimum(off, 1e6), 0)
                scored += good[:, :1]
        place = keep.get(t + 1)
        if place is not None:
            one[place] = error
            for h in range(1, horizon + 1):
                out[place, :, :, h - 1] = (
                    level + reach[h - 1] * trend + season[(t + h) % max(m, 1)] + double[(t + h) % max(m2, 1)]
                )
    return Smoothed(loss / scored.clip(min=1), out, one)


def _reach(phi: np.ndarray, steps: int) -> list[np.ndarray]:
    """phi + phi^2 + ... + phi^h for h = 1 ... steps."""
    total, power, made = np.zeros_like(phi), np.ones_like(phi), []
    for _ in range(steps):
        power = power * phi
        total = total + power
        made.append(total)
    return made
