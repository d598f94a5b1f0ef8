"""Objects as rows, and rows as CSV, FASTA or JSON, written as they come so that a million stay in bounded memory."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from stochflow.errors import UserError
from stochflow.files.reading import Unreadable, read_text
from stochflow.runs.atomic import text_file

Row = dict[str, Any]
log = logging.getLogger("stochflow")


def write_rows(rows: Iterable[Row], kind: str, file: IO[str]) -> None:
    """Write rows as `csv`, `fasta` or `json`."""
    writers = {"csv": _csv, "fasta": _fasta, "json": _json}
    for piece in writers[kind](rows):
        file.write(piece)


def write_file(rows: Iterable[Row], kind: str, path: str | os.PathLike[str]) -> Path:
    """The same into a file that is there whole or not at all."""
    with text_file(path) as file:
        write_rows(rows, kind, file)
    return Path(path)


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """The rows of a CSV file that a run wrote; none where it is not there or is damaged."""
    if not os.path.lexists(path):
        return []
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path, in_folder=True), newline="")))
    except (Unreadable, csv.Error) as error:
        log.warning("%s; its objects are left out", error)
        return []
    # a short row lacks values, a long one has them under no name
    return [{k: v for k, v in row.items() if isinstance(k, str) and isinstance(v, str)} for row in rows]


def _plain(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value


def _csv(rows: Iterable[Row]) -> Iterator[str]:
    class Line:
        text = ""

        def write(self, text: str) -> None:
            self.text = text

    line = Line()
    writer = csv.writer(line, lineterminator="\n")
    for number, row in enumerate(rows):
        if number == 0:
            writer.writerow(row)
            yield line.text
        writer.writerow([_plain(v) for v in row.values()])
        yield line.text


def _fasta(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        if "sequence" not in row:
            raise UserError("FASTA holds sequences, and this task builds none: use --format csv or json")
        notes = " ".join(f"{k}={_plain(v)}" for k, v in row.items() if k not in ("id", "sequence") and v is not None)
        yield f">{row['id']} {notes}\n{row['sequence']}\n"


def _json(rows: Iterable[Row]) -> Iterator[str]:
    yield "["
    for number, row in enumerate(rows):
        yield (",\n " if number else "\n ") + json.dumps(row)
    yield "\n]\n"
