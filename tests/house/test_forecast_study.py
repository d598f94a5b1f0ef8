"""The study of docs/forecasting.md: its tables and its claim about coverage follow from the committed results."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from stochflow.forecast.config import Forecast

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("forecast_study", ROOT / "benchmarks" / "forecast_study.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def found():
    return json.loads((ROOT / "benchmarks" / "results" / "forecast.json").read_text())


def test_the_tables_in_the_docs_are_those_of_the_committed_results(study, found):
    page = (ROOT / "docs" / "forecasting.md").read_text()
    assert study.render(found) in page
    assert study.render_unseen(found) in page


def test_the_study_ran_at_the_defaults(study, found):
    """What `stochflow forecast` ships with, five seeds, all of the cases that the script names."""
    assert found["settings"] == json.loads(json.dumps(dataclasses.asdict(Forecast())))
    assert found["seeds"] == list(range(Forecast().seeds)) == list(range(5))
    assert list(found["unseen"]) == [case.series for case in study.UNSEEN]
    assert list(found["cases"]) == [case.series for case in study.CASES]
    for case in study.UNSEEN:
        assert (case.stride, case.window, case.horizon) == (1, 0, Forecast().horizon)
        assert len(found["unseen"][case.series]["inside"]) == case.origins


def test_coverage_over_series_nobody_had_looked_at_is_between_70_and_90_percent(study, found):
    """Over at least 200 windows; the interval beside it resamples runs of them."""
    coverage = found["coverage"]
    assert study.pooled_coverage(found["unseen"]) == coverage
    shares = [(np.mean(c["inside"]), c["origins"] * c["series_count"]) for c in found["unseen"].values()]
    assert coverage["coverage_80"] == pytest.approx(sum(s * n for s, n in shares) / sum(n for _, n in shares))
    assert coverage["windows"] == sum(n for _, n in shares) >= 200
    assert 0.7 <= coverage["coverage_80"] <= 0.9
    assert coverage["low"] < coverage["coverage_80"] < coverage["high"]


def test_the_interval_of_coverage_holds_runs_of_windows_together(study):
    """Where neighbours agree it is wider than if windows were independent; where all windows are alike it is a point."""
    case = {"horizon": 12, "step": 4, "series_count": 1}
    alike = study.pooled_coverage({"a": {**case, "inside": [0.8] * 60}})
    assert (alike["low"], alike["high"]) == pytest.approx((0.8, 0.8))
    slow = [1.0] * 30 + [0.0] * 30
    fast = [1.0, 0.0] * 30
    wide, narrow = (study.pooled_coverage({"a": {**case, "inside": x}}) for x in (slow, fast))
    assert wide["coverage_80"] == narrow["coverage_80"] == 0.5
    assert wide["high"] - wide["low"] > 0.4 > 0.1 > narrow["high"] - narrow["low"]


def test_the_files_of_the_unseen_series_become_long_tables(study):
    assert study.el_nino(b'"YEAR","JAN","FEB"\n1950,23.11,24.2\n1951,25,26\n')[1::2] == [
        ["el_nino", "1950-02-01", "24.2"],
        ["el_nino", "1951-02-01", "26"],
    ]
    assert study.sunspots(b'"YEAR","SUNACTIVITY"\n1700,5\n') == [["sunspots", "1700", "5"]]
    assert study.electrical_equipment(b"DATE,X\nFeb-1-1995,65.15\n") == [
        ["electrical_equipment", "1995-02-01", "65.15"]
    ]
    macro = study.us_macro(b'"year","quarter","realgdp","cpi","tbilrate","unemp"\n1959.0,2.0,1,2,3,4\n')
    assert macro[0] == ["realgdp", "1959-04-01", "1"]
    assert [row[2] for row in macro] == ["1", "2", "3", "4"]
