"""The gradient of trajectory or detailed balance from a traced walk: each distinct state of a seed goes back through the network once.

The same as `evaluate`, the objective and autograd, without autograd.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.engines.base import Job, Residuals, Rewards, Walk
from stochflow.engines.flat import FlatParameters
from stochflow.engines.numba.jit import FAR, Share, call, each_part, floats, in_parts, loop, part
from stochflow.engines.numba.products import add, column_sums, outer, product, transpose
from stochflow.engines.numba.rules import feature, legal
from stochflow.engines.numba.walk import NumbaTrace, Paths, Workspace
from stochflow.learn.objectives import DetailedBalance, Objective

SHARED_PRODUCTS = 1 << 23  # multiplications of one seed that are worth a thread


class Balance(NamedTuple):
    """The objective and what it takes from elsewhere."""

    detailed: bool  # detailed balance; else trajectory balance
    by_number: bool  # rewards of all states; else of the batch
    scale: float  # of log Z
    log_k: np.ndarray  # [T, S, B, M] log P(realised move | action); without entries: what is intended happens
    log_reward: np.ndarray  # [N] or [S * B]
    log_z: np.ndarray  # [S, 1]
    log_z_gradient: np.ndarray  # [S, 1]


class Found(NamedTuple):
    """What is found on the way to a gradient."""

    logits: np.ndarray  # [S, R, M (+ M)] of actions (and moves back), relative to the largest legal one
    weights: np.ndarray  # [S, R, M (+ M)] their exponentials
    forward: np.ndarray  # [S, T] of a trajectory: log p(move), policy and noise together
    backward: np.ndarray  # [S, T+1] log P_B of the move that led there
    posterior: np.ndarray  # [S, T, M] the probability of the action, given the move
    normaliser: np.ndarray  # [S, R, 2] the gradient with respect to a row's log-normalisers, forward and backward
    gradient: np.ndarray  # [S, R, O] with respect to each output
    loss: np.ndarray  # [S, B]
    estimate: np.ndarray  # [S, B] of log Z
    entropy: np.ndarray  # [S, B] of the policy, summed over the steps


@part
def _exp(x):
    """Of x <= 0, to a relative error of 1e-7: 2^n e^r, |r| < log 2 / 2. A call of the library's would not be vectorised."""
    n = np.floor(x * np.float32(1.442695041) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1)
    power = np.int32((np.int32(max(n, np.float32(-126))) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0) if x < np.float32(-87) else y * power


@part
def _normalise(seed, count, world, begin, place, outs, logits, weights):
    """Each row's masked logits relative to the largest, and their exponentials; what is not legal is far below."""
    far, rules, moves, t = np.float32(FAR), world.rules, world.rules.moves, 0
    for r in range(count):
        while r >= begin[seed, t + 1]:
            t += 1
        line = logits[r]
        for m in range(len(line)):
            line[m] = outs[seed, r, m]
        if rules.stop >= 0 and not legal(rules, t, 0, rules.stop):
            line[rules.stop] = far
        if world.backward:
            line[moves + rules.stop] = far
        for axis in range(place.shape[2]):
            if not legal(rules, t, place[seed, r, axis], axis):
                line[axis] = far
            if world.backward and place[seed, r, axis] == 0 and r > 0:
                line[moves + axis] = far
        for half in range(2 if world.backward else 1):
            top = np.float32(-np.inf)
            for m in range(half * moves, (half + 1) * moves):
                top = max(top, line[m])
            for m in range(half * moves, (half + 1) * moves):
                line[m] -= top
        for m in range(len(line)):
            weights[r, m] = _exp(line[m])


@loop
def residuals(share, world, begin, place, outs, paths, balance, found):
    """The residuals of some seeds, and the gradient with respect to log Z and to the network's outputs."""
    _, _, moved, alive, row, final = paths
    detailed, by_number, scale, log_k, log_rewards, log_z, z_gradients = balance
    all_logits, all_weights, log_forward, log_back, posterior, normaliser, gradient, losses, estimates, entropies = (
        found
    )
    steps, batch, axes, moves, stop = alive.shape[0], row.shape[2], place.shape[2], world.rules.moves, world.rules.stop
    learned, flow = world.backward, world.flow
    for seed in range(share.first, share.last):
        logits, weights = all_logits[seed], all_weights[seed]
        count, decided, z_gradient = begin[seed, world.asked], 0, 0.0
        z = float(log_z[seed, 0] * np.float32(scale))
        _normalise(seed, count, world, begin, place, outs, logits, weights)
        for r in range(count):
            normaliser[seed, r, 0] = normaliser[seed, r, 1] = 0
            for m in range(gradient.shape[2]):
                gradient[seed, r, m] = 0
        for t in range(steps):
            for b in range(batch):
                decided += alive[t, seed, b]
        weight = 2 / max(decided, 1) if detailed else 2 / batch
        for b in range(batch):
            log_reward = log_rewards[final[seed, b] if by_number else seed * batch + b]
            estimate, entropy = float(log_reward), 0.0
            for t in range(world.asked):
                r = row[t, seed, b]
                if r < 0:
                    break
                if t > 0 and axes > 0:
                    total = 0.0
                    for axis in range(axes):
                        total += weights[r, moves + axis] if learned else min(place[seed, r, axis], 1)
                    log_back[seed, t] = -math.log(total)
                    if learned:
                        log_back[seed, t] += logits[r, moves + moved[t - 1, seed, b]]
                    estimate += log_back[seed, t]
                if t == steps or not alive[t, seed, b]:
                    break
                move, total, mean, top = moved[t, seed, b], 0.0, 0.0, -np.inf
                for m in range(moves):
                    total += weights[r, m]
                    mean += weights[r, m] * logits[r, m]
                entropy += math.log(total) - mean / total
                log_forward[seed, t] = logits[r, move] - math.log(total)
                if log_k.size > 0 and move != stop:  # STOP is exact: no other action leads there
                    for m in range(moves):
                        if m != stop and logits[r, m] > FAR / 2:
                            top = max(top, float(logits[r, m] + log_k[t, seed, b, m]))
                    some = 0.0
                    for m in range(moves):
                        posterior[seed, t, m] = 0
                        if m != stop and logits[r, m] > FAR / 2:
                            posterior[seed, t, m] = math.exp(logits[r, m] + log_k[t, seed, b, m] - top)
                        some += posterior[seed, t, m]
                    for m in range(moves):
                        posterior[seed, t, m] /= some
                    log_forward[seed, t] = top + math.log(some) - math.log(total)
                estimate -= log_forward[seed, t]
            residual, loss = z - estimate, 0.0
            # the gradient with respect to each log p(move), and its negative with respect to log P_B of the state it led to
            for t in range(steps):
                if not alive[t, seed, b]:
                    break
                r, after, move = row[t, seed, b], row[t + 1, seed, b], moved[t, seed, b]
                if detailed:  # log-flow + log p - log P_B - the next log-flow, which at the end is the reward
                    on = t + 1 < steps and alive[t + 1, seed, b]
                    residual = z + outs[seed, r, flow] + log_forward[seed, t]
                    residual -= z + outs[seed, after, flow] if on else log_reward
                    if after >= 0 and axes > 0:
                        residual -= log_back[seed, t + 1]
                    loss += residual**2 * weight * batch / 2
                    gradient[seed, r, flow] += weight * residual
                    if on:
                        gradient[seed, after, flow] -= weight * residual
                    else:
                        z_gradient += weight * residual  # log-flows are relative to log Z, which cancels between two
                slope = np.float32(weight * residual)
                normaliser[seed, r, 0] += slope
                if log_k.size == 0 or move == stop:
                    gradient[seed, r, move] += slope
                else:
                    for m in range(moves):
                        gradient[seed, r, m] += slope * posterior[seed, t, m]
                if learned and after >= 0:
                    normaliser[seed, after, 1] -= slope
                    gradient[seed, after, moves + move] -= slope
            if not detailed:
                loss = residual**2
                z_gradient += weight * residual
            losses[seed, b], estimates[seed, b], entropies[seed, b] = loss, estimate, entropy
        z_gradients[seed, 0] = z_gradient * scale
        for r in range(count):  # through the log-normalisers to the logits
            for half in range(2 if learned else 1):
                total_weight = np.float32(0)
                for m in range(half * moves, (half + 1) * moves):
                    total_weight += weights[r, m]
                for m in range(half * moves, (half + 1) * moves):
                    gradient[seed, r, m] -= normaliser[seed, r, half] * weights[r, m] / total_weight


@loop
def backward(share, few, count, stages, inputs, gradient, input_gradients):
    """The gradient with respect to the inputs of each stage [S, R, width], from that with respect to the outputs; parts of the rows."""
    head, as_it_is = len(stages) - 2, np.float32(-np.inf)
    for seed in range(share.first, share.last):
        a, b = count[seed] * share.part // share.parts, count[seed] * (share.part + 1) // share.parts
        for i in range(head + 1 if inputs[head + 1].shape[2] > 0 else head, -1, -1):
            x, weights, to = inputs[i][seed], stages[i][seed], input_gradients[i][seed]
            of = gradient[seed] if i >= head else input_gradients[i + 1][seed]
            for r in range(a, b):
                for j in range(to.shape[1]):
                    to[r, j] = 0
            across = weights if i >= head and few else transpose(weights, weights.shape[0], a - a, weights.shape[1])
            product(of, across, to, a, b, as_it_is)
            for r in range(a, b if i <= head else a):
                for j in range(to.shape[1]):
                    to[r, j] = to[r, j] if x[r, j] > 0 else np.float32(0)


@loop
def weight_gradients(share, few, count, inputs, gradient, input_gradients, stages, biases):
    """The gradients of the stages' weights and of all biases, the first layer's included; parts of the weights' rows."""
    head = len(stages) - 2
    for seed in range(share.first, share.last):
        many = count[seed]
        for i in range(head + 2):
            into = biases[i][seed, 0]
            a, b = len(into) * share.part // share.parts, len(into) * (share.part + 1) // share.parts
            column_sums(gradient[seed] if i > head else input_gradients[i][seed], many, into, a, b)
        for i in range(head + 2 if inputs[head + 1].shape[2] > 0 else head + 1):
            x, out = inputs[i][seed], stages[i][seed]
            of = gradient[seed] if i >= head else input_gradients[i + 1][seed]
            a, b = len(out) * share.part // share.parts, len(out) * (share.part + 1) // share.parts
            low = np.float32(0) if i <= head else np.float32(-np.inf)
            for k in range(a, b):
                for j in range(out.shape[1]):
                    out[k, j] = 0
            if i >= head and few:
                outer(of, x, out, many, a, b, low)
            else:
                product(transpose(x, many, a, b), of[:many], out[a:b], a - a, b - a, low)


class Inner(NamedTuple):
    """The first layer's and the table's side of the gradient."""

    number: np.ndarray  # these four as in `Rows`
    parent: np.ndarray
    feature: np.ndarray
    place: np.ndarray
    sums: np.ndarray  # [S, R, H] the gradient with respect to the first layer before its ReLU,
    known: np.ndarray  # [S, R, W] and to the rows of the table
    first: np.ndarray  # [S, F, H] the gradients to be found: of the first layer's weights,
    table: np.ndarray  # [S, rows, W] and of the table


@loop
def feature_gradients(share, rules, count, inner):
    """The gradients of the first layer's weights and of the table. A sequence has its parent's features and one more, so a row's
    gradient is added to its parent's."""
    for seed in range(share.first, share.last):
        sums, out = inner.sums[seed], inner.first[seed]
        for array in (inner.first, inner.table):
            for i in range(array.shape[1]):
                for j in range(array.shape[2]):
                    array[seed, i, j] = 0
        for r in range(count[seed] - 1, -1, -1):
            for axis in range(inner.place.shape[2]):
                add(sums[r], out[feature(rules, axis, inner.place[seed, r, axis])])
            if rules.append and r > 0:
                add(sums[r], out[inner.feature[seed, r]])
                add(sums[r], sums[inner.parent[seed, r]])
            for j in range(inner.table.shape[2]):
                inner.table[seed, min(inner.number[seed, r], inner.table.shape[1] - 1), j] += inner.known[seed, r, j]


class Buffers:
    """The arrays of one gradient after the other, of a workspace and the parameters into which it goes."""

    def __init__(self, space: Workspace, flat: FlatParameters):
        self.flat, self.found, self.count = flat, _found(space), np.zeros(space.shape[0], dtype=np.int64)
        self.residuals = Residuals(torch.from_numpy(self.found.loss), torch.from_numpy(self.found.estimate))
        of, net, rows = {name: x.numpy() for name, x in flat.gradients.items()}, space.net, space.rows
        prefix = "trunk.mlp.layers" if "trunk.table.weight" in of else "trunk.layers"
        (first, *weights), biases = (
            [of[f"{prefix}.{i}.{kind}"] for i in range(len(net.stages) - 1)] for kind in ("weight", "bias")
        )
        self.log_z, self.log_z_gradient = flat.named["log_z_unit"].detach().numpy(), of["log_z_unit"]
        *heads, bias = [floats(*x.shape) for x in (*net.stages[-2:], net.biases[-1])]
        self.head = of["head.weight"], of["head.bias"]
        self.copies = space.head_parts([*self.head], [*heads, bias])
        self.inputs = tuple(floats(*x.shape) for x in rows.inputs)
        self.stages, self.biases = (*weights, *heads), (*biases, bias)
        table = of.get("trunk.table.weight", net.table)
        self.inner = Inner(
            rows.number, rows.parent, rows.feature, rows.place, self.inputs[0], self.inputs[-1], first, table
        )


class Arguments(NamedTuple):
    """The arguments of the loops of a gradient, but for the seeds."""

    residuals: tuple[Any, ...]
    backward: tuple[Any, ...]
    weights: tuple[Any, ...]
    features: tuple[Any, ...]


def arguments(space: Workspace, paths: Paths, balance: Balance) -> Arguments:
    """For a walk in this workspace; before they are used, `space.found.count` holds the rows of each seed."""
    world, rows, buffers = space.world, space.rows, space.found
    few, count, of = world.few, buffers.count, buffers.found.gradient
    return Arguments(
        (world, rows.begin, rows.place, rows.outs, paths, balance, buffers.found),
        (few, count, space.net.stages, rows.inputs, of, buffers.inputs),
        (few, count, rows.inputs, of, buffers.inputs, buffers.stages, buffers.biases),
        (world.rules, count, buffers.inner),
    )


def balance_of(
    objective: Objective,
    space: Workspace,
    log_reward: np.ndarray,
    by_number: bool,
    log_k: np.ndarray | None,
    flat: FlatParameters,
) -> Balance:
    """The objective as loops read it; the workspace has buffers for these parameters from then on."""
    if space.found is None or space.found.flat is not flat:
        space.found = Buffers(space, flat)
    buffers, given = space.found, _EXACT if log_k is None else log_k
    detailed, scale = isinstance(objective, DetailedBalance), float(space.policy.LOG_Z_SCALE)
    return Balance(detailed, by_number, scale, given, log_reward, buffers.log_z, buffers.log_z_gradient)


def gradient(job: Job, walk: Walk, rewards: Rewards, log_k: Tensor | None, note: bool) -> Residuals:
    """`Engine.gradient`, from a walk with a trace."""
    if not isinstance(walk.trace, NumbaTrace):
        raise TypeError("numba takes gradients of walks that it has traced")
    walk.trace.use(job.weights)
    space, paths = walk.trace.space, walk.trace.paths
    world, rows, seeds = space.world, space.rows, space.shape[0]
    log_reward = rewards.log.numpy() if rewards.by_number else _full(rewards.log, space.shape).reshape(-1)
    arrivals = None if log_k is None else _full(log_k, (*paths.moves.shape, world.rules.moves))
    balance = balance_of(job.objective, space, log_reward, rewards.by_number, arrivals, job.weights)
    given, buffers = arguments(space, paths, balance), space.found
    np.copyto(buffers.count, rows.begin[:, world.asked])
    parts = shared(space)

    def work(s: int, e: int) -> None:
        call(residuals, Share(s, e), *given.residuals)
        for step, of in ((backward, given.backward), (weight_gradients, given.weights)):
            if parts > 1:
                each_part(lambda i: call(step, Share(0, 1, i, parts), *of), parts)  # noqa: B023 - done before the next step
            else:
                call(step, Share(s, e), *of)
        call(feature_gradients, Share(s, e), *given.features)

    in_parts(work, seeds)
    for own, copy in buffers.copies:
        np.copyto(own, copy)
    if not note:
        return buffers.residuals
    flow = buffers.log_z * job.policy.LOG_Z_SCALE
    if balance.detailed:
        flow = flow + rows.outs[:, :1, world.flow]
    return buffers.residuals._replace(entropy=torch.from_numpy(buffers.found.entropy), log_flow=torch.from_numpy(flow))


def shared(space: Workspace) -> int:
    """Threads that share the backward pass of one seed; 1: each seed has its own."""
    if space.shape[0] > 1 or space.found is None:
        return 1
    return max(1, min(torch.get_num_threads(), int(space.found.count[0]) * space.size // SHARED_PRODUCTS))


_EXACT = np.empty((0, 0, 0, 0), dtype=np.float32)


def _full(x: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """With all entries in memory: a broadcast answer has fewer."""
    found = x.numpy()
    return np.ascontiguousarray(found if found.shape == shape else np.broadcast_to(found, shape))


def _found(space: Workspace) -> Found:
    (seeds, rows, outs), steps, batch = space.rows.outs.shape, space.world.rules.horizon, space.batch
    moves, halves = space.world.rules.moves, 2 if space.world.backward else 1
    both = np.empty((2, seeds, rows, moves * halves), dtype=np.float32)
    posterior, normaliser = (np.empty((seeds, *x), dtype=np.float32) for x in ((steps, moves), (rows, 2)))
    figures = np.empty((3, seeds, batch), dtype=np.float32)
    forward, backward = np.empty((seeds, steps)), np.empty((seeds, steps + 1))
    made: Any = (*both, forward, backward, posterior, normaliser, floats(seeds, rows, outs), *figures)
    return Found(*made)
