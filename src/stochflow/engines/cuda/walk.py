"""A whole rollout in one kernel (walk.cu): every step of every trajectory without a return to the host or to other kernels.

It covers worlds that `lower` knows, `Exact` and `Slip`, and two hidden layers with or without a look-up table (`why_not`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stochflow.engines.base import Request, Trace, Traces, Walk
from stochflow.engines.cuda.driver import Kernel, kernel, shared_memory
from stochflow.engines.cuda.early import Early, early
from stochflow.engines.flat import FlatParameters
from stochflow.engines.lower import Lowered, lower
from stochflow.nets.lookup import LookupTrunk, inner_mlp
from stochflow.nets.mlp import MLPTrunk
from stochflow.nets.policy import Policy
from stochflow.ops import always, zeros
from stochflow.types import Explore, Fading, Task, Trajectories
from stochflow.worlds.channels import Exact, Slip
from stochflow.worlds.env import Env

WIDTHS = (16, 32, 64, 128, 256)  # of hidden layers and of the look-up table
SMALL_HEAD = 32  # outputs whose weights are in shared memory
MOST_MOVES = 256  # of a large head, four per thread: narrow networks have 64 threads
MOST_COLUMNS = 256  # of a state, which is in shared memory
MOST_ROWS = 8  # trajectories per block
# Groups of four inputs whose weights of the second layer are in registers, by trajectories per block, and the same beside
# a large head.
HELD = {1: 11, 2: 11, 4: 11, 8: 10}
HELD_BESIDE = {1: 8, 2: 8, 4: 10, 8: 10}
MOST_RESIDENT = 4  # blocks per multiprocessor for which registers are saved


class Activations(NamedTuple):
    """Of each state of a walk. A row per state: first the early ones, which all trajectories share, then step by step those
    of each trajectory; rows of states that were not reached hold anything."""

    sums: Tensor  # [S, R, H] the first layer before its rectifier
    hidden: Tensor  # [S, R, H] the second layer after it
    outs: Tensor  # [S, R, columns] the head, padded; of many outputs those of the moves
    numbers: Tensor  # [early steps, S, B] int32: which early state it was
    entries: Tensor | None  # [S, R] int32: the row of the look-up table, of the states after the early ones
    early: Early | None
    final: Tensor  # [S, B] the numbers of the last states, where numbers have 64 bits
    head: Tensor  # [S, inputs, outputs] the head's weights; of many outputs the kept ones, padded


class CudaTrace(Trace):
    """The activations of one walk."""

    def __init__(self, weights: FlatParameters, activations: Activations):
        super().__init__(weights, activations.final)
        self.activations = activations


class CudaTraces(Traces):
    """Each walk has activations of its own, of torch's allocator."""

    keyed = True


class Network(NamedTuple):
    """A policy as the kernels see it."""

    one: Any  # the hidden layers
    two: Any
    head: Any
    table: Tensor | None  # [S, rows, W], whose rows are inputs of the head beside the second layer
    features: int
    hidden: int
    outputs: int
    columns: int  # outputs that a walk keeps, padded: all of them, or of many those of the moves
    rows: int  # of the table
    width: int

    @property
    def small(self) -> bool:
        return self.outputs <= SMALL_HEAD


def network(policy: Policy) -> Network:
    """Of a policy that `why_not` accepts."""
    trunk: Any = policy.trunk
    (one, two), head = inner_mlp(trunk).layers, policy.head
    table = trunk.table.weight if type(trunk) is LookupTrunk else None
    _, features, hidden = one.weight.shape
    outputs, (_, rows, width) = head.weight.shape[2], (0, 0, 0) if table is None else table.shape
    columns = max(16, 1 << ((outputs if outputs <= SMALL_HEAD else policy.env.num_moves) - 1).bit_length())
    return Network(one, two, head, table, features, hidden, outputs, columns, rows, width)


def lowered(env: Env) -> Lowered:
    """Of an environment that `why_not` accepts."""
    world = lower(env)
    assert world is not None
    return world


