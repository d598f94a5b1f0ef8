"""The policy's network as a walk on the CPU asks it (`cpu_walk`), and what it keeps for whoever learns from that walk (`cpu_balance`).

A move changes one or two one-hot features, so the first layer is a running sum: a row added and a row taken away. Products are torch's.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.envs.strings import Strings
from stochflow.nets import _LookupTrunk, inner_mlp
from stochflow.policy import Early


class Trace(NamedTuple):
    """What the network made of each state on the way, for whoever learns before the weights change."""

    at: At
    # of the states that are not early, which are the last n: each hidden layer's outputs [n, H] (several seeds at once: [S, n / S, H]), and the head's
    made: list[np.ndarray]
    finals: Tensor  # [S, B] the last states' numbers
    early: Early | None
    early_made: list[np.ndarray]  # the same of the early states [S, E, ...]; [] if none
    at_once: bool  # every seed has as many states, whatever it reached: where all are early, or all trajectories of one length


class At(NamedTuple):
    """N states that were reached, step by step and, at a step, seed by seed."""

    t: np.ndarray  # at this step
    s: np.ndarray  # of this seed
    b: np.ndarray  # by this trajectory
    number: np.ndarray  # which it was, in the environment's order


def of(x: np.ndarray, here: np.ndarray | None) -> np.ndarray:
    """The rows `here`; None: all of them, as they are."""
    return x if here is None else x.take(here, 0)


@lru_cache(maxsize=16)
def _first_features(env: Any) -> Tensor:
    """[1, 1, F] of the first state."""
    return env.features(env.initial((1, 1)))


class Network:
    """The logits of the policy's actions, step by step; early states are looked up by their numbers.

    Where all trajectories are of one length, those of several seeds go through it at once. Elsewhere only those that go on do, seed by seed:
    how many they are in one seed must not touch, through the rounding of a larger product, the figures of another.
    """

    def __init__(self, policy: Any, batch: int, steps: int, trace: bool):
        trunk, env, seeds = policy.trunk, policy.env, policy.num_seeds
        mlp = inner_mlp(trunk)
        self.env, self.steps, self.keeps, self.batch, self.at_once = env, steps, trace, batch, env.free and seeds > 1
        self.table = trunk.table.weight.numpy() if type(trunk) is _LookupTrunk else None
        first, *rest = mlp.layers
        columns = policy.head.weight.shape[2] if trace else env.num_moves
        self.layers = [(layer.weight, layer.bias) for layer in rest]
        self.layers.append((policy.head.weight[..., :columns], policy.head.bias[..., :columns]))
        self.seed = np.arange(seeds).repeat(batch)  # of each trajectory that goes on
        self.early = policy.early(steps, batch)
        self.made, self.early_made = list[list[np.ndarray]](), list[np.ndarray]()
        if self.early is not None:
            features = env.features(self.early.states) if self.early.features is None else self.early.features
            self.early_made = self._at_once(first(features.expand(seeds, -1, -1)).numpy(), np.arange(len(features))[None])
        self.needed = self.early is None or self.early.steps < steps  # whether there are others
        if self.needed:
            begun = first.bias if mlp.blank else first(_first_features(env).expand(seeds, -1, -1))
            self.sums = begun.squeeze(1).numpy().repeat(batch, 0)  # of the first layer, before its rectifier
            self.rows, self.features = _switched(env, first.weight.numpy()), first.weight.shape[1]
            if not self.at_once:
                by_layer = [zip(bias.squeeze(1).unbind(), weight.unbind(), strict=True) for weight, bias in self.layers]
                self.of_seed = list(zip(*by_layer, strict=True))  # biases and weights of its layers

    def logits(self, t: int, number: np.ndarray) -> np.ndarray:
        """[n, M] of the trajectories that go on, at the states of these numbers; nobody may write into them."""
        if self.early is not None and t < self.early.steps:
            given = self.early_made[-1]
            row = number if len(given) == 1 else number + self.seed * given.shape[1]
            return given.reshape(-1, given.shape[2]).take(row, 0)[:, : self.env.num_moves]
        found = [self._all_seeds(number)] if self.at_once else self._seed_by_seed(number)
        if self.keeps:
            self.made += found
        heads = [made[-1] for made in found]
        return (heads[0] if len(heads) == 1 else np.concatenate(heads))[:, : self.env.num_moves]

    def _all_seeds(self, number: np.ndarray) -> list[np.ndarray]:
        """Each layer's outputs [n, ...] and the head's, in one go."""
        shape = (-1, self.batch)
        made = self._at_once(self.sums.reshape(*shape, self.sums.shape[1]), number.reshape(shape))
        return [x.reshape(-1, x.shape[2]) for x in made]

    def _seed_by_seed(self, number: np.ndarray) -> list[list[np.ndarray]]:
        """The same of each seed of which a trajectory goes on; each in memory of its own, because rounding depends on where numbers begin."""
        if len(self.of_seed) == 1:
            return [self._one_seed(0, self.sums, number)]
        ends = np.searchsorted(self.seed, np.arange(len(self.of_seed) + 1)).tolist()
        parts = [(seed, slice(begin, end)) for seed, (begin, end) in enumerate(pairwise(ends)) if begin < end]
        return [self._one_seed(seed, self.sums[part], number[part]) for seed, part in parts]

    def _one_seed(self, seed: int, sums: np.ndarray, number: np.ndarray) -> list[np.ndarray]:
        made = [np.maximum(sums, 0)]
        hidden = torch.from_numpy(made[0])
        *layers, (head_bias, head) = self.of_seed[seed]
        for bias, weight in layers:
            hidden = torch.addmm(bias, hidden, weight).relu_()
            made.append(hidden.numpy())
        if self.table is not None:
            hidden = torch.cat([hidden, torch.from_numpy(self._known(seed, number))], -1)
        made.append(torch.addmm(head_bias, hidden, head).numpy())
        return made

    def _at_once(self, sums: np.ndarray, number: np.ndarray) -> list[np.ndarray]:
        """Each layer's outputs [S, R, ...] and the head's, of R states of each seed."""
        hidden = torch.from_numpy(np.maximum(sums, 0))
        made = [hidden.numpy()]
        *layers, (head, head_bias) = self.layers
        for weight, bias in layers:
            hidden = torch.baddbmm(bias, hidden, weight).relu_()
            made.append(hidden.numpy())
        if self.table is not None:
            hidden = torch.cat([hidden, torch.from_numpy(self._known(np.arange(len(sums))[:, None], number))], -1)
        made.append(torch.baddbmm(head_bias, hidden, head).numpy())
        return made

    def _known(self, seed: Any, number: np.ndarray) -> np.ndarray:
        """The look-up table's rows."""
        assert self.table is not None
        return self.table[seed, np.minimum(number, self.table.shape[1] - 1)]

    def switch(self, kept: np.ndarray | None, feature: np.ndarray) -> None:
        """Of the trajectories that went on until now, those `kept` (None: all) go on, and a move has set these features of theirs."""
        if kept is not None:
            self.seed = self.seed.take(kept)
        if self.needed:
            self.sums = of(self.sums, kept)
            several = self.rows.shape[0] > self.features
            self.sums += self.rows.take(feature + self.seed * self.features if several else feature, 0)

    def _by_seed(self, steps: list[np.ndarray]) -> np.ndarray:
        """[n, H] of each step as [S, T * B, H]."""
        wide = steps[0].shape[1]
        return np.stack([x.reshape(-1, self.batch, wide) for x in steps], 1).reshape(-1, len(steps) * self.batch, wide)

    def trace(self, at: At, final: np.ndarray) -> Trace:
        """Of a walk that has ended: the states that it met, and the numbers of the last ones [S, B]."""
        made = list[np.ndarray]()
        while self.made and self.made[0]:  # layer by layer, each but once in memory
            steps = [step.pop() for step in self.made]
            by_seed = self.at_once and bool(made)  # who learns goes back through hidden layers so; the head's outputs he reads step by step
            made.insert(0, self._by_seed(steps) if by_seed else np.concatenate(steps))
        return Trace(at, made, torch.from_numpy(final), self.early, self.early_made, self.env.free or not self.needed)


def _switched(env: Any, weight: np.ndarray) -> np.ndarray:
    """[S * F, H]: what each feature [S, F, H] that a move has set adds to the first layer. On a grid the one before it is taken away."""
    flat = weight.reshape(-1, weight.shape[2])
    if isinstance(env, Strings):
        return flat
    both = np.empty_like(flat)
    np.subtract(flat[1:], flat[:-1], out=both[1:])
    return both
