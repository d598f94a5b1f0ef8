"""What final states are worth, looked up by number: the oracle's own word, wherever it is looked up at all."""

from __future__ import annotations

import pytest
import torch

from stochflow.learn.objectives import TrajectoryBalance
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known
from stochflow.scores import worth
from stochflow.scores.oracles import Table
from stochflow.scores.rewards import Linear, Power
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Trainer
from stochflow.types import Task
from stochflow.worlds.channels import Exact
from stochflow.worlds.grid import Corners, Grid
from stochflow.worlds.strings import Strings

CPU = torch.device("cpu")


def table(env, last: int | None = None) -> Table:
    return Table(env, torch.rand(env.count() if last is None else last) + 0.1)


def task(world: str, reward) -> Task:
    env = {"grid": Grid(2, 8), "cube": Grid(4, 5), "strings": Strings("ACGT", 4), "variable": Strings("AB", 5, 1)}[
        world
    ]
    oracle = Corners(env.side, 0.01) if isinstance(env, Grid) else table(env, 4**4 if world == "strings" else None)
    return Task(env, Exact(), oracle, reward)


@pytest.mark.parametrize("reward", [Power(2.0, 1e-3), Linear(0.5)], ids=str)
@pytest.mark.parametrize("world", ["grid", "cube", "strings", "variable"])
def test_a_trainer_looks_up_what_the_oracle_says(world, reward):
    given = task(world, reward)
    policy = Policy(given.env, MLP(16, 2), seeds=range(2))
    trainer = Trainer(
        given, policy, Known(given.env, given.channel), TrajectoryBalance(), OnPolicy(given, policy, 33, explore=0.3)
    )
    last = trainer.act().states[-1]
    score = given.oracle(last)
    scores, log_rewards = trainer.job.worth[:, given.env.index(last)]
    assert torch.equal(scores, score)
    assert torch.allclose(log_rewards, reward(score, last))
    trainer.train(3)
    assert trainer.oracle_calls == 3 * 66
    assert trainer.stats["mean_score"].shape == (2,)


def test_another_task_is_asked_from_then_on():
    given = task("strings", Linear())
    policy = Policy(given.env, MLP(16, 2))
    trainer = Trainer(given, policy, Known(given.env, given.channel), TrajectoryBalance(), OnPolicy(given, policy, 8))
    trainer.train(2)
    trainer.task = given._replace(oracle=Table(given.env, torch.full((256,), 5.0)))
    trainer.train(3)
    assert float(trainer.stats["mean_score"]) == 5.0
    assert float(trainer.stats["mean_log_reward"]) == 5.0


@pytest.mark.parametrize("world", ["grid", "strings"])
def test_steps_that_are_taken_by_hand_are_counted_and_noted(world):
    given = task(world, Linear())
    policy = Policy(given.env, MLP(16, 2))
    trainer = Trainer(given, policy, Known(given.env, given.channel), TrajectoryBalance(), OnPolicy(given, policy, 8))
    for _ in range(3):
        traj = trainer.score(trainer.act())
        trainer.learn(traj, note=True)
    assert (int(trainer.step), trainer.oracle_calls) == (3, 24)
    assert float(trainer.stats["mean_score"]) == pytest.approx(float(traj.score.mean()))


def test_what_may_change_or_is_asked_elsewhere_is_not_looked_up():
    grid, strings = Grid(2, 8), Strings("ACGT", 4)

    class Own(Corners):
        pass

    for env, oracle, reward in [
        (grid, Corners(8), Power(2.0, 1e-3, ramp=100.0)),  # which grows with the steps
        (grid, Own(8), Linear()),
        (grid, Corners(9), Linear()),
        (grid, Corners(8), lambda score, state, step: score),
        (strings, table(Strings("ACGT", 4)), Linear()),  # of another environment
        (strings, lambda state: state.float().sum(-1), Linear()),
    ]:
        assert worth.of_all(Task(env, Exact(), oracle, reward), CPU) is None


def test_spaces_that_are_too_large_to_list_are_not(monkeypatch):
    assert worth.of_all(task("grid", Linear()), CPU).shape == (2, 64)
    monkeypatch.setattr(worth, "MOST", 2 * 64 - 1)
    assert worth.of_all(task("grid", Linear()), CPU) is None
