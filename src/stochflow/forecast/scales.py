"""How wide the errors of the ensemble are: unit, growth with the step, dependence on the recent unrest and on the level; and the errors without them.

N series    T rows    O origins    H steps of the horizon
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stochflow.forecast import regression

if TYPE_CHECKING:
    from stochflow.forecast.location import Ensemble

SPENT = 10.0  # values that choices have used up: errors were a little larger without them
BORROWED_ERRORS = 2.0  # independent errors that the other series of a panel lend to what is known of a series' spread
FEW = 2.0  # share by which n independent errors leave the variance uncertain, times n: Student's intervals beside normal ones
EVIDENCE = 1.5  # of the log-likelihood of independent errors, for each dependence: overlapping ones are no independent witnesses
UNREST = 0.08  # weight of the newest error in the recent variance
UNREST_POWERS = (0.0, 0.3, 0.6, 1.0)
LEVEL_POWERS = (0.0, 0.5, 1.0)
TRIALS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)  # how much a shock at one step stays in the errors of later ones


class Residuals(NamedTuple):
    """Errors of the ensemble from the origins that were learned from, standardised."""

    path: np.ndarray  # [P, H]
    series: np.ndarray  # [P]
    origin: np.ndarray  # [P] row before which the forecast begins, in the series' own rows


def recent_unrest(one: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """[..., O] size of recent errors one step ahead (rows [..., T]; 0 where nothing was seen) before each column."""
    from scipy.signal import lfilter

    seen = (one != 0).astype(np.float64)
    keep = [1.0, -(1 - UNREST)]
    total, weight = lfilter([UNREST], keep, one**2, axis=-1), lfilter([UNREST], keep, seen, axis=-1)
    long = np.cumsum(one**2, -1) / np.cumsum(seen, -1).clip(min=1)  # a start with few errors leans on their mean
    made = (total + 0.15 * long) / (weight + 0.15)
    return np.sqrt(made)[..., columns - 1]


def local(unrest: np.ndarray, level: np.ndarray, powers: tuple[float, float]) -> np.ndarray:
    return unrest.clip(0.2, 5.0) ** powers[0] * level.clip(0.05, 20.0) ** powers[1]


def scales(
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
    unrest = recent_unrest(one, columns) / found.quiet[:, None]
    height = level[:, columns - 1] / found.height[:, None]
    positive = bool((np.nanmin(u, 1) > 0).all()) and bool((found.power == 1.0).all())
    with np.errstate(all="ignore"):
        size = np.sqrt(
            np.where(seen, (e / found.quiet[:, None, None]) ** 2, 0).sum((0, 1)) / seen.sum((0, 1)).clip(min=1)
        )
        curve = np.exp(np.log(size) - np.log(size).mean())
    alike = float(_overlap(curve if np.isfinite(curve).all() else np.ones(horizon)).sum())
    best, chosen = np.inf, (0.0, 0.0)
    for p in UNREST_POWERS:
        for q in LEVEL_POWERS if positive else (0.0,):
            wide = local(unrest, height, (p, q))
            worth = _worth(e / wide[..., None], np.log(wide), whole)
            worth += EVIDENCE * alike * ((p > 0) + (q > 0))
            if worth < best:
                best, chosen = worth, (p, q)
    found.powers = chosen
    wide = local(unrest, height, chosen)
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
