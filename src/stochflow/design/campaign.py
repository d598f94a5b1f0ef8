"""A campaign of rounds: ask for a batch, order and measure it, tell the values; in Python and behind the command line.

campaign = Campaign.new("plates", "lab.csv")
designs = campaign.ask(96)
campaign.tell("measured.csv")
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from stochflow.design.data import MOST, Data, Measured, enough, pooled, read_data, spelt
from stochflow.design.objectives import Column
from stochflow.design.records import Told, as_file, joined_rows, taken_in
from stochflow.design.settings import LONGEST, Ask, Noise, Replicates, Settings
from stochflow.design.store import FAILED, OK, Row, Store, as_csv, as_json, locked, read_json
from stochflow.errors import UserError
from stochflow.files.reading import read_bytes

if TYPE_CHECKING:
    from stochflow.worlds.rules import Rules

Kind = TypeVar("Kind")
KEPT = frozenset(("id", "sequence", "round", "status", "made", "recording"))  # columns of every recording


class Campaign:
    """A campaign folder. `ask` and `tell` are all that a loop needs; everything they do is on the disk when they return."""

    def __init__(self, store: Store, notes: Sequence[str] = ()):
        self.store, self.notes = store, list(notes)

    @property
    def path(self) -> Path:
        return self.store.path

    @property
    def settings(self) -> Settings:
        return self.store.settings

    def __repr__(self) -> str:
        return f"Campaign({str(self.path)!r})"

    # making and opening -----------------------------------------------------------------------------------------

    @staticmethod
    def new(path: str | os.PathLike[str], data: Any, about: About | None = None) -> Campaign:
        """A new campaign of measured sequences: a CSV file, a table (pandas), or rows as dictionaries. Columns that are not
        named in `about` are guessed.
        """
        about = _is(about or About(), About, "about")
        names = [c.name for c in about.columns]
        source, content = _content(data)
        with as_file(source, content) as file:
            found = read_data(file, about.sequence, names, about.alphabet)
        enough(found)
        asked = about.columns or (Column("", "minimise" if about.minimise else "maximise"),)
        columns = tuple(replace(c, name=name) for c, name in zip(asked, found.columns, strict=True))
        settings = _settings(found, about, columns).check("the new campaign", "give another value")
        wild = settings.wild_type
        if wild and not settings.min_length <= len(wild) <= settings.max_length:
            sizes = " to ".join(str(n) for n in sorted({settings.min_length, settings.max_length}))
            found.notes.append(
                f"the wild type has {len(wild)} letters, but designs will have {sizes}: --length sets it"
            )
        files: dict[str, bytes] = {}
        if about.rules:
            from stochflow.design.space import Space
            from stochflow.worlds.rules import Rules
            from stochflow.worlds.rules.write import rules_text

            if isinstance(about.rules, (str, os.PathLike)):
                files["rules.toml"] = read_bytes(about.rules)
                space = Space(settings, Path(about.rules))
            else:
                files["rules.toml"] = rules_text(_is(about.rules, Rules, "rules")).encode()
                space = Space(settings, about.rules)
            found.notes.append(space.summary)
        rows = [
            {
                "id": i,
                "sequence": s,
                "round": 0,
                "status": OK,
                **dict(zip(found.columns, map(_or_none, v), strict=True)),
            }
            for i, s, v in zip(found.ids, found.sequences, found.values, strict=True)
        ]
        store = Store.create(path, settings, files, (rows, source, content))
        return Campaign(store, found.notes)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Campaign:
        return Campaign(Store.open(path))

    # the loop ---------------------------------------------------------------------------------------------------

    def ask(self, n: int = 96, how: Ask | None = None) -> list[Row]:
        """The next batch of `n` wells, kept as a round of the folder; one row per well. Designs that are ordered already are left out."""
        import dataclasses

        from stochflow.design import model, propose
        from stochflow.design.space import Space

        how = dataclasses.replace(_is(how or Ask(), Ask, "how"), batch=n).check()
        with locked(self.path):
            rows, pending, failed = self.store.measured(), self.pending(), self.failed()
            number = self.store.next_round()
            seed = self.settings.seed * 100_003 + number if how.seed is None else how.seed
            measured = self.measured(rows)
            columns = [c.name for c in self.settings.columns]
            known = [*measured.sequences, self.settings.wild_type]
            features = _features(self.settings, known)
            fitted = model.fit(measured, columns, features, how.model, seed)
            space = Space(self.settings, self.path / "rules.toml" if self.settings.rules else None)
            made, done = propose.propose(
                self.settings, space, propose.Known(measured, pending, failed), fitted, how, seed
            )
            made = [{"id": f"r{number:02d}-{i:03d}", "well": row.pop("well"), **row} for i, row in enumerate(made, 1)]
            inputs = {
                "round": number,
                "seed": seed,
                "ask": dataclasses.asdict(how),
                "measured_files": [p.name for p in self.store.recordings()],
                "rows": len(rows),
                "sequences": len(measured.sequences),
                "best": self.best(measured),
                "pending": len(pending),
            }
            self.store.add_round(
                {
                    "inputs.json": as_json(inputs),
                    "model.json": as_json(fitted.figures),
                    "proposal.csv": as_csv(made),
                    "proposal.fasta": fasta(made).encode(),
                    "done.json": as_json(done),
                }
            )
        self.notes = [*done["notes"]]
        if pending:
            self.notes.append(
                f"{len(pending)} designs of earlier rounds have no value yet; they are left out of this batch"
            )
        return made

    def tell(self, frame: Any, again: bool = False) -> Told:
        """Record measured values: a CSV file, a table (pandas), or rows as dictionaries. Values join by id or by sequence.

        `again` records a file whose bytes were recorded before.
        """
        source, content = _content(frame)
        with locked(self.path):
            before = self.store.recorded_before(content)
            if before is not None and not again:
                raise UserError(
                    f"{source} was recorded before (as {before}): nothing was changed; say --again (in Python again=True) where it was measured twice"
                )
            rows, told = taken_in(
                self.settings, source, content, self._designs(), {r["sequence"] for r in self.store.measured()}
            )
            told.open = len(set(self.pending()) - {r["sequence"] for r in rows})
            self.store.add_recording(rows, source, content)
        return told

    # reading ----------------------------------------------------------------------------------------------------

    def measured(self, rows: Sequence[Row] | None = None) -> Measured:
        """One row per sequence, repeats pooled as the campaign was told to. Where a design came out as another string, that counts."""
        rows = self.store.measured() if rows is None else rows
        names = [c.name for c in self.settings.columns]
        good = [r for r in rows if r["status"] == OK]
        values = np.array([[np.nan if r[n] is None else r[n] for n in names] for r in good]).reshape(
            len(good), len(names)
        )
        return pooled([r.get("made") or r["sequence"] for r in good], values, self.settings.replicates)

    def _designs(self) -> dict[str, Row]:
        """Every proposed well by id."""
        return {r["id"]: {**r, "round": int(f.name)} for f in self.store.rounds() for r in self.store.proposal(f)}

    def pending(self) -> list[str]:
        """Proposed sequences without a value, in the order of proposing."""
        rows = self.store.measured()
        answered = {r["sequence"] for r in rows} | set(by_design(rows))
        return list(
            dict.fromkeys(
                r["sequence"] for i, r in self._designs().items() if i not in answered and r["sequence"] not in answered
            )
        )

    def failed(self) -> list[str]:
        """Sequences whose wells failed and that have no value."""
        rows = self.store.measured()
        good = {r["sequence"] for r in rows if r["status"] == OK}
        return [s for s in dict.fromkeys(r["sequence"] for r in rows if r["status"] == FAILED) if s not in good]

    def best(self, measured: Measured | None = None) -> dict[str, Any]:
        """The best measured value of every column, with its sequence."""
        measured = measured or self.measured()
        found = {}
        for c, column in enumerate(self.settings.columns):
            signed = column.sign * measured.values[:, c]
            i = int(np.nanargmax(signed))
            found[column.name] = {"value": float(measured.values[i, c]), "sequence": measured.sequences[i]}
        return found

    def history(self) -> list[dict[str, Any]]:
        """One entry a round, the first data being round 0: how many were measured, their values, how many intervals held."""
        return joined_rows(
            self.settings, self.store.measured(), self._designs(), [int(p.name) for p in self.store.rounds()]
        )

    def model_figures(self) -> list[dict[str, Any]] | None:
        """What the last round's model.json says; None before the first."""
        return read_json(self.store.rounds()[-1] / "model.json") if self.store.rounds() else None


