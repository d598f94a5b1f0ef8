"""What a run folder holds, read for looking at: nothing here changes it, and what is missing is simply not there."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stochflow.files.arrays import read_npz
from stochflow.files.reading import Unreadable, shown
from stochflow.look.health import Finding, diagnose
from stochflow.runs import shapes
from stochflow.runs.config import TASKS, Config, Train, UserTask
from stochflow.runs.export import rows_and_gaps
from stochflow.runs.folder import Run

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFiles:
    """One run, as its folder tells it."""

    path: Path
    config: Config
    rows: list[Row]  # of metrics.jsonl
    summary: Row  # of summary.json; empty while the run is going
    environment: Row
    designs: list[dict[str, str]]  # of samples.csv, best first
    law: dict[str, np.ndarray]  # of law.npz (see picture.py); empty where it is not there
    gaps: Sequence[str] = ()  # what is damaged in the folder, and so left out

    @staticmethod
    def read(path: str | os.PathLike[str]) -> RunFiles:
        """Read a folder that `stochflow train` made."""
        run = Run.open(path)
        rows, summary, environment = run.metrics(), run.read("summary.json") or {}, run.read("environment.json") or {}
        designs, more = rows_and_gaps(run.path / "samples.csv")
        law, yet_more = _law(run.path / "law.npz")
        gaps = [*run.gaps, *more, *yet_more]
        return RunFiles(run.path, run.config, rows, summary, environment, designs, law, gaps)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def step(self) -> int:
        return max((r.get("step", 0) for r in self.rows), default=0)

    @property
    def done(self) -> bool:
        """Whether it reached the end that was asked for, or that of its oracle calls, and said so."""
        return bool(self.summary) and (self.summary.get("step", 0) >= self.config.train.steps or self.spent)

    @property
    def spent(self) -> bool:
        """Whether its budget of oracle calls ended it, before its last step: all but the final look's part was asked for."""
        t, calls, look = self.config.train, self.summary.get("oracle_calls"), self.summary.get("samples")
        step = self.summary.get("step", 0)
        if not t.oracle_calls or not isinstance(calls, int) or not isinstance(look, int) or step >= t.steps:
            return False
        return self.summary.get("tv") is None and step >= self.step and calls >= t.oracle_calls - look * t.seeds

    @property
    def behind(self) -> int | None:
        """The step at which designs and law were written, where the run has been taken up again since; they are rewritten at its end."""
        step = self.summary.get("step")
        return step if isinstance(step, int) and not self.done else None

    @property
    def seeds(self) -> list[int]:
        return [self.config.train.seed + i for i in range(self.config.train.seeds)]

    @property
    def last(self) -> Row:
        """The final figures, or those of the last look at a run that is still going."""
        if self.summary and self.summary.get("step", 0) >= self.step:
            return self.summary
        looks = [r for r in self.rows if r.get("elbo") is not None or r.get("tv") is not None]
        return looks[-1] if looks else {}

    def health(self) -> list[Finding]:
        return diagnose(self.rows, self.config.to_dict())

    @property
    def training(self) -> dict[str, Any]:
        """How it was trained: the settings, with what Python gave as objects in the place of their words."""
        return self.config.to_dict()["train"] | self.config.values

    def command(self) -> str:
        """The command, or where objects were given the call in Python, that repeats the run: what differs from the defaults alone."""
        config, given = self.config, _given(self.config)
        if not config.values:
            return shlex.join(["stochflow", "train", config.task.name, *_flags(given)])
        words = [f"{name}={value!r}" for name, value in given.items() if name not in config.values]
        return f"train({', '.join([repr(config.task.name), *words, *(f'{k}={v}' for k, v in config.values.items())])})"


def _given(config: Config) -> dict[str, Any]:
    """The settings of task and training that are not the defaults."""
    task = config.task
    given: dict[str, Any]
    if isinstance(task, UserTask):
        given = dict(task.settings)
    else:
        default = TASKS[task.name]()
        given = {
            f.name: getattr(task, f.name)
            for f in dataclasses.fields(task)
            if getattr(task, f.name) != getattr(default, f.name)
        }
    base = Train(**task.train)
    train = config.train
    given |= {
        f.name: getattr(train, f.name)
        for f in dataclasses.fields(Train)
        if getattr(train, f.name) != getattr(base, f.name)
    }
    return given


def _flags(given: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            words += [f"--{flag}", *(map(str, value) if isinstance(value, (list, tuple)) else [str(value)])]
    return words


def values(rows: Sequence[Row], key: str) -> list[Row]:
    """The rows that have a number under this key."""
    return [
        r for r in rows if isinstance(r.get(key), (int, float)) and not isinstance(r[key], bool) and np.isfinite(r[key])
    ]


def _law(path: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    if not os.path.lexists(path):
        return {}, []
    try:
        return shapes.law(read_npz(path), shown(path))
    except Unreadable as error:
        return {}, [str(error)]
