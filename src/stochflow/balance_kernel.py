"""The gradient of trajectory balance in four GPU kernels, from what a rollout kept of the network (`rollout_kernel.Trace`).

    residuals   a program a trajectory: log-probabilities, the residual, and what it says to every output of the network
    back        through the head, then through the second layer: a program a block of states and inputs
    weights     a program a block of weights: sums over the states

The network is not asked again, states that were never reached cost next to nothing, and states that many share are there once. The
same as `evaluate`, `TrajectoryBalance` and autograd, which a small batch keeps busy with a hundred kernels of a microsecond; where these
serve (`fits`), tests hold one to the other. Products are in float32: where on tensor cores, as three in TF32, which is as exact.

Only `trainer` imports this file, and only on a GPU: it needs Triton, which comes with PyTorch's CUDA builds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stochflow import rollout_kernel
from stochflow.cpu_balance import plain
from stochflow.envs.strings import Strings
from stochflow.objectives import Objective
from stochflow.rollout_kernel import Trace
from stochflow.types import Task, Trajectories

# Sizes by trial on an H200.
MOST_STATES = 1 << 18  # of a batch, reached or not
MANY_FEATURES = 1024  # of which fewer states are allowed
MOST_BATCH = 8192
MOST_OUTPUTS = 1 << 14  # of one trajectory: they are in registers together
TILE, CHUNK = 32, 32
FEW_STATES, MANY_STATES = 264, 2048  # whose blocks are smaller, to spread over the chip, or larger
PART, MOST_PARTS = 1024, 32  # states a program of `weights` sums over


@triton.jit
def _residuals(
    slopes, residuals, reached,  # out: [S, R, MP], what the loss says to each output; [S, B]; [S, B] states on the way
    outs, numbers, states, moves, alives, log_rewards, log_z_unit,
    num_seeds, batch, rows, early_states, Z_SCALE: tl.constexpr, T: tl.constexpr, N: tl.constexpr, TP: tl.constexpr, EARLY: tl.constexpr,
    STRING: tl.constexpr, LEARNED: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, LEAST: tl.constexpr, STOP: tl.constexpr,
    M: tl.constexpr, MP: tl.constexpr,
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
    slope *= 2 * residual / batch
    tl.store(slopes + kept, slope, mask=((t >= EARLY) & (t < N))[:, None])
    if EARLY > 0:
        tl.atomic_add(slopes + kept, slope, mask=((t < EARLY) & known)[:, None])


@triton.jit
def _back(
    to_inputs,  # out: [S, R, H], what the loss says to a layer's inputs before their rectifier
    slopes, inputs, knowns, weight,  # [S, R, STRIDE], [S, R, H], flags, [S, H, OUT]
    rows, H: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Through one layer: slopes times the transposed weight, where the input was above zero. K = outputs that have slopes, padded."""
    s = tl.program_id(2)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    known = (tl.load(knowns + s * rows + i, mask=i < rows, other=0) != 0)[:, None]
    if tl.sum(known.to(tl.int32)) > 0:
        at = (s * rows + i)[:, None]
        c = tl.program_id(1) * TILE + tl.arange(0, TILE)
        made = tl.zeros([TILE, TILE], tl.float32)
        for start in range(0, K, CHUNK):
            k = start + tl.arange(0, CHUNK)
            slope = tl.load(slopes + at * STRIDE + k[None, :], mask=known, other=0.0)
            w = tl.load(weight + s * H * OUT + c[None, :] * OUT + k[:, None], mask=(k < OUT)[:, None], other=0.0)
            made = tl.dot(slope, w, made, input_precision="tf32x3")
        x = tl.load(inputs + at * H + c[None, :], mask=known, other=0.0)
        tl.store(to_inputs + at * H + c[None, :], tl.where(x > 0, made, 0.0), mask=known)


