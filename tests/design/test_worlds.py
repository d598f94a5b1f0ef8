"""Campaigns under rules and with a synthesiser: every order meets the rules, and what is expected of it is its exact expectation."""

from __future__ import annotations

import numpy as np
import pytest

from stochflow.cli import design
from stochflow.cli.commands import main
from stochflow.design.campaign import About, Campaign
from stochflow.design.model import through
from stochflow.design.objectives import Column, Scale, combined, hypervolume, pareto, preferences, utility
from stochflow.design.settings import Ask, Noise
from stochflow.design.space import make_synthesis, substitutions
from stochflow.design.store import read_csv
from stochflow.design.surrogates import Prediction
from stochflow.errors import UserError

QUICK = Ask(model="ridge")


@pytest.fixture
def lab(tmp_path):
    rng = np.random.default_rng(5)
    texts = list(dict.fromkeys("".join(rng.choice(list("ACGT"), 7)) for _ in range(50)))
    lines = [
        f"{t},{t.count('G') + 0.5 * t.count('C') + 0.1 * rng.normal():.3f},{t.count('T') + 0.1 * rng.normal():.3f}"
        for t in texts
    ]
    (tmp_path / "lab.csv").write_text("\n".join(["seq,y,z", *lines]) + "\n")
    return tmp_path / "lab.csv"


def test_every_order_meets_the_rules(lab, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.toml").write_text(
        '[gc]\nlow = 0.2\nhigh = 0.6\n\n[forbidden]\nmotifs = ["GGG"]\n\n[homopolymer]\nlongest = 2\n'
    )
    code = main(["design", "new", "plates", "--data", "lab.csv", "--value", "y", "--rules", "rules.toml"])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "meet the rules" in said.out
    for sampler in ("auto", "search"):
        rows = Campaign.open("plates").ask(20, Ask(model="ridge", sampler=sampler))
        for row in rows:
            text = row["sequence"]
            assert 0.2 <= sum(c in "GC" for c in text) / 7 <= 0.6
            assert "GGG" not in text
            assert not any(3 * c in text for c in "ACGT")


