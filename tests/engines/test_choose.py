"""Which engine is chosen, what is said of those that are not, and what happens when a kernel does not compile."""

from __future__ import annotations

import logging

import pytest

from stochflow.engines.base import Compile
from stochflow.engines.choose import OPERATIONS, choose, engines
from stochflow.engines.numba.engine import Numba
from stochflow.errors import UserError
from stochflow.learn.objectives import TrajectoryBalance
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.nets.transformer import Transformer
from stochflow.noise.dynamics import Known
from stochflow.scores.rewards import Linear
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Trainer
from stochflow.types import Task
from stochflow.worlds.channels import Exact
from stochflow.worlds.grid import Corners, Grid
from stochflow.worlds.strings import Strings

LOG = 'walk.cu(12): error: identifier "x" is undefined\n1 error detected'


def job(net=MLP(16, 2)):  # noqa: B008
    env = Grid(2, 4) if isinstance(net, MLP) else Strings("AB", 4)
    oracle = Corners(4) if isinstance(net, MLP) else lambda state: state.float().sum(-1)
    task = Task(env, Exact(), oracle, Linear())
    policy = Policy(env, net)
    return Trainer(task, policy, Known(env, task.channel), TrajectoryBalance(), OnPolicy(task, policy, 4)).job


@pytest.fixture
def broken(monkeypatch):
    """An engine that takes the job and whose kernels do not compile."""

    def why_not(self, job):
        raise Compile(LOG)

    made = job()
    monkeypatch.setattr(Numba, "why_not_gradient", why_not)
    return made


def test_a_refusal_has_a_reason_and_the_next_engine_serves():
    chosen = choose(job(Transformer(8, 2, 1)))
    assert chosen.gradient.name == "eager"
    assert chosen.sentence() == "engine: eager, because numba covers MLP and lookup networks, not a transformer"
    assert set(chosen.describe()["operations"]) == set(OPERATIONS)


def test_an_engine_asked_for_by_name_serves_or_says_why_not():
    assert choose(job(), "numba").gradient.name == "numba"
    assert choose(job(), "eager").sentence() == "engine: eager"
    with pytest.raises(UserError, match="numba covers MLP and lookup networks, not a transformer: take --engine auto"):
        choose(job(Transformer(8, 2, 1)), "numba")
    with pytest.raises(UserError, match="did you mean"):
        choose(job(), "nunba")  # type: ignore[arg-type]


def test_a_kernel_that_does_not_compile_is_reported_once_and_the_next_engine_is_used(broken, caplog):
    with caplog.at_level(logging.WARNING, "stochflow"):
        first, second = choose(broken), choose(broken)
    assert first.gradient.name == second.gradient.name == "eager"
    assert sum(LOG in record.getMessage() for record in caplog.records) == 1
    assert 'identifier "x" is undefined' in first.sentence()


def test_asked_for_by_name_it_is_an_error_in_the_compilers_words(broken):
    with pytest.raises(UserError, match=r'numba.s gradient does not compile: walk.cu.*identifier "x" is undefined'):
        choose(broken, "numba")


def test_every_engine_says_what_it_supports():
    for engine in engines().values():
        assert all(engine.support)
