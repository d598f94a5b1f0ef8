"""A sweep: every cell is a run of its own settings, finished ones are never run again, and the page tells which is best."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stochflow.cli import commands
from stochflow.errors import UserError
from stochflow.look.labels import LABELS
from stochflow.look.sweep import rows_of, write_sweep
from stochflow.runs import sweep as sweeps
from stochflow.runs.config import configure
from stochflow.runs.folder import Run
from stochflow.runs.sweep import Range, parse_grid, read_sweep, sweep, with_settings

BASE = configure("grid", side=3, stick=0.1, steps=4, batch=8, hidden=8, seeds=2)


def test_every_cell_is_a_run_of_its_own_settings_and_runs_once(tmp_path):
    told = []
    grid = {"lr": [1e-3, 1e-1], "side": [2, 3]}
    first = sweep(BASE, grid, tmp_path / "s", tell=lambda cell, total: told.append((cell.folder, total)))
    assert [tuple(c.settings.values()) for c in first.cells] == list(itertools.product(*grid.values()))
    assert len(told) == 4
    assert {total for _, total in told} == {4}
    for cell in first.cells:
        run = Run.open(tmp_path / "s" / cell.folder)
        assert run.config.train.lr == cell.settings["lr"]
        assert run.config.task.side == cell.settings["side"]
        assert run.config.train.seeds == 2
        assert cell.value == run.read("summary.json")["excess_tv"]
    before = {
        p: p.stat().st_mtime_ns
        for p in (tmp_path / "s").rglob("*")
        if p.is_file() and p.name not in ("sweep.json", ".lock")
    }
    again = sweep(BASE, grid, tmp_path / "s", tell=lambda *_: pytest.fail("a finished cell ran again"))
    assert [c.value for c in again.cells] == [c.value for c in first.cells]
    assert before == {p: p.stat().st_mtime_ns for p in before}
    with pytest.raises(UserError, match="holds a sweep of other settings"):
        sweep(BASE, {"lr": [1e-3]}, tmp_path / "s")


def test_a_second_sweep_of_the_folder_is_refused_and_a_full_disk_is_said(tmp_path, monkeypatch):
    def again(folder, config, free):
        with pytest.raises(UserError, match="another process is writing the sweep"):
            sweep(BASE, {"lr": [1e-3]}, tmp_path / "s")
        return {"summary": {}}

    monkeypatch.setattr(sweeps, "run_cell", again)
    assert [c.done for c in sweep(BASE, {"lr": [1e-3]}, tmp_path / "s").cells] == [True]

    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sweeps, "write_json", full)
    with pytest.raises(UserError, match="No space left on device; cells that have ended are whole"):
        sweep(BASE, {"lr": [1e-3]}, tmp_path / "t")


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path, monkeypatch):
    real, done = sweeps.run_cell, []

    def stopping(folder, config, free):
        done.append(folder)
        return {"interrupted": True} if len(done) == 2 else real(folder, config, free)

    monkeypatch.setattr(sweeps, "run_cell", stopping)
    grid = {"lr": [1e-3, 1e-2, 1e-1]}
    with pytest.raises(KeyboardInterrupt, match="go on with `stochflow sweep"):
        sweep(BASE, grid, tmp_path / "s")
    assert [c.done for c in read_sweep(tmp_path / "s").cells] == [True, False, False]
    assert commands.main(["sweep", str(tmp_path / "s"), "--workers", "1", "--quiet"]) == 0
    assert len(done) == 4, "the first cell is not run again"
    assert all(c.value is not None for c in read_sweep(tmp_path / "s").cells)


def test_a_cell_that_fails_is_named_and_tried_again(tmp_path, monkeypatch):
    (tmp_path / "failing_tasks.py").write_text(
        "from stochflow import Task, strings_task\n"
        "def scores(letter):\n"
        "    if letter == 'X':\n"
        "        raise RuntimeError('there is no X')\n"
        "    return lambda texts: [0.1 + t.count(letter) for t in texts]\n"
        "def gc(letter: str = 'G') -> Task:\n"
        "    return strings_task(lambda texts: scores(letter)(texts), 'ACGT', 3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    base = configure("failing_tasks:gc", letter="G", steps=3, batch=4, hidden=4)
    found = sweep(base, {"letter": ["A", "X"]}, tmp_path / "s")
    assert found.cells[0].value is not None
    assert "there is no X" in str(found.cells[1].failed)
    assert "there is no X" in write_sweep(tmp_path / "s").read_text()
    assert [r.cell.settings["letter"] for r in rows_of(found)] == ["A"]
    told = []
    sweep(base, {"letter": ["A", "X"]}, tmp_path / "s", tell=lambda cell, total: told.append(cell.settings["letter"]))
    assert told == ["X"]


def test_the_page_puts_the_best_cell_first_and_holds_the_others_against_it(tmp_path):
    base = configure("grid", side=3, steps=60, batch=16, hidden=16, seeds=5)
    found = sweep(base, {"lr": [1e-5, 1e-2], "objective": ["tb", "db"]}, tmp_path / "s")
    rows = rows_of(found)
    assert [r.cell.value for r in rows] == sorted(c.value for c in found.cells)
    assert rows[0].cell.settings["lr"] == 1e-2
    assert rows[0].words == "best"
    worst = rows[-1].against
    assert worst is not None
    assert worst.among == 3
    assert worst.mean == pytest.approx(
        sum(rows[-1].arm.figures["excess_tv"][s] - rows[0].arm.figures["excess_tv"][s] for s in range(5)) / 5
    )
    assert worst.beyond_noise
    page = write_sweep(tmp_path / "s").read_text()
    assert page.count("<figure") == 3  # one per setting, and all at once
    assert page.index(rows[0].cell.folder) < page.index(rows[-1].cell.folder)
    assert "http" not in page.replace("http-equiv", "")


def test_ranges_are_searched_and_the_search_does_not_depend_on_where_it_was_stopped(tmp_path):
    pytest.importorskip("optuna")
    grid = {"lr": Range(1e-4, 1e-1, log=True), "hidden": Range(4, 16), "objective": ["tb", "db"]}
    whole = sweep(BASE, grid, tmp_path / "a", trials=6)
    assert len({tuple(c.settings.values()) for c in whole.cells}) == 6
    for cell in whole.cells:
        assert 1e-4 <= cell.settings["lr"] <= 1e-1
        assert isinstance(cell.settings["hidden"], int)
        assert 4 <= cell.settings["hidden"] <= 16
    sweep(BASE, grid, tmp_path / "b", trials=3)
    parts = sweep(BASE, grid, tmp_path / "b", trials=6)
    assert [c.settings for c in parts.cells] == [c.settings for c in whole.cells]


@pytest.mark.slow
def test_cells_in_two_processes_find_what_one_process_finds(tmp_path):
    grid = {"lr": [1e-3, 1e-2]}
    alone, together = sweep(BASE, grid, tmp_path / "a"), sweep(BASE, grid, tmp_path / "b", workers=2)
    assert [c.value for c in alone.cells] == [c.value for c in together.cells]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_sweep_that_is_killed_leaves_no_process_and_goes_on(tmp_path):
    words = "sweep grid --grid lr=1e-3,1e-2 --steps 4000 --save-every 100 --workers 2 --quiet --out s".split()
    env = {**os.environ, "PYTHONPATH": str(Path(sweeps.__file__).parents[2])}
    command = subprocess.Popen([sys.executable, "-m", "stochflow", *words], cwd=tmp_path, env=env)
    within(90, lambda: len({file.parent for file in tmp_path.glob("s/*/checkpoints/step-*")}) == 2)  # one in each cell
    cells = children_of(command.pid)
    assert len(cells) >= 2
    command.kill()
    command.wait()
    within(30, lambda: not any(runs(pid) for pid in cells))
    made = read_sweep(tmp_path / "s")
    reached = [Run.open(made.path / c.folder).load().step for c in made.cells]
    assert all(0 < step < 4000 for step in reached), "each saved what it had"
    assert [c.value is not None for c in sweep(made.base, made.grid, made.path).cells] == [True, True]


def within(seconds: float, true) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


def runs(pid: int) -> bool:
    """Whether the process is there; one that has ended and that nobody has asked about yet is not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and ") Z " not in stat.read_text()


