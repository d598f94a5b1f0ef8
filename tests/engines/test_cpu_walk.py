"""A small batch on the CPU walks and learns by a way of its own, to the same trajectories and the same gradient."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from stochflow.engines.flat import FlatParameters
from stochflow.engines.numba import compiled as cpu_compiled
from stochflow.engines.numba import gradient as cpu_balance
from stochflow.engines.numba import walk as cpu_walk
from stochflow.engines.numba.compiled import in_parts
from stochflow.errors import UserError
from stochflow.learn.objectives import JOINT, DetailedBalance, SubTrajectoryBalance, TrajectoryBalance
from stochflow.learn.rollout import rollout
from stochflow.nets.lookup import Lookup
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.nets.transformer import Transformer
from stochflow.noise.dynamics import Known, Neural, Tabular
from stochflow.scores.rewards import Linear
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Trainer
from stochflow.types import Task
from stochflow.worlds.channels import Confusion, Exact, Neighbour, Slip
from stochflow.worlds.env import Channel
from stochflow.worlds.grid import Grid
from stochflow.worlds.memory import Fatigue
from stochflow.worlds.strings import Strings

MANY = "".join(chr(0x100 + i) for i in range(256))
WORLDS = {
    "grid": lambda: Grid(2, 8),
    "cube": lambda: Grid(4, 5),
    "line": lambda: Grid(1, 3),
    "strings": lambda: Strings("ACGT", 7),
    "variable": lambda: Strings("ABC", 6, 2),
    "any length": lambda: Strings("AB", 5, 0),
    "many letters": lambda: Strings(MANY, 4),
}


class Silent(Slip):
    """A slip that says nothing of actions that nobody may take, as a channel may: 0 / 0."""

    def log_probs(self, state, legal, action, memory=None):
        return torch.where(
            legal.gather(-1, action.unsqueeze(-1)), super().log_probs(state, legal, action, memory), torch.nan
        )

    def arrivals(self, state, legal, move, memory=None):
        return torch.where(legal, super().arrivals(state, legal, move, memory), torch.nan)


NOISES = {  # a channel and who models it
    "exact": lambda env, seeds: (Exact(), Known(env, Exact())),
    "known": lambda env, seeds: (Slip(0.3), Known(env, Slip(0.3))),
    "neural": lambda env, seeds: (Slip(0.3), Neural(env, range(seeds), hidden=8)),
    "counted": lambda env, seeds: (Slip(0.3), Tabular(env, range(seeds))),
    "silent": lambda env, seeds: (Silent(0.3), Known(env, Silent(0.3))),
}


def score(state):
    return state.float().sum(-1)


def policy_of(env, net, seeds: int, learned_backward: bool = True) -> Policy:
    torch.manual_seed(0)
    policy = Policy(env, net, seeds=range(seeds), learned_backward=learned_backward)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return policy


def trainer_of(
    env,
    net=MLP(32, 2),  # noqa: B008 - a frozen value
    seeds: int = 1,
    batch: int = 16,
    learned_backward: bool = True,
    objective=TrajectoryBalance(),  # noqa: B008 - a frozen value
    noise: str = "exact",
) -> Trainer:
    channel, dynamics = NOISES[noise](env, seeds)
    task, policy = Task(env, channel, score, Linear(0.3)), policy_of(env, net, seeds, learned_backward)
    with torch.no_grad():
        for p in dynamics.parameters():
            p.add_(0.5 * torch.randn_like(p))
    return Trainer(task, policy, dynamics, objective, OnPolicy(task, policy, batch, explore=0.1))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("channel", [Exact(), Slip(0.3), Neighbour(0.3)], ids=str)
@pytest.mark.parametrize(
    ("net", "seeds", "batch"),
    [(MLP(32, 2), 1, 16), (MLP(16, 1), 3, 5), (MLP(16, 3), 2, 90), (Lookup(16, 2, 8), 2, 12)],
    ids=str,
)
def test_it_draws_the_trajectories_of_the_plain_way(world, channel, net, seeds, batch):
    env = WORLDS[world]()
    if isinstance(net, Lookup) and world == "many letters":
        pytest.skip("a table of four billion rows")
    task, policy = Task(env, channel, score, Linear()), policy_of(env, net, seeds)
    assert cpu_walk.fits(task, policy, batch)
    tempers = torch.full((seeds, 1, 1), 2.0), torch.linspace(0.2, 5.0, seeds * batch).view(seeds, batch, 1)
    for explore, temper in ((None, None), (0.3, None), (torch.full((1, 1, 1), 0.3), tempers[0]), (0.3, tempers[1])):
        found = []
        for kernel in (True, False):
            torch.manual_seed(1)
            found.append((rollout(task, policy, batch, explore=explore, temper=temper, kernel=kernel), torch.rand(())))
        (quick, next_quick), (plain, next_plain) = found
        assert torch.equal(quick.states, plain.states)
        assert torch.equal(quick.alive, plain.alive)
        assert torch.equal(
            quick.actions[plain.alive], plain.actions[plain.alive]
        )  # what is drawn after the end means nothing
        assert torch.equal(quick.moves[plain.alive], plain.moves[plain.alive])
        assert next_quick == next_plain  # and leaves the generator where it would have been


class OwnExact(Channel):
    """A user's own: it says that it is exact, and draws all the same, as `Channel.sample` does."""

    exact = True

    def log_probs(self, state, legal, action, memory=None):
        return Exact().log_probs(state, legal, action)


