"""Facts about one training iteration: seeds are independent, oracle calls are counted, averages and clipping do what they say."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from stochflow import ops
from stochflow.engines.eager import Eager
from stochflow.engines.flat import FlatParameters
from stochflow.errors import UserError
from stochflow.learn.objectives import DetailedBalance, FlowKL, TrajectoryBalance
from stochflow.learn.rollout import rollout
from stochflow.nets.layers import Linear
from stochflow.nets.lookup import Lookup
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known, Neural, Tabular
from stochflow.runs.config import configure
from stochflow.runs.experiment import Experiment
from stochflow.runs.tasks import strings_task
from stochflow.scores.rewards import Power
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Iteration, Trainer
from stochflow.types import Task
from stochflow.worlds.channels import Slip
from stochflow.worlds.grid import Corners, Grid
from stochflow.worlds.strings import Strings


def grid_task(alpha: float = 0.25) -> Task:
    return Task(Grid(2, 4), Slip(alpha), Corners(4), Power(1.0, 1e-6))


def make(
    seeds=(0,), task=None, objective=None, dynamics=Neural, net=None, batch=8, explore=0.1, engine="auto"
) -> Trainer:
    task = grid_task() if task is None else task
    torch.manual_seed(0)
    policy = Policy(task.env, MLP(16, 2) if net is None else net, seeds=seeds)
    model = Known(task.env, task.channel) if dynamics is Known else dynamics(task.env, seeds)
    source = OnPolicy(task, policy, batch, explore)
    return Trainer(task, policy, model, objective or DetailedBalance(), source, iteration=Iteration(engine=engine))


def test_a_seed_that_turns_nan_leaves_the_others_bit_identical():
    healthy, ill = make((0, 1, 2)), make((0, 1, 2))
    with torch.no_grad():
        ill.policy.head.weight[1] = float("nan")
    for trainer in (healthy, ill):
        torch.manual_seed(5)
        trainer.train(5)
    a, b = healthy.state_dict(), ill.state_dict()
    for name, value in a.items():
        if name.startswith(("policy.weight", "policy.average", "policy.adam_mean", "dynamics.weight")):
            assert torch.equal(value[[0, 2]], b[name][[0, 2]]), name
    assert torch.isnan(b["policy.weight.head.weight"][1]).all()
    assert ill.stats["finite"].tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("objective", [DetailedBalance(), TrajectoryBalance()])
def test_oracle_is_asked_once_for_each_trajectory(objective):
    asked = []

    def gc(texts):
        asked.append(len(texts))
        return [0.1 + t.count("G") for t in texts]

    trainer = make(task=strings_task(gc, "ACGT", 3), objective=objective, dynamics=Known, batch=8)
    trainer.train(6)
    assert asked == [8] * 6
    assert int(trainer.oracle_calls) == 48


def test_flow_kl_reports_the_siblings_it_asks_for():
    experiment = Experiment(configure("tfbind8", objective="flow-kl", batch=16, net="mlp", hidden=8, seed=3))
    experiment.trainer.train(3)
    assert int(experiment.trainer.oracle_calls) == 3 * 16 * (
        1 + 4
    )  # each batch, and the four last letters of every prefix


@pytest.mark.parametrize(
    ("noise", "net", "objective", "dynamics"),
    [(0.2, Lookup(8, 1, 4), DetailedBalance(), Neural), (0.0, MLP(16, 2), TrajectoryBalance(), Known)],
    ids=["noisy", "exact"],
)
def test_the_number_of_operators_does_not_depend_on_the_seeds_where_all_trajectories_are_of_one_length(
    noise, net, objective, dynamics
):
    def operators(seeds: int) -> int:
        world = Task(Strings("ACG", 3), Slip(noise), lambda s: s.float().mean(-1), Power())
        trainer = make(range(seeds), task=world, net=net, objective=objective, dynamics=dynamics, engine="eager")
        trainer.train(2)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            trainer.train(3)
        return sum(e.count for e in seen.key_averages() if e.key.startswith("aten::"))

    assert operators(2) == operators(5)
    assert operators(1) <= operators(2)
    assert operators(2) <= 1.15 * operators(1)  # one seed saves a few copies that put seeds first


def test_average_is_the_power_law_mean_of_the_weights():
    layer = Linear(2, 1, [torch.Generator().manual_seed(0)])
    flat = FlatParameters(layer, lr=0.1, clip=1e9)
    expected, engine = torch.zeros_like(flat.average), Eager()
    for step in range(6):
        flat.differentiate(layer(torch.ones(1, 4, 2)))
        engine.update(flat, torch.tensor(float(step), dtype=torch.float64), False)
        weight = 8.0 / (step + 8.0)
        expected = (1 - weight) * expected + weight * flat.values.detach()
        assert torch.allclose(flat.average, expected, atol=1e-6)


def test_every_parameter_begins_where_wide_loads_may_and_what_lies_between_stays_zero():
    trainer = make()
    trainer.train(3)
    flat = trainer.policy_flat
    between = torch.ones_like(flat.average, dtype=torch.bool)
    for name, here in flat.slices.items():
        assert here.start % 32 == 0
        assert torch.equal(flat.named[name].flatten(), flat.values[here])
        assert torch.equal(flat.gradients[name].flatten(), flat.grad[here])
        between[here] = False
    assert bool(between.any())
    for vector in (flat.values, flat.average, flat.grad, *flat.moments):
        assert float(vector.detach()[between].abs().max()) == 0


def test_swap_exchanges_weights_and_averages_and_back():
    trainer = make()
    trainer.train(3)
    before = trainer.state_dict()
    with trainer.averaged():
        assert torch.equal(trainer.policy.head.weight, before["policy.average.head.weight"])
    after = trainer.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_gradients_are_clipped_for_each_seed_alone():
    layer = Linear(1, 1, [torch.Generator().manual_seed(s) for s in (0, 1)])
    flat = FlatParameters(layer, lr=0.1, clip=1.0)
    flat.differentiate(layer(torch.ones(2, 1, 1)).squeeze() * torch.tensor([100.0, 0.1]))
    norms = Eager().update(flat, torch.zeros((), dtype=torch.float64), False)
    assert norms.tolist() == pytest.approx([100 * 2**0.5, 0.1 * 2**0.5], rel=1e-5)
    assert flat.grad[flat.slices["weight"]].tolist() == pytest.approx([0.5**0.5, 0.1], rel=1e-5)


def test_log_z_starts_at_what_the_first_batch_says():
    task = Task(Grid(2, 4), Slip(0.0), lambda s: torch.full(s.shape[:-1], 1e6), Power(1.0, 1e-6))
    trainer = make(task=task, objective=TrajectoryBalance(), dynamics=Known, explore=0.0)
    trainer.train(1)
    assert float(trainer.stats["log_z_learned"][0]) == pytest.approx(16.5, abs=1.5)  # log(16 cells x 1e6) = 16.6


@pytest.mark.parametrize("dynamics", [Neural, Tabular, Known])
@pytest.mark.parametrize("objective", [DetailedBalance(), FlowKL()])
def test_every_tensor_is_equal_after_going_on_from_a_saved_state(dynamics, objective):
    whole, first = make(objective=objective, dynamics=dynamics), make(objective=objective, dynamics=dynamics)
    torch.manual_seed(9)
    whole.train(7)
    torch.manual_seed(9)
    first.train(4)
    kept = first.state_dict()
    second = make((3,), objective=objective, dynamics=dynamics)
    torch.manual_seed(1234)
    second.load_state_dict(kept)
    second.train(7)
    a = whole.state_dict()
    torch.manual_seed(9)
    b = second.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        if name != "random.cpu":
            assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("replay", [False, True])
def test_a_state_of_an_earlier_version_has_no_key_and_is_read(replay):
    settings = {"objective": "db", "batch": 8, "net": "mlp", "hidden": 8} | ({"replay": 0.5} if replay else {})
    first, second = (Experiment(configure("grid", **settings)).trainer for _ in range(2))
    first.train(2)
    state = {name: value for name, value in first.state_dict().items() if not name.endswith("key")}
    assert len(state) == len(first.state_dict()) - 1
    second.load_state_dict(state)
    assert second.steps_done == 2


def test_flow_losses_never_move_the_dynamics():
    for objective in (DetailedBalance(), TrajectoryBalance()):
        trainer = make(objective=objective)
        trainer.train(1)
        from stochflow.learn.evaluate import evaluate
        from stochflow.types import World

        traj = trainer.score(trainer.act())
        terms = evaluate(trainer.task, trainer.policy, trainer.dynamics, traj, trainer.step)
        world = World(trainer.task, trainer.policy, trainer.dynamics, traj, trainer.step, lambda s, w: None)
        loss = objective.loss(terms, world).sum()
        found = torch.autograd.grad(loss, list(trainer.dynamics.parameters()), allow_unused=True)
        assert all(g is None for g in found)


def test_a_failure_while_balancing_leaves_weights_and_averages_in_their_places():
    asked = []

    def broken(score, state, step):
        if asked:
            raise RuntimeError("out of memory")
        return score

    trainer = make(task=grid_task()._replace(reward=broken))
    trainer.train(3)
    asked.append("too much")
    before = trainer.state_dict()
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.iterate()
    after = trainer.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before if k.startswith("dynamics."))


def test_log_variance_takes_the_mean_of_each_condition_alone():
    """At balance the loss is zero although the conditions differ in log Z."""
    from types import SimpleNamespace

    from stochflow.learn.objectives import LogVariance

    row = torch.tensor([[0, 1, 0, 1, 1]])
    log_z = torch.tensor([[1.0, 5.0, 1.0, 5.0, 5.0]])
    log_move = torch.randn(3, 1, 5, generator=torch.Generator().manual_seed(0))
    terms = SimpleNamespace(
        log_move=log_move, log_pb=torch.zeros_like(log_move), log_reward=log_z + log_move.sum(0), alive=log_move > -99
    )
    states = torch.cat([row.unsqueeze(-1), torch.zeros(1, 5, 2, dtype=torch.long)], -1).expand(4, 1, 5, 3)
    world = SimpleNamespace(
        task=SimpleNamespace(env=SimpleNamespace(contexts=torch.eye(2))), trajectories=SimpleNamespace(states=states)
    )
    assert float(LogVariance().loss(terms, world)) == pytest.approx(0, abs=1e-10)


def test_a_run_that_is_stopped_has_the_figures_of_its_last_step():
    stopped, whole = make(), make()
    torch.manual_seed(4)
    whole.train(8, every=1)

    torch.manual_seed(4)
    stopped.train(5, every=5)  # figures of step 5
    iterate = stopped.iterate

    def until_seven(note=True):
        iterate(note)
        stopped.stop_requested = stopped.steps_done >= 7

    stopped.iterate = until_seven  # type: ignore[method-assign]
    stopped.train(100, every=50)
    assert stopped.steps_done == 8  # the seventh was silent; one more says how things stand
    assert torch.equal(stopped.raw_stats, whole.raw_stats)


def test_looking_first_in_inference_mode_does_not_spoil_training():
    ops._CONSTANTS.clear()
    trainer = make()
    with torch.inference_mode():
        rollout(trainer.task, trainer.policy, 4)
    trainer.train(2)
    assert float(trainer.stats["finite"].min()) == 1.0


def test_an_engine_that_is_asked_for_by_name_must_fit_or_says_why_not():
    with pytest.raises(UserError, match=r"--engine cuda was asked for, but"):
        make(engine="cuda" if not torch.cuda.is_available() else "numba")
    with pytest.raises(UserError, match=r"--engine numba was asked for, but .*FlowKL"):
        make(objective=FlowKL(), engine="numba")
    with pytest.raises(UserError, match="did you mean"):
        make(engine="nmba")


def test_the_choice_and_its_reasons_are_described():
    trainer = make(objective=FlowKL())
    assert trainer.engines.gradient.name == "eager"
    assert "FlowKL" in trainer.engines.sentence()
    described = trainer.engines.describe()
    assert set(described["operations"]) == {"walk", "gradient", "noise", "update"}


def test_a_trace_is_of_no_use_after_the_weights_have_changed():
    trainer = make(objective=TrajectoryBalance(), dynamics=Known)
    if trainer.engines.gradient.name == "eager":
        pytest.skip("no engine on this machine keeps traces")
    walk = trainer.source.walk(trainer.step)
    walk = walk._replace(trajectories=trainer.score(walk.trajectories))
    trainer.learn(walk)
    with pytest.raises(RuntimeError, match="walk again"):
        trainer.learn(walk)
    older = trainer.source.walk(trainer.step)
    older = older._replace(trajectories=trainer.score(older.trajectories))
    with trainer.averaged():
        pass
    with pytest.raises(RuntimeError, match="walk again"):
        trainer.learn(older)


def test_a_trace_is_of_use_after_other_walks():
    """The same weights, whatever was walked in between: the step is that of the first walk."""
    states = []
    for others in (0, 2):
        trainer = make(objective=TrajectoryBalance(), dynamics=Known)
        trainer.train(2)
        walk = trainer.source.walk(trainer.step)
        walk = walk._replace(trajectories=trainer.score(walk.trajectories))
        for _ in range(others):
            trainer.source.walk(trainer.step)
        trainer.learn(walk)
        states.append(trainer.state_dict())
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0] if k.startswith("policy."))


def test_an_iteration_that_is_replayed_ends_the_use_of_a_trace(monkeypatch):
    """A CUDA graph changes weights without any code that says so."""
    monkeypatch.setattr("stochflow.training.trainer.recorded", lambda trainer, note: [lambda: None])
    trainer = make(objective=TrajectoryBalance(), dynamics=Known)
    trainer.train(1)
    before = trainer.policy_flat.version
    trainer.iterate(note=False)
    assert trainer.policy_flat.version > before
