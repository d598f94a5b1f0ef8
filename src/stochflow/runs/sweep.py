"""Many settings of one task: every cell of a grid is a run folder, and all of them lie in one folder that can be taken up again.

    sweep.json      what was asked for, and each cell: its folder, its settings, how it ended
    0001-lr-0.001/  a run folder as any other
    sweep.html      all cells compared, best first

A cell that is finished is never run again. Where a setting has a range instead of values, Optuna proposes the cells: it has good
defaults, asks and is told without taking over the loop, and keeps nothing that sweep.json does not hold already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from stochflow.errors import UserError, did_you_mean
from stochflow.files.progress import stage
from stochflow.files.reading import Unreadable, read_json, shown
from stochflow.runs import pools
from stochflow.runs.config import Config, Train, UserTask, task_of, train_for
from stochflow.runs.folder import is_run, write_json
from stochflow.runs.lock import Lock
from stochflow.runs.pools import RunAll

FORMAT = 1
CELLS = 100_000
LOWER = ("excess_tv", "tv", "kl_target_model", "kl_model_target", "log_z_error", "dynamics_tv")  # better low
HIGHER = tuple(
    "elbo spearman modes expected_modes sample_score top_score diversity best_asked top_asked apart_asked".split()
)
MAIN = ("excess_tv", "tv", "elbo", "top_asked", "top_score")  # a sweep is about the first that its cells have
AT_EQUAL_BETA = ("elbo",)  # but for these, where every cell finds a target law of its own while it trains
FOLDER = re.compile(r"\d{4,}-[A-Za-z0-9._-]{1,80}")
FIXED = ("seed", "seeds", "device", "ranks")  # the same for all cells, so that they are paired by seed


@dataclass(frozen=True)
class Range:
    """Any value between two; `log`: as many per factor of ten."""

    low: float
    high: float
    log: bool = False


Grid = Mapping[str, "Sequence[Any] | Range"]


@dataclass
class Cell:
    """One choice of settings and its run."""

    folder: str
    settings: dict[str, Any]
    value: float | None = None  # of the sweep's figure, the median over the seeds
    failed: str | None = None  # why there is no value
    done: bool = False


@dataclass
class Sweep:
    """A sweep's folder, read."""

    path: Path
    base: Config
    grid: Grid
    trials: int = 0
    by: str = ""
    cells: list[Cell] = field(default_factory=list)
    free: Collection[str] = ()  # settings of training that may be chosen for the task, as in `train`

    @property
    def lower(self) -> bool:
        return self.by in LOWER

    def best_first(self) -> list[Cell]:
        """Finished cells by their value, then those without one."""
        sign = 1 if self.lower else -1
        return sorted(self.cells, key=lambda c: (c.value is None, sign * (c.value or 0)))

    def config(self, cell: Cell) -> Config:
        """The cell's whole configuration."""
        return with_settings(self.base, cell.settings)

    def save(self) -> None:
        data = {"format": FORMAT, "base": self.base.to_dict(), "grid": _grid_to_json(self.grid)}
        cells = [dataclasses.asdict(c) for c in self.cells]
        rest = {"trials": self.trials, "by": self.by, "cells": cells, "free": sorted(self.free)}
        write_json(self.path / "sweep.json", data | rest)


# what is asked for ----------------------------------------------------------------------------------------------


def parse_grid(words: Sequence[str], base: Config) -> dict[str, Sequence[Any] | Range]:
    """`lr=1e-3,3e-3 hidden=32..256`: values separated by commas, or a range; each of the setting's type."""
    grid: dict[str, Sequence[Any] | Range] = {}
    for word in words:
        name, equals, said = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not said:
            raise UserError(f"--grid {word}: write setting=value,value or setting=low..high, as in lr=1e-3,3e-3")
        if name in grid:
            raise UserError(f"--grid names {name} twice: give all its values at once, as in {name}=...,...")
        kind = _kind(name, base)
        if ".." in said:
            kind = next((k for k in (int, float) if k in _members(kind)), kind)
            low, _, high = said.partition("..")
            ends = _read(name, low, kind), _read(name, high, kind)
            if kind not in (int, float) or not ends[0] < ends[1]:
                raise UserError(f"--grid {word}: a range goes from a number to a larger one, as in lr=1e-4..1e-2")
            grid[name] = Range(*ends, log=ends[0] > 0 and ends[1] / ends[0] >= 10)
        else:
            grid[name] = list(dict.fromkeys(_read(name, v, kind) for v in said.split(",")))
    return grid