def test_what_rules_cost_a_batch_and_a_control_is_said(lab, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.toml").write_text("[edits]\nmost = 1\n\n[homopolymer]\nlongest = 2\n")
    words = ["design", "new", "plates", "--data", "lab.csv", "--value", "y", "--wild-type", "aaacgta"]
    assert main([*words, "--rules", "rules.toml"]) == 0
    words = ["design", "propose", "plates", "--batch", "40", "--model", "ridge", "--controls", "wild-type"]
    capsys.readouterr()
    assert main([*words, "--max-distance", "7"]) == 0
    said = capsys.readouterr().out
    assert "of the 39 designs asked for" in said
    assert "of 16,384 strings meet the rules" in said.split("of the 39 designs asked for")[1].splitlines()[0]
    assert "the control wild-type AAACGTA does not meet the rules (no letter more than 2 times in a row)" in said


def test_what_is_lost_to_rules_that_are_checked_after_drawing_is_counted(tmp_path):
    dice = np.random.default_rng(0)
    texts = ["".join(dice.choice(list("ACGT"), 26)) for _ in range(30)]
    (tmp_path / "lab.csv").write_text("seq,y\n" + "".join(f"{t},{t.count('G') + dice.normal():.3f}\n" for t in texts))
    (tmp_path / "rules.toml").write_text("[gc]\nlow = 0.45\nhigh = 0.5\nwindow = 24\n")
    about = About(rules=str(tmp_path / "rules.toml"), rules_approximate=True)
    campaign = Campaign.new(tmp_path / "plates", tmp_path / "lab.csv", about)
    rows = campaign.ask(90, Ask(model="ridge", steps=20, min_distance=14))
    shares = [sum(c in "GC" for c in r["sequence"][i : i + 24]) / 24 for r in rows for i in range(3)]
    assert 0.45 <= min(shares) <= max(shares) <= 0.5
    assert any("that break a rule which is checked after drawing" in note for note in campaign.notes)
    assert any("designs asked for" in note and "break a rule" in note for note in campaign.notes)


def test_noise_by_table_does_not_need_the_columns_named_twice(lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noise.csv").write_text(
        "," + "A,C,G,T\n" + "".join(f"{a},{','.join('1' if a == b else '0' for b in 'ACGT')}\n" for a in "ACGT")
    )
    assert main(["design", "new", "plates", "--data", "lab.csv", "--maximise", "y", "--noise", "noise.csv"]) == 0


@pytest.mark.parametrize("kind", ["slip", "neighbour"])
def test_the_expectation_of_listed_orders_is_exact(kind):
    """Position by position against every pair of strings, by the probability that the synthesis itself gives."""
    from stochflow.design.generate import all_texts
    from stochflow.worlds.strings import Strings

    texts = all_texts(Strings("ACGT", 3))
    values = np.random.default_rng(0).random((2, 64))
    noise = Noise(kind, 0.3)
    synthesis = make_synthesis(noise, "ACGT")
    table = substitutions(noise, 4)
    found = through(table, values, 3)
    for i in (0, 27, 63):
        chance = np.exp([synthesis.log_prob(texts[i], made) for made in texts])
        assert chance.sum() == pytest.approx(1)
        assert found[:, i] == pytest.approx(values @ chance)


def test_a_confusion_table_is_read_by_its_letters(lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noise.csv").write_text("ordered,T,G,C,A\nT,1,0,0,0\nG,0,1,0,0\nC,0,0,1,0\nA,0,0.2,0,0.8\n")
    assert main(["design", "new", "plates", "--data", "lab.csv", "--value", "y", "--noise", "noise.csv"]) == 0
    rows = Campaign.open("plates").ask(8, QUICK)
    for row in rows:
        assert row["chance_exact"] == pytest.approx(0.8 ** row["sequence"].count("A"), abs=1e-6)
        errs = row["sequence"].count("A")
        assert row["made_low"] == pytest.approx(row["predicted"]) if errs == 0 else row["made_low"] < row["high80"]
    assert any(row["sequence"].count("A") == 0 for row in rows)


def test_a_synthesiser_that_loses_letters(lab, tmp_path):
    noise = Noise("slip", 0.05, (), 0.02, 0.05)
    rows = Campaign.new(tmp_path / "plates", lab, About(columns=(Column("y"),), noise=noise)).ask(
        6, Ask(model="ridge", sampler="search")
    )
    assert all(0 < r["chance_exact"] < 0.9 for r in rows)


def test_several_columns_spread_over_the_front(lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "design",
        "new",
        "plates",
        "--data",
        "lab.csv",
        "--maximise",
        "y",
        "--minimise",
        "z",
        "--weight",
        "y=2",
        "--threshold",
        "z=3",
    ]
    assert main(words) == 0
    assert main(["design", "propose", "plates", "--batch", "16", "--model", "ridge"]) == 0
    rows = read_csv(tmp_path / "plates/rounds/001/proposal.csv")
    assert len({r["preference"] for r in rows}) == 8
    assert rows[0]["preference"] == "0.667 0.333"
    assert all("predicted y " in r["reason"] and ", z " in r["reason"] for r in rows)
    y = np.array([float(r["predicted_y"]) for r in rows])
    share = np.array([float(r["preference"].split()[0]) for r in rows])
    assert np.mean(y[share >= np.median(share)]) > np.mean(y[share < np.median(share)])
    with pytest.raises(UserError, match="both maximised and minimised"):
        design.run(["new", "x", "--data", "lab.csv", "--maximise", "y", "--minimise", "y"])


def test_fronts_and_hypervolumes_are_those_of_the_drawing():
    """Three points dominate 3 x 1 + 2 x 1 + 1 x 1 = 6 unit squares; the fourth is dominated; a gap is on no front."""
    columns = (Column("a"), Column("b", "minimise"))
    values = np.array([[3.0, -1.0], [2.0, -2.0], [1.0, -3.0], [1.0, -1.0], [9.0, np.nan]])
    assert pareto(columns, values).tolist() == [True, True, True, False, False]
    found = hypervolume(columns, values, np.array([0.0, 0.0]))
    assert found is None or found == pytest.approx(6)


def test_the_utility_prefers_as_its_weights_say():
    z = np.array([[1.0, 0.0, 0.6], [0.0, 1.0, 0.6]])  # two specialists and a hollow compromise
    assert utility(z, np.array([0.5, 0.5])).argmax() == 2
    assert utility(z, np.array([0.9, 0.1])).argmax() == 0
    wishes = preferences((Column("a", weight=3), Column("b")), 6, 0)
    assert wishes[0].tolist() == [0.75, 0.25]
    assert np.allclose(wishes.sum(1), 1)
    columns = (Column("a"), Column("b", "minimise"))
    scale = Scale.of(columns, np.array([[0.0, 10.0], [1.0, 20.0], [2.0, 30.0]]))
    p = [
        Prediction(np.array([2.0]), np.array([0.0]), np.array([[2.0], [2.0]])),
        Prediction(np.array([10.0]), np.array([0.0]), np.array([[10.0], [10.0]])),
    ]
    assert (
        combined(columns, scale, p, np.array([0.5, 0.5])).mean[0] > 0.05
    )  # better than 95 % of what was measured in both
