"""The gradient of trajectory balance in four GPU kernels, from what a rollout kept of the network (`rollout_kernel.Trace`).

    residuals   a program a trajectory: log-probabilities, the residual, what it says to every output of the network; which states it was in
    back        through the head, then through the second layer: a program a block of states and inputs
    weights     sums over the states (weights.cu: CUDA C++, because Triton cannot feed tensor cores with both factors in the order of states)

The network is not asked again, states that were never reached cost nothing, and states that many share are there once. The same as
`evaluate`, `TrajectoryBalance` and autograd, which a small batch keeps busy with a hundred kernels of a microsecond; where these serve
(`fits`), tests hold one to the other. Products are in float32, or three in TF32 on tensor cores, which is nearly as exact.

Only `trainer` imports this file, and only on a GPU: it needs Triton, which comes with PyTorch's CUDA builds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stochflow import cuda_source, rollout_kernel
from stochflow.cpu_balance import plain
from stochflow.envs.strings import Strings
from stochflow.objectives import Objective
from stochflow.rollout_kernel import Trace
from stochflow.types import Task, Trajectories

# Sizes by trial on an H200.
MOST_STATES = 1 << 19  # of a batch, reached or not
MOST_BATCH = 8192
MOST_OUTPUTS = 1 << 14  # of one trajectory: they are in registers together
TILE, CHUNK = 32, 32
FEW_STATES, MANY_STATES = 264, 2048  # whose blocks are smaller, to spread over the chip, or larger
PROGRAMS, SHARE = 528, 32  # blocks of threads, all together, and the states of one of `weights` at least
BLOCK, DEPTH, STAGES = 64, 32, 3  # of weights.cu: inputs and outputs of a block, states at a time, and how many such lots are on their way
_STAGED = 4 * STAGES * 2 * DEPTH * (BLOCK + 8)  # bytes of its shared memory
MANY_FEATURES = 128  # of strings: above, the letters of each trajectory are added one by one


@triton.jit
def _residuals(
    slopes, residuals, entropies, reached,  # out: [S, R, MP] what the loss says to each output; of each trajectory [S, B]: its residual, the
    # entropy of its policy, summed over its steps, the number of its states
    met, counts,  # out, with LISTED: [S, R - early_states] the late states of all, in any order, and [S] how many they are
    outs, numbers, states, moves, alives, log_rewards, log_z_unit,
    num_seeds, batch, rows, early_states, Z_SCALE: tl.constexpr, T: tl.constexpr, N: tl.constexpr, TP: tl.constexpr, EARLY: tl.constexpr,
    STRING: tl.constexpr, LEARNED: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, LEAST: tl.constexpr, STOP: tl.constexpr,
    M: tl.constexpr, MP: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """N = states a trajectory; TP, MP = N and the outputs, padded; LEARNED: the way back has outputs of its own, after those of the moves."""
    s, b = tl.program_id(0), tl.program_id(1)
    t = tl.arange(0, TP)
    m = tl.arange(0, MP)[None, :]
    at = (t * num_seeds + s) * batch + b
    row = early_states + (t - EARLY) * batch + b
    if EARLY > 0:
        row = tl.where(t < EARLY, tl.load(numbers + at, mask=t < EARLY, other=0), row)
    kept = (s * rows + row)[:, None] * MP + m
    alive = tl.load(alives + at, mask=t < T, other=0) != 0
    move = tl.load(moves + at, mask=alive, other=0)[:, None]
    if STRING:
        mask = (m < SIZE) | ((m == STOP) & (t >= LEAST)[:, None])
    else:
        place = tl.load(states + at[:, None] * D + m, mask=alive[:, None] & (m < D), other=0)
        mask = ((m < D) & (place < SIZE - 1)) | (m == STOP)
    x = tl.where(mask, tl.load(outs + kept, mask=alive[:, None] & (m < M), other=0.0), -1e9)
    top = tl.max(x, 1)
    e = tl.exp(x - top[:, None])
    total = tl.sum(e, 1)
    log_p = tl.sum(tl.where(m == move, x, 0.0), 1) - top - tl.log(total)
    slope = tl.where(alive[:, None], tl.where(m == move, 1.0, 0.0) - e / total[:, None], 0.0)
    residual = tl.sum(tl.where(alive, log_p, 0.0), 0)
    tl.store(entropies + s * batch + b, tl.sum(tl.where(alive, tl.log(total) - tl.sum(e * (x - top[:, None]), 1) / total, 0.0), 0))
    known = alive

    if not STRING:  # a state of the grid has several parents: the probability of the one it came from
        earlier = at - num_seeds * batch
        came = tl.load(alives + earlier, mask=(t > 0) & (t <= T), other=0) != 0
        by = tl.load(moves + earlier, mask=came, other=STOP)[:, None]
        came = came & (tl.max(by, 1) != STOP)
        place = tl.load(states + at[:, None] * D + m, mask=came[:, None] & (m < D), other=0)
        if LEARNED:
            d = m - M
            place = tl.load(states + at[:, None] * D + d, mask=came[:, None] & (d >= 0) & (d < D), other=0)
            y = tl.where(place > 0, tl.load(outs + kept, mask=came[:, None], other=0.0), -1e9)
            top = tl.max(y, 1)
            e = tl.exp(y - top[:, None])
            total = tl.sum(e, 1)
            log_b = tl.sum(tl.where(d == by, y, 0.0), 1) - top - tl.log(total)
            slope -= tl.where(came[:, None], tl.where(d == by, 1.0, 0.0) - e / total[:, None], 0.0)
        else:
            log_b = -tl.log(tl.maximum(tl.sum((place > 0).to(tl.float32), 1), 1.0))
        residual -= tl.sum(tl.where(came, log_b, 0.0), 0)
        known = came | (t == 0)

    residual += Z_SCALE * tl.load(log_z_unit + s) - tl.load(log_rewards + s * batch + b)
    tl.store(residuals + s * batch + b, residual)
    tl.store(reached + s * batch + b, tl.sum(known.to(tl.int32), 0))
    late = known & (t >= EARLY)
    if LISTED:
        place = tl.atomic_add(counts + s, tl.sum(late.to(tl.int32), 0))
        tl.store(met + s * (rows - early_states) + place + t - EARLY, row, mask=late)
    slope *= 2 * residual / batch
    tl.store(slopes + kept, slope, mask=((t >= EARLY) & (t < N))[:, None])
    if EARLY > 0:
        tl.atomic_add(slopes + kept, slope, mask=((t < EARLY) & known)[:, None])


@triton.jit
def _back(
    to_inputs,  # out: [S, R, H], what the loss says to a layer's inputs before their rectifier
    slopes, inputs, weight, met, counts,  # [S, R, STRIDE], [S, R, H], [S, H, OUT]; the states that were reached
    rows, early_states, H: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Through one layer: slopes times the transposed weight, where the input was above zero. K = outputs that have slopes, padded."""
    s = tl.program_id(2)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    many = early_states + tl.load(counts + s) if LISTED else rows
    if tl.program_id(0) * TILE < many:
        inside = (i < many)[:, None]
        row = i
        if LISTED:
            late = tl.load(met + s * (rows - early_states) + i - early_states, mask=(i >= early_states) & (i < many), other=0)
            row = tl.where(i < early_states, i, late)
        at = (s * rows + row)[:, None]
        c = tl.program_id(1) * TILE + tl.arange(0, TILE)
        made = tl.zeros([TILE, TILE], tl.float32)
        for start in range(0, K, CHUNK):
            k = start + tl.arange(0, CHUNK)
            slope = tl.load(slopes + at * STRIDE + k[None, :], mask=inside, other=0.0)
            w = tl.load(weight + s * H * OUT + c[None, :] * OUT + k[:, None], mask=(k < OUT)[:, None], other=0.0)
            made = tl.dot(slope, w, made, input_precision="tf32x3")
        x = tl.load(inputs + at * H + c[None, :], mask=inside, other=0.0)
        tl.store(to_inputs + at * H + c[None, :], tl.where(x > 0, made, 0.0), mask=inside)


