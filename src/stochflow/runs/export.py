"""Objects as rows, and rows as CSV, FASTA or JSON, written as they come so that a million stay in bounded memory."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from stochflow.errors import UserError
from stochflow.files.reading import Unreadable, one_line, read_cells, shown
from stochflow.runs.atomic import text_file
from stochflow.runs.shapes import designs

Row = dict[str, Any]
MOST = 1000  # designs of a run that are read: it writes a hundred, and modes among them take the square
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
    """The whole rows of a CSV file that a run wrote; what is damaged is said."""
    rows, gaps = rows_and_gaps(path)
    if gaps:
        more = f" (and {len(gaps) - 1} more such)" if len(gaps) > 1 else ""
        log.warning("%s%s; it is left out", gaps[0], more)
    return rows


def rows_and_gaps(path: str | os.PathLike[str]) -> tuple[list[dict[str, str]], list[str]]:
    """The same, with a sentence for each gap."""
    if not os.path.lexists(path):
        return [], []
    try:
        reader = csv.DictReader(io.StringIO(read_cells(path), newline=""))
        rows = list(itertools.islice(reader, MOST))
        more = next(reader, None) is not None
    except (Unreadable, csv.Error) as error:
        return [], [str(error)]
    # a short row lacks values, a long one has them under no name
    found = [{k: meant(v) for k, v in row.items() if isinstance(k, str) and isinstance(v, str)} for row in rows]
    kept, gaps = designs(found, shown(path))
    return kept, [*gaps, *[f"{shown(path)} has more than the {MOST} rows that are looked at"] * more]


def _plain(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value


FORMULA = tuple("=+-@\t\r")  # what a spreadsheet takes for the start of a formula, in a cell of text


def harmless(value: Any) -> Any:
    """A cell that no spreadsheet runs: a text that begins like a formula gets an apostrophe before it; `meant` takes it away."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def meant(value: str) -> str:
    """What a cell said before it was made harmless."""
    return value[1:] if value[:1] == "'" and value[1:].startswith(FORMULA) else value


def _csv(rows: Iterable[Row]) -> Iterator[str]:
    class Line:
        text = ""

        def write(self, text: str) -> None:
            self.text = text

    line = Line()
    writer = csv.writer(line, lineterminator="\n")
    for number, row in enumerate(rows):
        if number == 0:
            writer.writerow([harmless(k) for k in row])
            yield line.text
        writer.writerow([harmless(_plain(v)) for v in row.values()])
        yield line.text


def _fasta(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        if "sequence" not in row:
            raise UserError("FASTA holds sequences, and this task builds none: use --format csv or json")
        if not fits_fasta(row["sequence"]):
            raise UserError(f"FASTA cannot hold {shown(row['sequence'])!r}: use --format csv or json")
        notes = " ".join(f"{k}={_plain(v)}" for k, v in row.items() if k not in ("id", "sequence") and v is not None)
        yield f">{one_line(str(row['id']))} {one_line(notes)}\n{row['sequence']}\n"


def fits_fasta(text: str) -> bool:
    """Whether FASTA readers give this sequence back: no white space in it, nothing that begins a header or a comment."""
    return not _UNFIT.search(text) and not text.startswith((">", ";"))


_UNFIT = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def _json(rows: Iterable[Row]) -> Iterator[str]:
    yield "["
    for number, row in enumerate(rows):
        yield (",\n " if number else "\n ") + json.dumps(row)
    yield "\n]\n"
