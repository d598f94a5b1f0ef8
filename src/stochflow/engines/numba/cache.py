"""Where compiled loops are kept: a folder of this package under the user's cache directory.

Its name holds a hash over all sources of the engine, because numba itself notices changes in a function's own file only.
What numba keeps are pickles, which run code when they are read: a folder that another user can write into is not used.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import stat
from functools import cache
from importlib.metadata import version
from pathlib import Path

log = logging.getLogger("stochflow")


@cache
def folder() -> Path | None:
    """The folder, made with mode 0700; None where there is no safe one, so that loops are compiled in memory."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
        if not os.path.isabs(home):
            raise OSError(f"there is no cache directory ({home!r})")
        own = Path(home) / "stochflow"
        here = own / f"numba-{_fingerprint()}"
        own.parent.mkdir(parents=True, exist_ok=True)
        for path in (own, here):
            path.mkdir(mode=0o700, exist_ok=True)
            _check(path)
        for path in Path(os.path.realpath(own)).parents:
            _check_above(path)
        return here
    except (OSError, RuntimeError) as error:
        log.warning("compiled loops are not kept for the next time: %s", error)
        return None


def size() -> int:
    """Bytes in the folder and in those of other sources or versions."""
    return sum(path.stat().st_size for one in _folders() for path in one.rglob("*") if path.is_file())


def clear(others: bool = False) -> int:
    """Delete what is kept in the folder and, if wanted, in those of other sources or versions; the bytes that were freed."""
    here, before = folder(), size()
    for one in _folders():
        if one == here:
            for path in one.iterdir():
                shutil.rmtree(path, ignore_errors=True)
        elif others:
            shutil.rmtree(one, ignore_errors=True)
    return before - size()


def _folders() -> list[Path]:
    here = folder()
    return [] if here is None else sorted(path for path in here.parent.glob("numba-*") if path.is_dir())


def _check(path: Path) -> None:
    """OSError unless it is a directory of this user's that no other can write into."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(f"{path} is not a directory")
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        raise OSError(f"{path} belongs to another user")
    if os.name == "posix" and found.st_mode & 0o022:
        raise OSError(f"{path} is writable by others")
    if not os.access(path, os.W_OK | os.X_OK):
        raise OSError(f"{path} is not writable")


def _check_above(path: Path) -> None:
    """OSError where another user can write above, and so put another folder in its place."""
    if os.name != "posix":
        return
    found = path.stat()
    if found.st_uid not in (0, os.getuid()):
        raise OSError(f"{path}, above it, belongs to another user")
    others = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and found.st_gid not in (0, os.getegid()))
    if others and not found.st_mode & stat.S_ISVTX:
        raise OSError(f"{path}, above it, is writable by others")


def _fingerprint() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    versions = [version(name) for name in ("numba", "llvmlite", "numpy")]  # numba's own index knows the processor
    found.update(repr((versions, platform.python_version(), platform.machine())).encode())
    return found.hexdigest()[:16]
