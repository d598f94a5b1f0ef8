"""The page on sequence models: its tables are what the committed results say, and its code runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "sequence-models.md"


def tables():
    spec = importlib.util.spec_from_file_location("sequence_tables", ROOT / "benchmarks" / "sequence_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_what_the_results_say():
    page = PAGE.read_text()
    assert tables().render(page) == page
    named = re.findall(r"<!-- ([a-z-]+) -->", page)
    assert {"prediction", "law", "decoding", "memory"} <= set(named)


def test_every_table_of_the_thought_study_has_five_seeds():
    import json

    found = json.loads((ROOT / "benchmarks/results/thought_study.json").read_text())
    for world in found["worlds"].values():
        for rows in (world["prediction"], world["law"]):
            assert all(len(figure["seeds"]) == 5 for row in rows.values() for figure in row.values() if isinstance(figure, dict))


def test_the_code_of_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    assert len(blocks) >= 4
    scope: dict = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), scope)
