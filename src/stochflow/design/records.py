"""Measured values coming back: joined to what was ordered by id or by sequence, and everything odd said in words."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from stochflow.design.data import MISSING, SEQUENCE_NAMES, Table, check_letters, number, read_table, spelt
from stochflow.design.settings import Settings
from stochflow.design.store import FAILED, OK, Row
from stochflow.errors import UserError, did_you_mean


@dataclass
class Told:
    """What a recording held."""

    values: int = 0  # wells with a value
    failed: int = 0
    extra: int = 0  # sequences that no round proposed
    repeats: int = 0  # wells whose sequence occurs before, in the file or in the campaign
    open: int = 0  # proposed designs that are still without a value
    rounds: set[int] = field(default_factory=set)  # whose designs it has values of
    notes: list[str] = field(default_factory=list)

    def sentences(self) -> list[str]:
        """In words, for the terminal."""
        some = [
            (self.failed, "well without a value is kept as failed", "wells without a value are kept as failed"),
            (
                self.extra,
                "sequence was not proposed here; it is kept as measured elsewhere",
                "sequences were not proposed here; they are kept as measured elsewhere",
            ),
            (
                self.repeats,
                "value repeats a sequence that was measured earlier or above it in the file; repeats are pooled",
                "values repeat sequences that were measured earlier or above them in the file; repeats are pooled",
            ),
            (
                self.open,
                "proposed design is still without a value",
                "proposed designs are still without a value",
            ),
        ]
        said = [f"{self.values} value{'' if self.values == 1 else 's'} recorded"]
        said += [f"{count} {one if count == 1 else many}" for count, one, many in some if count]
        return [*said, *self.notes]


def taken_in(
    settings: Settings, source: str, content: bytes, designs: dict[str, Row], seen: set[str]
) -> tuple[list[Row], Told]:
    """The rows to store of a file, each joined to its design; `seen` = sequences measured before."""
    table = _table(source, content)
    columns = [c.name for c in settings.columns]
    lower = {n.lower(): n for n in table.names}
    named, of, made_as = lower.get("id"), _sequence_name(settings, table, lower), lower.get("made")
    if named is None and of is None:
        raise UserError(
            f"{source} has neither an id nor a sequence column: keep one of those of proposal.csv beside the values"
        )
    at = {c: c if c in table.names else lower.get(c.lower()) for c in columns}
    there = [c for c in columns if at[c] is not None]
    if not there:
        raise UserError(
            f'{source} has no column "{columns[0]}"{did_you_mean(columns[0], table.names)}: call the measured column as the campaign does'
        )
    told, rows, met = Told(), [], set(seen)
    if len(there) < len(columns):
        told.notes.append(f"no values of {', '.join(c for c in columns if c not in there)} in this file")
    by_sequence = {row["sequence"]: row for row in designs.values()}  # the latest round that ordered it
    for i in range(len(table.rows)):
        cell = dict(zip(table.names, table.rows[i], strict=True))
        key = cell.get(named, "") if named else ""
        text = spelt(cell.get(of, ""), settings.alphabet) if of else ""
        design = designs.get(key) or (by_sequence.get(text) if text else None)
        where = table.line(i)
        if design is not None and text and text != design["sequence"]:
            raise UserError(
                f"{where} gives {key} the sequence {text[:40]}, but it was ordered as {design['sequence'][:40]}: mend one of the two"
            )
        if design is None and not text:
            raise UserError(
                f"{where} has the id {key!r}, which no round proposed{did_you_mean(key, designs)}: mend it, or add a sequence column"
            )
        if design is None:
            _fits(settings, text, where)
            told.extra += 1
        values = {c: _number(table, i, c, cell[at[c] or c]) for c in there}
        ordered = text if design is None else design["sequence"]
        made = spelt(cell.get(made_as, ""), settings.alphabet) if made_as else ""
        if made:
            check_letters([made], settings.alphabet, [f'{where}, column "{made_as}",'])
        failed = all(v is None for v in values.values())
        told.failed += failed
        told.values += not failed
        told.repeats += not failed and ordered in met
        if not failed:
            met.add(ordered)
            told.rounds |= {design["round"]} if design else set()
        kept: Row = {"id": design["id"] if design else key or f"extra {i + 2}", "sequence": ordered}
        kept |= {"round": design["round"] if design else "", "status": FAILED if failed else OK}
        kept |= {c: values.get(c) for c in columns}
        if made and made != ordered:
            kept["made"] = made
        rows.append(kept)
    if any("made" in r for r in rows):
        told.notes.append(
            f"{sum('made' in r for r in rows)} wells came out as another sequence than ordered; their values count for what was made"
        )
    return rows, told


def _sequence_name(settings: Settings, table: Table, lower: dict[str, str]) -> str | None:
    if settings.sequence in table.names:
        return settings.sequence
    words = ("sequence", "seq") if "id" in lower else SEQUENCE_NAMES
    return next((lower[word] for word in words if word in lower), None)


def _table(source: str, content: bytes) -> Table:
    with as_file(source, content) as file:
        table = read_table(file)
    return replace(table, path=source)


@contextlib.contextmanager
def as_file(source: str, content: bytes) -> Iterator[Path]:
    """The content in a file for as long as it is read; what is wrong with it is said of its source."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / (Path(source).name or "table.csv")
        file.write_bytes(content)
        try:
            yield file
        except UserError as error:
            raise UserError(str(error).replace(str(file), source)) from None


