"""The replay buffer gives back exactly what it was given, oldest out first, and draws as it says."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from stochflow.errors import UserError
from stochflow.learn.buffer import Buffer, join
from stochflow.learn.rollout import rollout
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.scores.rewards import Power
from stochflow.types import Task, Trajectories
from stochflow.worlds.channels import Slip
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

ENVS = {
    "grid": Grid(2, 4),
    "fixed": Strings("ACG", 4),
    "variable": Strings("ACG", 4, min_length=1),
    "conditioned": Conditioned(Strings("ACG", 4), torch.randn(5, 2, generator=torch.Generator().manual_seed(0))),
}


def walks(env, batch=6, seeds=2) -> Trajectories:
    torch.manual_seed(1)
    task = Task(env, Slip(0.3), lambda s: s.float().sum(-1), Power())
    policy = Policy(env, MLP(8, 1), seeds=range(seeds))
    row = None if env.contexts is None else torch.randint(len(env.contexts), (seeds, batch))
    t = rollout(task, policy, batch, row=row)
    return Trajectories(t.states, t.actions, t.moves, t.alive, torch.rand(seeds, batch), t.real)


@pytest.mark.parametrize("name", ENVS)
def test_what_goes_in_comes_out(name):
    env = ENVS[name]
    traj = walks(env)
    buffer = Buffer(env, 10, seeds=2)
    buffer.add(traj)
    back = buffer.rebuild(torch.arange(6).expand(2, 6))
    assert torch.equal(back.states, traj.states)
    assert torch.equal(back.alive, traj.alive)
    assert torch.equal(back.score, traj.score)
    assert torch.equal(torch.where(back.alive, back.moves, -1), torch.where(traj.alive, traj.moves, -1))
    assert torch.equal(torch.where(back.alive, back.actions, -1), torch.where(traj.alive, traj.actions, -1))


def test_the_oldest_make_room():
    env = ENVS["fixed"]
    first, second = walks(env, 6), walks(env, 6)
    second = second._replace(score=second.score + 10)
    buffer = Buffer(env, 8, seeds=2)
    buffer.add(first)
    buffer.add(second)
    kept = buffer.rebuild(torch.arange(8).expand(2, 8)).score
    assert torch.equal(kept[:, [6, 7, 0, 1, 2, 3]], second.score)
    assert torch.equal(kept[:, 4:6], first.score[:, 4:6])


def test_draws_are_uniform_over_what_is_there():
    env = ENVS["fixed"]
    buffer = Buffer(env, 50, seeds=2)
    traj = walks(env, 10)
    traj = traj._replace(score=torch.arange(10.0).expand(2, 10))
    buffer.add(traj)
    torch.manual_seed(0)
    counts = torch.bincount(buffer.sample(4000).score.long().flatten(), minlength=10)
    assert counts.sum() == 8000
    assert len(counts) == 10
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


def test_priority_prefers_the_best_tenth():
    env = ENVS["fixed"]
    buffer = Buffer(env, 40, seeds=1, priority=0.5)
    traj = walks(env, 20, seeds=1)
    traj = traj._replace(score=torch.arange(20.0).unsqueeze(0))
    buffer.add(traj)
    torch.manual_seed(0)
    counts = torch.bincount(buffer.sample(8000).score.long().flatten(), minlength=20).double()
    expected = torch.full((20,), 0.5 / 20, dtype=torch.float64)
    expected[18:] += 0.25  # half of the draws, spread over the best two of twenty
    assert stats.chisquare(counts.numpy(), 8000 * expected.numpy()).pvalue > 1e-4


def test_join_keeps_both():
    env = ENVS["grid"]
    a, b = walks(env, 3), walks(env, 4)
    both = join(a, b)
    assert torch.equal(both.states[:, :, :3], a.states)
    assert torch.equal(both.states[:, :, 3:], b.states)
    assert both.score.shape == (2, 7)


def test_a_batch_that_does_not_fit_is_named():
    buffer = Buffer(ENVS["grid"], 3, seeds=2)
    with pytest.raises(UserError, match=r"batch of 6.*buffer of 3"):
        buffer.add(walks(ENVS["grid"], 6))
