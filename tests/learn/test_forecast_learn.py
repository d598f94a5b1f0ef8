"""What each mode converges to, on a case that can be listed: 8 bins, horizon 4, a bimodal future (docs/forecasting.md).

Two contexts. After the first the series goes down or up, after the second it stays: targets lie on bin centres, so that the
empirical law is a law over forecasts.
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import brentq
from scipy.special import lambertw

from stochflow import objectives
from stochflow.envs.series import Bins, Nearness, Series, Windows
from stochflow.exact import Graph, exact_law
from stochflow.forecast_config import Forecast
from stochflow.forecast_train import make_channel, make_policy, make_trainer
from stochflow.metrics import l1
from stochflow.nets import MLP, Lookup
from stochflow.rewards import Linear
from stochflow.types import Task

FIRST = [(-2.5, -2.5, -1.5, -1.5)] * 5 + [(2.5, 2.5, 1.5, 2.5)] * 3 + [(2.5, 1.5, 1.5, 2.5)] * 2
SECOND = [(0.5, 0.5, 0.5, 1.5)] * 7 + [(0.5, -0.5, 0.5, 0.5)] * 3
BETA = 1.0
ROWS = {"bimodal": (0, slice(0, 10)), "steady": (10, slice(10, 20))}


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return l1(p, q) / 2


def world(target: torch.Tensor | None = None) -> Series:
    """A window of two equal values, 0 or 1, before each target; with other targets all windows are alike."""
    if target is None:
        target, context = torch.tensor(FIRST + SECOND), torch.cat([torch.zeros(10, 2, 1), torch.ones(10, 2, 1)])
    else:
        context = torch.zeros(len(target), 2, 1)
    rows, horizon = target.shape
    return Series(
        Windows(
            values=context,
            seen=torch.ones(rows, 2, 1, dtype=torch.bool),
            categories=torch.zeros(rows, 2, 0, dtype=torch.long),
            age=torch.tensor([1.0, 0.0]).expand(rows, 2),
            phase=torch.zeros(rows, 2, 0),
            static=torch.zeros(rows, 0),
            static_categories=torch.zeros(rows, 0, dtype=torch.long),
            target=target,
            known=torch.ones(rows, dtype=torch.bool),
            location=torch.zeros(rows, horizon, dtype=torch.float64),
            scale=torch.ones(rows, dtype=torch.float64),
        ),
        Bins(8, 3.0),
    )


def train(steps: int, power: int = 2, lr: float = 1e-3, **changes):
    """The averaged policy of two seeds, everything settled but the weights."""
    env = world()
    settings = Forecast(horizon=4, encoder="mlp", seeds=2, batch=128, lr=lr, **changes)
    task = Task(env, make_channel(settings), Nearness(env, power), Linear(BETA))
    rows = torch.arange(len(env.windows.scale))
    torch.manual_seed(0)
    policy = make_policy(env, settings, rows, MLP(64, 2))
    trainer = make_trainer(task, policy, settings, rows, explore=0.0)
    trainer.train(steps)
    trainer.policy_flat.swap()
    return trainer


def laws(trainer, row: int):
    """(states [N, D], law [S, N]) of finished forecasts in the context of a row."""
    graph = Graph(trainer.task.env, row)
    ends = graph.complete
    return graph.states[ends], exact_law(graph, trainer.task.channel, trainer.policy)[:, ends]


def mean_log_reward(trainer, states, rows: slice):
    """E_y log R(x, y) over the rows of one context, [N]."""
    each = []
    for row in range(rows.start, rows.stop):
        here = states.clone()
        here[:, 0] = row
        each.append(trainer.task.reward(trainer.task.oracle(here).double(), here, None))
    return torch.stack(each).mean(0)


def empirical(trainer, states, rows: slice):
    truth = trainer.task.env.truth(torch.arange(rows.start, rows.stop))
    return (states[:, None, 1:] == truth).all(-1).double().mean(1)


@pytest.mark.slow
def test_with_squared_errors_the_law_is_a_bump_around_the_conditional_mean():
    trainer = train(1500, mode="mse")
    for name, (row, rows) in ROWS.items():
        states, law = laws(trainer, row)
        env = trainer.task.env
        mean = env.windows.target[rows].double().mean(0)
        bump = (-(BETA / 4) * (env.values(states).double() - mean).square().sum(1)).softmax(0)
        assert torch.allclose(bump, mean_log_reward(trainer, states, rows).softmax(0), atol=1e-6)  # the theorem's two forms
        assert (total_variation(law, bump) < 0.06).all()
        if name == "bimodal":  # the mean of a series that goes up or down is neither: its likeliest forecast never happens
            best = states[law[0].argmax(), 1:]
            assert empirical(trainer, best.new_tensor([[row, *best.tolist()]]), rows) == 0


@pytest.mark.slow
def test_with_absolute_errors_it_is_the_law_of_the_mean_log_reward():
    trainer = train(1500, power=1, mode="mae")
    for row, rows in ROWS.values():
        states, law = laws(trainer, row)
        assert (total_variation(law, mean_log_reward(trainer, states, rows).softmax(0)) < 0.06).all()


@pytest.mark.slow
def test_with_likelihood_it_is_the_conditional_law_itself():
    trainer = train(600, lr=3e-3, mode="nll")
    for row, rows in ROWS.values():
        states, law = laws(trainer, row)
        assert (total_variation(law, empirical(trainer, states, rows)) < 0.03).all()


def mixed_law(log_r: torch.Tensor, q: torch.Tensor, weight: float) -> torch.Tensor:
    """The fixed point of (1 - m) TB^2 + m NLL on-policy: log P - (w/2) q/P = E log R - log Z - w/2, w = m / (1 - m).

    Solved for P by the Lambert function at each x, and for log Z by the sum.
    """
    w = weight / (1 - weight)
    a = (w / 2) * q.numpy()

    def law(log_z: float):
        c = log_r.numpy() - log_z - w / 2
        made = c.copy()
        made[a > 0] = [math.log(x) - math.log(lambertw(x * math.exp(-y)).real) for x, y in zip(a[a > 0], c[a > 0], strict=True)]
        return torch.from_numpy(made).exp()

    middle = float(log_r.logsumexp(0))
    log_z = brentq(lambda z: float(law(z).sum()) - 1, middle - 20 - w / 2, middle + 20, xtol=1e-12)
    return law(log_z)


def test_the_mixed_law_has_the_two_others_as_its_ends():
    states = torch.linspace(-2, 2, 9, dtype=torch.float64)
    log_r = -states.square()
    q = torch.zeros(9, dtype=torch.float64)
    q[0], q[8] = 0.7, 0.3
    assert total_variation(mixed_law(log_r, q, 1e-6), log_r.softmax(0)) < 1e-4
    far = [float(total_variation(mixed_law(log_r, q, m), q)) for m in (0.5, 0.9, 0.99)]
    assert far[0] > far[1] > far[2]
    assert far[2] < 0.1
    found = mixed_law(log_r, q, 0.5)
    residual = found.log() - log_r - (q / found - 1) / 2
    assert float(residual.max() - residual.min()) < 1e-9  # - log Z everywhere


@pytest.mark.slow
def test_the_mixture_lies_in_between_where_the_formula_says():
    """One context and a row a state: single forecasts must stand out of a smooth bump. Gradients are not clipped, for the balance of
    the two losses at rare forecasts is what the formula speaks of."""
    env = world(torch.tensor(FIRST))
    settings = Forecast(horizon=4, encoder="mlp", seeds=2, batch=128, lr=2e-3, mode="mix", mix=0.8)
    task = Task(env, make_channel(settings), Nearness(env), Linear(BETA))
    rows = torch.arange(10)
    torch.manual_seed(0)
    policy = make_policy(env, settings, rows, Lookup(32, 1, 32))
    trainer = make_trainer(task, policy, settings, rows, explore=0.0, clip=1e4)
    trainer.train(1000)
    trainer.policy_flat.swap()
    states, law = laws(trainer, 0)
    log_r, q = mean_log_reward(trainer, states, slice(0, 10)), empirical(trainer, states, slice(0, 10))
    wanted = mixed_law(log_r, q, 0.8)
    assert (total_variation(law, wanted) < 0.12).all()
    assert (law[:, q > 0] - wanted[q > 0]).abs().max() < 0.02  # they get 0.06 to 0.13 here, 0.2 to 0.5 in the data, nearly 0 in the bump
    assert total_variation(wanted, q) > 0.6
    assert total_variation(wanted, log_r.softmax(0)) > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("form", [objectives.MARGINAL, objectives.REALISED], ids=["through", "ignoring"])
def test_orders_that_slip_are_corrected_for_by_likelihood_through_the_counted_channel(form):
    """Executed through the noise, the trained law is the data's; trained as if there were none, it is (1 - a) q + a / K."""
    q = torch.tensor([8, 4, 2, 2, 1, 1, 1, 1], dtype=torch.float64) / 20  # every bin has at least a / K: the target can be reached
    one = Bins(8, 3.0).centre(torch.repeat_interleave(torch.arange(8), (20 * q).long()).float())
    env = world(torch.cartesian_prod(one, one))
    settings = Forecast(horizon=2, encoder="mlp", seeds=2, batch=128, lr=2e-3, mode="nll", noise="slip", stick=0.3)
    task = Task(env, make_channel(settings), Nearness(env), Linear(BETA))
    rows = torch.arange(400)
    torch.manual_seed(0)
    trainer = make_trainer(task, make_policy(env, settings, rows, MLP(64, 2)), settings, rows, form)
    trainer.train(600)
    trainer.policy_flat.swap()
    states, law = laws(trainer, 0)
    executed = q if form is objectives.MARGINAL else 0.7 * q + 0.3 / 8
    wanted = executed[states[:, 1]] * executed[states[:, 2]]
    assert (total_variation(law, wanted) < 0.03).all()
    assert total_variation(wanted, q[states[:, 1]] * q[states[:, 2]]) > 0.1 or form is objectives.MARGINAL
