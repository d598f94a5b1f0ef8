"""What a Python oracle answered: kept in the run folder at once, and known again when the run is opened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from stochflow.runs.folder import Run
from stochflow.scores.oracles import Cached
from stochflow.scores.workers import Remote
from stochflow.types import Task

ANSWERS = (
    "oracle.jsonl"  # what an oracle in Python said: appended at once, read back on resume, and ahead of the checkpoints
)
LATER = "oracle.later.jsonl"  # what was asked after training, by `sample` and `eval`


@contextlib.contextmanager
def workers_ready(task: Task) -> Iterator[None]:
    """While it trains, an oracle's workers are there, and started before anything is timed."""
    remote = task.oracle.oracle if isinstance(task.oracle, Cached) else None
    if not isinstance(remote, Remote):
        yield
        return
    remote.warm()
    try:
        yield
    finally:
        remote.close()


@contextlib.contextmanager
def answers_kept(task: Task, run: Run) -> Iterator[None]:
    """While the run folder is ours, each answer of an oracle in Python goes into it at once."""
    if not isinstance(task.oracle, Cached):
        yield
        return
    task.oracle.keep_in(run.path / ANSWERS)
    recall_ranks(task.oracle, run.path)
    try:
        yield
    finally:
        task.oracle.file = None


def recall_ranks(oracle: Cached, path: Path) -> None:
    """What the oracles of other ranks answered is known too."""
    for file in sorted(path.glob("oracle.rank*.jsonl")):
        oracle.recall(file)
