"""The page on orders: its tables are what the committed results say, and the exact figures come out again."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks/results/open_loop.json").read_text())


def benchmark():
    spec = importlib.util.spec_from_file_location("open_loop", ROOT / "benchmarks" / "open_loop.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_what_the_results_say():
    page = (ROOT / "docs" / "orders.md").read_text()
    for name, text in benchmark().tables(RESULT).items():
        assert text in page, f"the table {name} of docs/orders.md is not that of benchmarks/results/open_loop.json"


def test_exact_figures_come_out_again():
    (row,) = [r for r in RESULT["exact"] if (r["stick"], r["beta"]) == (0.25, 3.0)]
    assert benchmark().exact_row(0.25, 3.0) == pytest.approx(row, abs=1e-6)


def test_what_the_page_says_of_them_is_so():
    """Without feedback less is made; as diverse, orders with the noise in mind are ahead; over orders there is no floor."""
    for r in RESULT["exact"]:
        assert r["closed_mean"] > r["even_mean"] > r["naive_mean"] > r["open_mean"]
        assert r["closed_best"] > r["open_best"] >= r["naive_best"]
        assert abs(r["open_floor"]) < 1e-6 <= r["closed_floor"]
    for r in RESULT["trained"]:
        assert max(r["tv"]) < r["floor_tv"] + 0.012
