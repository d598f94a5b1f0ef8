"""The gradient of trajectory or detailed balance on the CPU, from what a rollout kept of the network (`cpu_walk.Trace`).

The counterpart of balance_kernel: the network is not asked again, and each distinct state of a seed goes back through it once, in compiled loops
(`cpu_loops`). The same as `evaluate`, the objective and autograd; a test holds one to the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.engines.numba import walk as cpu_walk
from stochflow.engines.numba.compiled import floats, in_parts, loops, one_by_one
from stochflow.engines.numba.walk import Trace
from stochflow.learn.objectives import MARGINAL, DetailedBalance, Objective, TrajectoryBalance
from stochflow.nets.lookup import _LookupTrunk
from stochflow.nets.mlp import _MLPTrunk
from stochflow.types import Judged, Task, Trajectories
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

WORTH_PARTS = 1 << 23  # products of one seed's rows and weights that are worth a thread: then threads share them


def plain(task: Task, policy: Any, dynamics: Any, objective: Objective) -> bool:
    """The balances and networks of which a gradient without autograd is written here and in balance_kernel; the noise may be any without a past."""
    return (
        type(objective) in (TrajectoryBalance, DetailedBalance)
        and objective.form is MARGINAL
        and type(task.env) in (Grid, Strings)
        and type(getattr(policy, "trunk", None)) in (_MLPTrunk, _LookupTrunk)
        and not policy.back_action
        and dynamics.begin(task.env.initial((policy.num_seeds, 1)).to(policy.device)) is None
    )


def fits(task: Task, policy: Any, dynamics: Any, objective: Objective, batch: int) -> bool:
    """Whether this is its gradient."""
    return plain(task, policy, dynamics, objective) and cpu_walk.fits(task, policy, batch)


def gradient(
    task: Task,
    policy: Any,
    objective: Objective,
    traj: Trajectories,
    trace: Trace,
    log_rewards: Tensor,
    by_number: bool,
    log_k: Tensor | None,
    flat: Any,
    note: bool,
) -> Judged:
    """The gradient of each seed's loss into the policy's `flat` parameters, and what was found on the way.

    `log_rewards` [S, B] or, `by_number`, [N] of all states; `log_k` [T, S, B, M] = log P(the realised move | each action); None: what is meant happens.
    """
    room, way, _ = trace
    world, rows, seeds, compiled = room.world, room.rows, room.shape[0], loops()
    paid = log_rewards.numpy() if by_number else _as(log_rewards, room.shape).reshape(-1)
    arrivals = None if log_k is None else _as(log_k, (*way.moves.shape, world.moves))
    given, kept = for_loops(policy, objective, room, way, paid, by_number, arrivals, flat), room.kept
    np.copyto(kept.count, rows.begin[:, world.asked])

    def work(s: int, e: int) -> None:
        compiled.judge(s, e, *given.judge)
        for step, of in ((compiled.back, given.back), (compiled.teach, given.teach)):
            if shared > 1:
                one_by_one(lambda part: step(0, 1, part, shared, *of), shared)  # noqa: B023 - it is over before the next begins
            else:
                step(s, e, 0, 1, *of)
        compiled.spread(s, e, *given.spread)

    shared = 1 if seeds > 1 else min(torch.get_num_threads(), kept.count[0] * room.size // WORTH_PARTS)
    in_parts(work, seeds)
    for part, copy in kept.copies:
        np.copyto(part, copy)
    if not note:
        return kept.judged
    flow = kept.log_z * policy.LOG_Z_SCALE
    if isinstance(objective, DetailedBalance):
        flow = flow + rows.outs[:, :1, world.flow]
    return kept.judged._replace(entropy=torch.from_numpy(kept.said.entropy), log_flow=torch.from_numpy(flow))


class Given(NamedTuple):
    """What the loops of a gradient work on, in the order in which they come."""

    judge: tuple[Any, ...]
    back: tuple[Any, ...]
    teach: tuple[Any, ...]
    spread: tuple[Any, ...]


def for_loops(
    policy: Any,
    objective: Objective,
    room: Any,
    way: Any,
    paid: np.ndarray,
    by_number: bool,
    arrivals: np.ndarray | None,
    flat: Any,
) -> Given:
    """For a walk in this room that goes this way; before they come, `room.kept.count` says how many states it met."""
    if room.kept is None or room.kept.flat is not flat:
        room.kept = _Memory(room, way, flat)
    world, rows, kept, detailed = room.world, room.rows, room.kept, isinstance(objective, DetailedBalance)
    said, to_inputs = kept.said, kept.to_inputs
    told = (way, _NO_NOISE if arrivals is None else arrivals, paid, said, kept.log_z, kept.to_log_z)
    return Given(
        (detailed, by_number, policy.LOG_Z_SCALE, world, rows.begin, rows.place, rows.outs, *told),
        (world.few, kept.count, room.net.stages, rows.inputs, said.slope, to_inputs),
        (world.few, kept.count, rows.inputs, said.slope, to_inputs, kept.to_stages, kept.to_biases),
        (world.side, kept.count, rows.number, rows.parent, rows.feature, rows.place, *kept.ends),
    )


_NO_NOISE = np.empty((0, 0, 0, 0), dtype=np.float32)


def _as(x: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """As loops read it, which look at every number: whoever answers with fewer means the same for all."""
    found = x.numpy()
    return np.ascontiguousarray(found if found.shape == shape else np.broadcast_to(found, shape))


class _Memory:
    """Of one gradient after the other."""

    def __init__(self, room: Any, way: Any, flat: Any):
        self.flat, self.said, self.count = flat, _said(room, way), np.zeros(room.shape[0], dtype=np.int64)
        self.judged = Judged(torch.from_numpy(self.said.loss), torch.from_numpy(self.said.estimate), None, None)
        of, net = {name: slope.numpy() for name, slope in flat.slopes.items()}, room.net
        prefix = "trunk.mlp.layers" if "trunk.table.weight" in of else "trunk.layers"
        (first, *weights), biases = (
            [of[f"{prefix}.{i}.{kind}"] for i in range(len(net.stages) - 1)] for kind in ("weight", "bias")
        )
        self.log_z, self.to_log_z = flat.named["log_z_unit"].detach().numpy(), of["log_z_unit"]
        *heads, bias = [floats(*x.shape) for x in (*net.stages[-2:], net.biases[-1])]  # as the loops have them
        self.to_head = of["head.weight"], of["head.bias"]
        self.copies = room.head_parts([*self.to_head], (*heads, bias))
        self.to_inputs = tuple(floats(*x.shape) for x in room.rows.inputs)
        self.to_stages, self.to_biases = (*weights, *heads), (*biases, bias)
        self.ends = self.to_inputs[0], self.to_inputs[-1], first, of.get("trunk.table.weight", net.table)


def _said(room: Any, way: Any) -> Any:
    """Room for what a balance says."""
    seeds, many, outs = room.rows.outs.shape
    (steps, _, batch), moves = way.actions.shape, room.world.moves
    laws = np.empty((2, seeds, many, moves * (2 if room.world.back else 1)), dtype=np.float32)
    led, gone = np.empty((seeds, steps, moves), dtype=np.float32), np.empty((seeds, many, 2), dtype=np.float32)
    slope, figures = floats(seeds, many, outs), np.empty((3, seeds, batch), dtype=np.float32)
    return loops().Said(*laws, np.empty((seeds, steps)), np.empty((seeds, steps + 1)), led, gone, slope, *figures)
