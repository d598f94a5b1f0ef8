"""Tasks with conditions: each condition has states, a target, a law and a floor of its own, exact where all can be listed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from stochflow.law import floors, metrics
from stochflow.law.exact import Graph, TargetLaw, exact_law, target_law
from stochflow.nets.policy import Policy
from stochflow.types import Task
from stochflow.worlds.env import Enumerable

LISTED = 200_000  # states of all conditions together, up to which each is listed
TOLD = 8  # numbers of a condition that name it


class Condition(NamedTuple):
    """One condition, listed."""

    row: int
    name: str
    graph: Graph
    target: TargetLaw


def listed(task: Task, device: torch.device | str | None = None) -> list[Condition]:
    """Every condition with its states and its target; none where they are too many, or their number is not known."""
    env = task.env
    if env.contexts is None or not isinstance(env, Enumerable) or task.channel.begin(env.initial((1,))) is not None:
        return []
    if env.count() * len(env.contexts) > LISTED:
        return []
    found = []
    for row, values in enumerate(env.contexts.double().flatten(1)[:, :TOLD].tolist()):
        graph = Graph(env, row, device)
        found.append(Condition(row, ",".join(f"{v:g}" for v in values), graph, target_law(graph, task)))
    return found


def floor_rows(task: Task, conditions: list[Condition]) -> list[dict[str, Any]]:
    """The best achievable law of each condition, as `Floor.to_json` tells it."""
    return [{"condition": c.name, "row": c.row} | floors.floor(task, c.graph, c.target).to_json() for c in conditions]


@torch.no_grad()
def law_rows(task: Task, policy: Policy, conditions: list[Condition]) -> list[dict[str, Any]]:
    """How far the policy's law is from its target under each condition: the median over the seeds, and each seed's own."""
    rows = []
    for c in conditions:
        tv = metrics.l1(exact_law(c.graph, task.channel, policy), c.target.target) / 2  # [S]
        each = {"tv_seeds": tv.tolist()} if len(tv) > 1 else {}
        rows.append({"condition": c.name, "row": c.row, "tv": float(tv.quantile(0.5)), "log_z": c.target.log_z} | each)
    return rows