@triton.jit
def _weights(
    to_first, to_first_bias, to_second, to_second_bias, to_head, to_head_bias, to_log_z,  # out: gradients, [S, ...] each
    early, path, knowns, sums, hiddens, slopes, to_hidden, to_sums, residuals, reached,
    num_seeds, batch, rows, early_states, num_features, stride, Z_SCALE: tl.constexpr, BATCH: tl.constexpr, EARLY: tl.constexpr,
    STRING: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, H: tl.constexpr, OUT: tl.constexpr, MP: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`early` [early_states, D], `path` [T+1, S, B, D] = the states; BATCH = the batch, padded. Programs: the blocks of the second layer,
    then those of the head, then those of the first layer; each PARTS times, for a share of the states, whose results lie `stride` apart."""
    s, p = tl.program_id(0), tl.program_id(1)
    part = tl.program_id(2).to(tl.int64) * stride
    b = tl.arange(0, BATCH)
    longest = tl.max(tl.load(reached + s * batch + b, mask=b < batch, other=0), 0)
    last = early_states + tl.maximum(longest - EARLY, 0) * batch  # after these nothing was reached
    if (p == 0) & (part == 0):
        tl.store(to_log_z + s, 2 * Z_SCALE / batch * tl.sum(tl.load(residuals + s * batch + b, mask=b < batch, other=0.0), 0))

    across = H // TILE
    outputs = (OUT + TILE - 1) // TILE
    if p < across * across:
        row, column = p // across, p % across
        _block(to_second + part + s * H * H, to_second_bias + part + s * H, sums, to_hidden, early, path, knowns, s, row, column, last,
               num_seeds, batch, rows, early_states, H, H, H, H, True, False, EARLY, D, SIZE, TILE, PARTS, PRECISION)  # fmt: skip
    elif p < across * (across + outputs):
        row, column = (p - across * across) // outputs, (p - across * across) % outputs
        _block(to_head + part + s * H * OUT, to_head_bias + part + s * OUT, hiddens, slopes, early, path, knowns, s, row, column, last,
               num_seeds, batch, rows, early_states, H, H, MP, OUT, True, False, EARLY, D, SIZE, TILE, PARTS, PRECISION)  # fmt: skip
    else:
        row, column = (p - across * (across + outputs)) // across, (p - across * (across + outputs)) % across
        _block(to_first + part + s * num_features * H, to_first_bias + part + s * H, sums, to_sums, early, path, knowns, s, row, column, last,
               num_seeds, batch, rows, early_states, num_features, H, H, H, False, STRING & (EARLY == 0), EARLY, D, SIZE, TILE, PARTS,
               PRECISION)  # fmt: skip


@triton.jit
def _block(to_weight, to_bias, inputs, slopes, early, path, knowns, s, row, column, last, num_seeds, batch, rows, early_states,
           num_inputs, WIDTH: tl.constexpr, STRIDE: tl.constexpr, OUTPUTS: tl.constexpr, DENSE: tl.constexpr, LETTERS: tl.constexpr,
           EARLY: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
           PRECISION: tl.constexpr):  # fmt: skip
    """A block of a layer's weight gradient, sum over states of input times slope, and, of the first row of blocks, of its bias.

    DENSE: the inputs are rectified numbers [..., WIDTH]; else flags, one a value of each column of the state; LETTERS: in the order of time.
    """
    k = row * TILE + tl.arange(0, TILE)
    j = column * TILE + tl.arange(0, TILE)
    made = tl.zeros([TILE, TILE], tl.float32)
    total = tl.zeros([TILE], tl.float32)
    begin = last * 0
    if LETTERS:  # a letter is there from the step after its own on; the bias is there always
        begin = tl.where(row == 0, 0, tl.minimum((row * TILE // SIZE + 1) * batch, last))
    share = (last - begin + TILE * PARTS - 1) // (TILE * PARTS) * TILE
    begin += tl.program_id(2) * share
    last = tl.minimum(last, begin + share)
    for start in range(begin, last, TILE):
        i = start + tl.arange(0, TILE)
        known = (tl.load(knowns + s * rows + i, mask=i < last, other=0) != 0)[:, None]
        at = (s * rows + i)[:, None]
        if DENSE:
            x = tl.maximum(tl.load(inputs + at * WIDTH + k[None, :], mask=known, other=0.0), 0.0)
        else:
            late = i - early_states
            met = known & (k < num_inputs)[None, :]
            where = (((late // batch + EARLY) * num_seeds + s) * batch + late % batch)[:, None] * D + (k // SIZE)[None, :]
            value = tl.load(path + where, mask=met & (late >= 0)[:, None], other=SIZE)
            if EARLY > 0:
                first = tl.load(early + i[:, None] * D + (k // SIZE)[None, :], mask=met & (late < 0)[:, None], other=SIZE)
                value = tl.where((late < 0)[:, None], first, value)
            x = (value == (k % SIZE)[None, :]).to(tl.float32)
        g = tl.load(slopes + at * STRIDE + j[None, :], mask=known & ((j < OUTPUTS) & (j < STRIDE))[None, :], other=0.0)
        made = tl.dot(tl.trans(x), g, made, input_precision=PRECISION)
        total += tl.sum(g, 0)
    tl.store(to_weight + k[:, None] * OUTPUTS + j[None, :], made, mask=(k < num_inputs)[:, None] & (j < OUTPUTS)[None, :])
    if row == 0:
        tl.store(to_bias + j, total, mask=j < OUTPUTS)


def fits(task: Task, policy: Any, dynamics: Any, objective: Objective, batch: int) -> bool:
    """Whether these kernels compute this objective's gradient for this network, in a world without noise."""
    if not plain(task, policy, dynamics, objective) or not rollout_kernel.fits(task, policy) or policy.trunk.width < TILE:
        return False
    env: Any = task.env
    mlp: Any = policy.trunk
    steps, most = env.horizon + (not env.tree), MOST_STATES if mlp.layers[0].weight.shape[1] <= MANY_FEATURES else PART
    widest = policy.num_seeds * max(mlp.width, rollout_kernel.columns(policy), env.state_dim)  # numbers are counted in 31 bits
    return (
        batch <= MOST_BATCH
        and rollout_kernel.traced_rows(policy, steps, batch) <= min(most, 2**30 // widest)
        and (steps + 1) * batch <= 2**30 // widest
        and triton.next_power_of_2(steps) * rollout_kernel.columns(policy) <= MOST_OUTPUTS
    )


def gradient(task: Task, policy: Any, traj: Trajectories, trace: Trace, log_reward: Tensor, flat: Any) -> Tensor:
    """The gradient of each seed's loss into the policy's `flat` parameters; the residuals [S, B]."""
    with torch.no_grad(), torch.cuda.device(policy.device):
        return _gradient(task, policy, traj, trace, log_reward, flat)


def _gradient(task: Task, policy: Any, traj: Trajectories, trace: Trace, log_reward: Tensor, flat: Any) -> Tensor:
    env: Any = task.env
    known, sums, hiddens, outs, numbers, early, _ = trace
    (horizon, seeds, batch), (_, rows, hidden), columns = traj.alive.shape, sums.shape, outs.shape[2]
    one, two = policy.trunk.layers
    outputs, features, steps = policy.head.weight.shape[2], one.weight.shape[1], horizon + (not env.tree)
    string = isinstance(env, Strings)
    world = {"STRING": string, "D": env.state_dim, "SIZE": env.tokens if string else env.side}
    world |= {"EARLY": 0 if early is None else early.steps, "MP": columns, "num_warps": 4}
    shared = 0 if early is None else len(early.states)
    slopes, to_layers = (torch.empty_like if early is None else torch.zeros_like)(outs), torch.empty(2, *sums.shape, device=sums.device)
    residuals, reached = torch.empty_like(log_reward), torch.empty(seeds, batch, dtype=torch.int32, device=sums.device)
    flags = known.view(torch.int8)
    _residuals[(seeds, batch)](
        slopes, residuals, reached, outs, numbers, traj.states, traj.moves, traj.alive.view(torch.int8), log_reward.contiguous(),
        policy.log_z_unit, seeds, batch, rows, shared, policy.LOG_Z_SCALE, horizon, steps, triton.next_power_of_2(steps),
        LEARNED=policy.sizes[1] > 0, LEAST=(env.min_length or 0) if string else 0, STOP=-1 if env.stop is None else env.stop,
        M=env.num_moves, **world,
    )  # fmt: skip
    tile = min(hidden, TILE // 2 if seeds * rows <= FEW_STATES else TILE if seeds * rows <= MANY_STATES else 2 * TILE)
    grid, how = (triton.cdiv(rows, tile), hidden // tile, seeds), {"H": hidden, "TILE": tile, "num_warps": 4, "num_stages": 3}
    _back[grid](
        to_layers[0], slopes, hiddens, flags, policy.head.weight, rows,
        OUT=outputs, STRIDE=columns, K=columns, CHUNK=min(columns, CHUNK), **how,
    )  # fmt: skip
    _back[grid](to_layers[1], to_layers[0], sums, flags, two.weight, rows, OUT=hidden, STRIDE=hidden, K=hidden, CHUNK=CHUNK, **how)
    tile = min(hidden, TILE if rows <= PART else 2 * TILE)
    across = hidden // tile
    blocks = across * (across + triton.cdiv(outputs, tile) + triton.cdiv(features, tile))
    whole = flat.values.grad
    parts = 1 if rows <= PART else min(triton.cdiv(rows, PART // 4), MOST_PARTS)
    work = whole.unsqueeze(0) if parts == 1 else torch.zeros(parts, len(whole), device=whole.device)

    def place(name: str) -> Tensor:
        return work[0, flat.slices[name]]

    _weights[(seeds, blocks, parts)](
        place("trunk.layers.0.weight"), place("trunk.layers.0.bias"), place("trunk.layers.1.weight"), place("trunk.layers.1.bias"),
        place("head.weight"), place("head.bias"), place("log_z_unit"),
        traj.states if early is None else early.states, traj.states, flags, sums, hiddens, slopes, to_layers[0], to_layers[1], residuals, reached,
        seeds, batch, rows, shared, features, len(whole), policy.LOG_Z_SCALE, triton.next_power_of_2(batch),
        H=hidden, OUT=outputs, TILE=tile, PARTS=parts, PRECISION="ieee" if rows <= PART else "tf32x3", num_stages=1, **world,
    )  # fmt: skip
    if parts > 1:
        torch.sum(work, 0, out=whole)
    return residuals