def _kind(name: str, base: Config) -> Any:
    """The type of a setting of the task or of training."""
    if name in FIXED:
        raise UserError(f"--grid {name}: it is the same for all cells; give --{name} instead")
    if isinstance(base.task, UserTask):
        own = {k: type(v) for k, v in base.task.settings.items()}
    else:
        own = {f.name: get_type_hints(type(base.task))[f.name] for f in dataclasses.fields(base.task)}
    kinds = own | get_type_hints(Train)
    known = [n for n in kinds if n in own or n in {f.name for f in dataclasses.fields(Train)}]
    if name not in known:
        raise UserError(f"--grid {name}: there is no such setting{did_you_mean(name, known)}")
    return kinds[name]


def _members(kind: Any) -> tuple[Any, ...]:
    """The types of a union, as in `float | Literal["auto"]`; else the type alone."""
    return get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else (kind,)


def _read(name: str, said: str, kind: Any) -> Any:
    said = said.strip()
    kinds = _members(kind)
    for one in kinds:
        try:
            if one is bool:
                return {"true": True, "false": False}[said.lower()]
            if one in (int, float):
                return one(said)
        except (ValueError, KeyError):
            continue
    if set(kinds) <= {bool, int, float}:
        raise UserError(f"--grid {name}: {said!r} is not of type {kinds[0].__name__}")
    return said


def with_settings(base: Config, settings: Mapping[str, Any]) -> Config:
    """A configuration with some settings changed, of the task or of training, and checked."""
    names = {f.name for f in dataclasses.fields(Train)}
    training = {k: v for k, v in settings.items() if k in names}
    own = {k: v for k, v in settings.items() if k not in names}
    task = base.task
    if own and isinstance(task, UserTask):
        task = dataclasses.replace(task, settings=task.settings | own)
    elif own:
        task = task_of(task.name, dataclasses.asdict(task) | own)
    return Config(task, train_for(task, dataclasses.asdict(base.train) | training))


# running --------------------------------------------------------------------------------------------------------


def sweep(
    base: Config,
    grid: Grid,
    out: str | Path,
    *,
    trials: int = 0,
    workers: int | str = 1,
    by: str = "",
    free: Collection[str] = (),
    tell: Callable[[Cell, int], None] | None = None,
) -> Sweep:
    """Run every cell that is not finished, and return the sweep. `tell` hears of each cell as it ends, and how many there are.

    `trials`: how many cells Optuna proposes where the grid has a range. `workers` cells run at once, in processes of this machine,
    or `"ray:4"` on Ray.
    `free`: the settings of training that may be chosen for the task where the grid does not name them, as in `train`.
    """
    many, on = _at_once(workers)
    if by and by not in LOWER + HIGHER:
        raise UserError(f'cells are not compared by "{by}"{did_you_mean(by, LOWER + HIGHER)}')
    path = Path(out)

    def asked() -> Sweep:
        return Sweep(path, base, grid, trials, by, free=set(free) - set(grid))

    with _named_errors(path):
        _open(asked())  # what is wrong is said before anything is begun
    with _alone(path), _named_errors(path), _pool(many, on) as run_all:
        made = _open(asked())  # again, now that nobody else writes it
        try:
            with stage("cells", len(made.cells), lambda: sum(c.done for c in made.cells)):
                _run_all(made, run_all, many, tell)
        except KeyboardInterrupt:
            task = f" --task {base.task.name}" if isinstance(base.task, UserTask) else ""
            again = f"stochflow sweep {made.path}{task}"
            raise KeyboardInterrupt(f"interrupted, everything saved: go on with `{again}`") from None
    return made


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """The folder's lock: a second sweep would find cells half made."""
    with _named_errors(path):
        lock = Lock(path, "sweep")
    with contextlib.closing(lock):
        yield


@contextlib.contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot use the sweep {shown(path)}: {error.strerror or error}; cells that have ended are whole: "
            "free or allow the space and start it again, or choose another --out"
        ) from error


