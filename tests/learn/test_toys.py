"""Small worlds whose answer is known in closed form: what each objective ends at, and what a wrong one ends at."""

from __future__ import annotations

import pytest
import torch

from stochflow.law import metrics
from stochflow.law.exact import Graph, exact_law, target_law
from stochflow.law.floors import floor, limit_tv
from stochflow.learn.objectives import (
    HEAD,
    INTENDED,
    JOINT,
    MARGINAL,
    REALISED,
    SGFNKL,
    DetailedBalance,
    FlowKL,
    LogVariance,
    TrajectoryBalance,
    TrajectoryKL,
)
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known, Tabular
from stochflow.scores.oracles import Table
from stochflow.scores.rewards import Power
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Trainer
from stochflow.types import Task
from stochflow.worlds.channels import Exact, Slip
from stochflow.worlds.strings import Strings

pytestmark = pytest.mark.slow


def make_task(length, rewards, alpha):
    env = Strings("AB", length)
    return Task(env, Slip(alpha) if alpha else Exact(), Table(env, torch.tensor(rewards)), Power(1.0, 1e-6))


def train(task, objective, steps=400, explore=0.1, lr=2e-2, seeds=3, dynamics=None):
    """(law [S, leaves] of the averaged weights, the loss of each seed averaged over the last 50 steps)."""
    torch.manual_seed(0)
    rows = list(range(seeds))
    policy = Policy(task.env, MLP(16, 1), seeds=rows, back_action=objective.form.back_action)
    trainer = Trainer(
        task, policy, dynamics or Known(task.env, task.channel), objective, OnPolicy(task, policy, 64, explore), lr=lr
    )
    trainer.train(steps - 50)
    tail = []
    trainer.train(steps, 1, lambda t: tail.append(t.stats["loss"]))
    graph = Graph(task.env)
    with trainer.averaged():
        law = exact_law(graph, task.channel, policy)
    return law[:, graph.complete], torch.stack(tail).mean(0)


SOUND = {
    "SDB": DetailedBalance(JOINT),
    "SDB-M": DetailedBalance(MARGINAL),
    "SDB with a head": DetailedBalance(HEAD),
    "STB": TrajectoryBalance(JOINT),
    "STB-M": TrajectoryBalance(MARGINAL),
    "log-variance": LogVariance(JOINT),
    "flow KL": FlowKL(),
    "SGFN-KL": SGFNKL((0.5,)),
    "SGFN-KL-gamma": SGFNKL((0.25, 0.5, 0.75)),
    "trajectory KL": TrajectoryKL(),
}


@pytest.mark.parametrize("name", SOUND)
def test_two_terminals_are_drawn_as_one_to_two(name):
    """The published toy: rewards 1 and 2, and a world that flips the choice a quarter of the time (stick .5 of two letters)."""
    objective = SOUND[name]
    task = make_task(1, [1.0, 2.0], 0.5)
    steps = 1500 if objective.form is HEAD else 400  # there is more to learn
    law, _ = train(task, objective, steps, explore=0.0 if objective.on_policy else 0.1)
    assert law == pytest.approx(torch.tensor([[1 / 3, 2 / 3]] * 3).numpy(), abs=0.01)


def test_two_terminals_with_counted_dynamics():
    task = make_task(1, [1.0, 2.0], 0.5)
    law, _ = train(task, SGFNKL((0.5,)), dynamics=Tabular(task.env, [0, 1, 2]), steps=600)
    assert law == pytest.approx(torch.tensor([[1 / 3, 2 / 3]] * 3).numpy(), abs=0.01)


def test_taking_what_happened_for_ones_own_choice_ends_at_five_to_seven():
    law, _ = train(make_task(1, [1.0, 2.0], 0.5), DetailedBalance(REALISED))
    assert law == pytest.approx(torch.tensor([[5 / 12, 7 / 12]] * 3).numpy(), abs=0.01)


