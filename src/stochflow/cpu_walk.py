"""A rollout of a small batch on the CPU: products by torch, everything around them by numpy, whose operators cost a third of torch's.

The counterpart of walk.cu: grids and strings, MLPs with or without a look-up table. A move changes one or two one-hot features, so the
first layer is a row added and a row taken away. It draws the random numbers that `rollout` draws, in the same order, and so, but for rounding,
the same trajectories; everything that does not fit walks there, step by step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.channels import Slip
from stochflow.env import Channel
from stochflow.envs.grid import Grid
from stochflow.envs.strings import Strings
from stochflow.nets import _LookupTrunk, _MLPTrunk, inner_mlp
from stochflow.ops import ALL_AT_ONCE, NEG, always, log_exponential, nothing
from stochflow.policy import Early, Policy
from stochflow.types import Fading, Task, Trajectories

MOST = 1 << 17  # hidden numbers of a step: beyond, torch's operators are the faster ones


def fits(task: Task, policy: Any, batch: int) -> bool:
    """Whether it knows this environment and this network, and the batch is small."""
    env: Any = task.env
    trunk: Any = getattr(policy, "trunk", None)
    if type(policy) is not Policy or type(trunk) not in (_MLPTrunk, _LookupTrunk) or policy.encoder is not None:
        return False
    return (
        type(env) in (Grid, Strings)
        and env.contexts is None
        and policy.head.weight.dtype == torch.float32
        and policy.num_seeds * batch * trunk.width <= MOST
        and policy.num_seeds * batch * env.horizon * env.num_moves <= ALL_AT_ONCE
        and task.channel.begin(env.initial((1, 1))) is None  # a channel that remembers asks for more
    )


def all_early(policy: Any, batch: int) -> bool:
    """Whether a walk that is traced meets no state that has not been through the network before it begins."""
    steps = policy.env.horizon + (not policy.env.tree)
    early = policy.early(steps, batch)
    return early is not None and early.steps == steps


class Trace(NamedTuple):
    """What the network made of each state on the way, for whoever learns before the weights change."""

    made: list[np.ndarray]  # each layer's outputs [n, S, B, H] and, last, the head's, of the steps after the early ones; [] if none
    known: np.ndarray  # [steps, S, B] bool: a state was reached at this step
    numbers: np.ndarray  # [steps, S, B] which state it was, in the environment's order
    finals: Tensor  # [S, B] and the last one
    early: Early | None
    early_made: list[np.ndarray]  # the same of the early states [S, N, ...]; [] if none


def walk(task: Task, policy: Any, batch: int, explore: Tensor | float | None, temper: Tensor | float | None) -> Trajectories:
    """`rollout` for what `fits`."""
    return _walk(task, policy, batch, explore, temper, False)[0]


def traced_walk(task: Task, policy: Any, batch: int, explore: Fading | Tensor | float | None) -> tuple[Trajectories, Trace]:
    """The same, and what the network made of each state."""
    chance = explore.now() if isinstance(explore, Fading) else explore
    traj, network, way = _walk(task, policy, batch, chance, None, True)
    return traj, network.trace(way)


class _Way(NamedTuple):
    """What came of a walk."""

    states: np.ndarray  # [T+1, S, B, D]
    actions: np.ndarray  # [T, S, B], as the two that follow
    moves: np.ndarray
    alive: np.ndarray
    known: np.ndarray  # [n, S, B] bool: a state was reached
    numbers: np.ndarray  # [n, S, B] which it was
    final: np.ndarray  # [S, B] the last one's number


@torch.no_grad()
def _walk(task: Task, policy: Any, batch: int, explore: Any, temper: Any, trace: bool) -> tuple[Trajectories, _Network, _Way]:
    env, seeds, device = task.env, policy.num_seeds, policy.device
    chance = _Chance.drawn((env.horizon, seeds, batch, env.num_moves), explore, temper)
    after = None if env.free else int(torch.randint(2**62, ()))
    fate = _Fate(task.channel, chance.noise.shape)
    network = _Network(policy, batch, env.horizon + (trace and not env.tree), trace)
    if env.free:
        way = _all_letters(env, network, chance, fate)
    elif isinstance(env, Grid) and not network.needed:
        way = _by_number(env, network, chance, fate)
    else:
        way = _step_by_step(env, network, chance, fate)
    if after is not None:
        torch.default_generator.manual_seed(after)
    found = [torch.from_numpy(x) for x in way[:4]]
    shape = (seeds, batch)
    return Trajectories(found[0], found[1], found[2], found[3], nothing(shape, device), always(shape, device)), network, way


class _Chance(NamedTuple):
    """The random numbers of a walk's choices."""

    noise: np.ndarray  # [T, S, B, M]
    blind: np.ndarray | None  # [T, S, B] bool: uniform chance chooses
    flatten: np.ndarray | None  # what logits are divided by

    @classmethod
    def drawn(cls, shape: tuple[int, ...], explore: Any, temper: Any) -> _Chance:
        noise = log_exponential(torch.empty(shape)).numpy()
        blind = None if explore is None else (torch.rand(shape[:-1]) < explore).numpy()
        return cls(noise, blind, None if temper is None else np.asarray(temper, dtype=np.float32))

    def stir(self, t: int, logits: np.ndarray) -> np.ndarray:
        """Logits [S, B, M], changed in place, of which the largest wins."""
        if self.flatten is not None:
            logits /= self.flatten
        if self.blind is not None:
            logits[self.blind[t]] = 0.0
        logits -= self.noise[t]
        return logits


