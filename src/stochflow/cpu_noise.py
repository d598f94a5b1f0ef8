"""A learned model of the noise (`dynamics.Neural`) on the CPU: each distinct state of a batch once, and its gradient without autograd.

The counterpart of noise_kernel, with the same two functions, and the same as `Neural.arrivals` and as `Neural.loss` by autograd; a test holds one to
the other. For one seed: how many distinct states one has must not touch, through the rounding of a larger product, the figures of another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.dynamics import Neural, trainable_steps
from stochflow.nets import numbers
from stochflow.ops import masked_log_softmax
from stochflow.types import Trajectories

MOST_MOVES = 16  # beyond, most pairs of action and move never occur in a state, and autograd, which looks at those that do, is the faster


def fits(dynamics: Any) -> bool:
    """Whether this knows the model and its world."""
    if type(dynamics) is not Neural:
        return False
    weight: Any = dynamics.head.weight
    known = weight.device.type == "cpu" and weight.dtype == torch.float32 and len(weight) == 1
    return known and dynamics.env.num_moves <= MOST_MOVES and numbers(dynamics.env)


class _Asked(NamedTuple):
    """What the model says of R distinct states."""

    which: np.ndarray  # [T * B] of them each step began in
    inputs: list[Tensor]  # of each layer and of the head [R, ...]
    table: Tensor  # [R, M actions, M moves] log-probabilities


class _Distinct(NamedTuple):
    """The R distinct states of a batch."""

    states: Tensor  # the batch's
    which: np.ndarray  # [T * B] of them each step began in
    legal: Tensor  # [R, M] what may happen there
    features: Tensor  # [R, F]


def _distinct(dynamics: Any, states: Tensor) -> _Distinct:
    """One batch is asked about and then learned from: the model remembers the last."""
    last, env = getattr(dynamics, "_last_distinct", None), dynamics.env
    if last is None or last.states is not states:
        here = states[:-1, 0].flatten(0, 1)
        _, first, which = np.unique(env.index(here).numpy(), return_index=True, return_inverse=True)
        distinct = here[torch.from_numpy(first)]
        last = dynamics._last_distinct = _Distinct(states, which, env.real_moves(env.moves(distinct)), env.features(distinct))
    return last


def _ask(dynamics: Any, weights: dict[str, Tensor], traj: Trajectories) -> _Asked:
    env = dynamics.env
    _, which, legal, features = _distinct(dynamics, traj.states)
    inputs = [features]
    for i in range(len(dynamics.layers)):
        inputs.append(torch.addmm(weights[f"layers.{i}.bias"][0], inputs[-1], weights[f"layers.{i}.weight"][0]).relu_())
    logits = torch.addmm(weights["head.bias"][0], inputs[-1], weights["head.weight"][0]).unflatten(1, (env.num_moves, -1))
    return _Asked(which, inputs, masked_log_softmax(logits, legal.unsqueeze(1).expand_as(logits)))


@torch.no_grad()
def arrivals(dynamics: Any, weights: dict[str, Tensor], traj: Trajectories) -> Tensor:
    """`Neural.arrivals` with these weights, at all steps of a batch: [T, S, B, M]."""
    asked = _ask(dynamics, weights, traj)
    found = asked.table.numpy()[asked.which, :, traj.moves.flatten().numpy()]
    return torch.from_numpy(found).view(*traj.moves.shape, -1)


@torch.no_grad()
def differentiate(dynamics: Any, traj: Trajectories, flat: Any) -> Tensor:
    """The gradient of `Neural.loss` into the `flat` parameters; the loss [S]."""
    asked, moves = _ask(dynamics, flat.named, traj), dynamics.env.num_moves
    teaches = trainable_steps(dynamics.env, traj).flatten().numpy()
    pair = traj.actions.flatten().numpy()[teaches] * moves + traj.moves.flatten().numpy()[teaches]
    happened = np.bincount(asked.which[teaches] * moves**2 + pair, minlength=asked.table.numel())
    counts = torch.from_numpy(happened.astype(np.float32)).view_as(asked.table)  # of each action and move in each state
    share = 1 / max(len(pair), 1)
    said = ((asked.table.exp() * counts.sum(2, keepdim=True) - counts) * share).flatten(1)
    names = ["head", *[f"layers.{i}" for i in reversed(range(len(dynamics.layers)))]]
    for name, x in zip(names, reversed(asked.inputs), strict=True):
        torch.mm(x.T, said, out=flat.slopes[f"{name}.weight"][0])
        torch.sum(said, 0, out=flat.slopes[f"{name}.bias"][0, 0])
        if name != "layers.0":
            said = torch.ops.aten.threshold_backward(torch.mm(said, flat.named[f"{name}.weight"][0].T), x, 0)
    return (counts * asked.table).sum().mul(-share).view(1)
