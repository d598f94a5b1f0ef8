"""The run folder: everything a run knows, written so that it survives being killed at any moment.

    config.json       what was asked for; its presence is what makes a folder a run
    environment.json  versions, hardware, commit, threads
    metrics.jsonl     one line per log, append-only
    oracle.jsonl      what an oracle in Python answered, one line per object, written at once
    checkpoints/      step-00001000.safetensors: the last two and best.safetensors; never unpickled
    summary.json      the final figures

A whole file is written under a temporary name, synced and renamed, so that a reader sees the old one or the new one.
torch is imported only where tensors are read or written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from stochflow import __version__
from stochflow.errors import UserError
from stochflow.files.reading import (
    MB,
    Unreadable,
    one_line,
    parse_json,
    read_json,
    read_json_lines,
    refuse_link_out,
    shown,
)
from stochflow.files.schema import integer, number, optional
from stochflow.runs.atomic import appending, replacing
from stochflow.runs.config import Config
from stochflow.runs.lock import Lock
from stochflow.runs.shapes import SHAPES
from stochflow.types import plain

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 2  # of a checkpoint; a newer one is refused by name, and 1 is read
MARK = ', "checksum": "'
HEADER = 16 * MB  # of a checkpoint, some hundred bytes a tensor
WIDTHS = dict(
    zip(
        "BOOL U8 I8 F8_E5M2 F8_E4M3 I16 U16 F16 BF16 I32 U32 F32 F64 I64 U64".split(),
        (1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8),
        strict=True,
    )
)
DIMENSIONS = 16  # of a tensor
SMALL = 16 * MB  # the most that is read of a JSON file
KEEP = 2  # checkpoints kept besides the best
OURS = frozenset(  # the files a run writes beside its checkpoints
    "config.json environment.json summary.json metrics.jsonl oracle.jsonl samples.csv samples.fasta law.npz report.html yardstick.json".split()
)
log = logging.getLogger("stochflow")


class Checkpoint(NamedTuple):
    """What one file holds: tensors flat by name, and scalars."""

    path: Path
    tensors: dict[str, Tensor]
    scalars: dict[str, Any]  # step, format, version, and whatever the writer added

    @property
    def step(self) -> int:
        return int(self.scalars["step"])


class Run:
    """An open run folder. Made by `Run.create` or `Run.open`; a writer holds the folder's lock until `close`."""

    def __init__(self, path: Path, config: Config, lock: Lock | None = None):
        self.path, self.config, self._lock = path, config, lock
        self.gaps: list[str] = []  # what was found damaged in the folder and left out

    # opening ----------------------------------------------------------------------------------------------------

    @staticmethod
    def create(path: str | os.PathLike[str], config: Config) -> Run:
        """A new run in this folder; a folder that already holds one is refused."""
        path = Path(path)
        _refuse_existing(path)
        with _named_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = Lock(path)
            try:
                _refuse_existing(path)  # again, now that nobody else can be making it
                (path / "checkpoints").mkdir(exist_ok=True)
                write_json(path / "config.json", config.to_dict())
            except BaseException:
                lock.close()
                raise
        return Run(path, config, lock)

    @staticmethod
    def open(path: str | os.PathLike[str], write: bool = False) -> Run:
        """A run that is there; `write` takes the folder's lock, and reading needs none."""
        path = Path(path)
        if not is_run(path):
            what = "does not exist" if not path.exists() else "is not a run folder (it holds no config.json)"
            raise UserError(f"{path} {what}: give the folder that `stochflow train` printed")
        with _named_errors(path):
            config = read_json(path / "config.json", Config.from_dict, SMALL)
            if write:
                _refuse_linked(path / "checkpoints")
            lock = Lock(path) if write else None
            if write:
                for leftover in [
                    *path.glob("*.tmp"),
                    *(path / "checkpoints").glob("*.tmp"),
                ]:  # of a writer that was killed
                    if (
                        leftover.name.removesuffix(".tmp") in OURS or leftover.parent != path
                    ):  # what others keep here is theirs
                        leftover.unlink()
        return Run(path, config, lock)

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def close(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    # small files ------------------------------------------------------------------------------------------------

    def write(self, name: str, data: Any) -> Path:
        """A JSON file of the folder, replaced whole."""
        self._check_lock()
        with _named_errors(self.path):
            return write_json(self.path / name, data)

    @contextlib.contextmanager
    def file(self, name: str, text: bool = False) -> Iterator[IO[Any]]:
        """A file of the folder to write into, replaced whole."""
        self._check_lock()
        with _named_errors(self.path), replacing(self.path / name, text) as file:
            yield file

    def read(self, name: str) -> Any:
        """A JSON object of the folder; None where there is none, or where it is damaged, which is said."""
        path = self.path / name
        if not os.path.lexists(path):
            return None
        try:
            found, gaps = SHAPES.get(name, _an_object)(read_json(path, None, SMALL), shown(path))
        except Unreadable as error:
            self._left_out([str(error)])
            return None
        self._left_out(gaps)
        return self._of_our_seeds(found) if "seeds" in found else found

    def _of_our_seeds(self, record: dict[str, Any]) -> dict[str, Any]:
        """The values of each seed, where there are as many as seeds."""
        own = {k: v for k, v in record["seeds"].items() if len(v) == self.config.train.seeds}
        if len(own) < len(record["seeds"]):
            self._left_out([f"{shown(self.path)} holds figures of another number of seeds than its config.json says"])
        return record | {"seeds": own}

    def _left_out(self, gaps: list[str]) -> None:
        """Say what is damaged, once."""
        new = [gap for gap in gaps if gap not in self.gaps]
        self.gaps += new
        if new:
            more = f" (and {len(new) - 1} more such)" if len(new) > 1 else ""
            log.warning("%s%s; it is left out", new[0], more)

    # metrics ----------------------------------------------------------------------------------------------------

    def log(self, record: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl and hand it to the system at once."""
        self._check_lock()
        with _named_errors(self.path), appending(self.path / "metrics.jsonl") as file:
            file.write((json.dumps(plain(record)) + "\n").encode())
        if self._lock is not None:
            self._lock.alive()

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line cut off by a kill is left out."""
        try:
            return self._lines()
        except Unreadable as error:
            self._left_out([str(error)])
            return []

    def _lines(self) -> list[dict[str, Any]]:
        """The same; Unreadable where the file as a whole is not for reading."""
        path = self.path / "metrics.jsonl"
        if not os.path.lexists(path):
            return []
        found = read_json_lines(path, SHAPES["metrics.jsonl"])
        self._left_out([*found.gaps, *(gap for _, gaps in found.records for gap in gaps)])
        return [self._of_our_seeds(record) if "seeds" in record else record for record, _ in found.records]

    def truncate_metrics(self, step: int) -> None:
        """Forget what was logged after `step`: a resumed run logs it again."""
        path = self.path / "metrics.jsonl"
        if path.exists():  # a file that cannot be read at all is not replaced by an empty one
            kept = "".join(json.dumps(r) + "\n" for r in self._lines() if r.get("step", 0) <= step)
            with _named_errors(self.path):
                _replace(path, kept.encode())

    # checkpoints ------------------------------------------------------------------------------------------------

    def save(self, step: int, tensors: dict[str, Tensor], best: bool = False, **scalars: Any) -> Path:
        """Write the checkpoint of `step`, drop all but the last two; `best` writes best.safetensors instead."""
        folder = self.path / "checkpoints"
        path = folder / ("best.safetensors" if best else f"step-{step:08d}.safetensors")
        self._check_lock()
        with _named_errors(self.path):
            _refuse_linked(folder)
            folder.mkdir(exist_ok=True)
            self._sync_metrics()
            _replace(path, pack(tensors, {"step": step, **scalars}))
            for old in [] if best else self.checkpoints()[KEEP:]:
                old.unlink()
        return path

    def _sync_metrics(self) -> None:
        """The lines that a checkpoint comes after are on the disk before it."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def checkpoints(self) -> list[Path]:
        """The numbered checkpoints, newest first."""
        folder = self.path / "checkpoints"
        return sorted(
            (p for p in folder.glob("step-*.safetensors") if re.fullmatch(r"step-\d{8,}", p.stem)),
            key=_step_of,
            reverse=True,
        )

    def load_best(self) -> Checkpoint | None:
        """The best checkpoint, None where there is none or it is damaged."""
        path = self.path / "checkpoints" / "best.safetensors"
        try:
            return load_checkpoint(path) if path.exists() else None
        except DamagedCheckpoint:
            return None

    def load(self) -> Checkpoint | None:
        """The newest whole checkpoint, None where none was ever written. A damaged one is named and the one before is taken."""
        damaged = []
        best = self.path / "checkpoints" / "best.safetensors"
        for path in [*self.checkpoints(), *([best] if best.exists() else [])]:
            try:
                found = load_checkpoint(path)
            except DamagedCheckpoint as error:
                damaged.append(path)
                log.warning("%s", error)
                continue
            if damaged:
                log.warning("%s is used instead", shown(path))
            return found
        if damaged:
            names = ", ".join(p.name for p in damaged)
            raise UserError(f"every checkpoint in {self.path} is damaged ({names}): train again into another --out")
        return None


# files ----------------------------------------------------------------------------------------------------------


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether this folder holds a run."""
    return (Path(path) / "config.json").is_file()


def _an_object(value: Any, where: str) -> tuple[Any, list[str]]:
    if not isinstance(value, dict):
        raise Unreadable(f"{where} is not a JSON object: restore or remove it")
    return value, []


def write_json(path: Path, data: Any) -> Path:
    """A JSON file, replaced whole."""
    _replace(path, (json.dumps(plain(data), indent=2) + "\n").encode())
    return path


def _replace(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """What the system refuses (full disk, read-only folder, a file in the way) is the user's to mend: say it in one sentence."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:  # a NUL, or half a character
        if not isinstance(error, UnicodeEncodeError) and "null byte" not in str(error):
            raise
        raise UserError(f"{shown(path)} is no name for a folder ({error}): choose another --out") from error
    except OSError as error:
        where = error.filename or path
        raise UserError(
            f"cannot use the run folder {path}: {error.strerror or error} ({where}); what was saved before is whole: "
            "free or allow the space and resume it, or choose another --out"
        ) from error


def _refuse_linked(folder: Path) -> None:
    """Nothing is written or removed behind a link that a folder brought along."""
    if folder.is_symlink():
        raise UserError(f"{shown(folder)} is a link, and only a folder of the run's own is written: replace it")


def _refuse_existing(path: Path) -> None:
    if is_run(path):
        raise UserError(
            f"{path} already holds a run: continue it with `stochflow resume {path} --steps TOTAL`, or choose another --out"
        )
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, but --out is the run folder: choose another --out")


# the checkpoint file --------------------------------------------------------------------------------------------


class DamagedCheckpoint(Exception):
    """A checkpoint file that cannot be read whole."""


def pack(tensors: dict[str, Tensor], scalars: dict[str, Any]) -> bytes:
    """One safetensors file: tensors flat by name; scalars and the format as JSON in its header, beside a checksum of all."""
    import safetensors.torch

    still = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    said = json.dumps(plain({"format": FORMAT, "version": __version__, **scalars}))
    # within, and last: two notes would stand in any order
    return safetensors.torch.save(still, {"stochflow": f'{said[:-1]}{MARK}{_checksum(still, said)}"}}'})


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read one file; DamagedCheckpoint where it is not whole, UserError where it is from a newer stochflow."""
    import safetensors
    import safetensors.torch

    path = Path(path)
    try:
        refuse_link_out(path)
        check_header(path)
        with safetensors.safe_open(path, "pt") as f:
            notes = f.metadata() or {}
            text = notes["stochflow"]
            scalars = parse_json(text, "its header")
            form = int(scalars["format"])
            if form > FORMAT:
                raise Newer(
                    f"{path} has checkpoint format {form}, but stochflow {__version__} reads up to {FORMAT}: upgrade stochflow"
                )
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118  (no mapping)
        said, _, mark = text.rpartition(MARK)
        whole = mark == f'{_checksum(tensors, said + "}")}"}}' if form > 1 else _as_before(scalars, tensors)
        step = integer(0)(scalars["step"], "its step")
        optional(number())(scalars.get("best_so_far"), "its best_so_far")
    except Newer as error:
        raise UserError(str(error)) from None
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise DamagedCheckpoint(
            f"the checkpoint {shown(path)} is damaged ({type(error).__name__}: {one_line(str(error), 200)})"
        ) from error
    if not whole:
        raise DamagedCheckpoint(f"the checkpoint {shown(path)} is damaged (its checksum does not match)")
    return Checkpoint(path, tensors, scalars | {"step": step})


class Newer(Exception):
    """A checkpoint of a format that is not known yet."""


def check_header(path: Path) -> None:
    """ValueError where the header of a safetensors file does not fit the file: asked before anything is allocated."""
    content = path.stat()
    if not stat.S_ISREG(content.st_mode):
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(HEADER, content.st_size - 8):
            raise ValueError(f"its header claims {length} bytes")
        said = parse_json(file.read(length).decode("utf-8"), "its header")
    data, ends = content.st_size - 8 - length, 0
    for name, entry in said.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        if len(entry["shape"]) > DIMENSIONS:
            raise ValueError(f"its tensor {shown(name, 80)} has {len(entry['shape'])} dimensions")
        size = math.prod(entry["shape"]) * WIDTHS[entry["dtype"]]
        if not 0 <= first <= last <= data or size != last - first or any(n < 0 for n in entry["shape"]):
            raise ValueError(f"its tensor {shown(name, 80)} does not fit the file")
        ends = max(ends, last)
    if ends != data:
        raise ValueError("it is not as long as its header says")


def _checksum(tensors: dict[str, Tensor], said: str) -> str:
    """Over the header's own words, and names, types, shapes and bytes: a flipped bit leaves the file's structure whole, and
    would go unseen."""
    import torch

    total = zlib.crc32(said.encode())
    for name in sorted(tensors):
        t = tensors[name]
        total = zlib.crc32(f"{name} {t.dtype} {tuple(t.shape)}".encode(), total)
        total = zlib.crc32(t.reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _as_before(scalars: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
    """The checksum of format 1, over names and bytes alone."""
    import torch

    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return scalars.get("checksum") == total


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


# where it ran ---------------------------------------------------------------------------------------------------


def environment(device: str) -> dict[str, Any]:
    """Versions, hardware and commit, for `environment.json`."""
    import torch

    versions = {}
    for name in ("torch", "numpy", "scipy", "numba", "llvmlite", "safetensors", "tyro"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "stochflow": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _commit() -> str | None:
    """The commit of the source, where the package is run from a checkout."""
    here = Path(__file__).parent
    if shutil.which("git") is None or not (here.parent.parent / ".git").exists():
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=5,
        )
        return done.stdout.strip() or None
    return None
