"""docs/results.md is what the committed JSON says, and nothing else; every row knows where it comes from."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = runpy.run_path(str(ROOT / "benchmarks" / "stochastic_results.py"))


def a_row(stick: float, tv: float, day: str, **other) -> dict:
    figures = {
        "limit_tv": 0.01,
        "floor_tv": 0.005,
        "naive_tv": 0.1,
        "dynamics_tv": None,
        "steps": 1000,
        "seconds": 28.04,
    }
    measured = {
        "day": day,
        "source": "abc",
        "commit": None,
        "versions": {"torch": "2"},
        "hardware": "a machine",
        "settings": {"seeds": 5},
    }
    kind = {"task": "tfbind8", "objective": "db", "dynamics": "known", "net": "lookup", "stick": stick}
    return {**kind, "tv": tv, "tv_low": tv - 0.001, "tv_high": tv + 0.001, **figures, "measured": measured, **other}


def test_the_page_is_rendered_from_the_committed_figures():
    assert (ROOT / "docs" / "results.md").read_text() == BENCH["render"]()


def test_rows_of_several_files_stand_in_one_and_the_newer_wins(tmp_path):
    first = [a_row(0.5, 0.3, "Monday"), a_row(0.1, 0.1, "Monday")]
    second = [a_row(0.5, 0.2, "Tuesday")]
    rows = BENCH["join"](first, second)
    assert [(r["stick"], r["tv"], r["measured"]["day"]) for r in rows] == [(0.1, 0.1, "Monday"), (0.5, 0.2, "Tuesday")]
    BENCH["save"](rows, tmp_path / "x.json")
    assert BENCH["read"](tmp_path / "x.json") == rows


def test_the_page_says_of_each_row_where_it_comes_from():
    one, other = a_row(0.1, 0.1, "Monday"), a_row(0.5, 0.2, "Tuesday")
    assert (
        BENCH["origins"]([one, one])
        == "Monday, a machine, torch 2, code abc; 5 seeds stacked, the seconds are those of all of them together."
    )
    said = BENCH["origins"]([one, other, one]).splitlines()
    assert said[0].startswith("* rows 1, 3: Monday")
    assert said[1].startswith("* rows 2: Tuesday")
    assert "| 28.0 | 0.2000 [0.1990, 0.2010] | 0.0100 | 0.1900 | 0.0050 | 0.1000 | – |" in BENCH["table"]([other])


def test_a_row_without_a_record_says_so(tmp_path):
    old = {k: v for k, v in a_row(0.1, 0.1, "Monday").items() if k != "measured"}
    head = {"versions": {"torch": "1"}, "hardware": "an old machine", "settings": {"seeds": 1}}
    (tmp_path / "old.json").write_text(json.dumps({**head, "rows": [old]}))
    (row,) = BENCH["read"](tmp_path / "old.json")
    assert BENCH["origin"](row) == "an old machine, torch 1, code not recorded, perhaps not one and the same; 1 seed"


def test_the_code_has_a_name_that_changes_with_it(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1")
    digest = BENCH["source_digest"]
    monkeypatch.setitem(digest.__globals__, "SOURCE", tmp_path)
    before = digest()
    assert digest() == before
    (tmp_path / "a.py").write_text("x = 2")
    assert digest() != before


def test_every_group_of_rows_is_different_and_a_foreign_one_is_named():
    rows = BENCH["wanted"](",".join(BENCH["groups"]()))
    assert len({BENCH["key"](r) for r in rows}) == len(rows) == 18
    assert [r["net"] for r in BENCH["wanted"]("mlp,transformer")] == ["mlp", "transformer"]
    with pytest.raises(SystemExit, match="no group 'rows'"):
        BENCH["wanted"]("db,rows")


def test_training_stops_before_its_seconds_are_over():
    """A trainer whose steps take a known time: the last look at the clock is before the limit, and near it."""

    class Slow:
        steps_done, now, each = 0, 100.0, 0.07

        def __init__(self):
            self.raw_stats = {(0, 0): 0.0}

        def train(self, until):
            self.now += self.each * (until - self.steps_done) + (3.0 if self.steps_done == 0 else 0.0)  # recording
            self.steps_done = until

    slow = Slow()
    clock = type("clock", (), {"perf_counter": staticmethod(lambda: slow.now)})
    train = BENCH["train"]
    kept = train.__globals__["time"]
    try:
        train.__globals__["time"] = clock
        first, spent = train(slow, 28.0)
    finally:
        train.__globals__["time"] = kept
    assert first == pytest.approx(3.28)
    assert 27 < spent < 28
    assert spent == pytest.approx(3.0 + 0.07 * slow.steps_done)
