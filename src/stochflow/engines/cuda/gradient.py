"""The gradient of trajectory and detailed balance in four kernels, from the activations of a traced walk.

    residuals         log-probabilities, residuals, gradients of every output of the network; which states were reached
    backward          through the head, then through the second layer: gradients of their inputs
    weight_gradients  sums over the states, and for large alphabets letter_gradients

There is no second forward pass, states that were never reached cost no time, and shared states are there once. The result is
that of `evaluate`, the objectives and autograd, which launch hundreds of small kernels. Products are three of TF32 on tensor
cores, nearly as exact as float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stochflow.engines.base import Job, Residuals, Rewards, Walk
from stochflow.engines.cuda.driver import Kernel, kernel, shared_memory
from stochflow.engines.cuda.early import early
from stochflow.engines.cuda.walk import (
    SMALL_HEAD,
    Activations,
    CudaTrace,
    Network,
    lowered,
    network,
    traced_rows,
    world_defines,
)
from stochflow.engines.flat import FlatParameters
from stochflow.engines.lower import Lowered
from stochflow.learn.objectives import JOINT, MARGINAL, DetailedBalance, TrajectoryBalance
from stochflow.nets.policy import Policy

# Sizes by trial on an H200.
MOST_STATES = 1 << 19  # of a batch, reached or not
MOST_BATCH = 8192
MOST_STEPS = 512  # a thread each
LEAST_WIDTH = 32
BLOCK, DEPTH = 64, 32  # inputs and outputs of a tile, and how much is multiplied at a time
STAGES = 3  # copies in flight;
MOST_STAGES = 9  # of small tiles: everything at once
MANY_BLOCKS = 160  # of `backward`; where there would be fewer, tiles are half as large, to fill the device
REACHED = 8  # about one of so many states is reached, where trajectories may end early,
LEAST_BLOCKS = 528  # and at least so many blocks are started
PROGRAMS, SHARE = 528, 32  # blocks of `weight_gradients`, all together, and states of one at least
FEW_STATES = 1536  # of a seed
MANY_FEATURES = 128  # of worlds that append: above, the letters of each trajectory are added one by one
TOGETHER = 64  # threads per block of `residuals`, where a trajectory needs fewer
MOST_WARPS = 16  # per trajectory, where a state takes a warp
STAGED = 4 * STAGES * 2 * DEPTH * (BLOCK + 8)  # bytes of shared memory of `weight_gradients`


class Sizes(NamedTuple):
    """What the kernels are compiled for and launched with."""

    policy: Policy
    net: Network
    world: Lowered
    batch: int
    noisy: bool
    detailed: bool

    @property
    def steps(self) -> int:
        return self.world.states_asked

    @property
    def rows(self) -> int:
        return traced_rows(self.policy, self.steps, self.batch)

    @property
    def listed(self) -> bool:
        """Whether the states that were reached must be listed; where every trajectory takes all steps, all are."""
        return not self.world.append or self.world.stop >= 0

    @property
    def by_letters(self) -> bool:
        return (
            self.world.append
            and self.net.features > MANY_FEATURES
            and early(self.policy, self.steps, self.batch) is None
        )

    def kernel(self, name: str, shared: int, defines: dict[str, int]) -> Kernel:
        return kernel(f"{name}.cu", name, defines | {"LISTED": self.listed}, shared, self.policy.device)


def sizes(job: Job) -> Sizes:
    """Of a job that `why_not` accepts."""
    net, world = network(job.policy), lowered(job.task.env)
    return Sizes(job.policy, net, world, job.batch, not job.dynamics.exact, type(job.objective) is DetailedBalance)


def why_not(job: Job) -> str | None:
    """Which part of a job that can be walked the kernels do not cover; None: all is covered, and compiled."""
    objective, policy, env = job.objective, job.policy, job.task.env
    if job.plain_source:
        return job.plain_source
    if type(objective) not in (TrajectoryBalance, DetailedBalance):
        return f"cuda covers trajectory and detailed balance, not {type(objective).__name__}"
    if objective.form not in (MARGINAL, JOINT):  # the two are equal
        return f"cuda covers the marginal form of a balance, and the joint one, which equals it, not the {objective.form.name} one"
    if policy.back_action:
        return "cuda does not cover a head for the action given the move"
    if job.dynamics.begin(env.initial((policy.num_seeds, 1)).to(policy.device)) is not None:
        return "cuda does not cover a model of the noise with memory"
    of = sizes(job)
    reason = _why_not_size(of)
    if reason is None:
        _compile(of)
    return reason


def _why_not_size(of: Sizes) -> str | None:
    net, world, seeds = of.net, of.world, of.policy.num_seeds
    if net.hidden < LEAST_WIDTH:
        return f"cuda takes gradients of hidden layers of {LEAST_WIDTH} or more, not {net.hidden}"
    if of.steps > MOST_STEPS:
        return f"cuda takes gradients of trajectories of at most {MOST_STEPS} states, not {of.steps}"
    if of.batch > MOST_BATCH:
        return f"cuda takes gradients of at most {MOST_BATCH} trajectories per seed, not {of.batch}"
    widest = seeds * max(net.hidden, net.width, net.columns, world.columns)  # positions are counted in 31 bits
    most = min(MOST_STATES, 2**30 // widest)
    if of.rows > most:
        return f"cuda takes gradients of at most {most} states per seed here, not {of.rows}"
    if (of.steps + 1) * of.batch > 2**30 // widest or seeds * net.rows > 2**30 // max(1, net.width):
        return "cuda counts positions in 31 bits, and this batch or look-up table has more"
    if of.detailed and sum(of.policy.sizes) > SMALL_HEAD:  # of many outputs a walk keeps those of the moves alone
        return f"cuda covers detailed balance with at most {SMALL_HEAD} outputs, not {sum(of.policy.sizes)}"
    needed, most = max(_backward_plan(of).staged, STAGED), shared_memory(of.policy.device)
    if needed > most:
        return f"cuda needs {needed} bytes of shared memory for the gradient, and the device has {most}"
    return None


def _compile(of: Sizes) -> None:
    _residuals_kernel(of)
    _backward_kernel(of, _backward_plan(of))
    _weight_kernel(of)
    if of.by_letters:
        _letter_kernel(of)


@torch.no_grad()
def gradient(job: Job, walk: Walk, rewards: Rewards, log_k: Tensor | None, note: bool) -> Residuals:
    """The gradient into `job.weights`; residuals, of which all but log Z are there whether or not they are noted."""
    if not isinstance(walk.trace, CudaTrace):
        raise TypeError("cuda takes gradients of walks that it has traced")
    walk.trace.use(job.weights)
    traj, made = walk.trajectories, walk.trace.activations
    of = sizes(job)._replace(noisy=log_k is not None, batch=traj.alive.shape[2])
    policy, seeds, device = of.policy, of.policy.num_seeds, of.policy.device
    shared_states = 0 if made.early is None else len(made.early.states)
    # where states are shared, gradients of their outputs are added up
    d_outs = torch.empty_like(made.outs) if made.early is None else torch.zeros_like(made.outs)
    d_hidden, d_sums = torch.empty(2, *made.sums.shape, device=device)
    losses, estimates, entropies, d_log_z = torch.empty(4, seeds, of.batch, device=device)
    reached = torch.empty(seeds, of.batch, dtype=torch.int32, device=device)
    listed = torch.empty(seeds, of.rows - shared_states if of.listed else 0, dtype=torch.int32, device=device)
    counts = torch.zeros(seeds, dtype=torch.int32, device=device) if of.listed else listed
    decisions = traj.alive.sum((0, 2)) if of.detailed and not of.world.free else counts
    log_rewards = rewards.log.float() if rewards.by_number else rewards.log.float().expand(seeds, of.batch)
    given, together, threads = _residuals_kernel(of)
    given(
        (-(-of.batch // together), seeds, 1),
        threads,
        [
            d_outs, losses, estimates, entropies, d_log_z, reached, listed, counts, made.outs, made.numbers, traj.states,
            traj.moves, traj.alive, made.outs if log_k is None else log_k.float().contiguous(), decisions,
            log_rewards.contiguous(), made.final, policy.log_z_unit, policy.LOG_Z_SCALE, int(rewards.by_number), seeds,
            of.batch, of.rows, shared_states,
        ],
    )  # fmt: skip
    found = Found(made, listed, counts, reached, d_outs, d_hidden, d_sums, d_log_z)
    _layers(of, found, walk, job.weights)
    log_flow = policy.log_z(None) if note else None
    if of.detailed and log_flow is not None:  # the first row is of the first state
        log_flow = log_flow + made.outs[:, 0, sum(policy.sizes[:2]) :][:, :1]
    return Residuals(losses, estimates, entropies, log_flow)


class Found(NamedTuple):
    """What the kernel of the residuals leaves to those of the layers."""

    made: Activations
    listed: Tensor  # [S, late rows] rows of the late states that were reached
    counts: Tensor  # [S] how many
    reached: Tensor  # [S, B] states of each trajectory
    d_outs: Tensor
    d_hidden: Tensor  # to be written
    d_sums: Tensor  # to be written
    d_log_z: Tensor  # [S, B]


def _layers(of: Sizes, found: Found, walk: Walk, flat: FlatParameters) -> None:
    """The backward pass through the layers, and the gradients of all weights."""
    made, net, policy, seeds = found.made, of.net, of.policy, of.policy.num_seeds
    early_steps, shared_states = (0, 0) if made.early is None else (made.early.steps, len(made.early.states))
    layers, d_table = _gradients(of, flat)
    weights, tiles, parts = _weight_kernel(of)
    if parts > 1 or of.by_letters or net.width:  # they are added up
        flat.grad.zero_()
    place = made.numbers if made.entries is None else made.entries
    plan = _backward_plan(of)
    backward = _backward_kernel(of, plan)
    for d_inputs, d_outputs, inputs, weight, width in (
        (found.d_hidden, found.d_outs, made.hidden, made.head, net.width),
        (found.d_sums, found.d_hidden, made.sums, net.two.weight, 0),
    ):
        backward(
            (plan.lines, -(-(net.hidden + width) // plan.tile), seeds),
            256 if plan.tile == BLOCK else 128,
            [
                d_inputs, d_table, d_outputs, inputs, weight, place, found.listed, found.counts, of.rows, shared_states,
                net.rows, width, weight.shape[2], d_outputs.shape[2],
            ],
        )  # fmt: skip
    states = walk.trajectories.states
    weights(
        (tiles, parts, seeds),
        128,
        [
            *layers, flat.gradients["log_z_unit"], states if made.early is None else made.early.states, states,
            found.listed, found.counts, made.sums, made.hidden, made.sums if net.table is None else net.table, place,
            found.d_outs, found.d_hidden, found.d_sums, found.d_log_z, policy.LOG_Z_SCALE, seeds, of.batch, of.rows,
            early_steps, shared_states, net.rows,
        ],
    )  # fmt: skip
    if of.by_letters:
        of_letters = [*layers[:2], states[-1], found.reached, found.d_sums, of.batch, of.rows]
        _letter_kernel(of)((min(of.batch, PROGRAMS), seeds, 1), net.hidden, of_letters)


def _gradients(of: Sizes, flat: FlatParameters) -> tuple[list[Tensor], Tensor]:
    """Of the layers, weight and bias each, and of the table (or any, where there is none)."""
    inner = "trunk" if of.net.table is None else "trunk.mlp"
    names = f"{inner}.layers.0", f"{inner}.layers.1", "head"
    layers = [flat.gradients[f"{name}.{kind}"] for name in names for kind in ("weight", "bias")]
    return layers, flat.gradients.get("trunk.table.weight", layers[0])


# kernels for a world and a network ------------------------------------------------------------------------------------


def _residuals_kernel(of: Sizes) -> tuple[Kernel, int, int]:
    """With it the trajectories and threads per block."""
    steps, policy = of.steps, of.policy
    few = early(policy, steps, of.batch)
    group = 1 if sum(policy.sizes) <= SMALL_HEAD else 32  # lanes per state
    if group > 1:
        lanes = 32 * min(MOST_WARPS, steps)
    else:
        lanes = 1 << (steps - 1).bit_length() if steps <= 32 else -(-steps // 32) * 32
    threads = max(TOGETHER, lanes)
    defines = world_defines(of.world) | {
        "N": steps, "COLUMNS": of.net.columns, "LEARNED": policy.sizes[1] > 0, "FLOW": sum(policy.sizes[:2]),
        "GROUP": group, "LANES": lanes, "THREADS": threads, "EARLY": 0 if few is None else few.steps,
        "NOISY": of.noisy, "DETAILED": of.detailed,
    }  # fmt: skip
    return of.kernel("residuals", 0, defines), threads // lanes, threads


class BackwardPlan(NamedTuple):
    tile: int  # states and inputs of a block
    stages: int
    lines: int  # blocks that share the states of a seed
    staged: int  # bytes of shared memory


def _backward_plan(of: Sizes) -> BackwardPlan:
    hidden, rows = of.net.hidden, of.rows
    some, across = (
        -(-rows // REACHED) if of.listed else rows,
        of.policy.num_seeds * -(-(hidden + of.net.width) // BLOCK),
    )
    if hidden >= BLOCK and -(-some // BLOCK) * across >= MANY_BLOCKS:
        tile, stages, staged = BLOCK, STAGES, 4 * STAGES * 2 * BLOCK * (DEPTH + 4)
    else:
        tile, stages, across = BLOCK // 2, min(MOST_STAGES, 1 + hidden // DEPTH), 2 * across
        staged = 4 * stages * 2 * tile * DEPTH
    lines = -(-rows // tile)
    if of.listed:  # a block without any state takes time to find out
        lines = min(lines, max(-(-some // tile), -(-LEAST_BLOCKS // across)))
    return BackwardPlan(tile, stages, lines, staged)


def _backward_kernel(of: Sizes, plan: BackwardPlan) -> Kernel:
    defines = {"H": of.net.hidden, "TILE": plan.tile, "DEPTH": DEPTH, "STAGES": plan.stages}
    return of.kernel("backward", plan.staged, defines)


def _weight_kernel(of: Sizes) -> tuple[Kernel, int, int]:
    """With it the tiles of a seed and the shares of its states."""
    net = of.net
    across = -(-net.hidden // BLOCK)
    tiles = across * across + (across + -(-net.width // BLOCK)) * -(-net.outputs // BLOCK)
    if not of.by_letters:
        tiles += across * -(-net.features // BLOCK)
    programs = (
        PROGRAMS if of.rows > FEW_STATES else PROGRAMS // 2
    )  # adding up the parts of a small sum takes longer than the sum
    parts = min(-(-of.rows // SHARE), max(1, programs // (tiles * of.policy.num_seeds)))
    defines = {
        "H": net.hidden, "OUT": net.outputs, "COLUMNS": net.columns, "W": net.width, "FEATURES": net.features,
        "D": of.world.columns, "SIZE": of.world.size, "TILE": BLOCK, "DEPTH": DEPTH, "STAGES": STAGES,
    }  # fmt: skip
    return of.kernel("weight_gradients", STAGED, defines), tiles, parts


def _letter_kernel(of: Sizes) -> Kernel:
    sizes = {"H": of.net.hidden, "FEATURES": of.net.features, "D": of.world.columns, "SIZE": of.world.size}
    return of.kernel("letter_gradients", 0, sizes)
