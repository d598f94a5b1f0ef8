"""Campaigns in their folders: from a CSV to a plate and back, by the command line and in Python."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from stochflow.cli.commands import main
from stochflow.design import page
from stochflow.design.campaign import About, Campaign
from stochflow.design.settings import Ask
from stochflow.design.store import read_csv
from stochflow.errors import UserError

QUICK = Ask(model="ridge")
rng = np.random.default_rng(0)
TEXTS = list(dict.fromkeys("".join(rng.choice(list("ACGT"), 6)) for _ in range(60)))


def score(text):
    """Linear with one pair that helps: 0.75 at most."""
    return (text.count("G") + 2 * ("CA" in text)) / 8


@pytest.fixture
def lab(tmp_path):
    file = tmp_path / "lab.csv"
    lines = [f"v{i},{t},{score(t) + 0.01 * (i % 3)}" for i, t in enumerate(TEXTS)]
    file.write_text("\n".join(["id,sequence,activity", *lines]) + "\n")
    return file


def measured(folder, rows, name="measured.csv"):
    file = folder / name
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, ["id", "activity"])
        writer.writeheader()
        writer.writerows({"id": r["id"], "activity": r.get("activity", score(r["sequence"]))} for r in rows)
    return file


def test_from_a_csv_to_a_plate_and_back_by_the_command_line(lab, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["design", "new", "plates", "--data", "lab.csv", "--value", "activity", "--maximise"]) == 0
    assert (
        main(
            [
                "design",
                "propose",
                "plates",
                "--batch",
                "24",
                "--model",
                "ridge",
                "--controls",
                "best",
                "--replicate",
                "2",
            ]
        )
        == 0
    )
    rows = read_csv(Path("plates/rounds/001/proposal.csv"))
    assert [r["well"] for r in rows[:2]] + [rows[-1]["well"]] == ["A1", "A2", "B12"]
    assert [r["role"] for r in rows[:4]] == ["control: best", "repeat", "repeat", "design"]
    designs = [r["sequence"] for r in rows if r["role"] == "design"]
    assert len(set(designs)) == 21
    assert not set(designs) & set(TEXTS)
    assert all("predicted activity" in r["reason"] for r in rows if r["role"] == "design")
    assert Path("plates/rounds/001/proposal.fasta").read_text().count(">") == 24
    measured(tmp_path, rows[:20])
    assert main(["design", "record", "plates", "measured.csv"]) == 0
    said = capsys.readouterr().out
    assert "20 values recorded" in said
    assert "4 proposed designs are still without a value" in said
    assert "lay in their 80 % interval" in said
    assert main(["design", "propose", "plates", "--batch", "8", "--model", "ridge", "--out", "next.csv"]) == 0
    assert "4 designs of earlier rounds have no value yet" in capsys.readouterr().out
    assert Path("next.fasta").exists()
    second = [r["sequence"] for r in read_csv(Path("next.csv"))]
    assert not set(second) & (set(TEXTS) | set(designs))
    assert main(["design", "status", "plates", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert [e["proposed"] for e in status["rounds"]] == [0, 24, 8]
    assert len(status["pending"]) == 12


def test_minimising_finds_the_other_end(lab, tmp_path):
    low = Campaign.new(tmp_path / "low", lab, About(minimise=True)).ask(10, QUICK)
    high = Campaign.new(tmp_path / "high", lab).ask(10, QUICK)
    assert np.mean([score(r["sequence"]) for r in low]) < np.mean([score(r["sequence"]) for r in high]) - 0.3


def test_a_small_batch_far_below_the_best_is_no_random_one(tmp_path):
    """Expected improvement over a value that the model cannot reach is too small for a float everywhere, and still has an order."""
    lines = [f"{t},{t.count('G') + 0.01 * (i % 3)}" for i, t in enumerate(TEXTS)]
    outlier = [f"AAAAA{c},{60 + i}" for i, c in enumerate("ACGT")]
    (tmp_path / "lab.csv").write_text("\n".join(["seq,activity", *lines, *outlier]) + "\n")
    campaign = Campaign.new(tmp_path / "plates", tmp_path / "lab.csv")
    campaign.ask(4, Ask(model="ridge", acquisition="ei"))
    expected = json.loads((tmp_path / "plates/rounds/001/done.json").read_text())["expected"]["activity"]
    assert expected["this plate"] > expected["genetic algorithm"]


def test_a_plate_close_to_what_is_known_is_full(tmp_path):
    """The best strings are far away; those one letter from the data, of which there are enough, must not be crowded out."""
    texts = [t for t in TEXTS if "G" not in t][:12]
    (tmp_path / "lab.csv").write_text("seq,y\n" + "".join(f"{t},{3 * t.count('C') + len(set(t))}\n" for t in texts))
    campaign = Campaign.new(tmp_path / "plates", tmp_path / "lab.csv")
    rows = campaign.ask(90, Ask(model="ridge", max_distance=1))
    assert len(rows) == 90
    assert {r["distance"] for r in rows} == {1}
    with pytest.raises(UserError, match="are more than 0 letters"):
        campaign.ask(4, Ask(model="ridge", max_distance=0))


def test_a_loop_in_python_improves(lab, tmp_path):
    campaign = Campaign.new(tmp_path / "plates", lab)
    begun = campaign.best()["activity"]["value"]
    for _ in range(3):
        rows = campaign.ask(12, QUICK)
        campaign.tell([{"id": r["id"], "activity": score(r["sequence"])} for r in rows])
    again = Campaign.open(tmp_path / "plates")
    assert again.best()["activity"]["value"] >= max(begun, 0.74)
    assert [e["measured"] for e in again.history()] == [len(TEXTS), 12, 12, 12]
    assert again.pending() == []


def test_a_round_keeps_what_it_was_made_from_and_repeats_itself(lab, tmp_path):
    a, b = Campaign.new(tmp_path / "a", lab), Campaign.new(tmp_path / "b", lab)
    assert a.ask(12, QUICK) == b.ask(12, QUICK)
    inputs = json.loads((tmp_path / "a/rounds/001/inputs.json").read_text())
    assert inputs["measured_files"] == ["0000.csv"]
    assert inputs["ask"]["model"] == "ridge"
    assert json.loads((tmp_path / "a/rounds/001/model.json").read_text())[0]["chosen"] == "ridge"
    assert a.ask(12, QUICK) != b.store.proposal(b.store.rounds()[0])  # the next round is another


def test_what_comes_back_odd_is_said_in_words(lab, tmp_path):
    campaign = Campaign.new(tmp_path / "plates", lab)
    rows = campaign.ask(8, QUICK)
    told = campaign.tell(
        [
            {"id": rows[0]["id"], "sequence": rows[0]["sequence"], "activity": 0.5},
            {"id": rows[0]["id"], "sequence": rows[0]["sequence"], "activity": 0.7},
            {"id": rows[1]["id"], "sequence": "", "activity": "failed"},
            {"id": "", "sequence": "AAAAAA", "activity": 0.75},
        ]
    )
    assert (told.values, told.failed, told.extra, told.repeats, told.open) == (3, 1, 1, 1, 6)
    assert campaign.failed() == [rows[1]["sequence"]]
    found = campaign.measured()
    assert found.values[found.sequences.index(rows[0]["sequence"]), 0] == pytest.approx(0.6)
    for bad, said in [
        ([{"id": "r01-999", "activity": 1}], "which no round proposed"),
        ([{"id": rows[2]["id"], "sequence": "AAAAAA", "activity": 1}], "it was ordered as"),
        ([{"id": rows[2]["id"], "activity": "0.5 nM"}], "plain number"),
        (
            [{"id": rows[2]["id"], "activity": 1, "made": "ACGTNA"}],
            'line 2 of table.csv, column "made", has the letter',
        ),
        ([{"id": rows[2]["id"], "other": 1}], "no column"),
        ([{"name": "x", "activity": 1}], "neither an id nor a sequence"),
    ]:
        with pytest.raises(UserError, match=said):
            campaign.tell(bad)
    assert len(campaign.store.recordings()) == 2  # nothing of the bad ones was kept
    file = measured(tmp_path, rows[2:4])
    campaign.tell(file)
    with pytest.raises(UserError, match="recorded before"):
        campaign.tell(file)


def test_a_late_recording_tells_of_the_round_that_it_belongs_to(lab, tmp_path, capsys):
    campaign = Campaign.new(tmp_path / "plates", lab)
    early, late = campaign.ask(8, QUICK), campaign.ask(8, QUICK)
    assert main(["design", "record", str(campaign.path), str(measured(tmp_path, early))]) == 0
    assert "activity, round 1: " in capsys.readouterr().out
    both = measured(tmp_path, [*early[:1], *late], "both.csv")
    assert main(["design", "record", str(campaign.path), str(both)]) == 0
    said = capsys.readouterr().out
    assert "round 1: " in said
    assert "of 8 measured designs" in said.split("round 2: ")[1]


def test_letters_in_lower_case_are_the_campaigns_own(tmp_path):
    lines = [f"{t.lower()},{score(t) + 0.01 * (i % 3)}" for i, t in enumerate(TEXTS)]
    (tmp_path / "lab.csv").write_text("\n".join(["seq,activity", *lines]) + "\n")
    upper = Campaign.new(tmp_path / "upper", tmp_path / "lab.csv", About(wild_type="aacgta"))
    assert upper.settings.wild_type == "AACGTA"
    lower = Campaign.new(tmp_path / "lower", tmp_path / "lab.csv", About(alphabet="acgt"))
    text = lower.ask(3, QUICK)[0]["sequence"]
    assert lower.tell([{"sequence": text, "activity": 0.5}]).extra == 0
    assert upper.tell([{"sequence": text, "activity": 0.5}]).extra == 1
    assert text.upper() in upper.measured().sequences


def test_intervals_are_for_one_measurement_where_the_data_are_means_of_repeats(tmp_path):
    """Four repeats with a large error: the mean hides half of it, and single new values must still lie inside."""
    dice = np.random.default_rng(2)
    lines = [f"{t},{t.count('G') + 2 * dice.normal():.4f}" for t in TEXTS for _ in range(4)]
    (tmp_path / "lab.csv").write_text("\n".join(["seq,activity", *lines]) + "\n")
    campaign = Campaign.new(tmp_path / "plates", tmp_path / "lab.csv")
    rows = campaign.ask(90, QUICK)
    figures = campaign.model_figures()[0]
    assert figures["repeat_noise"] == pytest.approx(2, rel=0.2)
    values = [{"id": r["id"], "activity": r["sequence"].count("G") + 2 * dice.normal()} for r in rows]
    campaign.tell(values)
    assert 0.7 < campaign.history()[1]["columns"]["activity"]["covered80"] < 0.95


def test_values_of_what_was_made_count_for_what_was_made(lab, tmp_path):
    campaign = Campaign.new(tmp_path / "plates", lab)
    rows = campaign.ask(4, QUICK)
    campaign.tell([{"id": rows[0]["id"], "made": "GGGGGG", "activity": 0.75}])
    assert "GGGGGG" in campaign.measured().sequences
    assert rows[0]["sequence"] not in campaign.measured().sequences
    assert rows[0]["sequence"] not in campaign.pending()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--alphabet", "AACGT"], "each once"),
        (["--insertion", "2"], "rate of insertions is 2.0"),
        (["--noise", "slip:1.5"], "must give a probability"),
        (["--value", "activity", "--threshold", "activity=nan"], "must be NAME=NUMBER"),
        (["--threshold", "activity=1"], "no column is named yet: say --value activity as well"),
        (["--length", "6", "20000"], "from 1 to 10000"),
        (["--length", "9", "6"], "the smaller one first"),
        (["--wild-type", "ACGU"], "letters that are not among ACGT"),
    ],
)
def test_what_a_campaign_cannot_be_made_with_is_named(lab, tmp_path, words, said, capsys):
    assert main(["design", "new", str(tmp_path / "plates"), "--data", str(lab), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "plates" / "campaign.json").exists()


def test_what_a_wild_type_is_and_is_not_is_said(lab, tmp_path, capsys):
    plates = str(tmp_path / "plates")
    assert main(["design", "new", plates, "--data", str(lab), "--wild-type", "GGGGGGG"]) == 0
    assert "the wild type has 7 letters, but designs will have 6" in capsys.readouterr().out
    row, best = Campaign.open(plates).ask(4, Ask(model="ridge", controls=("wild-type", "best")))[:2]
    assert row["reason"] == "control: wild-type: not measured so far; later rounds can be compared"
    assert best["reason"] == "control: best: measured before, so rounds can be compared"


def test_long_designs_can_be_told_apart_on_the_terminal(tmp_path, capsys):
    dice = np.random.default_rng(0)
    texts = ["A" * 90 + "".join(dice.choice(list("ACGT"), 5)) for _ in range(40)]
    (tmp_path / "lab.csv").write_text("seq,y\n" + "".join(f"{t},{t.count('G')}\n" for t in dict.fromkeys(texts)))
    plates = str(tmp_path / "plates")
    assert main(["design", "new", plates, "--data", str(tmp_path / "lab.csv")]) == 0
    assert main(["design", "propose", plates, "--batch", "4", "--model", "ridge", "--sampler", "search"]) == 0
    ends = [row["sequence"][-25:] for row in Campaign.open(plates).store.proposal(Path(plates) / "rounds" / "001")]
    said = capsys.readouterr().out
    assert all(f"{end}  high expected gain" in said for end in ends)
    assert main(["design", "status", plates]) == 0
    assert "1 round proposed" in capsys.readouterr().out


def test_a_word_that_python_gives_is_checked_too(lab, tmp_path):
    campaign = Campaign.new(tmp_path / "plates", lab)
    for how, said in [
        (Ask(sampler="exakt"), 'did you mean "exact"'),
        (Ask(model="rigde"), 'did you mean "ridge"'),
        (Ask(kappa=-1), "kappa"),
        (Ask(controls="best"), "names one by one"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(UserError, match=said):
            campaign.ask(4, how)
    with pytest.raises(UserError, match="whole number"):
        campaign.ask("4", QUICK)  # type: ignore[arg-type]
    assert campaign.store.rounds() == []
    for nothing in ([], None, 5, ["ACGT"]):
        with pytest.raises(UserError, match="no rows to read"):
            campaign.tell(nothing)
    (tmp_path / "odd.csv").write_text(lab.read_text().replace("activity", "status"))
    with pytest.raises(UserError, match='cannot be called "status"'):
        Campaign.new(tmp_path / "odd", tmp_path / "odd.csv")


def test_what_is_known_of_repeats_and_directions_is_said(tmp_path, capsys):
    lines = [f"{t},{score(t) + shift}" for t in TEXTS[:20] for shift in (0, 0.1)]
    (tmp_path / "lab.csv").write_text("\n".join(["seq,activity", *lines]) + "\n")
    assert main(["design", "new", str(tmp_path / "plates"), "--data", str(tmp_path / "lab.csv")]) == 0
    said = capsys.readouterr().out
    assert "20 of them were measured more than once (taken as their mean)" in said
    assert "standard deviation of 0.0707" in said
    assert "say --minimise where less is" in said


def test_a_campaign_that_was_killed_while_it_was_made_is_made_again(lab, tmp_path):
    """Before its settings have their name it is no campaign; what was half written is no other file."""
    Campaign.new(tmp_path / "plates", lab)
    (tmp_path / "plates" / "campaign.json").rename(tmp_path / "plates" / "campaign.json.tmp")
    (tmp_path / "plates" / "rules.toml.tmp").write_text("half")
    assert len(Campaign.new(tmp_path / "plates", lab).measured().sequences) > 0
    (tmp_path / "plates" / "campaign.json").unlink()
    (tmp_path / "plates" / "notes.tmp").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        Campaign.new(tmp_path / "plates", lab)


def test_the_folder_is_refused_where_it_is_not_one(lab, tmp_path):
    Campaign.new(tmp_path / "plates", lab)
    with pytest.raises(UserError, match="already holds a campaign"):
        Campaign.new(tmp_path / "plates", lab)
    with pytest.raises(UserError, match="holds other files"):
        Campaign.new(tmp_path, lab)
    with pytest.raises(UserError, match="design new"):
        Campaign.open(tmp_path / "elsewhere")
    file = tmp_path / "plates" / "campaign.json"
    kept = json.loads(file.read_text())
    for change, said in [({"format": 99}, "upgrade"), ({"evil": 1}, "not known"), ({"columns": 3}, "cannot be read")]:
        file.write_text(json.dumps(kept | change))
        with pytest.raises(UserError, match=said):
            Campaign.open(tmp_path / "plates")


@pytest.mark.parametrize(
    "change",
    [
        {"columns": [{"name": "activity", "goal": "explode"}]},
        {"columns": [{"name": "activity", "weight": "a"}]},
        {"alphabet": 7},
        {"max_length": 10**9},
        {"noise": {"kind": "slip", "rate": 7}},
        {"noise": {"kind": "table", "table": [[1, 0], [0, 1]]}},
        {"noise": "os:system"},
        {"wild_type": "<script>"},
        {"seed": None},
    ],
    ids=str,
)
def test_a_strangers_settings_are_held_to_their_types(lab, tmp_path, change):
    Campaign.new(tmp_path / "plates", lab)
    file = tmp_path / "plates" / "campaign.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError):
        Campaign.open(tmp_path / "plates")


def test_a_strangers_rounds_are_read_as_data(lab, tmp_path):
    from stochflow.design.page import write_page

    campaign = Campaign.new(tmp_path / "plates", lab)
    campaign.ask(4, QUICK)
    folder = tmp_path / "plates/rounds/001"
    proposal = (folder / "proposal.csv").read_text()
    (folder / "proposal.csv").write_text(proposal.replace("r01-001", "<script>alert(1)</script>"))
    assert "<script" not in write_page(campaign).read_text()
    for name, text in [
        ("model.json", '[{"column": 3}]'),
        ("model.json", "{"),
        ("proposal.csv", "a,b\n1,2\n"),
        ("proposal.csv", f"{proposal.splitlines()[0]}\n{'x,' * 40}\n"),
    ]:
        kept = (folder / name).read_text()
        (folder / name).write_text(text)
        with pytest.raises(UserError, match=r"restore"):
            write_page(Campaign.open(tmp_path / "plates"))
        if name == "proposal.csv":
            with pytest.raises(UserError, match=r"restore"):
                campaign.pending()
        (folder / name).write_text(kept)


def test_two_writers_do_not_meet(lab, tmp_path):
    from stochflow.design.store import locked

    campaign = Campaign.new(tmp_path / "plates", lab)
    with locked(campaign.path):
        with pytest.raises(UserError, match="another process is writing the campaign"):
            campaign.ask(4, QUICK)
        (campaign.path / ".lock").unlink()
        with pytest.raises(UserError, match="another process is writing the campaign"):
            campaign.ask(4, QUICK)


KILLED = """
import sys
from stochflow.design.campaign import Campaign
from stochflow.design.settings import Ask
campaign = Campaign.open(sys.argv[1])
print("begun", flush=True)
while True:
    rows = campaign.ask(4, Ask(model="ridge", min_distance=1))
    campaign.tell([{"id": r["id"], "activity": float(len(r["id"]))} for r in rows])
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(lab, tmp_path):
    campaign = Campaign.new(tmp_path / "plates", lab)
    delays = np.random.default_rng(1).uniform(0.0, 0.6, 5)
    for delay in delays:
        running = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(campaign.path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert running.stdout is not None
        running.stdout.readline()
        time.sleep(delay)
        running.send_signal(signal.SIGKILL)
        running.wait()
        again = Campaign.open(campaign.path)
        rounds, recordings = len(again.store.rounds()), len(again.store.recordings())
        assert rounds in (recordings - 1, recordings)
        for folder in again.store.rounds():
            assert len(again.store.proposal(folder)) == 4
        open_ = again.pending()
        assert len(open_) == 4 * (rounds - recordings + 1)
    again.tell(
        [{"sequence": s, "activity": 0.1} for s in again.pending()] or [{"sequence": "GGGGGG", "activity": 0.75}]
    )
    again.ask(4, QUICK)
    assert again.pending()


def test_where_lengths_vary_a_design_of_the_data_s_length_is_counted_in_edits(tmp_path):
    """One letter less here and one more there shifts what lies between, but is two edits."""
    wild = "ACGTTGCAACTG"
    texts = [wild[:i] + c + wild[i + 1 :] for i in range(12) for c in "ACGT" if c != wild[i]]
    (tmp_path / "lab.csv").write_text(
        "seq,y\n" + "".join(f"{t},{t.count('G') + i % 3 / 9}\n" for i, t in enumerate(texts))
    )
    (tmp_path / "rules.toml").write_text("[edits]\nmost = 2\nindels = true\n")
    about = About(lengths=(11, 13), wild_type=wild, rules=str(tmp_path / "rules.toml"))
    rows = Campaign.new(tmp_path / "plates", tmp_path / "lab.csv", about).ask(300, Ask(model="ridge", min_distance=0))
    same = [row["sequence"] for row in rows if len(row["sequence"]) == 12]
    assert any(sum(a != b for a, b in zip(wild, text, strict=True)) > 2 for text in same)
    for row in rows:
        assert row["distance"] <= 3
        assert row["edits"].split(" edit")[0] in ("1", "2") or len(row["edits"].split()) <= 2


def test_a_table_of_an_earlier_campaign_does_not_answer_for_its_designs(tmp_path):
    lines = [f"r01-{i:03d},{t},{score(t) + 0.01 * (i % 3)}" for i, t in enumerate(TEXTS, 1)]
    (tmp_path / "lab.csv").write_text("\n".join(["id,peptide,Activity", *lines]) + "\n")
    campaign = Campaign.new(tmp_path / "plates", tmp_path / "lab.csv")
    rows = campaign.ask(5, QUICK)
    assert campaign.pending() == [r["sequence"] for r in rows]
    assert not any(d.measured for d in page.collect(campaign).designs)
    told = campaign.tell([{"peptide": r["sequence"], "activity": 0.5} for r in rows[:2]])  # the data's own column
    assert (told.values, told.extra, told.open) == (2, 0, 3)
    assert [d.measured for d in page.collect(campaign).designs] == ["0.5", "0.5", "", "", ""]


def test_a_well_recorded_twice_is_one_well(lab, tmp_path):
    campaign = Campaign.new(tmp_path / "plates", lab)
    rows = campaign.ask(3, QUICK)
    campaign.tell([{"id": r["id"], "activity": "failed"} for r in rows[:2]])
    campaign.tell([{"id": rows[0]["id"], "activity": v} for v in (0.3, 0.4)])
    entry = campaign.history()[1]
    assert (entry["measured"], entry["failed"], campaign.pending()) == (1, 1, [rows[2]["sequence"]])
    assert [d.measured for d in page.collect(campaign).designs] == ["0.4", "failed", ""]


def test_a_table_and_rules_may_be_python_values(lab, tmp_path):
    from stochflow.design import About, Campaign
    from stochflow.worlds.rules import GC, EditBudget, Rules

    rows = [{"sequence": t, "activity": score(t) + 0.01 * (i % 3)} for i, t in enumerate(TEXTS)]
    rules = Rules(GC(0.3, 0.7), EditBudget("ACGTAC", 2))
    made = Campaign.new(tmp_path / "plates", rows, About(rules=rules))
    assert "strings meet the rules" in made.notes[-1]
    found = Campaign.open(tmp_path / "plates")
    assert Rules.read(found.path / "rules.toml") == rules
    assert all(rule.meets(d["sequence"], "ACGT") for d in found.ask(6, QUICK) for rule in rules)
    with pytest.raises(UserError, match=r"about is .*such as About"):
        Campaign.new(tmp_path / "other", lab, {"minimise": True})
    with pytest.raises(UserError, match=r"rules is .*such as Rules"):
        Campaign.new(tmp_path / "other", lab, About(rules=[GC(0.3, 0.7)]))
    with pytest.raises(UserError, match=r"how is .ridge.*such as Ask"):
        found.ask(6, "ridge")
    assert not (tmp_path / "other").exists()


def test_tables_of_any_shape_are_recorded(lab, tmp_path):
    import pandas

    campaign = Campaign.new(tmp_path / "plates", pandas.read_csv(lab))
    ids = [r["id"] for r in campaign.ask(4, QUICK)]
    frame = pandas.DataFrame({"id": ids[:3], "activity": [0.1, None, 0.3]}).set_index("id")
    assert campaign.tell(frame).values == 2
    assert campaign.tell({"id": ids[3:], "activity": [0.4]}).values == 1
    with pytest.raises(UserError, match="no rows to read"):
        campaign.tell({ids[3]: 0.4})
