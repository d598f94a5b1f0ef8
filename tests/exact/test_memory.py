"""Worlds with a memory: their laws by brute force over histories, by sampling, and by the kernel that a policy of states sees."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chisquare

from stochflow.errors import UserError
from stochflow.law.exact import Graph, exact_law
from stochflow.law.exact_memory import Averaged, memory_law
from stochflow.learn.rollout import rollout
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.ops import masked_log_softmax
from stochflow.scores.rewards import Linear
from stochflow.types import Task
from stochflow.worlds.channels import Confusion, Exact, Slip
from stochflow.worlds.grid import Grid
from stochflow.worlds.memory import Fatigue, Regime
from stochflow.worlds.strings import Strings

SHIFT = 0.8 * torch.eye(3).roll(1, 1) + 0.2 / 3


def sharp_policy(env, seeds=(0, 1)) -> Policy:
    policy = Policy(env, MLP(16, 1), seeds=seeds)
    with torch.no_grad():
        policy.head.weight.mul_(20)
    return policy


def channels(env) -> dict:
    return {
        "fatigue": Fatigue(alpha=0.2, growth=0.6, limit=1.0),
        "fatigue, capped": Fatigue(alpha=0.2, growth=0.5, limit=0.6),
        "regime": Regime(env, [Slip(0.1), Confusion(SHIFT)], stay=0.9, start=[0.7, 0.3]),
        "three regimes": Regime(env, [Slip(0.1), Slip(0.9), Confusion(SHIFT)], stay=0.6),
    }


NAMES = list(channels(Strings("ABC", 2)))


def fatigue_chance(channel: Fatigue, actions, moves) -> float:
    """Of these moves, given these actions, by the definition."""
    overruled, p = 0, 1.0
    for a, m in zip(actions, moves, strict=True):
        alpha = min(channel.limit, channel.alpha + channel.growth * overruled)
        p *= (1 - alpha) * (a == m) + alpha / 3
        overruled += a != m
    return p


def regime_chance(channel: Regime, actions, moves) -> float:
    """The same, by summing over every sequence of hidden regimes."""
    total, many = 0.0, len(channel.channels)
    tables = []
    for c in channel.channels:
        told = [
            c.log_probs(torch.zeros(2, dtype=torch.long), torch.ones(3, dtype=torch.bool), torch.tensor(a)).exp()
            for a in range(3)
        ]
        tables.append(torch.stack(told))
    for hidden in itertools.product(range(many), repeat=len(moves)):
        p = channel.start[hidden[0]]
        for before, after in itertools.pairwise(hidden):
            p *= channel.stay if before == after else (1 - channel.stay) / (many - 1)
        for r, a, m in zip(hidden, actions, moves, strict=True):
            p *= float(tables[r][a, m])
        total += p
    return total


@pytest.mark.parametrize("name", NAMES)
def test_the_law_is_that_of_all_histories(name):
    """Every (actions, moves) history by its own definition; regimes are summed out one sequence at a time."""
    env = Strings("ABC", 3)
    channel = channels(env)[name]
    policy = sharp_policy(env)
    graph = Graph(env)
    want = torch.zeros(2, len(graph), dtype=torch.float64)
    with torch.no_grad():
        log_pi = masked_log_softmax(policy(graph.states.expand(2, -1, -1)).forward.double(), graph.mask)
    for moves in itertools.product(range(3), repeat=3):
        at, row = graph.root, []
        for m in moves:
            row.append(at)
            at = int(graph.child[at, m])
        for actions in itertools.product(range(3), repeat=3):
            world = (
                fatigue_chance(channel, actions, moves)
                if isinstance(channel, Fatigue)
                else regime_chance(channel, actions, moves)
            )
            want[:, at] += world * log_pi[:, row, list(actions)].sum(1).exp()
    found = memory_law(graph, channel, policy)
    torch.testing.assert_close(found.law, want, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.law.sum(1), torch.ones(2, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("min_length", [None, 1])
@pytest.mark.parametrize("name", NAMES)
def test_rollouts_follow_the_law(name, min_length):
    env = Strings("ABC", 3, min_length)
    channel = channels(env)[name]
    policy = sharp_policy(env, (0,))
    graph = Graph(env)
    law = memory_law(graph, channel, policy).law[0]
    drawn = torch.bincount(
        env.index(rollout(Task(env, channel, None, Linear()), policy, 20_000).states[-1][0]), minlength=len(graph)
    )
    big = law * 20_000 > 5
    seen = torch.cat([drawn[big], drawn[~big].sum().view(1)]).double()
    want = torch.cat([law[big], law[~big].sum().view(1)]) * 20_000
    keep = want > 1e-3
    assert chisquare(seen[keep].numpy(), (want[keep] / want[keep].sum() * seen[keep].sum()).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("min_length", [None, 1])
@pytest.mark.parametrize("name", NAMES)
def test_the_averaged_kernel_gives_the_same_law_to_the_policy_it_was_averaged_under(name, min_length):
    """Why a kernel of states, learned on-policy, is not biased: for pi(a|s) nothing else about the memory matters."""
    env = Strings("ABC", 4, min_length)
    channel = channels(env)[name]
    policy = sharp_policy(env)
    graph = Graph(env)
    found = memory_law(graph, channel, policy)
    torch.testing.assert_close(exact_law(graph, Averaged(graph, found.kernel), policy), found.law, atol=1e-7, rtol=0)
    other = sharp_policy(env, (7, 8))
    gap = exact_law(graph, Averaged(graph, found.kernel), other) - memory_law(graph, channel, other).law
    assert float(gap.abs().sum(1).min()) > 1e-3  # and for another policy it is not its kernel


def test_a_channel_without_memory_has_its_usual_law():
    for env in (Strings("ABC", 3, 1), Grid(2, 4)):
        graph, policy = Graph(env), sharp_policy(env)
        for channel in (Exact(), Slip(0.3)):
            torch.testing.assert_close(
                memory_law(graph, channel, policy).law, exact_law(graph, channel, policy), atol=1e-7, rtol=0
            )


def test_a_sufficient_memory_is_short():
    env = Strings("ABC", 4)
    graph, policy = Graph(env), sharp_policy(env)
    counted = memory_law(graph, Fatigue(0.2, 0.6, 1.0), policy).pairs
    assert counted == sum(3**t * (t + 1) for t in range(5))  # strings of t letters, overruled 0 to t times
    assert memory_law(graph, Slip(0.2), policy).pairs == len(graph)


def test_regimes_that_are_alike_are_no_regimes():
    env = Strings("ABC", 3)
    graph, policy = Graph(env), sharp_policy(env)
    same = Regime(env, [Slip(0.3), Slip(0.3)], stay=0.7)
    torch.testing.assert_close(
        memory_law(graph, same, policy).law, exact_law(graph, Slip(0.3), policy), atol=1e-7, rtol=0
    )


def test_the_closed_form_of_fatigue_is_the_sum_over_actions():
    env = Strings("ABC", 3, 1)
    channel = Fatigue(0.2, 0.3, 0.7)
    state = env.all_states()
    mask = env.moves(state)
    log_pi = masked_log_softmax(torch.randn(mask.shape), mask)
    memory = torch.randint(4, (len(state), 1))
    legal = env.real_moves(mask)
    slow = super(Fatigue, channel).marginal(state, legal, log_pi, memory)
    fast = channel.marginal(state, legal, log_pi, memory)
    torch.testing.assert_close(fast[legal], slow[legal], atol=1e-6, rtol=1e-6)


def test_an_unknown_action_leaves_no_trace():
    env = Strings("ABC", 3)
    state = env.initial((4,))
    move, unknown = torch.tensor([0, 1, 2, 0]), torch.full((4,), -1)
    tired = Fatigue(0.2)
    assert torch.equal(tired.remember(tired.begin(state), state, unknown, move), tired.begin(state))
    hidden = Regime(env, [Slip(0.1), Slip(0.8)], stay=1.0, start=[0.25, 0.75])
    torch.testing.assert_close(hidden.remember(hidden.begin(state), state, unknown, move), hidden.begin(state))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda e: Fatigue(1.5), "probability"),
        (lambda e: Fatigue(0.5, -0.1), "growth >= 0"),
        (lambda e: Fatigue(0.5, 0.1, 0.2), "alpha <= limit"),
        (lambda e: Regime(e, [Slip(0.1)]), "at least two channels"),
        (lambda e: Regime(e, [Slip(0.1), Slip(0.2)], stay=1.2), "between 0 and 1"),
        (lambda e: Regime(e, [Slip(0.1), Slip(0.2)], start=[0.5, 0.6]), "sum to 1"),
    ],
)
def test_what_makes_no_sense_is_named(make, words):
    with pytest.raises(UserError, match=words):
        make(Strings("ABC", 3))
