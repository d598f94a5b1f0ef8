"""Forecasts of three real series against what people use; writes benchmarks/results/forecast.json.

    PYTHONPATH=src python benchmarks/forecast_study.py            # about ten minutes of one core
    PYTHONPATH=src python benchmarks/forecast_study.py --quick    # the same paths in a minute, written elsewhere

Needs the extra [forecast]. Every method forecasts from the same rolling origins, `step` rows apart. The network is trained
once, on what came before the first origin, with five stacked seeds, and each seed is measured alone; the baselines are
refitted at every origin (which favours them). `plain` is the same network by plain likelihood,
told nothing of the actuator that carries its orders out.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from stochflow import __version__
from stochflow import forecast_report as report
from stochflow.forecast import Forecast, Forecaster, shipped
from stochflow.forecast_frame import read
from stochflow.metrics import interval
from stochflow.objectives import MARGINAL, REALISED

RESULTS = Path(__file__).parent / "results" / "forecast.json"
MEASURES = ("mase", "crps", "pinball", "coverage_80")
SEEDS = 5
DENSE = 110  # windows a series, at most, over which coverage is pooled
DEFAULT = "nll, transformer"
STICK = 0.2  # an actuator that misses one order in five


class Case(NamedTuple):
    series: str
    horizon: int
    origins: int
    step: int
    stride: int = 1
    window: int = 0


CASES = (Case("co2", 12, 16, 6), Case("air_passengers", 12, 8, 3), Case("sea_temperature", 12, 24, 24, 6, 36))
SLIP = {"noise": "slip", "stick": STICK}
METHODS: dict[str, tuple[dict[str, Any], Any]] = {  # the three modes and the noisy ones with the small encoder, which is quick
    "nll, mlp": ({"mode": "nll", "encoder": "mlp"}, MARGINAL),
    "mix, mlp": ({"mode": "mix", "encoder": "mlp"}, MARGINAL),
    "mse, mlp": ({"mode": "mse", "encoder": "mlp"}, MARGINAL),
    "nll, slip, mlp": ({"mode": "nll", "encoder": "mlp", **SLIP}, MARGINAL),
    "plain, slip, mlp": ({"mode": "nll", "encoder": "mlp", **SLIP}, REALISED),
    DEFAULT: ({"mode": "nll"}, MARGINAL),
}


def network(case: Case, method: str, quick: bool) -> dict[str, Any]:
    """Figures of each seed, and of the five pooled."""
    changes, form = METHODS[method]
    settings = Forecast(
        horizon=case.horizon,
        stride=case.stride,
        window=case.window,
        seeds=2 if quick else SEEDS,
        batch=32,
        steps=50 if quick else 500,
        samples=100 if quick else 1000,
        **changes,
    )
    begun = time.perf_counter()
    tested = Forecaster(settings, form).backtest(shipped(case.series), case.origins, case.step)
    seconds = time.perf_counter() - begun
    names = [case.series] * len(tested.truth)
    each = [tested.forecaster.measure(drawn, tested.truth, names) for drawn in tested.drawn]
    fitted = tested.forecaster.fitted
    assert fitted is not None
    pooled = tested.measure()
    return {
        "truth": tested.truth.tolist(),
        "seeds": {m: [e[m] for e in each] for m in MEASURES},
        "pooled": {m: pooled[m] for m in MEASURES},
        "inside": inside(case, tested.forecaster) if method == DEFAULT else None,
        "seconds": round(seconds, 1),
        "steps": fitted.steps,
        "temperature": fitted.temperature,
        "window": tested.forecaster.window,
        "location": tested.forecaster.cut.location,
    }


def inside(case: Case, forecaster: Forecaster) -> list[float]:
    """Share of the steps that the pooled 80 % interval covers, for each of many windows after the first origin."""
    _, tracks, _ = read(shipped(case.series), schema=forecaster.schema)
    y = tracks[0].y
    last = len(y) - case.horizon
    ends = np.unique(np.linspace(last - case.step * (case.origins - 1), last, DENSE).astype(int)).tolist()
    drawn = forecaster.pool(forecaster.draw(tracks, [ends]))
    low, high = np.quantile(drawn, [0.1, 0.9], axis=1)
    truth = np.stack([y[e : e + case.horizon] for e in ends])
    return ((low <= truth) & (truth <= high)).mean(1).tolist()


def baselines(case: Case) -> dict[str, dict[str, Any]]:
    """Seasonal naive and AutoETS, refitted at every origin; their futures are drawn from the normal law of their 80 % interval."""
    from statsforecast import StatsForecast
    from statsforecast.models import AutoETS, SeasonalNaive

    frame = shipped(case.series)
    frame["y"] = frame["y"].astype(float)
    season = {"co2": 12, "air_passengers": 12, "sea_temperature": 24}[case.series]
    freq = "h" if case.series == "sea_temperature" else "MS"
    frame["ds"] = np.asarray(frame["ds"], dtype="datetime64[ns]")
    found = {}
    for name, model in (("seasonal naive", SeasonalNaive(season, alias="m")), ("AutoETS", AutoETS(season_length=season, alias="m"))):
        begun = time.perf_counter()
        table = StatsForecast([model], freq=freq, n_jobs=1).cross_validation(
            df=frame, h=case.horizon, step_size=case.step, n_windows=case.origins, level=[80]
        )
        seconds = time.perf_counter() - begun
        table = table.sort_values(["cutoff", "ds"])
        truth = table["y"].to_numpy().reshape(case.origins, case.horizon)
        centre, high = (table[c].to_numpy().reshape(case.origins, 1, case.horizon) for c in ("m", "m-hi-80"))
        spread = (high - centre) / 1.2815515655446004  # the 90 % point of the standard normal
        dice = np.random.default_rng(0).standard_normal((case.origins, 1000, case.horizon))
        past = frame[frame["ds"] <= table["cutoff"].min()]
        figures = report.measure(centre + spread * dice, truth, [case.series] * case.origins, past, season)
        found[name] = {"truth": truth.tolist(), "pooled": {m: figures[m] for m in MEASURES}, "seconds": round(seconds, 1)}
    return found


def study(quick: bool) -> dict[str, Any]:
    cases = {}
    for case in CASES:
        rows = baselines(case)
        for method in METHODS:
            rows[method] = network(case, method, quick)
            assert np.allclose(rows[method].pop("truth"), rows["AutoETS"]["truth"]), "the methods must be asked about the same days"
            print(case.series, method, rows[method]["pooled"], f"{rows[method]['seconds']} s", flush=True)
        for row in rows.values():
            row.pop("truth", None)
        cases[case.series] = {**case._asdict(), "methods": rows}
    return {
        "versions": {p: version(p) for p in ("torch", "numpy", "pandas", "statsforecast", "utilsforecast", "scoringrules")}
        | {"stochflow": __version__},
        "hardware": f"{platform.machine()}, {torch.get_num_threads()} CPU thread(s)",
        "python": platform.python_version(),
        "seeds": list(range(2 if quick else SEEDS)),
        "stick": STICK,
        "cases": cases,
        "coverage": pooled_coverage([cases[c.series]["methods"][DEFAULT]["inside"] for c in CASES]),
    }


def pooled_coverage(inside: list[list[float]]) -> dict[str, Any]:
    """80 % coverage over all windows of all series, with a 95 % interval by resampling whole windows: steps of one are not independent."""
    share = np.concatenate([np.asarray(x) for x in inside])
    dice = np.random.default_rng(0)
    means = dice.choice(share, (10_000, len(share))).mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return {"coverage_80": float(share.mean()), "low": float(low), "high": float(high), "windows": len(share)}


def render(found: dict[str, Any]) -> str:
    """The table of docs/forecasting.md."""
    lines = ["| series | method | MASE | CRPS | pinball | 80 % coverage |", "|---|---|---|---|---|---|"]
    for name, case in found["cases"].items():
        for method, row in case["methods"].items():
            cells = []
            for m in MEASURES:
                if "seeds" in row:
                    span = interval(torch.tensor(row["seeds"][m], dtype=torch.float64))
                    cells.append(f"{_figure(row['pooled'][m])} ({_figure(span.low)} to {_figure(span.high)})")
                else:
                    cells.append(_figure(row["pooled"][m]))
            lines.append(f"| {name} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = study(asked.quick)
    target = asked.out or (Path("forecast-quick.json") if asked.quick else RESULTS)
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(render(found))
    print(found["coverage"])


if __name__ == "__main__":
    main()
