"""Parts of the residual and tables of the noise: against the sums and the laws they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stochflow.law.parts import PARTS, noise_tables, residual_parts
from stochflow.learn.evaluate import evaluate
from stochflow.learn.objectives import DetailedBalance
from stochflow.learn.rollout import rollout
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known, Neural, Tabular
from stochflow.noise.thought_state import Augmented, augment
from stochflow.scores.oracles import Table
from stochflow.scores.rewards import Power
from stochflow.types import Task
from stochflow.worlds.channels import Confusion, Exact, Slip
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

WORLDS = {"tree": Strings("ABC", 3), "stop": Strings("AB", 3, 1), "dag": Grid(2, 4)}


def drawn(env, channel, many=400):
    task = Task(env, channel, Table(env, 1 + torch.rand(env.count())), Power(1.0, 1e-6))
    torch.manual_seed(0)
    policy = Policy(env, MLP(16, 1), seeds=[0, 1])
    traj = rollout(task, policy, many)
    return task, policy, traj._replace(score=task.oracle(traj.states[-1]))


@pytest.mark.parametrize("kind", WORLDS)
def test_parts_add_up_to_the_residual(kind):
    task, policy, traj = drawn(WORLDS[kind], Slip(0.25))
    dynamics = Neural(task.env, [0, 1], 8)
    found = residual_parts(task, policy, dynamics, traj)
    terms = evaluate(task, policy, dynamics, traj)
    r = DetailedBalance().residual(terms)
    mean = torch.where(traj.alive, r, 0).sum((0, 2)) / traj.alive.sum((0, 2))
    total = sum(sign * found[name] for name, sign in PARTS.items())
    assert torch.allclose(total, mean, atol=1e-4)
    rms = (torch.where(traj.alive, r.square(), 0).sum((0, 2)) / traj.alive.sum((0, 2))).sqrt()
    assert torch.allclose(found["ll_diff"], rms, rtol=1e-4)
    assert all(x.shape == (2,) and not x.requires_grad for x in found.values())


def test_tables_of_strings_are_by_position_and_those_of_a_known_channel_are_its_rows():
    table = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.7, 0.3], [0.3, 0.0, 0.7]])
    task, _, traj = drawn(WORLDS["tree"], Confusion(table))
    model = Tabular(task.env, [0, 1])
    for _ in range(20):
        model.observe(traj)
    found = noise_tables(task, model, traj)
    assert found["noise_class"].tolist() == [0, 1, 2]
    assert np.allclose(found["noise_true"], table.numpy()[None], atol=1e-6)
    assert found["noise_learned"].shape == (2, 3, 3, 3)
    assert np.abs(found["noise_learned"] - table.numpy()).max() < 0.05
    assert np.allclose(found["noise_learned"].sum(-1), 1, atol=1e-5)


def test_tables_of_a_grid_are_by_the_number_of_legal_moves():
    task, _, traj = drawn(WORLDS["dag"], Slip(0.4))
    found = noise_tables(task, Tabular(task.env, [0, 1]), traj)
    assert found["noise_class"].tolist() == [1, 2]
    assert np.allclose(found["noise_true"][1], [[0.8, 0.2], [0.2, 0.8]], atol=1e-6)
    assert np.allclose(found["noise_true"][0], np.eye(2), atol=1e-6)  # at an edge there is one move, and it happens


def test_with_thoughts_in_the_state_the_tables_are_those_of_the_letters():
    strings = Strings("ABC", 2)
    inner = Task(strings, Slip(0.3), Table(strings, torch.ones(strings.count())), Power(1.0, 1e-6))
    task = augment(inner)
    torch.manual_seed(0)
    traj = rollout(task, Policy(task.env, MLP(16, 1), seeds=[0, 1]), 1000)
    traj = traj._replace(score=task.oracle(traj.states[-1]))
    model = Augmented(task.env, Tabular(strings, [0, 1]))
    for _ in range(5):
        model.observe(traj)
    found = noise_tables(task, model, traj)
    assert found["noise_class"].tolist() == [0, 1]
    assert np.allclose(found["noise_true"], np.eye(3) * 0.7 + 0.1, atol=1e-6)
    assert found["noise_learned"].shape == (2, 2, 3, 3)
    assert np.abs(found["noise_learned"] - found["noise_true"]).max() < 0.05


def test_nothing_is_drawn_where_nothing_was_learned():
    for channel, model in ((Exact(), Neural), (Slip(0.2), Known)):
        task, _, traj = drawn(WORLDS["tree"], channel, 20)
        dynamics = Known(task.env, channel) if model is Known else model(task.env, [0, 1])
        assert noise_tables(task, dynamics, traj) == {}
