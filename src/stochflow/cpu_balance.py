"""The gradient of trajectory or detailed balance for a small batch on the CPU, from what a rollout kept of the network (`cpu_walk.Trace`).

The counterpart of balance_kernel: the network is not asked again, and of each trajectory only the states that it reached are looked at. The same
as `evaluate`, the objective and autograd, whose operators take longer than their sums at this size; a test holds one to the other.
Of one seed, each distinct state goes back through the network once. Of several, no shape of a product may depend on what was reached: it would
carry one seed's rounding into another. They are served where that is known before anyone walks (`fits`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow import cpu_walk
from stochflow.cpu_walk import Trace
from stochflow.envs.grid import Grid
from stochflow.envs.strings import Strings
from stochflow.nets import _LookupTrunk, _MLPTrunk
from stochflow.objectives import MARGINAL, DetailedBalance, Objective, TrajectoryBalance
from stochflow.ops import NEG
from stochflow.types import Judged, Task, Trajectories

FEW_OUTPUTS = 16  # below, a product and its transpose are faster than the product with few columns
MANY_FEATURES = 512  # beyond, flags are looked up and not multiplied


def plain(task: Task, policy: Any, dynamics: Any, objective: Objective) -> bool:
    """The balances and networks of which a gradient without autograd is written here and in balance_kernel; the noise may be any without a past."""
    return (
        type(objective) in (TrajectoryBalance, DetailedBalance)
        and objective.form is MARGINAL
        and type(task.env) in (Grid, Strings)
        and type(getattr(policy, "trunk", None)) in (_MLPTrunk, _LookupTrunk)
        and not policy.back_action
        and dynamics.begin(task.env.initial((policy.num_seeds, 1)).to(policy.device)) is None
    )


def fits(task: Task, policy: Any, dynamics: Any, objective: Objective, batch: int) -> bool:
    """Whether this is its gradient. Of several seeds, where all states are early, or all trajectories of one length."""
    if not plain(task, policy, dynamics, objective) or not cpu_walk.fits(task, policy, batch):
        return False
    return policy.num_seeds == 1 or task.env.free or cpu_walk.all_early(policy, batch)


@torch.no_grad()
@np.errstate(all="ignore")  # a run that diverges says so in its figures
def gradient(
    task: Task,
    policy: Any,
    objective: Objective,
    traj: Trajectories,
    trace: Trace,
    log_reward: Tensor,
    log_k: Tensor | None,
    flat: Any,
    note: bool,
) -> Judged:
    """The gradient of each seed's loss into the policy's `flat` parameters, and what was found on the way.

    `log_k` [T, S, B, M] = log P(the realised move | each action); None: what is meant happens.
    """
    env, paid, z = task.env, log_reward.numpy(), policy.log_z(None).numpy()
    seeds, batch = paid.shape
    walked = _walked(traj, trace)
    at = walked.at
    outs = _kept(trace, -1, at)
    logits, mask = outs[:, : env.num_moves], _legal(env, at)
    log_p, to_forward = _forward(env, walked, logits, mask, None if log_k is None else log_k.numpy())
    log_b, to_back = _backward(env, policy, walked, outs)
    made = walked.by_step(log_p)[:-1] - walked.by_step(log_b)[1:]  # [T, S, B] log p(move) - log P_B
    estimate = paid - made.sum(0)
    slope = np.zeros_like(outs)
    if isinstance(objective, DetailedBalance):
        flows = z + walked.by_step(outs[:, -1])
        said, loss = _each_step(walked.on, made, flows, paid)
        onward, hither = said[at.t + 1, at.s, at.b], said[at.t, at.s, at.b]
        slope[:, -1] = (onward - hither) * walked.alive
        to_z = np.bincount(at.s, slope[:, -1], seeds)  # every flow stands on log Z
        log_flow = flows[0, :, :1]
    else:
        residual = z - estimate
        loss = residual**2
        onward = hither = (2 / batch * residual).astype(np.float32)[at.s, at.b]
        to_z = 2 / batch * residual.sum(1)
        log_flow = z.copy()
    slope[:, : env.num_moves] = to_forward * onward[:, None]
    if to_back is not None:
        slope[:, env.num_moves : env.num_moves + env.state_dim] = to_back * -hither[:, None]
    _layers(env, policy, trace, at, slope, flat.slopes)
    flat.slopes["log_z_unit"].copy_(torch.from_numpy(policy.LOG_Z_SCALE * to_z[:, None]))
    entropy = walked.by_step(_entropy(logits, mask) * walked.alive).sum(0) if note else None
    found = [torch.from_numpy(x).to(log_reward) for x in (loss, estimate, log_flow)]
    return Judged(found[0], found[1], None if entropy is None else torch.from_numpy(entropy).to(log_reward), found[2])


class _States(NamedTuple):
    """N states that trajectories reached, seed by seed and step by step."""

    s: np.ndarray  # of this seed
    t: np.ndarray  # at this step
    b: np.ndarray  # by this trajectory
    state: np.ndarray  # [N, D]
    number: np.ndarray


class _Walked(NamedTuple):
    """What came of these states."""

    at: _States
    alive: np.ndarray  # [N] whether a decision was taken there
    move: np.ndarray  # [N] and what came of it; anything where none was
    on: np.ndarray  # [T, S, B] the first again, by step
    moves: np.ndarray  # [T, S, B]

    def by_step(self, x: np.ndarray) -> np.ndarray:
        """[N] as [T+1, S, B], zero where nothing was reached."""
        whole = np.zeros((len(self.on) + 1, *self.on.shape[1:]))
        whole[self.at.t, self.at.s, self.at.b] = x
        return whole


def _walked(traj: Trajectories, trace: Trace) -> _Walked:
    s, t, b = np.nonzero(trace.known.transpose(1, 0, 2))
    at = _States(s, t, b, traj.states.numpy()[t, s, b], trace.numbers[t, s, b])
    on, moves = traj.alive.numpy(), traj.moves.numpy()
    now = np.minimum(t, len(on) - 1)
    return _Walked(at, on[now, s, b] & (t < len(on)), moves[now, s, b], on, moves)


def _kept(trace: Trace, layer: int, at: _States) -> np.ndarray:
    """What a layer made of each state [N, ...]: the walk kept it by number of early ones, of later ones by step and trajectory."""
    s, t, b, _, number = at
    if trace.early is None:
        return trace.made[layer][t, s, b]
    late = t >= trace.early.steps
    if not late.any():
        return trace.early_made[layer][s, number]
    whole = np.empty((len(t), trace.made[layer].shape[3]), dtype=np.float32)
    whole[~late] = trace.early_made[layer][s[~late], number[~late]]
    whole[late] = trace.made[layer][t[late] - trace.early.steps, s[late], b[late]]
    return whole


def _legal(env: Any, at: _States) -> np.ndarray:
    """[N, M]: what may be done."""
    mask = np.ones((len(at.t), env.num_moves), dtype=bool)
    if not isinstance(env, Strings):
        mask[:, : env.state_dim] = at.state < env.side - 1
    elif env.stop is not None:
        mask[:, env.stop] = at.t >= env.min_length
    return mask


def _forward(env: Any, walked: _Walked, logits: np.ndarray, mask: np.ndarray, log_k: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """log p(move) [N] of policy and noise together, and its slope [N, M]; 0 where no decision was taken."""
    if log_k is None:
        return _pick(logits, mask, walked.move, walked.alive)
    at = walked.at
    k = log_k[np.minimum(at.t, len(log_k) - 1), at.s, at.b]
    if env.stop is not None:  # it is exact: nothing else leads there, and it leads nowhere else
        stops = walked.move == env.stop
        k[:, env.stop] = NEG
        k[stops] = NEG
        k[stops, env.stop] = 0
    x, e, total = _exponentials(logits, mask)
    x = np.where(mask, x + k, np.float32(2 * NEG))  # what a channel says of actions that nobody may take is anything
    top = x.max(1, keepdims=True)
    led = np.exp(x - top)
    some = led.sum(1)
    log_p = np.where(walked.alive, top[:, 0] + np.log(some) - np.log(total), 0)
    slope = led / some[:, None] - e / total[:, None]
    slope[~walked.alive] = 0
    return log_p, slope


def _backward(env: Any, policy: Any, walked: _Walked, outs: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """log P_B of the move that led to each state [N], and its slope with respect to the outputs for the way back, where there are any."""
    if env.tree:
        return np.zeros(len(outs)), None
    learned, many, wide = policy.sizes[1] > 0, env.num_moves, env.state_dim
    logits = outs[:, many : many + wide] if learned else np.zeros((len(outs), wide), dtype=np.float32)
    at = walked.at
    came = at.t > 0  # where a state was reached, a real move led there
    by = np.where(came, walked.moves[at.t - 1, at.s, at.b], 0)
    log_b, slope = _pick(logits, (at.state > 0) | ~came[:, None], by, came)
    return log_b, slope if learned else None


def _each_step(on: np.ndarray, made: np.ndarray, flow: np.ndarray, paid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Detailed balance: what the loss says to log p - log P_B of each step [T+2, S, B], and each trajectory's part of the loss [S, B].

    Entry t+1 is of step t, which leads from state t to state t+1; before the first and after the last one nothing is said.
    """
    steps, seeds, batch = made.shape
    count = np.maximum(on.sum((0, 2)), 1)[:, None]
    flow = np.concatenate([np.where(on, flow[:-1], paid), paid[None]])  # from the end on, the reward stands in for it
    residual = np.where(on, flow[:-1] + made - flow[1:], 0)
    said = np.zeros((steps + 2, seeds, batch), dtype=np.float32)
    said[1:-1] = 2 / count * residual
    return said, (residual**2).sum(0) * (batch / count)


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


