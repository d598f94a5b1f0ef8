"""A rollout on the CPU: products by torch, everything around them by numpy, whose operators cost a third of torch's.

The counterpart of walk.cu: grids and strings, MLPs with or without a look-up table. It draws the random numbers that `rollout` draws, in the
same order, and so, but for rounding, the same trajectories; everything that does not fit walks there, step by step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.channels import Slip
from stochflow.cpu_network import At, Network, Trace, of
from stochflow.env import Channel
from stochflow.envs.grid import Grid
from stochflow.envs.strings import Strings
from stochflow.nets import _LookupTrunk, _MLPTrunk, inner_mlp
from stochflow.ops import ALL_AT_ONCE, NEG, always, log_exponential, nothing
from stochflow.policy import Policy
from stochflow.types import Fading, Task, Trajectories

MOST = 1 << 20  # hidden numbers of a seed's step
MOST_KEPT = 1 << 28  # and of all layers, steps and seeds, should all of them be reached: who learns from them keeps them


def fits(task: Task, policy: Any, batch: int) -> bool:
    """Whether it knows this environment and this network, and there is room."""
    env: Any = task.env
    trunk: Any = getattr(policy, "trunk", None)
    if type(policy) is not Policy or type(trunk) not in (_MLPTrunk, _LookupTrunk) or policy.encoder is not None:
        return False
    return (
        type(env) in (Grid, Strings)
        and env.contexts is None
        and policy.head.weight.dtype == torch.float32
        and batch * trunk.width <= MOST
        and policy.num_seeds * batch * (env.horizon + 1) * trunk.width * len(inner_mlp(trunk).layers) <= MOST_KEPT
        and policy.num_seeds * batch * env.horizon * env.num_moves <= ALL_AT_ONCE
        and task.channel.begin(env.initial((1, 1))) is None  # a channel that remembers asks for more
    )


def walk(task: Task, policy: Any, batch: int, explore: Tensor | float | None, temper: Tensor | float | None) -> Trajectories:
    """`rollout` for what `fits`."""
    return _walk(task, policy, batch, explore, temper, False)[0]


def traced_walk(task: Task, policy: Any, batch: int, explore: Fading | Tensor | float | None) -> tuple[Trajectories, Trace]:
    """The same, and what the network made of each state."""
    chance = explore.now() if isinstance(explore, Fading) else explore
    traj, network, way = _walk(task, policy, batch, chance, None, True)
    return traj, network.trace(way.at, way.final)


class _Way(NamedTuple):
    """What came of a walk."""

    states: np.ndarray  # [T+1, S, B, D]
    actions: np.ndarray  # [T, S, B], as the two that follow
    moves: np.ndarray
    alive: np.ndarray
    at: At
    final: np.ndarray  # [S, B] the last states' numbers


@torch.no_grad()
def _walk(task: Task, policy: Any, batch: int, explore: Any, temper: Any, trace: bool) -> tuple[Trajectories, Network, _Way]:
    env, seeds, device = task.env, policy.num_seeds, policy.device
    size = _Size(env.horizon, seeds, batch, env.num_moves)
    chance = _Chance.drawn(size, explore, temper)
    after = None if env.free else int(torch.randint(2**62, ()))
    fate = _Fate(task.channel, size)
    network = Network(policy, batch, env.horizon + (trace and not env.tree), trace)
    if env.free:
        way = _all_letters(env, network, chance, fate)
    elif isinstance(env, Grid) and not network.needed and chance.alike():
        way = _by_number(env, network, chance, fate)
    else:
        way = _step_by_step(env, network, chance, fate)
    if after is not None:
        torch.default_generator.manual_seed(after)
    found = [torch.from_numpy(x) for x in way[:4]]
    shape = (seeds, batch)
    return Trajectories(found[0], found[1], found[2], found[3], nothing(shape, device), always(shape, device)), network, way


class _Size(NamedTuple):
    """Of a walk. Its trajectories stand in one row, those of a seed after those of the one before: n = S * B."""

    steps: int
    seeds: int
    batch: int
    moves: int

    def by_step(self, x: np.ndarray) -> np.ndarray:
        """[T, n, ...] as [T, S, B, ...]."""
        return x.reshape(len(x), self.seeds, self.batch, *x.shape[2:])


class _Chance(NamedTuple):
    """The random numbers of a walk's choices."""

    size: _Size
    noise: np.ndarray  # [T, n, M]
    blind: np.ndarray | None  # [T, n] bool: uniform chance chooses
    flatten: np.ndarray | None  # [n, 1] what logits are divided by

    @classmethod
    def drawn(cls, size: _Size, explore: Any, temper: Any) -> _Chance:
        steps, seeds, batch, moves = size
        many = seeds * batch
        noise = log_exponential(torch.empty(steps, many, moves)).numpy()
        blind = None if explore is None else (torch.rand(steps, many) < torch.as_tensor(explore).reshape(())).numpy()
        flatten = None if temper is None else np.broadcast_to(np.asarray(temper, dtype=np.float32), (seeds, batch, 1)).reshape(many, 1)
        return cls(size, noise, blind, flatten)

    def alike(self) -> bool:
        """Whether what logits are divided by is the same for all trajectories of a seed."""
        if self.flatten is None:
            return True
        each = self.flatten.reshape(self.size.seeds, -1)
        return bool((each == each[:, :1]).all())

    def stir(self, t: int, logits: np.ndarray, here: np.ndarray | None = None) -> np.ndarray:
        """Logits [n, M] of the trajectories `here` (None: of all), of which the largest wins."""
        if self.flatten is not None:
            logits = logits / (self.flatten if here is None else self.flatten[here])
        stirred = logits - of(self.noise[t], here)
        if self.blind is not None:
            (blind,) = of(self.blind[t], here).nonzero()
            if len(blind):
                stirred[blind] = -self.noise[t, blind if here is None else here[blind]]
        return stirred


