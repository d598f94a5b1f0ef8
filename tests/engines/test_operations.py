"""Facts about each operation of an engine, held to plain torch: one class per operation, every engine a parameter."""

from __future__ import annotations

import time

import pytest
import torch

from stochflow.engines.base import Rewards
from stochflow.engines.choose import engines
from stochflow.engines.eager import Eager
from stochflow.engines.flat import FlatParameters
from stochflow.learn.objectives import DetailedBalance, SubTrajectoryBalance, TrajectoryBalance
from stochflow.nets.lookup import Lookup
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known, Neural
from stochflow.scores.rewards import Linear
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Iteration, Trainer
from stochflow.types import Task
from stochflow.worlds.channels import Exact, Slip
from stochflow.worlds.grid import Corners, Grid
from stochflow.worlds.strings import Strings

ENGINES = [pytest.param("numba", id="numba"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
WORLDS = [Grid(2, 5), Grid(3, 3), Strings("ACGT", 4), Strings("AB", 5, 1)]


def score(state):
    return 0.1 + (state.float().sum(-1) % 5) / 5


def make(name, env, objective=None, net=None, seeds=(0, 1), batch=7, noise=False, oracle=score, **more):
    task = Task(env, Slip(0.3) if noise else Exact(), oracle, Linear(1.0))
    device = "cuda" if name == "cuda" else "cpu"
    policy = Policy(env, net or MLP(32, 2), seeds=seeds, **more).to(device)
    model = (Neural(env, seeds, hidden=16) if noise else Known(env, task.channel)).to(device)
    with torch.no_grad():  # biases of exactly zero lie on the kink of the ReLU, where either derivative is right
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)).to(device)
    source = OnPolicy(task, policy, batch, explore=0.2)
    return Trainer(task, policy, model, objective or TrajectoryBalance(), source, iteration=Iteration(engine=name))


def scored(trainer):
    walk = trainer.source.walk(trainer.step)
    return walk._replace(trajectories=trainer.score(walk.trajectories))


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("env", WORLDS, ids=repr)
class TestWalk:
    def test_moves_are_legal_and_states_follow(self, name, env):
        traj = make(name, env, noise=True).act()
        for t in range(env.horizon):
            state, move, alive = traj.states[t], traj.moves[t], traj.alive[t]
            legal = env.moves(state).gather(-1, move.unsqueeze(-1)).squeeze(-1)
            assert bool((legal | ~alive).all())
            after = torch.where(alive.unsqueeze(-1), env.step(state, move), state)
            assert torch.equal(after, traj.states[t + 1])

    def test_an_exact_channel_does_what_is_intended(self, name, env):
        traj = make(name, env).act()
        assert bool(((traj.actions == traj.moves) | ~traj.alive).all())

    def test_the_last_states_have_their_numbers(self, name, env):
        walk = scored(make(name, env))
        assert torch.equal(walk.trace.final, env.index(walk.trajectories.states[-1]))


