"""The page and the dry run: what they hold at length 6 and at length 100, and that nothing comes from outside."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from stochflow.cli.commands import main
from stochflow.design.batch import wells
from stochflow.design.campaign import About, Campaign
from stochflow.design.objectives import Column
from stochflow.design.page import collect, marked, write_page
from stochflow.design.settings import Ask
from stochflow.errors import UserError

QUICK = Ask(model="ridge", sampler="search")
AMINO = "ACDEFGHIKLMNPQRSTVWY"


def protein(tmp_path):
    """A campaign around a protein of 100 letters with two columns, and one proposed batch."""
    rng = np.random.default_rng(0)
    wild = "".join(rng.choice(list(AMINO), 100))
    lines = ["name,protein,activity,toxicity"]
    for i in range(40):
        text = list(wild)
        for p in rng.choice(100, 4, replace=False):
            text[p] = AMINO[int(rng.integers(20))]
        up = sum(AMINO.index(c) * (p % 3 - 1) for p, c in enumerate(text)) / 100
        lines.append(
            f"v{i},{''.join(text)},{up + 0.01 * rng.normal():.4f},{sum(c in 'FWY' for c in text) + rng.normal():.4f}"
        )
    (tmp_path / "lab.csv").write_text("\n".join(lines) + "\n")
    about = About(columns=(Column("activity"), Column("toxicity", "minimise", 0.5, 15.0)), wild_type=wild)
    return Campaign.new(tmp_path / "protein", tmp_path / "lab.csv", about)


def test_a_page_of_long_designs_with_two_columns(tmp_path):
    campaign = protein(tmp_path)
    rows = campaign.ask(4, Ask(model="ridge", sampler="search", controls=("wild-type",)))
    assert {"predicted_activity", "predicted_toxicity", "preference", "edits"} <= set(rows[1])
    page = collect(campaign)
    assert page.long
    assert [d.well for d in page.designs] == wells(4)
    assert len(page.designs[0].values) == 2
    text = write_page(campaign).read_text()
    assert "hypervolume" in text
    assert len(re.findall(r"a mean (activity|toxicity) of \S+ of these designs, \S+ of a random plate", text)) == 2
    campaign.tell([{"id": r["id"], "activity": 0.1, "toxicity": 9} for r in rows])
    beside = [p for p in collect(campaign).progress if p.key in ("progress-activity", "progress-toxicity")]
    assert ["genetic algorithm" in p.caption for p in beside] == [True, True]
    assert not re.search(r'(src|href)="(?!#|data:)', text)
    assert "<script" not in text
    away = collect(campaign).designs[1].distance
    assert f'<span class="phone">distance {away}</span>' in text  # whose column a narrow screen has no room for
    longest = max(len(w) for w in re.findall(r"<span>([^ ]*?)</span>", text))
    assert longest < 120  # sequences come in groups that can wrap


def test_a_batch_may_be_asked_for_under_one_preference(tmp_path):
    rng = np.random.default_rng(0)
    texts = list(dict.fromkeys("".join(rng.choice(list("ACGT"), 6)) for _ in range(80)))
    lines = [f"{t},{t.count('G') + 0.4 * t.count('A')},{t.count('G') + 0.4 * t.count('T')}" for t in texts]
    (tmp_path / "lab.csv").write_text("\n".join(["sequence,activity,toxicity", *lines]) + "\n")
    columns = (Column("activity"), Column("toxicity", "minimise"))
    campaign = Campaign.new(tmp_path / "plates", tmp_path / "lab.csv", About(columns=columns))

    def predicted(**preference):
        rows = campaign.ask(8, Ask(model="ridge", acquisition="greedy", preference=preference))
        share = " ".join(f"{preference.get(c.name, 0):.3f}" for c in columns)
        assert {r["preference"] for r in rows} == {share}
        return [np.mean([r[f"predicted_{c.name}"] for r in rows]) for c in columns]

    active, harmless, between = predicted(activity=1), predicted(toxicity=1.0), predicted(activity=0.4, toxicity=0.6)
    assert active[0] > between[0] > harmless[0]
    assert active[1] > between[1] > harmless[1]
    assert main(["design", "propose", str(campaign.path), "--preference", "activity=0.5", "toxcity=1"]) == 2
    for wrong, said in (({"toxcity": 1}, "did you mean"), ({"activity": -1}, "at least 0"), ({}, "at least 0")):
        with pytest.raises(UserError, match=said):
            campaign.ask(4, Ask(preference=wrong))


def test_differences_are_marked_also_where_lengths_differ():
    assert marked("ACGT", "ACCT") == "<span>AC<b>G</b>T</span>"
    assert marked("ACGTT", "ACGT").count("<b>") == 1
    assert (
        marked("A" * 25, "A" * 25) == f"<span>{'A' * 10}</span><wbr><span>{'A' * 10}</span><wbr><span>{'A' * 5}</span>"
    )


def gc(texts):
    return [(t.count("G") + t.count("C")) / len(t) for t in texts]


@pytest.fixture
def small(tmp_path):
    rng = np.random.default_rng(3)
    texts = list(dict.fromkeys("".join(rng.choice(list("AACGTT"), 7)) for _ in range(40)))
    (tmp_path / "lab.csv").write_text(
        "seq,gc\n" + "".join(f"{t},{v:.3f}\n" for t, v in zip(texts, gc(texts), strict=True))
    )
    return tmp_path / "lab.csv"


def test_a_dry_run_beats_random_and_leaves_the_campaign_alone(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def gc(texts):\n    return [(t.count('G') + t.count('C')) / len(t) for t in texts]\n"
    )
    assert main(["design", "new", "plates", "--data", "lab.csv"]) == 0
    assert (
        main(
            [
                "design",
                "simulate",
                "plates",
                "--oracle",
                "mine:gc",
                "--rounds",
                "2",
                "--batch",
                "10",
                "--model",
                "ridge",
            ]
        )
        == 0
    )
    assert "mean of the 10 best values" in capsys.readouterr().out
    found = json.loads((tmp_path / "plates-simulated" / "simulation.json").read_text())["curves"]
    assert found["this campaign"][-1] > found["random"][-1]
    assert found["this campaign"][-1] == 1.0  # ten strings of G and C alone
    assert "Dry run" in (tmp_path / "plates-simulated" / "report.html").read_text()
    assert Campaign.open("plates").store.rounds() == []
    assert main(["design", "simulate", "plates", "--oracle", "mine:gc"]) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_dry_run_that_fails_says_what_it_leaves_or_leaves_nothing(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fails.py").write_text(
        "asked = []\ndef later(texts):\n    asked.append(1)\n    if len(asked) > 1:\n        raise OSError('no more')\n"
        "    return [1.0] * len(texts)\ndef stopped(texts):\n    raise KeyboardInterrupt\n"
    )
    assert main(["design", "new", "plates", "--data", "lab.csv"]) == 0
    play = ["design", "simulate", "plates", "--rounds", "3", "--batch", "10", "--model", "ridge"]
    assert main([*play, "--oracle", "fails:later", "--out", "dry"]) == 2
    said = capsys.readouterr().err
    assert "no more; what was played so far is in dry (`stochflow design status dry`)" in said
    assert main(["design", "status", "dry"]) == 0
    assert "10 proposed designs have no value yet" in capsys.readouterr().out
    assert main([*play, "--oracle", "fails:stopped", "--out", "stopped"]) == 130
    assert "interrupted; what was played so far is in stopped" in capsys.readouterr().err
    assert main([*play, "--oracle", "fails:later", "--out", "none", "--acquisition", "odd"]) == 2
    assert main(["design", "simulate", "plates", "--rounds", "0", "--oracle", "fails:later", "--out", "none"]) == 2
    assert main(["design", "simulate", "plates", "--batch", "0", "--oracle", "fails:later", "--out", "none"]) == 2
    assert not (tmp_path / "none").exists()


def test_a_dry_run_begins_from_all_that_was_measured(small, tmp_path):
    from stochflow.design.simulate import simulate

    campaign = Campaign.new(tmp_path / "plates", small)
    first = campaign.ask(5, Ask(model="ridge"))
    campaign.tell([{"id": r["id"], "gc": -7.0} for r in first])  # the same ids as those of the dry run's first round
    played = simulate(campaign, gc, tmp_path / "dry", 1, Ask(batch=5, model="ridge")).campaign
    begun, round_ = played.history()
    assert begun["measured"] == len(campaign.measured().sequences)
    assert round_["measured"] == 5
    assert min(round_["columns"]["gc"]["values"]) >= 0
    assert "-7" not in "".join(d.measured for d in collect(played).designs)


def test_a_synthesiser_that_errs_is_reckoned_with(small, tmp_path):
    from stochflow.design.settings import Noise
    from stochflow.design.simulate import simulate

    campaign = Campaign.new(tmp_path / "noisy", small, About(noise=Noise("slip", 0.2)))
    rows = campaign.ask(6, Ask(model="ridge", controls=("best",)))
    assert [r["chance_exact"] for r in rows] == pytest.approx([0.85**7] * 6, abs=1e-6)
    assert all("gc" in r for r in rows)  # of controls, too
    plain = Campaign.new(tmp_path / "plain", small).ask(6, Ask(model="ridge"))
    assert max(r["predicted"] for r in rows) < max(
        r["predicted"] for r in plain
    )  # what is made is worse than what is ordered
    done = simulate(campaign, gc, tmp_path / "dry", 1, Ask(batch=20, model="ridge"))
    made = [r for r in done.campaign.store.measured() if r.get("made")]
    assert 5 <= len(made) <= 20  # 20 x (1 - .32) come out otherwise


def test_a_campaign_is_shown_beside_plates_chosen_without_a_model(small, tmp_path):
    campaign = Campaign.new(tmp_path / "plates", small)
    for _ in range(2):
        rows = campaign.ask(12, Ask(model="ridge", acquisition="greedy"))
        campaign.tell([{"id": r["id"], "gc": gc([r["sequence"]])[0]} for r in rows])
    found = json.loads((tmp_path / "plates/rounds/001/done.json").read_text())["expected"]["gc"]
    assert found["this plate"] > found["genetic algorithm"] > found["random"]
    assert found["random"] == pytest.approx(0.5, abs=0.15)  # half of all letters are G or C
    page = collect(campaign)
    assert "of a random plate" in page.batch_words
    assert [p.key for p in page.progress] == ["progress-gc"]
    assert "genetic algorithm" in page.progress[0].caption
    assert "genetic algorithm" in page.progress[0].svg


def test_the_first_page_is_there_before_any_batch(small, tmp_path):
    campaign = Campaign.new(tmp_path / "plates", small)
    assert "No batch has been proposed yet" in write_page(campaign).read_text()


def test_several_columns_are_not_played(tmp_path):
    from stochflow.design.simulate import simulate

    with pytest.raises(UserError, match="one measured column"):
        simulate(protein(tmp_path), gc, tmp_path / "dry", 1, QUICK)