class _Fate:
    """What comes of an action. `Slip` is foretold for all steps, by the random numbers it would draw; any other channel is asked at each."""

    def __init__(self, channel: Channel, size: _Size):
        self.channel, self.size, self.slips = channel, size, None
        if type(channel) is Slip and not channel.exact:
            steps, seeds, batch, moves = size
            many = seeds * batch
            drawn = torch.rand(steps, many * (moves + 1)).numpy()
            self.draw = drawn[:, :-many].reshape(steps, many, moves)
            self.slips = drawn[:, -many:] < channel.alpha

    def move(self, t: int, here: np.ndarray | None, state: np.ndarray, legal: np.ndarray, action: np.ndarray) -> np.ndarray:
        """[n] of the trajectories `here` (None: of all) and their actions, which are not STOP; where they are, anything."""
        if self.channel.exact:
            return action
        if self.slips is not None:
            return np.where(of(self.slips[t], here), np.where(legal, of(self.draw[t], here), -1).argmax(-1), action)
        given = [torch.from_numpy(self._all(x, here)) for x in (state, legal, action)]
        return of(self.channel.sample(*given).numpy().ravel(), here)

    def _all(self, x: np.ndarray, here: np.ndarray | None) -> np.ndarray:
        """[S, B, ...]: whoever draws for all draws the same for each; those who have ended stand where the first stands."""
        whole = x
        if here is not None:
            whole = np.repeat(x[:1], self.size.seeds * self.size.batch, 0)
            whole[here] = x
        return self.size.by_step(whole[None])[0]


def _all_letters(env: Any, network: Network, chance: _Chance, fate: _Fate) -> _Way:
    """Strings of a fixed length: nothing is illegal, nothing ends early, and a state is its moves so far."""
    horizon, seeds, batch, moves = size = chance.size
    many = seeds * batch
    legal = np.ones((many, moves), dtype=bool)
    state = np.full((many, horizon), env.pad, dtype=np.int64)
    actions, made = np.empty((2, horizon, many), dtype=np.int64)
    numbers = np.zeros((horizon + 1, many), dtype=np.int64)
    for t in range(horizon):
        actions[t] = chance.stir(t, network.logits(t, numbers[t])).argmax(-1)
        state[:, t] = move = made[t] = fate.move(t, None, state, legal, actions[t])
        numbers[t + 1] = numbers[t] * env.tokens + 1 + move
        network.switch(None, move + t * env.tokens)
    written = np.arange(horizon) < np.arange(horizon + 1)[:, None, None]
    states = np.where(written, state, env.pad)
    alive = np.ones((horizon, seeds, batch), dtype=bool)
    at = _all_of(horizon, seeds, batch)._replace(number=numbers[:-1].ravel())
    return _Way(size.by_step(states), size.by_step(actions), size.by_step(made), alive, at, numbers[-1].reshape(seeds, batch))


@lru_cache(maxsize=16)
def _all_of(steps: int, seeds: int, batch: int) -> At:
    """Every trajectory at every step, without numbers."""
    t, s, b = np.indices((steps, seeds, batch))
    return At(t.ravel(), s.ravel(), b.ravel(), np.empty(0, dtype=np.int64))


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


