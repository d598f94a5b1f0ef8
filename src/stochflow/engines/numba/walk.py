"""Walks in compiled loops: lattices and sequences, MLPs with or without a look-up table.

Each distinct state of a seed has one row: a state has one depth, so equal states meet at the same step. A walk draws the random
numbers that `rollout` draws, in the same order, and so, but for rounding, gives the same trajectories.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.engines.base import Request, Trace, Traces, Walk
from stochflow.engines.flat import FlatParameters
from stochflow.engines.lower import lower
from stochflow.engines.numba.covers import known_ahead
from stochflow.engines.numba.jit import Share, call, floats, in_parts, loop, part
from stochflow.engines.numba.products import dots, product
from stochflow.engines.numba.rules import World, feature, legal, slot, successor
from stochflow.errors import UserError
from stochflow.nets.lookup import LookupTrunk, inner_mlp
from stochflow.nets.policy import Policy
from stochflow.ops import always, pick, zeros
from stochflow.types import Fading, Task, Trajectories
from stochflow.worlds.channels import Slip
from stochflow.worlds.env import Env

FEW = 24  # a head of up to so many outputs is kept transposed;
WIDE = 16  # a larger one is padded to a multiple of this
THREAD_NUMBERS = 1 << 16  # random numbers that are worth a thread
SHARED_PRODUCTS = 1 << 24  # multiplications of one seed's step beyond which threads share its rows


class Net(NamedTuple):
    """A policy's network, each array [S, ...]. The stages are what follows the first layer: the other layers, then the head in two
    parts, one for the last hidden layer and one for the table."""

    first: np.ndarray  # [S, F, H]
    first_bias: np.ndarray  # [S, 1, H]
    stages: tuple[np.ndarray, ...]  # [S, inputs, outputs]; a head of few outputs is transposed
    biases: tuple[np.ndarray, ...]  # [S, 1, outputs] of all stages but the table's
    table: np.ndarray  # [S, rows, W]


class Rows(NamedTuple):
    """The distinct states of each seed, in the order of their steps: [S, R, ...]."""

    begin: np.ndarray  # [S, T+2] first row of each step
    number: np.ndarray  # as the environment numbers states
    parent: np.ndarray  # the row from which it was first reached,
    feature: np.ndarray  # and the feature that this move switched on
    place: np.ndarray  # [S, R, D] coordinates of a lattice point; [S, R, 0] of a sequence
    inputs: tuple[np.ndarray, ...]  # of each stage: hidden layers before their ReLU, then rows of the table
    outs: np.ndarray  # [S, R, O] of the head
    slots: np.ndarray  # [S, 2^n] the hash table of a step


class Paths(NamedTuple):
    """Trajectories, as in `types`, and the rows of their states."""

    states: np.ndarray  # [T+1, S, B, D]
    actions: np.ndarray  # [T, S, B]
    moves: np.ndarray  # [T, S, B]
    alive: np.ndarray  # [T, S, B]
    row: np.ndarray  # [T+1, S, B]; -1: the trajectory has ended
    final: np.ndarray  # [S, B] the numbers of the last states


class Draws(NamedTuple):
    """The random numbers of K walks."""

    numbers: np.ndarray  # [K, ...] of each walk one after the other: [T, S, B, M] logarithms of exponential noise,
    coins: int  # from here on [T, S, B]: below (-1: there are none)
    explore: np.ndarray  # [K] this, the action is uniform;
    slips: int  # from here on [T, S * B * (M + 1)] a draw per move, and a coin: below (-1: there are none)
    slip: float  # this, the largest draw is the move
    temper: np.ndarray  # [S, B] what logits are divided by


class Span(NamedTuple):
    """Steps of a walk, and which parts of them: threads may share the rows, and a channel may choose the moves in between."""

    begin: int
    end: int
    low: int = 0  # hundredths of the rows about which the network is asked,
    high: int = 100  # from `low` to `high`
    acts: bool = True  # choose actions
    moves: bool = True  # make moves


@part
def forward(seed, a, b, world, net, rows):
    """The network's outputs of the rows a to b, whose first layer is known."""
    last = len(net.stages) - 2
    known = rows.inputs[last + 1]
    for r in range(a, b if known.shape[2] > 0 else a):
        line = min(rows.number[seed, r], net.table.shape[1] - 1)
        for j in range(known.shape[2]):
            known[seed, r, j] = net.table[seed, line, j]
    for i in range(len(net.stages) if known.shape[2] > 0 else last + 1):
        out, low = rows.inputs[i + 1] if i < last else rows.outs, np.float32(-np.inf)
        if i <= last:
            low = np.float32(0)
            for r in range(a, b):
                for j in range(out.shape[2]):
                    out[seed, r, j] = net.biases[i][seed, 0, j]
        if i >= last and world.few:
            dots(rows.inputs[i][seed], net.stages[i][seed], out[seed], a, b, low)
        else:
            product(rows.inputs[i][seed], net.stages[i][seed], out[seed], a, b, low)


