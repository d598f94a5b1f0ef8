"""The page of the dynamics study is what its committed results say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks/results/dynamics_study.json", ROOT / "docs/dynamics-study.md"


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("dynamics_study", ROOT / "benchmarks/dynamics_study.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_rendered_from_the_committed_results(study):
    found = json.loads(RESULTS.read_text())
    assert PAGE.read_text() == study.render(found)
    assert {(r["world"], r["model"]) for r in found["runs"]} == {(w, m) for w in study.WORLDS for m in study.MODELS}


def test_calls_are_counted_to_the_first_look_that_is_near_enough(study):
    run = {"batch": 10, "tv": {"5": [0.5, 0.4, 0.6], "20": [0.1, 0.2, 0.05]}}
    assert study.first_within(run, 0.5) == "50"
    assert study.first_within(run, 0.1) == "200"
    assert study.first_within(run, 0.01) == "not reached"
