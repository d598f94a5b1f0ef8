"""The gradient in four kernels is the gradient of autograd; an update in two is the update of torch. Needs a CUDA device."""

from __future__ import annotations

import pytest
import torch

from stochflow.engines.cuda import update as adam_kernel
from stochflow.engines.cuda.gradient import fits
from stochflow.engines.flat import FlatParameters
from stochflow.learn.objectives import JOINT, DetailedBalance, SubTrajectoryBalance, TrajectoryBalance
from stochflow.learn.rollout import rollout
from stochflow.nets.lookup import Lookup
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known, Neural, Tabular
from stochflow.runs.config import configure
from stochflow.runs.experiment import Experiment
from stochflow.scores.oracles import Table
from stochflow.scores.rewards import Linear, Power
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Trainer
from stochflow.types import Task
from stochflow.worlds.channels import Exact, Slip
from stochflow.worlds.grid import Corners, Grid
from stochflow.worlds.strings import Strings

pytestmark = pytest.mark.gpu

ALPHABET = "".join(chr(0x100 + i) for i in range(256))
WORLDS = {
    "grid": lambda: Grid(2, 8),
    "cube": lambda: Grid(4, 6),
    "strings": lambda: Strings("ACGT", 8),
    "variable": lambda: Strings("ABC", 7, 2),
    "many": lambda: Strings(ALPHABET, 5),
    "some": lambda: Strings(ALPHABET[:40], 5),
    "few": lambda: Strings(ALPHABET[:32], 4),
    "long": lambda: Strings("ABC", 12, 2),
}


def score(state):
    return state.float().sum(-1)


def make(
    env, net, seeds: int, batch: int, learned_backward: bool = True, objective=TrajectoryBalance(), noise: str = ""
) -> Trainer:  # noqa: B008 - a frozen value
    task = Task(env, Slip(0.3) if noise else Exact(), score, Linear(0.3))
    policy = Policy(env, net, seeds=range(seeds), learned_backward=learned_backward).to("cuda")
    models = {"neural": lambda: Neural(env, range(seeds)), "tabular": lambda: Tabular(env, range(seeds))}
    dynamics = models.get(noise, lambda: Known(env, task.channel))().to("cuda")
    with torch.no_grad():
        for p in (*policy.parameters(), *dynamics.parameters()):
            p.add_(0.1 * torch.randn_like(p))
    return Trainer(task, policy, dynamics, objective, OnPolicy(task, policy, batch, explore=0.1))


@pytest.mark.parametrize("env", [Grid(2, 8), Grid(4, 5), Strings("ACGT", 4), Strings("AB", 5, 1)], ids=str)
def test_what_is_looked_up_is_what_the_oracle_says(env):
    oracle = Corners(env.side, 0.01) if isinstance(env, Grid) else Table(env, torch.rand(env.count()) + 0.1)
    task, policy = Task(env, Exact(), oracle, Power(2.0, 1e-3)), Policy(env, MLP(64, 2), seeds=range(2)).to("cuda")
    trainer = Trainer(
        task, policy, Known(env, task.channel).to("cuda"), TrajectoryBalance(), OnPolicy(task, policy, 33, explore=0.3)
    )
    traj = trainer.score(trainer.act())
    assert trainer.source.trace_of(traj) is not None
    said = oracle(traj.states[-1])
    assert torch.equal(traj.score, said)
    found = trainer._log_rewards(traj)[env.index(traj.states[-1])]
    assert torch.allclose(found, task.reward(said, traj.states[-1], None))
    assert torch.equal(trainer.source.trace_of(traj).finals, env.index(traj.states[-1]))
    looked = trainer._balance_by_trace(traj, trainer._log_rewards(traj), False)
    trainer._known = None
    given = trainer._balance_by_trace(traj, found, False)
    for one, other in zip(looked[:2], given[:2], strict=True):
        assert torch.allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("width", "seeds", "batch"),
    [(256, 1, 16), (256, 1, 200), (256, 1, 500), (256, 1, 1200), (32, 3, 33), (128, 2, 400), (64, 1, 1), (64, 2, 3000)],
)
def test_its_gradient_is_that_of_autograd(world, width, seeds, batch, assert_gradient_of_autograd):
    trainer = make(WORLDS[world](), MLP(width, 2), seeds, batch)
    assert trainer.source.traces
    assert_gradient_of_autograd(trainer, 1e-5)


