"""Windows given as arrays are the forecaster's own environment, with several columns as the next value."""

from __future__ import annotations

import pytest
import torch

from stochflow.errors import UserError
from stochflow.forecast.batches import windows_task
from stochflow.learn.objectives import DetailedBalance, TrajectoryBalance
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.nets.windows import WindowMLP
from stochflow.noise.dynamics import Known
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Trainer
from stochflow.worlds.channels import Slip
from stochflow.worlds.check import check_env


def batch(rows=32, steps=10, features=3) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, steps, features).cumsum(1) * torch.tensor([1.0, 50.0, 0.01])


def test_the_documents_batch_is_a_task():
    series = batch()
    made = windows_task(series, 2, bins=33, targets=(0, 1))
    env = made.task.env
    assert env.horizon == 4
    assert env.windows.values.shape == (32, 8, 3)
    truth = series[:, -2:, :2]
    states = torch.cat([made.rows.unsqueeze(1), env.truth(made.rows)], 1)
    width = env.bins.width * env.windows.scale.max() * env.ratio.max()
    assert (made.values(states) - truth).abs().max() <= width / 2 * 1.01 + 1e-6
    assert made.errors(states, truth)["mae"] < float(width)
    assert made.errors(states, truth)["mse"] < float(width) ** 2
    check_env(windows_task(series[:3], 1, bins=5).task.env)


def test_what_cannot_be_is_named():
    for series, horizon, targets, words in (
        (torch.zeros(4, 10), 2, (0,), "batch, steps, features"),
        (batch(), 9, (0,), "shorten"),
        (batch(), 2, (3,), "not among"),
        (batch() * float("nan"), 2, (0,), "not finite"),
    ):
        with pytest.raises(UserError, match=words):
            windows_task(series, horizon, targets=targets)


@pytest.mark.parametrize("objective", [TrajectoryBalance(), DetailedBalance()])
def test_the_documents_objectives_train_on_series_under_noise(objective):
    """Stochastic balance on windows: forecasts come nearer to what followed than untrained ones."""
    made = windows_task(batch(), 2, bins=9, targets=(0,), channel=Slip(0.1))
    torch.manual_seed(0)
    policy = Policy(made.task.env, MLP(16, 1), encoder=WindowMLP(16, 1))
    trainer = Trainer(
        made.task, policy, Known(made.task.env, made.task.channel), objective, OnPolicy(made.task, policy, 64), lr=1e-2
    )
    trainer.train(1)
    first = float(trainer.stats["mean_score"].mean())
    trainer.train(120)
    assert float(trainer.stats["mean_score"].mean()) > first
