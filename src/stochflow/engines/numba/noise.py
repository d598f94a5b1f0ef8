"""A learned model of the noise (`dynamics.Neural`): each distinct state of a batch is computed once, and its gradient without autograd."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.engines.flat import FlatParameters
from stochflow.engines.lower import Lowered, lower
from stochflow.engines.numba.jit import FAR, Share, call, floats, in_parts, loop
from stochflow.engines.numba.products import add, column_sums, dots, outer, product, transpose
from stochflow.engines.numba.rules import feature, filled, legal, slot
from stochflow.noise.dynamics import Dynamics, trainable_steps
from stochflow.types import Trajectories


class Model(NamedTuple):
    """A classifier of moves with one hidden layer, or its gradient; each array [S, ...]."""

    first: np.ndarray  # [S, F, H]
    first_bias: np.ndarray  # [S, 1, H]
    head: np.ndarray  # [S, H, M * M]
    head_bias: np.ndarray  # [S, 1, M * M]


class Noise(NamedTuple):
    """The model at the distinct states of a batch, R at most per seed."""

    slots: np.ndarray  # [S, 2^n] the hash table
    number: np.ndarray  # [S, R] of the state
    row: np.ndarray  # [T, S, B] of the state before each step; -1: no move was made, or STOP
    seen: np.ndarray  # [S, R, 2] the step and the trajectory that met it first
    hidden: np.ndarray  # [S, R, H] before the ReLU
    table: np.ndarray  # [S, R, M * M] log P(move | action), action by action
    rows: np.ndarray  # [S] how many


class Batch(NamedTuple):
    """Trajectories as in `types`."""

    states: np.ndarray
    actions: np.ndarray
    moves: np.ndarray
    alive: np.ndarray


@loop
def noise_forward(share, rules, batch, model, noise, out):
    """The forward pass of some seeds; into `out` [T, S, B, M], unless it has no entries, log P(realised move | action)."""
    states, moved, alive, moves, stop = batch.states, batch.moves, batch.alive, rules.moves, rules.stop
    slots, number, row, table, hidden = noise.slots, noise.number, noise.row, noise.table, noise.hidden
    width = model.head.shape[1]
    for seed in range(share.first, share.last):
        new = 0
        for i in range(slots.shape[1]):
            slots[seed, i] = -1
        for t in range(moved.shape[0]):
            for b in range(moved.shape[2]):
                row[t, seed, b] = -1
                if not alive[t, seed, b] or moved[t, seed, b] == stop:
                    continue
                name = t if rules.append else 0  # sequences of other lengths are other states
                for column in range(filled(rules, t)):
                    name = name * rules.size + states[t, seed, b, column]
                at = slot(name, slots.shape[1])
                while slots[seed, at] >= 0 and number[seed, slots[seed, at]] != name:
                    at = (at + 1) & (slots.shape[1] - 1)
                if slots[seed, at] < 0:
                    slots[seed, at], number[seed, new] = new, name
                    noise.seen[seed, new, 0], noise.seen[seed, new, 1] = t, b
                    new += 1
                row[t, seed, b] = slots[seed, at]
        noise.rows[seed] = new
        for r in range(new):
            t, b = noise.seen[seed, r, 0], noise.seen[seed, r, 1]
            for m in range(table.shape[2]):
                table[seed, r, m] = model.head_bias[seed, 0, m]
            for j in range(width):
                hidden[seed, r, j] = model.first_bias[seed, 0, j]
            for column in range(filled(rules, t)):
                add(model.first[seed, feature(rules, column, states[t, seed, b, column])], hidden[seed, r])
        head = transpose(model.head[seed], width, new - new, table.shape[2])
        dots(hidden[seed], head, table[seed], new - new, new, np.float32(0))
        for r in range(new):
            t, b = noise.seen[seed, r, 0], noise.seen[seed, r, 1]
            for action in range(moves):
                line = table[seed, r, action * moves : (action + 1) * moves]
                top, total = np.float32(-np.inf), 0.0
                for m in range(moves):
                    if m != stop and legal(rules, t, 0 if rules.append else states[t, seed, b, m], m):
                        top = max(top, line[m])
                    else:
                        line[m] = FAR
                for m in range(moves):
                    total += math.exp(line[m] - top)
                for m in range(moves):
                    line[m] = max(line[m] - top - np.float32(math.log(total)), np.float32(FAR))
        for t in range(out.shape[0]):
            for b in range(moved.shape[2]):
                r = row[t, seed, b]
                for action in range(moves if r >= 0 else 0):
                    out[t, seed, b, action] = table[seed, r, action * moves + moved[t, seed, b]]


@loop
def noise_gradient(share, rules, batch, learns, model, noise, gradient, losses):
    """After a forward pass: the gradient of the mean of -log P(move | action) over the steps that it `learns` from [T, S, B], and
    that mean [S]."""
    states, moved, moves, width = batch.states, batch.moves, rules.moves, model.head.shape[1]
    for seed in range(share.first, share.last):
        count, steps, loss = noise.rows[seed], 0, 0.0
        slope = np.zeros((count, moves * moves), dtype=np.float32)
        often = np.zeros((count, moves), dtype=np.float32)
        for i in range(gradient.first.shape[1]):
            for j in range(width):
                gradient.first[seed, i, j] = 0
        for t in range(moved.shape[0]):
            for b in range(moved.shape[2]):
                r, action, move = noise.row[t, seed, b], batch.actions[t, seed, b], moved[t, seed, b]
                if learns[t, seed, b] and r >= 0:
                    steps += 1
                    often[r, action] += 1
                    slope[r, action * moves + move] -= 1
                    loss -= noise.table[seed, r, action * moves + move]
        weight = np.float32(1 / max(steps, 1))
        losses[seed] = loss / max(steps, 1)
        for r in range(count):
            for action in range(moves):
                for m in range(moves if often[r, action] > 0 else 0):
                    expected = often[r, action] * math.exp(noise.table[seed, r, action * moves + m])
                    slope[r, action * moves + m] = (slope[r, action * moves + m] + expected) * weight
        hidden, none = noise.hidden[seed], count - count
        head = transpose(model.head[seed], width, none, moves * moves)
        head_gradient = np.zeros(head.shape, dtype=np.float32)
        hidden_gradient = np.zeros((count, width), dtype=np.float32)
        outer(slope, hidden, head_gradient, count, none, moves * moves, np.float32(0))
        product(slope, head, hidden_gradient, none, count, np.float32(-np.inf))
        column_sums(slope, count, gradient.head_bias[seed, 0], none, moves * moves)
        for j in range(width):
            for m in range(moves * moves):
                gradient.head[seed, j, m] = head_gradient[m, j]
        for r in range(count):
            t, b = noise.seen[seed, r, 0], noise.seen[seed, r, 1]
            for j in range(width):
                hidden_gradient[r, j] = hidden_gradient[r, j] if hidden[r, j] > 0 else np.float32(0)
            for column in range(filled(rules, t)):
                on = feature(rules, column, states[t, seed, b, column])
                add(hidden_gradient[r], gradient.first[seed, on])
        column_sums(hidden_gradient, count, gradient.first_bias[seed, 0], none, width)


NOWHERE = np.empty((0, 0, 0, 0), dtype=np.float32)


@torch.no_grad()
def arrivals(dynamics: Dynamics, weights: Mapping[str, Tensor], traj: Trajectories) -> Tensor:
    """`Neural.arrivals` with these weights at all steps: [T, S, B, M], anything where no move was made."""
    batch, model = _batch(traj), model_of(weights)
    noise = new_noise(model, traj.moves.shape)
    out = np.empty((*batch.moves.shape, dynamics.env.num_moves), dtype=np.float32)
    given = (rules_of(dynamics), batch, model, noise, out)
    in_parts(lambda s, e: call(noise_forward, Share(s, e), *given), batch.moves.shape[1])
    return torch.from_numpy(out)


@torch.no_grad()
def learn(dynamics: Dynamics, flat: FlatParameters, traj: Trajectories) -> Tensor:
    """The gradient of each seed's `Neural.loss` into the `flat` parameters; the loss [S]."""
    rules, batch = rules_of(dynamics), _batch(traj)
    learns = np.ascontiguousarray(trainable_steps(dynamics.env, traj).numpy())
    model, gradient = model_of(flat.named), model_of(flat.gradients)
    noise = new_noise(model, traj.moves.shape)
    losses = np.empty(batch.moves.shape[1], dtype=np.float32)

    def work(s: int, e: int) -> None:
        call(noise_forward, Share(s, e), rules, batch, model, noise, NOWHERE)
        call(noise_gradient, Share(s, e), rules, batch, learns, model, noise, gradient, losses)

    in_parts(work, batch.moves.shape[1])
    return torch.from_numpy(losses)


def model_of(named: Mapping[str, Tensor]) -> Model:
    names = "layers.0.weight", "layers.0.bias", "head.weight", "head.bias"
    return Model(*[named[name].detach().numpy() for name in names])


def new_noise(model: Model, shape: tuple[int, ...]) -> Noise:
    """Arrays for as many states as there are steps [T, S, B]."""
    steps, seeds, batch = shape
    rows, (_, width, outs) = steps * batch, model.head.shape
    slots = np.empty((seeds, 1 << (2 * rows - 1).bit_length()), dtype=np.int64)
    number, seen, row = (np.empty(x, dtype=np.int64) for x in ((seeds, rows), (seeds, rows, 2), (steps, seeds, batch)))
    hidden, table = (floats(seeds, rows, n) for n in (width, outs))
    return Noise(slots, number, row, seen, hidden, table, np.empty(seeds, dtype=np.int64))


def rules_of(dynamics: Dynamics) -> Lowered:
    rules = lower(dynamics.env)
    assert rules is not None
    return rules


def _batch(traj: Trajectories) -> Batch:
    return Batch(*[np.ascontiguousarray(x.numpy()) for x in (traj.states, traj.actions, traj.moves, traj.alive)])
