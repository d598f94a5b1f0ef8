"""What a learned model of the noise says of a batch, and its gradient, in a kernel each, are those of torch. Needs a CUDA device."""

from __future__ import annotations

import pytest
import torch

from stochflow.engines.cuda import noise as noise_kernel
from stochflow.engines.flat import FlatParameters
from stochflow.learn.rollout import rollout
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Neural
from stochflow.ops import always
from stochflow.scores.rewards import Linear
from stochflow.types import Task
from stochflow.worlds.channels import Slip
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

pytestmark = pytest.mark.gpu

WORLDS = {
    "grid": Grid(2, 8),
    "cube": Grid(4, 6),
    "strings": Strings("ACGT", 8),
    "two letters": Strings("AB", 9),
    "variable": Strings("ABC", 7, 2),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("hidden", "seeds", "batch"), [(64, 1, 16), (64, 5, 1000), (16, 2, 7)])
def test_arrivals_and_gradient_are_those_of_torch(world, hidden, seeds, batch):
    env = WORLDS[world]
    model = Neural(env, range(seeds), hidden).to("cuda")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5 * torch.randn_like(p))
    assert noise_kernel.fits(model)
    flat = FlatParameters(model, 1e-3, 10.0)
    policy = Policy(env, MLP(32, 2), seeds=range(seeds)).to("cuda")
    traj = rollout(Task(env, Slip(0.3), lambda state: state.float().sum(-1), Linear()), policy, batch)
    here = traj.states[:-1]
    legal = env.real_moves(env.moves(here))
    spoke = traj.alive if env.stop is None else traj.alive & (traj.moves != env.stop)
    with torch.no_grad():
        found, want = noise_kernel.arrivals(model, flat.averaged(), traj), model.arrivals(here, legal, traj.moves)
    where = spoke.unsqueeze(-1) & legal
    assert torch.allclose(found[where], want[where], atol=1e-4)
    shape = traj.real.shape
    for real in (
        always(shape, model.head.weight.device),
        torch.rand(shape, device="cuda") < 0.5,
        torch.zeros(shape, dtype=torch.bool, device="cuda"),
    ):
        batch_of = traj._replace(real=real)
        loss = model.loss(batch_of)
        flat.differentiate(loss)
        slope = flat.values.grad.clone()
        assert torch.allclose(noise_kernel.differentiate(model, batch_of, flat), loss, rtol=1e-5, atol=1e-6)
        assert float((flat.values.grad - slope).norm()) <= 1e-5 * float(slope.norm())


def test_what_it_does_not_know_goes_by_autograd():
    assert noise_kernel.fits(Neural(Grid(4, 40)).to("cuda"))
    assert not noise_kernel.fits(Neural(Grid(2, 8), hidden=64, layers=2).to("cuda"))
    assert not noise_kernel.fits(Neural(Strings("ABCDEFGHIJ", 4)).to("cuda"))
    assert not noise_kernel.fits(Neural(Grid(4, 400)).to("cuda"))  # no room for its weights
