"""How often the law that made a series is itself far behind the best of several methods; writes benchmarks/results/forecast_bound.json.

    PYTHONPATH=src python benchmarks/forecast_bound.py --series 20

"Never more than 1.15 times the best of the rivals" asks to be near whichever method turned out best, in a few overlapping
windows. Here the truth is known: series of four linear Gaussian processes, whose law of the next steps is exact (the state
and its covariance are pushed forward). That law, our statistical law and the rivals of benchmarks/forecast_study.py are
scored on the same windows by the same CRPS. Needs statsforecast, as the study does.
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from forecast_series import Case
from forecast_study import FAR, ours, rival, units
from scipy.stats import norm

from stochflow import __version__

RESULTS = Path(__file__).parent / "results" / "forecast_bound.json"
RIVALS = ("AutoETS", "AutoTheta", "AutoARIMA", "seasonal naive")
ROWS, HORIZON, ORIGINS, STEP = 100, 8, 6, 4
BEFORE = 50  # rows that are left out, so that a series does not begin at the same place


class Process(NamedTuple):
    """x' = step x + drift + noise of this covariance; the first of x is seen."""

    step: np.ndarray
    noise: np.ndarray
    drift: np.ndarray

    def states(self, count: int, dice: np.random.Generator) -> np.ndarray:
        x, out = np.zeros(len(self.step)), []
        for _ in range(count):
            x = self.step @ x + self.drift + dice.multivariate_normal(np.zeros(len(x)), self.noise)
            out.append(x)
        return np.array(out)

    def ahead(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[H] means and standard deviations of the next steps after state x."""
        spread, means, deviations = np.zeros_like(self.noise), [], []
        for _ in range(HORIZON):
            x = self.step @ x + self.drift
            spread = self.step @ spread @ self.step.T + self.noise
            means.append(x[0])
            deviations.append(np.sqrt(spread[0, 0]))
        return np.array(means), np.array(deviations)


PROCESSES = {
    "walk with drift": Process(np.eye(1), np.eye(1), np.array([0.3])),
    "AR(1), .8": Process(np.array([[0.8]]), np.eye(1), np.zeros(1)),
    "changes AR(1), .6": Process(np.array([[1.0, 0.6], [0.0, 0.6]]), np.ones((2, 2)), np.array([0.2, 0.2])),
    "slope that walks": Process(np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([[1.0, 0.3], [0.3, 0.09]]), np.zeros(2)),
}


def normal_crps(truth: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    z = (truth - mean) / deviation
    return deviation * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))


def one(name: str, seed: int) -> dict[str, Any]:
    """CRPS of the law that made a series, of ours and of the rivals."""
    process = PROCESSES[name]
    states = process.states(BEFORE + ROWS, np.random.default_rng(seed))[BEFORE:]
    table = pd.DataFrame({"unique_id": "a", "ds": np.arange(ROWS), "y": states[:, 0]})
    case = Case(name, "1", "1", 1, HORIZON, ORIGINS, STEP, None)
    ends = [ROWS - HORIZON - STEP * i for i in reversed(range(ORIGINS))]
    true = [normal_crps(states[e : e + HORIZON, 0], *process.ahead(states[e - 1])).mean() for e in ends]
    found = {"process": name, "seed": seed, "truth": float(np.mean(true)) / units(table)["a"]}
    found["stochflow"] = ours(case, table, 0)["crps"]
    return found | {r: rival(case, table, r)["crps"] for r in RIVALS}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For the truth and ours: mean CRPS, and the share of series on which it is far behind the best of the rivals."""
    best = np.array([min(r[m] for m in RIVALS) for r in rows])
    found: dict[str, Any] = {}
    for method in ("truth", "stochflow", *RIVALS):
        own = np.array([r[method] for r in rows])
        others = best if method not in RIVALS else np.array([min(r[m] for m in RIVALS if m != method) for r in rows])
        ratio = own / others
        found[method] = {
            "mean": float(own.mean()),
            "far": int((ratio > FAR).sum()),
            "worst": float(ratio.max()),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=20, help="of each process")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    rows = []
    for seed in range(asked.series):
        for name in PROCESSES:
            rows.append(one(name, seed))
            print(rows[-1], flush=True)
    versions = {"stochflow": __version__, "statsforecast": version("statsforecast"), "numpy": np.__version__}
    made = {"machine": platform.machine(), "python": platform.python_version(), "versions": versions}
    asked.out.write_text(json.dumps(made | {"summary": summary(rows), "series": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
