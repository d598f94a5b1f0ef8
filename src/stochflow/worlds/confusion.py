"""A confusion table from a CSV file, with or without the names of its columns and rows."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stochflow.errors import UserError
from stochflow.files.reading import MB, read_text, shown

TABLE = 16 * MB  # the most that is read
HOW = "give a CSV file of numbers, one row per action, with or without names of columns and rows"


class Read(NamedTuple):
    """What a file holds, in the order that was asked for."""

    rows: list[list[float]]
    names: tuple[str, ...]  # of rows and columns; empty where the file names none


def read_table(path: str | Path, alphabet: str | None = None) -> Read:
    """The table of a file: one row per ordered letter, one column per made one.

    Names may stand above the columns, before the rows, or both; with an `alphabet` they are its letters in any order, and
    rows and columns come back in the alphabet's. Where only one side is named, the other is in the same order. Without
    an alphabet the order of the columns stays.
    """
    cells = _cells(path)
    columns, rows, body = _names(cells)
    for side, names in (("columns", columns), ("rows", rows)):
        double = [n for n in names if names.count(n) > 1]
        if double:
            raise UserError(
                f"the {side} of the confusion table {path} name {shown(double[0])} more than once: name each once"
            )
    table = [[_number(path, r, c, text) for c, text in enumerate(line, 1)] for r, line in enumerate(body, 1)]
    for r, line in enumerate(table, 1):
        if len(line) != len(table):
            raise UserError(
                f"row {r} of the confusion table {path} has {len(line)} numbers, but there are {len(table)} rows: "
                "a confusion table is square (actions x moves)"
            )
    named = columns or rows
    if named and len(named) != len(table):
        raise UserError(
            f"the confusion table {path} names {len(named)} letters, but has {len(table)} rows of numbers: give each a row"
        )
    if not named:
        return Read(table, ())
    wanted = list(alphabet) if alphabet is not None else named
    for side, names in (("columns", columns), ("rows", rows)):
        if names and sorted(names) != sorted(wanted):
            other = "the letters are" if alphabet is not None else "its columns are named"
            raise UserError(
                f"the {side} of the confusion table {path} are named {shown(', '.join(names))}, but {other} {shown(', '.join(wanted))}: "
                "give each one a row and a column of its name"
            )
    at_row = {name: i for i, name in enumerate(rows or columns)}
    at_column = {name: i for i, name in enumerate(columns or rows)}
    return Read([[table[at_row[a]][at_column[b]] for b in wanted] for a in wanted], tuple(wanted))


def _cells(path: str | Path) -> list[list[str]]:
    if "://" in str(path):
        raise UserError(f"the confusion table {path} is an address of the network: save it as a file and name that")
    lines = read_text(path, TABLE).splitlines()
    try:
        found = [[cell.strip() for cell in row] for row in csv.reader(lines)]
    except csv.Error as problem:
        raise UserError(f"cannot read a confusion table from {path}: {problem}; {HOW}") from None
    found = [row for row in found if any(row) and not row[0].startswith("#")]
    if not found:
        raise UserError(f"cannot read a confusion table from {path}: it is empty; {HOW}")
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _names(cells: Sequence[list[str]]) -> tuple[list[str], list[str], list[list[str]]]:
    """Names of the columns, names of the rows, and the rest; a numeric name shows in the shape alone."""
    high, wide = len(cells), len(cells[-1])
    corner = cells[0][0] == "" and len(cells[0]) == wide  # above the names of the rows
    labelled = corner or (high > 1 and wide > 1 and not all(_is_number(row[0]) for row in cells[1:]))
    first = cells[0][1:] if labelled else cells[0]
    titled = corner or not any(map(_is_number, first)) or high == wide + 1 - labelled
    if not labelled:
        labelled = len(cells[0]) == wide - 1 if titled else wide == high + 1
    top = cells[0] if titled else []
    columns = top[1:] if labelled and len(top) == wide else top
    body = cells[titled:]
    return list(columns), [row[0] for row in body] if labelled else [], [row[labelled:] for row in body]


def _number(path: str | Path, row: int, column: int, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(
            f"cannot read a confusion table from {path}: {shown(repr(text))} in row {row}, column {column} is no number; {HOW}"
        ) from None
