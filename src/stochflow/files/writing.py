"""Writing into regular files alone: never through a link, onto a device or into a FIFO."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from stochflow.errors import UserError
from stochflow.files.reading import shown


def refuse_special(path: Path) -> None:
    """UserError where something stands at `path` that is not a regular file."""
    try:
        found = path.lstat()
    except OSError:
        return  # nothing is there; what else is wrong will be said when it is opened
    if not stat.S_ISREG(found.st_mode):
        what = (
            "a link"
            if stat.S_ISLNK(found.st_mode)
            else "a folder"
            if stat.S_ISDIR(found.st_mode)
            else "a device or FIFO"
        )
        raise UserError(f"{shown(path)} is {what}, and only a regular file is written or replaced: choose another name")


@contextlib.contextmanager
def appending(path: Path, sync: bool = False) -> Iterator[IO[bytes]]:
    """A regular file to append to, made where there is none; with `sync` what was written is on the disk afterwards."""
    refuse_special(path)
    with path.open("ab") as file:
        yield file
        if sync:
            file.flush()
            os.fsync(file.fileno())