def children_of(pid: int) -> list[int]:
    """The spawned processes below one, without Python's own helper that keeps track of shared memory."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().partition("PPid:")[2].split()[0])
    found = [child for child, parent in parents.items() if parent == pid]
    return [c for c in found if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]


def test_a_grid_is_read_by_the_types_of_its_settings():
    words = ["lr=1e-3,3e-3", "objective=db,tb", "replay-priority=true,false", "side=4..8", "explore=0.01..0.5"]
    assert parse_grid(words, BASE) == {
        "lr": [1e-3, 3e-3],
        "objective": ["db", "tb"],
        "replay_priority": [True, False],
        "side": Range(4, 8),
        "explore": Range(0.01, 0.5, log=True),
    }


def test_a_setting_of_two_types_is_read_as_a_number_where_it_is_one():
    base = configure("peptide", steps=1)
    assert parse_grid(["beta=2,auto"], base) == {"beta": [2.0, "auto"]}
    assert parse_grid(["beta=1..20"], base) == {"beta": Range(1.0, 20.0, log=True)}
    assert with_settings(base, {"beta": 2.0}).task.beta == 2.0


def test_cells_get_the_defaults_that_the_task_gets_alone(tmp_path):
    """Strings too many to list are trained otherwise than short ones; a sweep must not compare something else."""
    words = "peptide --min-length 49 --batch 8 --hidden 8 --oracle-calls 40".split()
    cells = ["--grid", "lr=1e-3,1e-2", "--workers", "1", "--quiet", "--out", str(tmp_path / "s")]
    assert commands.main(["sweep", *words, "--steps", "2", *cells]) == 0
    assert (
        commands.main(["train", *words, "--steps", "2", "--lr", "1e-3", "--quiet", "--out", str(tmp_path / "a")]) == 0
    )
    first, second = [Run.open(tmp_path / "s" / c.folder).config.train for c in read_sweep(tmp_path / "s").cells]
    alone = Run.open(tmp_path / "a").config.train
    assert alone.search == "population"
    assert first == alone
    assert second == dataclasses.replace(alone, lr=1e-2)


def test_steps_that_were_chosen_for_the_task_are_not_taken_for_an_unfinished_cell(tmp_path, monkeypatch):
    from stochflow.runs import experiment

    config = configure("grid", side=3, steps=5, batch=8, hidden=8)
    chosen = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=3))
    experiment.train(chosen, out=tmp_path / "cell")
    monkeypatch.setattr(experiment, "resume", lambda *_, **__: pytest.fail("it is finished"))
    assert sweeps.run_cell(str(tmp_path / "cell"), config, {"steps"})["summary"]["step"] == 3


@pytest.mark.parametrize(
    ("summary", "by"), [({"beta": 30.0}, "top_asked"), ({}, "elbo"), ({"beta": 30.0, "tv": 0.1}, "tv")]
)
def test_cells_that_find_a_law_of_their_own_are_not_sorted_by_its_elbo(tmp_path, summary, by):
    made = sweeps.Sweep(tmp_path, configure("tfbind8"), {"lr": [1e-3]}, cells=[sweeps.Cell("0000-lr", {"lr": 1e-3})])
    sweeps._note(made, made.cells[0], {"summary": {"elbo": 9.0, "top_asked": 0.5, "top_score": 0.4} | summary})
    assert made.by == by


def test_a_figure_is_sorted_in_its_own_direction_and_an_unknown_one_refused(tmp_path):
    assert set(sweeps.LOWER) == {k for k, x in LABELS.items() if x.better < 0}
    assert set(sweeps.HIGHER) == {k for k, x in LABELS.items() if x.better > 0}
    found = sweep(BASE, {"lr": [1e-3, 1e-1]}, tmp_path / "s", by="kl_model_target")
    values = [c.value for c in found.best_first()]
    assert values == sorted(values)
    assert None not in values
    with pytest.raises(UserError, match=r'not compared by "tvv" \(did you mean "tv"'):
        sweep(BASE, {"lr": [1e-3]}, tmp_path / "t", by="tvv")
    with pytest.raises(UserError, match="give at least one"):
        sweep(BASE, {"lr": [1e-3]}, tmp_path / "t", workers=-1)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("lr", "write setting=value"),
        ("lrr=1", 'no such setting.*"lr"'),
        ("lr=a", "'a' is not of type float"),
        ("lr=2..1", "a range goes from a number to a larger one"),
        ("objective=a..b", "a range goes from a number"),
        ("seeds=1,2", "give --seeds instead"),
        ("replay_priority=maybe", "not of type bool"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused_in_words(word, says):
    with pytest.raises(UserError, match=says):
        parse_grid([word], BASE)


def test_a_cell_that_cannot_be_trained_is_refused_before_any_is(tmp_path):
    with pytest.raises(UserError, match="--batch is 0"):
        sweep(BASE, {"batch": [8, 0]}, tmp_path / "s")
    assert not (tmp_path / "s").exists()
    with pytest.raises(UserError, match="--trials"):
        sweep(BASE, {"lr": Range(1e-3, 1e-2)}, tmp_path / "s")
    with pytest.raises(UserError, match="--trials is for ranges"):
        sweep(BASE, {"lr": [1e-3]}, tmp_path / "s", trials=3)
    with pytest.raises(UserError, match="needs --grid"):
        sweep(BASE, {}, tmp_path / "s")


def test_the_command_makes_the_folder_and_says_where_the_page_is(tmp_path, capsys):
    words = [
        "sweep",
        "grid",
        "--side",
        "3",
        "--steps",
        "3",
        "--grid",
        "lr=1e-3,1e-2",
        "objective=db,tb",
        "--seeds",
        "2",
    ]
    assert commands.main([*words, "--workers", "1", "--out", str(tmp_path / "s")]) == 0
    said = capsys.readouterr().out
    assert "cell 4 of 4" in said
    assert str(tmp_path / "s" / "sweep.html") in said.replace("\n", "")
    kept = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert len(kept["cells"]) == 4
    assert commands.main(["sweep", str(tmp_path)]) == 2  # no sweep there, and no task of that name


def test_a_sweep_of_a_task_of_ones_own_goes_on_when_its_code_is_named_again(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_tasks.py").write_text(
        "from stochflow import Task, strings_task\n"
        "def gc(letter: str = 'G') -> Task:\n"
        "    return strings_task(lambda texts: [0.1 + t.count(letter) for t in texts], 'ACGT', 3)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = "sweep own_tasks:gc --grid letter=A,G --steps 3 --batch 4 --hidden 4 --workers 1 --out s --quiet".split()
    assert commands.main(words) == 0
    kept = json.loads((tmp_path / "s/sweep.json").read_text())
    assert [c["settings"]["letter"] for c in kept["cells"]] == ["A", "G"]
    assert commands.main(["sweep", "s", "--workers", "1"]) == 2
    assert "--task own_tasks:gc" in capsys.readouterr().err
    assert commands.main(["sweep", "s", "--workers", "1", "--task", "own_tasks:gc"]) == 0


def test_a_parameter_with_the_name_of_a_flag_of_sweep_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "gridded.py").write_text(
        "from stochflow import Task, strings_task\n"
        "def task(grid: int = 2) -> Task:\n    return strings_task(lambda t: [1.0] * len(t), 'AB', grid)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert commands.main("sweep gridded:task --grid lr=1e-3".split()) == 2
    assert 'the parameter "grid" of gridded:task is a flag of `stochflow sweep` too' in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["../elsewhere", "0001-a/../../b", "/tmp/x"])
def test_a_sweep_file_cannot_point_out_of_its_folder(damage, tmp_path):
    made = sweep(BASE, {"lr": [1e-3]}, tmp_path / "s")
    text = (tmp_path / "s/sweep.json").read_text()
    (tmp_path / "s/sweep.json").write_text(text.replace(made.cells[0].folder, damage))
    with pytest.raises(UserError, match="is damaged"):
        read_sweep(tmp_path / "s")


@pytest.mark.slow
@pytest.mark.extra
def test_cells_on_a_ray_cluster_find_what_they_find_here(tmp_path):
    pytest.importorskip("ray")
    grid = {"lr": [1e-3, 1e-2]}
    there = sweep(BASE, grid, tmp_path / "b", workers="ray:2")
    assert [c.value for c in there.cells] == [c.value for c in sweep(BASE, grid, tmp_path / "a").cells]
    assert all((tmp_path / "b" / c.folder / "summary.json").exists() for c in there.cells)