@pytest.mark.parametrize("world", ["grid", "cube", "strings", "variable"])
@pytest.mark.parametrize("noise", ["", "known", "neural", "tabular"])
@pytest.mark.parametrize("objective", [TrajectoryBalance(), DetailedBalance()], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize(
    ("net", "seeds", "batch"), [(MLP(128, 2), 2, 33), (MLP(64, 2), 1, 3000), (Lookup(64, 2, 32), 2, 3000)], ids=str
)
def test_with_noise_and_tables_too(world, noise, objective, net, seeds, batch, assert_gradient_of_autograd):
    env = WORLDS[world]()
    if isinstance(net, Lookup) and isinstance(env, Grid):
        pytest.skip("with a look-up table, grids walk step by step")
    trainer = make(env, net, seeds, batch, objective=objective, noise=noise)
    assert trainer.source.traces
    assert_gradient_of_autograd(trainer, 1e-5)


RARE = {  # shapes that the worlds above do not have
    "a far corner": (Grid(4, 20), MLP(64, 2), True),  # a trajectory of several warps
    "one step": (Strings("ACGT", 1), MLP(64, 2), True),
    "a narrow table": (Strings("ACGT", 6), Lookup(64, 2, 16), True),
    "a wide table": (Strings("ACGT", 6), Lookup(64, 2, 128), True),
    "a large head that may stop": (
        Strings(ALPHABET[:40], 20, 3),
        MLP(64, 2),
        False,
    ),  # and states that are looked at twice
}


@pytest.mark.parametrize("case", RARE)
@pytest.mark.parametrize("noise", ["", "known"])
@pytest.mark.parametrize("objective", [TrajectoryBalance(), DetailedBalance()], ids=lambda o: type(o).__name__)
def test_rare_shapes(case, noise, objective, assert_gradient_of_autograd):
    env, net, flows = RARE[case]
    trainer = make(env, net, 2, 50, objective=objective, noise=noise)
    assert trainer.source.traces == (flows or isinstance(objective, TrajectoryBalance))
    if trainer.source.traces:
        assert_gradient_of_autograd(trainer, 1e-5)


def test_large_blocks_go_on_where_more_states_are_reached_than_was_thought(assert_gradient_of_autograd):
    trainer = make(Grid(4, 20), MLP(256, 2), 1, 300)
    with torch.no_grad():
        trainer.policy.head.bias[..., trainer.task.env.stop] -= 8.0
    assert trainer.source.traces
    assert_gradient_of_autograd(trainer, 1e-5)


@pytest.mark.parametrize("objective", [TrajectoryBalance(), DetailedBalance()], ids=lambda o: type(o).__name__)
def test_a_uniform_way_back_has_no_gradient_and_counts(objective, assert_gradient_of_autograd):
    trainer = make(Grid(3, 5), MLP(64, 2), 2, 16, learned_backward=False, objective=objective)
    assert_gradient_of_autograd(trainer, 1e-5)


@pytest.mark.parametrize("batch", [50, 3000])
@pytest.mark.parametrize("world", WORLDS)
def test_a_trace_is_what_the_network_says(world, batch):
    trainer = make(WORLDS[world](), MLP(64, 2), 2, batch)
    trainer.source.traces = True
    env, policy = trainer.task.env, trainer.policy
    traj = trainer.act()
    sums, hidden, outs, numbers, _, early, finals, _ = trainer.source.trace
    assert torch.equal(finals, env.index(traj.states[-1]))
    steps, shared = env.horizon + (not env.tree), 0 if early is None else early.steps
    assert (early is not None) == (batch == 3000)
    states = traj.states[shared:steps].transpose(0, 1).flatten(1, 2)
    moved = traj.alive if env.stop is None else traj.alive & (traj.moves != env.stop)
    reached = torch.cat([torch.ones_like(moved[:1]), moved])[:steps]
    known = reached[shared:].transpose(0, 1).flatten(1)
    if early is not None:
        states = torch.cat([early.states.expand(2, -1, -1), states], 1)
        known = torch.cat([torch.ones(2, len(early.states), dtype=torch.bool, device="cuda"), known], 1)
        assert torch.equal(numbers[reached[:shared]].long(), env.index(traj.states[:shared])[reached[:shared]])
    one, two = policy.trunk.layers
    with torch.no_grad():
        want_sums = one(env.features(states))
        want_hidden = torch.relu(two(torch.relu(want_sums)))
        want = policy.head(want_hidden)
    columns = want.shape[-1] if want.shape[-1] <= 32 else env.num_moves
    for found, right in ((sums, want_sums), (hidden, want_hidden), (outs[..., :columns], want[..., :columns])):
        assert torch.allclose(found[known], right[known], atol=1e-4)


def test_what_it_does_not_know_goes_by_autograd():
    env = Strings("ACGT", 5)
    task = Task(env, Slip(0.2), score, Linear())
    known = Known(env, task.channel)
    mlp, table, three = (Policy(env, net).to("cuda") for net in (MLP(64, 2), Lookup(64, 2, 32), MLP(64, 3)))
    for objective in (TrajectoryBalance(), DetailedBalance()):
        assert fits(task, mlp, known, objective, 16)
        assert fits(task, table, known, objective, 16)
        assert not fits(task, three, known, objective, 16)
    assert not fits(task, mlp, known, DetailedBalance(JOINT), 16)
    assert not fits(task, mlp, known, SubTrajectoryBalance(), 16)
    many = Strings(
        ALPHABET[:40], 5
    )  # of many outputs a walk keeps those of the moves alone, and detailed balance needs flows
    assert not fits(
        Task(many, Exact(), score, Linear()),
        Policy(many, MLP(64, 2)).to("cuda"),
        Known(many, Exact()),
        DetailedBalance(),
        16,
    )


@pytest.mark.parametrize("blocks", [adam_kernel.BLOCKS, 2])
@pytest.mark.parametrize("seeds", [1, 3])
def test_an_update_is_that_of_torch(seeds, blocks, monkeypatch):
    """In blocks of 512 numbers, and in blocks that go on to others."""
    monkeypatch.setattr(adam_kernel, "BLOCKS", blocks)
    monkeypatch.setattr(adam_kernel, "PARTS", blocks)
    flats = []
    for kernel in (True, False):
        flats.append(
            FlatParameters(Policy(Grid(2, 8), MLP(64, 2), seeds=range(seeds)).to("cuda"), 1e-2, 0.5, follow=True)
        )
        assert flats[-1].kernel is not None
        if not kernel:
            flats[-1].kernel = None
    for step in range(6):
        slope = torch.randn_like(flats[0].values) * 10.0 ** (step % 3 - 2)
        for flat in flats:
            for name, here in flat.slices.items():
                flat.slopes[name].copy_(slope[here].view_as(flat.slopes[name]))
            done = torch.tensor(700.0 * step, dtype=torch.float64, device="cuda")
            flat.update(done, ends=step % 2 == 1)
            assert float(done) == 700 * step + step % 2
        for part in ("values", "average", "follower", "moments", "norms"):
            assert torch.allclose(getattr(flats[0], part), getattr(flats[1], part), rtol=1e-5, atol=1e-7), (step, part)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"task": "grid", "side": 6, "net": "mlp", "objective": "tb"}, 0.02),
        ({"task": "grid", "side": 6, "net": "mlp", "objective": "db", "stick": 0.25}, 0.03),
    ],
)
def test_a_run_in_kernels_learns_what_a_run_by_autograd_learns(settings, most):
    errors = []
    for trace in (False, True):
        given = {k: v for k, v in settings.items() if k != "task"}
        made = Experiment(configure(settings["task"], **given, device="cuda", seeds=4, batch=64, hidden=64))
        assert made.trainer.source.traces
        made.trainer.source.traces = trace
        made.trainer.train(1500)
        errors.append(float(torch.as_tensor(made.measure()["tv"]).mean()))
    assert max(errors) < most, errors


