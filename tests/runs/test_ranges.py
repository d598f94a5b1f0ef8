"""Every setting has a range and a cost, comes back as it was, and is refused in one sentence where it cannot."""

from __future__ import annotations

import json
import sys

import pytest

from stochflow import check_env, train
from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.files import memory
from stochflow.runs.experiment import open_run
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


def test_limits_of_control_groups_are_respected(tmp_path):
    group = tmp_path / "fs" / "jobs" / "mine"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/jobs/mine\n")
    for folder, most, used in ((group, "max", 0), (group.parent, 3 << 30, 1 << 30)):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
    (group.parent / "memory.stat").write_text("anon 5\ninactive_file 4096\n")
    assert memory._of_group(str(tmp_path / "fs"), str(tmp_path / "own")) == (2 << 30) + 4096
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
    import resource

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
