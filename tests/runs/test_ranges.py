"""Every setting has a range and a cost, comes back as it was, and is refused in one sentence where it cannot."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch

from stochflow import check_env, train
from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.files import memory
from stochflow.runs.experiment import evaluate_run, floor_of, open_run, resume, saved_figures
from stochflow.worlds.strings import Strings

SLIPS = """grid --lr inf|grid --lr nan|grid --lr 1e9|grid --lr 0|grid --lr=-1|grid --batch 0|grid --batch=-5|grid --seed=-1|grid --threads 100000
    grid --steps 99999999999999999999999|grid --seeds 10000000|grid --hidden 10000000000|grid --base inf|grid --side 0|grid --ndim=-1
    tfbind8 --floor 1000|tfbind8 --floor nan|tfbind8 --ramp inf|tfbind8 --ramp=-1|tfbind8 --beta 1e10|tfbind8 --beta nan|tfbind8 --stick 1.5
    peptide --ramp inf|bits --mode-seed 99999999999|bits --beta 1e300|gc --length 0|gc --targets nan|gc --betas 1e999|grid --explore 2
    grid --clip inf|grid --oracle-timeout nan|grid --gamma 0|grid --replay 1""".replace("\n", "|").split("|")


@pytest.mark.parametrize("words", [w.strip() for w in SLIPS])
def test_a_setting_outside_its_range_is_one_sentence(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words.split(), "--out", "run"]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("grid --seeds 100000 --hidden 100000", "--hidden"),
        ("grid --batch 100000000", "--batch"),
        ("bits --length 120 --batch 100000000", "--batch"),
        ("grid --side 3 --ndim 2 --replay 0.5 --replay-size 10000000000", "--replay-size"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_size(words, remedy, tmp_path, capfd):
    assert main(["train", *words.split(), "--out", str(tmp_path / "run")]) == 2
    said = capfd.readouterr().err
    for part in ("GB of memory", "are free", remedy):
        assert part in said


BEYOND = """bits --modes 300000|--modes
    bits --length 120 --modes 100000 --look 100000|--look
    gc --targets 0.1,0.2,0.3 --length 1000|--look
    gc --objective logvar --batch 100000|--batch
    grid --ndim 30 --side 30 --look 10 --objective sgfn-kl|--objective db
    grid --ndim 30 --side 30 --look 10 --objective flow-kl|--objective db
    grid --side 100 --objective subtb --batch 10000|--objective tb
    grid --stick 0.1 --dynamics thought --batch 1000000|--dynamics known
    bits --stick 0.1 --dynamics thought --batch 30000|--batch
    bits --stick 0.1 --bits 10 --dynamics neural|--dynamics known
    bits --stick 0.1 --bits 10 --dynamics tabular|--dynamics known
    bits --stick 0.1 --dynamics-off-pol --replay-size 10000000000|--replay-size
    bits --stick 0.1 --dynamics-off-pol --dynamics-sample-size 100000000|--dynamics-sample-size
    bits --stick 0.1 --bits 10 --objective stb-head --dynamics known|--look
    tfbind8 --seeds 1000|--seeds
    tfbind8 --hidden 10000|--hidden
    grid --side 1000 --seeds 100 --look 10|--batch
    grid --ndim 1 --side 1000000|--look
    peptide --net transformer --batch 20000|--batch
    peptide --net gru --batch 100000|--batch
    bits --net lstm --hidden 100000|--hidden""".split("\n")


@pytest.mark.parametrize("line", BEYOND)
def test_each_setting_that_grows_is_refused_before_memory_is_taken(line, tmp_path, capfd, monkeypatch):
    words, _, remedy = line.strip().partition("|")
    monkeypatch.setattr(memory, "free_memory", lambda: 4 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["train", *words.split(), "--steps", "2", "--quiet", "--out", str(tmp_path / "run")]) == 2
    said = capfd.readouterr().err
    assert re.fullmatch(r"stochflow: .* needs about .* GB of memory, but 4 GB are free: .*\n", said)
    assert remedy in said
    assert not (tmp_path / "run").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 3_000_000  # kilobytes


def test_tables_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 28)
    many = ",".join(["0.5"] * 100_000)
    for task, most, remedy in (
        ("bits", {"modes": 10**6}, "--modes"),
        ("gc", {"targets": many, "betas": many}, "--betas"),
    ):
        with pytest.raises(UserError, match=f"needs about .* GB of memory.*{remedy}"):
            train(task, **most)


ESTIMATED = """grid --ndim 30 --side 5 --objective flow-kl --batch 32 --look 100
    grid --side 40 --objective subtb --batch 1000 --look 100
    bits --stick 0.1 --dynamics thought --batch 300 --look 10 --net mlp
    bits --net transformer --batch 300 --look 10""".split("\n")


@pytest.mark.parametrize("line", ESTIMATED)
def test_no_more_is_estimated_than_is_taken(line, tmp_path, capfd, monkeypatch):
    """Or a run would be refused that fits."""
    words = ["train", *line.split(), "--steps", "2", "--quiet", "--out"]
    code = "import resource, sys; from stochflow.cli.commands import main; assert main(sys.argv[1:]) == 0; print('kB', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    made = subprocess.run([sys.executable, "-c", code, *words, tmp_path / "one"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    asked = []
    monkeypatch.setattr("stochflow.runs.cost.need", lambda bytes_, what, remedy: asked.append(bytes_))
    assert main([*words, str(tmp_path / "two")]) == 0
    assert 30e6 < max(asked) < int(made.stdout.split("kB")[1]) * 1024


def test_limits_of_control_groups_are_respected(tmp_path):
    group = tmp_path / "fs" / "jobs" / "mine"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/jobs/mine\n")
    for folder, most, used in ((group, "max", 0), (group.parent, 3 << 30, 1 << 30)):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
    (group.parent / "memory.stat").write_text("anon 5\ninactive_file 4096\nactive_file 512\nslab_reclaimable 64\n")
    assert memory._of_group(str(tmp_path / "fs"), str(tmp_path / "own")) == (2 << 30) + 4096 + 512 + 64
    first = tmp_path / "fs" / "memory" / "old"
    first.mkdir(parents=True)
    (tmp_path / "own").write_text("4:cpu,memory:/old\n7:pids:/x\n")
    (first / "memory.limit_in_bytes").write_text("1000\n")
    (first / "memory.usage_in_bytes").write_text("400\n")
    assert memory._of_group(str(tmp_path / "fs"), str(tmp_path / "own")) == 600
    found = memory.free_memory()
    assert found is not None
    assert 0 < found < 1 << 50
    with pytest.raises(UserError, match=r"a thing needs about 2 GB of memory, but 1 GB are free: shrink it"):
        memory.need(2 << 30, "a thing", "shrink it", 1 << 30)
    memory.need(1 << 30, "a thing", "shrink it", 1 << 30)


def test_long_strings_are_checked_in_bounded_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check_env(Strings("ACGT", 1000))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2_000_000  # kilobytes


OWN = """
import enum
from pathlib import Path
from stochflow import Task, strings_task

