"""`stochflow sweep`: many settings of one task, each in a run folder, and a page that compares them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from stochflow.cli.complaints import parsed
from stochflow.cli.parsing import as_config, explained, not_asked_for, parse_task, task_and_flags
from stochflow.files.reading import shown
from stochflow.law.verdict import number
from stochflow.runs import sweep as sweeps
from stochflow.runs.config import TASKS, Train, UserTask
from stochflow.runs.ranges import check_numbers

HELP = {
    "grid": "settings and their values, as in lr=1e-3,3e-3 objective=db,tb; low..high is a range, which needs --trials",
    "out": "the sweep's folder; by default runs/sweep-<task>-<time>",
    "on": "processes of this machine, or a Ray cluster: that of RAY_ADDRESS, else a local one (it takes 15 s to start)",
    "workers": "cells that run at once; 0: one per core",
    "trials": "cells that Optuna proposes, where --grid has a range",
    "by": "the figure to sort by; by default excess_tv, tv, elbo or top_score, whichever is known first",
    "quiet": "say only the result",
}


def sweep(words: list[str]) -> int:
    """Run a sweep, or go on with the one whose folder is given."""
    if words and (Path(words[0]) / "sweep.json").is_file():
        return _again(Path(words[0]), words[1:])
    name, flags = task_and_flags("sweep", words)
    made = parse_task("sweep", name, flags, _extra(), Train(**getattr(TASKS.get(name), "train", {})))
    base = as_config(name, made.task, made.train)
    grid = sweeps.parse_grid(made.grid, base)
    out = made.out or f"runs/sweep-{name.replace(':', '.')}-{time.strftime('%Y%m%d-%H%M%S')}"
    return _run(base, grid, Path(out), made, free=not_asked_for(flags))


def _extra() -> list[Any]:
    kinds: dict[str, tuple[Any, Any]] = {
        "grid": (tuple[str, ...], ()),
        "out": (str, ""),
        "on": (Literal["local", "ray"], "local"),
        "workers": (int, 0),
        "trials": (int, 0),
        "by": (str, ""),
        "quiet": (bool, False),
    }
    return [
        (name, Annotated[kind, explained(HELP[name])], field(default=default))
        for name, (kind, default) in kinds.items()
    ]


def _again(path: Path, words: list[str]) -> int:
    from stochflow.runs.trust import Consent, agreed

    kept = sweeps.read_sweep(path)
    again = [
        (
            "task",
            Annotated[str, explained("the task's module:function again, where it is your own code")],
            field(default=""),
        ),
        ("trust", Annotated[bool, explained("run the code that the folder names")], field(default=False)),
    ]
    own = [f for f in _extra() if f[0] in ("on", "workers", "quiet", "trials")] + again
    kind = dataclasses.make_dataclass("sweep", own, frozen=True)
    kind.__doc__ = "Go on with a sweep: finished cells stay as they are."
    asked: Any = parsed(kind, words, prog=f"stochflow sweep {path}", config=(tyro.conf.OmitArgPrefixes,))
    base = kept.base
    if isinstance(base.task, UserTask):
        task = agreed(base.task, Consent(asked.task or None, asked.trust), path)
        base = dataclasses.replace(base, task=task)
    return _run(base, kept.grid, path, asked, asked.trials or kept.trials)


def _run(base: Any, grid: Any, out: Path, asked: Any, trials: int | None = None, free: Collection[str] = ()) -> int:
    total = asked.trials if trials is None else trials
    check_numbers({"workers": asked.workers, "trials": total}, {"workers": (0, 1024), "trials": (0, 10**6)})
    sweeps.check_grid(grid, total)
    workers = asked.workers or sweeps.cores()
    begun = time.monotonic()
    if not asked.quiet:
        print(f"sweep folder: {shown(out)}", flush=True)

    done = 0

    def tell(cell: sweeps.Cell, total: int) -> None:
        nonlocal done
        done += 1
        if not asked.quiet:
            found = cell.failed or ("no figure" if cell.value is None else number(cell.value))
            print(
                f"cell {done} of {total}  {cell.folder}  {shown(found)}  {time.monotonic() - begun:.0f} s", flush=True
            )

    by = getattr(asked, "by", "")
    at_once = f"ray:{workers}" if asked.on == "ray" else workers
    how: dict[str, Any] = {"trials": total, "workers": at_once, "by": by, "free": free}
    found = sweeps.sweep(base, grid, out, **how, tell=tell)
    from rich.console import Console

    from stochflow.look.sweep import rows_of, table, write_sweep

    console = Console(highlight=False)
    console.print(table(found, rows_of(found)))
    print(shown(write_sweep(out)))
    return 0 if any(c.value is not None for c in found.cells) else 1
