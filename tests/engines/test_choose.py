"""Which engine is chosen, what is said of those that are not, and what happens when a kernel does not compile."""

from __future__ import annotations

import json
import logging

import pytest

from stochflow import train
from stochflow.engines.choose import OPERATIONS, choose, engines
from stochflow.engines.numba.engine import Numba
from stochflow.errors import UserError
from stochflow.learn.objectives import TrajectoryBalance
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.nets.transformer import Transformer
from stochflow.noise.dynamics import Known
from stochflow.runs.config import configure
from stochflow.runs.experiment import Experiment
from stochflow.scores.rewards import Linear
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Trainer
from stochflow.types import Task
from stochflow.worlds.channels import Exact
from stochflow.worlds.grid import Corners, Grid
from stochflow.worlds.strings import Strings


def job(net=MLP(16, 2)):  # noqa: B008
    env = Grid(2, 4) if isinstance(net, MLP) else Strings("AB", 4)
    oracle = Corners(4) if isinstance(net, MLP) else lambda state: state.float().sum(-1)
    task = Task(env, Exact(), oracle, Linear())
    policy = Policy(env, net)
    return Trainer(task, policy, Known(env, task.channel), TrajectoryBalance(), OnPolicy(task, policy, 4)).job


def wrong(share, *given):
    """A loop that does not compile."""
    return nowhere_defined  # noqa: F821


@pytest.fixture
def broken(monkeypatch):
    """A job for numba, whose loop of the residuals does not compile."""
    made = job()
    from stochflow.engines.numba import cache, ready

    monkeypatch.setattr(cache, "folder", lambda: None)  # a loop that fails empties it, in case a file there is damaged
    monkeypatch.setattr(ready, "_compiled", set())
    monkeypatch.setattr(ready, "residuals", pytest.importorskip("numba").njit(wrong))
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
    assert choose(job(MLP(2, 65))).sentence().endswith("numba covers networks of up to 64 layers")
    with pytest.raises(UserError, match="did you mean"):
        choose(job(), "nunba")  # type: ignore[arg-type]


def test_a_kernel_that_does_not_compile_is_reported_once_and_the_next_engine_is_used(broken, caplog):
    with caplog.at_level(logging.WARNING, "stochflow"):
        first, second = choose(broken), choose(broken)
    assert first.gradient.name == second.gradient.name == "eager"
    assert sum("nowhere_defined" in record.getMessage() for record in caplog.records) == 1
    assert "does not compile: NameError: name 'nowhere_defined' is not defined" in first.sentence()


def test_a_run_whose_kernel_does_not_compile_goes_on_with_the_next_engine(broken, tmp_path):
    done = train("grid", side=3, steps=3, batch=4, hidden=4, out=tmp_path / "run")
    assert done.summary["step"] == 3
    assert "'nowhere_defined'" in done.summary["engine"]
    noted = json.loads((done.path / "environment.json").read_text())
    assert any("'nowhere_defined'" in reason for reason in noted["reasons"]["gradient"])
    assert noted["choice"] == done.summary["engine"]


def test_asked_for_by_name_it_is_an_error_in_the_compilers_words(broken):
    with pytest.raises(UserError, match=r"numba's gradient does not compile: NameError: name 'nowhere_defined'"):
        choose(broken, "numba")


def test_without_numba_the_sentence_says_so(monkeypatch):
    monkeypatch.setattr(Numba, "unavailable", lambda self: "numba is not installed")
    assert choose(job()).sentence() == "engine: eager, because numba is not installed"
    with pytest.raises(UserError, match="--engine numba was asked for, but numba is not installed: take --engine auto"):
        choose(job(), "numba")


def test_every_engine_says_what_it_supports():
    for engine in engines().values():
        assert all(engine.support)


@pytest.mark.parametrize(
    "settings", [{"objective": "tb", "stick": 0.0}, {"objective": "db", "stick": 0.3, "layers": 1}], ids=str
)
def test_all_that_training_needs_is_compiled_when_numba_is_chosen(settings):
    """So that a loop that does not compile is known before the first iteration."""
    pytest.importorskip("numba")
    from stochflow.engines.numba import gradient, noise, update, walk

    trainer = Experiment(configure("grid", side=4, batch=4, hidden=8, engine="numba", device="cpu", **settings)).trainer
    loops = [walk.walk, gradient.residuals, gradient.backward, gradient.weight_gradients, gradient.feature_gradients]
    loops += [update.update, noise.noise_forward, noise.noise_gradient]
    before = [len(loop.signatures) for loop in loops]
    trainer.train(3, every=2)
    assert [len(loop.signatures) for loop in loops] == before