def test_taking_ones_own_choice_for_what_happened_cannot_balance():
    """Sum over a: F(s) = F(s') for every child, so the reward would have to be constant. The loss stays where it is."""
    _, loss = train(make_task(1, [1.0, 2.0], 0.5), DetailedBalance(INTENDED), steps=500)
    assert float(loss.min()) > 0.05
    _, loss = train(make_task(1, [2.0, 2.0], 0.5), DetailedBalance(INTENDED), steps=500)
    assert float(loss.max()) < 0.005  # and with a constant reward it can


FOUR = [1.0, 4.0, 0.6, 0.4]


@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("name", ["SDB-M", "STB-M", "SGFN-KL", "flow KL"])
def test_four_leaves_are_reached_where_they_can_be(alpha, name):
    task = make_task(2, FOUR, alpha)
    law, _ = train(task, SOUND[name], steps=900)
    graph = Graph(task.env)
    target = target_law(graph, task).target[graph.complete]
    assert float(metrics.tv(law, target).max()) < 0.01


@pytest.mark.parametrize(("alpha", "want"), [(0.5, 0.1042), (0.8, 0.3067)])
@pytest.mark.parametrize("name", ["SDB-M", "STB-M", "trajectory KL"])
def test_four_leaves_beyond_reach_end_at_the_nearest_law(alpha, want, name):
    task = make_task(2, FOUR, alpha)
    best = floor(task)
    assert best.reverse_kl.tv == pytest.approx(want, abs=5e-4)
    law, _ = train(task, SOUND[name], steps=1000, explore=0.0)
    target = target_law(Graph(task.env), task).target[-4:]
    assert metrics.tv(law, target).tolist() == pytest.approx([want] * 3, abs=0.005)


def test_ignoring_the_noise_ends_at_the_naive_law_out_of_reach_too():
    task = make_task(2, FOUR, 0.8)
    law, _ = train(task, DetailedBalance(REALISED), steps=800)
    target = target_law(Graph(task.env), task).target[-4:]
    assert metrics.tv(law, target).tolist() == pytest.approx([limit_tv("naive-db", floor(task))] * 3, abs=0.01)


def test_a_backward_law_with_mass_on_what_cannot_happen_balances_at_a_wrong_law():
    """The negative control, in plain torch: no noise, four leaves, and a learned pi_B(a | s') that is not masked to P > 0.

    Every residual vanishes, and yet the law is wrong: P(x) = R(x) c(x) with c(x) <= 1 free to choose.
    """
    log_reward = torch.tensor(FOUR, dtype=torch.float64).log()
    gen = torch.Generator().manual_seed(0)
    pi = torch.randn(3, 2, generator=gen, dtype=torch.float64).requires_grad_()  # root, A, B
    back = torch.randn(6, 2, generator=gen, dtype=torch.float64).requires_grad_()  # A, B, AA, AB, BA, BB
    flow = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [pi, back, flow],
        lr=1,
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=1e-18,
        line_search_fn="strong_wolfe",
    )

    def loss(masked=False):
        log_pi = pi.log_softmax(1)
        log_b = torch.zeros_like(back) if masked else back.log_softmax(1)
        ends = torch.cat([flow[1:], log_reward])
        parts = [flow[s] + log_pi[s, m] - ends[2 * s + m] - log_b[2 * s + m, m] for s in range(3) for m in range(2)]
        return torch.stack(parts).square().sum()

    def tv():
        p = pi.softmax(1)
        law = torch.stack([p[0, i] * p[1 + i, j] for i in range(2) for j in range(2)])
        return float(metrics.tv(law.detach(), log_reward.softmax(0)))

    for masked in (False, True):

        def closure(masked=masked):
            optimiser.zero_grad()
            value = loss(masked)
            value.backward()
            return value

        optimiser.step(closure)
        assert float(loss(masked).detach()) < 1e-10
        if masked:
            assert tv() < 1e-4
        else:
            assert tv() > 0.05
