"""One writer a run folder, whatever the moment; a dead one does not stand in the way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import subprocess
import sys
import time

import pytest

from stochflow.errors import UserError
from stochflow.runs.atomic import replacing
from stochflow.runs.config import Config, GridTask, Train
from stochflow.runs.folder import Run
from stochflow.runs.lock import Lock

HOLD = """
import sys
from pathlib import Path
from stochflow.runs.lock import Lock
held = Lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path):
    Run.create(tmp_path / "run", Config(GridTask(), Train())).close()
    return tmp_path / "run"


def test_a_second_writer_is_refused_though_the_lock_file_is_deleted(folder):
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=rf"process {other.pid} on"):
            Run.open(folder, write=True)
        (folder / ".lock").unlink()
        with pytest.raises(UserError, match="another process is writing"):
            Run.open(folder, write=True)
    finally:
        other.kill()
        other.communicate()
    with Run.open(folder, write=True):  # the system frees what a dead process held
        pass


@pytest.fixture
def lockless(monkeypatch):
    """A file system without locks."""

    def refuse(number, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def sign(folder, **holder):
    (folder / ".lock").write_text(json.dumps(holder))


def test_a_file_system_without_locks_is_named(folder, lockless, caplog):
    Lock(folder).close()
    assert "has no locks" in caplog.text
    assert json.loads((folder / ".lock").read_text())["pid"] == os.getpid()


def test_without_locks_the_name_of_the_living_counts(folder, lockless, caplog):
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=rf"process {other.pid} on .*remove"):
            Lock(folder)
    finally:
        other.kill()
        other.communicate()
    Lock(folder).close()  # it has died
    assert "which has ended" in caplog.text
    sign(folder, host=platform.node(), pid=os.getpid(), began="0")  # another process that had our number
    Lock(folder).close()
    sign(folder, host="elsewhere", pid=1)
    with pytest.raises(UserError, match="process 1 on elsewhere"):
        Lock(folder)
    os.utime(folder / ".lock", (time.time() - 7200,) * 2)
    Lock(folder).close()


def test_a_lock_file_of_any_content_does_no_harm(folder):
    for content in (b"", b"\xff", b"[1]", b'{"host": 3, "pid": "x"}', b"{" * 9000):
        (folder / ".lock").write_bytes(content)
        with Run.open(folder, write=True):
            pass


def test_half_of_a_second_writers_file_is_never_given_the_name(tmp_path):
    """Both write through one temporary name, and the later takes the earlier's away."""
    path = tmp_path / "samples.csv"
    path.write_text("old")

    def both(later: contextlib.ExitStack) -> None:
        with replacing(path, text=True) as earlier:
            earlier.write("whole")
            later.enter_context(replacing(path, text=True)).write("new")

    with contextlib.ExitStack() as later:
        with pytest.raises(OSError, match="another process is writing it too"):
            both(later)
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["samples.csv"]


@pytest.mark.parametrize("then", ["gone", "another", "link"])
def test_a_writer_leaves_a_folder_alone_that_has_come_into_the_place_of_its_own(then, tmp_path):
    mine, away = tmp_path / "run", tmp_path / "away"
    with Run.create(mine, Config(GridTask())) as first:
        first.log({"step": 1})
        mine.rename(away)
        if then == "link":  # the same folder by another way
            mine.symlink_to(away)
            first.log({"step": 2})
            assert len((away / "metrics.jsonl").read_text().splitlines()) == 2
            return
        second = Run.create(mine, Config(GridTask())) if then == "another" else None
        for write in (
            lambda: first.log({"step": 2}),
            lambda: first.write("summary.json", {}),
            lambda: first.save(2, {}),
        ):
            with pytest.raises(UserError, match="moved or replaced"):
                write()
        if second is not None:
            assert not (mine / "metrics.jsonl").exists()
            assert second.checkpoints() == []
            second.close()
