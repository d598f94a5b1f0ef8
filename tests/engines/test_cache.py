"""Compiled code is loaded only from a folder that is the user's own: numba's caches are pickles."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from stochflow.engines.numba import cache

TRAIN = """
import logging, sys
logging.basicConfig()
from stochflow import train
result = train("grid", side=3, steps=2, batch=4, hidden=4, out=sys.argv[1])
print(result.summary["engine"], result.summary["tv"])
"""


class Harm:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path):
        self.mark = str(mark)

    def __reduce__(self):
        return (os.mkdir, (self.mark,))


def trained(tmp_path: Path, **environment: str | None) -> subprocess.CompletedProcess[str]:
    own = {k: v for k, v in os.environ.items() if k not in ("XDG_CACHE_HOME", *environment)}
    own |= {k: v for k, v in environment.items() if v is not None}
    return subprocess.run(
        [sys.executable, "-c", TRAIN, str(tmp_path / "run")],
        cwd=tmp_path,
        env=own,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture
def fresh(monkeypatch):
    """`cache.folder` asked anew."""
    cache.folder.cache_clear()
    yield monkeypatch
    cache.folder.cache_clear()


def asked(monkeypatch, home: Path) -> Path | None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    cache.folder.cache_clear()
    return cache.folder()


def test_the_folder_is_ones_own_and_named_by_the_source(fresh, tmp_path):
    here = asked(fresh, tmp_path / "cache")
    assert here is not None
    assert here.parent == tmp_path / "cache" / "stochflow"
    assert [p.stat().st_mode & 0o777 for p in (here, here.parent)] == [0o700, 0o700]
    fresh.setattr(cache, "_fingerprint", lambda: "of-other-sources")
    other = asked(fresh, tmp_path / "cache")
    assert other is not None
    assert other != here


@pytest.mark.parametrize(
    "harm", ["writable by others", "above writable", "of another user", "a link", "a file", "relative"]
)
def test_a_folder_of_others_is_not_used(harm, fresh, tmp_path, caplog):
    home = tmp_path / "cache"
    here = asked(fresh, home)
    assert here is not None
    if harm == "writable by others":
        here.chmod(0o777)
    elif harm == "above writable":
        home.chmod(0o777)
    elif harm == "of another user":
        real = Path.lstat

        def other(path):
            found = list(real(path))
            return os.stat_result([*found[:4], os.getuid() + 1, *found[5:]])

        fresh.setattr(Path, "lstat", other)
    elif harm == "a link":
        here.rmdir()
        (tmp_path / "theirs").mkdir()
        here.symlink_to(tmp_path / "theirs")
    elif harm == "a file":
        here.rmdir()
        here.write_text("")
    else:
        home = Path("cache")
    assert asked(fresh, home) is None
    assert len(caplog.records) == 1
    assert "compiled loops are not kept" in caplog.text


def test_clearing_may_reach_the_folders_of_other_versions(fresh, tmp_path):
    here = asked(fresh, tmp_path)
    assert here is not None
    older = here.parent / "numba-of-an-older-version"
    for folder in (here / "walk", older / "walk"):
        folder.mkdir(parents=True)
        (folder / "loop.nbc").write_bytes(bytes(100))
    assert cache.size() == 200
    assert cache.clear() == 100
    assert (list(here.iterdir()), (older / "walk").exists()) == ([], True)
    assert cache.clear(others=True) == 100
    assert list(here.parent.iterdir()) == [here]


@pytest.mark.slow
def test_a_poisoned_cache_is_not_read(tmp_path):
    """Planted where numba would look by itself: named by a .numba_config.yaml here, or beside the sources."""
    first = trained(tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert first.returncode == 0, first.stderr
    kept = next((tmp_path / "cache" / "stochflow").iterdir())
    for folder in (tmp_path / "kept", tmp_path / "__pycache__"):
        for file in kept.rglob("*.nb*"):
            planted = folder / file.relative_to(kept)
            planted.parent.mkdir(parents=True, exist_ok=True)
            planted.write_bytes(pickle.dumps(Harm(tmp_path / "mark")))
    (tmp_path / ".numba_config.yaml").write_text("cache_dir: ./kept\n")
    (tmp_path / "run").rename(tmp_path / "first")
    again = trained(tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    assert not (tmp_path / "mark").exists()
    # with no folder of one's own there is no cache at all, rather than another one
    (tmp_path / "run").rename(tmp_path / "second")
    kept.chmod(0o777)
    last = trained(tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (last.returncode, last.stdout) == (0, first.stdout), last.stderr
    assert last.stderr.count("compiled loops are not kept") == 1
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
@pytest.mark.parametrize("home", ["read-only", "none"])
def test_without_a_home_loops_are_compiled_in_memory(home, tmp_path):
    """A read-only file system is played by a file in the way: root, whom permissions do not bind, runs tests too."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".cache").write_text("")
    given = {"HOME": str(tmp_path / "home")} if home == "read-only" else {"HOME": "", "XDG_CACHE_HOME": "not/absolute"}
    done = trained(tmp_path, **given)
    assert done.returncode == 0, done.stderr
    assert "engine: numba" in done.stdout
    assert done.stderr.count("compiled loops are not kept") == 1
