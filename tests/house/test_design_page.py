"""The tables of docs/design-search.md are those of the committed results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_says_what_was_measured():
    spec = importlib.util.spec_from_file_location("design_tables", ROOT / "benchmarks" / "design_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text()
    assert module.rendered(page) == page
    assert (ROOT / "docs" / "img" / "design-search.png").exists()
