"""Bad input: what is given, the exit code, the words the one sentence must contain, and that no file was changed."""

from __future__ import annotations

import sys

import pytest

from stochflow.cli.commands import main

OWN = """
import torch
from stochflow import Channel, Grid, Exact, Linear, Power, Task, strings_task

def nan(length: int = 3):
    return strings_task(lambda texts: [float("nan")] * len(texts), "ACGT", length)

def short():
    return strings_task(lambda texts: [1.0], "ACGT", 3)

def partial():
    known = {"AAA": 1.0}
    return strings_task(lambda texts: [known[t] for t in texts], "ACGT", 3)

def raises():
    return strings_task(lambda texts: 1 / 0, "ACGT", 3)

def infinite():
    return Task(Grid(2, 4), Exact(), lambda state: state.sum(-1).float(), lambda score, state, step: score.log())

def shape():
    return Task(Grid(2, 4), Exact(), lambda state: torch.ones(state.shape), Power())

class Crooked(Grid):
    def unstep(self, state, move):
        return state

def crooked():
    return Task(Crooked(2, 4), Exact(), lambda state: torch.ones(state.shape[:-1]), Linear())

class Leaky(Channel):
    def log_probs(self, state, legal, action, memory=None):
        return torch.where(legal, -3.0, -1e9)

def leaky():
    return Task(Grid(2, 4), Leaky(), lambda state: torch.ones(state.shape[:-1]), Linear())

def nothing():
    return 3

def broken():
    raise RuntimeError("no data today")

def clash(batch: int = 3):
    return nan()

def many(*words):
    return nan()
"""

