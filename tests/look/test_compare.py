"""Comparison: paired by seed, honest about few seeds, right about noise as often as it says."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest

from stochflow.errors import UserError
from stochflow.look.compare import ENOUGH, LEVEL, compare, compare_command, paired_interval, write_comparison
from stochflow.look.labels import LABELS


def test_a_shift_larger_than_the_noise_is_called_a_difference(make_run):
    found = compare([make_run("a", seeds=5), make_run("b", seeds=5, shift=0.05, objective="tb")])
    gap = found.differences[0]["tv"]
    assert [a.label for a in found.arms] == ["objective db", "objective tb"]
    assert gap.seeds == 5
    assert gap.mean == pytest.approx(0.05)
    assert (gap.low, gap.high) == pytest.approx((0.05, 0.05))  # every seed moved by exactly this
    assert gap.beyond_noise
    assert not gap.better  # a larger distance is worse
    assert found.sentences() == [
        f"objective tb against objective db, excess over the best: {found.differences[0]['excess_tv'].words()}."
    ]
    assert found.differences[0]["excess_tv"].words().startswith("worse (+0.05")
    assert found.differences[0]["elbo"].words() == "exactly the same"


def test_noise_is_called_noise(make_run):
    lines = make_run.rows(seeds=8)
    rng = np.random.default_rng(0)
    for row in lines:
        if "seeds" in row:
            row["seeds"]["excess_tv"] = (0.015 + rng.normal(0, 0.01, 8)).tolist()
    found = compare([make_run("a", seeds=8), make_run("b", seeds=8, lines=lines, lr=1e-4)])
    assert found.sentences()[0].startswith(
        "lr 0.0001 against lr 0.005, excess over the best: no difference beyond noise ("
    )


def test_pairing_sees_what_the_spread_over_seeds_hides(make_run):
    """Seeds differ by far more than the arms do, but each seed moves the same way."""
    first, second = make_run.rows(seeds=6), make_run.rows(seeds=6)
    rng = np.random.default_rng(1)
    base = rng.normal(0.3, 0.1, 6)
    for a, b in zip(first, second, strict=True):
        if "seeds" in a:
            a["seeds"]["excess_tv"] = base.tolist()
            b["seeds"]["excess_tv"] = (base - 0.01 + rng.normal(0, 0.001, 6)).tolist()
    gap = compare([make_run("a", seeds=6, lines=first), make_run("b", seeds=6, lines=second, batch=128)]).differences[
        0
    ]["excess_tv"]
    assert gap.better
    assert gap.low < -0.01 < gap.high < 0


@pytest.mark.parametrize("count", [ENOUGH, 8, 20])
def test_without_a_difference_one_is_called_about_as_often_as_promised(count):
    """95 % intervals: of 1000 comparisons of equals about 50 may exclude zero."""
    rng = np.random.default_rng(count)
    wrong = 0
    for _ in range(1000 if count == ENOUGH else 300):
        low, high = paired_interval(rng.normal(0, 1, count))
        wrong += low > 0 or high < 0
    assert wrong / (1000 if count == ENOUGH else 300) < 0.075


def test_among_ten_equal_arms_one_is_called_different_about_as_often_as_promised():
    """All nine against one first arm, so that its luck is in every difference. Unwidened, far more than one time in twenty."""
    rng = np.random.default_rng(0)
    wrong = {1: 0, 9: 0}
    for _ in range(60):
        value = rng.normal(0, 1, (10, ENOUGH))
        for among in wrong:
            bounds = [paired_interval(v - value[0], 1 - (1 - LEVEL) / among) for v in value[1:]]
            wrong[among] += any(low > 0 or high < 0 for low, high in bounds)
    assert wrong[9] <= 6  # 3 are expected of 60 at most
    assert wrong[1] > 9


def test_several_arms_widen_their_intervals_and_say_so(make_run):
    lines = [make_run.rows(seeds=6) for _ in range(3)]
    rng = np.random.default_rng(5)
    for rows in lines:
        for row in rows:
            if "seeds" in row:
                row["seeds"]["excess_tv"] = (0.02 + rng.normal(0, 0.01, 6)).tolist()
    paths = [make_run(f"r{i}", seeds=6, lines=rows, lr=1e-3 * (1 + i)) for i, rows in enumerate(lines)]
    two, three = compare(paths[:2]), compare(paths)
    alone, together = two.differences[0]["excess_tv"], three.differences[0]["excess_tv"]
    assert together.low < alone.low < alone.high < together.high
    assert (together.low, together.high) == paired_interval(np.array(gaps(lines[0], lines[1])), 0.975)
    assert "widened for 2 comparisons" in together.words()
    assert "widened" not in alone.words()
    assert three.caution().startswith("The intervals of a figure hold for all 2 comparisons at once. Each of the ")
    assert two.caution().startswith("Each of the ")
    assert two.to_json()["caution"] == two.caution()


def gaps(first, other):
    a, b = (rows[-1]["seeds"]["excess_tv"] for rows in (first, other))
    return [y - x for x, y in zip(a, b, strict=True)]


def test_fewer_than_five_seeds_are_never_called_a_difference(make_run):
    found = compare([make_run("a", seeds=3), make_run("b", seeds=3, shift=0.5, lr=1e-4)])
    gap = found.differences[0]["tv"]
    assert not gap.beyond_noise
    assert "too few" in gap.words()
    single = compare([make_run("c", seeds=1), make_run("d", seeds=1, shift=0.5, lr=1e-4)]).differences[0]["tv"]
    assert single.words().startswith("+0.5000 on the one seed in common")


def test_runs_that_differ_in_their_seed_alone_are_one_arm(make_run):
    first = [make_run(f"a{i}", seeds=1, seed=i) for i in range(5)]
    second = [make_run(f"b{i}", seeds=1, seed=i, objective="tb", shift=0.1) for i in (4, 3, 2, 1, 0)]
    found = compare([*first, *second])
    assert [(a.label, a.seeds) for a in found.arms] == [
        ("objective db", [0, 1, 2, 3, 4]),
        ("objective tb", [0, 1, 2, 3, 4]),
    ]
    assert found.differences[0]["tv"].mean == pytest.approx(0.1)
    assert found.differences[0]["tv"].beyond_noise


def test_only_common_seeds_are_paired(make_run):
    found = compare(
        [
            make_run("a", seeds=3, seed=0),
            make_run("b", seeds=3, seed=2, lr=1e-4),
            make_run("c", seeds=3, seed=9, lr=1e-5),
        ]
    )
    assert [d["tv"].seeds for d in found.differences] == [1, 0]
    assert found.differences[1]["tv"].words() == "no seed in common"


def test_repeats_stand_for_themselves(make_run):
    found = compare([make_run("once"), make_run("again")])
    assert [a.label for a in found.arms] == ["once", "again"]
    assert found.differences[0]["tv"].words() == "exactly the same"


def test_other_targets_and_unfinished_runs_are_said(make_run):
    found = compare([make_run("a"), make_run("b", task="grid"), make_run("c", done=False, lr=1e-4)])
    assert found.warnings == [
        "These runs have different targets: their figures answer different questions.",
        "Not finished, so compared by its last look: c.",
    ]


def test_laws_of_another_sharpness_are_not_compared_by_figures_of_the_law(make_run):
    def run(name, seed, **more):
        lines = [{k: v for k, v in r.items() if k not in ("tv", "excess_tv")} for r in make_run.rows(1)]
        lines[-1] |= {"tv": None, "excess_tv": None, "top_asked": 0.5, "oracle_calls": 500} | more
        return make_run(name, seeds=1, seed=seed, lines=lines, **({"lr": 1e-4} if name > "b" else {}))

    equal = compare([run("a", 0, beta=50.0), run("c", 0, beta=50.0)])
    assert equal.main == "elbo"
    assert equal.warnings == []
    found = compare([run("a2", 0, beta=50.0), run("c2", 0, beta=352.5, top_asked=0.6, oracle_calls=700)])
    assert "elbo" not in found.metrics
    assert "elbo" not in found.differences[0]
    assert found.main == "top_asked"
    assert [w.split(":")[0] for w in found.warnings] == [
        "Their rewards are not equally sharp (beta 50, 352.50)",
        "They asked the oracle about 500, 700 different objects",
    ]
    few = compare([run("a3", 0, apart_asked=0.4, apart_count=100), run("c3", 0, apart_asked=0.5, apart_count=7)])
    assert [w for w in few.warnings if w.endswith("the mean is of these alone: c3 (7).")]


def test_the_page_holds_together(make_run, tmp_path):
    found = compare(
        [
            make_run("a", seeds=5),
            make_run("b", seeds=5, shift=0.05, objective="tb"),
            make_run("c", seeds=5, lr=1e-4, done=False),
        ]
    )
    text = write_comparison(found, tmp_path / "compare.html").read_text()
    assert text.startswith("<!doctype html>")
    assert not re.search(r"https?://", text)
    assert text.count("<svg ") == text.count("</svg>") == 2
    assert text.count('data-x=""') == text.count('data-y=""') == 0
    for words in [*found.sentences(), *[LABELS[k].words.replace("||", "||") for k in ("tv", "elbo", "modes")]]:
        assert words in text.replace("&#39;", "'")


def test_the_command_prints_a_table_and_a_verdict(make_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    paths = [make_run("a", seeds=5), make_run("b", seeds=5, shift=0.05, objective="tb")]
    assert compare_command(paths, tmp_path / "c.html") == 0
    said = capsys.readouterr().out
    assert re.search(r"TV to the target +0\.022.* +0\.072\S* -", said)
    assert "worse (+0.05" in said
    assert (tmp_path / "c.html").exists()
    assert compare_command(paths, tmp_path / "d.html", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["differences"][0]["tv"]["mean"] == pytest.approx(0.05)


def test_twenty_runs_are_compared_well_within_thirty_seconds(make_run, tmp_path):
    paths = [make_run(f"r{i:02d}", seeds=5, lr=1e-3 * (1 + i), shift=0.001 * i) for i in range(20)]
    begun = time.perf_counter()
    write_comparison(compare(paths), tmp_path / "twenty.html")
    assert time.perf_counter() - begun < 30


def test_mistakes_are_told(make_run):
    with pytest.raises(UserError, match="at least two runs"):
        compare([make_run("a")])
    with pytest.raises(UserError, match="nothing but their seeds"):
        compare([make_run("b", seeds=1, seed=1), make_run("c", seeds=1, seed=2)])
    with pytest.raises(UserError, match="no figures yet"):
        compare([make_run("d"), make_run("e", done=False, lines=[])])
