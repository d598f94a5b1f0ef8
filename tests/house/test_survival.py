"""A run that is killed loses nothing: 50 times, at named points of its writes and at moments in time, then resumed to the same end.

Every child is forked from this process, which has torch loaded but has never trained, so that fifty runs take a minute or two.
A child meets its end by SIGKILL: no handler, no flush, no exit code of its own. What is wrapped is the standard library's, in the
child alone, so the code under test is the code that ships.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import re
import shutil
import signal
import time
import traceback
from collections.abc import Callable

import pytest
import safetensors.torch  # noqa: F401  (what a run imports late, imported here once and not by every child)
import scipy.optimize
import scipy.sparse.csgraph
import scipy.stats  # noqa: F401
import torch

from stochflow.runs import experiment
from stochflow.runs.config import configure
from stochflow.runs.folder import Run, is_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")]

MOMENTS, IN_TIME = 50, 14  # kills in all; of them at a moment in time rather than at a point
STEPS = 40


def config(steps: int = STEPS):
    """Small, with everything that has a state: replay, a learned noise model with a buffer of its own, two seeds."""
    return configure(
        "grid", side=4, stick=0.25, steps=steps, batch=16, seeds=2, hidden=16, layers=1, replay=0.5, replay_size=64, log_every=5, eval_every=20,
        save_every=10, dynamics_off_pol=True, dynamics_sample_size=8, device="cpu", threads=1,
    )  # fmt: skip


# the points -----------------------------------------------------------------------------------------------------


class Points:
    """Counts the points a child passes; at number `fatal` it is killed."""

    def __init__(self, folder: pathlib.Path, fatal: int | None = None):
        self.folder, self.fatal, self.names = folder, fatal, []

    def fatal_now(self) -> bool:
        return len(self.names) == self.fatal

    def reach(self, name: str) -> None:
        if self.fatal_now():
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)

    def mine(self, path) -> bool:
        return str(path).startswith(str(self.folder)) and not str(path).endswith(".lock")

    def install(self) -> None:
        """Wrap what a run folder is written with."""
        points, opened = self, {}
        open_path, replace, fsync, unlink = pathlib.Path.open, os.replace, os.fsync, pathlib.Path.unlink

        class Watched:
            def __init__(self, file, name):
                self.file, self.name = file, name

            def __enter__(self):
                return self

            def __exit__(self, *_):
                self.file.close()
                points.reach(f"after close {self.name}")

            def __getattr__(self, key):
                return getattr(self.file, key)

            def __iter__(self):
                return iter(self.file)

            def write(self, content):
                points.reach(f"before write {self.name}")
                if points.fatal_now():  # half of it reaches the disk
                    self.file.write(content[: len(content) // 2])
                    self.file.flush()
                points.reach(f"inside write {self.name}")
                self.file.write(content)

        def watched_open(path, mode="r", *args, **kwargs):
            if not points.mine(path) or not set(mode) & set("wax"):
                return open_path(path, mode, *args, **kwargs)
            name = kind(path)
            points.reach(f"before open {name}")
            file = open_path(path, mode, *args, **kwargs)
            opened[file.fileno()] = name
            return Watched(file, name)

        def watched_fsync(number):
            name = opened.get(number, "the folder")
            points.reach(f"before fsync {name}")
            fsync(number)
            points.reach(f"after fsync {name}")

        def watched_replace(source, target):
            if not points.mine(target):
                return replace(source, target)
            points.reach(f"before rename {kind(target)}")
            replace(source, target)
            points.reach(f"after rename {kind(target)}")
            return None

        def watched_unlink(path, *args, **kwargs):
            if not points.mine(path) or not path.exists():
                return unlink(path, *args, **kwargs)
            points.reach(f"before unlink {kind(path)}")
            unlink(path, *args, **kwargs)
            points.reach(f"after unlink {kind(path)}")
            return None

        pathlib.Path.open, os.replace, os.fsync, pathlib.Path.unlink = (
            watched_open,
            watched_replace,
            watched_fsync,
            watched_unlink,
        )


def kind(path) -> str:
    """config.json, metrics.jsonl, checkpoint, ...: which file, whatever its step."""
    name = pathlib.Path(path).name.removesuffix(".tmp")
    return "checkpoint" if re.fullmatch(r"step-\d+\.safetensors", name) else name


torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # the first optimiser of a process imports for seconds


def in_child(work: Callable[[], None], log: pathlib.Path, kill_after: float | None = None) -> int:
    """Run `work` in a forked process; its status as `os.waitpid` gives it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            log.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def begin(folder: pathlib.Path, fatal: int | None = None, names: pathlib.Path | None = None) -> None:
    points = Points(folder, fatal)
    points.install()
    experiment.train(config(), out=folder)
    if names is not None:
        names.write_text(json.dumps(points.names))


def go_on(folder: pathlib.Path) -> None:
    """What a user does who finds a run dead: resume it, or start it again where it had not even begun."""
    if is_run(folder):
        experiment.resume(folder)
    else:
        experiment.train(config(), out=folder)


# what is compared -----------------------------------------------------------------------------------------------


def lines(folder: pathlib.Path) -> list[dict]:
    """The log without its times."""
    return [{k: v for k, v in r.items() if k != "time"} for r in Run.open(folder).metrics()]


