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
from stochflow.files.shield import plain_matplotlib
from stochflow.law.verdict import number
from stochflow.types import plain

if TYPE_CHECKING:
    import pandas as pd

QUANTILES = tuple(i / 10 for i in range(1, 10))


def need_metrics() -> None:
    """CRPS and scaled errors come from the packages people use."""
    for name in ("scoringrules", "utilsforecast"):
        try:
            __import__(name)
        except ImportError:
            raise UserError(
                f"the back-test measures with {name}, which is not installed: pip install 'stochflow[forecast]', or --origins 0"
            ) from None


def measure(
    drawn: np.ndarray, truth: np.ndarray, names: list[str], train: pd.DataFrame, season: int, level: int = 80
) -> dict[str, float]:
    """MASE of the median, CRPS, pinball loss at 0.1 ... 0.9, and coverage of futures [windows, samples, horizon].

    `train` (unique_id, ds, y) is what came before the first origin: it scales MASE. CRPS and pinball are in the series' units.
    """
    need_metrics()
    import pandas
    import scoringrules
    from utilsforecast.losses import coverage, mase, mqloss

    windows, _, horizon = drawn.shape
    ids = [f"{name} {i}" for i, name in enumerate(names)]  # a window is a series of its own, scaled by its series' past
    columns: dict[str, Any] = {
        "unique_id": np.repeat(ids, horizon),
        "ds": np.tile(np.arange(horizon), windows),
        "y": truth.reshape(-1),
    }
    for q in QUANTILES:
        columns[f"q{q}"] = np.quantile(drawn, q, axis=1).reshape(-1)
    columns[f"m-lo-{level}"], columns[f"m-hi-{level}"] = (
        np.quantile(drawn, 0.5 + sign * level / 200, axis=1).reshape(-1) for sign in (-1, 1)
    )
    table = pandas.DataFrame(columns)
    past = dict(iter(train.groupby("unique_id")))
    scaled = pandas.concat([past[name].assign(unique_id=i) for name, i in zip(names, ids, strict=True)])
    seen = table[np.isfinite(table["y"])]
    return {
        "mase": _mean(mase(seen, ["q0.5"], season, scaled[["unique_id", "ds", "y"]])["q0.5"]),
        "crps": float(np.nanmean(scoringrules.crps_ensemble(truth, np.moveaxis(drawn, 1, -1), estimator="fair"))),
        "pinball": _mean(mqloss(seen, {"m": [f"q{q}" for q in QUANTILES]}, np.array(QUANTILES))["m"]),
        f"coverage_{level}": _mean(coverage(seen, ["m"], level)["m"]),
    }


def _mean(column: Any) -> float:
    return float(np.mean(np.asarray(column, dtype=float)))


TOLD = {
    "mase": "MASE of the median (error in units of the seasonal naive's on the past)",
    "crps": "CRPS, in the series' units",
    "pinball": "pinball loss at 0.1 to 0.9, in the series' units",
    "coverage_80": "share of values within the 80 % interval",
    "windows": "rolling origins times series",
    "forecasts": "values forecast and known",
}


def summary(metrics: dict[str, Any], table: pd.DataFrame, rows: int = 12) -> str:
    """What a person wants to see first: how good the back-test was, and the first series' forecasts."""
    lines = []
    if metrics:
        lines.append("back-test")
        lines += [f"  {TOLD.get(key, key):<72} {number(value)}" for key, value in metrics.items()]
        lines.append("")
    first = table[table["unique_id"] == table["unique_id"].iloc[0]][:rows]
    shown = first.drop(columns="unique_id").to_string(index=False, float_format=lambda v: f"{v:.5g}")
    others = table["unique_id"].nunique() - 1
    left = len(table) // (others + 1) - len(first)
    lines.append(
        f"forecast of {table['unique_id'].iloc[0]}" + (f", its first {rows} steps of {rows + left}" if left else "")
    )
    lines += ["  " + line for line in shown.splitlines()]
    if others:
        lines.append(f"  and {others} more series in forecasts.csv")
    return "\n".join(lines)


def fan_chart(
    path: Path,
    history: dict[str, tuple[list[Any], np.ndarray]],
    table: pd.DataFrame,
    levels: tuple[int, ...],
    recent: int,
) -> None:
    """Each series' last `recent` values, the median, and the intervals as a fan; at most six series."""
    matplotlib = plain_matplotlib()
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = list(history)[:6]
    figure, axes = plt.subplots(len(shown), 1, figsize=(8, 3.2 * len(shown)), squeeze=False, layout="constrained")
    for axis, name in zip(axes[:, 0], shown, strict=True):
        stamps, values = history[name]
        part = table[table["unique_id"] == name]
        axis.plot(stamps[-recent:], values[-recent:], color="black", lw=1.2, label="observed")
        for level in sorted(levels, reverse=True):
            axis.fill_between(
                part["ds"],
                part[f"stochflow-lo-{level}"],
                part[f"stochflow-hi-{level}"],
                color="tab:blue",
                alpha=0.18 + 0.12 * (level < max(levels)),
                lw=0,
                label=f"{level} %",
            )
        axis.plot(part["ds"], part["stochflow"], color="tab:blue", lw=1.6, label="median")
        axis.set_title(name, loc="left", fontsize=10)
        axis.legend(loc="upper left", fontsize=8, frameon=False, ncols=2 + len(levels))
        axis.margins(x=0.01, y=0.15)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        axis.tick_params(labelsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


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
        if out.exists():
            out.rmdir()
        os.rename(made, out)
    finally:
        if made.exists():
            shutil.rmtree(made)


def write_json(path: Path, content: Any) -> None:
    """What is not finite (the scaled error of a series that never changes) is null: JSON has no infinity."""
    path.write_text(json.dumps(plain(content), indent=1, default=str, allow_nan=False) + "\n", encoding="utf-8")