@pytest.mark.parametrize("name", ENGINES)
class TestGradient:
    @pytest.mark.parametrize("noise", [False, True], ids=["exact", "learned noise"])
    @pytest.mark.parametrize("objective", [TrajectoryBalance(), DetailedBalance()], ids=["tb", "db"])
    @pytest.mark.parametrize("env", WORLDS, ids=repr)
    def test_it_is_that_of_autograd(self, name, env, objective, noise):
        self.check(make(name, env, objective, noise=noise))

    @pytest.mark.parametrize("net", [MLP(32, 1), MLP(48, 3), Lookup(32, 2, 16)], ids=repr)
    def test_of_networks_of_any_depth_with_and_without_a_table(self, name, net):
        if name == "cuda" and net != Lookup(32, 2, 16):
            pytest.skip("the kernels cover two hidden layers")
        self.check(make(name, Strings("ACGT", 4), net=net))

    def test_of_a_uniform_backward_policy(self, name):
        self.check(make(name, Grid(2, 5), learned_backward=False))

    def test_of_one_seed_and_one_trajectory(self, name):
        self.check(make(name, Grid(2, 5), seeds=(3,), batch=1))

    @staticmethod
    def check(trainer):
        walk, flat, chosen = scored(trainer), trainer.policy_flat, trainer.engines
        traj, model = walk.trajectories, trainer.dynamics
        rewards = Rewards(trainer.task.reward(traj.score, traj.states[-1], trainer.step).float(), False)
        log_k = None if model.exact else chosen.noise.arrivals(model, trainer.dynamics_flat, traj)
        found = chosen.gradient.gradient(trainer.job, walk, rewards, log_k, True)
        taken = flat.grad.clone()
        loss, _ = trainer.loss(traj, True)
        flat.differentiate(loss)
        assert torch.allclose(found.loss.mean(1), loss, rtol=1e-4)
        assert float((taken - flat.grad).norm()) <= 1e-4 * float(flat.grad.norm())


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("env", [Grid(2, 5), Strings("ACGT", 4)], ids=repr)
class TestTrace:
    """What a walk keeps for its gradient: of use until the weights change, and an error from then on."""

    @staticmethod
    def gradient(trainer, walk):
        traj = walk.trajectories
        rewards = Rewards(trainer.task.reward(traj.score, traj.states[-1], trainer.step).float(), False)
        trainer.engines.gradient.gradient(trainer.job, walk, rewards, None, False)
        return trainer.policy_flat.grad.clone()

    def test_it_holds_over_later_walks_with_the_same_weights(self, name, env):
        trainer = make(name, env)
        trainer.train(2)
        walks, taken = [], []
        for _ in range(3):
            walks.append(scored(trainer))
            taken.append(self.gradient(trainer, walks[-1]))
        assert not torch.equal(taken[0], taken[1])
        for walk, before in reversed(list(zip(walks, taken, strict=True))):
            assert torch.allclose(self.gradient(trainer, walk), before, rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("change", ["a step", "steps", "a checkpoint", "a look", "by hand"])
    def test_it_is_an_error_once_the_weights_have_changed(self, name, env, change):
        trainer = make(name, env)
        trainer.train(2)
        kept, walk = trainer.state_dict(), scored(trainer)
        if change == "a step":
            trainer.learn(walk)
        elif change == "steps":
            trainer.train(6)
        elif change == "a checkpoint":
            trainer.load_state_dict(kept)
        elif change == "a look":
            with trainer.averaged():
                trainer.source.walk(trainer.step)
        else:
            trainer.policy_flat.values.data.mul_(2)
            trainer.policy_flat.changed()
        with pytest.raises(RuntimeError, match="before the weights changed: walk again"):
            trainer.learn(walk)

    def test_weights_that_an_optimiser_of_ones_own_has_changed_are_noticed(self, name, env):
        if name == "cuda":
            pytest.skip("a kernel would have to be waited for: there, `FlatParameters.changed` has to be called")
        trainer = make(name, env)
        trainer.train(2)
        walk, weights = scored(trainer), list(trainer.policy.parameters())
        optimiser = torch.optim.SGD(weights, lr=1e-3)
        trainer.policy(walk.trajectories.states[0]).forward.square().sum().backward()
        optimiser.step()
        with pytest.raises(RuntimeError, match="before the weights changed: walk again"):
            trainer.learn(walk)

    def test_it_is_an_error_for_another_policy(self, name, env):
        one, other = make(name, env), make(name, env)
        with pytest.raises(RuntimeError, match="of another policy"):
            other.learn(scored(one))


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("env", WORLDS, ids=repr)
class TestNoise:
    def test_arrivals_and_gradient_are_those_of_torch(self, name, env):
        trainer = make(name, env, noise=True)
        engine, plain = engines()[name], Eager()
        if engine.why_not_noise(trainer.dynamics) is not None:
            pytest.skip(str(engine.why_not_noise(trainer.dynamics)))
        traj, flat, model = trainer.act(), trainer.dynamics_flat, trainer.dynamics
        made = traj.alive if env.stop is None else traj.alive & (traj.moves != env.stop)
        legal = env.real_moves(env.moves(traj.states[:-1])) & made.unsqueeze(-1)
        one, two = (e.arrivals(model, flat, traj) for e in (engine, plain))
        assert torch.allclose(one[legal], two[legal], atol=1e-4)
        loss = engine.learn_noise(model, flat, traj)
        taken = flat.grad.clone()
        assert torch.allclose(loss, plain.learn_noise(model, flat, traj), atol=1e-5)
        assert float((taken - flat.grad).norm()) <= 1e-4 * float(flat.grad.norm())


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("clip", [1e9, 0.1], ids=["free", "clipped"])
class TestUpdate:
    def test_it_is_clipped_adam_and_the_average(self, name, clip):
        device = "cuda" if name == "cuda" else "cpu"

        def run(engine):
            policy = Policy(Grid(2, 5), MLP(16, 2), seeds=range(3)).to(device)
            flat = FlatParameters(policy, 1e-2, clip)
            step = torch.zeros((), dtype=torch.float64, device=device)
            generator = torch.Generator().manual_seed(0)
            for _ in range(4):
                flat.take([torch.randn(p.shape, generator=generator).to(device) for p in flat.named.values()])
                norms = engine.update(flat, step, True).clone()
            assert float(step) == 4
            return flat, norms

        (one, norms), (two, others) = run(engines()[name]), run(Eager())
        assert torch.allclose(norms, others, rtol=1e-5)
        for vector in ("values", "average", "moments", "adam_step"):
            assert torch.allclose(getattr(one, vector), getattr(two, vector), atol=2e-6), vector


def test_what_is_not_covered_is_refused_in_words():
    trainer = make("auto", Grid(2, 5), SubTrajectoryBalance(0.9))
    assert trainer.engines.gradient.name == "eager"
    assert any("SubTrajectoryBalance" in reason for reason in trainer.engines.reasons["gradient"])


@pytest.mark.parametrize("env", WORLDS, ids=repr)
def test_the_number_of_threads_changes_no_digit(env):
    states = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            torch.manual_seed(3)
            trainer = make("numba", env, seeds=range(3), noise=True)
            trainer.train(5)
            states.append(trainer.state_dict())
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0] if not k.startswith("random"))


