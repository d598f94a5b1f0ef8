"""The study of docs/forecasting.md: its tables and claims follow from the committed results."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def benchmark(name):
    pytest.importorskip("pandas")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return made


@pytest.fixture(scope="module")
def study():
    return benchmark("forecast_study")


@pytest.fixture(scope="module")
def bound():
    return benchmark("forecast_bound")


@pytest.fixture(scope="module")
def found():
    return json.loads((ROOT / "benchmarks" / "results" / "forecast.json").read_text())


def test_the_tables_in_the_docs_are_those_of_the_committed_results(study, found):
    assert study.render(found) in (ROOT / "docs" / "forecasting.md").read_text()


def test_every_series_of_the_list_was_forecast_as_it_says(study, found):
    assert list(found["cases"]) == [case.name for case in study.CASES]
    assert len(study.CASES) >= 20
    for case in study.CASES:
        kept = found["cases"][case.name]
        assert (kept["horizon"], kept["origins"], kept["step"]) == (case.horizon, case.origins, case.step)
        assert len(kept["ours"]["0"]["windows"]) == case.origins * kept["series"]
        assert set(kept["rivals"]) == {r for r in study.RIVALS if r != "MSTL" or case.season > 1}


def test_the_summary_follows_from_the_cases(study, found):
    again = study.summary(found)
    for rival, x in again["against"].items():
        assert found["summary"]["against"][rival]["ratio"] == pytest.approx(x["ratio"])
        assert x["low"] < x["ratio"] < x["high"]
    assert min(x["ratio"] for x in again["against"].values()) > 0.5
    assert max(x["ratio"] for x in again["against"].values()) <= 0.95
    paths = study.pooled(found)
    for name, figure in found["summary"]["paths"].items():
        for key, value in figure.items() if isinstance(figure, dict) else [("", figure)]:
            assert value == pytest.approx(paths[name][key] if key else paths[name]), (name, key)
    one = found["cases"]["lynx"]
    assert one["ours"]["0"]["crps"] == pytest.approx(np.mean(one["ours"]["0"]["windows"]), abs=1e-4)


def test_no_method_is_always_near_the_best_of_the_others(study, found):
    """What the page says of a bound that is only known afterwards."""
    few = study.short(found)
    assert few == found["summary"]["short"]
    above = {m: [c for c, v in ratios.items() if v > study.FAR] for m, ratios in few["behind"].items()}
    assert all(above.values())
    assert sorted(above[study.OURS]) == ["austres", "heartrate", "us_marriages"]
    for name, ratio in few["behind"][study.OURS].items():
        assert ratio == pytest.approx(found["summary"]["to_best"][name], rel=1e-3)
        low, high = few["interval"][name]
        assert low < ratio < high


def test_the_law_of_a_known_process_is_exact(bound):
    mean, deviation = bound.PROCESSES["AR(1), .8"].ahead(np.array([2.0]))
    assert mean == pytest.approx(2 * 0.8 ** np.arange(1, 9))
    assert deviation == pytest.approx(np.sqrt(np.cumsum(0.64 ** np.arange(8))))
    dice = np.random.default_rng(0)
    for name, process in bound.PROCESSES.items():
        state = process.states(5, dice)[-1]
        mean, deviation = process.ahead(state)
        x, shocks = np.tile(state, (4000, 1)), dice.multivariate_normal(np.zeros(len(state)), process.noise, (8, 4000))
        for shock in shocks:
            x = x @ process.step.T + process.drift + shock
        assert x[:, 0].mean() == pytest.approx(mean[-1], abs=4 * deviation[-1] / np.sqrt(4000)), name
        assert x[:, 0].std() == pytest.approx(deviation[-1], rel=0.06), name


def test_the_truth_itself_is_often_behind_the_best_of_several(bound):
    found = json.loads(bound.RESULTS.read_text())
    assert bound.summary(found["series"]) == found["summary"]
    page = (bound.RESULTS.parents[2] / "docs" / "forecasting.md").read_text()
    truth, ours = found["summary"]["truth"], found["summary"]["stochflow"]
    assert (
        f"behind the best of four rivals on {truth['far']} of them, by up to {truth['worst']:.2f} (ours on {ours['far']}"
        in page
    )
    assert (
        f"the truth has {truth['mean']:.2f}, AutoARIMA {found['summary']['AutoARIMA']['mean']:.2f}, ours {ours['mean']:.2f}"
        in page
    )