class Kind(enum.Enum):
    LOW = 1
    HIGH = 2

def make(table: Path = Path("a/b"), pair: tuple[int, float] = (1, 2.0), most: float = float("inf"), kind: Kind = Kind.LOW, plain=(3, 4)) -> Task:
    assert isinstance(table, Path) and isinstance(pair, tuple) and isinstance(kind, Kind), (table, pair, kind)
    assert isinstance(plain, tuple)
    seen.append((table, pair, most, kind, plain))
    return strings_task(lambda texts: [1.0 + t.count("A") for t in texts], "AC", 2)

seen = []

def odd(what=object()) -> Task:
    return make()
"""


def test_settings_come_back_as_they_were(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    (tmp_path / "round_trip.py").write_text(OWN)
    quick = {"steps": 1, "batch": 2, "hidden": 4}
    given = {"pair": (5, 6.5), "most": float("-inf")}
    assert main(["train", "round_trip:make", "--kind", "HIGH", "--pair", "5", "6.5", "--most", "inf", "--steps", "1", "--batch", "2", "--hidden", "4", "--quiet", "--out", "one"]) == 0  # fmt: skip
    train("round_trip:make", out="two", **given, **quick)
    module = sys.modules["round_trip"]
    for name, first in (("one", module.seen[0]), ("two", module.seen[-1])):
        json.loads((tmp_path / name / "config.json").read_text(), parse_constant=lambda word: pytest.fail(word))
        open_run(name, "round_trip:make")
        assert module.seen[-1] == first
    with pytest.raises(UserError, match=r"what = <object.*would not come back"):
        train("round_trip:odd", what=object(), out="three", **quick)
    assert not (tmp_path / "three").exists()
    sys.modules.pop("round_trip")


@pytest.mark.parametrize("wrong", [{"n": 0}, {"n": -1}, {"n": 2.5}, {"n": "3"}, {"n": True}, {"n": 2**70}, {"seed": -1}, {"seed": 2**70}, {"seed": None}], ids=str)  # fmt: skip
def test_python_refuses_in_the_same_words(wrong, tmp_path):
    result = train("grid", side=3, steps=1, batch=2, hidden=4, out=tmp_path / "run")
    with pytest.raises(UserError, match="whole number"):
        result.sample(**{"n": 2} | wrong)
    with pytest.raises(UserError, match="no device"):
        open_run(tmp_path / "run", device="gpu")


WRONG = [np.zeros(3), torch.zeros(2), 3, -1.5, ["grid"], {"task": "grid"}, b"grid", object()]


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    train("grid", side=3, steps=1, batch=2, hidden=4, out=path)
    return path


@pytest.mark.parametrize("wrong", WRONG, ids=lambda x: type(x).__name__)
def test_what_is_no_task_is_refused_wherever_one_is_given_again(wrong, a_run):
    for call in (open_run, resume, evaluate_run):
        with pytest.raises(UserError, match=r"task is .* must be a Task, or the name"):
            call(a_run, task=wrong)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda x: type(x).__name__)
def test_whatever_is_given_python_refuses_in_one_sentence(wrong, a_run):
    calls = {
        "out": lambda: train("grid", side=3, out=wrong),
        "on_progress": lambda: train("grid", side=3, on_progress=wrong),
        "on_start": lambda: resume(a_run, on_start=wrong),
        "track": lambda: resume(a_run, track=wrong),
        "device": lambda: open_run(a_run, device=wrong),
        "config": lambda: floor_of(wrong),
        "condition": lambda: next(open_run(a_run).sample(1, 0, wrong)),
    } | {f"path{n}": lambda f=f: f(wrong) for n, f in enumerate((open_run, resume, evaluate_run, saved_figures))}
    for name, call in calls.items():
        with pytest.raises(UserError, match=rf"^{name.rstrip('0123')} is .*must be"):
            call()


@pytest.mark.parametrize("name", ["\ud800", "a\0b"], ids=ascii)
def test_a_folder_that_cannot_be_named_is_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--out") as found:
        train("grid", side=3, steps=2, batch=2, hidden=4, out=name)
    assert str(found.value).isprintable()
