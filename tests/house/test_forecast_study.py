"""The study of docs/forecasting.md: its tables and claims follow from the committed results."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study():
    pytest.importorskip("pandas")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("forecast_study", ROOT / "benchmarks" / "forecast_study.py")
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return made


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