def _number(table: Table, row: int, name: str, text: str) -> float | None:
    found = number(text, table.decimal_comma)
    if found is None:
        raise UserError(
            f'{table.line(row)} holds "{text}" in the column "{name}": write a plain number, or leave the cell empty where the well failed'
        )
    return None if text.strip().lower() in MISSING else found


def _fits(settings: Settings, text: str, where: str) -> None:
    check_letters([text], settings.alphabet, [where])


def joined_rows(
    settings: Settings, measured: Sequence[Row], designs: dict[str, Row], rounds: Sequence[int]
) -> list[dict[str, Any]]:
    """Per round (0 = the first data): wells, values by column, and the share of designs whose value lay in its interval."""
    single = len(settings.columns) == 1
    found = []
    for number_ in [0, *rounds]:
        rows = [r for r in measured if str(r.get("round", "")) == str(number_)]
        mine = [d for d in designs.values() if d["round"] == number_]
        good = [r for r in rows if r["status"] == OK]
        well = {_well(r, i) for i, r in enumerate(rows) if r["status"] == OK}
        entry: dict[str, Any] = {
            "round": number_,
            "proposed": len(mine),
            "measured": len(well),
            "failed": len({_well(r, i) for i, r in enumerate(rows)} - well),
            "columns": {},
        }
        for column in settings.columns:
            values = [r[column.name] for r in good if r[column.name] is not None]
            about: dict[str, Any] = {"values": values}
            for level in (80, 95):
                suffix = "" if single else f"_{column.name}"
                inside = _inside(good, designs, column.name, f"low{level}{suffix}", f"high{level}{suffix}")
                if inside:
                    about[f"covered{level}"] = float(np.mean(inside))
                    about[f"covered{level}_of"] = len(inside)
            entry["columns"][column.name] = about
        found.append(entry)
    return found


def _well(row: Row, at: int) -> Any:
    """What tells wells apart: of a round their ids, however often one is recorded; each row of the first data is one."""
    return at if str(row["round"]) == "0" else row["id"]


def _inside(rows: Sequence[Row], designs: dict[str, Row], name: str, low: str, high: str) -> list[bool]:
    """Whether each measured design lay within its interval; controls and repeats do not count."""
    found = []
    for row in rows:
        design = designs.get(row["id"])
        if design is None or design["role"] != "design" or row[name] is None:
            continue
        if isinstance(design.get(low), float) and isinstance(design.get(high), float):
            found.append(design[low] <= row[name] <= design[high])
    return found
