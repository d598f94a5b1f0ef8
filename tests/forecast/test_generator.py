"""A generator fed with batches of windows, as the source documents feed theirs: `{"time_series": [32, 10, 3]}`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stochflow.errors import UserError
from stochflow.forecast.generator import SeriesGenerator
from stochflow.learn.objectives import SGFNKL, DetailedBalance, LogVariance, TrajectoryBalance
from stochflow.nets.mlp import MLP
from stochflow.nets.windows import WindowMLP, WindowTransformer

UNITS = torch.tensor([1.0, 50.0, 0.01], dtype=torch.float64)


def batch(seed: int, rows: int = 32) -> dict[str, torch.Tensor]:
    """Windows [rows, 10, 3] whose columns rise or fall by about one unit a step, each the other way than the next."""
    dice = np.random.default_rng(seed)
    slope = dice.choice([-1.0, 1.0], size=(rows, 1, 1)) * np.array([1.0, -1.0, 1.0])
    made = dice.normal(size=(rows, 1, 3)) + slope * np.arange(10)[:, None] + 0.05 * dice.normal(size=(rows, 10, 3))
    return {"time_series": torch.from_numpy(made) * UNITS}


def quick(**more) -> SeriesGenerator:
    small = {"encoder": WindowMLP(32, 2), "net": MLP(32, 1), "bins": 17, "batch": 64, "lr": 1e-2}
    return SeriesGenerator(3, 10, 2, (0, 1), **{**small, **more})  # fmt: skip


def error(g: SeriesGenerator) -> float:
    """Mean absolute error of the mean forecast of windows never seen, in units of their slope."""
    seen = batch(999)["time_series"]
    return float(((g.sample(seen[:, :-2], 40).mean(1) - seen[:, -2:, :2]) / UNITS[:2]).abs().mean())


OBJECTIVES = [DetailedBalance(), TrajectoryBalance(), LogVariance(), SGFNKL()]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda x: type(x).__name__)
def test_the_documents_objectives_learn_from_batch_after_batch(objective):
    """Every batch holds other windows; errors on windows never seen become smaller."""
    torch.manual_seed(0)
    g = quick(objective=objective)
    before = error(g)
    for i in range(200):
        stats = g.train_step(batch(i))
    assert error(g) < 0.6 * before
    assert ("r_gamma" in stats) == isinstance(objective, SGFNKL)


def test_what_an_actuator_does_is_counted():
    torch.manual_seed(0)
    g = quick(noise="slip", stick=0.1, objective=TrajectoryBalance())
    before = error(g)
    for i in range(200):
        g.train_step(batch(i))
    assert error(g) < 0.8 * before
    counts = g.trainer.dynamics.counts
    missed = 1 - float(counts.diagonal(dim1=1, dim2=2).sum() / counts.sum())
    assert missed == pytest.approx(0.1 * 16 / 17, abs=0.02)


def test_likelihood_learns_the_spread_of_what_follows():
    torch.manual_seed(0)
    pytest.importorskip("scoringrules")
    g = quick(mode="nll", encoder=WindowTransformer(width=16, layers=1, heads=2))
    before = g.figures(batch(999), 60)
    for i in range(150):
        g.train_step(batch(i))
    after = g.figures(batch(999), 60)
    assert set(after) == {"mse", "mae", "crps"}
    assert all(after[k] < 0.8 * before[k] for k in after)


def test_shapes_batches_of_any_size_and_a_loss_with_its_gradient():
    g = quick(objective=SGFNKL())
    for rows in (4, 32, 7):
        g.train_step(batch(0, rows))
    loss, figures = g.get_loss(batch(1))
    loss.backward()
    assert float(g.policy.head.weight.grad.abs().sum()) > 0
    assert {"kl", "r_gamma"} <= set(figures)
    made = g.sample(batch(2)["time_series"][:, :-2], 11)
    assert made.shape == (32, 11, 2, 2)
    whole = batch(2)["time_series"].clone()
    torch.manual_seed(3)
    one = g.sample(whole[:, :-2], 5)
    whole[:, -2:] = 1e3  # what is to be forecast is not looked at
    torch.manual_seed(3)
    assert torch.equal(one, g.sample(whole[:, :-2], 5))


def test_what_cannot_be_is_named():
    g = quick()
    for given, words in (
        ({"bulk_trajs": []}, "time_series"),
        ({"time_series": torch.zeros(4, 9, 3)}, r"made for \[batch, 10, 3\]"),
        ({"time_series": torch.zeros(4, 10, 2)}, r"made for \[batch, 10, 3\]"),
        ({"time_series": torch.full((4, 10, 3), float("nan"))}, "not finite"),
        ({"time_series": "rising"}, "cannot be read"),
    ):
        with pytest.raises(UserError, match=words):
            g.train_step(given)
    with pytest.raises(UserError, match="the past has shape"):
        g.sample(torch.zeros(4, 10, 3))
    with pytest.raises(UserError, match=r"did you mean .bins"):
        quick(bin=9)
    with pytest.raises(UserError, match="objective of its own"):
        quick(mode="nll", objective=SGFNKL())
