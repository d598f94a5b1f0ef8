"""Every objective that states a limit is trained to it: where the target can be reached, and where it cannot."""

from __future__ import annotations

import pytest
import torch

from stochflow.law import metrics
from stochflow.law.exact import Graph, exact_law, target_law
from stochflow.law.floors import floor, limit_tv
from stochflow.nets.lookup import Lookup
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known
from stochflow.runs.config import OBJECTIVES, Train
from stochflow.runs.values import make_objective
from stochflow.scores.oracles import Table
from stochflow.scores.rewards import Power
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Trainer
from stochflow.types import Task
from stochflow.worlds.channels import Slip
from stochflow.worlds.strings import Strings

pytestmark = pytest.mark.slow


def world(exponent: float) -> Task:
    env = Strings("ACG", 2)
    scores = 0.6 + torch.rand(env.count(), generator=torch.Generator().manual_seed(11))
    return Task(env, Slip(0.3), Table(env, scores), Power(exponent, 1e-6))


WORLDS = {"reached": world(1.0), "out of reach": world(7.0)}
FLOORS = {name: floor(task) for name, task in WORLDS.items()}
STATED = [(name, word) for name in WORLDS for word in OBJECTIVES if limit_tv(word, FLOORS[name]) is not None]


@pytest.mark.parametrize(("name", "word"), STATED)
def test_an_objective_ends_at_its_stated_limit(name, word):
    task = WORLDS[name]
    torch.manual_seed(2)
    objective = make_objective(Train(objective=word, seeds=3))  # type: ignore[arg-type]
    policy = Policy(task.env, Lookup(32, 1), seeds=[0, 1, 2], back_action=objective.form.back_action)
    source = OnPolicy(task, policy, 128, 0.0)
    trainer = Trainer(task, policy, Known(task.env, task.channel), objective, source, lr=1e-2)
    trainer.train(800)
    graph = Graph(task.env)
    with trainer.averaged():
        law = exact_law(graph, task.channel, policy)
    found = metrics.tv(law, target_law(graph, task).target)
    assert found.tolist() == pytest.approx([limit_tv(word, FLOORS[name])] * 3, abs=0.015)


def test_the_worlds_are_what_they_are_called_and_no_limit_is_stated_of_the_unsound():
    near, far = FLOORS.values()
    assert near.feasible
    assert not far.feasible
    assert far.floor_tv_reverse_kl is not None
    assert far.floor_tv_reverse_kl > 0.05
    assert far.naive_tv > far.floor_tv_reverse_kl + 0.02  # so that a limit can be told from the other
    words = {name: {word for n, word in STATED if n == name} for name in WORLDS}
    unsound = {word for word in OBJECTIVES if word.endswith("-published") or word.startswith("intended-")}
    assert words["reached"] == set(OBJECTIVES) - unsound
    assert words["out of reach"] == words["reached"] - {"sgfn-kl", "sgfn-kl-gamma"}