def _by_number(env: Any, network: Network, chance: _Chance, fate: _Fate) -> _Way:
    """A grid whose states have all been through the network: two tables say what it makes of a state and where a move leads from there.

    Who has ended keeps stopping, in a state of its own, after the grid's last one, which is the only one without a way on.
    """
    horizon, seeds, batch, moves = size = chance.size
    states, mask, leads = _grid_table(env)
    real, end = mask & (np.arange(moves) != env.stop), len(mask) - 1
    begin = np.arange(seeds) * len(mask)  # each seed has rows of its own
    leads = (leads + begin[:, None, None]).ravel()
    table = np.full((1 if chance.blind is None else 2, seeds, *mask.shape), NEG, dtype=np.float32)
    given = network.early_made[-1][..., :moves]
    if chance.flatten is not None:
        given = given / chance.flatten.reshape(seeds, batch, 1)[:, :1]
    np.copyto(table[0, :, :end], given, where=mask[:end])
    table[0, :, end, env.stop] = 0
    if chance.blind is not None:  # there uniform chance chooses
        table[1, :, mask] = 0
    table = table.reshape(-1, moves)
    shift = np.zeros(horizon, dtype=np.int64) if chance.blind is None else chance.blind * (seeds * len(mask))
    first = begin.repeat(batch)
    numbers = np.full((horizon + 1, seeds * batch), end) + first
    actions, made = np.full((2, horizon, seeds * batch), env.stop)
    number = numbers[0] = first
    last = first + end - 1
    for t in range(horizon):
        if not (number < last).any():  # all have finished
            break
        move = actions[t] = (table.take(number + shift[t], 0) - chance.noise[t]).argmax(-1)
        if not fate.channel.exact:
            here = number - first
            move = np.where(move == env.stop, move, fate.move(t, None, states[here], real[here], move))
        made[t] = move
        number = numbers[t + 1] = leads.take(number * moves + move)
    numbers -= first
    known = numbers < end
    frozen = np.maximum.accumulate(np.where(known, numbers, 0))  # a move leads to a larger number
    when, s, b = np.nonzero(size.by_step(known))
    at = At(when, s, b, numbers[known])
    whole, alive = size.by_step(states[frozen]), size.by_step(numbers[:-1] < end - 1)
    return _Way(whole, size.by_step(actions), size.by_step(made), alive, at, frozen[-1].reshape(seeds, batch))


def _step_by_step(env: Any, network: Network, chance: _Chance, fate: _Fate) -> _Way:
    """Trajectories end when they stop, or where no move is left, and only those that go on are looked at: `here`."""
    horizon, seeds, batch, _ = size = chance.size
    string, wide, stop, many = isinstance(env, Strings), env.state_dim, env.stop, seeds * batch
    side = env.tokens if string else env.side
    place, unit = side ** np.arange(0 if string else wide)[::-1], np.eye(0 if string else wide, dtype=np.int64)
    here, number = np.arange(many), np.zeros(many, dtype=np.int64)
    state = np.full((many, wide), side if string else 0, dtype=np.int64)
    met, done = list[tuple[np.ndarray, ...]](), list[tuple[np.ndarray, np.ndarray]]()
    for t in range(horizon):
        met.append((here, number, state))
        logits = chance.stir(t, network.logits(t, number), here)
        if not string:
            logits[:, :wide][state == side - 1] = NEG  # where that is all, it stops
        elif t < env.min_length:
            logits[:, stop] = NEG
        move = action = logits.argmax(1)
        if not fate.channel.exact:
            legal = np.ones(logits.shape, dtype=bool)  # real moves
            legal[:, stop] = False
            if not string:
                legal[:, :wide] = state < side - 1
            move = np.where(action == stop, action, fate.move(t, here, state, legal, action))
        done.append((action, move))
        (on,) = np.nonzero(move != stop)
        if not len(on):  # all have finished
            break
        kept = None if len(on) == len(here) else on
        here, number, state, move = (of(x, kept) for x in (here, number, state, move))
        if string:
            state = state.copy()
            state[:, t] = move
            number = number * side + 1 + move
            network.switch(kept, t * side + move)
        else:
            state = state + unit.take(move, 0)
            number = number + place.take(move)
            now = state.ravel().take(np.arange(0, state.size, wide) + move)
            network.switch(kept, move * side + now)
    else:
        met.append((here, number, state))
        if network.steps > horizon:
            network.logits(horizon, number)  # whoever learns a way back asks about the last states too
    return _assembled(env, size, network.steps, met, done)


def _assembled(env: Any, size: _Size, steps: int, met: list[tuple[np.ndarray, ...]], done: list[tuple[np.ndarray, np.ndarray]]) -> _Way:
    """Lists of what was met and done by those that went on, as tensors of all steps and trajectories; what was met before `steps` were made is noted."""
    horizon, seeds, batch, _ = size
    many, string = seeds * batch, isinstance(env, Strings)
    here, number, state = (np.concatenate(x) for x in zip(*met, strict=True))
    t = np.arange(len(met)).repeat([len(x[0]) for x in met])
    states = np.full((horizon + 1, many, env.state_dim), env.pad if string else 0, dtype=np.int64)
    states[t, here] = state
    begun = states[: len(met)]
    (np.minimum if string else np.maximum).accumulate(begun, out=begun)  # padding is the largest token
    states[len(met) :] = begun[-1]
    final = np.zeros(many, dtype=np.int64)
    final[here] = number  # the last one stays
    acted = len(t) - (len(met) > len(done)) * len(met[-1][0])  # whoever met a state after the last step does nothing there
    when, who = t[:acted], here[:acted]
    actions, moves = np.zeros((2, horizon, many), dtype=np.int64)
    actions[when, who], moves[when, who] = (np.concatenate(x) for x in zip(*done, strict=True))
    alive = np.zeros((horizon, many), dtype=bool)
    alive[when, who] = string or (state[:acted] < env.side - 1).any(1)
    noted = len(t) if len(met) <= steps else acted
    at = At(t[:noted], here[:noted] // batch, here[:noted] % batch, number[:noted])
    states, actions, moves, alive = (size.by_step(x) for x in (states, actions, moves, alive))
    return _Way(states, actions, moves, alive, at, final.reshape(seeds, batch))
