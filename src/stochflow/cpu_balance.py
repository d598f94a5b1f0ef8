"""The gradient of trajectory balance for a small batch on the CPU, from what a rollout kept of the network (`cpu_walk.Trace`).

The counterpart of balance_kernel: the network is not asked again, and of each trajectory only the states that it reached are looked at. The same
as `evaluate`, `TrajectoryBalance` and autograd, whose operators take longer than their sums at this size; a test holds one to the other.
Only one seed is served by default: seeds go one after the other here, because what one has reached must not touch another's rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stochflow import cpu_walk
from stochflow.cpu_walk import Trace
from stochflow.envs.strings import Strings
from stochflow.nets import _MLPTrunk
from stochflow.objectives import MARGINAL, Objective, TrajectoryBalance
from stochflow.ops import NEG
from stochflow.types import Task, Trajectories

MANY_FEATURES = 512  # beyond, flags are looked up and not multiplied


def plain(task: Task, policy: Any, dynamics: Any, objective: Objective) -> bool:
    """Trajectory balance of an MLP in a world without noise, of which a gradient without autograd is written here and in balance_kernel."""
    return (
        type(objective) is TrajectoryBalance
        and objective.form is MARGINAL
        and type(getattr(policy, "trunk", None)) is _MLPTrunk
        and not policy.back_action
        and task.channel.exact
        and dynamics.exact
    )


def fits(task: Task, policy: Any, dynamics: Any, objective: Objective, batch: int) -> bool:
    """Whether this is its gradient. Of several seeds, an iteration must have as many operators as of one, which this has not."""
    return policy.num_seeds == 1 and plain(task, policy, dynamics, objective) and cpu_walk.fits(task, policy, batch)


@torch.no_grad()
def gradient(
    task: Task, policy: Any, traj: Trajectories, trace: Trace, log_reward: Tensor, flat: Any, note: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of each seed's loss into the policy's `flat` parameters; of each trajectory the residual and, to be noted, the entropy
    of its policy, summed over its steps [S, B]."""
    steps, seeds, batch = trace.known.shape
    states, moves = traj.states.numpy(), traj.moves.numpy()
    alive = np.zeros((steps, seeds, batch), dtype=bool)
    alive[: len(traj.alive)] = traj.alive.numpy()[:steps]
    log_z = (policy.LOG_Z_SCALE * policy.log_z_unit).numpy()
    residuals, entropies = np.empty((2, seeds, batch))
    for s in range(seeds):
        t, b = np.nonzero(trace.known[:, s])
        here = states[t, s, b]
        row, outs = _rows(trace, s, t, b)
        mask = _legal(task.env, t, here)
        slope, residual = _residuals(task.env, policy, t, b, here, outs, mask, alive[t, s, b], moves[:, s])
        residuals[s] = residual + log_z[s] - log_reward[s].numpy()
        if note:
            entropies[s] = np.bincount(b, weights=_entropy(outs[:, : task.env.num_moves], mask) * alive[t, s, b], minlength=batch)
        slope *= (2 / batch * residuals[s])[b, None].astype(np.float32)
        late = t >= len(trace.numbers)
        layers = [x[t[late] - len(trace.numbers), s, b[late]] for x in trace.layers]
        if trace.early is not None:
            shared = np.zeros((len(trace.early.states) + int(late.sum()), slope.shape[1]), dtype=np.float32)
            np.add.at(shared, row, slope)
            slope = shared
            layers = [
                np.concatenate([x[s], y]) for x, y in zip(trace.early_layers, layers or [x[s, :0] for x in trace.early_layers], strict=True)
            ]
            here = np.concatenate([trace.early.states.numpy(), here[late]])
        when = (t, b) if trace.early is None else None
        _layers(task.env, policy, s, here, when, layers, torch.from_numpy(slope), flat.slopes)
        flat.slopes["log_z_unit"][s] = 2 * policy.LOG_Z_SCALE / batch * float(residuals[s].sum())
    return torch.from_numpy(residuals).to(log_reward), torch.from_numpy(entropies).to(log_reward) if note else None


