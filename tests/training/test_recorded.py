"""How an iteration becomes graphs, with a stand-in for CUDA's recording; tests/gpu holds the replay to the plain iteration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from stochflow.engines.base import Walk
from stochflow.scores.rewards import Power, Sharpening
from stochflow.training import recorded as module
from stochflow.training.recorded import OracleCalls, recorded
from stochflow.types import Trajectories


class Stub:
    """As `Captured`: recording runs the function once and keeps what it returns; a call runs it again."""

    def __init__(self, fn):
        self.fn, self.result = fn, None

    def record(self, pool):
        self.result = self.fn()
        return "pool"

    def __call__(self):
        return self.fn()


class Toy:
    """The parts of a trainer that a recording uses; `log` is what happened."""

    def __init__(self, on_device: bool):
        self.log: list[str] = []
        self.policy = SimpleNamespace(device=SimpleNamespace(type="cuda"))
        self.source = SimpleNamespace(static=True, scored=False, walk=self.walk)
        self.task = SimpleNamespace(oracle=SimpleNamespace(on_device=on_device), reward=Power())
        self.iteration = SimpleNamespace(capture=True)
        self.calls, self.pool, self.step = OracleCalls(torch.device("cpu")), None, torch.zeros(())
        none = torch.zeros(1, 1, 3, dtype=torch.long)
        self.trajectories = Trajectories(none, none, none, none > 0, torch.zeros(1, 3), torch.ones(1, 3) > 0)

    def walk(self, step):
        self.log.append("walk")
        return Walk(self.trajectories)

    def score(self, traj):
        self.log.append("ask")
        self.calls.count(traj.score, 1)
        return traj._replace(score=traj.score + 2.0)

    def fresh(self):
        walk = self.walk(self.step)
        return walk._replace(trajectories=self.score(walk.trajectories))

    def learn(self, walk, note):
        self.log.append(f"learn {float(walk.trajectories.score[0, 0]):g} {note}")

    def state_dict(self):
        return {"calls": self.calls.total()}

    def load_state_dict(self, state):
        self.log.append("put back")
        self.calls.load(state["calls"])


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    monkeypatch.setattr(module, "Captured", Stub)
    monkeypatch.setattr(module, "aside", lambda fn, device, times=1: [fn() for _ in range(times)])


def test_around_an_oracle_on_the_device_it_is_one_graph_and_every_replay_is_counted():
    toy = Toy(on_device=True)
    toy.calls.add(5)
    steps = recorded(toy, True)
    assert toy.log[-4:] == ["put back", "walk", "ask", "learn 2 True"]  # the last three are recorded
    assert toy.pool == "pool"
    begun = int(toy.calls.total())
    toy.log.clear()
    steps[-1]()
    assert int(toy.calls.total()) == begun + 3
    assert toy.log == []


def test_around_an_oracle_on_the_host_it_is_two_graphs_with_the_question_between():
    toy = Toy(on_device=False)
    toy.calls.add(5)
    act, ask, learn = recorded(toy, False)
    assert "ask" not in toy.log  # nothing is asked while it is recorded
    assert int(toy.calls.total()) == 5
    toy.log.clear()
    for step in (act, ask, learn):
        step()
    assert toy.log == ["walk", "ask", "learn 2 False"]
    assert int(toy.calls.total()) == 8


def test_without_capture_it_is_the_iteration_itself():
    toy = Toy(on_device=True)
    toy.iteration = SimpleNamespace(capture=False)
    (whole,) = recorded(toy, True)
    assert toy.log == []
    whole()
    assert toy.log == ["walk", "ask", "learn 2 True"]


def test_a_reward_that_is_still_being_sharpened_is_not_recorded():
    """A recording would hold its numbers for ever."""
    toy = Toy(on_device=True)
    toy.task.reward = Sharpening(nats=5.0)
    (whole,) = recorded(toy, True)
    assert toy.log == []
    whole()
    assert toy.log == ["walk", "ask", "learn 2 True"]


def test_calls_survive_saving_and_loading():
    calls = OracleCalls(torch.device("cpu"))
    calls.count(torch.zeros(2, 7), ranks=2)
    calls.beyond += 4
    assert (calls.batch, int(calls.total())) == (28, 32)
    other = OracleCalls(torch.device("cpu"))
    other.load(calls.total())
    assert int(other.total()) == 32
