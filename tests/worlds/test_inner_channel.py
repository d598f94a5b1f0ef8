"""Noise under a condition: a channel sees the inner state, wherever it is asked."""

import pytest
import torch

from stochflow import Policy, Strings, Task
from stochflow.errors import UserError
from stochflow.law.exact import Graph, exact_law
from stochflow.law.exact_memory import memory_law
from stochflow.learn.rollout import rollout
from stochflow.nets.mlp import MLP
from stochflow.noise.dynamics import Known, Neural
from stochflow.scores.rewards import Power
from stochflow.worlds.channels import Exact, Slip
from stochflow.worlds.check_task import check_channel
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.env import Channel, Inside


class AfterG(Channel):
    """The letter after a G is always a C: it reads the string, and refuses states of any other width."""

    def __init__(self, length: int):
        self.length = length

    def log_probs(self, state, legal, action, memory=None):
        assert state.shape[-1] == self.length
        filled = (state < 4).sum(-1)
        last = state.gather(-1, (filled - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
        move = torch.where((filled > 0) & (last == 2), 1, action)
        return torch.where(torch.arange(legal.shape[-1]) == move.unsqueeze(-1), 0.0, -1e9)


class Wearing(Channel):
    """Memory: how many letters were written; it slips to the first letter once it has written one."""

    def begin(self, state):
        assert state.shape[-1] == 3
        return torch.zeros(state.shape[:-1], dtype=torch.long)

    def remember(self, memory, state, action, move):
        assert state.shape[-1] == 3
        return memory + 1

    def log_probs(self, state, legal, action, memory=None):
        move = torch.where(memory > 0, 0, action)
        return torch.where(torch.arange(legal.shape[-1]) == move.unsqueeze(-1), 0.0, -1e9)


def conditioned(length: int = 3) -> Conditioned:
    return Conditioned(Strings("ACGT", length), torch.tensor([[0.0], [1.0]]))


def scored(state):
    return 1.0 + (state == 1).sum(-1).float()


def test_the_law_under_each_condition_is_that_of_the_inner_world():
    env, channel = conditioned(), AfterG(3)
    torch.manual_seed(0)
    table = torch.randn(Strings("ACGT", 3).count(), 4)
    inner = Graph(env.inner)

    def policy(states):  # of states under a condition or without one: the same table
        from stochflow.nets.policy import PolicyOut

        logits = table[env.inner.index(states[..., -3:])]
        return PolicyOut(logits, logits, None, logits[..., 0])

    wanted = exact_law(inner, channel, policy, seeds=1)
    for row in (0, 1):
        assert torch.allclose(exact_law(Graph(env, row), channel, policy, seeds=1), wanted)
    assert float(wanted.sum()) == pytest.approx(1.0)
    has_gt = torch.tensor(["GT" in text for text in env.inner.decode(inner.states)])
    assert float(wanted[0, has_gt].sum()) == 0.0


def test_trajectories_follow_the_letters_and_not_the_condition():
    env = conditioned()
    task = Task(env, AfterG(3), scored, Power(1.0))
    policy = Policy(env, MLP(8, 1))
    torch.manual_seed(0)
    texts = env.decode(rollout(task, policy, 500).states[-1][0])
    assert any("G" in t[:2] for t in texts)
    assert all(t[i + 1] == "C" for t in texts for i in range(2) if t[i] == "G")


def test_it_is_checked_and_known_as_it_is_used():
    env = conditioned()
    check_channel(Slip(0.2), env)
    with pytest.raises(UserError, match="no action brings about move"):  # it is asked about strings, and found out
        check_channel(AfterG(3), env)
    assert isinstance(Known(env, AfterG(3)).channel, Inside)
    state = env.step(env.initial((1, 1)), torch.tensor([[2]]))
    legal = env.real_moves(env.moves(state))
    law = Known(env, AfterG(3)).marginal(state, legal, torch.full((1, 1, 4), 0.25).log()).exp()
    assert law[0, 0].tolist() == pytest.approx([0, 1, 0, 0])


def test_memory_is_of_the_inner_state_too():
    env = conditioned()
    task = Task(env, Wearing(), scored, Power(1.0))
    policy = Policy(env, MLP(8, 1))
    law = memory_law(Graph(env, 1), task.channel, policy)
    ends = law.law[0] > 0
    assert all(t[1:] == "AA" for t in env.decode(Graph(env, 1).states[ends]))


def test_a_task_keeps_one_wrapping_whatever_it_is_made_from():
    env, channel = conditioned(), AfterG(3)
    task = Task(env, channel, scored, Power(1.0))
    again = Task(task.env, task.channel, task.oracle, task.reward)
    assert isinstance(again.channel, Inside)
    assert again.channel.channel is channel
    assert task._replace(env=env.inner).channel is channel
    assert isinstance(task._replace(channel=AfterG(3)).channel, Inside)
    for plain in (Exact(), Slip(0.1)):  # which look at no state stay what engines know
        assert Task(env, plain, scored, Power(1.0)).channel is plain

    class OfTheCondition(AfterG):
        whole = True

    model = Neural(env, seeds=[0])  # built for these states
    assert Task(env, model, scored, Power(1.0)).channel is model
    every = OfTheCondition(4)
    assert Task(env, every, scored, Power(1.0)).channel is every