def world_defines(world: Lowered) -> dict[str, int]:
    """The rules of a world for a kernel."""
    return {
        "APPEND": world.append, "D": world.columns, "SIZE": world.size, "LEAST": world.least, "STOP": world.stop,
        "M": world.moves, "T": world.horizon,
    }  # fmt: skip


def traced_rows(policy: Policy, steps: int, batch: int) -> int:
    """Rows of a trace of so many states per trajectory."""
    known = early(policy, steps, batch)
    return steps * batch if known is None else len(known.states) + (steps - known.steps) * batch


def why_not(task: Task, policy: Policy) -> str | None:
    """Which part of the environment, channel or network the kernel does not cover; None: it covers all."""
    world, channel = lower(task.env), task.channel
    if world is None:
        return f"cuda does not cover the environment {type(task.env).__name__}"
    if channel.begin(task.env.initial((1, 1))) is not None:
        return "cuda does not cover a channel with memory"
    if type(channel) not in (Exact, Slip):
        return f"cuda covers the channels Exact and Slip, not {type(channel).__name__}"
    if world.columns > MOST_COLUMNS:
        return f"cuda covers states of at most {MOST_COLUMNS} columns, not {world.columns}"
    return _why_not_network(world, policy)


def _why_not_network(world: Lowered, policy: Policy) -> str | None:
    mlp = inner_mlp(getattr(policy, "trunk", None))
    if type(policy) is not Policy or type(mlp) is not MLPTrunk or policy.encoder is not None:
        return "cuda covers networks of fully connected layers alone (mlp and lookup)"
    if len(mlp.layers) != 2:
        return f"cuda covers networks of two hidden layers, not {len(mlp.layers)}"
    if mlp.width not in WIDTHS:
        return f"cuda covers hidden layers of {words(WIDTHS)}, not {mlp.width}"
    net = network(policy)
    if net.head.weight.dtype != torch.float32:
        return f"cuda covers float32 weights, not {net.head.weight.dtype}"
    if net.table is not None and (not world.append or not net.small):
        return f"cuda covers a look-up table on strings with at most {SMALL_HEAD} outputs alone"
    if net.table is not None and net.width not in WIDTHS:
        return f"cuda covers look-up tables of width {words(WIDTHS)}, not {net.width}"
    if not net.small and not (world.append and world.moves <= MOST_MOVES):
        return f"cuda covers at most {MOST_MOVES if world.append else SMALL_HEAD} outputs, not {net.outputs}"
    if net.one.weight.data_ptr() % 16 or net.two.weight.data_ptr() % 16:
        return "cuda reads four weights at a time, and this policy's are not aligned"
    return None


def words(numbers: tuple[int, ...]) -> str:
    """As in "16, 32 or 64"."""
    return ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"


# launches -------------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """A launch: what the kernel is compiled for, blocks per seed, threads per block and bytes of shared memory."""

    defines: dict[str, int]
    blocks: int
    threads: int
    shared: int


