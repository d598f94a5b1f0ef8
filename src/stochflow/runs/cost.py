"""What a run will need in memory at least, from its settings alone: a lower bound, so that nothing is refused that would fit."""

from __future__ import annotations

from stochflow.files.memory import need
from stochflow.runs.config import Train
from stochflow.types import Task
from stochflow.worlds.env import Env

FLOAT, INT = 4, 8


def check_memory(task: Task, train: Train, cuda: bool = False) -> None:
    """UserError where a run needs more memory than is free; what is on a GPU is the GPU's own to say."""
    if cuda:
        return
    env = task.env
    rows = train.seeds * train.batch
    parts = {
        "trajectories": (trajectories(env, rows), "--batch, --seeds, or the size of the task"),
        "the final look": (trajectories(env, train.seeds * train.look), "--look"),
        "networks": (parameters(env, train) * FLOAT * 5 * train.seeds, "--hidden, --layers, --seeds, or the size of the task"),
        "replay": (replay(env, train) if train.replay else 0, "--replay-size or --seeds"),
        "activations": (activations(env, train, rows), "--batch, --seeds, --hidden, or the size of the task"),
    }  # fmt: skip
    total = sum(bytes_ for bytes_, _ in parts.values())
    largest = max(parts, key=lambda name: parts[name][0])
    need(total, f"this run, {largest} above all,", f"lower {parts[largest][1]}")


def trajectories(env: Env, rows: float) -> float:
    """Bytes of a batch's states, actions, moves and masks."""
    return rows * (env.horizon + 1.0) * (env.state_dim * INT + 2 * INT + env.num_moves)


def parameters(env: Env, train: Train) -> float:
    """Numbers of one seed's network, its first layer left out."""
    own = train.hidden * train.hidden * max(train.layers - 1, 0) + train.hidden * env.num_moves
    return float(12 * train.hidden * train.hidden * train.layers if train.net == "transformer" else own)


def activations(env: Env, train: Train, rows: float) -> float:
    """Bytes of what the gradient needs of one batch: a hidden layer a state, and the logits."""
    steps = env.horizon * rows
    if train.net == "transformer":  # and what each letter made of every other
        return FLOAT * steps * train.layers * (6.0 * train.hidden)
    return FLOAT * steps * env.num_moves * 2.0


def replay(env: Env, train: Train) -> float:
    """Bytes of the replay buffer: moves and actions in two bytes each."""
    return 4.0 * train.replay_size * train.seeds * env.horizon
