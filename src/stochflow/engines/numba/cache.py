"""Where compiled loops are kept: a folder of this package under the user's cache directory.

Its name holds a hash over all sources of the engine, because numba itself notices changes in a function's own file only.
What numba keeps are pickles, so a folder that anybody else could write into is not used.
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
    """Bytes in the folder."""
    here = folder()
    return 0 if here is None else sum(path.stat().st_size for path in here.rglob("*") if path.is_file())


def clear() -> int:
    """Delete what is kept there; the bytes that were freed."""
    here, freed = folder(), size()
    for path in () if here is None else here.iterdir():
        shutil.rmtree(path, ignore_errors=True)
    return freed


def _check(path: Path) -> None:
    """Whoever can write there can run code here."""
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
    """Whoever can write above can put another folder in its place."""
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
