"""The commands that look at runs, as a user types them."""

from __future__ import annotations

import csv
import io
import json

import pytest

from stochflow.cli.commands import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small run over strings with noise, two seeds."""
    path = tmp_path_factory.mktemp("runs") / "mine"
    flags = "--stick 0.25 --seeds 2 --steps 30 --batch 32 --hidden 8 --log-every 10 --eval-every 10 --save-every 10 --device cpu"
    assert main(["train", "tfbind8", *flags.split(), "--quiet", "--out", str(path)]) == 0
    return path


def test_the_log_holds_every_seed_and_the_law_is_there(trained):
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [len(r["seeds"]["loss"]) for r in rows] == [2, 2, 2]
    assert [len(r["seeds"]["tv"]) for r in rows] == [2, 2, 2]
    assert all(
        0 <= r["band_low"] <= r["band_high"] <= 1 and 1 <= r["entropy_ratio"] <= 2 and 0 < r["ess"] <= 1 for r in rows
    )
    assert (trained / "law.npz").exists()


def test_report(trained, capsys):
    assert main(["report", str(trained)]) == 0
    assert capsys.readouterr().out.strip() == str(trained / "report.html")
    text = (trained / "report.html").read_text()
    assert text.count("<figure") >= 10
    assert "Entropy band" in text
    assert main(["report"]) == 2
    assert main(["report", str(trained / "nowhere")]) == 2


def test_compare(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    flags = "--stick 0.25 --seeds 2 --steps 10 --batch 32 --hidden 8 --log-every 10 --device cpu --quiet"
    assert main(["train", "tfbind8", *flags.split(), "--out", str(other)]) == 0
    capsys.readouterr()
    assert main(["compare", str(trained), str(other)]) == 0
    assert "too few to tell a difference from noise" in capsys.readouterr().out
    assert (tmp_path / "compare.html").exists()
    assert main(["compare", str(trained)]) == 2


def test_sample_makes_a_shortlist(trained, tmp_path, capsys):
    command = ["sample", str(trained), "-n", "500", "--unique", "--min-distance", "3", "--top", "5", "--simulate", "50"]
    assert main(command) == 0
    text = capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [r["id"] for r in rows] == [f"design_{i:04d}" for i in range(1, 6)]
    assert all(
        sum(a != b for a, b in zip(x["sequence"], y["sequence"], strict=True)) >= 3
        for x in rows
        for y in rows
        if x is not y
    )
    made = [float(r["made_score"]) for r in rows]
    assert made == sorted(made, reverse=True)
    assert main(command) == 0
    assert capsys.readouterr().out == text  # the same seed, the same list
    assert main([*command, "--out", str(tmp_path / "short.fasta")]) == 0
    assert (tmp_path / "short.fasta").read_text().startswith(">design_0001 score=")


def test_findings_are_told_while_it_trains(tmp_path, capsys):
    flags = "--stick 0.25 --dynamics-lr 1e-7 --side 4 --steps 210 --eval-every 205 --log-every 50 --batch 16 --hidden 8 --device cpu"
    assert main(["train", "grid", *flags.split(), "--out", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count("dynamics not learned (step") == 1


def test_a_tracker_that_is_not_installed_is_told(tmp_path, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["train", "grid", "--steps", "2", "--track", "wandb", "--out", str(tmp_path / "run")]) == 2
    assert "stochflow[track]" in capsys.readouterr().err


def test_watch_refuses_what_is_no_run(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err


def test_every_sample_has_reward_log_probability_and_mode(trained, capsys):
    """Without a wish nothing is sorted or left out; the mode is the nearest one of the report's, with its number."""
    from stochflow.law.modes import families
    from stochflow.look.report import RunFiles

    assert main(["sample", str(trained), "-n", "300"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 300
    assert list(rows[0]) == ["id", "sequence", "score", "log_reward", "log_pf", "mode"]
    designs = RunFiles.read(trained).designs
    heads = [
        designs[h]["sequence"]
        for h in families([d["sequence"] for d in designs], [float(d["score"]) for d in designs])[0]
    ]
    far = [[sum(a != b for a, b in zip(r["sequence"], h, strict=True)) for h in heads] for r in rows]
    assert [int(r["mode"]) for r in rows] == [1 + f.index(min(f)) for f in far]
    assert len({r["mode"] for r in rows}) > 1
    assert main(["sample", str(trained), "-n", "300", "--unique", "--format", "fasta"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(f"mode={rows[0]['mode']}")
