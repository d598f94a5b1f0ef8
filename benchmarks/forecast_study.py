"""Forecasts of public series against what people use; writes benchmarks/results/forecast.json.

    PYTHONPATH=src python benchmarks/forecast_study.py --wheels FOLDER --fetch              # rivals, then ours: about half an hour of one core
    PYTHONPATH=src python benchmarks/forecast_study.py --wheels FOLDER --only ours          # ours again, beside the rivals of before

The series, horizons and origins are those of benchmarks/forecast_series.py, written before any of them was forecast. Every method learns anew
at every origin, from all rows before it and nothing else. Rivals (statsforecast): AutoETS, AutoTheta, MSTL (two seasons for hours), the seasonal naive
forecast, AutoARIMA (without seasons where one has more than 12 rows, which would take hours). They give an interval and no futures: their CRPS is that of the normal law with
their centre and their 80 % interval. Ours is that of 1,000 futures of the statistical law (`--network off`). CRPS is measured in units of each series' mean absolute change from one row to the next,
so that the series of a panel count alike. `--seeds` repeats ours with other seeds.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from forecast_series import CASES, Case, fetch, frame

from stochflow import __version__
from stochflow.forecast import Forecaster
from stochflow.forecast.calibration import joint
from stochflow.forecast.report import crps

RESULTS = Path(__file__).parent / "results" / "forecast.json"
RIVALS = ("AutoETS", "AutoTheta", "MSTL", "AutoARIMA", "seasonal naive")
NORMAL_90 = 1.2815515655446004  # the 90 % point of the standard normal
NETWORK = "off"  # the statistical law alone: the network is tried from 150 windows on, and multiplies the cost
SHORT = 200  # rows of a data set below which no method may be far behind
FAR = 1.15  # times the best of the others
OURS = "stochflow"


def units(table: Any) -> dict[str, float]:
    """Mean absolute change of each series."""
    return {name: float(np.abs(np.diff(g)).mean()) or 1.0 for name, g in table.groupby("unique_id", sort=False)["y"]}


def rival(case: Case, table: Any, name: str) -> dict[str, Any]:
    from scipy.stats import norm
    from statsforecast import StatsForecast
    from statsforecast.models import MSTL, AutoARIMA, AutoETS, AutoTheta, SeasonalNaive

    m = case.season
    model = {
        "AutoETS": lambda: AutoETS(season_length=m, alias="m"),
        "AutoTheta": lambda: AutoTheta(season_length=m, alias="m"),
        "MSTL": lambda: MSTL(season_length=[24, 168] if m == 24 else m, alias="m"),
        "AutoARIMA": lambda: AutoARIMA(season_length=m if m <= 12 else 1, alias="m"),
        "seasonal naive": lambda: SeasonalNaive(m, alias="m"),
    }[name]()
    begun = time.process_time()
    freq = int(case.freq) if case.freq.isdigit() else case.freq
    made = StatsForecast([model], freq=freq, n_jobs=1).cross_validation(
        df=table, h=case.horizon, step_size=case.step, n_windows=case.origins, level=[80]
    )
    seconds = time.process_time() - begun
    made = made.sort_values(["unique_id", "cutoff", "ds"])
    truth, centre, low, high = (made[c].to_numpy(dtype=float) for c in ("y", "m", "m-lo-80", "m-hi-80"))
    spread = np.maximum((high - low) / 2 / NORMAL_90, 1e-9 * np.maximum(np.abs(centre), 1e-9))
    z = (truth - centre) / spread
    value = spread * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))
    scale = units(table)
    value = value / made["unique_id"].map(scale).to_numpy(dtype=float)
    return _figures(value.reshape(-1, case.horizon), ((low <= truth) & (truth <= high)).mean(), seconds)


def ours(case: Case, table: Any, seed: int) -> dict[str, Any]:
    begun = time.process_time()
    forecaster = Forecaster(
        horizon=case.horizon, freq=case.freq, season=case.season if case.season > 1 else 0, seed=seed, network=NETWORK
    )
    tested = forecaster.backtest(table, case.origins, case.step, refit=True)
    seconds = time.process_time() - begun
    scale = units(table)
    drawn = tested.samples
    value = crps(drawn, tested.truth) / np.array([scale[n] for n in tested.names])[:, None]
    low, high = np.quantile(drawn, [0.1, 0.9], axis=1)
    inside = ((low <= tested.truth) & (tested.truth <= high)).mean()
    each = {n: scale[n] for n in dict.fromkeys(tested.names)}
    found = joint(drawn, tested.truth, np.array([each[n] for n in tested.names]))
    return {**_figures(value, inside, seconds), "joint": found, "share": tested.forecaster._need().share}


def _figures(value: np.ndarray, inside: float, seconds: float) -> dict[str, Any]:
    return {
        "crps": float(value.mean()),
        "windows": np.round(value.mean(1), 5).tolist(),
        "steps": np.round(value.mean(0), 5).tolist(),
        "coverage_80": float(inside),
        "seconds": round(seconds, 2),
    }


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Geometric means of the ratios of our CRPS to each rival's, and to the best on each data set."""
    cases = found["cases"]
    mean = {c: float(np.mean([s["crps"] for s in case["ours"].values()])) for c, case in cases.items()}
    ratios = {
        r: [mean[c] / case["rivals"][r]["crps"] for c, case in cases.items() if r in case["rivals"]] for r in RIVALS
    }
    best = {c: min(x["crps"] for x in case["rivals"].values()) for c, case in cases.items()}
    dice = np.random.default_rng(0)
    overall = {}
    for r, x in ratios.items():
        logs = np.log(x)
        again = np.exp([dice.choice(logs, len(logs)).mean() for _ in range(2000)])
        overall[r] = {
            "ratio": float(np.exp(logs.mean())),
            "low": float(np.quantile(again, 0.025)),
            "high": float(np.quantile(again, 0.975)),
            "sets": len(x),
        }
    return {
        "against": overall,
        "to_best": {c: mean[c] / best[c] for c in cases},
        "short_worst": max(
            (mean[c] / best[c] for c, case in cases.items() if case["rows"] < SHORT), default=float("nan")
        ),
        "short": short(found),
    }