def assert_same_end(folder: pathlib.Path, reference: pathlib.Path) -> None:
    found, wanted = Run.open(folder).load(), Run.open(reference).load()
    assert found.step == wanted.step == STEPS
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, value in wanted.tensors.items():
        assert torch.equal(found.tensors[name], value), name
    assert lines(folder) == lines(reference)
    assert (folder / "samples.csv").read_bytes() == (reference / "samples.csv").read_bytes()
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
    assert names == sorted(str(p.relative_to(reference)) for p in reference.rglob("*"))  # nothing left lying about


def saved_before(names: list[str], fatal: int) -> int:
    """The step of the last checkpoint that was whole when point number `fatal` was reached.

    One every ten steps; a last one more at the end, of the same step, whose header knows of the final look.
    """
    return min(STEPS, 10 * sum(n == "after rename checkpoint" for n in names[:fatal])) if fatal else 0


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run that nobody killed, and the names of the points it passed."""
    base = tmp_path_factory.mktemp("survival")
    status = in_child(lambda: begin(base / "whole", None, base / "points.json"), base / "log.txt")
    assert status == 0, (base / "log.txt").read_text()
    return base / "whole", json.loads((base / "points.json").read_text())


def moments(names: list[str]) -> list[int]:
    """Points to die at: each name at least once (a random one of its passes), then others at random, all fixed by a seed."""
    draw = random.Random(0)
    each = {name: [i for i, n in enumerate(names) if n == name] for name in dict.fromkeys(names)}
    chosen = {draw.choice(places) for places in each.values()}
    rest = [i for i in range(len(names)) if i not in chosen]
    chosen |= set(draw.sample(rest, max(0, MOMENTS - IN_TIME - len(chosen))))
    return sorted(chosen)


def test_the_points_cover_every_write(reference):
    _, names = reference
    files = (
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "checkpoint",
        "best.safetensors",
        "summary.json",
        "samples.csv",
        "law.npz",
    )
    for file in files:
        verbs = {n.removesuffix(f" {file}") for n in names if n.endswith(f" {file}")}
        assert {"before open", "before write", "inside write"} <= verbs, file
        if file != "metrics.jsonl":  # which is appended to
            assert {"before fsync", "after fsync", "before rename", "after rename"} <= verbs, file
    assert "before unlink checkpoint" in names


@pytest.mark.timeout(1500)
def test_killed_at_fifty_moments_and_resumed_to_the_same_end(reference, tmp_path):
    whole, names = reference
    begun = time.perf_counter()
    draw = random.Random(1)
    killed = 0
    at_points = moments(names)
    for fatal in at_points:
        folder = tmp_path / f"point-{fatal}"
        status = in_child(lambda f=folder, n=fatal: begin(f, n), tmp_path / "log.txt")
        assert os.WIFSIGNALED(status), (
            names[fatal],
            (tmp_path / "log.txt").read_text() if (tmp_path / "log.txt").exists() else "",
        )
        killed += 1
        if is_run(folder):  # what was saved is there, before anything is mended
            found = Run.open(folder).load()
            assert (found.step if found else 0) >= saved_before(names, fatal), names[fatal]
        finish(folder, whole, tmp_path, names[fatal])
    length = time_of(lambda: begin(tmp_path / "timed"), tmp_path)
    for i in range(max(IN_TIME, MOMENTS - len(at_points))):
        folder = tmp_path / f"time-{i}"
        after = draw.uniform(0.02, 0.98) * length
        status = in_child(lambda f=folder: begin(f), tmp_path / "log.txt", kill_after=after)
        killed += os.WIFSIGNALED(status)
        finish(folder, whole, tmp_path, f"after {after:.2f} s")
    print(
        f"{killed} kills at {len(at_points)} points of {len(set(names))} kinds and in time, in {time.perf_counter() - begun:.0f} s"
    )
    assert killed >= MOMENTS - 3  # a run may be over before its moment comes, on a machine that was slow before


def finish(folder: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path, where: str) -> None:
    status = in_child(lambda: go_on(folder), tmp_path / "log.txt")
    assert status == 0, (where, (tmp_path / "log.txt").read_text())
    try:
        assert_same_end(folder, whole)
    except AssertionError as error:
        raise AssertionError(f"killed {where}: {error}") from error
    shutil.rmtree(folder)


def time_of(work: Callable[[], None], tmp_path: pathlib.Path) -> float:
    begun = time.perf_counter()
    assert in_child(work, tmp_path / "log.txt") == 0
    return time.perf_counter() - begun


def test_killed_again_and_again_it_still_arrives(reference, tmp_path):
    """Each life ends within a few writes of the one before; the folder only ever gets further."""
    whole, _ = reference
    folder = tmp_path / "often"
    reached = 0
    for fatal in range(20, 20 + 5 * 12, 12):

        def life(n=fatal):
            points = Points(folder, n)
            points.install()
            go_on(folder)

        in_child(life, tmp_path / "log.txt")
        found = Run.open(folder).load()
        assert (found.step if found else 0) >= reached
        reached = found.step if found else 0
    finish(folder, whole, tmp_path, "again and again")
