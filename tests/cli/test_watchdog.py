"""A long computation says what it is at, and ends within a second of Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from stochflow.cli import watchdog
from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.files import memory
from stochflow.files.progress import counted, stage, stages
from stochflow.runs.cost import check_sample
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

LATE = 5.0  # seconds; the promise is one, and a busy machine has others to serve
STUCK = """
import signal, sys, torch
from stochflow.cli.watchdog import Watchdog
if sys.argv[1] == "training":
    signal.signal(signal.SIGINT, lambda number, frame: None)
with Watchdog():
    print("begun", flush=True)
    torch.linalg.svd(torch.rand(8000, 8000))
"""


def stopped(words: list[str], *after: float) -> tuple[int, str, float]:
    """The exit code, stderr, and how long it took after the last of some signals, each so many seconds after the last."""
    made = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if words[0] == "-c":
        made.stdout.readline()
    for seconds in after:
        time.sleep(seconds)
        made.send_signal(signal.SIGINT)
    begun = time.monotonic()
    _, said = made.communicate(timeout=60)
    return made.returncode, said, time.monotonic() - begun


def test_what_is_at_hand_is_said_where_nothing_else_is(capfd, monkeypatch):
    monkeypatch.setattr(watchdog, "FIRST", 0.0)
    assert main(["floor", "grid", "--ndim", "1", "--side", "60000"]) == 0
    said = capfd.readouterr().err.splitlines()
    assert said
    assert all(line.startswith("stochflow: still at it after ") for line in said)
    assert any(" of 60,000" in line for line in said)
    assert stages() == ""
    with watchdog.Watchdog(quiet=True):
        time.sleep(1.2)
    assert capfd.readouterr().err == ""


def test_stages_are_told_from_the_outermost():
    with stage("training, step", 1000, lambda: 7):
        for _ in counted(range(2), "decisions of a batch", 2):
            seen = stages()
        assert seen == "training, step, 7 of 1,000: decisions of a batch, 1 of 2"
    with pytest.raises(ZeroDivisionError), stage("a look"):
        _ = 1 / 0
    assert stages() == ""


def test_outside_the_main_thread_signals_are_left_alone():
    def run():
        with watchdog.Watchdog() as made:
            found.append(made.thread)

    found: list[object] = []
    other = threading.Thread(target=run)
    other.start()
    other.join()
    assert found == [None]


def test_a_solver_that_hears_nothing_is_ended():
    code, said, took = stopped(["-c", STUCK, "other"], 2.0)
    assert (code, said) == (130, "stochflow: interrupted at once; what was written before is whole\n")
    assert took < LATE


def test_training_is_ended_by_the_second_signal_alone():
    code, said, took = stopped(["-c", STUCK, "training"], 2.0, 3.0)
    assert code == 130
    assert said.splitlines()[0].endswith("a second Ctrl-C stops at once")
    assert took < LATE


def test_a_million_levels_are_left_at_once():
    code, said, took = stopped(["-P", "-m", "stochflow", "floor", "grid", "--side", "1000000", "--ndim", "1"], 12.0)
    assert code == 130
    assert said.splitlines()[-1] == "stochflow: interrupted"
    assert took < LATE


def test_what_a_sample_must_remember_is_estimated(tmp_path, capfd, monkeypatch):
    run = str(tmp_path / "run")
    assert main(["train", "grid", "--side", "3", "--steps", "1", "--batch", "2", "--quiet", "--out", run]) == 0
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 30)
    assert main(["sample", run, "-n", "1000000000", "--simulate", "2"]) == 2
    assert "-n 1000000000 --simulate needs about 466 GB of memory, but 1 GB are free" in capfd.readouterr().err
    with pytest.raises(UserError, match=r"-n 1000000000 --unique needs about 65.2 GB"):
        check_sample(Strings("ACGT", 30), 10**9, True, False)
    check_sample(Grid(2, 3), 10**9, True, False)  # of nine objects no more than nine are remembered
    check_sample(Strings("ACGT", 30), 10**9, False, False)  # rows pass through
