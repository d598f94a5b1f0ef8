"""An oracle's answers in a file: one JSON line each, on the disk before it is used, and read back when the file is opened again."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from stochflow.errors import UserError
from stochflow.files.reading import MB, parse_json, read_bytes, shown
from stochflow.files.writing import appending, refuse_special

LARGEST = torch.finfo(torch.float32).max  # scores are kept in float32: beyond this they would be infinite
BEGIN = b'{"text"'  # of every line
JOURNAL = 4096 * MB  # the most that is read of remembered answers
log = logging.getLogger("stochflow")


class Answer(NamedTuple):
    """One line."""

    text: str
    score: float  # NaN: it has none
    blank: bool = False  # the oracle gave no score; `score` is what stands for it
    free: bool = False  # taken from elsewhere, not asked for by this run


def read_answers(path: Path, in_folder: bool = True) -> tuple[list[Answer], int]:
    """The answers of a file, and the bytes of a last line that a crash cut short; none where there is no file."""
    content = read_bytes(path, JOURNAL, in_folder=in_folder) if os.path.lexists(path) else b""
    *lines, rest = content.split(b"\n")
    return [_answer(line, place, path) for place, line in enumerate(lines, start=1)], len(rest)


def read_shared(path: Path) -> dict[str, float]:
    """The scores of a file that several runs write: lines that a crash cut short, wherever they are, are left out."""
    if not os.path.lexists(path):
        return {}
    found, torn = dict[str, float](), 0
    for place, line in enumerate(read_bytes(path, JOURNAL).split(b"\n"), start=1):
        if line and not line.endswith(b"}") and (line.startswith(BEGIN) or BEGIN.startswith(line)):
            torn += 1
        elif line:
            answer = _answer(line, place, path)
            if not math.isnan(answer.score):
                found.setdefault(answer.text, answer.score)
    if torn:
        log.warning("%s: %d line%s cut short left out", shown(path), torn, "" if torn == 1 else "s")
    return found


def _answer(line: bytes, place: int, path: Path) -> Answer:
    try:
        entry = parse_json(line.decode(), "")
        blank = entry.get("nan") is True
        score = math.nan if blank and entry["score"] is None else float(entry["score"])
        if not isinstance(entry["text"], str) or not (abs(score) <= LARGEST or math.isnan(score)):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"line {place} of {shown(path)} is not an oracle's answer: mend or remove it") from None
    return Answer(entry["text"], score, blank, entry.get("cached") is True)


def append(file: Path, answers: Iterable[Answer]) -> None:
    """Add lines to a file of this process alone; where the disk is full it is left as it was."""
    content = _lines(answers)
    with on_disk(file):
        size = _whole(file)
        try:
            with appending(file, sync=True) as out:
                out.write(content)
        except OSError:
            with contextlib.suppress(OSError):  # half a line would spoil the next one
                os.truncate(file, size)
            raise


def append_shared(file: Path, answers: Iterable[Answer] = ()) -> None:
    """Add lines to a file that others may be writing too; without any, see that it can be written."""
    content = _lines(answers)
    with on_disk(file):
        torn = file.exists() and file.stat().st_size > _whole(file, mend=False)
        with appending(file, sync=True) as out:
            if content:
                out.write(b"\n" + content if torn else content)


def _whole(file: Path, mend: bool = True) -> int:
    """The bytes up to the last whole line; what a crash left behind it is cut off."""
    refuse_special(file)
    if not file.exists():
        return 0
    size = end = file.stat().st_size
    with file.open("rb") as content:
        while end:
            begin = max(0, end - 4096)
            content.seek(begin)
            found = content.read(end - begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
    if mend and end < size:
        os.truncate(file, end)
    return end


def _lines(answers: Iterable[Answer]) -> bytes:
    rows = (
        {"text": a.text, "score": None if math.isnan(a.score) else a.score}
        | ({"nan": True} if a.blank else {})
        | ({"cached": True} if a.free else {})
        for a in answers
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@contextlib.contextmanager
def on_disk(file: Path) -> Iterator[None]:
    """OSErrors as one sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the oracle's answers cannot be kept in {file}: {error.strerror or error}: free or allow the space"
        ) from error