class _Rows(NamedTuple):
    """What goes back through the network: R states of each seed."""

    said: np.ndarray  # [S, R, outputs] what the loss says to each output
    state: np.ndarray  # [S, R, D]
    number: np.ndarray  # [S, R]
    made: list[np.ndarray]  # [S, R, H] each layer's outputs


def _distinct(trace: Trace, at: _States, slope: np.ndarray) -> _Rows:
    """Of one seed: each state once, whoever met it; what its visitors say is added up."""
    order = at.number.argsort(kind="stable")
    ordered = at.number[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    (starts,) = np.nonzero(new)
    return _own(trace, _States(*[x[order[starts]] for x in at]), np.add.reduceat(slope[order], starts))


def _own(trace: Trace, at: _States, slope: np.ndarray) -> _Rows:
    """Of one seed: the states as they are."""
    made = [_kept(trace, layer, at)[None] for layer in range(len(trace.made or trace.early_made) - 1)]
    return _Rows(slope[None], at.state[None], at.number[None], made)


def _foreseen(trace: Trace, at: _States, slope: np.ndarray) -> _Rows:
    """Of several seeds: all early states, met or not, and then each state for itself, of which every seed has as many."""
    seeds = trace.known.shape[1]

    def each(x: np.ndarray) -> np.ndarray:
        return x.reshape(seeds, -1, *x.shape[1:])

    def turned(x: np.ndarray) -> np.ndarray:  # [n, S, B, H]
        return x.swapaxes(0, 1).reshape(seeds, -1, x.shape[3])

    if trace.early is None:
        return _Rows(each(slope), each(at.state), each(at.number), [turned(x) for x in trace.made[:-1]])
    late, states = at.t >= trace.early.steps, trace.early.states.numpy()
    said = np.zeros((seeds, len(states), slope.shape[1]), dtype=np.float32)
    np.add.at(said, (at.s[~late], at.number[~late]), slope[~late])
    rows = _Rows(said, np.stack([states] * seeds), np.stack([np.arange(len(states))] * seeds), trace.early_made[:-1])
    if not late.any():
        return rows
    return _Rows(
        np.concatenate([rows.said, each(slope[late])], 1),
        np.concatenate([rows.state, each(at.state[late])], 1),
        np.concatenate([rows.number, each(at.number[late])], 1),
        [np.concatenate([x, turned(y)], 1) for x, y in zip(rows.made, trace.made[:-1], strict=True)],
    )


def _layers(env: Any, policy: Any, trace: Trace, at: _States, slope: np.ndarray, into: dict[str, Tensor]) -> None:
    """Back through the head and the layers, and the sums over states that their weights get; `slope` [N, outputs] = what is said to each output."""
    trunk, head, lookup = policy.trunk, policy.head.weight, isinstance(policy.trunk, _LookupTrunk)
    mlp, prefix = (trunk.mlp, "trunk.mlp.layers") if lookup else (trunk, "trunk.layers")
    first = into[f"{prefix}.0.weight"]
    by_letter = isinstance(env, Strings) and first.shape[1] > MANY_FEATURES
    shared = trunk.numbered and not (by_letter and trace.early is None)
    rows = (_foreseen if policy.num_seeds > 1 else _distinct if shared else _own)(trace, at, slope)
    said, made = torch.from_numpy(rows.said), [torch.from_numpy(x) for x in rows.made]
    if lookup:  # the head reads the layers first, then the state's row of the table
        table = trunk.table.weight
        row = torch.from_numpy(np.minimum(rows.number, table.shape[1] - 1) + np.arange(len(table))[:, None] * table.shape[1]).flatten()
        _add_up(table.flatten(0, 1)[row].view(*said.shape[:2], -1), said, into["head.weight"][:, mlp.width :])
        into["trunk.table.weight"].flatten(0, 1).zero_().index_add_(0, row, torch.bmm(said, head[:, mlp.width :].mT).flatten(0, 1))
    torch.sum(said, 1, keepdim=True, out=into["head.bias"])
    _add_up(made[-1], said, into["head.weight"][:, : mlp.width])
    said = _through(said, head[:, : mlp.width], made[-1])
    for i in range(len(made) - 1, 0, -1):
        torch.sum(said, 1, keepdim=True, out=into[f"{prefix}.{i}.bias"])
        _add_up(made[i - 1], said, into[f"{prefix}.{i}.weight"])
        said = _through(said, mlp.layers[i].weight, made[i - 1])
    torch.sum(said, 1, keepdim=True, out=into[f"{prefix}.0.bias"])
    if by_letter:
        letters = _letters(env, rows, said.numpy()) if shared else _own_letters(env, at, said.numpy())
        first.flatten(0, 1).zero_().index_add_(0, *letters)
    else:
        _add_up(env.features(torch.from_numpy(rows.state)), said, first)


def _add_up(x: Tensor, said: Tensor, into: Tensor) -> None:
    """What the weights between x [S, R, inputs] and what is said [S, R, outputs] get from all states together."""
    if said.shape[2] < FEW_OUTPUTS:
        into.copy_(torch.bmm(said.mT, x).mT)
    else:
        torch.bmm(x.mT, said, out=into)


def _through(said: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """Back through weights and the rectifier that made x."""
    return torch.ops.aten.threshold_backward(torch.bmm(said, weight.mT), x, 0)


def _letters(env: Any, rows: _Rows, said: np.ndarray) -> tuple[Tensor, Tensor]:
    """Features that are on, those of a seed after those of the one before, and what is said to each, [n] and [n, H]: a state says its word to all
    its letters."""
    s, row, place = np.nonzero(rows.state != env.pad)
    feature = (s * env.length + place) * env.tokens + rows.state[s, row, place]
    return torch.from_numpy(feature), torch.from_numpy(said[s, row])


def _own_letters(env: Any, at: _States, said: np.ndarray) -> tuple[Tensor, Tensor]:
    """The same where trajectories share no state: a letter is on from the step after its own on, so it is given all that its trajectory
    says from there on, once."""
    s, t, b = at.s, at.t, at.b
    sums = np.zeros((int(t.max()) + 1, int(s.max()) + 1, int(b.max()) + 1, said.shape[2]), dtype=said.dtype)
    sums[t, s, b] = said.reshape(-1, said.shape[2])
    for step in range(len(sums) - 2, -1, -1):  # numpy's own sum along the first axis takes ten times as long
        sums[step] += sums[step + 1]
    (late,) = np.nonzero(t > 0)
    s, t, b = s[late], t[late], b[late]
    feature = (s * env.length + t - 1) * env.tokens + at.state[late, t - 1]
    return torch.from_numpy(feature), torch.from_numpy(sums[t, s, b])
