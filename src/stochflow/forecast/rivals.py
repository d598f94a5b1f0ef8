"""What people use instead, on the same origins: their CRPS beside ours, per series and per step, with intervals of the differences.

The seasonal naive forecast is always at hand; the others come from statsforecast and learn anew at every origin. They give an interval and no
futures, so their CRPS is that of the normal law with their centre and their 80 % interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from stochflow.errors import UserError
from stochflow.worlds.series import Track

if TYPE_CHECKING:
    import pandas as pd

NORMAL_90 = 1.2815515655446004  # the 90 % point of the standard normal
AGAIN = 1000  # bootstrap samples


def need(names: Sequence[str]) -> None:
    """UserError where one of these rivals cannot be asked here."""
    for name in names:
        if name != "naive" and find_spec("statsforecast") is None:
            raise UserError(
                f"the rival {name} comes from statsforecast, which is not installed: pip install 'stochflow[forecast]', or leave it out of --rivals"
            )


def normal_crps(truth: np.ndarray, centre: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """CRPS of normal laws, elementwise."""
    from scipy.stats import norm

    spread = np.maximum(spread, 1e-12)
    z = (truth - centre) / spread
    return spread * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))


def naive(y: np.ndarray, season: int, horizon: int) -> tuple[np.ndarray, np.ndarray]:
    """(centre [H], spread [H]) of the seasonal naive forecast after a past [n]: spread grows with the root of the seasons."""
    m = season if len(y) > season else 1
    filled = y.copy()
    seen = np.where(np.isfinite(y), np.arange(len(y)), 0)
    filled = filled[np.maximum.accumulate(seen)]
    step = np.arange(1, horizon + 1)
    periods = -(-step // m)
    change = filled[m:] - filled[:-m]
    size = float(np.sqrt(np.nanmean(change**2))) if len(change) else float(np.nanstd(y))
    return filled[len(y) - 1 + step - periods * m], size * np.sqrt(periods)


def forecasts(name: str, track: Track, end: int, season: int, horizon: int) -> tuple[np.ndarray, np.ndarray]:
    """(centre [H], spread [H]) of a rival after row `end` of a series."""
    past = track.y[:end]
    if name == "naive":
        return naive(past, season, horizon)
    if not np.isfinite(past).all():
        raise UserError(
            f"series {track.name!r} has gaps, which the rival {name} does not take: leave it out of --rivals"
        )
    need((name,))
    from statsforecast import models

    if name == "mstl" and season == 1:
        raise UserError("the rival mstl takes seasons off, but the series have none: leave it out of --rivals")
    made: Any = {
        "ets": lambda: models.AutoETS(season_length=season),
        "theta": lambda: models.AutoTheta(season_length=season),
        "arima": lambda: models.AutoARIMA(season_length=season),
        "mstl": lambda: models.MSTL(season_length=season),
    }[name]()
    found = made.forecast(y=past.astype(np.float64), h=horizon, level=[80])
    low, high = np.asarray(found["lo-80"]), np.asarray(found["hi-80"])
    return np.asarray(found["mean"]), (high - low) / 2 / NORMAL_90


def compared(ours: np.ndarray, rivals: dict[str, np.ndarray], names: list[str]) -> pd.DataFrame:
    """Mean CRPS by rival and series, by rival and step, and over all; `difference` is ours minus theirs with a 95 % interval over windows.

    CRPS are [windows, horizon]; windows of a series are resampled together with their steps.
    """
    import pandas

    dice = np.random.default_rng(0)
    who = np.array(names)
    rows = []
    for name, theirs in rivals.items():
        off = ours - theirs
        rows.append({"rival": name, "of": "all", **_row(ours, theirs, off.mean(1), dice)})
        for series in dict.fromkeys(names):
            at = who == series
            rows.append(
                {"rival": name, "of": f"series {series}", **_row(ours[at], theirs[at], np.nanmean(off[at], 1), dice)}
            )
        for h in range(ours.shape[1]):
            rows.append({"rival": name, "of": f"step {h + 1}", **_row(ours[:, h], theirs[:, h], off[:, h], dice)})
    return pandas.DataFrame(rows)


def _row(ours: np.ndarray, theirs: np.ndarray, off: np.ndarray, dice: np.random.Generator) -> dict[str, float]:
    off = off[np.isfinite(off)]
    means = off[dice.integers(len(off), size=(AGAIN, len(off)))].mean(1) if len(off) else np.full(1, np.nan)
    return {
        "stochflow": float(np.nanmean(ours)),
        "theirs": float(np.nanmean(theirs)),
        "difference": float(off.mean()) if len(off) else float("nan"),
        "low": float(np.quantile(means, 0.025)),
        "high": float(np.quantile(means, 0.975)),
    }