@loop
def walk(share, k, span, world, net, rows, paths, draws):
    """Some steps of walk k, of some seeds: rows of the network, then actions, then moves. (One function of arrays that
    are its own arguments: each call that passes so many takes a second to compile.)"""
    rules = world.rules
    size, stop, moves = rules.size, rules.stop, rules.moves
    # arrays are taken out of their tuples once: each attribute access counts references, which takes long to compile
    outs, number, place, slots, starts = rows.outs, rows.number, rows.place, rows.slots, rows.begin
    parent, switched, sums, weights, first_bias = rows.parent, rows.feature, rows.inputs[0], net.first, net.first_bias
    states, actions, moved, alive, row, final = paths
    drawn, explore, temper = draws.numbers[k], draws.explore[k], draws.temper
    batch, axes, all_seeds = row.shape[2], place.shape[2], row.shape[1] * row.shape[2]
    for seed in range(share.first, share.last):
        for one in range(batch if span.begin == 0 and span.acts else 0):
            row[0, seed, one] = final[seed, one] = 0
            for column in range(states.shape[3]):
                states[0, seed, one, column] = rules.blank
        for j in range(sums.shape[2] if span.begin == 0 and span.acts else 0):  # the initial state
            sums[seed, 0, j] = first_bias[seed, 0, j]
            for axis in range(axes):
                sums[seed, 0, j] += weights[seed, feature(rules, axis, 0), j]
        for t in range(span.begin, span.end):
            if span.low < span.high:
                count = starts[seed, t + 1] - starts[seed, t]
                a, b = starts[seed, t] + count * span.low // 100, starts[seed, t] + count * span.high // 100
                forward(seed, a, b, world, net, rows)
            for one in range(batch if span.acts and t < alive.shape[0] else 0):
                r, goes_on = row[t, seed, one], rules.append
                alive[t, seed, one] = False
                actions[t, seed, one] = moved[t, seed, one] = max(stop, 0)
                for axis in range(axes if r >= 0 else 0):
                    goes_on |= place[seed, r, axis] < size - 1
                if r < 0 or not goes_on:  # the last point of a lattice leaves no choice
                    continue
                alive[t, seed, one] = True
                here = t * all_seeds + seed * batch + one
                uniform = draws.coins >= 0 and drawn[draws.coins + here] < explore
                lots = draws.slips + t * all_seeds * (moves + 1)
                slips = draws.slips >= 0 and drawn[lots + all_seeds * moves + seed * batch + one] < draws.slip
                lots += (seed * batch + one) * moves
                action, move, best, luck = -1, -1, np.float32(0), np.float32(-1)
                for m in range(moves):
                    if not legal(rules, t, place[seed, r, m] if m < axes else 0, m):
                        continue
                    x = -drawn[here * moves + m]
                    if not uniform:
                        x += outs[seed, r, m] / temper[seed, one]
                    if action < 0 or x > best:
                        action, best = m, x
                    if slips and m != stop and drawn[lots + m] > luck:
                        move, luck = m, drawn[lots + m]
                actions[t, seed, one] = action
                moved[t, seed, one] = action if move < 0 or action == stop else move
            if span.moves and t < alive.shape[0]:
                new = starts[seed, t + 1]
                if not world.keep:  # the rows' halves take turns
                    new = starts[seed, t + 1] = 0 if starts[seed, t] > 0 else number.shape[1] // 2
                for i in range(slots.shape[1]):
                    slots[seed, i] = -1
                for one in range(batch):
                    r, move = row[t, seed, one], moved[t, seed, one]
                    row[t + 1, seed, one] = -1
                    for column in range(states.shape[3]):
                        states[t + 1, seed, one, column] = states[t, seed, one, column]
                    if not alive[t, seed, one] or move == stop:
                        continue
                    column = t if rules.append else move
                    value = move if rules.append else states[t, seed, one, column] + 1
                    states[t + 1, seed, one, column] = value
                    to, on = successor(rules, number[seed, r], move), feature(rules, column, value)
                    final[seed, one] = to
                    if t + 1 == world.asked:
                        continue
                    at = slot(to, slots.shape[1])
                    found = slots[seed, at]
                    while found >= 0 and not (
                        number[seed, found] == to and (parent[seed, found] == r or not rules.append)
                    ):
                        at = (at + 1) & (slots.shape[1] - 1)
                        found = slots[seed, at]
                    if found < 0:
                        found = slots[seed, at] = new
                        number[seed, new], parent[seed, new], switched[seed, new] = to, r, on
                        for axis in range(axes):
                            place[seed, new, axis] = place[seed, r, axis] + (axis == move)
                        for j in range(sums.shape[2]):
                            sums[seed, new, j] = sums[seed, r, j] + weights[seed, on, j]
                        for j in range(sums.shape[2] if axes > 0 else 0):
                            sums[seed, new, j] -= weights[seed, on - 1, j]  # which was on until then
                        new += 1
                    row[t + 1, seed, one] = found
                starts[seed, t + 2] = new


