"""The entropy band, the ratio and the losses made of them: bounds, limits, and finite gradients at every corner."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stochflow.errors import UserError
from stochflow.learn.entropy import (
    Band,
    EntropyAverage,
    check_gamma,
    compute_entropy,
    entropy_balance_loss,
    entropy_band,
    entropy_high,
    entropy_low,
    entropy_ratio,
    kl_divergence_loss,
    mean_entropy_ratio,
    normalised_entropy,
    state_kl,
    temperature,
)

unit = st.floats(0, 1, allow_nan=False)
gammas = st.floats(1e-3, 1, allow_nan=False)


def test_entropy_of_known_laws():
    p = torch.tensor([[1.0, 0, 0, 0], [0.25] * 4, [0.5, 0.5, 0, 0], [0.75, 0.25, 0, 0]], dtype=torch.float64)
    want = [0, math.log(4), math.log(2), -0.75 * math.log(0.75) - 0.25 * math.log(0.25)]
    assert torch.allclose(compute_entropy(p), torch.tensor(want, dtype=torch.float64), atol=1e-12)
    mask = torch.tensor([True, True, False, False])
    assert compute_entropy(torch.tensor([0.5, 0.5, 0.9, 0.9]), mask).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("p", [[1.0, 0, 0], [1 / 3] * 3, [0.0, 1.0, 0.0], [1e-30, 1.0, 0.0]])
def test_entropy_has_a_finite_gradient_everywhere(p):
    x = torch.tensor(p, requires_grad=True)
    compute_entropy(x).backward()
    assert bool(x.grad.isfinite().all())


@given(high=unit, low=unit, gamma=gammas)
@settings(max_examples=200, deadline=None)
def test_ratio_lies_between_one_and_one_over_gamma(high, low, gamma):
    high, low = max(high, low), min(high, low)
    r = float(entropy_ratio(torch.tensor(high, dtype=torch.float64), torch.tensor(low, dtype=torch.float64), gamma))
    assert 1 <= r <= 1 / gamma * (1 + 1e-12)
    exact = (high + 1e-6) / (gamma * (high + 1e-6) + (1 - gamma) * (low + 1e-6))
    assert r == pytest.approx(min(max(exact, 1), 1 / gamma), rel=1e-12)


def test_numbers_and_vectors_at_hand_do_as_well():
    at_hand = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    assert (float(entropy_high(at_hand)), float(entropy_low(at_hand))) == pytest.approx((0.4, 0.2))
    assert float(entropy_ratio(0.8, 0.2, 0.5)) == pytest.approx(1.6, rel=1e-4)


def test_ratio_limits_monotonicity_and_scale():
    high, low = torch.tensor(0.9, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    assert float(entropy_ratio(high, low, 1.0)) == 1
    assert float(entropy_ratio(high, high, 0.3)) == pytest.approx(1, abs=1e-12)
    assert float(entropy_ratio(high, low, 1e-9)) == pytest.approx((0.9 + 1e-6) / (0.3 + 1e-6), rel=1e-6)
    by_gamma = [float(entropy_ratio(high, low, g)) for g in np.linspace(0.01, 1, 50)]
    assert all(a > b for a, b in pairwise(by_gamma))
    by_low = [float(entropy_ratio(high, torch.tensor(x, dtype=torch.float64), 0.5)) for x in np.linspace(0, 0.9, 50)]
    assert all(a > b for a, b in pairwise(by_low))
    assert float(entropy_ratio(7 * high, 7 * low, 0.5, eps=0)) == pytest.approx(
        float(entropy_ratio(high, low, 0.5, eps=0)), rel=1e-12
    )
    several = mean_entropy_ratio(high, low, (0.25, 0.5, 0.75))
    assert float(several) == pytest.approx(np.mean([float(entropy_ratio(high, low, g)) for g in (0.25, 0.5, 0.75)]))


@pytest.mark.parametrize("gamma", [0, -0.1, 1.0001, math.nan, "0.5", True])
def test_what_is_no_gamma_is_refused(gamma):
    with pytest.raises(UserError, match="gamma"):
        check_gamma(gamma)


def test_band_is_numpys_quantile_of_the_states_that_count():
    entropy = torch.rand(5, 3, 7, dtype=torch.float64)
    where = torch.rand(5, 3, 7) < 0.6
    where[2, 1] = False
    for q, f in ((0.75, entropy_high), (0.25, entropy_low)):
        want = [np.quantile(entropy[:, s][where[:, s]].numpy(), q) for s in range(3)]
        assert np.allclose(f(entropy, where).numpy(), want)
        steps = f(entropy, where, per_step=True)
        assert steps.shape == (5, 3)
        for t in range(5):
            for s in range(3):
                values = entropy[t, s][where[t, s]].numpy()
                assert float(steps[t, s]) == pytest.approx(np.quantile(values, q) if len(values) else 0.0)


def test_band_leaves_out_dead_states_and_those_without_a_choice_and_normalises_the_rest():
    choices = torch.tensor([4, 2, 1, 4]).view(1, 1, 4).expand(1, 1, 4)
    entropy = torch.tensor([math.log(4), math.log(2), 0.0, 0.123]).view(1, 1, 4)
    alive = torch.tensor([True, True, True, False]).view(1, 1, 4)
    band = entropy_band(entropy, choices, alive)
    assert band.high.item() == pytest.approx(1)
    assert band.low.item() == pytest.approx(1)  # ln 4 of 4 choices and ln 2 of 2 choices are both the most there is
    none = entropy_band(entropy, choices, torch.zeros_like(alive))
    assert entropy_ratio(*none, 0.3).item() == 1  # no state counts: r = 1


def test_average_is_unbiased_from_the_first_batch_and_follows_a_change():
    average = EntropyAverage(2, decay=0.9)
    first = Band(torch.tensor([0.8, 0.6]), torch.tensor([0.2, 0.4]))
    got = average(first)
    assert torch.allclose(got.high, first.high)
    assert torch.allclose(got.low, first.low)
    second = Band(torch.tensor([0.4, 0.2]), torch.tensor([0.1, 0.1]))
    weight = 0.1 / (1 - 0.9**2)
    want = first.high * (1 - weight) + second.high * weight
    assert torch.allclose(average(second).high, want)
    copy = EntropyAverage(2, decay=0.9)
    copy.load_state_dict(average.state_dict())
    assert torch.equal(copy.band.high, average.band.high)
    steps = EntropyAverage(2, steps=3)
    assert steps(Band(torch.rand(3, 2), torch.rand(3, 2))).high.shape == (3, 2)
    with pytest.raises(UserError, match="decay"):
        EntropyAverage(1, decay=1.0)


def test_balance_loss_is_the_formula_and_its_slope_changes_sign_where_it_should():
    share = torch.rand(4, 2, 3, dtype=torch.float64, requires_grad=True)
    where = torch.ones(4, 2, 3, dtype=torch.bool)
    r, gamma = torch.tensor([1.3, 1.0], dtype=torch.float64), 0.5
    loss = entropy_balance_loss(share, where, r, gamma)
    rho = gamma * r
    for s in range(2):
        h = share[:, s]
        want = -(h * rho[s].log() + (1 - gamma) * (1 - h) * (1 - rho[s]).log()).mean()
        assert loss[s].item() == pytest.approx(want.item())
    loss.sum().backward()
    n = 12
    slope = -(rho.log() - (1 - gamma) * (1 - rho).log()) / n
    assert torch.allclose(share.grad, slope.view(1, 2, 1).expand(4, 2, 3))
    assert share.grad[0, 1, 0].item() == pytest.approx(
        0.3466 / n, abs=1e-4
    )  # at rho = gamma = .5 it lowers the entropy


@pytest.mark.parametrize("r", [1.0, 1.5, 2.0, 4.0, 1e6])
@pytest.mark.parametrize("gamma", [0.25, 0.5, 1.0])
def test_balance_loss_is_finite_for_every_input(r, gamma):
    share = torch.tensor([0.0, 1.0, 0.5]).view(1, 1, 3).requires_grad_()
    loss = entropy_balance_loss(share, torch.ones(1, 1, 3, dtype=torch.bool), torch.tensor([r]), gamma)
    loss.sum().backward()
    assert bool(loss.isfinite().all())
    assert bool(share.grad.isfinite().all())
    assert (
        entropy_balance_loss(share.detach(), torch.zeros(1, 1, 3, dtype=torch.bool), torch.tensor([r]), gamma).item()
        == 0
    )


def test_single_choice_states_have_entropy_share_zero_and_a_finite_gradient():
    entropy = torch.tensor([0.0, 0.0, 1.0], requires_grad=True)
    share = normalised_entropy(entropy, torch.tensor([1, 0, 3]))
    assert share.tolist() == pytest.approx([0, 0, 1 / math.log(3)])
    share.sum().backward()
    assert bool(entropy.grad.isfinite().all())


def test_state_kl_is_scipys_relative_entropy_of_the_allowed_entries():
    from scipy.stats import entropy as relative

    mask = torch.rand(50, 6) < 0.7
    mask[:, 0] = True
    f = torch.where(mask, torch.randn(50, 6, dtype=torch.float64), -torch.inf).log_softmax(-1)
    b = torch.randn(50, 6, dtype=torch.float64) * 3  # not normalised
    got = state_kl(f, b, mask)
    for i in range(50):
        keep = mask[i].numpy()
        assert got[i].item() == pytest.approx(relative(f[i].exp().numpy()[keep], b[i].exp().numpy()[keep]), abs=1e-12)


def test_kl_is_zero_exactly_at_balance_and_above_it_elsewhere():
    mask = torch.ones(3, 1, 4, 5, dtype=torch.bool)
    where = torch.ones(3, 1, 4, dtype=torch.bool)
    f = torch.randn(3, 1, 4, 5, dtype=torch.float64).log_softmax(-1)
    shift = torch.randn(3, 1, 4, 1, dtype=torch.float64)
    assert kl_divergence_loss(f, f + shift, mask, where).item() < 1e-14
    off = f.clone()
    off[1, 0, 2, 3] += 0.5
    assert kl_divergence_loss(f, off, mask, where).item() > 1e-4
    where[1, 0, 2] = False  # the one state that is off does not count
    mask[1, 0, 2] = False
    assert kl_divergence_loss(f, off, mask, where).item() < 1e-14


@pytest.mark.parametrize("logits", [[0.0, 0, 0], [60.0, 0, 0], [-1e9, 0, -1e9]])
def test_kl_gradients_are_finite_for_one_hot_uniform_and_single_action_states(logits):
    x = torch.tensor(logits).view(1, 1, 1, 3).requires_grad_()
    b = torch.zeros(1, 1, 1, 3, requires_grad=True)
    for mask in ([True] * 3, [False, True, False]):
        m = torch.tensor(mask).view(1, 1, 1, 3)
        f = torch.where(m, x, -1e9).log_softmax(-1)
        loss = kl_divergence_loss(f, b, m, torch.ones(1, 1, 1, dtype=torch.bool))
        grads = torch.autograd.grad(loss.sum(), [x, b])
        assert all(bool(g.isfinite().all()) for g in grads)
        assert loss.item() >= 0


def test_tempering_flattens():
    logits = torch.tensor([[[2.0, 0.0, -1.0]]])
    flat = (logits / temperature(torch.tensor([1.7]))).softmax(-1)
    assert torch.allclose(flat, (logits.softmax(-1) ** (1 / 1.7)) / (logits.softmax(-1) ** (1 / 1.7)).sum())
    assert compute_entropy(flat).item() > compute_entropy(logits.softmax(-1)).item()
