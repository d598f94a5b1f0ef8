"""The page of the KL study is what its committed results say, and the renderer says it in numbers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks/results/kl_study.json", ROOT / "docs/kl-study.md"


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("kl_study", ROOT / "benchmarks/kl_study.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(method, tv, **more):
    base = {
        "task": "grid",
        "stick": 0.25,
        "method": method,
        "seeds": [0, 1, 2],
        "steps": 10,
        "batch": 64,
        "lr": 0.002,
        "tv": tv,
    }
    base |= {
        "floor_tv": 0.01,
        "floor_kind": "min-TV",
        "naive_tv": 0.15,
        "limit_tv": None,
        "oracle_calls": 3000,
        "ms_per_step": 2.5,
    }
    return base | more


def test_a_table_is_made_of_medians_intervals_and_paired_changes(study):
    band = {"entropy_high": [0.9] * 3, "entropy_low": [0.3] * 3, "r_gamma": [2.0] * 3}
    found = {
        "gamma": 0.25,
        "weight": 1.0,
        "device": "a machine",
        "versions": {"stochflow": "0", "torch": "2", "python": "3"},
        "runs": [run("sdb", [0.05, 0.06, 0.07], limit_tv=0.0), run("sgfn-kl", [0.04, 0.06, 0.05], **band)],
    }
    page = study.render(found)
    assert (
        "| SGFN-DB, exact posterior (= marginal DB) | 0.0600 [0.0500, 0.0700] | 0.0500 [0.0400, 0.0600] | 0.0000 | 1k | 2.5 |"
        in page
    )
    assert "| SGFN-KL, exact posterior | 0.0500 [0.0400, 0.0600] | 0.0400 [0.0300, 0.0500] | - | 1k | 2.5 |" in page
    assert "| 0.25 | SGFN-KL against SGFN-DB | -0.0100 [-0.0200, 0.0000] | 2 of 3 |" in page
    assert "| 0.25 | 0.9000 [0.9000, 0.9000] | 0.3000 [0.3000, 0.3000] | 2.0000 [2.0000, 2.0000] |" in page


def test_the_page_is_rendered_from_the_committed_results(study):
    assert PAGE.exists() == RESULTS.exists()  # neither without the other
    if RESULTS.exists():
        assert PAGE.read_text() == study.render(json.loads(RESULTS.read_text()))
