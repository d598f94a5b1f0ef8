"""What is chosen for a task where nobody asked for anything, and why: from its length, its alphabet and its oracle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from stochflow.law.measure import listable
from stochflow.runs.config import Train
from stochflow.scores.oracles import TextOracle
from stochflow.scores.rewards import Default, Sharpening
from stochflow.types import Task
from stochflow.worlds.rules.env import RuledStrings
from stochflow.worlds.strings import Strings

# Chosen on problems of length 8 to 60 over 4 to 32 letters with 2,000 to 10,000 oracle calls, other ones than those that
# docs/design-search.md reports.
LONG: dict[str, Any] = {
    "objective": "logvar",
    "net": "mlp",
    "hidden": 128,
    "lr": 1e-3,
    "batch": 112,
    "search": "population",
    "children": 48,
    "replay": 0.5,
    "replay_rank": True,
    "replay_size": 2000,
    "ask_every": 4,
    "steps": 1000,
    "eval_every": 100,
}


MANY = 3000  # oracle calls up to which smaller generations find more
FEW: dict[str, Any] = {"batch": 56, "children": 24}
LEARNING, RAREST = 600, 32  # steps a policy needs until the budget is spent, and the most between two questions
USUAL = 10_000  # oracle calls, where no budget is named: after three quarters the target is a fixed law
READ = 100  # letters up to which a transformer reads what 10,000 answers teach within three minutes on two cores; beyond, an MLP


def log_size(task: Task, settings: Train) -> float | None:
    """log |X| of a space of strings that is not listed: too large, or larger than the budget of a slow oracle; else None."""
    env = task.env
    if not isinstance(env, Strings) or env.contexts is not None or settings.thought_state:
        return None
    if listable(env, budget(task, settings) or None):
        return None
    strings = env.compiled.product.strings if isinstance(env, RuledStrings) else env.tokens**env.length
    return max(1.0, math.log(strings))


def budget(task: Task, settings: Train) -> int:
    """How many different objects the oracle may be asked about; 0: any number."""
    return settings.oracle_calls if isinstance(task.oracle, TextOracle) else 0


def rewarded(task: Task, settings: Train) -> Task:
    """The task with a reward that is found while training, where nobody named one and the space is not listed."""
    nats = log_size(task, settings)
    if nats is None or type(task.reward) is not Default:
        return task
    return task._replace(reward=Sharpening(nats, latest=3 * (budget(task, settings) or USUAL) // 4))


def choose(task: Task, settings: Train, free: Collection[str], shipped: bool = False) -> tuple[Train, str]:
    """The settings with those that are `free` chosen for the task, and one line that says so; "" where nothing was."""
    nats = log_size(task, settings)
    if nats is None or (shipped and type(task.reward) is not Default):  # the latter has its own, such as bits
        return settings, ""
    calls = budget(task, settings) // settings.seeds
    wanted = LONG | (FEW if 0 < calls <= MANY else {})
    if task.env.horizon <= READ:
        wanted |= {"net": "transformer", "hidden": 64}
    if settings.lag:  # batches wait for the oracle, and children would not
        wanted |= {"search": "none"}
    merged = dataclasses.replace(settings, **{k: v for k, v in wanted.items() if k in free})
    fresh = max(1, merged.batch - round(merged.replay * merged.batch))
    if "children" in free and merged.search != "none" and merged.children >= fresh:
        merged = dataclasses.replace(merged, children=max(2, fresh * 3 // 4))
    paced: dict[str, Any] = {k: v for k, v in _pace(merged, calls, fresh).items() if k in free}
    merged = dataclasses.replace(merged, **paced)
    changed = [k for k in wanted if k in free and getattr(merged, k) != getattr(Train(), k)]
    if merged.search == "none" and "children" in changed:
        changed.remove("children")
    if not changed:
        return merged, ""
    words = ", ".join(f"--{k.replace('_', '-')} {str(getattr(merged, k)).lower()}" for k in changed)
    why = f"there are e^{nats:.0f} strings, too many to list or to meet by chance"
    few = f", and {calls} oracle calls are few" if 0 < calls <= MANY else ""
    return merged, f"chose {words} because {why}{few}"


def _pace(settings: Train, calls: int, fresh: int) -> dict[str, Any]:
    """How often the oracle is asked, and the steps after which a budget is spent for certain: rarely where it is small."""
    if not (settings.replay_rank and settings.replay > 0):  # nothing to learn from in between
        return {"ask_every": 1} | ({"steps": max(LONG["steps"], 2 * calls // fresh)} if calls else {})
    if not calls:
        return {}
    every = min(RAREST, max(LONG["ask_every"], round(LEARNING * fresh / calls)))
    new = settings.children if settings.search != "none" else max(1, fresh // 2)  # different ones of a batch at least
    return {"ask_every": every, "steps": max(LONG["steps"], (calls // new + 2) * every)}