TABLE = {
    # name: (arguments, words of the sentence); {tmp} is the folder
    "unknown command": (["trian", "grid"], ["trian", 'did you mean "train"', "--help"]),
    "unknown task": (["train", "gird"], ["gird", 'did you mean "grid"', "stochflow tasks"]),
    "unknown task for floor": (["floor", "tfbind9"], ["tfbind9", "tfbind8"]),
    "flags before the task": (["train", "--steps", "5", "grid"], ["task comes first"]),
    "a side of 1": (["train", "grid", "--side", "1"], ["side is 1", "between 2 and 1000000"]),
    "no dimension": (["train", "grid", "--ndim", "0"], ["ndim", "0"]),
    "a negative batch": (["train", "grid", "--batch", "-4"], ["--batch", "-4", "at least 1"]),
    "no steps": (["train", "grid", "--steps", "0"], ["--steps", "0"]),
    "a learning rate of zero": (["train", "grid", "--lr", "0"], ["--lr", "above 0"]),
    "a replay buffer below the batch": (
        ["train", "grid", "--replay", "0.5", "--replay-size", "8"],
        ["--replay-size", "8", "larger"],
    ),
    "alpha above 1": (["train", "grid", "--stick", "1.5"], ["1.5", "between 0 and 1"]),
    "alpha below 0": (["floor", "tfbind8", "--stick", "-0.1"], ["-0.1", "between 0 and 1"]),
    "a base of zero": (["train", "grid", "--base", "0"], ["base", "above 0"]),
    "beta of zero": (["train", "tfbind8", "--beta", "0"], ["beta", "above 0"]),
    "a table that is not there": (["train", "tfbind8", "--table", "SIX7"], ["SIX7"]),
    "a confusion table that is not stochastic": (
        ["train", "grid", "--noise", "confusion", "--confusion", "{tmp}/rows.csv"],
        ["row 2 of 2", "0.9", "sum to 1"],
    ),
    "a confusion table of the wrong size": (
        ["train", "grid", "--noise", "confusion", "--confusion", "{tmp}/wide.csv"],
        ["3 rows", "2 moves"],
    ),
    "a confusion table that is not there": (
        ["train", "grid", "--noise", "confusion", "--confusion", "{tmp}/none.csv"],
        ["none.csv"],
    ),
    "a confusion table of words": (
        ["train", "grid", "--noise", "confusion", "--confusion", "{tmp}/words.csv"],
        ["words.csv"],
    ),
    "no confusion table": (["train", "grid", "--noise", "confusion"], ["--confusion"]),
    "an oracle returning NaN": (["train", "own:nan"], ["NaN", "sample 0", "finite score"]),
    "too few scores": (["train", "own:short"], ["1 scores", "one score each"]),
    "an oracle that knows a part": (["train", "own:partial"], ["no score for", "every sequence"]),
    "an oracle that raises": (["train", "own:raises"], ["oracle failed", "ZeroDivisionError"]),
    "a log-reward that is not finite": (["train", "own:infinite"], ["reward", "inf", "finite"]),
    "an oracle of the wrong shape": (["train", "own:shape"], ["oracle", "shape", "one number"]),
    "masks and unstep that disagree": (["train", "own:crooked"], ["unstep"]),
    "a channel that loses mass": (["train", "own:leaky"], ["sum"]),
    "a function that returns no task": (["train", "own:nothing"], ["int", "not a Task"]),
    "a function that fails": (["train", "own:broken"], ["no data today"]),
    "a function that is not there": (["train", "own:brokn"], ["brokn", 'did you mean "broken"']),
    "a module that is not there": (["train", "owm:nan"], ["owm", "folder"]),
    "a parameter that is a flag already": (["train", "own:clash"], ["batch", "rename"]),
    "a parameter that cannot be a flag": (["train", "own:many"], ["*words", "keyword"]),
    "an --out that holds a run": (
        ["train", "grid", "--out", "{tmp}/run"],
        ["already holds a run", "stochflow resume", "another --out"],
    ),
    "an --out that is a file": (["train", "grid", "--out", "{tmp}/own.py"], ["is a file", "another --out"]),
    "a folder that is not a run": (["eval", "{tmp}"], ["not a run folder", "stochflow train"]),
    "a folder that is not there": (["sample", "{tmp}/gone"], ["does not exist"]),
    "resuming what is no run": (["resume", "{tmp}", "--steps", "9"], ["not a run folder"]),
    "fewer steps than done": (["resume", "{tmp}/run", "--steps", "2"], ["already done 3 steps", "--steps 2", "larger"]),
    "no sample": (["sample", "{tmp}/run", "-n", "0"], ["-n is 0", "at least one"]),
    "FASTA of a grid": (["sample", "{tmp}/run", "--format", "fasta"], ["FASTA", "--format csv"]),
    "every checkpoint damaged": (["eval", "{tmp}/damaged"], ["damaged", "step-00000003.safetensors"]),
    "an unknown key in config.json": (["eval", "{tmp}/foreign"], ["stepz", 'did you mean "steps"']),
    "a config.json that is not JSON": (["eval", "{tmp}/torn"], ["config.json", "not JSON"]),
    "a --config that is not there": (["train", "--config", "{tmp}/no.json"], ["no.json", "no file"]),
    "a --config for another task": (["train", "tfbind8", "--config", "{tmp}/run/config.json"], ["grid", "tfbind8"]),
    "no GPU": (["train", "grid", "--device", "cuda"], ["--device cuda", "--device cpu"]),
    "something after tasks": (["tasks", "grid"], ["takes nothing"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A place with a user's module, tables, one small run, and runs that came to harm."""
    import shutil

    place = tmp_path_factory.mktemp("place")
    (place / "own.py").write_text(OWN)
    (place / "rows.csv").write_text("0.5,0.5\n0.5,0.4\n")
    (place / "wide.csv").write_text("1,0,0\n0,1,0\n0,0,1\n")
    (place / "words.csv").write_text("yes,no\nno,yes\n")
    small = ["--steps", "3", "--batch", "4", "--hidden", "4", "--side", "3", "--quiet"]
    assert main(["train", "grid", "--out", str(place / "run"), *small]) == 0
    for harmed in ("damaged", "foreign", "torn"):
        shutil.copytree(place / "run", place / harmed)
    for file in (place / "damaged" / "checkpoints").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    config = place / "foreign" / "config.json"
    config.write_text(config.read_text().replace('"steps"', '"stepz"'))
    (place / "torn" / "config.json").write_text('{"task": ')
    return place


def snapshot(place):
    return {p: p.read_bytes() for p in place.rglob("*") if p.is_file() and "__pycache__" not in p.parts}


@pytest.mark.parametrize("name", TABLE)
def test_bad_input_gets_one_clear_sentence(name, folder, monkeypatch, capfd):
    import torch

    if name == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    words, expected = TABLE[name]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own", raising=False)
    before = snapshot(folder)
    code = main([w.format(tmp=folder) for w in words])
    said = capfd.readouterr().err
    assert code == 2, said
    sentence = said.strip().splitlines()[-1]
    assert sentence.startswith("stochflow: ")
    assert "Traceback" not in said
    for word in expected:
        assert word.format(tmp=folder) in sentence
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "grid", "--step", "4"], "--steps"),
        (["train", "grid", "--steps", "four"], "four"),
        (["train", "grid", "--objective", "tbb"], "tbb"),
        (["train", "grid", "--length", "4"], "--length"),
        (["eval"], "PATH"),
    ],
)
def test_flags_that_do_not_parse_exit_2_as_well(words, expected, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert expected in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
