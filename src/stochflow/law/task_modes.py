"""The modes that a task knows of itself, by their positions in its list of states."""

from __future__ import annotations

import torch
from torch import Tensor

from stochflow.types import Task
from stochflow.worlds.env import Enumerable


def task_modes(task: Task) -> Tensor | None:
    """Positions of the modes in `env.all_states()`, or None where the task does not know them.

    Grid: the bright cells. TFBind8: the greedy set at y >= 0.889 and distance 2 (328 for SIX6_REF_R1). It lists the whole
    space, so it is for spaces whose law is listed anyway; `oracle.modes(states)` says it of any states.
    """
    rule = getattr(task.oracle, "modes", None)
    if rule is None or not isinstance(task.env, Enumerable):
        return None
    bright = rule(task.env.all_states())
    return None if bright is None else bright.nonzero().squeeze(-1)


def mode_regions(task: Task) -> Tensor | None:
    """For each position of `task_modes`, the number of its connected region (modes one move apart belong together), from 0."""
    at = task_modes(task)
    if at is None or not isinstance(task.env, Enumerable):
        return None
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    env, count = task.env, len(at)
    place = {int(i): k for k, i in enumerate(at)}
    state = env.all_states()[at]
    legal = env.real_moves(env.moves(state))
    pairs = []
    for move in range(env.num_moves):
        child = env.index(env.step(state, torch.full((count,), move)))
        pairs += [(k, place[int(c)]) for k, c in enumerate(child) if legal[k, move] and int(c) in place]
    ends = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
    graph = coo_matrix((torch.ones(len(ends)).numpy(), (ends[:, 0].numpy(), ends[:, 1].numpy())), shape=(count, count))
    return torch.as_tensor(connected_components(graph, directed=False)[1], dtype=torch.long)
