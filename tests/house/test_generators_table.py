"""The table of the generators' page is what its committed results say."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_is_rendered_from_the_committed_results():
    render = runpy.run_path(str(ROOT / "benchmarks/generators.py"))["render"]
    found = json.loads((ROOT / "benchmarks/results/generators.json").read_text())
    page = (ROOT / "docs/source-documents.md").read_text()
    table = re.search(r"<!-- generators -->\n(.*?)<!-- end -->", page, re.S)
    assert table is not None
    assert table[1] == render(found)
    assert {r["generator"] for r in found["runs"]} == {"db", "kl2"}
    assert all(r["tv"] < 0.03 for r in found["runs"])
