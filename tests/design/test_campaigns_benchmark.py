"""The benchmark's parts: its Ehrlich function has its optimum, what is made follows its channel, a small cell runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "campaigns.py"


@pytest.fixture(scope="module")
def bench():
    import sys

    spec = importlib.util.spec_from_file_location("campaigns_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["campaigns_benchmark"] = module
    spec.loader.exec_module(module)
    return module


def test_the_ehrlich_study_starts_from_feasible_data_without_its_optimum(bench):
    world = bench.ehrlich()
    first = world.first(0)
    assert len(set(first)) > 100
    assert all(world.accepts(t) for t in first)
    assert 0 <= world.score(first).max() < 1


def test_what_is_made_follows_the_channel(bench):
    rng = np.random.default_rng(0)
    made = "".join(bench.make(["ACGT" * 500] * 10, bench.slip(0.2, 4), "ACGT", rng))
    assert np.mean([a == b for a, b in zip(made, "ACGT" * 5000, strict=True)]) == pytest.approx(0.85, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["random", "greedy", "gfn-no-noise", "ours"])
def test_a_small_cell_runs_and_counts_its_wells(bench, arm, monkeypatch):
    study = bench.Study("small", "tf", 0.25, 1, 24)
    found = bench.campaign(study, arm, 0)
    assert found["wells"] == 24
    assert 0.4 < found["orders"] < 0.8
    assert json.loads(json.dumps(found)) == found


def test_who_knows_the_landscape_orders_its_best_strings(bench):
    found = bench.campaign(bench.Study("small", "tf", 0.0, 1, 24), "greedy-known", 0)
    assert found["made"] == pytest.approx(np.sort(bench.tfbind().table)[-24:].mean())


def test_knowing_landscape_and_noise_is_best_on_average(bench):
    """One round: the orders with the largest expected gain over a bar that all of them pass are those of the largest expected value."""
    study = bench.Study("small", "tf", 0.25, 1, 24)
    found = {arm: bench.campaign(study, arm, 0)["orders"] for arm in ("random", "greedy-known", "ours-known")}
    assert found["random"] < found["greedy-known"] < found["ours-known"]


def test_the_table_shows_every_arm_with_its_interval(bench, tmp_path):
    cells = [
        {"study": "tf-4x96", "arm": a, "seed": s, "made": 0.9 + 0.01 * s, "orders": 0.9, "distance": 5.0, "best": 1.0}
        for a in ("random", "ours")
        for s in range(3)
    ]
    (tmp_path / "cells.json").write_text(json.dumps({"cells": cells}))
    shown = bench.table([tmp_path / "cells.json"])
    assert shown.count("| ours |") == 1
    assert "0.910 ± 0.025" in shown  # Student, 2 degrees of freedom: 4.303 * .01 / sqrt(3)


def test_differences_are_paired_by_seed(bench):
    cells = [
        {"arm": a, "seed": s, "made": 0.1 * s + gain} for a, gain in (("ga", 0.0), ("ours", 0.2)) for s in (2, 0, 1)
    ]
    assert bench.ahead(cells, "ga") == "0.200 ± 0.000"
    assert bench.ahead(cells, "ours") == bench.ahead(cells, "greedy-known") == ""


def test_the_page_shows_the_committed_cells(bench):
    """The tables of docs/campaign-results.md are rendered from the committed JSON."""
    root = FILE.parents[1]
    page = (root / "docs" / "campaign-results.md").read_text()
    files = sorted((root / "benchmarks" / "results" / "campaigns").glob("*.json"))
    assert len(files) >= 2
    for file in files:
        shown = page.split(f"{file.name} -->\n", 1)[1].split("<!-- end of tables -->")[0]
        assert shown.strip() == bench.table([file]).strip()