def _run_all(made: Sweep, run_all: RunAll, workers: int, tell: Callable[[Cell, int], None] | None) -> None:
    """Run what is not finished, and where there are ranges what Optuna proposes next, until nothing is left."""
    ranged = any(isinstance(v, Range) for v in made.grid.values())
    while True:
        if ranged:
            _propose(made, workers)
        waiting = [c for c in made.cells if not c.done]
        total = made.trials if ranged else len(made.cells)
        if not waiting:
            return
        made.save()
        jobs = [(str(made.path / c.folder), made.config(c), made.free) for c in waiting]
        interrupted = False
        for place, found in run_all(jobs):
            cell = waiting[place]
            interrupted = interrupted or "interrupted" in found
            _note(made, cell, found)
            if tell is not None and "interrupted" not in found:
                tell(cell, total)
        if interrupted:
            raise KeyboardInterrupt


def check_grid(grid: Grid, trials: int) -> list[str]:
    """The settings that have ranges; UserError where grid and trials do not fit each other."""
    ranged = [name for name, v in grid.items() if isinstance(v, Range)]
    if not grid:
        raise UserError("a sweep needs --grid, as in --grid lr=1e-3,3e-3 objective=db,tb")
    if ranged and trials < 1:
        raise UserError(f"--grid {ranged[0]} is a range, so say how many cells to try: --trials N")
    if trials and not ranged:
        raise UserError("--trials is for ranges, as in --grid lr=1e-4..1e-2; a grid of values runs all its cells")
    cells = 1 if ranged else math.prod(len(v) for v in grid.values() if not isinstance(v, Range))
    if cells > CELLS:
        raise UserError(f"--grid makes {cells} cells, but a sweep holds at most {CELLS}: give fewer values")
    return ranged


def _open(asked: Sweep) -> Sweep:
    """The sweep of this folder: the one asked for, or the one that is there, which must be of the same settings."""
    ranged = check_grid(asked.grid, asked.trials)
    path = asked.path
    if (path / "sweep.json").exists():
        found = read_sweep(path)
        same = found.base.to_dict() == asked.base.to_dict() and _grid_to_json(found.grid) == _grid_to_json(asked.grid)
        if not same:
            raise UserError(
                f"{path} holds a sweep of other settings: go on with `stochflow sweep {path}`, or choose another --out"
            )
        found.base, found.trials = asked.base, max(asked.trials, found.trials)
        for cell in found.cells:  # what failed is tried again
            cell.done, cell.failed = cell.done and cell.failed is None, None
        return found
    if is_run(path):
        raise UserError(f"{path} is a run folder: choose another --out for the sweep")
    if not ranged:
        for values in itertools.product(*asked.grid.values()):  # type: ignore[arg-type]
            _add(asked, dict(zip(asked.grid, values, strict=True)))
    for cell in asked.cells:
        asked.config(cell)  # a cell that cannot be trained is refused before any is
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be made ({error.strerror or error}): choose another --out") from error
    asked.save()
    return asked


def _add(made: Sweep, settings: dict[str, Any]) -> None:
    name = "-".join(f"{k}-{v:.4g}" if isinstance(v, float) else f"{k}-{v}" for k, v in settings.items())
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80]
    made.cells.append(Cell(f"{len(made.cells) + 1:04d}-{name}", settings))


def read_sweep(path: str | Path) -> Sweep:
    """A sweep's folder."""
    file = Path(path) / "sweep.json"
    if not file.exists():
        raise UserError(f"{path} is not a sweep (it holds no sweep.json): give the --out of `stochflow sweep`")
    try:
        data = read_json(file, in_folder=True)
        if data["format"] > FORMAT:
            raise UserError(
                f"{file} has format {data['format']}, but this version reads up to {FORMAT}: upgrade stochflow"
            )
        grid = {k: Range(**v) if isinstance(v, dict) else list(v) for k, v in data["grid"].items()}
        cells = [Cell(**c) for c in data["cells"]]
        trials, by = int(data["trials"]), str(data["by"])
        free = {str(name) for name in data.get("free", [])}  # folders of earlier versions have none
        if not all(FOLDER.fullmatch(c.folder) for c in cells):
            raise ValueError("a cell's folder must lie in the sweep's own")
    except (Unreadable, KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} is damaged ({shown(error)}): start the sweep again in another --out") from error
    return Sweep(Path(path), Config.from_dict(data["base"], str(file)), grid, trials, by, cells, free)


