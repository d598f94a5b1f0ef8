"""Facts about every environment: moves can be undone, and edges counted forwards are the edges counted backwards."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stochflow.worlds.check import check_env
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

letters = st.sampled_from(["AB", "ACG", "ACGT", "ABCDE"])
grids = st.builds(Grid, st.integers(1, 3), st.integers(2, 5))
fixed = st.builds(Strings, letters, st.integers(1, 4))
variable = st.tuples(letters, st.integers(1, 4), st.integers(0, 4)).map(lambda x: Strings(x[0], x[1], min(x[2], x[1])))
envs = st.one_of(grids, fixed, variable)
few = settings(max_examples=40, deadline=None)


@few
@given(envs)
def test_step_and_unstep_are_inverse(env):
    states = env.all_states()
    here, move = env.real_moves(env.moves(states)).nonzero(as_tuple=True)
    child = env.step(states[here], move)
    assert torch.equal(env.unstep(child, move), states[here])
    assert bool(env.parents(child).gather(1, move.unsqueeze(1)).all())
    here, move = env.parents(states).nonzero(as_tuple=True)
    parent = env.unstep(states[here], move)
    assert torch.equal(env.step(parent, move), states[here])
    assert bool(env.moves(parent).gather(1, move.unsqueeze(1)).all())


@few
@given(envs)
def test_forward_and_backward_edges_are_the_same(env):
    states = env.all_states()
    here, move = env.real_moves(env.moves(states)).nonzero(as_tuple=True)
    forward = set(zip(here.tolist(), move.tolist(), env.index(env.step(states[here], move)).tolist(), strict=True))
    here, move = env.parents(states).nonzero(as_tuple=True)
    backward = set(zip(env.index(env.unstep(states[here], move)).tolist(), move.tolist(), here.tolist(), strict=True))
    assert forward == backward
    if env.tree:
        assert len(forward) == len(states) - 1


@few
@given(envs)
def test_enumeration_is_complete_and_ordered(env):
    states = env.all_states()
    assert torch.equal(env.index(states), torch.arange(len(states)))
    assert torch.equal(states[0], env.initial(()))
    here, move = env.real_moves(env.moves(states)).nonzero(as_tuple=True)
    to = env.index(env.step(states[here], move))
    assert bool((to > here).all())
    assert set(to.tolist()) == set(range(1, len(states)))


@few
@given(envs)
def test_stop_and_completeness(env):
    states = env.all_states()
    mask = env.moves(states)
    if env.stop is not None:
        assert torch.equal(env.step(states, torch.full((len(states),), env.stop)), states)
        assert not bool(env.parents(states)[:, env.stop].any())
    assert torch.equal(env.complete(states), ~env.real_moves(mask).any(1))
    assert bool(env.features(states).isfinite().all())


@few
@given(envs, st.integers(0, 2**31 - 1))
def test_every_walk_ends_at_the_horizon_at_latest(env, seed):
    assert check_env(env, samples=4, seed=seed).enumerated


@few
@given(st.one_of(fixed, variable), st.data())
def test_texts_and_tokens_round_trip(env, data):
    low = env.length if env.min_length is None else 0
    texts = data.draw(st.lists(st.text(env.alphabet, min_size=low, max_size=env.length), min_size=1, max_size=5))
    assert env.decode(env.encode(texts)) == texts
