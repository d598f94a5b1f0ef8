"""What a forecast leaves behind: tables, samples, figures of merit and a fan chart, all of it or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stochflow.errors import UserError
from stochflow.files.reading import shown
from stochflow.files.shield import plain_matplotlib
from stochflow.law.verdict import number
from stochflow.types import plain

if TYPE_CHECKING:
    import pandas as pd

    from stochflow.forecast.config import Forecast
    from stochflow.forecast.tilted import Tilted

QUANTILES = tuple(i / 10 for i in range(1, 10))


AT_ONCE = 4_000_000  # samples that a score holds at once


def need_metrics() -> None:
    """CRPS comes from the package people use."""
    try:
        __import__("scoringrules")
    except ImportError:
        raise UserError(
            "the back-test measures with scoringrules, which is not installed: pip install 'stochflow[forecast]', or --origins 0"
        ) from None


def crps(drawn: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """[windows, horizon] of futures [windows, samples, horizon]; NaN where the truth is not known.

    By sorting (the fair estimator, in the form of probability-weighted moments), so that memory grows with the samples and not with their square.
    """
    need_metrics()
    import scoringrules

    step = max(1, AT_ONCE // drawn[:1].size)
    parts = [
        scoringrules.crps_ensemble(truth[i : i + step], np.moveaxis(drawn[i : i + step], 1, -1), estimator="pwm")
        for i in range(0, len(truth), step)
    ]
    return np.where(np.isfinite(truth), np.concatenate(parts), np.nan)


def measure(
    drawn: np.ndarray, truth: np.ndarray, names: list[str], past: dict[str, np.ndarray], season: int, level: int = 80
) -> dict[str, float]:
    """MASE, MAE of the median, MSE of the mean, CRPS, pinball loss at 0.1 ... 0.9, and coverage of futures [windows, samples, horizon].

    `past`: the values of each series before the first origin, which scale MASE. All others are in the series' units.
    """
    seen = np.isfinite(truth)
    scale = {name: scaled(past[name], season) for name in set(names)}
    each = np.array([scale[name] for name in names])[:, None]
    off = np.abs(np.median(drawn, axis=1) - truth)
    low, high = np.quantile(drawn, [0.5 - level / 200, 0.5 + level / 200], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = off / each
    windows = [float(np.mean(w[s])) for w, s in zip(relative, seen, strict=True) if s.any()]
    return {
        "mase": float(np.mean(windows)),
        **errors(drawn, truth),
        "crps": float(np.nanmean(crps(drawn, truth))),
        "pinball": float(np.mean([_pinball(np.quantile(drawn, q, axis=1), truth, q)[seen].mean() for q in QUANTILES])),
        f"coverage_{level}": float(((low <= truth) & (truth <= high))[seen].mean()),
    }


def errors(drawn: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """MSE of the mean and MAE of the median of futures [windows, samples, horizon], over the values that are known."""
    return {
        "mse": float(np.nanmean(np.square(drawn.mean(1) - truth))),
        "mae": float(np.nanmean(np.abs(np.median(drawn, axis=1) - truth))),
    }


def scaled(y: np.ndarray, season: int) -> float:
    """Mean absolute error of the seasonal naive forecast over a past."""
    change = np.abs(y[season:] - y[:-season])
    change = change[np.isfinite(change)]
    return float(change.mean()) if len(change) else float("nan")


def _pinball(quantile: np.ndarray, truth: np.ndarray, q: float) -> np.ndarray:
    off = truth - quantile
    return np.maximum(q * off, (q - 1) * off)


TILTED = ("event", "tilt", "score")  # how the names of figures of tilted futures begin
TOLD = {
    "mase": "MASE of the median (error in units of the seasonal naive's on the past)",
    "mse": "MSE of the mean, in the series' units squared",
    "mae": "MAE of the median, in the series' units",
    "crps": "CRPS, in the series' units",
    "pinball": "pinball loss at 0.1 to 0.9, in the series' units",
    "coverage_80": "share of values within the 80 % interval",
    "coverage_80_total": "share of totals over the horizon within the 80 % interval",
    "coverage_80_maximum": "share of maxima over the horizon within the 80 % interval",
    "coverage_80_difference": "share of last minus first within the 80 % interval",
    "lag_1_real": "correlation of neighbouring errors, real",
    "lag_1_sampled": "correlation of neighbouring errors, in the futures",
    "growth_real": "errors of the last third of the steps beside the first, real",
    "growth_sampled": "errors of the last third of the steps beside the first, in the futures",
    "first_passage": "Brier score of first passages",
    "energy": "energy score of paths, in units of a series' mean change",
    "variogram": "variogram score of paths, likewise",
    "event": "event that was asked for",
    "event_probability": "its probability under the forecaster",
    "event_low": "the 95 % interval of that, from",
    "event_high": "to",
    "event_hits": "draws in which it happened",
    "event_draws": "of so many",
    "tilt": "futures are tilted by",
    "tilt_effective": "effective sample size of the tilted futures",
    "tilt_log_z": "log of the forecaster's mean of exp(beta score)",
    "score_tilted": "mean score of the tilted futures",
    "score_own": "mean score of the forecaster's own futures",
    "windows": "rolling origins times series",
    "forecasts": "values forecast and known",
}


def summary(metrics: dict[str, Any], table: pd.DataFrame, rows: int = 12) -> str:
    """What a person wants to see first: how good the back-test was, and the first series' forecasts."""
    lines = []
    tilted = {k: v for k, v in metrics.items() if k.startswith(TILTED)}
    for title, part in (
        ("back-test", {k: v for k, v in metrics.items() if k not in tilted}),
        ("tilted futures", tilted),
    ):
        if part:
            told = {k: v if isinstance(v, str) else number(v) for k, v in part.items()}
            lines += [title, *[f"  {TOLD.get(key, key):<72} {value}" for key, value in told.items()], ""]
    name = table.columns[0]  # of the series
    first = table[table[name] == table[name].iloc[0]][:rows]
    shown = first.drop(columns=name).to_string(index=False, float_format=lambda v: f"{v:.5g}")
    others = table[name].nunique() - 1
    left = len(table) // (others + 1) - len(first)
    lines.append(f"forecast of {table[name].iloc[0]}" + (f", its first {rows} steps of {rows + left}" if left else ""))
    lines += ["  " + line for line in shown.splitlines()]
    if others:
        lines.append(f"  and {others} more series in forecasts.csv")
    return "\n".join(lines)


