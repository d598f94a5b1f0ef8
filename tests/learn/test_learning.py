"""Training reaches what theory says it reaches, measured by the exact law. These are the slow tests."""

from __future__ import annotations

import math

import pytest
import torch

from stochflow.law.metrics import dynamics_report
from stochflow.learn.rollout import rollout
from stochflow.runs.config import configure
from stochflow.runs.experiment import Experiment

pytestmark = pytest.mark.slow


def trained(task: str, steps: int, **settings) -> tuple[Experiment, dict]:
    experiment = Experiment(configure(task, steps=steps, **settings))
    experiment.trainer.train(steps)
    return experiment, experiment.measure(final=True)


@pytest.mark.parametrize("objective", ["tb", "db", "subtb", "logvar"])
def test_small_grid_without_noise(objective):
    _, found = trained("grid", 600, side=6, objective=objective, hidden=64)
    assert found["tv"] < 0.02
    assert found["log_z_error"] < 0.02


@pytest.mark.parametrize("objective", ["tb", "db", "subtb", "stb", "sdb", "flow-kl"])
def test_small_grid_under_noise_with_learned_dynamics(objective):
    _, found = trained("grid", 1000, side=5, stick=0.25, objective=objective, hidden=64)
    assert found["excess_tv"] < 0.03
    assert found["tv"] < found["naive_tv"] / 3


def test_three_dimensions_with_replay_and_priority():
    _, found = trained("grid", 900, ndim=3, side=4, replay=0.5, replay_priority=True, hidden=64)
    assert found["tv"] < 0.03


def test_the_default_grid_comes_close():
    _, found = trained("grid", 1000)
    assert found["tv"] < 0.01


@pytest.mark.parametrize("objective", ["naive-db", "naive-tb"])
def test_realised_labels_land_on_the_naive_law(objective):
    _, found = trained("grid", 1000, side=5, stick=0.25, objective=objective, backward="uniform", hidden=64)
    assert found["tv"] == pytest.approx(found["naive_tv"], abs=0.02)


def test_tfbind8_beats_a_perfect_naive_gflownet():
    _, found = trained("tfbind8", 700, stick=0.1, seed=1)
    assert found["tv"] < 0.0416  # what a GFlowNet that is perfect but for the noise reaches
    assert found["excess_tv"] == pytest.approx(found["tv"] - found["floor_tv"])


@pytest.mark.parametrize("alpha", [0.1, 0.25, 0.5, 0.75])
def test_cross_entropy_of_learned_dynamics_comes_to_the_entropy_of_the_channel(alpha):
    """method: h(alpha) = -(1 - 3a/4) ln(1 - 3a/4) - (3a/4) ln(a/4), never ln 4."""
    experiment = Experiment(configure("tfbind8", stick=alpha, net="mlp", hidden=16, batch=256))
    experiment.trainer.train(400)
    torch.manual_seed(0)
    with experiment.trainer.averaged():
        fit = dynamics_report(
            experiment.task.env,
            experiment.dynamics,
            experiment.task.channel,
            rollout(experiment.task, experiment.policy, 4000),
        )
    kept = 1 - 3 * alpha / 4
    entropy = -kept * math.log(kept) - (3 * alpha / 4) * math.log(alpha / 4)
    assert float(fit.nll[0]) == pytest.approx(entropy, abs=0.02)
    assert float(fit.kernel_tv[0]) < 0.03


@pytest.mark.parametrize(
    "settings",
    [{"dynamics": "tabular"}, {"dynamics_off_pol": True, "dynamics_off_pol_rounds": 2, "dynamics_sample_size": 32}],
)
def test_counted_and_replayed_dynamics_find_the_channel(settings):
    _, found = trained("grid", 500, side=5, stick=0.25, hidden=32, **settings)
    assert found["dynamics_tv"] < 0.02
