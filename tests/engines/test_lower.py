"""The lowered rules of a world are those of the environment itself, along random walks."""

from __future__ import annotations

import pytest
import torch

from stochflow.engines.lower import lower
from stochflow.engines.numba.rules import feature, filled, legal, successor
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.env import Env
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

WORLDS = [Grid(1, 5), Grid(2, 8), Grid(3, 4), Strings("ACGT", 4), Strings("AB", 6), Strings("ACG", 5, 2)]


class Mine(Grid):
    """A subclass, whose rules may be its own."""


@pytest.mark.parametrize("env", WORLDS, ids=repr)
def test_legal_moves_successors_and_features_are_those_of_the_environment(env):
    rules = lower(env)
    assert rules is not None
    assert (rules.moves, rules.columns, rules.horizon) == (env.num_moves, env.state_dim, env.horizon)
    assert (rules.tree, rules.free) == (env.tree, env.free)
    assert rules.stop == (-1 if env.stop is None else env.stop)
    state = env.initial((40,))
    stopped = torch.zeros(40, dtype=torch.bool)
    assert bool((state == rules.blank).all())
    generator = torch.Generator().manual_seed(0)
    for t in range(env.horizon + 1):
        mask, number, on = env.moves(state), env.index(state), env.features(state)
        for one in range(len(state)):
            if stopped[one]:
                continue
            here = state[one].tolist()
            for move in range(env.num_moves):
                at = 0 if rules.append else here[min(move, env.state_dim - 1)]
                wanted = bool(mask[one, move])
                if rules.append and t == env.horizon:  # compiled loops never look further
                    continue
                assert legal.py_func(rules, t, at, move) == wanted
                if wanted and move != rules.stop:
                    after = env.step(state[one], torch.tensor(move))
                    assert successor.py_func(rules, int(number[one]), move) == int(env.index(after))
            flags = [feature.py_func(rules, c, here[c]) for c in range(filled.py_func(rules, t))]
            assert sorted(flags) == on[one].nonzero().flatten().tolist()
        real = env.real_moves(mask)
        stopped |= ~real.any(-1)
        draws = torch.where(real, torch.rand(real.shape, generator=generator), -1.0)
        state = torch.where(stopped.unsqueeze(-1), state, env.step(state, draws.argmax(-1)))


@pytest.mark.parametrize("env", [Mine(2, 4), Conditioned(Strings("ACGT", 3), torch.eye(2))], ids=repr)
def test_other_environments_are_left_to_plain_torch(env: Env):
    assert lower(env) is None
