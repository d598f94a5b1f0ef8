"""A whole rollout in one GPU kernel: every step of every trajectory without a return to the host or to other kernels.

A program walks ROWS trajectories of one seed from the first state to the last. A move changes one or two one-hot features, so
the first layer is a row added and a row taken away; the second layer is a matrix product whose weights stream from the cache.
When all its trajectories have finished, a program only writes down that nothing more happens. It covers the grid and strings, `Exact` and
`Slip`, and two-layer networks with or without a look-up table (`fits`); everything else walks step by step in `rollout`.

Only `rollout` imports this file, and only on a GPU: it needs Triton, which comes with PyTorch's CUDA builds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stochflow.channels import Exact, Slip
from stochflow.envs.grid import Grid
from stochflow.envs.strings import Strings
from stochflow.nets import Policy, _LookupTrunk, _MLPTrunk
from stochflow.ops import always
from stochflow.types import Task, Trajectories

WIDTHS = (16, 32, 64, 128, 256)  # of hidden layers and of the look-up table
LEAST_ROWS = 16  # tl.dot takes no fewer
CHUNK, WARPS = 32, 8  # by trial on an H200, 256 wide: 20 us a step; other sizes, TF32 in three products and outer products were slower


@triton.jit
def _gumbel(seed, place):
    return -tl.log(-tl.log(tl.maximum(tl.rand(seed, place), 1e-10)))


@triton.jit
def _walk(
    states, actions, moves, alives,  # out: [T+1, S, B, D], [T, S, B] int64 and one byte a flag
    sums,  # scratch [S, B, H]: the first layer before its rectifier
    first, first_bias, second, second_bias, head, head_bias, table,  # [S, ...] each
    seed, explore, alpha,
    num_seeds, batch, num_features, table_rows, T: tl.constexpr,
    STRING: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, LEAST: tl.constexpr, STOP: tl.constexpr, M: tl.constexpr,
    H: tl.constexpr, OUT: tl.constexpr, W: tl.constexpr, EXPLORES: tl.constexpr, SLIPS: tl.constexpr,
    ROWS: tl.constexpr, MP: tl.constexpr, XP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """M, D padded to MP, XP; SIZE = the grid's side or the alphabet's; LEAST = the least length that may STOP; W = 0: no table."""
    s = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = b < batch
    m = tl.arange(0, MP)[None, :]
    x = tl.arange(0, XP)[None, :]
    h = tl.arange(0, H)
    first += s * num_features * H
    second += s * H * H
    head += s * (H + W) * OUT
    row_of = s * batch + b
    draws = (row_of * T * (3 * MP)).to(tl.int32)[:, None]  # where this row's random numbers begin
    key = tl.load(seed)
    second_bias_ = tl.load(second_bias + s * H + h)
    head_bias_ = tl.load(head_bias + s * OUT + m, mask=m < M, other=0.0)

    if STRING:
        state = tl.full([ROWS, XP], SIZE, tl.int32)  # padding
    else:
        state = tl.zeros([ROWS, XP], tl.int32)
    length = tl.zeros([ROWS], tl.int32)
    feature = tl.zeros([ROWS], tl.int32)  # the one that the last move switched on
    goes = feature > 0
    index = tl.zeros([ROWS], tl.int64)
    stopped = tl.zeros([ROWS], tl.int32)
    tl.store(states + row_of[:, None] * D + x, state.to(tl.int64), mask=inside[:, None] & (x < D))
    begun = tl.load(first_bias + s * H + h)
    if not STRING:
        for d in tl.static_range(D):
            begun += tl.load(first + d * SIZE * H + h)
    tl.store(sums + row_of[:, None] * H + h[None, :], tl.zeros([ROWS, H], tl.float32) + begun[None, :], mask=inside[:, None])
    tl.debug_barrier()

    for t in range(T):
        # what is legal, and whether anything is left to decide
        if STRING:
            legal = (m < SIZE) & (length < D)[:, None]
            mask = legal | ((m == STOP) & (length >= LEAST)[:, None])
        else:
            legal = (m < D) & (state < SIZE - 1)  # XP = MP here
            mask = legal | ((m == STOP) & (length >= 0)[:, None])
        alive = (tl.sum(legal.to(tl.int32), 1) > 0) & (stopped == 0)

        # the network; the first layer's sums are in memory, where each thread reads back what it wrote itself
        logits = tl.zeros([ROWS, MP], tl.float32) + head_bias_
        if tl.sum(alive.to(tl.int32)) > 0:  # else all have finished
            hidden = tl.zeros([ROWS, H], tl.float32)
            for start in range(0, H, CHUNK):
                c = start + tl.arange(0, CHUNK)
                mine = sums + row_of[:, None] * H + c[None, :]
                fresh = first + feature[:, None] * H + c[None, :]
                part = tl.load(mine, mask=inside[:, None], other=0.0) + tl.load(fresh, mask=goes[:, None], other=0.0)
                if not STRING:  # the coordinate was at its old place before
                    part -= tl.load(fresh - H, mask=goes[:, None], other=0.0)
                tl.store(mine, part, mask=inside[:, None])
                weight = tl.load(second + c[:, None] * H + h[None, :])
                hidden = tl.dot(tl.maximum(part, 0.0), weight, hidden, input_precision="ieee")
            tl.debug_barrier()  # whoever reads the sums next, they are written
            hidden = tl.maximum(hidden + second_bias_[None, :], 0.0)
            for move_ in tl.static_range(M):
                score = tl.sum(hidden * tl.load(head + h * OUT + move_)[None, :], 1)
                if W > 0:
                    w = tl.arange(0, W)
                    kept = tl.minimum(index, table_rows - 1) + s * table_rows
                    row = tl.load(table + kept[:, None] * W + w[None, :])
                    score += tl.sum(row * tl.load(head + (H + w) * OUT + move_)[None, :], 1)
                logits += tl.where(m == move_, score[:, None], 0.0)

        # the action, and what the world makes of it
        place = draws + t * (3 * MP)
        if EXPLORES:
            coin = tl.rand(key, draws + t * (3 * MP) + 2 * MP) < tl.load(explore)
            logits = tl.where(coin, 0.0, logits)
        logits = tl.where(logits == logits, logits, 0.0)  # NaN loses to padding in tl.argmax: a ruined seed would leave the range
        action = tl.argmax(tl.where(mask, logits + _gumbel(key, place + m), -1e9), 1)
        move = action
        if SLIPS:
            other = tl.argmax(tl.where(legal, tl.rand(key, place + MP + m), -1.0), 1)
            slips = tl.sum(tl.where(m == 1, tl.rand(key, place + 2 * MP + m), 0.0), 1) < alpha
            move = tl.where(slips & (action != STOP), other, action)
        stopped = tl.where(action == STOP, 1, stopped)

        at = t * num_seeds * batch + row_of
        tl.store(actions + at, action.to(tl.int64), mask=inside)
        tl.store(moves + at, move.to(tl.int64), mask=inside)
        tl.store(alives + at, alive.to(tl.int8), mask=inside)

        # the next state, and the features it changes
        goes = alive & (move != STOP)
        if STRING:
            feature = length * SIZE + move
            state = tl.where((x == length[:, None]) & goes[:, None], move[:, None], state)
            index = tl.where(goes, index * SIZE + 1 + move, index)
            length += goes.to(tl.int32)
        else:
            chosen = (m == move[:, None]) & goes[:, None]
            feature = move * SIZE + tl.sum(tl.where(chosen, state, 0), 1) + 1
            state += chosen.to(tl.int32)
        tl.store(states + (at + num_seeds * batch)[:, None] * D + x, state.to(tl.int64), mask=inside[:, None] & (x < D))


def fits(task: Task, policy: Any, batch: int = 1) -> bool:
    """Whether the kernel knows this environment, channel and network, and counts its random numbers in 31 bits."""
    env: Any = task.env
    trunk: Any = getattr(policy, "trunk", None)
    mlp: Any = trunk.mlp if type(trunk) is _LookupTrunk else trunk
    return (
        type(policy) is Policy
        and type(mlp) is _MLPTrunk
        and type(env) in (Grid, Strings)
        and type(task.channel) in (Exact, Slip)
        and policy.encoder is None
        and len(mlp.layers) == 2
        and mlp.width in WIDTHS
        and (trunk is mlp or (type(env) is Strings and trunk.table.weight.shape[-1] in WIDTHS))
        and env.num_moves <= 32
        and env.state_dim <= 256  # states are in registers
        and policy.head.weight.dtype == torch.float32
        and policy.num_seeds * batch * env.horizon * 3 * 32 < 2**31
        and (type(env) is Strings or env.num_moves <= 16)
    )


@torch.no_grad()
def walk(task: Task, policy: Any, batch: int, explore: Tensor | float | None) -> Trajectories:
    """`rollout` for what `fits`, in law the same; the random numbers come from one draw of torch's generator."""
    env: Any = task.env
    channel: Any = task.channel
    device = policy.device
    trunk = policy.trunk
    table = trunk.table.weight if type(trunk) is _LookupTrunk else None
    one, two = (trunk if table is None else trunk.mlp).layers
    seeds, horizon, wide = policy.num_seeds, env.horizon, env.state_dim
    string = isinstance(env, Strings)
    padded = max(16, triton.next_power_of_2(env.num_moves))
    rows = LEAST_ROWS
    while rows < 64 and seeds * triton.cdiv(batch, rows) > 264:  # two programs a multiprocessor keep it busy; more share weights better
        rows *= 2
    states = torch.empty(horizon + 1, seeds, batch, wide, dtype=torch.long, device=device)
    actions, moves = torch.empty(2, horizon, seeds, batch, dtype=torch.long, device=device)
    alive = torch.empty(horizon, seeds, batch, dtype=torch.bool, device=device)
    sums = torch.empty(seeds, batch, one.weight.shape[2], device=device)
    key = torch.randint(2**31 - 1, (1,), device=device)
    chance = None if explore is None else torch.as_tensor(explore, dtype=torch.float32, device=device)
    _walk[(seeds, triton.cdiv(batch, rows))](
        states, actions, moves, alive.view(torch.int8),
        sums, one.weight, one.bias, two.weight, two.bias, policy.head.weight, policy.head.bias, table,
        key, chance, getattr(channel, "alpha", 0.0),
        seeds, batch, one.weight.shape[1], 0 if table is None else table.shape[1], horizon,
        STRING=string, D=wide, SIZE=env.tokens if string else env.side, LEAST=(env.min_length or 0) if string else 0,
        STOP=-1 if env.stop is None else env.stop, M=env.num_moves, H=one.weight.shape[2], OUT=policy.head.weight.shape[2],
        W=0 if table is None else table.shape[2], EXPLORES=chance is not None, SLIPS=isinstance(channel, Slip) and channel.alpha > 0,
        ROWS=rows, MP=padded, XP=max(16, triton.next_power_of_2(wide)) if string else padded, CHUNK=min(CHUNK, one.weight.shape[2]),
        num_warps=WARPS,
    )  # fmt: skip
    return Trajectories(states, actions, moves, alive, torch.zeros(seeds, batch, device=device), always((seeds, batch), device))
