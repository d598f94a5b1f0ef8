"""The configuration: read back as it was written, and refusing what it does not know."""

from __future__ import annotations

import json

import pytest

from stochflow.errors import UserError
from stochflow.runs.config import TASKS, Config, GridTask, Train, UserTask, configure


@pytest.mark.parametrize("task", [*TASKS, "my_pkg.tasks:gc"])
def test_a_configuration_survives_json(task):
    config = configure(task, steps=7, lr=0.5)
    again = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert config.to_dict().keys() == {"format", "version", "command", "task", "train"}
    assert config.to_dict()["task"]["name"] == task


def test_settings_go_where_they_belong():
    config = configure("grid", side=5, batch=3)
    assert config.task == GridTask(side=5)
    assert config.train == Train(batch=3, **GridTask.train)
    assert configure("tfbind8").train.net == "lookup"  # a task's own defaults
    assert configure("tfbind8", net="mlp").train.net == "mlp"
    assert configure("m:f", letters=4, steps=2).task == UserTask("m:f", {"letters": 4})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch": -1}, ["--batch", "-1", "at least 1"]),
        ({"steps": 0}, ["--steps"]),
        ({"lr": float("nan")}, ["--lr", "nan"]),
        ({"lr": 0}, ["--lr", "above 0"]),
        ({"explore": 1.5}, ["--explore", "between 0 and 1"]),
        ({"replay": 1.0}, ["--replay", "below 1"]),
        ({"objective": "tbb"}, ["did you mean", "tb"]),
        ({"steps": "many"}, ["steps", "int"]),
        ({"steps": True}, ["steps", "int"]),
        ({"sides": 3}, ["sides", "did you mean", "side"]),
    ],
)
def test_what_is_wrong_is_named(settings, words):
    with pytest.raises(UserError) as caught:
        configure("grid", **settings)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(format=3), ["format 3", "upgrade"]),
        (lambda d: d.update(trane={}), ["trane", "train"]),
        (lambda d: d["train"].update(stepz=3), ["stepz", "steps"]),
        (lambda d: d["task"].update(name="gird"), ["gird", "grid"]),
        (lambda d: d.pop("task"), ["not a configuration"]),
        (lambda d: d.update(train=3), ["train"]),
    ],
)
def test_a_foreign_file_is_refused(change, words):
    data = configure("grid").to_dict()
    change(data)
    with pytest.raises(UserError) as caught:
        Config.from_dict(data, "some/config.json")
    for word in words:
        assert word in str(caught.value)