@pytest.mark.parametrize(
    ("env", "batch"), [(Grid(2, 8), 4096), (Strings("ACGT", 6), 4096), (Strings("ACG", 5, 1), 4096)], ids=str
)
@pytest.mark.parametrize("net", [MLP(64, 2), Lookup(64, 2, 32)], ids=str)
def test_states_that_all_meet_are_computed_once_and_nothing_changes(env, batch, net):
    """Outputs and gradients of `along`, with early states shared and without."""
    policy = Policy(env, net, seeds=(0, 1)).to("cuda")
    task = Task(env, Exact(), score, Linear())
    traj = rollout(task, policy, batch)
    early = policy.early(len(traj.states), batch)
    assert early is not None
    assert len(early.states) < early.steps * batch
    shared = policy.along(traj)
    policy._early[len(traj.states), batch] = None
    plain = policy.along(traj)
    assert torch.allclose(shared.forward, plain.forward, atol=1e-5)
    weight = torch.randn_like(plain.forward)
    slopes = [
        torch.autograd.grad((out.forward * weight).sum(), list(policy.parameters()), allow_unused=True)
        for out in (shared, plain)
    ]
    for a, b in zip(*slopes, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert float((a - b).norm()) <= 1e-4 * float(b.norm()) + 1e-6
