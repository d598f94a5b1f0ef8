"""Rivals ask about different objects alone, never more than they may, and do what their names say."""

from __future__ import annotations

import pytest
import torch

from stochflow.baselines.rivals import RIVALS, Asker
from stochflow.errors import UserError
from stochflow.scores.ehrlich import Ehrlich
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings


def ones(states):
    return (states == 1).float().mean(-1)


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("min_length", [None, 5])
def test_each_object_is_asked_once_and_no_more_than_allowed(name, min_length):
    asked = []

    def score(states):
        asked.extend(map(tuple, states.tolist()))
        return ones(states)

    env = Strings("ACGT", 12, min_length)
    asker = Asker(env, score, 777)
    RIVALS[name](asker)
    assert len(asked) == len(set(asked)) == 777
    objects, scores = asker.answers()
    assert torch.equal(scores, ones(objects).double())
    assert int(env.lengths(objects).min()) >= (min_length or 12)


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_few_calls_or_none_are_not_exceeded_and_end_without_complaint(name, calls):
    """A run whose answers all came from a shared file has paid for none."""
    asker = Asker(Strings("ACGT", 12), lambda states: ones(states) * torch.nan, calls)
    RIVALS[name](asker)
    objects, scores = asker.answers()
    assert objects.shape == (calls, 12)
    assert scores.tolist() == [-torch.inf] * calls  # without a score: the worst there is


def test_a_small_space_ends_the_search():
    asker = Asker(Strings("AC", 4), ones, 1000)
    RIVALS["ga"](asker)
    assert len(asker.known) <= 16


def test_the_genetic_algorithm_climbs_where_random_search_does_not():
    """The number of C in 40 letters: the GA reaches nearly all of them within 3,000 calls, random search half."""
    best = {}
    for name in RIVALS:
        torch.manual_seed(0)
        asker = Asker(Strings("ACGT", 40), ones, 3000)
        RIVALS[name](asker)
        best[name] = float(asker.answers()[1].max())
    assert best["ga"] > 0.9
    assert best["random"] < best["mcmc"] < best["ga"]


def test_rules_of_the_world_and_known_sequences_are_respected():
    made = Ehrlich.random(8, 16, 2, 4)
    env = made.env()
    for name in RIVALS:
        asker = Asker(env, lambda x: made.score(x).float(), 300, env.encode([made.start()]))
        RIVALS[name](asker)
        objects, scores = asker.answers()
        assert bool(made.feasible(objects).all())
        assert env.decode(objects[:1]) == [made.start()]
        assert torch.equal(scores, made.score(objects))
    with pytest.raises(UserError, match="vary strings"):
        Asker(Grid(2, 4), ones, 10)