@dataclass(frozen=True)
class About:
    """What `new` is told beyond the file; everything has a default."""

    columns: tuple[Column, ...] = ()
    sequence: str = ""
    minimise: bool = False
    alphabet: str = ""
    lengths: tuple[int, int] | None = None
    wild_type: str = ""
    rules: str | Rules = ""  # a file, or the rules themselves
    rules_approximate: bool = False
    replicates: Replicates = "mean"
    noise: Noise | None = None
    seed: int = 0


def _settings(found: Data, about: About, columns: Sequence[Column]) -> Settings:
    sizes = [len(s) for s in found.sequences]
    low, high = about.lengths or (min(sizes), max(sizes))
    if not 1 <= low <= high <= LONGEST:
        raise UserError(f"--length {low} {high} must be two numbers from 1 to {LONGEST}, the smaller one first")
    if not 2 <= len(found.alphabet) == len(set(found.alphabet)) <= 128:
        raise UserError(f"--alphabet {found.alphabet[:60]!r} must name 2 to 128 letters, each once")
    kept = sorted(KEPT & {c.name for c in columns})
    if kept:
        raise UserError(f'a measured column cannot be called "{kept[0]}", which a campaign keeps for itself: rename it')
    wild = spelt(about.wild_type.strip(), found.alphabet)
    if wild and not set(wild) <= set(found.alphabet):
        raise UserError(
            f"the wild type {wild[:30]!r} has letters that are not among {found.alphabet}: write it as the data are written"
        )
    return Settings(
        sequence=found.sequence,
        columns=tuple(columns),
        alphabet=found.alphabet,
        min_length=low,
        max_length=high,
        wild_type=wild,
        noise=about.noise,
        rules=bool(about.rules),
        rules_approximate=about.rules_approximate,
        replicates=about.replicates,
        seed=about.seed,
    )


