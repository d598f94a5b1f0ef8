"""The one door through which files come in: regular files only, up to a stated size, as UTF-8, JSON of bounded depth.

A run folder may be a stranger's, or damaged. What cannot be read is an `Unreadable` (a `UserError`): one sentence with the
file, the line or key, and what to do; a caller who can do without the file catches it and says what is missing.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stochflow.errors import UserError, one_line
from stochflow.files.memory import GB, amount, free_memory

__all__ = [
    "Lines",
    "Unreadable",
    "need_room",
    "one_line",
    "parse_json",
    "read_bytes",
    "read_cells",
    "read_json",
    "read_json_lines",
    "read_text",
    "read_unpacked",
    "refuse_link_out",
    "shown",
]

MB = 1 << 20
LIMIT = 64 * MB  # of a file for which nothing else is said
DEPTH = 32  # levels of nesting in JSON
SMALL = MB // 4  # of text, whose objects fit anywhere
MADE = 2 * GB  # what the objects made of one file may take, where as much is free
GAPS = 100  # of a file that are told one by one


class Unreadable(UserError):
    """A file that is missing, too large, not a regular file, or not what it should be."""


def read_bytes(path: str | os.PathLike[str], most: int = LIMIT, in_folder: bool = False) -> bytes:
    """All of a regular file of at most `most` bytes.

    `in_folder`: a file of a run folder; a link from there to elsewhere is refused, so that a stranger's folder cannot
    have another file shown, or packed up, as its own.
    """
    path = Path(path)
    if in_folder:
        refuse_link_out(path)
    try:
        # without blocking: opening a FIFO would otherwise wait for somebody to write into it
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise Unreadable(f"there is no file {shown(path)}: check the path") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise Unreadable(f"{shown(path)} cannot be read ({reason}): check the path and its permissions") from error
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode):
        os.close(number)
        raise Unreadable(f"{shown(path)} is {_kind(found.st_mode)}, not a regular file: give a regular file")
    try:
        with os.fdopen(number, "rb") as file:
            content = b"" if found.st_size > most else file.read(found.st_size + 1)  # one more, to notice growth
            if found.st_size > most or len(content) > most:
                raise Unreadable(
                    f"{shown(path)} is larger than the {_size(most)} that are read of such a file: give a smaller one"
                )
    except OSError as error:
        raise Unreadable(f"{shown(path)} cannot be read ({error.strerror or error}): check the disk") from error
    return content


def refuse_link_out(path: Path) -> None:
    """Refuse a link that leads out of the folder it lies in."""
    if path.is_symlink():
        folder, target = os.path.realpath(path.parent), os.path.realpath(path)
        if os.path.commonpath([folder, target]) != folder:
            raise Unreadable(
                f"{shown(path)} is a link that leads out of its folder: put the file itself there, if you trust it"
            )


def read_unpacked(path: str | os.PathLike[str], most: int = LIMIT) -> bytes:
    """All of a regular file, unpacked where its name ends in `.gz`; at most `most` bytes either way."""
    content = read_bytes(path, most)
    if not os.fspath(path).endswith(".gz"):
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            unpacked = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise Unreadable(f"{shown(path)} is not a whole gzip file ({error}): pack it again") from error
    if len(unpacked) > most:
        raise Unreadable(f"{shown(path)} unpacks to more than the {_size(most)} that are read: give a smaller one")
    return unpacked


def read_text(path: str | os.PathLike[str], most: int = LIMIT, in_folder: bool = False) -> str:
    """The same as UTF-8 text, with a leading byte order mark left out and any line ends."""
    content = read_bytes(path, most, in_folder)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise Unreadable(
            f"{shown(path)} is not UTF-8 text (line {line}, byte {error.start}): save it as UTF-8"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_cells(path: str | os.PathLike[str], most: int = LIMIT, in_folder: bool = True) -> str:
    """The text of a CSV file, whose rows fit into memory as lists or dictionaries of texts."""
    text = read_text(path, most, in_folder)
    if len(text) > SMALL:
        need_room(2 * len(text) + 120 * text.count(",") + 600 * text.count("\n"), shown(path))
    return text


def read_json(
    path: str | os.PathLike[str],
    check: Callable[[Any, str], Any] | None = None,
    most: int = LIMIT,
    in_folder: bool = True,
) -> Any:
    """A JSON file; `check(value, where)` holds it against a schema (see `schema`) and returns what is to be used."""
    value = parse_json(read_text(path, most, in_folder), shown(path))
    return value if check is None else check(value, shown(path))


class Lines(NamedTuple):
    """The whole lines of a JSON-lines file, and a sentence for each gap."""

    records: list[Any]
    gaps: list[str]


def read_json_lines(
    path: str | os.PathLike[str], check: Callable[[Any, str], Any] | None = None, most: int = 16 * LIMIT
) -> Lines:
    """The lines that are whole; what is not is named in `gaps`, but for a last line that a kill cut short."""
    records: list[Any] = []
    gaps: list[str] = []
    content = read_bytes(path, most, in_folder=True)
    if len(content) > SMALL:
        need_room(_made_of(content, 400), shown(path), math.inf)
    lines = content.split(b"\n")
    more = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{shown(path)}, line {number}"
        try:
            value = parse_json(line.decode("utf-8"), where)
            records.append(value if check is None else check(value, where))
            continue
        except UnicodeDecodeError:
            gap = f"{where} is not UTF-8 text"
        except UserError as error:
            gap = str(error)
            if number == len(lines):
                break
        more += len(gaps) >= GAPS
        gaps += [gap] * (len(gaps) < GAPS)
    if more:
        gaps.append(f"{shown(path)} has {more} more lines that cannot be read")
    return Lines(records, gaps)


def parse_json(text: str, where: str) -> Any:
    """JSON of bounded depth whose numbers are finite and fit into 64 bits, where there is memory for what it makes."""
    if len(text) > SMALL:
        need_room(_made_of(text, 0), where)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_float, parse_int=_int)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise Unreadable(f"{where} is not JSON ({place}: {error.msg}): restore or remove it") from error
    except RecursionError as error:
        raise Unreadable(f"{where} is nested deeper than {DEPTH} levels: restore it") from error
    except ValueError as error:
        raise Unreadable(f"{where} is not JSON that can be read ({error}): restore or remove it") from error
    if text.count("[") + text.count("{") > DEPTH and _deeper(value):
        raise Unreadable(f"{where} is nested deeper than {DEPTH} levels: restore it")
    return value


def _refuse_constant(word: str) -> float:
    raise ValueError(f"it holds {word}, which is no number of JSON")


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"it holds {digits[:24]}, which is too large for a number")
    return value


def _int(digits: str) -> int:
    value = int(digits) if len(digits) < 24 else 2**64
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"it holds {digits[:24]}, which does not fit into 64 bits")
    return value


def _deeper(value: Any) -> bool:
    """Whether there are more than DEPTH lists and objects within one another."""
    level = [value]
    for _ in range(DEPTH + 1):
        level = [v for v in level if isinstance(v, (list, dict))]
        if not level:
            return False
        level = [v for parent in level for v in (parent.values() if isinstance(parent, dict) else parent)]
    return True


def need_room(made: float, where: str, most: float = MADE) -> None:
    """Unreadable where what is made of a file would take more than `most` bytes, or more than are free."""
    free = free_memory()
    most = most if free is None else min(most, free)
    if made > most:
        raise Unreadable(
            f"reading {where} would take up to {amount(made)} of memory, more than the {amount(most)} there are for it: "
            "give a smaller file"
        )


def _made_of(text: str | bytes, line: int) -> int:
    """Bytes of the objects made of JSON, at most: small lists and objects take many times their text. `line`: of each line."""
    marks = {"[": 72, "{": 240, ",": 40, '"': 30, "\n": line}
    return 2 * len(text) + sum(n * (text.count(m) if isinstance(text, str) else text.count(m.encode())) for m, n in marks.items())  # fmt: skip


# words -----------------------------------------------------------------------------------------------------------


def shown(thing: object, most: int = 200) -> str:
    """A name, path or value as it may stand in a message: one line, without control characters or terminal escapes."""
    text = os.fspath(thing) if isinstance(thing, os.PathLike) else thing if isinstance(thing, str) else repr(thing)
    return one_line(text, most)


def _size(count: int) -> str:
    return f"{count / MB:g} MB" if count >= MB else f"{count} bytes"


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
        stat.S_IFLNK: "a link",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")