@pytest.mark.slow  # compiles for a quarter of a minute where nothing is cached
@pytest.mark.parametrize("noise", [False, True], ids=["exact", "noise"])
class TestMany:
    """Several iterations in one call."""

    def test_the_state_is_that_of_single_iterations(self, noise, monkeypatch):
        env, oracle = Grid(2, 5), Corners(5)
        alone, many = (make("numba", env, DetailedBalance(), noise=noise, oracle=oracle) for _ in range(2))
        state = torch.get_rng_state()
        alone.train(60, every=1)  # statistics at every iteration: none is made together with others
        torch.set_rng_state(state)
        monkeypatch.setattr("stochflow.engines.numba.many.BEFORE", 5)
        many.train(10, every=1000)
        traces = many.source.traces
        assert not isinstance(traces.many, str)
        deadline = time.monotonic() + 300
        while not traces.many.ready:
            assert time.monotonic() < deadline, "it does not compile"
            time.sleep(0.05)
        walks = traces.walks
        with torch.random.fork_rng():
            older = many.source.walk(many.step)
        many.train(60, every=1000)
        assert traces.walks - walks < 10, "most iterations were made together"
        with pytest.raises(RuntimeError, match="walk again"):
            many.learn(older)
        expected, found = alone.state_dict(), many.state_dict()
        differ = [name for name in expected if name != "stats" and not torch.equal(expected[name], found[name])]
        assert differ == []
