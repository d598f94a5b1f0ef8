"""Files that are there whole or not at all: whoever reads one sees what was there before or all of the new, never a part."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from stochflow.errors import UserError


@contextlib.contextmanager
def replacing(path: Path, text: bool = False) -> Iterator[IO[Any]]:
    """A file to write `path` into. Its name appears when all of it is on the disk; where that fails, nothing is left behind."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") if text else temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if os.name == "posix":  # the new name itself must survive a power cut
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def text_file(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """The same for a text that a person asked for, its folders made; what the system refuses is said in one sentence."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, text=True) as file:
            yield file
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}): choose another --out") from error


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """All of a text that is already there."""
    with text_file(path) as file:
        file.write(text)
    return Path(path)