def plans(request: Request) -> list[Plan] | str:
    """The launches of a walk, one or two; a reason where shared memory does not suffice."""
    task, policy, batch = request.task, request.policy, request.batch
    world, net, traced = lowered(task.env), network(policy), request.traces is not None
    steps = world.states_asked if traced else world.horizon  # a gradient needs the last state's backward policy
    known = early(policy, steps, batch)
    known_steps, known_states = (0, 0) if known is None else (known.steps, len(known.states))
    properties: Any = torch.cuda.get_device_properties(policy.device)
    limits = shared_memory(policy.device) // 4, properties.multi_processor_count
    threads = min(256, net.hidden * net.hidden // 4)
    units = min(4, net.hidden * net.hidden // threads // 4)
    common = world_defines(world) | {
        "H": net.hidden, "TRACE": traced, "OUT": net.outputs, "COLUMNS": net.columns, "W": net.width, "UNITS": units,
        "SLIPS": not task.channel.exact, "THREADS": threads, "FEATURES": net.features,
        "EARLY": known_steps, "EARLY_STATES": known_states, "EARLY_WIDTH": net.columns if traced else net.outputs,
        "SMALL_HEAD": net.small,
    }  # fmt: skip
    found = []
    for begin, end, through in ((0, known_steps, False), (known_steps, steps, True)):
        if begin < end:
            part = {"BEGIN": begin, "END": end, "NETWORK": through, "HANDS_ON": end < steps}
            plan = _plan(common | part, policy.num_seeds, batch, *limits)
            if plan.shared > 4 * limits[0]:
                return (
                    f"cuda needs {plan.shared} bytes of shared memory for the walk, and the device has {4 * limits[0]}"
                )
            found.append(plan)
    return found


def _plan(sizes: dict[str, int], seeds: int, batch: int, most: int, processors: int) -> Plan:
    """One launch, for a device with so many numbers of shared memory per block and so many multiprocessors."""
    through, small, kept, hidden = sizes["NETWORK"], sizes["SMALL_HEAD"], sizes["COLUMNS"], sizes["H"]
    threads, units, width = sizes["THREADS"], sizes["UNITS"], sizes["W"]
    fours = hidden * hidden // threads // units // 4
    rows = _rows(seeds * batch, threads) if through else threads // 32
    held = min(fours, (HELD if small else HELD_BESIDE)[rows])
    shared = rows * (2 * hidden + 16 + width + (5 if sizes["SLIPS"] else 3) * kept + sizes["D"] + 6) + kept
    shared += sizes["OUT"] * (hidden + width) if through and small else 0 if small else rows * 4 * threads
    placed = {}
    wanted = {"REST_SHARED": (fours - held) * 4 * threads * units, "FIRST_SHARED": sizes["FEATURES"] * hidden}
    for name, more in wanted.items():  # what does not fit is read from the cache at every step
        placed[name] = int(through and shared + more <= most)
        shared += more * placed[name]
    head_kept = 0
    if through and not small:
        head_kept = max(0, min(max(4, hidden * kept // threads // 4), (most - shared) // (16 * threads) * 4))
        shared += head_kept * 4 * threads
    groups = -(-batch // rows)
    together = 256 // hidden if through else 8  # blocks per multiprocessor
    resident = max(1, min(MOST_RESIDENT, together, -(-groups * seeds // processors)))
    defines = sizes | placed | {"HEAD_KEPT": head_kept, "RESIDENT": resident, "ROWS": rows, "HELD": held}
    return Plan(defines, _blocks(groups, seeds, together * processors), threads, 4 * shared)


def _rows(walks: int, threads: int) -> int:
    """Trajectories per block, a warp each: one, as long as there are multiprocessors for all."""
    return min(threads // 32, 1 if walks <= 132 else 2 if walks <= 264 else 4 if walks <= 1056 else MOST_ROWS)


def _blocks(groups: int, seeds: int, most: int) -> int:
    """Blocks that walk the groups of a seed, one after the other: as many as fit, and all about the same number."""
    return -(-groups // -(-groups * seeds // most))


def compile(request: Request) -> str | None:
    """Compile what a walk needs; a reason where it does not fit the device."""
    found = plans(request)
    if isinstance(found, str):
        return found
    for plan in found:
        _kernel(plan, request.policy.device)
    return None


def _kernel(plan: Plan, device: torch.device) -> Kernel:
    return kernel("walk.cu", "walk", plan.defines, plan.shared, device)


@torch.no_grad()
def walk(request: Request) -> Walk:
    """Trajectories and, where asked for, a new trace. Random numbers come from `request.key` [1] and `request.step`, or from
    one draw of torch's generator."""
    task, policy, batch = request.task, request.policy, request.batch
    world, net, device, seeds = lowered(task.env), network(policy), policy.device, policy.num_seeds
    found = plans(request)
    if isinstance(found, str):
        raise ValueError(found)
    states = torch.empty(world.horizon + 1, seeds, batch, world.columns, dtype=torch.long, device=device)
    actions, moves = torch.empty(2, world.horizon, seeds, batch, dtype=torch.long, device=device)
    alive = torch.empty(world.horizon, seeds, batch, dtype=torch.bool, device=device)
    made = _activations(request, net)
    kept, shared_states = made.sums.shape[1], found[0].defines["EARLY_STATES"]
    if request.traces is not None:
        known = made.outs
    else:
        few = early(policy, world.horizon, batch)
        known = net.one.bias if few is None else _outputs(policy, few)
    key = torch.randint(2**31 - 1, (1,), device=device) if request.key is None else request.key
    step = torch.zeros((), dtype=torch.float64, device=device) if request.step is None else request.step.double()
    explore, start, tau = _exploration(request.explore, step)
    arguments = [
        states, actions, moves, alive, made.sums, made.hidden, made.outs, made.numbers,
        made.numbers if made.entries is None else made.entries, made.final, net.one.weight, net.one.bias, net.two.weight,
        net.two.bias, made.head, net.head.bias, net.one.bias if net.table is None else net.table, known, key, step, explore,
        start, tau, float(getattr(task.channel, "alpha", 0.0)), seeds, batch, net.rows,
        shared_states if request.traces is None else kept, kept,
    ]  # fmt: skip
    for plan in found:
        _kernel(plan, device)((plan.blocks, seeds, 1), plan.threads, arguments)
    score, real = zeros((seeds, batch), device), always((seeds, batch), device)
    trace = None if request.traces is None else CudaTrace(request.traces.weights, made)
    return Walk(Trajectories(states, actions, moves, alive, score, real), trace)


def _exploration(explore: Explore, step: Tensor) -> tuple[Tensor, float, float]:
    """As the kernel reads it: start / (1 + number / tau), or with tau 0 the number itself."""
    if explore is None:
        return step, 0.0, 1.0
    if isinstance(explore, Fading):
        return explore.step.to(step), float(explore.start), float(explore.tau)
    return torch.as_tensor(explore, dtype=step.dtype, device=step.device), 0.0, 0.0


def _activations(request: Request, net: Network) -> Activations:
    """Memory for a trace, with the activations of the early states; without rows where no trace is asked for."""
    policy, batch, traced = request.policy, request.batch, request.traces is not None
    steps, seeds, device = lowered(request.task.env).states_asked, policy.num_seeds, policy.device
    few = early(policy, steps, batch) if traced else None
    rows = traced_rows(policy, steps, batch) if traced else 0
    sums, hidden = torch.empty(2, seeds, rows, net.hidden, device=device)
    outs = torch.empty(seeds, rows, net.columns, device=device)
    numbers = torch.empty(0 if few is None else few.steps, seeds, batch, dtype=torch.int32, device=device)
    entries = None if net.table is None else torch.empty(seeds, rows, dtype=torch.int32, device=device)
    final = torch.empty(seeds, batch, dtype=torch.long, device=device)
    if few is not None:
        _pass_early(policy, net, few, (sums, hidden, outs))
    head, pad = net.head.weight, net.columns - net.outputs
    if not net.small:
        head = torch.nn.functional.pad(head, (0, pad)) if pad > 0 else head[..., : net.columns].contiguous()
    return Activations(sums, hidden, outs, numbers, entries, few, final, head)


def _outputs(policy: Policy, few: Early) -> Tensor:
    """The head's outputs [S, n, ...] at the early states."""
    return policy.head(policy.trunk(few.states.expand(policy.num_seeds, -1, -1), None))


def _pass_early(policy: Policy, net: Network, few: Early, to: tuple[Tensor, Tensor, Tensor]) -> None:
    """The forward pass of the early states into the first rows of sums, hidden and outs."""
    count, kept = len(few.states), net.columns
    first, second, made = to[0][:, :count], to[1][:, :count], to[2][:, :count, : net.outputs]
    features = policy.env.features(few.states) if few.features is None else few.features
    torch.baddbmm(net.one.bias, features.expand(policy.num_seeds, -1, -1), net.one.weight, out=first)
    torch.baddbmm(net.two.bias, torch.relu(first), net.two.weight, out=second).relu_()
    torch.baddbmm(net.head.bias[..., :kept], second, net.head.weight[:, : net.hidden, :kept], out=made)
    if net.table is not None:  # an early state's number is its row
        made.baddbmm_(net.table[:, :count], net.head.weight[:, net.hidden :, :kept])