def _rows(trace: Trace, s: int, t: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which row each state that was reached has, early ones first, and the head's outputs there."""
    if trace.early is None or trace.early_outs is None:
        return np.arange(len(t)), trace.outs[t, s, b]
    late = t >= len(trace.numbers)
    row, outs = np.empty(len(t), dtype=np.int64), np.empty((len(t), trace.early_outs.shape[2]), dtype=np.float32)
    row[~late] = trace.numbers[t[~late], s, b[~late]]
    row[late] = len(trace.early.states) + np.arange(int(late.sum()))
    outs[~late] = trace.early_outs[s, row[~late]]
    outs[late] = trace.outs[t[late] - len(trace.numbers), s, b[late]]
    return row, outs


def _legal(env: Any, t: np.ndarray, here: np.ndarray) -> np.ndarray:
    """[N, M]: what may be done in a state that was reached at step t."""
    mask = np.ones((len(t), env.num_moves), dtype=bool)
    if not isinstance(env, Strings):
        mask[:, : env.state_dim] = here < env.side - 1
    elif env.stop is not None:
        mask[:, env.stop] = t >= env.min_length
    return mask


def _residuals(
    env: Any,
    policy: Any,
    t: np.ndarray,
    b: np.ndarray,
    here: np.ndarray,
    outs: np.ndarray,
    mask: np.ndarray,
    alive: np.ndarray,
    moves: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """What a residual of 1 says to each output, and each trajectory's log p(moves) - log P_B(moves)."""
    batch, many, wide = moves.shape[1], env.num_moves, env.state_dim
    chosen = np.where(alive, moves[np.minimum(t, len(moves) - 1), b], 0)
    log_p, slope = _pick(outs[:, :many], mask, chosen, alive)
    total = np.bincount(b, weights=log_p, minlength=batch)
    whole = np.zeros_like(outs)
    whole[:, :many] = slope
    if not env.tree:
        came = t > 0  # where a state was reached, a real move led there
        by = np.where(came, moves[np.maximum(t - 1, 0), b], 0)
        learned = policy.sizes[1] > 0
        back = outs[:, many : many + wide] if learned else np.zeros((len(t), wide), dtype=np.float32)
        log_b, slope = _pick(back, (here > 0) | ~came[:, None], by, came)
        total -= np.bincount(b, weights=log_b, minlength=batch)
        if learned:
            whole[:, many : many + wide] -= slope
    return whole, total


def _entropy(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[N] of the law over the allowed entries."""
    x, e, total = _exponentials(logits, mask)
    return np.asarray(np.log(total) - (e * x).sum(1) / total)


def _exponentials(logits: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits above the largest allowed one, their exponentials [N, M] and the sums of those [N]."""
    x = np.where(mask, logits, np.float32(NEG))
    x = x - x.max(1, keepdims=True)
    e = np.exp(x)
    return x, e, e.sum(1)


def _pick(logits: np.ndarray, mask: np.ndarray, index: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The log-probability of an entry among the allowed ones, and its slope; 0 elsewhere."""
    x, e, total = _exponentials(logits, mask)
    rows = np.arange(len(x))
    log_p = np.where(where, x[rows, index] - np.log(total), 0)
    slope = e / -total[:, None]
    slope[rows, index] += 1
    slope[~where] = 0
    return log_p, slope


def _layers(
    env: Any,
    policy: Any,
    s: int,
    here: np.ndarray,
    when: tuple[np.ndarray, np.ndarray] | None,
    outputs: list[np.ndarray],
    slope: Tensor,
    into: dict[str, Tensor],
) -> None:
    """Back through the head and the layers, and the sums over states that their weights get; `when` = step and trajectory of each state."""
    layers = [(f"trunk.layers.{i}", layer) for i, layer in enumerate(policy.trunk.layers)]
    inputs = [torch.from_numpy(x) for x in outputs]
    for name, layer in reversed([*layers[1:], ("head", policy.head)]):
        x = inputs.pop()
        torch.mm(x.T, slope, out=into[f"{name}.weight"][s])
        torch.sum(slope, 0, out=into[f"{name}.bias"][s, 0])
        slope = torch.mm(slope, layer.weight[s].T).mul_(x > 0)
    weight, states = into["trunk.layers.0.weight"][s], torch.from_numpy(here)
    torch.sum(slope, 0, out=into["trunk.layers.0.bias"][s, 0])
    if isinstance(env, Strings) and len(weight) > MANY_FEATURES:
        weight.zero_().index_add_(0, *_letters(env, here, when, slope.numpy()))
    else:
        torch.mm(env.features(states).T, slope, out=weight)


def _letters(env: Any, here: np.ndarray, when: tuple[np.ndarray, np.ndarray] | None, slope: np.ndarray) -> tuple[Tensor, Tensor]:
    """Features that are on and what is said to each, [n] and [n, H]."""
    if when is None:  # states that trajectories share: each says its word to all its letters
        row, place = np.nonzero(here != env.pad)
        return torch.from_numpy(place * env.tokens + here[row, place]), torch.from_numpy(slope[row])
    t, b = when  # a letter is on from the step after its own on: it is given all that its trajectory says from there on
    said = np.zeros((int(t.max()) + 1, int(b.max()) + 1, slope.shape[1]), dtype=slope.dtype)
    said[t, b] = slope
    for at in range(len(said) - 2, -1, -1):  # numpy's own sum along the first axis takes ten times as long
        said[at] += said[at + 1]
    (late,) = np.nonzero(t > 0)
    t, b = t[late], b[late]
    return torch.from_numpy((t - 1) * env.tokens + here[late, t - 1]), torch.from_numpy(said[t, b])
