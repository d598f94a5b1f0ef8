"""A rollout in one kernel is, in law, the rollout step by step. Needs a CUDA device."""

from __future__ import annotations

import pytest
import torch

from stochflow.engines.cuda.walk import fits, walk
from stochflow.law.exact import Graph, exact_law
from stochflow.learn.rollout import rollout
from stochflow.nets.lookup import Lookup
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.runs.config import configure
from stochflow.runs.experiment import Experiment
from stochflow.scores.rewards import Linear
from stochflow.types import Task
from stochflow.worlds.channels import Confusion, Exact, Slip
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

pytestmark = pytest.mark.gpu

DRAWS = 200_000
WORLDS = {
    "grid": lambda: Grid(2, 4),
    "cube": lambda: Grid(3, 3),
    "strings": lambda: Strings("ACGT", 3),
    "variable": lambda: Strings("AB", 4, 1),
    "many letters": lambda: Strings("".join(chr(0x100 + i) for i in range(40)), 2),
    "more letters": lambda: Strings("".join(chr(0x100 + i) for i in range(200)), 1),
}


def score(state):
    return state.float().sum(-1)


def make(world: str, channel, net) -> tuple[Task, Policy]:
    env = WORLDS[world]()
    policy = Policy(env, net, seeds=(0, 1)).to("cuda")
    with torch.no_grad():
        policy.head.weight.mul_(10)  # far from uniform
    return Task(env, channel, score, Linear()), policy


CASES = [
    (w, c, n)
    for w in WORLDS
    for c in (Exact(), Slip(0.3))
    for n in (MLP(32, 2), Lookup(16, 2, 32))
    if w in ("strings", "variable") or isinstance(n, MLP)
] + [("more letters", Slip(0.3), MLP(width, 2)) for width in (16, 64, 256)]


@pytest.mark.parametrize("way", ["network", "early states"])
@pytest.mark.parametrize(("world", "channel", "net"), CASES, ids=lambda x: str(x))
def test_its_samples_have_the_exact_law(world, channel, net, way):
    task, policy = make(world, channel, net)
    assert fits(task, policy)
    assert policy.early(task.env.horizon, DRAWS) is not None  # so many meet the same states that each is computed once
    if way == "network":
        policy._early[task.env.horizon, DRAWS] = None
    torch.manual_seed(0)
    found = walk(task, policy, DRAWS, None)
    assert found is not None, "the kernel was not compiled"
    graph = Graph(task.env, device="cuda")
    with torch.no_grad():
        want = exact_law(graph, channel, policy).cpu()  # [S, N]
    for s in range(2):
        count = torch.bincount(task.env.index(found.states[-1, s]).cpu(), minlength=want.shape[1]).double()
        tv = 0.5 * (count / DRAWS - want[s]).abs().sum()
        assert float(tv) < 3 * (len(graph) / DRAWS) ** 0.5, float(tv)  # sampling alone gives about 0.4 of that root


@pytest.mark.parametrize(("world", "channel", "net"), CASES, ids=lambda x: str(x))
def test_its_trajectories_hold_together(world, channel, net):
    task, policy = make(world, channel, net)
    env = task.env
    for explore in (None, torch.tensor(0.5, device="cuda", dtype=torch.float64)):
        traj = rollout(task, policy, 1001, explore=explore)
        stopped = torch.zeros_like(traj.alive[0])
        for t in range(env.horizon):
            mask, alive = env.moves(traj.states[t]), traj.alive[t]
            assert torch.equal(alive, env.real_moves(mask).any(-1) & ~stopped)
            for chosen in (traj.actions[t], traj.moves[t]):
                assert bool(mask.gather(-1, chosen.unsqueeze(-1))[alive].all())
            assert torch.equal(
                torch.where(alive.unsqueeze(-1), env.step(traj.states[t], traj.moves[t]), traj.states[t]),
                traj.states[t + 1],
            )
            if env.stop is not None:
                stopped = stopped | (alive & (traj.actions[t] == env.stop))
                assert torch.equal((traj.actions[t] == env.stop)[alive], (traj.moves[t] == env.stop)[alive])
    assert not torch.equal(traj.states, rollout(task, policy, 1001).states)


def test_what_it_does_not_know_walks_step_by_step():
    env = Strings("AB", 3)
    policy = Policy(env, MLP(32, 2)).to("cuda")
    noisy = Task(env, Confusion([[0.9, 0.1], [0.2, 0.8]]), score, Linear())
    assert not fits(noisy, policy)
    assert not fits(Task(env, Exact(), score, Linear()), Policy(env, MLP(48, 2)))
    assert rollout(noisy, policy, 10).states.shape == (4, 1, 10, 3)


def test_a_run_with_the_kernel_learns_what_a_run_without_it_learns():
    errors = []
    for kernel in (False, True):
        made = Experiment(configure("grid", side=6, device="cuda", seeds=4, batch=64, net="mlp", hidden=64))
        made.trainer.source.kernel = kernel
        made.trainer.train(1500)
        errors.append(float(torch.as_tensor(made.measure()["tv"]).mean()))
    assert max(errors) < 0.02, errors


def test_a_seed_without_sense_stays_in_range_and_leaves_the_others_alone():
    found = []
    for ill in (False, True):
        task, policy = make("grid", Slip(0.3), MLP(32, 2))
        if ill:
            for p in policy.parameters():
                p.data[1] = torch.nan
        torch.manual_seed(0)
        found.append(rollout(task, policy, 100))
    healthy, ill = found
    assert int(ill.actions.max()) < task.env.num_moves
    assert torch.equal(healthy.states[:, 0], ill.states[:, 0])
