"""On the CPU a learned model of the noise has a way of its own, to the same answers and the same gradient."""

from __future__ import annotations

import pytest
import torch

from stochflow.engines.flat import FlatParameters
from stochflow.engines.numba import noise as cpu_noise
from stochflow.learn.rollout import rollout
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Neural, Tabular
from stochflow.scores.rewards import Linear
from stochflow.types import Task
from stochflow.worlds.channels import Slip
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

WORLDS = {
    "grid": Grid(2, 6),
    "cube": Grid(4, 4),
    "strings": Strings("ACGT", 5),
    "variable": Strings("ABC", 6, 2),
    "many": Strings("ABCDEFGHIJ", 3),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("seeds", "batch"), [(1, 40), (1, 3), (3, 20)])
def test_arrivals_and_gradient_are_those_of_torch(world, seeds, batch):
    env = WORLDS[world]
    model = Neural(env, range(seeds), hidden=32)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5 * torch.randn_like(p))
    assert cpu_noise.fits(model)
    flat = FlatParameters(model, 1e-3, 10.0)
    traj = rollout(
        Task(env, Slip(0.3), lambda state: state.float().sum(-1), Linear()),
        Policy(env, MLP(32, 2), seeds=range(seeds)),
        batch,
    )
    here = traj.states[:-1]
    with torch.no_grad():
        found, want = (
            cpu_noise.arrivals(model, flat.averaged(), traj),
            model.arrivals(here, env.real_moves(env.moves(here)), traj.moves),
        )
    decided = traj.alive if env.stop is None else traj.alive & (traj.moves != env.stop)
    assert torch.allclose(found[decided], want[decided], atol=1e-5)
    for real in (traj.real, torch.rand(traj.real.shape) < 0.5, torch.zeros_like(traj.real)):
        part = traj._replace(
            real=real, actions=torch.where(real, traj.actions, -1)
        )  # nobody knows what was meant elsewhere
        loss = model.loss(part)
        flat.differentiate(loss)
        slope = flat.values.grad.clone()
        flat.values.grad.fill_(torch.nan)
        assert torch.allclose(cpu_noise.differentiate(model, part, flat), loss, rtol=1e-5, atol=1e-6)
        for name, piece in flat.slices.items():
            assert torch.allclose(flat.slopes[name].flatten(), slope[piece], atol=1e-6), name


def test_what_it_does_not_know_goes_by_autograd():
    assert not cpu_noise.fits(Tabular(Grid(2, 4)))
    assert not cpu_noise.fits(Neural(Grid(2, 4), layers=2))
    assert not cpu_noise.fits(Neural(Strings("ACGT", 40)))  # too many states to have numbers
    assert not cpu_noise.fits(Neural(Strings("ABCDEFGHIJKLMNOPQRST", 3)))  # too many letters for it to pay