def short(found: dict[str, Any]) -> dict[str, Any]:
    """Of the sets with few rows: how far each method is behind the best of the others, and how sure that is of ours.

    Intervals are over windows, which are resampled together for both methods.
    """
    cases = {c: case for c, case in found["cases"].items() if case["rows"] < SHORT}
    behind: dict[str, dict[str, float]] = {}
    sure = {}
    dice = np.random.default_rng(0)
    for name, case in cases.items():
        each = {r: np.array(x["windows"]) for r, x in case["rivals"].items()}
        rivals = dict(each)
        each[OURS] = np.mean([x["windows"] for x in case["ours"].values()], axis=0)
        for method, windows in each.items():
            others = [x.mean() for other, x in each.items() if other != method]
            behind.setdefault(method, {})[name] = float(windows.mean() / min(others))
        best = min(rivals.values(), key=np.mean)
        rows = dice.integers(len(best), size=(4000, len(best)))
        ratio = each[OURS][rows].mean(1) / best[rows].mean(1)
        sure[name] = [float(np.quantile(ratio, q)) for q in (0.025, 0.975)]
    return {"behind": behind, "interval": sure}


def render(found: dict[str, Any]) -> str:
    """The tables of docs/forecasting.md."""
    lines = [
        "| set | rows | series | ours | best rival | ratio | 80 % of values | of totals |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, case in found["cases"].items():
        rival = min(case["rivals"], key=lambda r: case["rivals"][r]["crps"])
        best, one = case["rivals"][rival]["crps"], case["ours"]["0"]
        total = one["joint"].get("coverage_80_total", float("nan"))
        lines.append(
            f"| {name} ({case['kind']}) | {case['rows']} | {case['series']} | {one['crps']:.3g} | {rival} {best:.3g} | {one['crps'] / best:.2f} "
            f"| {one['coverage_80']:.0%} | {total:.0%} |"
        )
    lines += ["", "| against | geometric mean of the ratios (95 % interval over sets) | sets |", "|---|---|---|"]
    for name, x in found["summary"]["against"].items():
        lines.append(f"| {name} | {x['ratio']:.2f} ({x['low']:.2f} to {x['high']:.2f}) | {x['sets']} |")
    few = found["summary"]["short"]
    lines += [
        "",
        f"| of the sets below {SHORT} rows | more than {FAR} times the best of the others | worst |",
        "|---|---|---|",
    ]
    for method, ratios in sorted(few["behind"].items(), key=lambda x: sum(v > FAR for v in x[1].values()) / len(x[1])):
        worst = max(ratios, key=lambda c: ratios[c])
        count = sum(v > FAR for v in ratios.values())
        lines.append(f"| {method} | {count} of {len(ratios)} | {worst}: {ratios[worst]:.2f} |")
    lines += [
        "",
        f"| set below {SHORT} rows | ours / best rival (95 % interval over windows) | windows |",
        "|---|---|---|",
    ]
    for name, (low, high) in few["interval"].items():
        count = len(found["cases"][name]["ours"]["0"]["windows"])
        lines.append(f"| {name} | {few['behind'][OURS][name]:.2f} ({low:.2f} to {high:.2f}) | {count} |")
    return "\n".join(lines)


def pooled(found: dict[str, Any]) -> dict[str, Any]:
    """Coverage of facts about whole futures over all windows of all sets, and mean lag-1 correlations over the sets: mean, least and most over the seeds."""
    cases = list(found["cases"].values())
    each = [_pooled([c["ours"][seed] for c in cases]) for seed in cases[0]["ours"]]
    made: dict[str, Any] = {k: float(np.mean([x[k] for x in each])) for k in each[0]}
    ranges = {k: [min(x[k] for x in each), max(x[k] for x in each)] for k in each[0]}
    return {**made, "seeds": len(each), "range_over_seeds": ranges}


def _pooled(ours: list[dict[str, Any]]) -> dict[str, float]:
    """The same of one seed's results."""
    cases = [x for x in ours if x["joint"]]
    count = np.array([len(x["windows"]) for x in cases], dtype=float)
    made = {}
    for key in ("coverage_80_total", "coverage_80_maximum", "coverage_80_difference"):
        each = np.array([x["joint"][key] for x in cases])
        made[key] = float(each @ count / count.sum())
        made[f"{key}_mean_of_sets"] = float(each.mean())
    lags = [(x["joint"]["lag_1_real"], x["joint"]["lag_1_sampled"]) for x in cases if "lag_1_real" in x["joint"]]
    real, sampled = np.array(lags).T
    return {
        **made,
        "lag_1_real": float(real.mean()),
        "lag_1_sampled": float(sampled.mean()),
        "lag_1_within": float((np.abs(real - sampled) <= 0.15).mean()),
    }


def versions(before: dict[str, str], ours_alone: bool) -> dict[str, str]:
    """Of what computed the figures; where ours alone are computed again, the rivals' are those of before."""
    made = {p: version(p) for p in ("torch", "numpy", "pandas", "scoringrules")} | {"stochflow": __version__}
    if ours_alone and "statsforecast" in before:
        return {**made, "statsforecast": before["statsforecast"]}
    return {**made, "statsforecast": version("statsforecast")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, default=Path("wheels"))
    parser.add_argument("--fetch", action="store_true")
    parser.add_argument("--only", choices=("ours", "rivals"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--render", action="store_true", help="print the tables of the page and do nothing else")
    parser.add_argument("--cases", default="", help="names, separated by commas")
    asked = parser.parse_args()
    if asked.render:
        print(render(json.loads(asked.out.read_text())))
        return
    warnings.simplefilter("ignore")
    if asked.fetch:
        fetch(asked.wheels)
    found = json.loads(asked.out.read_text()) if asked.out.exists() else {"cases": {}}
    for case in CASES:
        if asked.cases and case.name not in asked.cases.split(","):
            continue
        table = frame(case, asked.wheels)
        rows = int(table.groupby("unique_id").size().median())
        kept = found["cases"].setdefault(case.name, {"rivals": {}, "ours": {}})
        kept.update(
            kind=case.kind,
            rows=rows,
            series=int(table["unique_id"].nunique()),
            horizon=case.horizon,
            origins=case.origins,
            step=case.step,
        )
        if asked.only != "ours":
            for name in RIVALS:
                if name not in kept["rivals"] and (name != "MSTL" or case.season > 1):  # MSTL takes seasons off
                    kept["rivals"][name] = rival(case, table, name)
                    print(
                        case.name,
                        name,
                        kept["rivals"][name]["crps"],
                        f"{kept['rivals'][name]['seconds']} s",
                        flush=True,
                    )
                    asked.out.write_text(json.dumps(found))
        if asked.only != "rivals":
            kept["ours"] = {str(seed): ours(case, table, seed) for seed in range(asked.seeds)}
            best = min((x["crps"] for x in kept["rivals"].values()), default=float("nan"))
            one = kept["ours"]["0"]
            print(
                case.name,
                f"{one['crps']:.3f}, {one['crps'] / best:.3f} of the best, covers {one['coverage_80']:.2f}, {one['seconds']} s",
                one["joint"],
                flush=True,
            )
    if asked.only != "rivals":
        found["summary"] = {**summary(found), "paths": pooled(found)}
        print(json.dumps(found["summary"], indent=1))
    found |= {
        "versions": versions(found.get("versions", {}), asked.only == "ours"),
        "hardware": f"{platform.machine()}, 1 CPU thread",
        "python": platform.python_version(),
    }
    asked.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
