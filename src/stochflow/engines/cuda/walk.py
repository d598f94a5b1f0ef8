"""A whole rollout in one GPU kernel (walk.cu): every step of every trajectory without a return to the host or to other kernels.

It covers the grid and strings, `Exact` and `Slip`, and two-layer networks with or without a look-up table (`fits`); everything else
walks step by step in `rollout`, which is also what happens where the kernel cannot be compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stochflow.engines.cuda import driver as cuda_source
from stochflow.nets.lookup import _LookupTrunk, inner_mlp
from stochflow.nets.mlp import _MLPTrunk
from stochflow.nets.policy import Early, Policy
from stochflow.ops import always, zeros
from stochflow.types import Fading, Task, Trajectories
from stochflow.worlds.channels import Exact, Slip
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

Explore = Fading | Tensor | float | None
WIDTHS = (16, 32, 64, 128, 256)  # of hidden layers and of the look-up table
SMALL_HEAD = 32  # outputs whose weights are in shared memory
MOST_MOVES = 256  # of a large head, four a thread: narrow networks have 64 threads
MOST_ROWS = 8  # trajectories a block
HELD = {
    1: 11,
    2: 11,
    4: 11,
    8: 10,
}  # groups of four inputs whose weights of the second layer are in registers, by trajectories a block
MOST_RESIDENT = 4  # blocks of threads a multiprocessor for which registers are saved
HELD_BESIDE = {1: 8, 2: 8, 4: 10, 8: 10}  # the same beside a large head


class Trace(NamedTuple):
    """What the network made of each state that a rollout reached: the activations of its layers, for whoever learns before the weights change.

    A row a state: first the early ones, which all trajectories share, then step by step those of each trajectory.
    """

    sums: Tensor  # [S, R, H] the first layer before its rectifier; of states that were not reached it is anything, and so are the others
    hidden: Tensor  # [S, R, H] the second after it
    outs: Tensor  # [S, R, columns] the head, padded, flows left out where there are many moves
    numbers: Tensor  # [steps, S, B] int32: which early state it was
    entries: (
        Tensor | None
    )  # [S, R] int32: which row of its look-up table the network read, of the states after the early ones
    early: Early | None
    finals: Tensor  # [S, B] the numbers of the last states, where numbers have 64 bits
    head: Tensor  # [S, inputs, outputs] its weights; of a large one those of the kept outputs, in rows of even length


def traced_rows(policy: Any, steps: int, batch: int) -> int:
    """Rows of a trace."""
    early = policy.early(steps, batch)
    return steps * batch if early is None else len(early.states) + (steps - early.steps) * batch


def fits(task: Task, policy: Any) -> bool:
    """Whether the kernel knows this environment, channel and network."""
    env: Any = task.env
    trunk: Any = getattr(policy, "trunk", None)
    mlp = inner_mlp(trunk)
    if not (
        type(policy) is Policy
        and type(mlp) is _MLPTrunk
        and policy.encoder is None
        and len(mlp.layers) == 2
        and mlp.width in WIDTHS
    ):
        return False
    small = policy.head.weight.shape[2] <= SMALL_HEAD
    return (
        type(env) in (Grid, Strings)
        and type(task.channel) in (Exact, Slip)
        and (trunk is mlp or (type(env) is Strings and small and trunk.table.weight.shape[-1] in WIDTHS))
        and (small or (type(env) is Strings and env.num_moves <= MOST_MOVES))
        and env.state_dim <= 256  # states are in shared memory
        and policy.head.weight.dtype == torch.float32
    )


def columns(policy: Any) -> int:
    """Outputs of the head that a walk keeps, padded: all of them, or of many those of the moves."""
    outputs = policy.head.weight.shape[2]
    return max(16, 1 << (outputs - 1 if outputs <= SMALL_HEAD else policy.env.num_moves - 1).bit_length())


def _threads(hidden: int) -> int:
    return min(256, hidden * hidden // 4)


def _rows(walks: int, threads: int) -> int:
    """Trajectories a block, a warp each: one, as long as there are multiprocessors for all."""
    return min(threads // 32, 1 if walks <= 132 else 2 if walks <= 264 else 4 if walks <= 1056 else MOST_ROWS)


def _blocks(groups: int, seeds: int, processors: int) -> int:
    """Blocks that walk the groups of a seed, one after the other: as many as there is room for, and all about the same number."""
    return -(-groups // -(-groups * seeds // processors))


def walk(task: Task, policy: Any, batch: int, explore: Explore) -> Trajectories | None:
    """`rollout` for what `fits`, in law the same; the random numbers come from one draw of torch's generator. None: it cannot be compiled.

    `explore` = probability of a uniform legal action.
    """
    with torch.cuda.device(policy.device):
        found = _walk(task, policy, batch, explore, False)
    return None if found is None else found[0]


def traced_walk(
    task: Task, policy: Any, batch: int, explore: Explore, key: Tensor, turn: Tensor
) -> tuple[Trajectories, Trace] | None:
    """The same, and what the network made of each state; its random numbers are those of `key` [1] and `turn`, which the kernel reads."""
    with torch.cuda.device(policy.device):
        return _walk(task, policy, batch, explore, True, key, turn)


@torch.no_grad()
def _walk(
    task: Task,
    policy: Any,
    batch: int,
    explore: Any,
    trace: bool,
    key: Tensor | None = None,
    turn: Tensor | None = None,
) -> Any:
    env: Any = task.env
    channel: Any = task.channel
    device = policy.device
    trunk = policy.trunk
    table = trunk.table.weight if type(trunk) is _LookupTrunk else None
    one, two = inner_mlp(trunk).layers
    seeds, horizon, wide = policy.num_seeds, env.horizon, env.state_dim
    _, features, hidden = one.weight.shape
    string = isinstance(env, Strings)
    threads, width = _threads(hidden), 0 if table is None else table.shape[2]
    outputs, kept = policy.head.weight.shape[2], columns(policy)
    small, slips = outputs <= SMALL_HEAD, isinstance(channel, Slip) and channel.alpha > 0
    steps = horizon + (trace and not env.tree)  # a walk needs nothing of the last state, but who learns a way back does
    early = policy.early(steps, batch)
    known_steps, known_states = (0, 0) if early is None else (early.steps, len(early.states))
    units = min(4, hidden * hidden // threads // 4)
    fours = hidden * hidden // threads // units // 4
    properties: Any = torch.cuda.get_device_properties(device)
    most = getattr(properties, "shared_memory_per_block_optin", 0) // 4  # not every PyTorch and not every chip says
    common = {
        "H": hidden, "T": horizon, "TRACE": trace, "STRING": string, "D": wide, "SIZE": env.tokens if string else env.side,
        "LEAST": (env.min_length or 0) if string else 0, "STOP": -1 if env.stop is None else env.stop, "M": env.num_moves,
        "OUT": outputs, "COLUMNS": kept, "W": width, "EXPLORES": explore is not None, "SLIPS": slips, "THREADS": threads,
        "FEATURES": features, "EARLY": known_steps, "EARLY_STATES": known_states, "EARLY_WIDTH": kept if trace else outputs,
        "UNITS": units, "SMALL_HEAD": small, "TURNS": turn is not None,
    }  # fmt: skip

    def launch(begin: int, end: int, network: bool) -> Any:
        """A kernel, its blocks a seed and its shared memory, for these steps; None where it cannot be had."""
        rows = _rows(seeds * batch, threads) if network else threads // 32
        held = min(fours, (HELD if small else HELD_BESIDE)[rows])
        shared = rows * (2 * hidden + 16 + width + (5 if slips else 3) * kept + wide + 6) + kept
        shared += outputs * (hidden + width) if network and small else 0 if small else rows * 4 * threads
        placed = {}
        wanted = {"REST_SHARED": (fours - held) * 4 * threads * units, "FIRST_SHARED": features * hidden}
        for name, more in wanted.items():  # what has no room is read from the cache at every step
            placed[name] = int(network and shared + more <= most)
            shared += more * placed[name]
        placed["HEAD_KEPT"] = (
            0
            if small or not network
            else max(0, min(max(4, hidden * kept // threads // 4), (most - shared) // (16 * threads) * 4))
        )
        shared += placed["HEAD_KEPT"] * 4 * threads
        if shared > most:
            return None
        groups = -(-batch // rows)
        together = 256 // hidden if network else 8  # blocks a multiprocessor
        resident = max(1, min(MOST_RESIDENT, together, -(-groups * seeds // properties.multi_processor_count)))
        defines = (
            common
            | placed
            | {
                "RESIDENT": resident,
                "BEGIN": begin,
                "END": end,
                "NETWORK": network,
                "ROWS": rows,
                "HELD": held,
                "HANDS_ON": end < steps,
            }
        )
        settings = tuple((name, int(value)) for name, value in defines.items())
        kernel = cuda_source.compiled(
            ("common.cuh", "walk.cu"),
            "walk",
            settings,
            4 * shared,
            torch.cuda.get_device_capability(device),
            device.index,
        )
        return (
            None
            if kernel is None
            else (kernel, _blocks(groups, seeds, together * properties.multi_processor_count), 4 * shared)
        )

    parts = [(0, known_steps, False), (known_steps, steps, True)]
    launches = [launch(*part) for part in parts if part[0] < part[1]]
    if None in launches or two.weight.data_ptr() % 16 or one.weight.data_ptr() % 16:
        return None
    states = torch.empty(horizon + 1, seeds, batch, wide, dtype=torch.long, device=device)
    actions, moves = torch.empty(2, horizon, seeds, batch, dtype=torch.long, device=device)
    alive = torch.empty(horizon, seeds, batch, dtype=torch.bool, device=device)
    room = known_states + (steps - known_steps) * batch if trace else 0
    record = _record(policy, early if trace else None, room, kept, hidden, known_steps if trace else 0, batch)
    given = record.outs if trace else one.bias if early is None else policy.raw(early.states)
    key = torch.randint(2**31 - 1, (1,), device=device) if key is None else key
    start, tau, chance = explore if isinstance(explore, Fading) else (0.0, 0.0, explore)
    chance = key if chance is None else torch.as_tensor(chance, dtype=torch.float64, device=device)
    arguments = [
        states, actions, moves, alive, record.sums, record.hidden, record.outs, record.numbers, record.numbers if record.entries is None else record.entries, record.finals,
        one.weight, one.bias, two.weight, two.bias, record.head, policy.head.bias, one.bias if table is None else table, given,
        key, key if turn is None else torch.as_tensor(turn, dtype=torch.float64, device=device), chance, float(start), float(tau), float(getattr(channel, "alpha", 0.0)),
        seeds, batch, 0 if table is None else table.shape[1], room if trace else known_states, room,
    ]  # fmt: skip
    for kernel, blocks, shared in launches:
        kernel((blocks, seeds, 1), (threads, 1, 1), arguments, shared)
    return Trajectories(
        states, actions, moves, alive, zeros((seeds, batch), device), always((seeds, batch), device)
    ), record


def _record(policy: Any, early: Early | None, room: int, kept: int, hidden: int, steps: int, batch: int) -> Trace:
    """Room for a trace, with what it knows of early states before anyone walks."""
    seeds, device, trunk = policy.num_seeds, policy.device, policy.trunk
    table = trunk.table.weight if type(trunk) is _LookupTrunk else None
    layers, outs = torch.empty(2, seeds, room, hidden, device=device), torch.empty(seeds, room, kept, device=device)
    numbers = torch.empty(steps, seeds, batch, dtype=torch.int32, device=device)
    entries = None if table is None else torch.empty(seeds, room, dtype=torch.int32, device=device)
    if early is not None:
        (one, two), head, many = inner_mlp(trunk).layers, policy.head, len(early.states)
        first, second, made = layers[0, :, :many], layers[1, :, :many], outs[:, :many, : head.weight.shape[2]]
        flags = policy.env.features(early.states) if early.features is None else early.features
        torch.baddbmm(one.bias, flags.expand(seeds, -1, -1), one.weight, out=first)
        torch.baddbmm(two.bias, torch.relu(first), two.weight, out=second).relu_()
        torch.baddbmm(head.bias[..., :kept], second, head.weight[:, :hidden, :kept], out=made)
        if table is not None:  # an early state's number is its row
            made.baddbmm_(table[:, :many], head.weight[:, hidden:, :kept])
    finals = torch.empty(seeds, batch, dtype=torch.long, device=device)
    weight = policy.head.weight
    outputs = weight.shape[2]
    if outputs > SMALL_HEAD:
        weight = (
            torch.nn.functional.pad(weight, (0, kept - outputs)) if outputs < kept else weight[..., :kept].contiguous()
        )
    return Trace(layers[0], layers[1], outs, numbers, entries, early, finals, weight)
