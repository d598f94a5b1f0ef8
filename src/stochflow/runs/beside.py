"""Rivals beside a run: what random search or a genetic algorithm finds with as many different oracle calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stochflow.baselines.rivals import RIVALS, Asker
from stochflow.errors import UserError, did_you_mean
from stochflow.law.measure import forked
from stochflow.runs.asked import figures_of
from stochflow.scores.oracles import Cached
from stochflow.types import Task
from stochflow.worlds.strings import Strings


def rivals(words: str, env: Any = None) -> list[str]:
    """The names behind `--beside ga,random`; UserError where there is no such rival, or `env` is not one that they vary."""
    names = [w.strip() for w in words.split(",") if w.strip()]
    for name in names:
        if name not in RIVALS:
            raise UserError(
                f"--beside {name}: there is no such rival{did_you_mean(name, RIVALS)}; take {', '.join(RIVALS)}"
            )
    if names and env is not None and not isinstance(env, Strings):
        raise UserError(f"--beside {words}: the rivals vary strings, and {env!r} builds none: leave it out")
    return names


def check_beside(words: str, env: Any) -> None:
    """UserError, before anything is trained, where the rivals cannot build what this environment builds."""
    if rivals(words) and not isinstance(env, Strings):
        raise UserError(f"--beside {words}: the rivals vary strings, and {env!r} builds none: leave it out")


def beside(task: Task, names: list[str], calls: int, seed: int, folder: Path, start: Tensor | None) -> dict[str, Any]:
    """The figures of each rival after as many calls; their answers are kept in the folder and cost oracle calls of their own.

    What the run or an earlier rival has asked about is not asked again. An object without a score stops none of them: the
    run has ended, and its figures are still to be written.
    """
    found: dict[str, Any] = {}
    earlier: dict[str, float] = {}
    for name in names:
        oracle: Any = task.oracle
        if isinstance(oracle, Cached):
            own = Cached(oracle.oracle, folder / f"oracle.{name}.jsonl")
            own.on_nan = "skip" if oracle.on_nan == "stop" else oracle.on_nan
            own.also(earlier | oracle.known)  # what is known is not asked again, and counts all the same
            oracle = own
        with forked(seed, torch.device("cpu")):
            asker = Asker(task.env, oracle, calls, start)
            RIVALS[name](asker)
        if isinstance(oracle, Cached):
            earlier |= oracle.known
        objects, scores = asker.answers()
        order = scores.argsort(descending=True, stable=True)[: int(scores.isfinite().sum())]
        row = figures_of(task.env, objects[order], scores[order].float()) | {"calls": len(scores)}
        found[name] = row | {"sentence": _sentence(row)}
    return found


def _sentence(row: dict[str, Any]) -> str:
    if "best_asked" not in row:
        return "no object had a score"
    return (
        f"best {row['best_asked']:.4g}, mean of the 100 best {row['top_asked']:.4g}, "
        f"of the {row['apart_count']} best at distance {row['apart_distance']} {row['apart_asked']:.4g}"
    )