class Workspace:
    """The arrays in which a policy's walks of one batch size are computed: with those of a trace if it is to `keep` one, in
    which case `gradient` has its own arrays here too."""

    def __init__(self, policy: Policy, batch: int, keep: bool):
        self.policy, self.batch, self._address = policy, batch, policy.head.weight.data_ptr()
        columns = sum(policy.sizes) if keep else policy.env.num_moves  # a walk alone needs the logits of actions only
        self.world = world = _world(policy, keep, columns)
        mlp, trunk, seeds = inner_mlp(policy.trunk), policy.trunk, policy.num_seeds
        first, *more = [layer.weight.detach().numpy() for layer in mlp.layers]
        first_bias, *biases = [layer.bias.detach().numpy() for layer in mlp.layers]
        table = trunk.table.weight.detach().numpy() if type(trunk) is LookupTrunk else floats(seeds, 0, 0)
        outs = columns if world.few else -(-columns // WIDE) * WIDE
        shapes = [(seeds, outs, n) if world.few else (seeds, n, outs) for n in (mlp.width, table.shape[2])]
        *heads, bias = [floats(*shape) for shape in (*shapes, (seeds, 1, outs))]
        for copy in (*heads, bias):
            copy.fill(0)
        self.net = Net(first, first_bias, (*more, *heads), (*biases, bias), table)
        widths = (*[mlp.width] * len(mlp.layers), table.shape[2])
        self.rows = _rows(world, (seeds, _most_rows(world, batch)), widths, outs, batch)
        self.size = sum(stage[0].size for stage in self.net.stages)  # weights of a seed behind the first layer
        own = [x.detach().numpy()[..., :columns] for x in (policy.head.weight, policy.head.bias)]
        self.copies = self.head_parts(own, [*heads, bias])
        self.shape, self.even = (seeds, batch), np.ones((seeds, batch), dtype=np.float32)
        self.score, self.real = zeros(self.shape, policy.device), always(self.shape, policy.device)
        self.found: Any = None  # the gradient's arrays

    def serves(self, policy: Policy, batch: int) -> bool:
        """Whether it is of this policy and batch, and the policy's weights are where they were."""
        return self.policy is policy and self.batch == batch and policy.head.weight.data_ptr() == self._address

    def head_parts(self, head: list[np.ndarray], copies: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The parts of a head [S, H + W, O] and its bias, each beside its copy in the form of `Net`, as views of one shape."""
        (weight, bias), (*same, last), width = head, copies, self.rows.inputs[0].shape[2]
        same = [x.transpose(0, 2, 1) if self.world.few else x[..., : weight.shape[2]] for x in same]
        parts = [(weight[:, :width], same[0]), (weight[:, width:], same[1]), (bias, last[..., : weight.shape[2]])]
        return [(part, copy) for part, copy in parts if part.size > 0]


class NumbaTrace(Trace):
    """What one walk left in a workspace, which no other walk uses while the trace holds."""

    def __init__(self, weights: FlatParameters, space: Workspace, paths: Paths):
        super().__init__(weights, torch.from_numpy(paths.final))
        self.space, self.paths = space, paths

    @property
    def holds(self) -> bool:
        """Also false where the head is not that of the walk any more: weights were changed by code that did not say so."""
        bits = ((own.view(np.int32), copy.view(np.int32)) for own, copy in self.space.copies)  # of which NaN equals NaN
        return super().holds and all(np.array_equal(own, copy) for own, copy in bits)


class NumbaTraces(Traces):
    """One workspace, which a walk uses again if the weights have changed since the walk before; otherwise it has its own."""

    def __init__(self, weights: FlatParameters, policy: Policy, batch: int):
        super().__init__(weights)
        self.space, self.walks = Workspace(policy, batch, True), 0
        self.many: Any = None  # several iterations in one call, in this workspace; or why not
        self._version = -1  # of the weights at the last walk in it

    def begin(self, policy: Policy, batch: int) -> Workspace:
        """The workspace of a new walk."""
        self.walks += 1
        if self._version == self.weights.version:  # a trace of these weights may still be used
            return Workspace(policy, batch, True)
        self._version = self.weights.version
        if not self.space.serves(policy, batch):
            self.space = Workspace(policy, batch, True)
        return self.space


def walk_once(request: Request) -> Walk:
    """The trajectories of a request, and their trace if it asks for one."""
    task, explore, traces = request.task, request.explore, request.traces
    if isinstance(traces, NumbaTraces):
        space = traces.begin(request.policy, request.batch)
    else:
        space = Workspace(request.policy, request.batch, False)
    chance = explore.on_cpu() if isinstance(explore, Fading) else explore
    draws, after = draw(task, space, None if chance is None else [float(chance)], temper=request.temper)
    world, (seeds, batch) = space.world, space.shape
    paths = new_paths(task.env, seeds, batch)
    for own, copy in space.copies:
        np.copyto(copy, own)
    given = (world, space.net, space.rows, paths, draws)
    if not known_ahead(task.channel):
        _ask_channel(task, seeds, given)
    elif seeds == 1 and torch.get_num_threads() > 1 and batch * space.size > SHARED_PRODUCTS:
        _share_rows(given)
    else:
        in_parts(lambda s, e: call(walk, Share(s, e), 0, Span(0, world.asked), *given), seeds)
    if after is not None:
        torch.default_generator.manual_seed(after)
    states, actions, moves, alive = (torch.from_numpy(x) for x in paths[:4])
    found = Trajectories(states, actions, moves, alive, space.score, space.real)
    return Walk(found, None if traces is None else NumbaTrace(traces.weights, space, paths))


def _share_rows(given: tuple[Any, ...]) -> None:
    """One seed of many rows: threads share those of a step."""
    for t in range(given[0].asked):
        rows = Span(t, t + 1, acts=False, moves=False)
        in_parts(lambda a, b: call(walk, Share(0, 1), 0, rows._replace(low=a, high=b), *given), 100)  # noqa: B023 - done before the next t
        call(walk, Share(0, 1), 0, Span(t, t + 1, 0, 0), *given)


@torch.no_grad()
def _ask_channel(task: Task, seeds: int, given: tuple[Any, ...]) -> None:
    """Where the channel itself has to say, at every step, what happens."""
    env, (world, _, _, paths, _) = task.env, given
    for t in range(world.asked):
        act, move = Span(t, t + 1, moves=False), Span(t, t + 1, 0, 0, acts=False)
        in_parts(lambda s, e: call(walk, Share(s, e), 0, act, *given), seeds)  # noqa: B023 - done before the next t
        if t == env.horizon:
            break
        state, intended = torch.from_numpy(paths.states[t]), torch.from_numpy(paths.actions[t])
        allowed, acted = env.real_moves(env.moves(state)), paths.alive[t] & (paths.actions[t] != world.rules.stop)
        realised = task.channel.sample(state, allowed, intended)
        if not bool(pick(allowed, realised)[torch.from_numpy(acted)].all()):
            raise UserError(
                f"{task.channel!r} made a move that is not legal in its state: `sample` may answer with legal moves alone"
            )
        np.copyto(paths.moves[t], realised.numpy(), where=acted)
        in_parts(lambda s, e: call(walk, Share(s, e), 0, move, *given), seeds)  # noqa: B023


def draw(
    task: Task, space: Workspace, explore: list[float] | None, count: int = 1, temper: Tensor | float | None = None
) -> tuple[Draws, int | None]:
    """The random numbers of so many walks, each with its probability to `explore`, and the seed with which torch's generator goes on
    after the last (None: from where it is).

    A walk's length must not show in the numbers after it, so where a channel draws on the way, the stream is seeded anew after each.
    """
    channel: Any = task.channel
    env, each = task.env, space.shape[0] * space.shape[1] * task.env.horizon
    noise, coins = each * env.num_moves, each if explore is not None else 0
    slips = each * (env.num_moves + 1) if type(channel) is Slip and not channel.exact else 0
    after = None
    if env.free or channel.exact:
        drawn = torch.rand(count, noise + coins + slips)
    else:
        drawn = torch.empty(count, noise + coins + slips)
        for row in drawn:
            if after is not None:
                torch.default_generator.manual_seed(after)
            torch.rand(noise + coins, out=row[: noise + coins])
            after = int(torch.randint(2**62, ()))
            torch.rand(slips, out=row[noise + coins :])
    found = drawn.numpy()
    in_parts(lambda a, b: _log_exponential(found[:, a:b]), noise, 1 + count * noise // THREAD_NUMBERS)
    chances = np.array([0.0] * count if explore is None else explore, dtype=np.float32)
    tempers = space.even
    if temper is not None:
        tempers = np.array(np.broadcast_to(np.asarray(temper, dtype=np.float32), (*space.shape, 1))[..., 0], order="C")
    slip: Any = np.float32(channel.alpha if slips else 0)
    return Draws(found, noise if coins else -1, chances, noise + coins if slips else -1, slip, tempers), after


def _log_exponential(x: np.ndarray) -> None:
    """As `ops.log_exponential` makes it of uniform numbers, without torch's own threads, which compete with ours."""
    np.maximum(x, np.float32(2**-25), out=x)
    np.log(x, out=x)
    np.negative(x, out=x)
    np.log(x, out=x)


def _world(policy: Policy, keep: bool, columns: int) -> World:
    rules = lower(policy.env)
    assert rules is not None
    asked, backward = rules.states_asked if keep else rules.horizon, policy.sizes[1] > 0
    return World(rules, asked, keep, backward, sum(policy.sizes[:2]), columns <= FEW)


def _rows(world: World, shape: tuple[int, int], widths: tuple[int, ...], outs: int, batch: int) -> Rows:
    """Arrays for the states [S, R] of a batch; the initial one is in place."""
    numbers = np.zeros((3, *shape), dtype=np.int64)
    *inputs, out = [floats(*shape, width) for width in (*widths, outs)]
    slots = np.empty((shape[0], 1 << (2 * batch - 1).bit_length()), dtype=np.int64)
    begin = np.zeros((shape[0], world.rules.horizon + 2), dtype=np.int64)
    begin[:, 1] = 1
    place = np.zeros((*shape, 0 if world.rules.append else world.rules.columns), dtype=np.int64)
    number, parent, feature = numbers
    return Rows(begin, number, parent, feature, place, tuple(inputs), out, slots)


def _most_rows(world: World, batch: int) -> int:
    """Rows that a seed may need."""
    if not world.keep:
        return 2 * batch
    append, size = world.rules.append, world.rules.size
    return sum(min(batch, size ** min(t, 62)) if append else batch for t in range(world.asked))


def new_paths(env: Env, seeds: int, batch: int) -> Paths:
    shape, whole = (env.horizon, seeds, batch), (env.horizon + 1, seeds, batch)
    states, row, final = (np.empty(x, dtype=np.int64) for x in ((*whole, env.state_dim), whole, (seeds, batch)))
    actions, moves = np.empty((2, *shape), dtype=np.int64)
    return Paths(states, actions, moves, np.empty(shape, dtype=bool), row, final)
