"""The folder of a campaign: written so that it survives being killed at any moment, and read without running anything in it.

    campaign.json          what was asked for; its presence is what makes a folder a campaign
    rules.toml             design rules, where there are any
    measured/0000.csv ...  every value ever recorded, one file a recording, never changed
    sources/               the files they came from, as they were
    rounds/001/            one folder a batch: inputs.json, model.json, proposal.csv, proposal.fasta, done.json
    .lock                  held by the one process that writes

A file is written under a temporary name, synced and renamed; a round is a folder that is renamed when it is whole.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stochflow.design.settings import Settings
from stochflow.errors import UserError
from stochflow.files import reading
from stochflow.runs.atomic import replacing
from stochflow.runs.lock import Lock
from stochflow.types import plain

Row = dict[str, Any]
OK, FAILED = "ok", "failed"
FOLDERS = ("measured", "sources", "rounds")
NEEDED = ("id", "sequence", "role", "well")  # of every proposal


class Store:
    """An open campaign folder."""

    def __init__(self, path: Path, settings: Settings):
        self.path, self.settings = path, settings

    # opening ----------------------------------------------------------------------------------------------------

    @staticmethod
    def create(
        path: str | os.PathLike[str], settings: Settings, files: dict[str, bytes], first: tuple[list[Row], str, bytes]
    ) -> Store:
        """A new campaign; `files` lie beside its settings, `first` is its first recording. The settings come last: without them
        it is no campaign.
        """
        path = Path(path)
        _refuse(path)
        with named_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            with locked(path):
                _refuse(path)
                for name in FOLDERS:
                    (path / name).mkdir(exist_ok=True)
                    for old in (path / name).iterdir():  # of a `new` that was killed
                        shutil.rmtree(old) if old.is_dir() else old.unlink()
                for name, content in files.items():
                    write(path / name, content)
                store = Store(path, settings)
                store.add_recording(*first)
                write(path / "campaign.json", as_json(settings.to_dict()))
        return store

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Store:
        path = Path(path)
        file = path / "campaign.json"
        if not file.is_file():
            what = "does not exist" if not path.exists() else "is not a campaign (it holds no campaign.json)"
            raise UserError(f"{path} {what}: make one with `stochflow design new {path} --data FILE.csv`")
        with named_errors(path):
            return Store(path, Settings.from_dict(read_json(file), str(file)))

    # measurements -----------------------------------------------------------------------------------------------

    def recordings(self) -> list[Path]:
        return sorted(p for p in (self.path / "measured").glob("*.csv") if re.fullmatch(r"\d{4,}", p.stem))

    def measured(self) -> list[Row]:
        """Every recorded row, oldest first; value columns are floats or None."""
        names = [c.name for c in self.settings.columns]
        found = []
        for file in self.recordings():
            for row in read_csv(file, ("id", "sequence", "status")):
                try:
                    values = {n: float(row[n]) if row[n] else None for n in names}
                    found.append({**row, **values, "recording": int(file.stem)})
                except (KeyError, ValueError, TypeError):
                    raise UserError(f"{file} cannot be read as measurements: restore it from a copy") from None
        return found

    def add_recording(self, rows: list[Row], source: str, content: bytes) -> Path:
        """One more file of measurements, and the file it came from. Called with the lock held."""
        number = int(self.recordings()[-1].stem) + 1 if self.recordings() else 0
        mark = hashlib.sha256(content).hexdigest()
        name = re.sub(r"[^\w.-]", "_", Path(source).name)[-80:] or "table.csv"
        target = self.path / "measured" / f"{number:04d}.csv"
        with named_errors(self.path):
            write(self.path / "sources" / f"{number:04d}-{mark[:12]}-{name}", content)
            write(target, as_csv(rows))
        return target

    def recorded_before(self, content: bytes) -> str | None:
        """The name of an earlier recording of the same bytes."""
        mark = hashlib.sha256(content).hexdigest()[:12]
        done = {p.stem for p in self.recordings()}
        for p in sorted((self.path / "sources").glob(f"*-{mark}-*")):
            if p.name.partition("-")[0] in done:
                return p.name
        return None

    # rounds -----------------------------------------------------------------------------------------------------

    def rounds(self) -> list[Path]:
        """Folders of the batches that were proposed, oldest first."""
        return sorted(
            p for p in (self.path / "rounds").glob("[0-9]*") if p.name.isdigit() and (p / "done.json").is_file()
        )

    def proposal(self, folder: Path) -> list[Row]:
        """The rows of a round's proposal, numbers as numbers."""
        return [{k: _typed(k, v) for k, v in row.items()} for row in read_csv(folder / "proposal.csv", NEEDED)]

    def next_round(self) -> int:
        return int(self.rounds()[-1].name) + 1 if self.rounds() else 1

    def add_round(self, files: dict[str, bytes]) -> Path:
        """A new round, whole or not at all. Called with the lock held."""
        base = self.path / "rounds"
        with named_errors(self.path):
            for left in base.glob(".*.tmp"):  # of a `propose` that was killed
                shutil.rmtree(left)
            number = self.next_round()
            made = base / f".{number:03d}.tmp"
            made.mkdir()
            for name, content in files.items():
                write(made / name, content)
            os.replace(made, base / f"{number:03d}")
            sync(base)
        return base / f"{number:03d}"


