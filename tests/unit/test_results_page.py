"""docs/results.md is what the committed JSON says, and nothing else."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_rendered_from_the_committed_figures():
    render = runpy.run_path(str(ROOT / "benchmarks" / "stochastic_results.py"))["render"]
    assert (ROOT / "docs" / "results.md").read_text() == render()
