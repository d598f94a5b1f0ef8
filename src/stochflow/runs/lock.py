"""One writer a folder: a lock on the folder itself and on `.lock` in it, and in `.lock` who holds it.

Locks of the system end with their process. The folder's own lock holds where `.lock` is deleted; where the file system has
no locks, the name in `.lock` is all there is, and a holder that is dead, or silent for an hour, is passed over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import time
from pathlib import Path
from typing import Any

from stochflow.errors import UserError
from stochflow.files.reading import Unreadable, read_json, shown
from stochflow.runs.atomic import refuse_special

HOURS = 3600.0  # seconds without a sign of life, after which a holder on another machine counts as gone
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
log = logging.getLogger("stochflow")


class Lock:
    """A held lock; `close` gives the folder back. `what` the folder is and a further `remedy` are said to a second writer."""

    def __init__(self, path: Path, what: str = "run folder", remedy: str = ", or choose another --out"):
        refuse_special(path / ".lock")
        self.what, self.remedy = what, remedy
        self.path = path / ".lock"
        self.held: list[int] = []
        before = _holder(self.path)
        try:
            if self._by_system(path):
                _refuse_alive(path, before, self.path, what)
            self._sign()
        except BaseException:
            self.close()
            raise

    def _by_system(self, path: Path) -> bool:
        """Take the system's locks; True where there are none."""
        try:
            import fcntl
        except ImportError:  # Windows: best effort
            return True
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        for number in (os.open(self.path, flags, 0o666), os.open(path, os.O_RDONLY)):
            self.held.append(number)
        for number, what in zip(self.held, ("file", "folder"), strict=True):
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in NO_LOCKS and what == "file":
                    log.warning(
                        "the file system of %s has no locks (%s): do not write into it from two places",
                        shown(path),
                        error.strerror,
                    )
                    return True
                if error.errno in (*NO_LOCKS, errno.EBADF) and what == "folder":  # as on NFS: the file's lock must do
                    return False
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise UserError(
                    f"another process is writing the {self.what} {shown(path)}{_named(_holder(self.path))}: "
                    f"wait for it or stop it{self.remedy}"
                ) from error
        return False

    def _sign(self) -> None:
        """Write down who holds it."""
        signed = json.dumps({"host": platform.node(), "pid": os.getpid(), "began": _began(os.getpid())}).encode()
        number = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o666)
        with contextlib.suppress(OSError), os.fdopen(number, "wb") as file:  # a full disk: the lock itself holds
            file.write(signed)

    def alive(self) -> None:
        """A sign of life, for those who have nothing but the name."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def check(self) -> None:
        """UserError where another folder has come into this one's place: what is written would be the other's."""
        if len(self.held) < 2:
            return
        folder = self.path.parent
        try:
            same = os.path.samestat(os.fstat(self.held[1]), os.stat(folder))
        except OSError:
            same = False
        if not same:
            raise UserError(
                f"the {self.what} {shown(folder)} was moved or replaced while it was written: nothing more is written there; "
                "move it back and resume it, or begin anew"
            )

    def close(self) -> None:
        for number in self.held:
            os.close(number)
        self.held = []


def _holder(file: Path) -> dict[str, Any]:
    try:
        found = read_json(file, most=4096)
    except Unreadable:
        return {}
    whole = isinstance(found, dict) and isinstance(found.get("host"), str) and isinstance(found.get("pid"), int)
    return found if whole else {}


def _named(holder: dict[str, Any]) -> str:
    return f" (process {holder['pid']} on {shown(holder['host'], 80)})" if holder else ""


def _refuse_alive(path: Path, holder: dict[str, Any], file: Path, what: str) -> None:
    """Where there are no locks: refuse while the process that signed is alive, as far as that can be known."""
    if not holder:
        return
    own = (platform.node(), os.getpid(), _began(os.getpid()))
    if (holder["host"], holder["pid"], holder.get("began")) == own:
        return
    if holder["host"] == platform.node():
        gone = not _is_alive(holder["pid"]) or _began(holder["pid"]) != holder.get("began")
    else:
        gone = time.time() - file.stat().st_mtime > HOURS
    if not gone:
        raise UserError(
            f"another process is writing the {what} {shown(path)}{_named(holder)}: wait for it or stop it; "
            f"if it has ended, remove {shown(file)}"
        )
    log.warning("the lock of %s is left from%s, which has ended", shown(path), _named(holder))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True


def _began(pid: int) -> str | None:
    """When a process began, so that another one with its number is not taken for it; None where the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError, ValueError):
        return None
