"""Batches in flight: learned from in order, counted, kept in checkpoints, and drawn again where their oracle failed."""

from __future__ import annotations

import threading

import pytest
import torch

from stochflow.errors import UserError
from stochflow.learn.objectives import TrajectoryBalance
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known
from stochflow.runs.build import Experiment
from stochflow.runs.config import configure
from stochflow.runs.experiment import resume, train
from stochflow.runs.folder import Run
from stochflow.runs.tasks import strings_task
from stochflow.training.ahead import Ahead
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Trainer
from stochflow.types import Task


class Oracle:
    def __init__(self, fails_at: int = 0):
        self.asked: list[list[str]] = []
        self.fails_at, self.threads = fails_at, set()

    def __call__(self, texts: list[str]) -> list[float]:
        self.asked.append(list(texts))
        self.threads.add(threading.current_thread().name)
        if len(self.asked) == self.fails_at:
            raise RuntimeError("busy")
        return [0.1 + t.count("G") for t in texts]


def make(oracle: Oracle, lag: int) -> Trainer:
    torch.manual_seed(1)
    task = strings_task(oracle, "ACGT", 4)
    policy = Policy(task.env, MLP(8, 1))
    source = Ahead(OnPolicy(task, policy, 4, 0.1), task, lag, torch.device("cpu"))
    return Trainer(task, policy, Known(task.env, task.channel), TrajectoryBalance(), source)


def test_batches_are_learned_from_in_the_order_in_which_they_were_drawn():
    oracle = Oracle()
    trainer = make(oracle, lag=2)
    seen: list[list[str]] = []
    real = trainer.learn
    trainer.learn = lambda walk, note=True: (
        seen.append(trainer.task.env.decode(walk.trajectories.states[-1][0])),
        real(walk, note),
    )[-1]
    trainer.train(6)
    trainer.source.settle()
    assert len(oracle.asked) == 6 + 2
    assert [sorted(batch) for batch in seen] == [sorted(batch) for batch in oracle.asked[:6]]
    assert trainer.oracle_calls == 6 * 4
    assert all(name.startswith("oracle") for name in oracle.threads)


def test_a_state_with_batches_in_flight_goes_on_exactly():
    whole = make(Oracle(), lag=2)
    whole.train(10)
    parts = make(Oracle(), lag=2)
    parts.train(4)
    kept = parts.state_dict()
    assert sum(name.startswith("source.flight.") for name in kept) == 2 * 6
    again = make(Oracle(), lag=2)
    again.load_state_dict(kept)
    again.train(10)
    a, b = whole.state_dict(), again.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(value, b[name]) for name, value in a.items())


def test_a_failure_leaves_what_was_in_flight_before_the_step():
    oracle = Oracle(fails_at=4)
    trainer = make(oracle, lag=1)
    with pytest.raises(UserError, match="busy"):
        trainer.train(10)
    assert trainer.steps_done == 3
    state = trainer.state_dict()
    assert sum(name.startswith("source.flight.") for name in state) == 6, "the batch whose answer failed"
    trainer.train(10)  # it is asked again
    assert sorted(oracle.asked[3]) in [sorted(batch) for batch in oracle.asked[4:]]
    assert trainer.oracle_calls == 40


def gc(texts: list[str]) -> list[float]:
    return [0.1 + t.count("G") for t in texts]


def gc_task() -> Task:
    return strings_task(gc, "ACGT", 3)


def test_a_run_with_a_lag_is_resumed_bit_for_bit_and_learns(tmp_path):
    settings = {"batch": 32, "hidden": 16, "lag": 2, "lr": 5e-3, "save_every": 50, "eval_every": 50, "log_every": 50}
    whole = train(gc_task(), out=tmp_path / "a", steps=300, **settings)
    train(gc_task(), out=tmp_path / "b", steps=150, **settings)
    parts = resume(tmp_path / "b", steps=300, task=gc_task())
    assert parts.summary["tv"] == whole.summary["tv"]
    a, b = Run.open(tmp_path / "a").load(), Run.open(tmp_path / "b").load()
    assert a is not None
    assert b is not None
    assert all(torch.equal(value, b.tensors[name]) for name, value in a.tensors.items())
    assert whole.summary["tv"] < 0.05


def test_a_lag_without_a_slow_oracle_or_with_an_on_policy_objective_is_refused():
    with pytest.raises(UserError, match="--lag 1 is for an oracle in Python"):
        Experiment(configure("grid", lag=1))
    with pytest.raises(UserError, match="leave out --lag"):
        Experiment(configure("rna", lag=1, objective="kl"), gc_task())
