"""Files that are there whole or not at all: a reader sees what was there before or all of the new, never a part.

What is not a regular file (a link, a device, a FIFO) is never replaced or written through: in a stranger's folder a link
could lead to any file of the user's, and `--out /dev/null` would take the device away.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from stochflow.errors import UserError
from stochflow.files.reading import shown
from stochflow.files.writing import appending, refuse_special

__all__ = ["appending", "refuse_special", "replacing", "sync_folder", "text_file", "write_text"]


@contextlib.contextmanager
def replacing(path: Path, text: bool = False) -> Iterator[IO[Any]]:
    """A file to write `path` into. Its name appears when all of it is on the disk; where that fails, nothing is left behind."""
    refuse_special(path)
    temporary = path.with_name(path.name + ".tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()  # of a writer that was killed; a link there would lead elsewhere
    try:
        mode, more = ("x", {"encoding": "utf-8", "newline": ""}) if text else ("xb", {})
        with temporary.open(mode, **more) as file:  # type: ignore[call-overload]
            yield file
            file.flush()
            os.fsync(file.fileno())
            _still_ours(file, temporary)
        os.replace(temporary, path)
    except _Overtaken:  # what lies there is the other's
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


class _Overtaken(OSError):
    """Another process has begun to write the same file."""


def _still_ours(file: IO[Any], temporary: Path) -> None:
    """A second writer takes the first one's temporary file away, and half of the second's must not be given the name."""
    found = os.stat(temporary) if temporary.exists() else None
    if found is None or not os.path.samestat(found, os.fstat(file.fileno())):
        raise _Overtaken(errno.EBUSY, "another process is writing it too", str(temporary))


def sync_folder(folder: Path) -> None:
    """A new name must survive a power cut too."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


@contextlib.contextmanager
def text_file(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """The same as `replacing` for a text that a person asked for, its folders made; what the system refuses is said in one sentence."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, text=True) as file:
            yield file
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{shown(path)} cannot be written ({reason}): choose another --out") from error


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """All of a text that is already there; half characters, which JSON can name and UTF-8 cannot hold, as escapes."""
    with text_file(path) as file:
        file.write(text.encode("utf-8", "backslashreplace").decode())
    return Path(path)
