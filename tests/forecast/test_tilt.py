"""Tilted futures and rare events against exact enumeration, and against a process whose probabilities are known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm

from stochflow.errors import UserError
from stochflow.forecast import Forecaster
from stochflow.forecast.tilt import Tilting, _next_beta, estimate
from stochflow.forecast.training import Forecast, make_policy
from stochflow.nets.mlp import MLP
from stochflow.nets.windows import PathPolicy, WindowMLP
from stochflow.worlds.series import Cut, Series, Track

torch.set_num_threads(1)


def small(trained: bool) -> tuple[Series, PathPolicy]:
    """One window, 6 bins, 3 steps; a policy of two networks that differ, or of the prior alone."""
    from stochflow.forecast import prior
    from stochflow.forecast.location import Plan

    y = np.random.default_rng(0).normal(size=60).cumsum()
    none = np.zeros((60, 0))
    one = Track("a", np.arange(60.0), y, none, none.astype(np.int64), np.zeros(0), np.zeros(0, dtype=np.int64))
    learned = prior.learn([one], Cut(8, 3, 1.0, "seasonal"), Plan(3), 6)
    env = Series(learned.windows([one], [np.array([60])]), learned.bins, paths=learned.paths)
    policy = PathPolicy(env, MLP(8, 1), seeds=(0, 1), encoder=WindowMLP(8, 1))
    if trained:
        torch.manual_seed(3)
        with torch.no_grad():
            policy.head.weight.normal_(0, 0.4)
    return env, policy


def states(env: Series) -> torch.Tensor:
    every = torch.tensor(list(itertools.product(range(env.num_moves), repeat=env.horizon)))
    return torch.cat([torch.zeros(len(every), 1, dtype=torch.long), every], 1)


def tilting(env, policy, **more) -> Tilting:
    centre = lambda x: env.bins.centre(x[:, 1:].double()).numpy()  # noqa: E731
    return Tilting(env, policy, centre, lambda paths: paths.sum(1), hidden=32, **more)


@pytest.mark.parametrize("trained", [False, True], ids=["prior", "two networks"])
def test_the_forecasters_law_is_the_mean_over_its_networks(trained):
    env, policy = small(trained)
    made = tilting(env, policy)
    x = states(env)
    law = made.log_prior(x.unsqueeze(0))[0].double().exp()
    assert float(law.sum()) == pytest.approx(1, abs=1e-4)
    each = []
    so_far, moves = made._parts(x.unsqueeze(0).expand(2, -1, -1))
    with torch.no_grad():
        for t in range(3):
            logits = policy(so_far[t]).forward.log_softmax(-1)
            each.append(logits.gather(-1, moves[t].unsqueeze(-1)).squeeze(-1))
    wanted = torch.stack(each).sum(0).exp().mean(0).double()
    assert torch.allclose(law, wanted, atol=1e-6)


@pytest.mark.slow
def test_tilted_futures_are_the_exact_law():
    """All 216 futures: the proposal comes near P exp(beta score), and the weighted draws are on it."""
    torch.manual_seed(0)
    env, policy = small(True)
    made = tilting(env, policy)
    beta = 0.8
    made.to(beta, steps=120, count=800)
    x = states(env)
    log_p = made.log_prior(x.unsqueeze(0))[0].double()
    score = env.bins.centre(x[:, 1:].double()).sum(1)
    target = (log_p + beta * score).softmax(0)
    proposal = made.log_prob(made.proposals[-1], x.unsqueeze(0))[0].double().exp()
    assert float(proposal.sum()) == pytest.approx(1, abs=1e-4)
    assert float((proposal - target).abs().sum()) / 2 < 0.12
    drawn = made.draws(20_000)
    w = np.exp(drawn.log_weight + beta * drawn.score)
    code = (drawn.states[:, 1:] * torch.tensor([36, 6, 1])).sum(1).numpy()
    seen = np.bincount(code, weights=w / w.sum(), minlength=216)
    assert np.abs(seen - target.numpy()).sum() / 2 < 0.04
    log_z = math.log(float((log_p.exp() * (beta * score).exp()).sum()))
    assert np.log(w.mean()) == pytest.approx(log_z, abs=0.05)


def test_the_probability_of_a_rare_event_is_the_enumerated_one():
    torch.manual_seed(0)
    env, policy = small(True)
    x = states(env)
    score = env.bins.centre(x[:, 1:].double()).sum(1)
    made = tilting(env, policy)
    law = made.log_prior(x.unsqueeze(0))[0].double().exp()
    order = score.unique().flip(0)
    tail = torch.stack([law[score >= s].sum() for s in order])
    k = int((tail < 2e-4).sum()) - 1  # the widest event rarer than 2 in 10,000
    level = float(order[k]) - 1e-6
    made.reach(level, steps=50, count=600)
    drawn = made.draws(8000)
    found = estimate(drawn.log_weight, drawn.score >= level)
    assert found.low <= float(tail[k]) * 1.1
    assert found.high >= float(tail[k]) * 0.9
    assert found.value == pytest.approx(float(tail[k]), rel=0.25)
    assert found.effective > 30 * 8000 * 0.2 / 1000  # many times what plain draws would give
    common = estimate(drawn.log_weight, drawn.score >= float(score.median()))
    assert common.value == pytest.approx(float(law[score >= score.median()].sum()), abs=0.05)


def test_weights_are_exact_whatever_the_proposal_has_learned():
    """A proposal that was trained towards the other side still gives the right probability, with a wider interval."""
    torch.manual_seed(0)
    env, policy = small(False)
    made = tilting(env, policy)
    made.to(-0.5, steps=20, count=400)
    x = states(env)
    score = env.bins.centre(x[:, 1:].double()).sum(1)
    law = made.log_prior(x.unsqueeze(0))[0].double().exp()
    level = float(score.quantile(0.9))
    drawn = made.draws(20_000)
    found = estimate(drawn.log_weight, drawn.score >= level)
    wanted = float(law[score >= level].sum())
    assert found.low <= wanted <= found.high or found.value == pytest.approx(wanted, rel=0.15)
    assert float(np.exp(drawn.log_weight).mean()) == pytest.approx(1, abs=0.05)


def test_a_stage_goes_as_far_as_draws_can_tell():
    score = np.random.default_rng(0).normal(size=4000)
    none = np.zeros(4000)
    assert _next_beta(score, none, 0.0, 0.1) == 0.1
    far = _next_beta(score, none, 0.0, 50.0)
    assert 0.8 < far < 1.3  # the effective share of exp(b x) is exp(-b^2) for a normal score: .35 at 1.02


def walk(seed: int, rows: int = 6000) -> tuple[pd.DataFrame, float]:
    y = np.random.default_rng(seed).normal(size=rows).cumsum()
    return pd.DataFrame({"ds": np.arange(rows), "y": y}), float(y[-1])


@pytest.mark.slow
def test_one_in_ten_thousand_on_a_random_walk():
    """The end of a random walk after 6 steps is normal: the probability that it lies 9.1 above its start is one in 10,000."""
    frame, last = walk(0)
    forecaster = Forecaster(horizon=6, network="off").fit(frame)
    level = float(norm.isf(1e-4)) * math.sqrt(6)
    found = forecaster.probability(lambda paths: paths[:, -1] - last, level)
    assert 1e-4 / 1.5 <= found.value <= 1.5e-4
    assert found.high / found.low < 1.3
    assert found.effective > 1e5
    again = Forecaster(horizon=6, network="off", samples=100_000).fit(frame).sample()[0]
    near = float(norm.isf(1e-2)) * math.sqrt(6)
    plain = float((again[:, -1] - last >= near).mean())
    assert forecaster.probability(lambda paths: paths[:, -1] - last, near).value == pytest.approx(plain, rel=0.12)


def test_a_forecaster_is_tilted_and_left_as_it_was():
    dice = np.random.default_rng(0)
    frame = pd.DataFrame({"ds": pd.date_range("2020-01-01", periods=80, freq="MS"), "y": 50 + dice.normal(size=80)})
    forecaster = Forecaster(horizon=4, network="off", samples=400).fit(frame)
    before = forecaster.sample()
    torch.manual_seed(5)
    wanted = torch.rand(2)
    torch.manual_seed(5)
    tilted = forecaster.tilt(lambda paths: paths.sum(1), 0.5, steps=15, samples=300)
    assert torch.equal(torch.rand(2), wanted)
    assert np.array_equal(forecaster.sample(), before)
    assert tilted.paths.shape == (300, 4)
    assert tilted.paths.sum(1).mean() > before[0].sum(1).mean() + 0.5
    table = tilted.table()
    assert {"tilted", "stochflow", "tilted-lo-80", "stochflow-hi-95"} <= set(table.columns)
    assert tilted.probability(lambda paths: np.ones(len(paths))).value == pytest.approx(1, abs=0.1)
    assert 100 < tilted.effective <= 4000
    with pytest.raises(UserError, match=r"must be \d+ numbers"):
        forecaster.tilt(lambda paths: paths, 1.0, steps=5)
    with pytest.raises(UserError, match="no series 'b'"):
        forecaster.tilt(lambda paths: paths.sum(1), 1.0, "b", steps=5)


def test_the_policy_of_a_forecast_can_be_made_without_a_prior():
    env, _ = small(False)
    plain = Series(env.windows, env.bins)
    policy = make_policy(plain, Forecast(horizon=3, seeds=1, encoder="mlp"), torch.arange(1))
    assert type(policy).__name__ == "Policy"
