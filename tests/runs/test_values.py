"""Python may give objects instead of words: the run folder describes them, and everything that reads it knows them."""

from __future__ import annotations

import inspect
import json
import re

import pytest

from stochflow import Grid, Known, SubTrajectoryBalance, Tabular, UserError, grid_task, train
from stochflow.look.compare import compare
from stochflow.look.report import RunFiles, write_report
from stochflow.nets.mlp import MLP
from stochflow.runs.config import Train
from stochflow.runs.experiment import open_run, resume
from stochflow.training.sources import OnPolicy


def explorer(task, policy):
    return OnPolicy(task, policy, 8, explore=0.2)


GIVEN = {"objective": SubTrajectoryBalance(0.5), "net": MLP(16, 2), "dynamics": Tabular, "source": explorer}
SMALL = {"side": 4, "stick": 0.2, "steps": 20, "log_every": 10, "seeds": 2, "hidden": 16, "batch": 8}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return train("grid", **SMALL, **GIVEN, out=tmp_path_factory.mktemp("values") / "run")


def test_the_folder_describes_them_with_their_parameters(done):
    values = json.loads((done.path / "config.json").read_text())["values"]
    assert values["objective"] == "SubTrajectoryBalance(decay=0.5, form=MARGINAL)"
    assert values["net"] == "MLP(hidden=16, layers=2)"
    assert values["dynamics"] == "Tabular"
    assert values["source"] == "explorer"


def test_it_goes_on_with_the_same_objects_alone(done):
    with pytest.raises(
        UserError,
        match=r"dynamics=Tabular, but none was given: .* resume\(path, objective=..., net=..., dynamics=..., source=...\)",
    ):
        resume(done.path, steps=30)
    with pytest.raises(UserError, match=r"decay=0\.5.*decay=0\.9.*was given"):
        resume(done.path, steps=30, **(GIVEN | {"objective": SubTrajectoryBalance(0.9)}))
    assert open_run(done.path, **GIVEN).measure()["tv"] == pytest.approx(done.summary["tv"])


def elsewhere(task, policy):
    return OnPolicy(grid_task(2, 8), policy, 8)


class Other:
    """Not a value of stochflow."""

    def __repr__(self):
        return "Other()"


REFUSED = [
    (
        "objective",
        Other(),
        "objective is Other(), but it must be a word or an Objective, such as SubTrajectoryBalance()",
    ),
    ("objective", SubTrajectoryBalance, "it must be a word or an Objective"),  # the class itself
    ("net", Other(), "net is Other(), but it must be a word or the description of a network, such as MLP(32, 3)"),
    ("net", MLP, "it must be a word or the description of a network"),
    (
        "dynamics",
        5,
        "dynamics is 5, but it must be a word, a Dynamics, or a function of environment and seeds that makes one",
    ),
    ("dynamics", lambda env: None, "it must be a word, a Dynamics, or a function of environment and seeds"),
    ("dynamics", lambda env, seeds: 7, "makes 7, but it must make a Dynamics"),
    ("source", 3, "source is 3, but it must be a Source, or a function of task and policy that makes one"),
    ("source", "logged", "source is 'logged', but it must be a Source"),
    ("source", lambda task, policy: None, "makes None, but it must make a Source"),
    (
        "dynamics",
        Tabular(Grid(2, 8), (0, 1)),
        "dynamics is of the environment Grid(ndim=2, side=8), but the task has Grid(",
    ),
    ("dynamics", Tabular(Grid(2, 4)), "dynamics is of 1 of the run's 2 seeds: build it for as many"),
    ("source", elsewhere, "source is of the environment Grid(ndim=2, side=8), but the task has Grid(ndim=2, side=4)"),
    ("track", 3, "track is 3, but it must be the name of a tracker, such as wandb, or none"),
    (
        "track",
        "wand",
        """there is no tracker 'wand' (did you mean "wandb"?): take one of wandb, trackio, tensorboard""",
    ),
]


@pytest.mark.parametrize(("name", "value", "sentence"), REFUSED, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(REFUSED)])
def test_what_is_no_value_is_refused_in_one_sentence(name, value, sentence, tmp_path):
    with pytest.raises(UserError, match=re.escape(sentence)):
        train("grid", **SMALL, **{name: value}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_known_may_be_given_as_a_class(tmp_path):
    done = train("grid", **SMALL, dynamics=Known, out=tmp_path / "run")
    assert isinstance(done.experiment.dynamics, Known)


def test_report_and_comparison_name_them(done, tmp_path):
    other = train("grid", **SMALL, objective="db", out=tmp_path / "other")
    labels = [arm.label for arm in compare([done.path, other.path]).arms]
    assert labels[1].startswith("objective db")
    assert "SubTrajectoryBalance(decay=0.5, form=MARGINAL)" in write_report([done.path]).read_text()
    command = RunFiles.read(done.path).command()
    assert command.startswith("train('grid', side=4, stick=0.2, ")
    assert "objective=SubTrajectoryBalance(decay=0.5, form=MARGINAL), net=MLP(hidden=16, layers=2)" in command
    assert RunFiles.read(other.path).command().startswith("stochflow train grid --side 4")


def test_the_result_holds_what_the_folder_holds(done):
    assert json.loads((done.path / "summary.json").read_text()) == json.loads(json.dumps(done.summary))
    assert [(row["step"], row["seed"]) for row in done.history] == [(s, i) for s in (10, 20) for i in (0, 1)]
    lines = [json.loads(line) for line in (done.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in done.history[:2]] == lines[0]["seeds"]["loss"]


def test_help_lists_every_setting():
    assert set(Train.__dataclass_fields__) <= set(inspect.signature(train).parameters)
