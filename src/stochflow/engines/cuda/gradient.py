"""The gradient of trajectory and detailed balance in four GPU kernels, from what a rollout kept of the network (`rollout_kernel.Trace`).

    residuals   (residuals.cu) log-probabilities, residuals, what they say to every output of the network; which states were reached
    back        (back.cu) through the head, then through the second layer: what is said to their inputs
    weights     (weights.cu) sums over the states, and for large alphabets letters.cu

The network is not asked again, states that were never reached cost nothing, and states that many share are there once. The same as
`evaluate`, the objectives and autograd, which a small batch keeps busy with hundreds of kernels of a microsecond; where these serve
(`fits`), tests hold one to the other. Products are three in TF32 on tensor cores, which is nearly as exact as float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stochflow.engines.cuda import driver as cuda_source
from stochflow.engines.cuda import walk as rollout_kernel
from stochflow.engines.cuda.walk import Trace
from stochflow.engines.numba.gradient import plain
from stochflow.learn.objectives import DetailedBalance, Objective
from stochflow.nets.lookup import _LookupTrunk, inner_mlp
from stochflow.types import Judged, Task, Trajectories
from stochflow.worlds.strings import Strings

# Sizes by trial on an H200.
MOST_STATES = 1 << 19  # of a batch, reached or not
MOST_BATCH = 8192
MOST_STEPS = 512  # a thread each
LEAST_WIDTH = 32
BLOCK, DEPTH = 64, 32  # inputs and outputs of a block of threads, and how much is multiplied at a time
STAGES = 3  # how many such lots are on their way;
MOST_STAGES = 9  # of smaller blocks: there is room for everything at once
MANY_BLOCKS = 160  # of `back`; where there would be fewer, they are half as large, to spread over the chip
REACHED = 8  # of so many states about one is reached, where trajectories end as they like,
ROOM = 528  # and so many blocks are started at least
PROGRAMS, SHARE = 528, 32  # blocks of threads, all together, and the states of one of `weights` at least
FEW_STATES = 1536  # of a seed
MANY_FEATURES = 128  # of strings: above, the letters of each trajectory are added one by one
TOGETHER = 64  # threads a block of `residuals`, where a trajectory needs fewer
MOST_WARPS = 16  # a trajectory, where a state takes a warp


def fits(task: Task, policy: Any, dynamics: Any, objective: Objective, batch: int) -> bool:
    """Whether these kernels compute this objective's gradient for this network, and can be had."""
    if not plain(task, policy, dynamics, objective) or not rollout_kernel.fits(task, policy):
        return False
    env: Any = task.env
    hidden, (table_rows, width) = inner_mlp(policy.trunk).width, _table(policy)
    steps = _steps(env)
    widest = policy.num_seeds * max(
        hidden, width, rollout_kernel.columns(policy), env.state_dim
    )  # numbers are counted in 31 bits
    return (
        hidden >= LEAST_WIDTH
        and steps <= MOST_STEPS
        and batch <= MOST_BATCH
        and rollout_kernel.traced_rows(policy, steps, batch) <= min(MOST_STATES, 2**30 // widest)
        and (steps + 1) * batch <= 2**30 // widest
        and policy.num_seeds * table_rows <= 2**30 // max(1, width)
        # of many outputs a walk keeps those of the moves alone
        and (type(objective) is not DetailedBalance or sum(policy.sizes) <= rollout_kernel.SMALL_HEAD)
        and _residuals(policy, batch, not dynamics.exact, type(objective) is DetailedBalance) is not None
        and _back(policy, batch) is not None
        and _weights(policy, batch) is not None
        and (not _by_letters(policy) or _letters(policy) is not None)
    )


@torch.no_grad()
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
    """The gradient of each seed's loss into the policy's `flat` parameters, and what was found on the way (but for log Z, that costs nothing
    here and is given whether or not it is to be noted). `log_rewards` [S, B] or, `by_number`, [N] of all states. `log_k` [T, S, B, M] = log P(the realised
    move | each action); None where what is meant happens."""
    with torch.cuda.device(policy.device):
        env: Any = task.env
        sums, hiddens, outs, numbers, entries, early, finals, head = trace
        (_, seeds, batch), (_, rows, hidden) = traj.alive.shape, sums.shape
        _, two = inner_mlp(policy.trunk).layers
        table_rows, width = _table(policy)
        detailed = type(objective) is DetailedBalance
        early_steps, shared = (0, 0) if early is None else (early.steps, len(early.states))
        listed, device = _listed(env), sums.device
        slopes, to_layers = (
            (torch.empty_like if early is None else torch.zeros_like)(outs),
            torch.empty(2, *sums.shape, device=device),
        )
        losses, estimates, entropies, to_log_z = torch.empty(4, seeds, batch, device=device)
        reached = torch.empty(seeds, batch, dtype=torch.int32, device=device)
        met = torch.empty(seeds, rows - shared if listed else 0, dtype=torch.int32, device=device)
        counts = torch.zeros(seeds, dtype=torch.int32, device=device) if listed else met
        taken = traj.alive.sum((0, 2)) if detailed and not env.free else counts
        kernel, together, threads = _residuals(policy, batch, log_k is not None, detailed)
        kernel(
            (-(-batch // together), seeds, 1),
            (threads, 1, 1),
            [
                slopes, losses, estimates, entropies, to_log_z, reached, met, counts, outs, numbers, traj.states, traj.moves, traj.alive,
                outs if log_k is None else log_k.float().contiguous(), taken, log_rewards.contiguous(), finals, policy.log_z_unit, policy.LOG_Z_SCALE, int(by_number), seeds, batch, rows, shared,
            ],
            0,
        )  # fmt: skip
        layers, to_table = _slopes(policy, flat)
        to_weights, blocks, parts = _weights(policy, batch)
        letters = early is None and _by_letters(policy)
        if parts > 1 or letters or width:
            flat.values.grad.zero_()
        place = numbers if entries is None else entries
        kernel, tile, lines, staged = _back(policy, batch)
        for to, said, inputs, weight, wide in (
            (to_layers[0], slopes, hiddens, head, width),
            (to_layers[1], to_layers[0], sums, two.weight, 0),
        ):
            given = [
                to,
                to_table,
                said,
                inputs,
                weight,
                place,
                met,
                counts,
                rows,
                shared,
                table_rows,
                wide,
                weight.shape[2],
                said.shape[2],
            ]
            kernel((lines, -(-(hidden + wide) // tile), seeds), (256 if tile == BLOCK else 128, 1, 1), given, staged)
        to_weights(
            (blocks, parts, seeds),
            (4 * 32, 1, 1),
            [
                *layers, flat.slopes["log_z_unit"], traj.states if early is None else early.states, traj.states, met, counts,
                sums, hiddens, policy.trunk.table.weight if width else sums, place, slopes, to_layers[0], to_layers[1], to_log_z, policy.LOG_Z_SCALE,
                seeds, batch, rows, early_steps, shared, table_rows,
            ],
            _STAGED,
        )  # fmt: skip
        if letters:
            of_letters = [*layers[:2], traj.states[-1], reached, to_layers[1], batch, rows]
            _letters(policy)((min(batch, PROGRAMS), seeds, 1), (hidden, 1, 1), of_letters, 0)
        log_z = policy.log_z(None) if note else None
        if detailed and log_z is not None:  # the first row is of the first state
            log_z = log_z + outs[:, 0, sum(policy.sizes[:2]) :][:, :1]
        return Judged(losses, estimates, entropies, log_z)


def _steps(env: Any) -> int:
    """States a trajectory of which the network is asked."""
    return env.horizon + (not env.tree)


def _table(policy: Any) -> tuple[int, int]:
    """Rows and width of the network's look-up table."""
    if type(policy.trunk) is not _LookupTrunk:
        return 0, 0
    _, rows, width = policy.trunk.table.weight.shape
    return rows, width


def _slopes(policy: Any, flat: Any) -> tuple[list[Tensor], Tensor]:
    """Where the gradients of the layers go, weight and bias of each, and that of the table (or anything, where there is none)."""
    inner = "trunk.mlp" if type(policy.trunk) is _LookupTrunk else "trunk"
    layers = [
        flat.slopes[f"{layer}.{kind}"]
        for layer in (f"{inner}.layers.0", f"{inner}.layers.1", "head")
        for kind in ("weight", "bias")
    ]
    return layers, flat.slopes.get("trunk.table.weight", layers[0])


# kernels for an environment and a network; None where they cannot be had --------------------------------------------------


def _compiled(kernel: str, policy: Any, shared: int, **defines: int) -> Any:
    defines |= {"LISTED": int(_listed(policy.env))}
    device = policy.device
    with torch.cuda.device(device):
        chip = torch.cuda.get_device_capability(device)
        return cuda_source.compiled(
            ("common.cuh", f"{kernel}.cu"), kernel, tuple(defines.items()), shared, chip, device.index
        )


def _world(policy: Any) -> dict[str, int]:
    """What kernels know of states."""
    env: Any = policy.env
    return {"D": env.state_dim, "SIZE": env.tokens if isinstance(env, Strings) else env.side}


def _residuals(policy: Any, batch: int, noisy: bool, detailed: bool) -> Any:
    """With it the trajectories and threads of a block."""
    env: Any = policy.env
    steps, columns, string = _steps(env), rollout_kernel.columns(policy), isinstance(env, Strings)
    early = policy.early(steps, batch)
    group = 1 if sum(policy.sizes) <= rollout_kernel.SMALL_HEAD else 32  # lanes a state
    lanes = (
        32 * min(MOST_WARPS, steps)
        if group > 1
        else 1 << (steps - 1).bit_length()
        if steps <= 32
        else -(-steps // 32) * 32
    )
    threads = max(TOGETHER, lanes)
    made = _compiled(
        "residuals", policy, 0, **_world(policy), T=env.horizon, N=steps, STRING=int(string), M=env.num_moves,
        STOP=-1 if env.stop is None else env.stop, LEAST=(env.min_length or 0) if string else 0, COLUMNS=columns,
        LEARNED=int(policy.sizes[1] > 0), FLOW=sum(policy.sizes[:2]), GROUP=group, LANES=lanes, THREADS=threads,
        EARLY=0 if early is None else early.steps, NOISY=int(noisy), DETAILED=int(detailed),
    )  # fmt: skip
    return None if made is None else (made, threads // lanes, threads)


def _back(policy: Any, batch: int) -> Any:
    """With it the states and inputs of a block, how many blocks share the states of a seed, and the shared memory of one."""
    hidden, rows = inner_mlp(policy.trunk).width, rollout_kernel.traced_rows(policy, _steps(policy.env), batch)
    listed = _listed(policy.env)
    some, across = -(-rows // REACHED) if listed else rows, policy.num_seeds * -(-(hidden + _table(policy)[1]) // BLOCK)
    if hidden >= BLOCK and -(-some // BLOCK) * across >= MANY_BLOCKS:
        tile, stages, staged = BLOCK, STAGES, 4 * STAGES * 2 * BLOCK * (DEPTH + 4)
    else:
        tile, stages, across = BLOCK // 2, min(MOST_STAGES, 1 + hidden // DEPTH), 2 * across
        staged = 4 * stages * 2 * tile * DEPTH
    lines = -(-rows // tile)
    if listed:  # a block that finds nothing to do takes a while to find out
        lines = min(lines, max(-(-some // tile), -(-ROOM // across)))
    made = _compiled("back", policy, staged, H=hidden, TILE=tile, DEPTH=DEPTH, STAGES=stages)
    return None if made is None else (made, tile, lines, staged)


def _weights(policy: Any, batch: int) -> Any:
    """With it the blocks of a seed and the shares of its states."""
    (_, features, hidden), outputs = inner_mlp(policy.trunk).layers[0].weight.shape, policy.head.weight.shape[2]
    width, rows = _table(policy)[1], rollout_kernel.traced_rows(policy, _steps(policy.env), batch)
    across, letters = -(-hidden // BLOCK), policy.early(_steps(policy.env), batch) is None and _by_letters(policy)
    blocks = (
        across * across
        + (across + -(-width // BLOCK)) * -(-outputs // BLOCK)
        + (0 if letters else across * -(-features // BLOCK))
    )
    programs = (
        PROGRAMS if rows > FEW_STATES else PROGRAMS // 2
    )  # adding up the parts of a small sum takes longer than the sum
    parts = min(-(-rows // SHARE), max(1, programs // (blocks * policy.num_seeds)))
    sizes = {"H": hidden, "OUT": outputs, "COLUMNS": rollout_kernel.columns(policy), "W": width, "FEATURES": features}
    made = _compiled("weights", policy, _STAGED, **sizes, TILE=BLOCK, DEPTH=DEPTH, STAGES=STAGES, **_world(policy))
    return None if made is None else (made, blocks, parts)


_STAGED = 4 * STAGES * 2 * DEPTH * (BLOCK + 8)  # bytes of shared memory of `weights`


def _letters(policy: Any) -> Any:
    _, features, hidden = inner_mlp(policy.trunk).layers[0].weight.shape
    return _compiled("letters", policy, 0, H=hidden, FEATURES=features, **_world(policy))


def _by_letters(policy: Any) -> bool:
    return isinstance(policy.env, Strings) and inner_mlp(policy.trunk).layers[0].weight.shape[1] > MANY_FEATURES


def _listed(env: Any) -> bool:
    """Whether the states that were reached must be listed: where every trajectory goes on to the end, all are."""
    return not isinstance(env, Strings) or env.stop is not None
