"""A rollout of a small batch on the CPU: products by torch, everything around them by numpy, whose operators cost a third of torch's.

The counterpart of walk.cu: grids and strings, MLPs with or without a look-up table. A move changes one or two one-hot features, so the
first layer is a row added and a row taken away. It draws the random numbers that `rollout` draws, in the same order, and so, but for rounding,
the same trajectories; everything that does not fit walks there, step by step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.envs.grid import Grid
from stochflow.envs.strings import Strings
from stochflow.nets import _LookupTrunk, _MLPTrunk
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


class Trace(NamedTuple):
    """What the network made of each state on the way, for whoever learns before the weights change."""

    layers: list[np.ndarray]  # each layer's outputs [n, S, B, H], of the steps after the early ones
    outs: np.ndarray  # [n, S, B, outputs] of the head
    known: np.ndarray  # [steps, S, B] bool: a state was reached at this step
    numbers: np.ndarray  # [early steps, S, B] which early state it was
    early: Early | None
    early_layers: list[np.ndarray]  # [S, N, H] of the early states
    early_outs: np.ndarray | None  # [S, N, outputs]


def walk(task: Task, policy: Any, batch: int, explore: Tensor | float | None, temper: Tensor | float | None) -> Trajectories:
    """`rollout` for what `fits`."""
    return _walk(task, policy, batch, explore, temper, False)[0]


def traced_walk(task: Task, policy: Any, batch: int, explore: Fading | Tensor | float | None) -> tuple[Trajectories, Trace]:
    """The same, and what the network made of each state."""
    chance = explore.now() if isinstance(explore, Fading) else explore
    traj, network = _walk(task, policy, batch, chance, None, True)
    return traj, network.trace(traj)


@torch.no_grad()
def _walk(task: Task, policy: Any, batch: int, explore: Any, temper: Any, trace: bool) -> tuple[Trajectories, _Network]:
    env: Any = task.env
    seeds, horizon, moves, wide, stop = policy.num_seeds, env.horizon, env.num_moves, env.state_dim, -1 if env.stop is None else env.stop
    string, size = isinstance(env, Strings), env.tokens if isinstance(env, Strings) else env.side
    noise = log_exponential(torch.empty(horizon, seeds, batch, moves)).numpy()
    blind = None if explore is None else (torch.rand(horizon, seeds, batch) < explore).numpy()
    after = None if env.free else int(torch.randint(2**62, ()))
    network = _Network(policy, batch, horizon + (trace and not env.tree), trace)
    flatten = None if temper is None else np.asarray(temper, dtype=np.float32)

    state = np.full((seeds, batch, wide), size if string else 0, dtype=np.int64)
    states = np.empty((horizon + 1, seeds, batch, wide), dtype=np.int64)
    actions, made = np.zeros((2, horizon, seeds, batch), dtype=np.int64)
    alive = np.zeros((horizon, seeds, batch), dtype=bool)
    number, stopped = np.zeros((seeds, batch), dtype=np.int64), np.zeros((seeds, batch), dtype=bool)
    fresh = np.ones((seeds, batch), dtype=bool)  # the state is new
    legal = np.ones((seeds, batch, moves), dtype=bool)  # real moves
    if stop >= 0:
        legal[..., stop] = False
    place = size ** np.arange(wide - 1, -1, -1) if not string else None
    states[0] = state
    for t in range(horizon):
        logits = network.logits(t, number, fresh)
        if flatten is not None:
            logits /= flatten
        if blind is not None:
            logits[blind[t]] = 0.0
        logits -= noise[t]
        if not string:
            legal[..., :wide] = state < size - 1
            logits[..., :wide][~legal[..., :wide]] = NEG
        elif stop >= 0 and t < env.min_length:
            logits[..., stop] = NEG
        action = logits.argmax(-1)
        now = ~stopped if string else legal.any(-1) & ~stopped
        if not now.any():  # all have finished
            states[t + 1 :] = state
            break
        move = action
        if not task.channel.exact:
            move = task.channel.sample(torch.from_numpy(state), torch.from_numpy(legal), torch.from_numpy(action)).numpy()
        if stop >= 0:
            meant = action == stop
            move = np.where(meant, action, move)
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
            assert place is not None
            state[seed, row, chosen] += 1
            number[seed, row] += place[chosen]
            feature = chosen * size + state[seed, row, chosen]
            network.switch(seed, row, feature, feature - 1)
        states[t + 1] = state
    else:
        if trace and not env.tree:
            network.logits(horizon, number, fresh)  # whoever learns a way back asks about the last states too
    if after is not None:
        torch.default_generator.manual_seed(after)
    found = [torch.from_numpy(x) for x in (states, actions, made, alive)]
    shape, device = (seeds, batch), policy.device
    return Trajectories(found[0], found[1], found[2], found[3], nothing(shape, device), always(shape, device)), network


class _Network:
    """The logits of the policy's actions, step by step; early states are looked up by their numbers."""

    def __init__(self, policy: Any, batch: int, steps: int, trace: bool):
        trunk, env, seeds = policy.trunk, policy.env, policy.num_seeds
        self.env, self.steps, self.keeps = env, steps, trace
        self.table = trunk.table.weight.numpy() if type(trunk) is _LookupTrunk else None
        first, *rest = (trunk if self.table is None else trunk.mlp).layers
        self.first, self.rest = first.weight.numpy(), [(layer.weight, layer.bias) for layer in rest]
        columns = policy.head.weight.shape[2] if trace else env.num_moves
        self.head, self.head_bias = policy.head.weight[..., :columns], policy.head.bias[..., :columns]
        self.seed = np.arange(seeds)[:, None]
        self.early = policy.early(steps, batch)
        self.kept, self.outs, self.numbers = list[list[np.ndarray]](), list[np.ndarray](), list[np.ndarray]()
        self.early_layers, self.given = list[np.ndarray](), None
        if self.early is not None:
            states = self.early.states.expand(seeds, -1, -1)
            number = np.broadcast_to(np.arange(len(self.early.states)), (seeds, len(self.early.states)))
            self.early_layers, self.given = self._forward(first(env.features(states)).numpy(), number)
        begun = first(env.features(env.initial((seeds, 1))))
        self.sums = begun.expand(-1, batch, -1).contiguous().numpy()  # of the first layer, before its rectifier
        self.needed = self.early is None or self.early.steps < steps

    def logits(self, t: int, number: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        """[S, B, M] at the states of these numbers, for the caller to change; right where the state is `fresh`, anything where all has ended."""
        moves = self.env.num_moves
        if self.given is not None and self.early is not None and t < self.early.steps:
            if self.keeps:
                self.numbers.append(number.copy())
            return self.given[self.seed, number][..., :moves]
        layers, made = self._some(number, fresh[0]) if len(fresh) == 1 else self._forward(self.sums, number)
        if not self.keeps:
            return made
        self.kept.append(layers)
        self.outs.append(made)
        return made[..., :moves].copy()

    def _some(self, number: np.ndarray, fresh: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Of one seed, only what is fresh goes through the network. (Of several, how many are fresh in one would touch another's rounding.)"""
        (few,) = np.nonzero(fresh)
        if 4 * len(few) > 3 * len(fresh):
            return self._forward(self.sums, number)

        def wide(x: np.ndarray) -> np.ndarray:
            whole = np.zeros((1, len(fresh), x.shape[2]), dtype=x.dtype)
            whole[:, few] = x
            return whole

        layers, made = self._forward(self.sums[:, few], number[:, few])
        return [wide(x) for x in layers] if self.keeps else layers, wide(made)

    def _forward(self, sums: np.ndarray, number: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Each layer's outputs and the head's."""
        hidden = torch.from_numpy(np.maximum(sums, 0))
        layers = [hidden.numpy()]
        for weight, bias in self.rest:
            hidden = torch.baddbmm(bias, hidden, weight).relu_()
            layers.append(hidden.numpy())
        if self.table is not None:
            kept = self.table[self.seed, np.minimum(number, self.table.shape[1] - 1)]
            hidden = torch.cat([hidden, torch.from_numpy(kept)], -1)
        return layers, torch.baddbmm(self.head_bias, hidden, self.head).numpy()

    def switch(self, seed: np.ndarray, row: np.ndarray, on: np.ndarray, off: np.ndarray | None) -> None:
        """Features of some rows that a move has changed."""
        if self.needed:
            self.sums[seed, row] += self.first[seed, on] if off is None else self.first[seed, on] - self.first[seed, off]

    def trace(self, traj: Trajectories) -> Trace:
        """Of a walk that has ended."""
        moved = traj.alive if self.env.stop is None else traj.alive & (traj.moves != self.env.stop)
        known = torch.cat([torch.ones_like(moved[:1]), moved])[: len(self.numbers) + len(self.outs)].numpy()
        layers = [np.stack(each) for each in zip(*self.kept, strict=True)]
        outs = np.stack(self.outs) if self.outs else np.empty((0, *known.shape[1:], self.head.shape[2]), dtype=np.float32)
        numbers = np.stack(self.numbers) if self.numbers else np.empty((0, *known.shape[1:]), dtype=np.int64)
        return Trace(layers, outs, known, numbers, self.early, self.early_layers, self.given)