@pytest.mark.parametrize(
    "channel", [Exact(), OwnExact(), Slip(0.0), Slip(0.3), Neighbour(0.3)], ids=lambda x: type(x).__name__
)
def test_how_long_a_rollout_was_does_not_show_in_later_random_numbers(channel):
    env, found = Grid(2, 4), set()
    policy = policy_of(env, MLP(8, 2), 2)
    task = Task(env, channel, score, Linear())
    for end in (-50.0, 50.0):  # never, at once
        policy.head.bias.data[..., env.stop] = end
        for kernel in (True, False):
            torch.manual_seed(1)
            length = rollout(task, policy, 5, kernel=kernel).alive.sum(0)
            assert (length == 1).all() if end > 0 else (length == 6).all()
            found.add(float(torch.rand(())))
    assert len(found) == 1


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("net", "seeds", "batch"),
    [(MLP(64, 2), 1, 16), (MLP(32, 3), 3, 33), (MLP(16, 1), 2, 120), (MLP(32, 2), 1, 1)],
    ids=str,
)
def test_its_gradient_is_that_of_autograd(world, net, seeds, batch, assert_gradient_of_autograd):
    trainer = trainer_of(WORLDS[world](), net, seeds, batch)
    assert_gradient_of_autograd(trainer, 2e-6)
    source = trainer.source
    assert torch.equal(source.trace.finals, trainer.task.env.index(source._last[1][-1]))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("objective", [TrajectoryBalance(), DetailedBalance()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("net", [MLP(32, 2), Lookup(16, 2, 8)], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_its_gradient_is_that_of_autograd_whatever_the_balance_and_the_noise(
    world, net, objective, noise, assert_gradient_of_autograd
):
    """At batches whose trajectories share the network's word on early states, and at some whose trajectories do not."""
    if world == "many letters" and (isinstance(net, Lookup) or noise == "counted"):
        pytest.skip("a table of four billion rows, or counts of each of 256 letters for each")
    for seeds, batch in ((1, 2), (1, 90), (2, 3), (2, 60)):
        trainer = trainer_of(WORLDS[world](), net, seeds, batch, objective=objective, noise=noise)
        trainer.iterate()  # from here on, the noise's model and its average differ
        trainer.policy.log_z_unit.data += 1.0  # a residual near zero is the rounding of what it is the sum of
        assert_gradient_of_autograd(trainer, 4e-6)


@pytest.mark.parametrize("objective", [TrajectoryBalance(), DetailedBalance()], ids=lambda x: type(x).__name__)
def test_a_uniform_way_back_has_no_gradient_and_counts(objective, assert_gradient_of_autograd):
    trainer = trainer_of(Grid(3, 5), learned_backward=False, objective=objective)
    assert_gradient_of_autograd(trainer, 2e-6)


def test_what_it_does_not_know_walks_and_learns_the_plain_way():
    env = Strings("AB", 4)
    exact, known = Task(env, Exact(), score, Linear()), Known(env, Exact())
    mlp = policy_of(env, MLP(16, 2), 1)
    assert cpu_walk.fits(Task(env, Confusion([[0.9, 0.1], [0.2, 0.8]]), score, Linear()), mlp, 16)
    assert not cpu_walk.fits(Task(env, Fatigue(0.1, 0.1), score, Linear()), mlp, 16)
    transformer = policy_of(env, Transformer(16, 1, 2), 1)
    assert not cpu_walk.fits(exact, transformer, 16)
    assert not cpu_walk.fits(exact, mlp, 1 << 20)
    assert cpu_balance.fits(exact, mlp, known, TrajectoryBalance(), 16)
    assert not cpu_balance.fits(exact, transformer, known, TrajectoryBalance(), 16)
    assert not cpu_balance.fits(exact, mlp, known, SubTrajectoryBalance(), 16)
    assert not cpu_balance.fits(exact, mlp, known, DetailedBalance(JOINT), 16)
    assert not cpu_balance.fits(exact, Policy(env, MLP(16, 2), back_action=True), known, TrajectoryBalance(), 16)
    tired = Fatigue(0.1, 0.1)
    assert not cpu_balance.fits(
        exact, mlp, Known(env, tired), TrajectoryBalance(), 16
    )  # a model that remembers, of a world that need not


def test_the_update_is_that_of_torchs_own_adam():
    flat = FlatParameters(policy_of(Grid(2, 4), MLP(16, 2), 1), lr=0.01, clip=1e9, decay=0.0)
    weight = flat.values.detach().clone().requires_grad_()
    adam = torch.optim.Adam([weight], lr=torch.tensor(0.01), fused=True)
    for step in range(5):
        weight.grad = torch.randn_like(weight)
        flat.values.grad.copy_(weight.grad)
        flat.update(torch.tensor(float(step), dtype=torch.float64))
        adam.step()
        assert torch.equal(flat.values, weight)


def test_a_run_does_not_depend_on_when_somebody_looks():
    found = []
    for every in (2, 1000):
        trainer = trainer_of(Grid(2, 6))
        torch.manual_seed(3)
        trainer.train(9, every=every)
        found.append(trainer.state_dict())
    for name, value in found[0].items():
        if name != "stats":
            assert torch.equal(value, found[1][name]), name


@pytest.mark.parametrize("noise", ["exact", "known"])
@pytest.mark.parametrize("objective", [TrajectoryBalance(), DetailedBalance()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("net", [MLP(32, 2), MLP(17, 2), Lookup(16, 2, 7)], ids=str)
@pytest.mark.parametrize(
    ("world", "batch"), [("grid", 16), ("cube", 16), ("cube", 3), ("variable", 4), ("variable", 60), ("any length", 16)]
)
def test_a_seed_is_not_touched_by_others_that_end_elsewhere(world, batch, net, objective, noise):
    """Seed 1 between two that stop as soon as they may, and between two that never do: how many states those reach must not show in its rounding,
    neither by the shape of a product nor by where its numbers begin. With early states and without."""
    found = []
    for push in (-50.0, 50.0):
        trainer = trainer_of(WORLDS[world](), net, 3, batch, objective=objective, noise=noise)
        assert trainer.source.traces
        with torch.no_grad():
            trainer.policy.head.bias[::2, 0, trainer.task.env.stop] = push
        torch.manual_seed(0)
        for _ in range(3):
            trainer.iterate(False)
        found.append([p[1].clone() for p in trainer.policy.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_long_string_over_many_letters_that_may_end_anywhere_learns_likewise(assert_gradient_of_autograd):
    """Too many states to have numbers, and too many flags to be multiplied."""
    env = Strings(MANY, 9, 1)
    for seeds in (1, 3):
        trainer = trainer_of(env, seeds=seeds, batch=7)
        assert not trainer.policy.trunk.numbered
        trainer.policy.head.bias.data[..., env.stop] += 3.0
        assert_gradient_of_autograd(trainer, 2e-6)


class Reversing(OnPolicy):
    """Learns from its batch in another order."""

    mixed = 0

    def mix(self, traj):
        self.mixed += 1
        return traj


class Stubborn(Policy):
    """Always means the first move."""

    def begin(self, state, context=None):
        logits, cache = super().begin(state, context)
        return logits.index_fill(-1, torch.tensor(0), 1e6), cache

    def advance(self, cache, state, move, t):
        logits, cache = super().advance(cache, state, move, t)
        return logits.index_fill(-1, torch.tensor(0), 1e6), cache


class Dawdling(Strings):
    """Takes more steps than it has letters."""

    def __init__(self):
        super().__init__("AB", 3, 0)
        self.horizon = 6


def test_a_source_that_changes_its_batch_is_asked_to():
    env = Grid(2, 4)
    task, policy = Task(env, Exact(), score, Linear()), policy_of(env, MLP(16, 2), 1)
    source = Reversing(task, policy, 8)
    Trainer(task, policy, Known(env, task.channel), TrajectoryBalance(), source).train(5)
    assert source.mixed == 5


def test_a_trace_serves_the_trajectories_it_is_of_and_no_others():
    trainer = trainer_of(Grid(2, 4))
    first = trainer.score(trainer.act())
    assert trainer.source.trace_of(first) is trainer.source.trace is not None
    second = trainer.score(trainer.act())
    assert trainer.source.trace_of(first) is None
    assert trainer.source.trace_of(second) is trainer.source.trace


@pytest.mark.parametrize("batch", [4, 300])
def test_a_policy_with_a_will_of_its_own_is_followed(batch):
    env = Strings("ACGT", 4)
    task = Task(env, Exact(), score, Linear())
    assert int(rollout(task, Stubborn(env, MLP(16, 2)), batch).moves.max()) == 0


def test_early_states_are_no_more_than_all_states():
    env = Dawdling()
    assert env.early_count(6) == env.count() == len(env.early_states(6))
    assert len(policy_of(env, MLP(16, 2), 1).early(6, 300).states) <= env.count()


def test_what_another_policy_kept_of_its_way_is_not_taken_for_ours():
    env = Strings("ACGT", 5)
    task, mine, other = (
        Task(env, Exact(), score, Linear()),
        policy_of(env, MLP(16, 2), 1),
        policy_of(env, MLP(16, 2), 1),
    )
    known = Known(env, Exact())
    assert Trainer(task, mine, known, TrajectoryBalance(), OnPolicy(task, mine, 16)).source.traces
    assert not Trainer(task, mine, known, TrajectoryBalance(), OnPolicy(task, other, 16)).source.traces


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_run_that_diverges_prints_no_warnings(recwarn, two_threads, seeds):
    trainer = trainer_of(Grid(2, 4), seeds=seeds, objective=DetailedBalance())
    trainer.policy.head.weight.data.fill_(torch.inf)
    trainer.iterate()
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]
    assert not trainer.stats["finite"].any()


@pytest.fixture
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("net", [MLP(32, 2), MLP(17, 3), Lookup(16, 2, 8)], ids=str)
@pytest.mark.parametrize("world", ["grid", "variable", "any length"])
def test_threads_that_share_one_seeds_rows_walk_and_learn_the_same(
    world, net, monkeypatch, assert_gradient_of_autograd, two_threads
):
    env, found, learned = WORLDS[world](), [], []
    task, policy = Task(env, Slip(0.3), score, Linear()), policy_of(env, net, 1)
    for least in (1, 1 << 62):
        monkeypatch.setattr(cpu_walk, "WORTH_PARTS", least)
        monkeypatch.setattr(cpu_balance, "WORTH_PARTS", least)
        torch.manual_seed(1)
        found.append(rollout(task, policy, 33, explore=0.1))
        trainer = trainer_of(WORLDS[world](), net, noise="known", batch=33)
        assert_gradient_of_autograd(trainer, 2e-6)
        torch.manual_seed(2)
        trainer.train(5)
        learned.append(trainer.policy_flat.values.detach().clone())
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(*learned)


@pytest.mark.parametrize("world", ["grid", "variable", "any length"])
def test_several_seeds_learn_the_same_on_any_number_of_threads(world, two_threads):
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        trainer = trainer_of(WORLDS[world](), seeds=3, objective=DetailedBalance(), noise="known")
        torch.manual_seed(0)
        trainer.train(5)
        found.append(trainer.policy_flat.values.detach().clone())
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_compiled_update_is_the_plain_one(seeds):
    """Each seed clipped for itself, or not at all; in parameters longer than a piece of the sum of squares."""
    made = [FlatParameters(policy_of(Grid(2, 4), MLP(96, 2), seeds), lr=0.01, clip=10.0) for _ in range(2)]
    made[1].compile()
    clipped = 0
    for step in range(5):
        for name, slope in made[0].slopes.items():
            slope.normal_().mul_(0.03 * (1 + torch.arange(seeds).view(-1, *[1] * (slope.dim() - 1))) * (1 + step))
            made[1].slopes[name].copy_(slope)
        for flat in made:
            flat.update(torch.tensor(float(step), dtype=torch.float64))
        assert torch.allclose(made[0].norms, made[1].norms, rtol=1e-6)
        for one, other in (
            (made[0].values, made[1].values),
            (made[0].average, made[1].average),
            (made[0].moments, made[1].moments),
        ):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
        clipped += int((made[0].norms > flat.clip).sum())
    assert 0 < clipped < 5 * seeds


def test_what_is_too_small_to_change_a_weight_is_nothing():
    """A weight that is never spoken of again keeps a mean that falls until it is no ordinary number, with which some processors take very long."""
    flat, threshold = FlatParameters(policy_of(Grid(2, 4), MLP(16, 2), 1), 1e-3, 10.0), 2.0**-126
    flat.compile()
    flat.moments[0].fill_(1e-29)
    flat.moments[1].fill_(threshold * 1.0005)
    flat.values.grad.zero_()
    before = flat.values.detach().clone()
    for step in range(30):
        flat.update(torch.tensor(float(step), dtype=torch.float64))
    assert not any(
        value.any() for name, value in flat.state_dict().items() if name.startswith("adam_") and name != "adam_step"
    )
    assert torch.equal(flat.values, before)
    flat.values.grad.fill_(torch.nan)
    flat.update(torch.tensor(30.0, dtype=torch.float64))
    assert all(
        value.isnan().all()
        for name, value in flat.state_dict().items()
        if name.startswith("adam_") and name != "adam_step"
    )


def test_without_a_compiler_it_walks_and_learns_the_plain_way(monkeypatch):
    monkeypatch.setattr(cpu_walk, "loops", lambda: None)
    trainer = trainer_of(Grid(2, 4))
    assert not trainer.source.traces
    before = trainer.policy_flat.values.detach().clone()
    trainer.train(3)
    assert trainer.source.trace is None
    assert not torch.equal(before, trainer.policy_flat.values)


class Wilful(Slip):
    """Goes on where there is no way on."""

    def sample(self, state, legal, action, memory=None):
        return torch.zeros_like(action)


def test_a_channel_that_makes_an_illegal_move_is_named():
    with pytest.raises(UserError, match="not legal"):
        rollout(Task(Grid(2, 3), Wilful(0.5), score, Linear()), policy_of(Grid(2, 3), MLP(16, 2), 1), 64)


def test_a_model_of_the_noise_with_other_seeds_is_refused():
    env = Grid(2, 4)
    task, policy = Task(env, Slip(0.3), score, Linear()), policy_of(env, MLP(16, 2), 3)
    with pytest.raises(UserError, match="3 seeds"):
        Trainer(task, policy, Neural(env), TrajectoryBalance(), OnPolicy(task, policy, 4))


def test_a_policy_of_another_world_walks_the_plain_way():
    small, large = Grid(2, 4), Grid(2, 8)
    task = Task(small, Exact(), score, Linear())
    assert not cpu_walk.fits(task, policy_of(large, MLP(16, 2), 1), 4)
    assert cpu_walk.fits(task, policy_of(Grid(2, 4), MLP(16, 2), 1), 4)  # another of the same kind


def test_one_answer_for_all_is_read_as_such():
    """A reward may be the same for all trajectories of a seed."""
    trainer, found = trainer_of(Grid(2, 4)), []
    traj = trainer.act()
    for paid in (torch.ones(()), torch.ones(16), torch.ones(1, 1), torch.ones(1, 16)):
        given = (
            trainer.policy,
            trainer.objective,
            traj,
            trainer.source.trace_of(traj),
            paid,
            False,
            None,
            trainer.policy_flat,
            False,
        )
        found.append(cpu_balance.gradient(trainer.task, *given).loss.clone())
    assert all(torch.equal(found[0], other) for other in found)


def test_a_part_that_fails_is_heard_and_the_others_are_waited_for(two_threads):
    done = []

    def work(begin, end):
        if begin == 0:
            raise ValueError("the first part")
        done.append((begin, end))

    with pytest.raises(ValueError, match="the first part"):
        in_parts(work, 10)
    assert done == [(5, 10)]


def test_what_was_kept_and_is_damaged_is_compiled_again():
    class Kept:
        flushed = False

        def load_overload(self, *given):
            raise EOFError("Ran out of input")

        def flush(self):
            self.flushed = True

    loop = SimpleNamespace(_cache=Kept())
    assert cpu_compiled.loops()._forgiving(loop)._cache.load_overload("any", "thing") is None
    assert loop._cache.flushed


@pytest.mark.parametrize("why", ["it hangs", "another process waits"])
def test_nobody_waits_for_ever_for_what_is_compiled_beside(why, tmp_path, monkeypatch):
    class Hanging:
        def poll(self):
            return None

    module = SimpleNamespace(judge=lambda x: x + 1)
    monkeypatch.setattr(cpu_compiled, "MOST_WAIT", 0.1 if why == "it hangs" else 1e9)
    first = cpu_compiled._awaited(module, "judge", Hanging(), tmp_path)
    if why == "another process waits":
        monkeypatch.setattr(cpu_compiled.os, "getpid", lambda: -1)
    assert first(1) == 2
    assert module.judge is not first


def test_a_run_compiles_nothing_that_was_compiled_beside(tmp_path):
    """The first run of all takes these loops from the process beside, one kind of arguments each, and compiles the others itself."""
    code = """
from stochflow.runs.config import configure
from stochflow.runs.experiment import Experiment
for objective in ("tb", "db"):
    Experiment(configure("grid", stick=0.25, objective=objective, batch=4)).trainer.train(2)
from stochflow.engines.numba import loops as cpu_loops
for name in cpu_loops.BESIDE:
    stats = getattr(cpu_loops, name).stats
    assert (sum(stats.cache_hits.values()), sum(stats.cache_misses.values())) == (1, 0), (name, stats)
assert sum(cpu_loops.walk.stats.cache_misses.values()) == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)})
