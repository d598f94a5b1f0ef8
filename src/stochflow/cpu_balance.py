"""The gradient of trajectory or detailed balance on the CPU, from what a rollout kept of the network (`cpu_walk.Trace`).

The counterpart of balance_kernel: the network is not asked again, and each distinct state of a seed goes back through it once, in compiled loops
(`cpu_loops`). The same as `evaluate`, the objective and autograd; a test holds one to the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stochflow import cpu_walk
from stochflow.cpu_compiled import in_parts, loops
from stochflow.cpu_walk import Trace
from stochflow.envs.grid import Grid
from stochflow.envs.strings import Strings
from stochflow.nets import _LookupTrunk, _MLPTrunk
from stochflow.objectives import MARGINAL, DetailedBalance, Objective, TrajectoryBalance
from stochflow.types import Judged, Task, Trajectories

WORTH_PARTS = 1 << 23  # products of one seed's rows and weights that are worth a thread: then threads share the rows,
MOST_PARTS = 8  # up to so many, because each has a gradient of its own


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


@torch.no_grad()
def gradient(
    task: Task,
    policy: Any,
    objective: Objective,
    traj: Trajectories,
    trace: Trace,
    log_reward: Tensor,
    log_k: Tensor | None,
    flat: Any,
    note: bool,
) -> Judged:
    """The gradient of each seed's loss into the policy's `flat` parameters, and what was found on the way.

    `log_k` [T, S, B, M] = log P(the realised move | each action); None: what is meant happens.
    """
    room, way, _ = trace
    world, net, rows, compiled = room.world, room.net, room.rows, loops()
    paid, arrivals = _as(log_reward, way.final.shape), _NO_NOISE if log_k is None else _as(log_k, (*way.moves.shape, world.moves))
    log_z, detailed = policy.log_z(None).numpy().ravel(), isinstance(objective, DetailedBalance)
    seeds, threads = len(paid), min(torch.get_num_threads(), MOST_PARTS) if len(paid) == 1 else 1
    if room.kept is None or not room.kept.serves(flat, threads):
        room.kept = _Memory(room, way, flat, threads)
    kept, said, count = room.kept, room.kept.said, rows.begin[:, world.asked].copy()
    parts = max(1, min(threads, count[0] * room.size // WORTH_PARTS))
    judged = (rows.begin, rows.place, rows.outs, way.row, way.moves, way.alive, arrivals, paid, log_z, said)

    def back(s: int, e: int, part: int = 0) -> None:
        how = (part, parts, world.few, count, net.stages, rows.inputs)
        compiled.back(s, e, *how, said.slope, kept.to_inputs, kept.to_stages, kept.to_biases)

    def some(first: int, last: int) -> None:
        for part in range(first, last):
            back(0, 1, part)

    def work(s: int, e: int) -> None:
        compiled.weigh(s, e, world, rows.begin, rows.place, rows.outs, said.x)
        for seed in range(s, e):
            with np.errstate(all="ignore"):  # a run that diverges says so in its figures
                np.exp(said.x[seed, : count[seed]], out=said.e[seed, : count[seed]])
        compiled.judge(s, e, detailed, world, *judged)
        if parts > 1:
            in_parts(some, parts)
        else:
            back(s, e)
        kept.first[s:e].fill(0)
        kept.table[s:e].fill(0)
        to_inputs = kept.to_inputs[0], kept.to_inputs[-1]
        compiled.spread(s, e, world.side, count, rows.number, rows.parent, rows.feature, rows.place, *to_inputs, kept.first, kept.table)

    in_parts(work, seeds)
    kept.collect(room, parts)
    np.multiply(said.to_z[:, None], policy.LOG_Z_SCALE, out=kept.to_log_z, casting="same_kind")
    loss, estimate = torch.from_numpy(said.loss), torch.from_numpy(said.estimate)
    if not note:
        return Judged(loss, estimate, None, None)
    flow = log_z + rows.outs[:, 0, world.flow] if detailed else log_z
    return Judged(loss, estimate, torch.from_numpy(said.entropy), torch.from_numpy(flow[:, None]))


_NO_NOISE = np.empty((0, 0, 0, 0), dtype=np.float32)


def _as(x: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """As loops read it, which look at every number: whoever answers with fewer means the same for all."""
    return np.array(np.broadcast_to(x.numpy(), shape), order="C")


class _Memory:
    """Of one gradient after the other."""

    def __init__(self, room: Any, way: Any, flat: Any, threads: int):
        self.flat, self.threads = flat, threads
        self.said, self.to_inputs = _said(room, way), tuple(np.empty_like(x) for x in room.rows.inputs)
        of, net = {name: slope.numpy() for name, slope in flat.slopes.items()}, room.net
        prefix = "trunk.mlp.layers" if "trunk.table.weight" in of else "trunk.layers"
        (self.first, *weights), biases = ([of[f"{prefix}.{i}.{kind}"] for i in range(len(net.stages) - 1)] for kind in ("weight", "bias"))
        self.table, self.to_log_z = of.get("trunk.table.weight", net.table), of["log_z_unit"]
        self.whole = [*weights, *biases]  # what threads have added up is joined here; for one of them it is the same memory
        mine = [x[None] if threads == 1 else np.empty((threads, *x.shape), dtype=np.float32) for x in self.whole]
        *heads, bias = [np.empty((threads, *x.shape), dtype=np.float32) for x in (*net.stages[-2:], net.biases[-1])]
        self.to_stages, self.to_biases = (*mine[: len(weights)], *heads), (*mine[len(weights) :], bias)
        self.head, self.head_bias = of["head.weight"], of["head.bias"]

    def serves(self, flat: Any, threads: int) -> bool:
        return self.flat is flat and self.threads == threads

    def collect(self, room: Any, parts: int) -> None:
        """What the threads have added up goes to where the gradient is kept."""
        (*layers, hidden, known), (*biases, bias) = self.to_stages, self.to_biases
        if self.threads > 1:
            for whole, mine in zip(self.whole, (*layers, *biases), strict=True):
                np.copyto(whole, _joined(mine, parts))
        for part, copy in room.head_parts(self.head, (_joined(hidden, parts), _joined(known, parts))):
            np.copyto(part, copy)
        np.copyto(self.head_bias, _joined(bias, parts)[..., : self.head.shape[2]])


def _joined(mine: np.ndarray, parts: int) -> np.ndarray:
    return mine[0] if parts == 1 else mine[:parts].sum(0)


def _said(room: Any, way: Any) -> Any:
    """Room for what a balance says."""
    seeds, many, outs = room.rows.outs.shape
    (steps, _, batch), moves = way.actions.shape, room.world.moves
    laws = np.empty((2, seeds, many, moves * (2 if room.world.back else 1)), dtype=np.float32)
    led, gone = np.empty((seeds, steps, moves), dtype=np.float32), np.empty((seeds, many, 2), dtype=np.float32)
    slope, figures = np.empty((seeds, many, outs), dtype=np.float32), np.empty((3, seeds, batch), dtype=np.float32)
    return loops().Said(*laws, np.empty((seeds, steps)), np.empty((seeds, steps + 1)), led, gone, slope, *figures, np.empty(seeds))
