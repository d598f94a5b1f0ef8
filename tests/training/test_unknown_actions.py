"""Recorded trajectories whose actions nobody noted teach marginal objectives alone."""

from __future__ import annotations

import pytest
import torch

from stochflow import Buffer, DetailedBalance, Grid, Known, Power, Slip, Task, Trainer, TrajectoryBalance, rollout
from stochflow.errors import UserError
from stochflow.learn.objectives import HEAD, INTENDED, JOINT, MARGINAL, PUBLISHED
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.training.sources import Logged, Mixed, OnPolicy
from stochflow.worlds.grid import Corners


def world(objective, source):
    task = Task(Grid(2, 3), Slip(0.2), Corners(3), Power(1.0))
    policy = Policy(task.env, MLP(4, 1), seeds=(0, 1), back_action=objective.form.back_action)
    with torch.no_grad():
        log = rollout(task, policy, 8)
    log = log._replace(score=task.oracle(log.states[-1]), actions=torch.full_like(log.actions, -1))
    return Trainer(task, policy, Known(task.env, task.channel), objective, source(task, policy, log))


def logged(task, policy, log):
    return Logged(log, 4)


def mixed(task, policy, log):
    buffer = Buffer(task.env, 8, 2)
    buffer.add(log)
    return Mixed(OnPolicy(task, policy, 2), buffer, 2)


@pytest.mark.parametrize("source", [logged, mixed])
@pytest.mark.parametrize(
    "objective", [TrajectoryBalance(PUBLISHED), DetailedBalance(HEAD), TrajectoryBalance(INTENDED)], ids=repr
)
def test_objectives_over_actions_refuse_them(objective, source):
    """Once: the loss was 7e15."""
    with pytest.raises(UserError, match="actions are unknown"):
        world(objective, source).train(2)


@pytest.mark.parametrize("source", [logged, mixed])
@pytest.mark.parametrize("form", [MARGINAL, JOINT], ids=["marginal", "exact posterior"])
def test_objectives_over_moves_learn_from_them(form, source):
    trainer = world(TrajectoryBalance(form), source)
    trainer.train(3)
    assert bool((trainer.stats["loss"] < 1e3).all())
