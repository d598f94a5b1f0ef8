"""The learned law boiled down to what a report draws of it: `law.npz` in the run folder, small whatever the size of the space.

S seeds, K bins, P points. Where the space is listed everything is exact; where it is not, the same arrays come from the last sample.

    score_edges [K+1], score_law [S, K]    mass of the law by score;   score_target [K]   the same for the target (exact alone)
    log_reward [P], log_prob [S, P]        objects and how likely they are drawn;   log_z []   the target's (exact alone)
    grid_law [S, X, Y], grid_target [X, Y] over the first two coordinates, the others summed out (grids alone)
"""

from __future__ import annotations

from typing import IO

import numpy as np
import torch
from torch import Tensor

from stochflow.law.exact import exact_law
from stochflow.law.measure import Yardstick
from stochflow.learn.evaluate import evaluate
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known
from stochflow.types import Trajectories

BINS = 40
POINTS = 1_500  # of the scatter: enough to see a line, few enough to draw as a picture in a page
WIDEST = 256  # cells along a side that a heat map still shows

Arrays = dict[str, np.ndarray]


@torch.no_grad()
def law_picture(yardstick: Yardstick, policy: Policy, drawn: Trajectories) -> Arrays:
    """What there is to draw of a policy's law; `drawn` is the scored sample of the last look."""
    return _from_law(yardstick, policy) if yardstick.exact else _from_sample(yardstick, policy, drawn)


def save_picture(arrays: Arrays, file: IO[bytes]) -> None:
    """As the content of `law.npz`."""
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _from_law(yardstick: Yardstick, policy: Policy) -> Arrays:
    graph, target, task = yardstick.graph, yardstick.target, yardstick.task
    ends = graph.terminal
    states = graph.states[ends]
    law = _numpy(exact_law(graph, task.channel, policy)[:, ends])  # [S, n]
    wanted, log_reward = _numpy(target.target[ends]), _numpy(target.log_reward[ends])
    score = _numpy(task.oracle(states))
    edges = _edges(score)
    place = np.clip(np.digitize(score, edges) - 1, 0, BINS - 1)
    shown = _spread(log_reward)
    with np.errstate(divide="ignore"):
        log_prob = np.log(law[:, shown])
    arrays = {
        "score_edges": edges,
        "score_law": np.stack([np.bincount(place, row, BINS) for row in law]),
        "score_target": np.bincount(place, wanted, BINS),
        "log_reward": log_reward[shown],
        "log_prob": log_prob,
        "log_z": np.array(target.log_z),
    }
    side = getattr(task.env, "side", None)
    if side is not None and side <= WIDEST:
        arrays |= _grid(states.cpu().numpy(), law, wanted, side)
    return {k: v.astype(np.float32) for k, v in arrays.items()}


def _grid(states: np.ndarray, law: np.ndarray, wanted: np.ndarray, side: int) -> Arrays:
    across = side if states.shape[1] > 1 else 1
    cell = states[:, 0] * across + (states[:, 1] if across > 1 else 0)

    def map_of(mass: np.ndarray) -> np.ndarray:
        return np.bincount(cell, mass, side * across).reshape(side, across)

    return {"grid_law": np.stack([map_of(row) for row in law]), "grid_target": map_of(wanted)}


def _from_sample(yardstick: Yardstick, policy: Policy, drawn: Trajectories) -> Arrays:
    """The log-probability is that of the way an object was built: its own where there is one way (strings), less otherwise."""
    task = yardstick.task
    terms = evaluate(task, policy, Known(task.env, task.channel), drawn, None, frozenset({"log_move"}))
    score = _numpy(drawn.score)
    edges = _edges(score)
    log_prob, log_reward = _numpy(terms.log_move.sum(0)), _numpy(terms.log_reward)  # [S, B]
    count = max(1, POINTS // len(score))
    arrays = {
        "score_edges": edges,
        "score_law": np.stack([np.histogram(np.clip(row, edges[0], edges[-1]), edges)[0] / len(row) for row in score]),
        "log_reward": log_reward[:, :count].reshape(-1),
        "log_prob": log_prob[:, :count].reshape(1, -1),
    }
    return {k: v.astype(np.float32) for k, v in arrays.items()}


def _edges(score: np.ndarray) -> np.ndarray:
    finite = score[np.isfinite(score)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if high - low <= 1e-9 * max(abs(high), 1.0):
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, BINS + 1)


def _spread(log_reward: np.ndarray) -> np.ndarray:
    """Positions spread evenly over the ranks of the reward, the best always among them; repeatable."""
    order = np.argsort(-log_reward, kind="stable")
    return order[np.unique(np.linspace(0, len(order) - 1, min(POINTS, len(order))).round().astype(int))]


def _numpy(x: Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy()
