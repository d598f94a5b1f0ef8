"""A learned model of the noise (`dynamics.Neural`) on the CPU in compiled loops: each distinct state of a batch once, and its gradient without autograd.

The counterpart of noise_kernel, with the same two functions, and the same as `Neural.arrivals` and as `Neural.loss` by autograd; a test holds one to
the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.engines.numba.compiled import floats, in_parts, loops
from stochflow.noise.dynamics import Neural, trainable_steps
from stochflow.types import Trajectories
from stochflow.worlds.env import numbers
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

MOST_MOVES = 16  # beyond, most pairs of action and move never occur in a state, and autograd, which looks at those that do, is the faster


def fits(dynamics: Any) -> bool:
    """Whether this knows the model and its world."""
    if type(dynamics) is not Neural:
        return False
    env, weight = dynamics.env, dynamics.head.weight
    return (
        type(env) in (Grid, Strings)
        and env.contexts is None
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and len(dynamics.layers) == 1
        and env.num_moves <= MOST_MOVES
        and numbers(env)
        and loops() is not None
    )


@torch.no_grad()
def arrivals(dynamics: Any, weights: dict[str, Tensor], traj: Trajectories) -> Tensor:
    """`Neural.arrivals` with these weights, at all steps of a batch: [T, S, B, M], anything where no decision was taken, or the decision was to stop."""
    model, thought, compiled = _model(weights), _room(dynamics, traj.moves.shape), loops()
    world, (states, _, moves, alive) = _world(dynamics.env), _arrays(traj)
    made = np.empty((*moves.shape, dynamics.env.num_moves), dtype=np.float32)

    def work(s: int, e: int) -> None:
        compiled.ponder(s, e, *world, states, moves, alive, model, thought, made)

    in_parts(work, moves.shape[1])
    return torch.from_numpy(made)


@torch.no_grad()
def differentiate(dynamics: Any, traj: Trajectories, flat: Any) -> Tensor:
    """The gradient of each seed's `Neural.loss` into the `flat` parameters; the loss [S]."""
    model, into, thought, compiled = _model(flat.named), _model(flat.slopes), _room(dynamics, traj.moves.shape), loops()
    world, (states, actions, moves, alive) = _world(dynamics.env), _arrays(traj)
    string, side, _, many = world
    teaches = np.ascontiguousarray(trainable_steps(dynamics.env, traj).numpy())
    losses = np.empty(moves.shape[1], dtype=np.float32)

    def work(s: int, e: int) -> None:
        compiled.ponder(s, e, *world, states, moves, alive, model, thought, _NOTHING)
        compiled.blame(s, e, string, side, many, states, actions, moves, teaches, model, thought, into, losses)

    in_parts(work, moves.shape[1])
    return torch.from_numpy(losses)


_NOTHING = np.empty((0, 0, 0, 0), dtype=np.float32)


class Given(NamedTuple):
    """What loops work on that say what is to be expected of the noise, ask the model as it stands, and teach it."""

    expect: tuple[Any, ...]
    ponder: tuple[Any, ...]
    blame: tuple[Any, ...]


def for_loops(dynamics: Any, way: Any, flat: Any, made: np.ndarray) -> Given:
    """For a walk that goes this way, all of which happened; what is to be expected goes into `made` [T, S, B, M]."""
    world, thought = _world(dynamics.env), _room(dynamics, way.moves.shape)
    string, side, _, many = world
    model, asked, losses = (
        _model(flat.named),
        (*world, way.states, way.moves, way.alive),
        np.empty(len(flat.norms), dtype=np.float32),
    )
    # wherever somebody goes on, what was done teaches; the loop itself passes over stops
    happened = way.states, way.actions, way.moves, way.alive
    return Given(
        (*asked, _model(flat.averaged()), thought, made),
        (*asked, model, thought, _NOTHING),
        (string, side, many, *happened, model, thought, _model(flat.slopes), losses),
    )


def _world(env: Any) -> tuple[bool, int, int, int]:
    string = isinstance(env, Strings)
    return string, env.tokens if string else env.side, -1 if env.stop is None else env.stop, env.num_moves


def _arrays(traj: Trajectories) -> list[np.ndarray]:
    return [np.ascontiguousarray(x.numpy()) for x in (traj.states, traj.actions, traj.moves, traj.alive)]


def _model(of: dict[str, Tensor]) -> Any:
    return loops().Model(
        *[of[name].detach().numpy() for name in ("layers.0.weight", "layers.0.bias", "head.weight", "head.bias")]
    )


def _room(dynamics: Any, shape: tuple[int, ...]) -> Any:
    """For as many states as there are steps [T, S, B]."""
    steps, seeds, batch = shape
    many, (_, width, outs) = steps * batch, dynamics.head.weight.shape
    slots = np.empty((seeds, 1 << (2 * many - 1).bit_length()), dtype=np.int64)
    number, met, row = (np.empty(x, dtype=np.int64) for x in ((seeds, many), (seeds, many, 2), (steps, seeds, batch)))
    hidden, table = (floats(seeds, many, wide) for wide in (width, outs))
    return loops().Thought(slots, number, row, met, hidden, table, np.empty(seeds, dtype=np.int64))