def fits(task: Task, policy: Any, dynamics: Any, objective: Objective, batch: int) -> bool:
    """Whether these kernels compute this objective's gradient for this network, in a world without noise."""
    if not plain(task, policy, dynamics, objective) or not rollout_kernel.fits(task, policy) or policy.trunk.width < TILE:
        return False
    env: Any = task.env
    mlp: Any = policy.trunk
    steps = env.horizon + (not env.tree)
    widest = policy.num_seeds * max(mlp.width, rollout_kernel.columns(policy), env.state_dim)  # numbers are counted in 31 bits
    return (
        batch <= MOST_BATCH
        and rollout_kernel.traced_rows(policy, steps, batch) <= min(MOST_STATES, 2**30 // widest)
        and (steps + 1) * batch <= 2**30 // widest
        and triton.next_power_of_2(steps) * rollout_kernel.columns(policy) <= MOST_OUTPUTS
        and _weights(policy) is not None
        and (not _by_letters(policy) or _letters(policy) is not None)
    )


def gradient(task: Task, policy: Any, traj: Trajectories, trace: Trace, log_reward: Tensor, flat: Any, note: bool) -> tuple[Tensor, Tensor]:
    """The gradient of each seed's loss into the policy's `flat` parameters; of each trajectory the residual and the entropy of its policy,
    summed over its steps [S, B]; that costs nothing here and is given whether or not it is to be noted."""
    with torch.no_grad(), torch.cuda.device(policy.device):
        return _gradient(task, policy, traj, trace, log_reward, flat)


def _gradient(task: Task, policy: Any, traj: Trajectories, trace: Trace, log_reward: Tensor, flat: Any) -> tuple[Tensor, Tensor]:
    env: Any = task.env
    sums, hiddens, outs, numbers, early, _ = trace
    (horizon, seeds, batch), (_, rows, hidden), columns = traj.alive.shape, sums.shape, outs.shape[2]
    one, two = policy.trunk.layers
    outputs, features, steps = policy.head.weight.shape[2], one.weight.shape[1], horizon + (not env.tree)
    string = isinstance(env, Strings)
    early_steps, shared = (0, 0) if early is None else (early.steps, len(early.states))
    slopes, to_layers = (torch.empty_like if early is None else torch.zeros_like)(outs), torch.empty(2, *sums.shape, device=sums.device)
    residuals, entropies = torch.empty(2, seeds, batch, device=sums.device)
    reached = torch.empty(seeds, batch, dtype=torch.int32, device=sums.device)
    listed = _listed(env)
    met = torch.empty(seeds, rows - shared if listed else 0, dtype=torch.int32, device=sums.device)
    counts = torch.zeros(seeds, dtype=torch.int32, device=sums.device) if listed else met
    _residuals[(seeds, batch)](
        slopes, residuals, entropies, reached, met, counts, outs, numbers, traj.states, traj.moves, traj.alive.view(torch.int8), log_reward.contiguous(),
        policy.log_z_unit, seeds, batch, rows, shared, policy.LOG_Z_SCALE, horizon, steps, triton.next_power_of_2(steps),
        LEARNED=policy.sizes[1] > 0, LEAST=(env.min_length or 0) if string else 0, STOP=-1 if env.stop is None else env.stop,
        M=env.num_moves, MP=columns, STRING=string, D=env.state_dim, SIZE=_world(policy)["SIZE"], EARLY=early_steps, LISTED=listed, num_warps=4,
    )  # fmt: skip
    tile = min(hidden, TILE // 2 if seeds * rows <= FEW_STATES else TILE if seeds * rows <= MANY_STATES else 2 * TILE)
    grid = (triton.cdiv(rows, tile), hidden // tile, seeds)
    how = {"H": hidden, "TILE": tile, "LISTED": listed, "num_warps": 4, "num_stages": 3}
    head = policy.head.weight
    if outputs > columns:  # loads are wide where rows are even
        head = head[..., :columns].contiguous()
    _back[grid](
        to_layers[0], slopes, hiddens, head, met, counts, rows, shared,
        OUT=head.shape[2], STRIDE=columns, K=columns, CHUNK=min(columns, CHUNK), **how,
    )  # fmt: skip
    _back[grid](
        to_layers[1], to_layers[0], sums, two.weight, met, counts, rows, shared, OUT=hidden, STRIDE=hidden, K=hidden, CHUNK=CHUNK, **how
    )
    layers = [flat.slopes[f"{layer}.{kind}"] for layer in ("trunk.layers.0", "trunk.layers.1", "head") for kind in ("weight", "bias")]
    letters = early is None and _by_letters(policy)
    across = triton.cdiv(hidden, BLOCK)
    blocks = across * (across + triton.cdiv(outputs, BLOCK) + (0 if letters else triton.cdiv(features, BLOCK)))
    parts = min(triton.cdiv(rows, SHARE), max(1, PROGRAMS // (blocks * seeds)))
    if parts > 1 or letters:
        flat.values.grad.zero_()
    _weights(policy)(
        (blocks, parts, seeds),
        (4 * 32, 1, 1),
        [
            *layers, flat.slopes["log_z_unit"], traj.states if early is None else early.states, traj.states, met, counts,
            sums, hiddens, slopes, to_layers[0], to_layers[1], residuals, policy.LOG_Z_SCALE, seeds, batch, rows, early_steps, shared,
        ],
        _STAGED,
    )  # fmt: skip
    if letters:
        of_letters = [*layers[:2], traj.states[-1], reached, to_layers[1], batch, rows]
        _letters(policy)((min(batch, PROGRAMS), seeds, 1), (hidden, 1, 1), of_letters, 0)
    return residuals, entropies


def _compiled(kernel: str, policy: Any, shared: int, **defines: int) -> Any:
    """A kernel of CUDA C++ for this environment and network; None where it cannot be had."""
    defines |= {"H": policy.trunk.width, "LISTED": int(_listed(policy.env))}
    device = policy.device
    with torch.cuda.device(device):
        chip = torch.cuda.get_device_capability(device)
        return cuda_source.compiled(("tensor_cores.cuh", f"{kernel}.cu"), kernel, tuple(defines.items()), shared, chip, device.index)


def _world(policy: Any) -> dict[str, int]:
    """What the sums over states know of states."""
    env: Any = policy.env
    size = env.tokens if isinstance(env, Strings) else env.side
    return {"D": env.state_dim, "SIZE": size, "FEATURES": policy.trunk.layers[0].weight.shape[1]}


def _weights(policy: Any) -> Any:
    sizes = {"OUT": policy.head.weight.shape[2], "COLUMNS": rollout_kernel.columns(policy), "TILE": BLOCK, "DEPTH": DEPTH, "STAGES": STAGES}
    return _compiled("weights", policy, _STAGED, **sizes, **_world(policy))


def _letters(policy: Any) -> Any:
    return _compiled("letters", policy, 0, **_world(policy))


def _by_letters(policy: Any) -> bool:
    return isinstance(policy.env, Strings) and policy.trunk.layers[0].weight.shape[1] > MANY_FEATURES


def _listed(env: Any) -> bool:
    """Whether the states that were reached must be listed: where every trajectory goes on to the end, all are."""
    return not isinstance(env, Strings) or env.stop is not None