class _Fate:
    """What comes of an action. `Slip` is foretold for all steps, by the random numbers it would draw; any other channel is asked at each."""

    def __init__(self, channel: Channel, shape: tuple[int, ...]):
        self.channel, self.slips = channel, None
        if type(channel) is Slip and not channel.exact:
            steps, seeds, batch, moves = shape
            drawn = torch.rand(steps, seeds * batch * (moves + 1)).numpy()
            self.draw = drawn[:, : -seeds * batch].reshape(shape)
            self.slips = drawn[:, -seeds * batch :].reshape(shape[:-1]) < channel.alpha

    def move(self, t: int, state: np.ndarray, legal: np.ndarray, action: np.ndarray) -> np.ndarray:
        """[S, B], of actions that are not STOP."""
        if self.channel.exact:
            return action
        if self.slips is None:
            return self.channel.sample(torch.from_numpy(state), torch.from_numpy(legal), torch.from_numpy(action)).numpy()
        return np.where(self.slips[t], np.where(legal, self.draw[t], -1).argmax(-1), action)


def _all_letters(env: Any, network: _Network, chance: _Chance, fate: _Fate) -> _Way:
    """Strings of a fixed length: nothing is illegal, nothing ends early, and a state is its moves so far."""
    horizon, seeds, batch, moves = chance.noise.shape
    legal = np.ones((seeds, batch, moves), dtype=bool)
    states = np.full((horizon + 1, seeds, batch, horizon), env.pad, dtype=np.int64)
    actions, made = np.empty((2, horizon, seeds, batch), dtype=np.int64)
    numbers = np.zeros((horizon + 1, seeds, batch), dtype=np.int64)
    for t in range(horizon):
        actions[t] = chance.stir(t, network.logits(t, numbers[t], None)).argmax(-1)
        move = made[t] = fate.move(t, states[t], legal, actions[t])
        states[t + 1 :, ..., t] = move
        numbers[t + 1] = numbers[t] * env.tokens + 1 + move
        network.add(move + t * env.tokens)
    alive = np.ones((horizon, seeds, batch), dtype=bool)
    return _Way(states, actions, made, alive, alive, numbers[:-1], numbers[-1])


