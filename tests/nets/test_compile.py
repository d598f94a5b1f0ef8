"""`--compile` changes how fast things are and nothing else."""

from __future__ import annotations

import shutil

import pytest
import torch

from stochflow.engines.base import Walk
from stochflow.runs.config import configure
from stochflow.runs.experiment import Experiment
from stochflow.types import Trajectories

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler"),
]
SMALL = {"batch": 8, "seeds": 2, "net": "mlp", "hidden": 16, "objective": "tb", "device": "cpu"}


def test_compiled_and_plain_iterations_have_the_same_gradients():
    found, begun = [], None
    for compiled in (False, True):
        made = Experiment(configure("tfbind8", stick=0.25, compile=compiled, **SMALL)).trainer
        made.source.steps = None  # compiled steps draw other random numbers
        torch.manual_seed(3)
        batch = Trajectories(*[x.clone() for x in made.score(made.act())])
        made.source.walk = lambda step, batch=batch: Walk(batch)
        made.iterate(note=False)
        # Both go on from the same weights: log Z starts where its gradient is zero, and Adam makes a full step of what rounding leaves.
        begun = made.state_dict() if begun is None else begun
        made.load_state_dict(begun)
        made.iterate(note=False)
        found.append((made.policy_flat.values.grad.clone(), made.dynamics_flat.values.grad.clone()))
    for plain, fast in zip(*found, strict=True):
        assert float((fast - plain).norm()) <= 1e-5 * float(plain.norm()) + 1e-9


@pytest.mark.parametrize(("task", "settings"), [("grid", {"side": 4, "stick": 0.1}), ("tfbind8", {"stick": 0.1})])
def test_compiled_steps_walk_as_plain_ones_do(task, settings):
    made = Experiment(configure(task, compile=True, **settings, **SMALL)).trainer
    made.train(3)
    assert made.stats["finite"].tolist() == [1.0, 1.0]
    traj, env = made.act(), made.task.env
    after = torch.where(traj.alive.unsqueeze(-1), env.step(traj.states[:-1], traj.moves), traj.states[:-1])
    assert torch.equal(after, traj.states[1:])
    legal = env.moves(traj.states[:-1]).gather(-1, traj.moves.unsqueeze(-1)).squeeze(-1)
    assert bool(legal[traj.alive].all())