def _grid_to_json(grid: Grid) -> dict[str, Any]:
    return {k: dataclasses.asdict(v) if isinstance(v, Range) else list(v) for k, v in grid.items()}


def _note(made: Sweep, cell: Cell, found: dict[str, Any]) -> None:
    """Write down how a cell ended."""
    if "interrupted" in found:
        return
    cell.failed = found.get("failed")
    summary = found.get("summary", {})
    if not made.by:
        apart = AT_EQUAL_BETA if summary.get("beta") is not None else ()
        made.by = next((k for k in MAIN if summary.get(k) is not None and k not in apart), "")
    value = summary.get(made.by)
    cell.value = value if isinstance(value, (int, float)) and math.isfinite(value) else None
    cell.done = True
    made.save()


def run_cell(folder: str, config: Config, free: Collection[str] = ()) -> dict[str, Any]:
    """Train one cell, or go on with it, or read what it found: {"summary"}, {"failed": why} or {"interrupted"}."""
    from stochflow.runs import experiment
    from stochflow.runs.folder import Run
    from stochflow.runs.trust import Consent

    try:
        if not is_run(folder):
            return {"summary": experiment.train(config, out=folder, free=free).summary}
        run = Run.open(folder)
        total = run.config.train.steps if "steps" in free else config.train.steps
        summary = run.read("summary.json") or {}
        if summary.get("step", 0) >= total:
            return {"summary": summary}
        named = Consent(config.task.name) if isinstance(config.task, UserTask) else None  # what this sweep is of
        return {"summary": experiment.resume(folder, total, task=named).summary}
    except UserError as error:
        return {"failed": str(error)}
    except KeyboardInterrupt:
        return {"interrupted": True}


def _at_once(workers: int | str) -> tuple[int, str]:
    """How many cells run at once, and where: 2 -> (2, "local"), "ray:4" -> (4, "ray")."""
    kind, _, count = str(workers).rpartition(":")
    if kind not in ("", "ray") or not count.isdecimal() or int(count) < 1:
        raise UserError(f"{workers} cells at once: give at least one, such as 2, or ray:2 for a Ray cluster")
    return int(count), kind or "local"


def _pool(workers: int, on: str) -> contextlib.AbstractContextManager[RunAll]:
    if on == "ray":
        return pools.on_ray(workers, run_cell)
    return pools.here(run_cell) if workers == 1 else pools.processes(workers, run_cell)


# ranges ---------------------------------------------------------------------------------------------------------


def _propose(made: Sweep, workers: int) -> None:
    """As many new cells as run at once, from what the finished ones found: the same whatever was interrupted in between."""
    if len(made.cells) >= made.trials or any(not c.done for c in made.cells):
        return
    optuna = _optuna()
    study = optuna.create_study(
        direction="minimize" if made.lower or not made.by else "maximize",
        sampler=optuna.samplers.TPESampler(seed=made.base.train.seed + len(made.cells), constant_liar=True),
    )
    kinds = {name: _distribution(optuna, v) for name, v in made.grid.items()}
    for cell in made.cells:
        state = optuna.trial.TrialState.COMPLETE if cell.value is not None else optuna.trial.TrialState.FAIL
        study.add_trial(
            optuna.trial.create_trial(params=cell.settings, distributions=kinds, value=cell.value, state=state)
        )
    for _ in range(min(workers, made.trials - len(made.cells))):
        _add(made, dict(study.ask(kinds).params))


def _distribution(optuna: Any, values: Sequence[Any] | Range) -> Any:
    d = optuna.distributions
    if not isinstance(values, Range):
        return d.CategoricalDistribution(list(values))
    kind = d.IntDistribution if isinstance(values.low, int) else d.FloatDistribution
    return kind(values.low, values.high, log=values.log)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UserError(
            "a range in --grid needs Optuna: pip install 'stochflow[sweep]', or give values instead"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