@lru_cache(maxsize=16)
def _grid_table(env: Grid) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every state of a grid and, last, of the end, in which one lands by STOP and stays: coordinates, what may be done, where that leads."""
    states = env.all_states()
    count = len(states)
    mask = np.ones((count + 1, env.num_moves), dtype=bool)
    mask[:-1] = env.moves(states).numpy()
    mask[-1, :-1] = False
    leads = np.full(mask.shape, count)
    leads[:, :-1] = np.arange(count + 1)[:, None] + env.side ** np.arange(env.ndim - 1, -1, -1)
    leads[~mask] = count
    return np.concatenate([states.numpy(), states[-1:].numpy()]), mask, leads


def _by_number(env: Any, network: _Network, chance: _Chance, fate: _Fate) -> _Way:
    """A grid whose states have all been through the network: two tables say what it makes of a state and where a move leads from there.

    Who has ended keeps stopping, in a state of its own, after the grid's last one, which is the only one without a way on.
    """
    horizon, seeds, batch, moves = chance.noise.shape
    states, mask, leads = _grid_table(env)
    real, end = mask & (np.arange(moves) != env.stop), len(mask) - 1
    first = (np.arange(seeds) * len(mask))[:, None]  # each seed has rows of its own
    leads = (leads + first[..., None]).ravel()
    table = np.full((1 if chance.blind is None else 2, seeds, *mask.shape), NEG, dtype=np.float32)
    given = network.early_made[-1][..., :moves]
    np.copyto(table[0, :, :end], given if chance.flatten is None else given / chance.flatten, where=mask[:end])
    table[0, :, end, env.stop] = 0
    if chance.blind is not None:  # there uniform chance chooses
        table[1, :, mask] = 0
    table = table.reshape(-1, moves)
    shift = np.zeros(horizon, dtype=np.int64) if chance.blind is None else chance.blind * (seeds * len(mask))
    numbers = np.full((horizon + 1, seeds, batch), end) + first
    actions, made = np.full((2, horizon, seeds, batch), env.stop)
    number = numbers[0] = np.broadcast_to(first, (seeds, batch))
    last = first + end - 1
    for t in range(horizon):
        if not (number < last).any():  # all have finished
            break
        move = actions[t] = (table.take(number + shift[t], 0) - chance.noise[t]).argmax(-1)
        if not fate.channel.exact:
            here = number - first
            move = np.where(move == env.stop, move, fate.move(t, states[here], real[here], move))
        made[t] = move
        number = numbers[t + 1] = leads.take(number * moves + move)
    numbers -= first
    known = numbers < end
    frozen = np.maximum.accumulate(np.where(known, numbers, 0))  # a move leads to a larger number
    return _Way(states[frozen], actions, made, numbers[:-1] < end - 1, known, numbers, frozen[-1])


def _step_by_step(env: Any, network: _Network, chance: _Chance, fate: _Fate) -> _Way:
    """Trajectories end when they stop, or where no move is left."""
    horizon, seeds, batch, moves = chance.noise.shape
    wide, stop = env.state_dim, env.stop
    string, size = isinstance(env, Strings), env.tokens if isinstance(env, Strings) else env.side
    state = np.full((seeds, batch, wide), size if string else 0, dtype=np.int64)
    states = np.empty((horizon + 1, seeds, batch, wide), dtype=np.int64)
    actions, made = np.zeros((2, horizon, seeds, batch), dtype=np.int64)
    numbers = np.empty((horizon + 1, seeds, batch), dtype=np.int64)
    alive = np.zeros((horizon, seeds, batch), dtype=bool)
    known = np.zeros((horizon + 1, seeds, batch), dtype=bool)
    number, stopped = np.zeros((seeds, batch), dtype=np.int64), np.zeros((seeds, batch), dtype=bool)
    fresh = np.ones((seeds, batch), dtype=bool)  # the state is new
    legal = np.ones((seeds, batch, moves), dtype=bool)  # real moves
    legal[..., stop] = False
    place = size ** np.arange(wide - 1, -1, -1)
    for t in range(horizon):
        states[t], numbers[t], known[t] = state, number, fresh
        logits = chance.stir(t, network.logits(t, number, fresh))
        if not string:
            legal[..., :wide] = state < size - 1
            logits[..., :wide][~legal[..., :wide]] = NEG
        elif t < env.min_length:
            logits[..., stop] = NEG
        action = logits.argmax(-1)
        now = ~stopped if string else legal.any(-1) & ~stopped
        if not now.any():  # all have finished
            break
        meant = action == stop
        move = np.where(meant, action, fate.move(t, state, legal, action))
        stopped |= meant
        actions[t], made[t], alive[t] = action, move, now
        fresh = now & (move != stop)
        seed, row = np.nonzero(fresh)
        chosen = move[seed, row]
        if string:
            state[seed, row, t] = chosen
            number[seed, row] = number[seed, row] * size + 1 + chosen
            network.switch(seed, row, t * size + chosen, None)
        else:
            state[seed, row, chosen] += 1
            number[seed, row] += place[chosen]
            feature = chosen * size + state[seed, row, chosen]
            network.switch(seed, row, feature, feature - 1)
    else:
        t = horizon
        numbers[t], known[t] = number, fresh
        if network.steps > horizon:
            network.logits(horizon, number, fresh)  # whoever learns a way back asks about the last states too
    states[t:] = state
    met = min(t + 1, network.steps)
    return _Way(states, actions, made, alive, known[:met], numbers[:met], number)


class _Network:
    """The logits of the policy's actions, step by step; early states are looked up by their numbers."""

    def __init__(self, policy: Any, batch: int, steps: int, trace: bool):
        trunk, env, seeds = policy.trunk, policy.env, policy.num_seeds
        self.env, self.steps, self.keeps = env, steps, trace
        self.table = trunk.table.weight.numpy() if type(trunk) is _LookupTrunk else None
        first, *rest = inner_mlp(trunk).layers
        self.first, self.rest = first.weight.numpy(), [(layer.weight, layer.bias) for layer in rest]
        columns = policy.head.weight.shape[2] if trace else env.num_moves
        self.head, self.head_bias = policy.head.weight[..., :columns], policy.head.bias[..., :columns]
        self.seed = np.arange(seeds)[:, None]
        self.early = policy.early(steps, batch)
        self.made, self.early_made = list[list[np.ndarray]](), list[np.ndarray]()
        if self.early is not None:
            features = env.features(self.early.states) if self.early.features is None else self.early.features
            number = np.broadcast_to(np.arange(len(features)), (seeds, len(features)))
            self.early_made = self._forward(first(features.expand(seeds, -1, -1)).numpy(), number)
        self.needed = self.early is None or self.early.steps < steps  # whether there are others
        if self.needed:
            begun = first(env.features(env.initial((seeds, 1))))
            self.sums = begun.expand(-1, batch, -1).contiguous().numpy()  # of the first layer, before its rectifier

    def logits(self, t: int, number: np.ndarray, fresh: np.ndarray | None) -> np.ndarray:
        """[S, B, M] at the states of these numbers, for the caller to change; right where the state is `fresh` (None: everywhere), anything
        where all has ended."""
        moves = self.env.num_moves
        if self.early is not None and t < self.early.steps:
            return self.early_made[-1][self.seed, number][..., :moves]
        made = self._forward(self.sums, number) if fresh is None or len(fresh) > 1 else self._some(number, fresh[0])
        if not self.keeps:
            return made[-1]
        self.made.append(made)
        return made[-1][..., :moves].copy()

    def _some(self, number: np.ndarray, fresh: np.ndarray) -> list[np.ndarray]:
        """Of one seed, only what is fresh goes through the network. (Of several, how many are fresh in one would touch another's rounding.)"""
        (few,) = np.nonzero(fresh)
        if 4 * len(few) > 3 * len(fresh):
            return self._forward(self.sums, number)

        def wide(x: np.ndarray) -> np.ndarray:
            whole = np.zeros((1, len(fresh), x.shape[2]), dtype=x.dtype)
            whole[:, few] = x
            return whole

        return [wide(x) for x in self._forward(self.sums[:, few], number[:, few])]

    def _forward(self, sums: np.ndarray, number: np.ndarray) -> list[np.ndarray]:
        """Each layer's outputs and the head's."""
        hidden = torch.from_numpy(np.maximum(sums, 0))
        made = [hidden.numpy()]
        for weight, bias in self.rest:
            hidden = torch.baddbmm(bias, hidden, weight).relu_()
            made.append(hidden.numpy())
        if self.table is not None:
            kept = self.table[self.seed, np.minimum(number, self.table.shape[1] - 1)]
            hidden = torch.cat([hidden, torch.from_numpy(kept)], -1)
        made.append(torch.baddbmm(self.head_bias, hidden, self.head).numpy())
        return made

    def add(self, on: np.ndarray) -> None:
        """A feature [S, B] that a move has set in every row."""
        if self.needed:
            self.sums += self.first[self.seed, on]

    def switch(self, seed: np.ndarray, row: np.ndarray, on: np.ndarray, off: np.ndarray | None) -> None:
        """Features of some rows that a move has changed."""
        if self.needed:
            self.sums[seed, row] += self.first[seed, on] if off is None else self.first[seed, on] - self.first[seed, off]

    def trace(self, way: _Way) -> Trace:
        """Of a walk that has ended."""
        made = [np.stack(each) for each in zip(*self.made, strict=True)]
        return Trace(made, way.known, way.numbers, torch.from_numpy(way.final), self.early, self.early_made)