SHOWN_PATHS = 12  # futures that a fan shows
AT_MOST = 6  # series


def fan_chart(
    path: Path,
    history: dict[str, tuple[list[Any], np.ndarray]],
    table: pd.DataFrame,
    settings: Forecast,
    recent: int,
    drawn: np.ndarray,
) -> None:
    """Each series' last `recent` values, the median, the intervals as a fan, and some futures [series, samples, horizon]; at most six series."""
    plain_matplotlib()
    import matplotlib.pyplot as plt

    shown, s = list(history)[:AT_MOST], settings
    figure, axes = plt.subplots(len(shown), 1, figsize=(8, 3.2 * len(shown)), squeeze=False, layout="constrained")
    for i, (axis, name) in enumerate(zip(axes[:, 0], shown, strict=True)):
        stamps, values = history[name]
        part = table[table[s.id_col] == name]
        axis.plot(stamps[-recent:], values[-recent:], color="black", lw=1.2, label="observed")
        _fan(axis, part[s.time_col], part, "stochflow", s.levels, "tab:blue", "median")
        axis.plot(part[s.time_col], drawn[i, :SHOWN_PATHS].T, color="tab:blue", lw=0.4, alpha=0.6)
        _dress(axis, name, s.levels)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def tilt_chart(path: Path, history: tuple[list[Any], np.ndarray], tilted: Tilted, recent: int) -> None:
    """Fan against fan: tilted futures beside the forecaster's own."""
    plain_matplotlib()
    import matplotlib.pyplot as plt

    table = tilted.table()
    figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    axis.plot(history[0][-recent:], history[1][-recent:], color="black", lw=1.2, label="observed")
    level = tilted.levels[:1]
    stamps = tilted.stamps
    _fan(axis, stamps, table, "stochflow", level, "tab:blue", "forecast")
    _fan(axis, stamps, table, "tilted", level, "tab:red", "tilted")
    axis.plot(stamps, tilted.paths[:SHOWN_PATHS].T, color="tab:red", lw=0.4, alpha=0.6)
    _dress(axis, tilted.series, level)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _fan(axis: Any, stamps: Any, table: Any, name: str, levels: tuple[int, ...], color: str, words: str) -> None:
    for level in sorted(levels, reverse=True):
        axis.fill_between(
            stamps,
            table[f"{name}-lo-{level}"],
            table[f"{name}-hi-{level}"],
            color=color,
            alpha=0.18 + 0.12 * (level < max(levels)),
            lw=0,
            label=f"{level} %",
        )
    axis.plot(stamps, table[name], color=color, lw=1.6, label=words)


def _dress(axis: Any, name: str, levels: tuple[int, ...]) -> None:
    axis.set_title(name.replace("$", r"\$"), loc="left", fontsize=10)
    axis.legend(loc="upper left", fontsize=8, frameon=False, ncols=2 + 2 * len(levels))
    axis.margins(x=0.01, y=0.15)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.tick_params(labelsize=8)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write into that takes its name only when everything is there; on any failure nothing is left."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already holds something: give another --out, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield made
        made.chmod(0o755)
        try:
            if out.exists():
                out.rmdir()
            os.rename(made, out)
        except OSError as error:
            reason = "another process has written it meanwhile" if out.exists() else error.strerror or error
            raise UserError(f"{shown(out)} cannot be written ({reason}): choose another --out") from error
    finally:
        if made.exists():
            shutil.rmtree(made)


def write_json(path: Path, content: Any) -> None:
    """What is not finite (the scaled error of a series that never changes) is null: JSON has no infinity."""
    path.write_text(json.dumps(plain(content), indent=1, default=str, allow_nan=False) + "\n", encoding="utf-8")
