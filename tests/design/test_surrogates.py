"""Surrogates against closed forms, and their uncertainty against what they do not know."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from stochflow.design.surrogates import KINDS, Ensemble, Ridge, surrogate
from stochflow.errors import UserError

needs_sklearn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed (extra [design])"
)


def problem(n, f=12, noise=0.1, seed=0):
    rng = np.random.default_rng(seed)
    x = (rng.random((n, f)) < 0.4).astype(np.float32)
    weights = rng.normal(size=f)
    return torch.from_numpy(x), x @ weights + noise * rng.normal(size=n), x @ weights


@pytest.mark.parametrize("n", [9, 60])
def test_ridge_is_the_posterior_of_bayesian_regression(n):
    """Mean and variance against the matrices written out, with more features than rows and fewer."""
    x, y, _ = problem(n)
    fitted = Ridge().fit(x, y, np.arange(n), 0)
    wide = x.double().numpy() - x.double().numpy().mean(0)
    precision = wide.T @ wide + fitted.ridge * np.eye(12)
    weights = np.linalg.solve(precision, wide.T @ (y - y.mean()))
    new, _, _ = problem(7, seed=5)
    at = new.double().numpy() - x.double().numpy().mean(0)
    found = fitted.predict(new)
    assert np.allclose(found.mean, at @ weights + y.mean(), atol=1e-8)
    sd = fitted.noise * np.sqrt(np.einsum("nf,fg,ng->n", at, np.linalg.inv(precision), at))
    assert np.allclose(found.sd, sd, rtol=1e-6)


def test_ridge_draws_have_its_mean_and_sd():
    x, y, _ = problem(20)
    found = [Ridge().fit(x, y, np.arange(20), seed).predict(x[:5]) for seed in range(60)]
    draws = np.concatenate([f.draws for f in found])  # [960, 5]
    assert np.allclose(draws.mean(0), found[0].mean, atol=4 * found[0].sd.max() / np.sqrt(960))
    assert np.allclose(draws.std(0), found[0].sd, rtol=0.15)


@pytest.mark.parametrize(
    "name", ["ensemble", "ridge", *[pytest.param(n, marks=needs_sklearn) for n in ("gp", "forest")]]
)
def test_each_kind_learns_and_is_less_sure_far_away(name):
    x, y, _ = problem(150)
    new, _, truth = problem(100, seed=3)
    rng = np.random.default_rng(0)
    weights = np.linalg.lstsq(x.numpy(), y, rcond=None)[0]
    truth = new.numpy() @ weights
    found = surrogate(name).fit(x, y, np.arange(150), 0).predict(new)
    assert np.corrcoef(found.mean, truth)[0, 1] > 0.85
    assert found.draws.shape[1] == 100
    assert (found.sd >= 0).all()
    far = torch.from_numpy(rng.normal(0, 3, (100, 12)).astype(np.float32))
    if name != "forest":  # a forest is flat outside its data
        assert surrogate(name).fit(x, y, np.arange(150), 0).predict(far).sd.mean() > found.sd.mean()


@needs_sklearn
@pytest.mark.parametrize(
    "name", ["ensemble", "ridge", pytest.param("gp", marks=needs_sklearn), pytest.param("forest", marks=needs_sklearn)]
)
@pytest.mark.parametrize("unit", [1e-12, 1e9])
def test_no_kind_depends_on_the_unit(name, unit):
    """A dissociation constant in M is 1e-9, whose square a tree would take for no variance at all."""
    x, y, _ = problem(60)
    plain, scaled = (surrogate(name).fit(x, y * u, np.arange(60), 0).predict(x[:20]) for u in (1, unit))
    assert np.allclose(plain.mean, scaled.mean / unit, atol=0.05)
    assert np.allclose(plain.sd, scaled.sd / unit, atol=0.05)
    assert np.ptp(plain.mean) > 1


def test_draws_of_a_gaussian_process_are_functions():
    """Their mean and sd are the posterior's, and so is the covariance of two sequences: near ones move together, far ones do not."""
    x, y, _ = problem(40)
    new = x[:6].clone()
    new[1] = new[0]
    new[1, 3] = 1 - new[1, 3]  # a neighbour of the first
    new[2] = 1 - new[0]  # as far from it as can be
    kind = surrogate("gp")
    found = [kind.fit(x, y, np.arange(40), seed).predict(new) for seed in range(40)]
    draws = np.concatenate([f.draws for f in found])  # [640, 6]
    sd = found[0].sd
    assert np.allclose(draws.mean(0), found[0].mean, atol=5 * sd.max() / np.sqrt(640))
    assert np.allclose(draws.std(0), sd, rtol=0.2)
    made = kind.fit(x, y, np.arange(40), 0).made
    rows, known = new.double().numpy(), made.X_train_
    part = made.kernel_.k1
    wide = part(rows) - part(rows, known) @ np.linalg.solve(made.kernel_(known), part(known, rows))
    correlation = wide / np.sqrt(np.outer(np.diag(wide), np.diag(wide)))
    assert np.allclose(np.corrcoef(draws.T), correlation, atol=0.2)
    assert np.corrcoef(draws.T).min() < 0.5


def test_an_ensemble_repeats_itself_and_leaves_the_random_stream_alone():
    x, y, _ = problem(40)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    a = Ensemble(steps=60).fit(x, y, np.arange(40), 1).predict(x)
    b = Ensemble(steps=60).fit(x, y, np.arange(40), 1).predict(x)
    assert np.array_equal(a.draws, b.draws)
    assert torch.equal(before, torch.get_rng_state())


def test_an_unknown_kind_is_named():
    with pytest.raises(UserError, match='did you mean "ridge"'):
        surrogate("rigde")
    assert set(KINDS) == {"ensemble", "ridge", "gp", "forest"}