def _features(settings: Settings, known: Sequence[str]) -> Any:
    """Wide enough for everything measured, orderable or made of an order."""
    from stochflow.design.features import Features

    longest = max(settings.max_length, *map(len, known))
    same = settings.min_length == longest and {len(t) for t in known if t} == {longest}
    if not settings.noise_keeps_length:
        longest += 2 + longest // 10
        same = False
    return Features(settings.alphabet, longest, same)


def by_design(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """What was recorded of each design, by its id, oldest first; ids of other tables may happen to be the same."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if str(row["round"]) not in ("", "0"):
            found.setdefault(row["id"], []).append(row)
    return found


def fasta(rows: Sequence[Row]) -> str:
    """The designs as FASTA, with well and prediction in the header."""
    out = []
    for row in rows:
        said = " ".join(f"{k}={row[k]:.4g}" for k in row if k.startswith("predicted") and row[k] is not None)
        out.append(f">{row['id']} well={row['well']} {said}\n{row['sequence']}\n")
    return "".join(out)


def _is(value: Any, kind: type[Kind], what: str) -> Kind:
    if not isinstance(value, kind):
        raise UserError(f"{what} is {value!r}, but it must be a value such as {kind.__name__}(...)")
    return value


def _or_none(x: float) -> float | None:
    return None if np.isnan(x) else float(x)


def _content(frame: Any) -> tuple[str, bytes]:
    """The name of what is recorded, and its bytes as CSV."""
    if isinstance(frame, (str, os.PathLike)):
        return os.fspath(frame), read_bytes(frame, MOST)
    if hasattr(frame, "to_csv"):
        out = io.StringIO()
        named = any(name is not None for name in frame.index.names)  # the id or the sequence may be the index
        frame.to_csv(out, index=named)
        return "table.csv", out.getvalue().encode()
    try:
        if isinstance(frame, Mapping):  # columns by name
            frame = [dict(zip(frame, row, strict=True)) for row in zip(*frame.values(), strict=True)]
        rows = [dict(r) for r in frame]
    except (TypeError, ValueError):
        rows = []
    if not rows:
        raise UserError("there are no rows to read: give a CSV file, a table or a list of dictionaries")
    return "table.csv", as_csv(rows)
