"""Which early states are shared, on any device: what sharing computes is held to torch by test_operations on a GPU."""

from __future__ import annotations

import pytest
import torch

from stochflow.engines.cuda.early import LEAST_SAVED, MOST_SHARED, early
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings


@pytest.mark.parametrize("env", [Grid(2, 8), Strings("ACGT", 8), Strings("ACG", 6, 2)], ids=repr)
def test_early_states_are_the_first_of_the_list_and_hold_all_that_can_be_met(env):
    policy, batch = Policy(env, MLP(16, 2)), 4096
    found = early(policy, env.horizon, batch)
    assert found is not None
    assert torch.equal(found.states, env.all_states()[: len(found.states)])
    assert len(found.states) <= MOST_SHARED * batch
    assert found.steps * batch - len(found.states) >= LEAST_SAVED
    state = env.initial((2000,))
    for _ in range(found.steps - 1):  # any walk of fewer moves stays among them
        legal = env.real_moves(env.moves(state))
        move = torch.where(legal, torch.rand(legal.shape), -1.0).argmax(-1)
        state = torch.where(legal.any(-1, keepdim=True), env.step(state, move), state)
        assert int(env.index(state).max()) < len(found.states)
    assert torch.equal(found.features, env.features(found.states))
    assert early(policy, env.horizon, batch) is found  # kept


def test_few_trajectories_and_contexts_share_nothing():
    assert early(Policy(Strings("ACGT", 8), MLP(16, 2)), 8, 16) is None
    conditioned = Conditioned(Strings("ACGT", 4), torch.eye(2))
    assert early(Policy(conditioned, MLP(16, 2)), 4, 4096) is None
