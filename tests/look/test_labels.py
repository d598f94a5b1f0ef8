"""One name for each figure, wherever it is shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stochflow.law.verdict import number, verdict
from stochflow.look import labels

ROOT = Path(__file__).parents[2]


def test_the_docs_show_the_table():
    page = (ROOT / "docs" / "report.md").read_text()
    (shown,) = re.findall(r"<!-- figures -->\n(.*?)\n<!-- end -->", page, re.S)
    assert shown == labels.markdown()


def test_terminal_report_and_comparison_read_the_same_names(make_run, capsys):
    from stochflow.cli.terminal import table
    from stochflow.look.compare import compare, write_comparison
    from stochflow.look.report import write_report

    first, other = make_run("a", seeds=5), make_run("b", seeds=5, shift=0.05, objective="tb")
    found = json.loads((first / "summary.json").read_text())
    table(found)
    shown = capsys.readouterr().out
    report = write_report([first]).read_text()
    compared = write_comparison(compare([first, other]), first / "compare.html").read_text()
    for key in ("tv", "excess_tv", "top_score"):
        words = labels.LABELS[key].words
        assert words in shown
        assert words in report
        assert words in compared
    assert verdict(found, advise=False)[:60] in report


@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (None, "", "-"),
        (True, "", "True"),
        (float("inf"), "", "inf"),
        (0.0167123, "", "0.0167"),
        (0.05, "+", "+0.0500"),
        (12.34567, "", "12.346"),
        (-1234.567, "", "-1234.6"),
        (1.23456e-5, "", "1.23e-05"),
        (2.5e7 + 0.5, "", "2.50e+07"),
        (3.0, "", "3"),
        (2_048_000, ",", "2,048,000"),
    ],
)
def test_a_figure_is_formatted_one_way(value, style, text):
    assert number(value, style) == text


def test_the_verdict_says_how_near_the_law_can_come():
    near = {"tv": 0.0167, "floor_tv": 0.0053, "excess_tv": 0.0114}
    assert "no policy can come closer than 0.0053, so the excess is +0.0114." in verdict(near)
    assert "(of least forward KL) is at 0.0053" in verdict(near | {"floor_kind": "forward-KL"})
    far = {"tv": 0.3, "floor_tv": 0.0, "excess_tv": 0.3, "net": "mlp"}
    assert "reached exactly" in verdict(far)
    assert "That is far; try more --steps" in verdict(far)
    assert "far;" not in verdict(far, advise=False)
    assert verdict({}) == "Nothing has been measured yet."
    gap = {"tv": None, "elbo": 1.0, "log_z_estimate": 3.0}
    assert "is 2, and 0 would be perfect. It is large" in verdict(gap)
    assert "a small gap alone proves nothing" in verdict(gap | {"elbo": 2.9})  # both bound log Z from below
