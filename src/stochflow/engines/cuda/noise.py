"""A learned model of the noise (`Neural`) in two kernels (noise.cu): log-probabilities of a batch's moves, and the gradient of
its loss. The results are those of `Neural.arrivals` and of `Neural.loss` by autograd, which launch dozens of small kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stochflow.engines.cuda.driver import Kernel, kernel, shared_memory
from stochflow.engines.cuda.walk import lowered, words, world_defines
from stochflow.engines.flat import FlatParameters
from stochflow.engines.lower import lower
from stochflow.noise.dynamics import Dynamics, Neural, trainable_steps
from stochflow.ops import always
from stochflow.types import Trajectories

MOST_MOVES, WIDTHS = 5, (16, 32, 64)  # what a lane can hold in registers
WARPS = 4  # per block; fewer in the gradient where each warp's sums do not fit
RESIDENT = 4  # blocks per multiprocessor for which registers are saved,
BLOCKS = {"arrivals": 6, "learn": 4}  # and for which there is work
LENGTH, FEW = 8, 256  # steps of a piece, half as many of few trajectories


def why_not(dynamics: Dynamics) -> str | None:
    """Which part of the model or its world the kernels do not cover; None: all is covered, and compiled."""
    if type(dynamics) is not Neural:
        return f"cuda covers the noise model Neural, not {type(dynamics).__name__}"
    world, weight = lower(dynamics.env), dynamics.head.get_parameter("weight")
    if world is None:
        return f"cuda does not cover the environment {type(dynamics.env).__name__}"
    if len(dynamics.layers) != 1:
        return f"cuda covers noise models of one hidden layer, not {len(dynamics.layers)}"
    if weight.shape[1] not in WIDTHS:
        return f"cuda covers noise models of {words(WIDTHS)} hidden units, not {weight.shape[1]}"
    if weight.dtype != torch.float32:
        return f"cuda covers float32 weights, not {weight.dtype}"
    if world.moves > MOST_MOVES:
        return f"cuda covers noise models of at most {MOST_MOVES} moves, not {world.moves}"
    most = shared_memory(weight.device)
    for name in BLOCKS:
        plan = _plan(dynamics, name)
        if plan.warps < 1 or plan.shared > most:
            return f"cuda has {most} bytes of shared memory per block, too few for this noise model's first layer"
        _kernel(dynamics, plan)
    return None


@torch.no_grad()
def arrivals(dynamics: Dynamics, weights: dict[str, Tensor], traj: Trajectories) -> Tensor:
    """log P(the realised move | each action) with these weights [T, S, B, M]; anything where no move was made."""
    made = torch.empty(*traj.moves.shape, dynamics.env.num_moves, device=traj.moves.device)
    steps = [x.contiguous() for x in (traj.states, traj.moves, traj.alive)]
    _launch(dynamics, "arrivals", traj, [made, *_layers(weights), *steps])
    return made


@torch.no_grad()
def learn(dynamics: Dynamics, flat: FlatParameters, traj: Trajectories) -> Tensor:
    """The gradient of each seed's `Neural.loss` into the flat parameters; the loss [S]."""
    device = traj.moves.device
    every = dynamics.env.free and traj.real.data_ptr() == always((), device).data_ptr()  # all steps train
    counts = traj.moves if every else trainable_steps(dynamics.env, traj).sum((0, 2))
    flat.grad.zero_()
    losses = torch.zeros(traj.moves.shape[1], device=device)
    steps = [x.contiguous() for x in (traj.states, traj.actions, traj.moves, traj.alive)]
    real = steps[-1] if every else traj.real.contiguous()
    given = [*_layers(flat.gradients), losses, *_layers(flat.named), *steps, real, counts.contiguous(), int(every)]
    _launch(dynamics, "learn", traj, given)
    return losses


class Plan(NamedTuple):
    """A kernel's warps per block, bytes of shared memory and most blocks at once."""

    name: str
    warps: int
    shared: int
    most: int


def _plan(dynamics: Dynamics, name: str) -> Plan:
    device = dynamics.get_parameter("head.weight").device
    properties: Any = torch.cuda.get_device_properties(device)
    _, features, hidden = dynamics.get_parameter("layers.0.weight").shape
    rows, most = features * hidden, shared_memory(device) // 4
    warps = min(WARPS, most // rows - 1) if name == "learn" else WARPS
    shared = (1 + warps) * rows if name == "learn" else rows
    shared = max(shared, hidden * (dynamics.env.num_moves**2 | 1))  # where the head is added up
    return Plan(name, warps, 4 * shared, BLOCKS[name] * properties.multi_processor_count)


def _kernel(dynamics: Dynamics, plan: Plan) -> Kernel:
    _, features, hidden = dynamics.get_parameter("layers.0.weight").shape
    own = {"H": hidden, "FEATURES": features, "WARPS": plan.warps, "RESIDENT": RESIDENT}
    defines = world_defines(lowered(dynamics.env)) | own
    return kernel("noise.cu", plan.name, defines, plan.shared, dynamics.get_parameter("head.weight").device)


def _launch(dynamics: Dynamics, name: str, traj: Trajectories, given: list[Any]) -> None:
    plan = _plan(dynamics, name)
    steps, seeds, batch = traj.moves.shape
    piece = LENGTH if seeds * batch > FEW else LENGTH // 2
    blocks = min(-(-batch * -(-steps // piece) // plan.warps), max(1, plan.most // seeds))
    _kernel(dynamics, plan)((blocks, seeds, 1), 32 * plan.warps, [*given, seeds, batch, piece])


def _layers(named: dict[str, Any]) -> list[Tensor]:
    return [named[name] for name in ("layers.0.weight", "layers.0.bias", "head.weight", "head.bias")]
