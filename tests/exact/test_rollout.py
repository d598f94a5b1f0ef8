"""What is sampled is what the exact law says, forwards and backwards, with noise and with exploration."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from stochflow.law.exact import Graph, exact_law
from stochflow.learn.evaluate import evaluate
from stochflow.learn.rollout import backward_rollout, explored, rollout
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known
from stochflow.scores.rewards import Power
from stochflow.types import Task
from stochflow.worlds.channels import Confusion, Exact, Neighbour, Slip
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

ENVS = [Grid(2, 3), Grid(3, 3), Strings("ACG", 3), Strings("AC", 4, min_length=1)]
CHANNELS = [Exact(), Slip(0.3), Slip(1.0), Neighbour(0.4)]


def world(env, channel) -> tuple[Task, Policy]:
    task = Task(env, channel, lambda s: 1.0 + s.float().sum(-1), Power())
    policy = Policy(env, MLP(8, 1), seeds=(0, 1))
    with torch.no_grad():
        policy.head.weight.mul_(20)  # far from uniform
    return task, policy


@pytest.mark.parametrize("channel", CHANNELS, ids=repr)
@pytest.mark.parametrize("env", ENVS, ids=repr)
def test_sampled_law_matches_the_exact_one(env, channel):
    task, policy = world(env, channel)
    graph = Graph(env)
    law = exact_law(graph, channel, policy)
    torch.manual_seed(0)
    ends = env.index(rollout(task, policy, 20_000).states[-1])
    for seed in range(2):
        counts = torch.bincount(ends[seed], minlength=len(law[seed])).double()
        expected = 20_000 * law[seed]
        assert counts[expected < 1e-6].sum() == 0
        often = expected >= 5
        seen = torch.cat([counts[often], counts[~often].sum().unsqueeze(0)])
        hoped = torch.cat([expected[often], expected[~often].sum().unsqueeze(0)])
        if hoped[-1] < 1:
            seen, hoped = seen[:-1], hoped[:-1]
        if len(hoped) > 1:
            assert stats.chisquare(seen.numpy(), (hoped / hoped.sum() * seen.sum()).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("env", [Grid(2, 3), Strings("AC", 6, min_length=1)], ids=repr)
def test_one_seed_that_ends_early_has_the_same_law_and_shapes(env):
    """On the CPU the rollout of a single seed stops when its last trajectory has; what is left is filled with the end."""
    task, _ = world(env, Slip(0.3))
    policy = Policy(env, MLP(8, 1), seeds=(0,))
    torch.manual_seed(0)
    many = [rollout(task, policy, 3) for _ in range(2000)]
    early = [not bool(x.alive[-1].any()) for x in many]
    assert any(early)
    assert {x.states.shape for x in many} == {(env.horizon + 1, 1, 3, env.state_dim)}
    for x in many[:50]:
        assert torch.equal(x.states[1:][~x.alive], x.states[:-1][~x.alive])
        assert torch.equal(
            torch.where(x.alive.unsqueeze(-1), env.step(x.states[:-1], x.moves), x.states[:-1]), x.states[1:]
        )
    law = exact_law(Graph(env), task.channel, policy)[0]
    counts = torch.bincount(torch.cat([env.index(x.states[-1, 0]) for x in many]), minlength=len(law)).double()
    often = law * counts.sum() >= 5
    expected = law[often] / law[often].sum() * counts[often].sum()
    assert stats.chisquare(counts[often].numpy(), expected.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("env", ENVS, ids=repr)
def test_probability_of_a_path_sums_to_the_exact_law(env):
    """exp(sum log_move) of backward paths, weighted by 1 / P_B, estimates the law of each object without bias."""
    task, policy = world(env, Slip(0.3))
    law = exact_law(Graph(env), task.channel, policy)
    ends = Graph(env).terminal.nonzero().flatten()
    final = env.all_states()[ends].repeat_interleave(400, 0).expand(2, -1, -1)
    torch.manual_seed(0)
    traj = backward_rollout(task, policy, final)
    assert torch.equal(traj.states[-1], final)
    assert torch.equal(traj.states[0], env.initial(tuple(final.shape[:2])))
    with torch.no_grad():
        terms = evaluate(task, policy, Known(env, task.channel), traj, None, frozenset({"log_move", "log_pb"}))
    weight = (terms.log_move - terms.log_pb).sum(0).double().exp().view(2, len(ends), 400)
    error = weight.std(-1) / 20 + 1e-6
    assert (((weight.mean(-1) - law[:, ends]) / error).abs() < 5).all()


def test_backward_rollouts_are_not_real_and_carry_no_actions():
    task, policy = world(ENVS[0], Slip(0.3))
    traj = backward_rollout(task, policy, ENVS[0].all_states().expand(2, -1, -1))
    assert not traj.real.any()
    assert (traj.actions == -1).all()


def test_finished_trajectories_stand_still():
    env = Grid(2, 3)
    task, policy = world(env, Slip(0.3))
    torch.manual_seed(0)
    traj = rollout(task, policy, 500)
    stopped = (traj.moves == env.stop) & traj.alive
    later = stopped.long().cumsum(0) > 0
    assert not (traj.alive[1:] & later[:-1]).any()
    frozen = ~traj.alive
    assert torch.equal(traj.states[1:][frozen], traj.states[:-1][frozen])
    assert (stopped.sum(0) <= 1).all()
    assert (traj.alive.sum(0) >= 1).all()


def test_exploration_mixes_in_the_uniform_law():
    torch.manual_seed(0)
    mask = torch.tensor([True, True, False, True])
    logits = torch.tensor([2.0, 0.0, 9.0, -1.0], dtype=torch.float64)
    n = 40_000
    mixed = explored(logits.expand(n, 4), mask.expand(n, 4), torch.rand(n) >= 0.3)
    from stochflow.ops import gumbel_argmax

    counts = torch.bincount(gumbel_argmax(mixed), minlength=4).double()
    pi = torch.where(mask, logits.exp(), 0)
    expected = 0.7 * pi / pi.sum() + 0.3 * mask / 3
    assert counts[2] == 0
    kept = [0, 1, 3]
    assert stats.chisquare(counts[kept].numpy(), n * expected[kept].double().numpy()).pvalue > 1e-4


def test_stop_is_never_slipped_to_nor_away_from():
    env = Strings("AC", 3, min_length=0)
    task, policy = world(env, Slip(1.0))
    torch.manual_seed(0)
    traj = rollout(task, policy, 2000)
    assert torch.equal((traj.actions == env.stop) & traj.alive, (traj.moves == env.stop) & traj.alive)


def test_confusion_channel_is_followed():
    table = [[0.8, 0.2, 0.0], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]]
    env = Strings("ACG", 1)
    task, policy = world(env, Confusion(table))
    torch.manual_seed(0)
    traj = rollout(task, policy, 30_000)
    for a in range(3):
        meant = traj.actions[0] == a
        counts = torch.bincount(traj.moves[0][meant], minlength=3).double()
        expected = counts.sum() * torch.tensor(table[a], dtype=torch.float64)
        assert counts[expected == 0].sum() == 0
        keep = expected > 0
        assert stats.chisquare(counts[keep].numpy(), expected[keep].numpy()).pvalue > 1e-4
