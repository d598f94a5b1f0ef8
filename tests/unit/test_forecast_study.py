"""The study of docs/forecasting.md: its table and its claim about coverage follow from the committed results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def study():
    spec = importlib.util.spec_from_file_location("forecast_study", ROOT / "benchmarks" / "forecast_study.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_table_in_the_docs_is_that_of_the_committed_results():
    found = json.loads((ROOT / "benchmarks" / "results" / "forecast.json").read_text())
    page = (ROOT / "docs" / "forecasting.md").read_text()
    assert study().render(found) in page
    coverage = found["coverage"]
    assert f"{coverage['windows']} windows: {coverage['coverage_80']:.3f}" in page
    assert f"{coverage['low']:.3f} to {coverage['high']:.3f}" in page


def test_coverage_over_the_real_series_is_between_70_and_90_percent():
    """Over at least 200 windows that were not trained on, with an interval that resamples whole windows."""
    module = study()
    found = json.loads((ROOT / "benchmarks" / "results" / "forecast.json").read_text())
    inside = [case["methods"][module.DEFAULT]["inside"] for case in found["cases"].values()]
    assert module.pooled_coverage(inside) == found["coverage"]
    assert found["coverage"]["windows"] >= 200
    assert 0.7 <= found["coverage"]["coverage_80"] <= 0.9
