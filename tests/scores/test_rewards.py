"""Rewards: the ramp of the sources' l2r, in log space."""

from __future__ import annotations

import math

import pytest
import torch

from stochflow.errors import UserError
from stochflow.scores.rewards import Linear, Power, Sharpening

STATE = torch.zeros(1, dtype=torch.long)


@pytest.mark.parametrize(
    ("step", "exponent", "digits"), [(0, 1.0, 12), (3, 2.0, 12), (27, 2.80, 12), (100, 2.94, 2), (1000, 2.994, 3)]
)
def test_the_table_of_exponents(step, exponent, digits):
    """beta = 3, ramp = 3 (method 2.15)."""
    assert round(float(Power(3.0, ramp=3.0).exponent(step)), digits) == exponent
    assert float(Power(3.0, ramp=3.0).exponent(step)) == pytest.approx(1 + 2 * (1 - 1 / (1 + step / 3)), abs=1e-12)


def test_the_ramp_takes_a_tensor_step_and_only_grows():
    exponents = Power(3.0, ramp=3.0).exponent(torch.arange(2000).double())
    assert (exponents.diff() > 0).all()
    assert exponents[0] == 1
    assert exponents[-1] < 3


@pytest.mark.parametrize("step", [0, 5, 100_000])
def test_no_ramp_is_constant(step):
    assert Power(3.0).exponent(step) == 3.0
    assert Power(3.0, ramp=-1.0).exponent(step) == 3.0


def test_evaluation_uses_the_final_exponent():
    score = torch.tensor([0.3], dtype=torch.float64)
    assert torch.equal(Power(3.0, ramp=3.0)(score, STATE, None), Power(3.0)(score, STATE, None))


@pytest.mark.parametrize("step", [None, 0, 3, 27, 1000])
def test_log_space_equals_the_power(step):
    score = torch.rand(200, dtype=torch.float64)
    reward = Power(3.0, 1e-3, 3.0)
    direct = score.clamp(min=1e-3) ** reward.exponent(step)
    assert torch.allclose(reward(score, STATE, step).exp(), direct, rtol=1e-12, atol=0)


def test_nothing_underflows_in_log_space():
    reward = Power(100.0, 1e-3)
    assert float(torch.tensor(1e-3) ** 100) == 0.0  # what a power would give
    assert float(reward(torch.tensor(1e-3, dtype=torch.float64), STATE)) == pytest.approx(
        100 * math.log(1e-3), rel=1e-12
    )


@pytest.mark.parametrize("score", [0.0, -2.0, 1e-9])
def test_the_floor_holds(score):
    value = Power(3.0, 1e-3)(torch.tensor(score, dtype=torch.float64), STATE)
    assert float(value) == pytest.approx(3 * math.log(1e-3), rel=1e-12)


def test_a_nan_score_stays_nan():
    assert Power(3.0)(torch.tensor(math.nan), STATE).isnan()


def test_linear_is_for_scores_that_are_logarithms():
    score = torch.tensor([-4.0, 0.5])
    assert Linear(2.0)(score, STATE, 7).tolist() == [-8.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"beta": 0.0}, ["beta = 0.0", "above 0"]),
        ({"beta": -1.0}, ["-1.0"]),
        ({"beta": math.nan}, ["nan"]),
        ({"floor": 0.0}, ["floor", "0.0"]),
    ],
)
def test_impossible_rewards_are_refused(arguments, words):
    with pytest.raises(UserError) as error:
        Power(**arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_answers_without_a_score_count_towards_the_last_moment_of_a_sharpening():
    """Else an oracle with a quarter of them would never fix its law; and what an earlier version saved is read."""
    found = []
    for scored in (40, 75):  # of each hundred
        reward = Sharpening(nats=20.0, best=10, first=50, still=1e-9, latest=300)
        for part in range(4):
            score = torch.rand(100) + part  # the best move all the time
            score[scored:] = math.nan
            reward.observe(score, torch.arange(100) + 100 * part)
        found.append((int(reward.asked), int(reward.blank), bool(reward.frozen)))
    assert found == [(120, 180, True), (225, 75, True)]
    old = {k: v for k, v in reward.state_dict().items() if k != "blank"}
    again = Sharpening(nats=20.0, best=10, first=50)
    again.load_state_dict(old)
    assert bool(again.frozen)
    assert int(again.blank) == 0
