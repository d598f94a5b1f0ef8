"""A learned model of the noise (`dynamics.Neural`) in two GPU kernels (noise.cu): what it says of the moves of a batch, and the gradient of its loss.

The same as `Neural.arrivals` and as `Neural.loss` by autograd, which cost dozens of kernels of a microsecond each; tests hold one to the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stochflow.engines.cuda import driver as cuda_source
from stochflow.noise.dynamics import Neural, trainable_steps
from stochflow.ops import always
from stochflow.types import Trajectories
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

MOST_MOVES, WIDTHS = 5, (16, 32, 64)  # what a lane can hold in registers
WARPS = 4  # a block; of the gradient fewer where each warp's sums have no room
RESIDENT = 4  # blocks a multiprocessor for which registers are saved,
BLOCKS = {"arrivals": 6, "learn": 4}  # and for which there is work
LENGTH, FEW = 8, 256  # steps that a warp takes at a time, half as many of few trajectories


def fits(dynamics: Any) -> bool:
    """Whether these kernels know this model and its world, and can be had."""
    if type(dynamics) is not Neural or not dynamics.head.weight.is_cuda:
        return False
    env: Any = dynamics.env
    return (
        type(env) in (Grid, Strings)
        and env.contexts is None
        and len(dynamics.layers) == 1
        and dynamics.head.weight.dtype == torch.float32
        and dynamics.head.weight.shape[1] in WIDTHS
        and env.num_moves <= MOST_MOVES
        and all(_kernel(dynamics, name) is not None for name in BLOCKS)
    )


def arrivals(dynamics: Any, weights: dict[str, Tensor], traj: Trajectories) -> Tensor:
    """`Neural.arrivals` with these weights, at all steps of a batch: [T, S, B, M], anything where no decision was taken, or the decision was to stop."""
    made = torch.empty(*traj.moves.shape, dynamics.env.num_moves, device=traj.moves.device)
    _launch(dynamics, "arrivals", traj, [made, *_layers(weights), traj.states, traj.moves, traj.alive])
    return made


def differentiate(dynamics: Any, traj: Trajectories, flat: Any) -> Tensor:
    """The gradient of each seed's `Neural.loss` into the `flat` parameters; the loss [S]."""
    with torch.no_grad():
        device = traj.moves.device
        every = dynamics.env.free and traj.real.data_ptr() == always((), device).data_ptr()  # step teaches something
        counts = traj.moves if every else trainable_steps(dynamics.env, traj).sum((0, 2))
        flat.values.grad.zero_()
        losses = torch.zeros(traj.moves.shape[1], device=device)
        steps = [x.contiguous() for x in (traj.states, traj.actions, traj.moves, traj.alive)]
        real = traj.alive if every else traj.real.contiguous()
        _launch(
            dynamics,
            "learn",
            traj,
            [*_layers(flat.slopes), losses, *_layers(flat.named), *steps, real, counts, int(every)],
        )
    return losses


def _launch(dynamics: Any, kernel: str, traj: Trajectories, given: list[Any]) -> None:
    made, warps, shared, most = _kernel(dynamics, kernel)
    steps, seeds, batch = traj.moves.shape
    piece = LENGTH if seeds * batch > FEW else LENGTH // 2
    blocks = min(-(-batch * -(-steps // piece) // warps), max(1, most // seeds))
    with torch.cuda.device(traj.moves.device):
        made((blocks, seeds, 1), (32 * warps, 1, 1), [*given, seeds, batch, piece], shared)


def _kernel(dynamics: Any, kernel: str) -> Any:
    """A kernel, its warps a block, its shared memory and how many blocks are at home at once; None where it cannot be had."""
    env: Any = dynamics.env
    _, features, hidden = dynamics.layers[0].weight.shape
    moves, string = env.num_moves, isinstance(env, Strings)
    device = dynamics.head.weight.device
    properties: Any = torch.cuda.get_device_properties(device)
    most = getattr(properties, "shared_memory_per_block_optin", 0) // 4
    rows = features * hidden
    warps = min(WARPS, most // rows - 1) if kernel == "learn" else WARPS
    shared = (1 + warps) * rows if kernel == "learn" else rows
    shared = max(shared, hidden * (moves * moves | 1))  # where the head is added up
    if warps < 1 or shared > most:
        return None
    defines = {
        "H": hidden, "T": env.horizon, "STRING": string, "D": env.state_dim, "SIZE": env.tokens if string else env.side, "FEATURES": features, "M": moves,
        "STOP": -1 if env.stop is None else env.stop, "WARPS": warps, "RESIDENT": RESIDENT,
    }  # fmt: skip
    settings = tuple((name, int(value)) for name, value in defines.items())
    with torch.cuda.device(device):
        chip = torch.cuda.get_device_capability(device)
        made = cuda_source.compiled(("common.cuh", "noise.cu"), kernel, settings, 4 * shared, chip, device.index)
    return None if made is None else (made, warps, 4 * shared, BLOCKS[kernel] * properties.multi_processor_count)


def _layers(named: dict[str, Tensor]) -> list[Tensor]:
    return [named[name] for name in ("layers.0.weight", "layers.0.bias", "head.weight", "head.bias")]