# files ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """The folder's lock, so that two processes do not write at once; free again when its process ends, however it ends."""
    for name in FOLDERS:  # nothing is written or removed behind a link that a folder brought along
        if (path / name).is_symlink():
            raise UserError(
                f"{reading.shown(path / name)} is a link, and only a campaign's own folders are written: replace it"
            )
    with named_errors(path):
        lock = Lock(path, "campaign", "")
        try:
            yield
        finally:
            lock.close()


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise UserError(
            f"cannot use the campaign {path}: {error.strerror or error} ({where}); what was recorded before is whole"
        ) from error


def write(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def sync(folder: Path) -> None:
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def as_json(data: Any) -> bytes:
    return (json.dumps(plain(data), indent=1) + "\n").encode()


def read_json(file: Path) -> Any:
    """A file of the folder, which may be a stranger's: bounded, finite, no link that leads out."""
    return reading.read_json(file)


def as_csv(rows: list[Row]) -> bytes:
    """All columns that any row has, in the order of their first appearance."""
    out = io.StringIO()
    names = list(dict.fromkeys(k for row in rows for k in row))
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v is None else short(v) for k, v in row.items()} for row in rows)
    return out.getvalue().encode()


def short(value: Any) -> Any:
    return f"{value:.10g}" if isinstance(value, float) else value


def read_csv(file: Path, needed: Sequence[str] = ()) -> list[Row]:
    """The rows of a file of the folder; every row has the columns that are needed."""
    text = reading.read_cells(file)
    try:
        rows = list(csv.DictReader(io.StringIO(text)))
    except csv.Error as error:
        raise UserError(f"{reading.shown(file)} cannot be read ({error}): restore it from a copy") from error
    if any(row.get(name) is None for row in rows for name in needed):
        raise UserError(f"{reading.shown(file)} lacks one of the columns {', '.join(needed)}: restore it from a copy")
    if any(None in row for row in rows):
        raise UserError(f"{reading.shown(file)} has a row with more cells than columns: restore it from a copy")
    return rows


TEXT = frozenset("id sequence role reason source nearest_measured well edits preference".split())


def _typed(name: str, text: str) -> Any:
    if name in TEXT or text is None:
        return text
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text) if text else None
    except ValueError:
        return text


def _refuse(path: Path) -> None:
    if (path / "campaign.json").exists():
        raise UserError(
            f"{path} already holds a campaign: go on with `stochflow design propose {path}`, or choose another folder"
        )
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, but a campaign is a folder: choose another name")
    own = {".lock", "rules.toml", "campaign.json", *FOLDERS}  # of a `new` that was killed, while it wrote a file, too
    if path.is_dir() and any(p.name.removesuffix(".tmp") not in own for p in path.iterdir()):
        raise UserError(f"{path} holds other files: choose an empty or new folder for the campaign")
