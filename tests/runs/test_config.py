"""The configuration: read back as it was written, and refusing what it does not know."""

from __future__ import annotations

import json

import pytest

from stochflow.errors import UserError
from stochflow.law.floors import caution
from stochflow.law.verdict import verdict
from stochflow.runs.config import OBJECTIVES, TASKS, Config, GridTask, Train, UserTask, configure
from stochflow.runs.experiment import resume, train


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


@pytest.mark.parametrize("word", ["sdb", "stb", "ssubtb", "sgfn-kl", "sgfn-kl-gamma", "db", "naive-db"])
def test_joint_words_of_an_older_folder_mean_the_published_form(word):
    data = configure("grid", objective=word).to_dict() | {"format": 1}
    joint = word in ("sdb", "stb", "ssubtb", "sgfn-kl", "sgfn-kl-gamma")
    assert Config.from_dict(data).train.objective == (f"{word}-published" if joint else word)
    assert Config.from_dict(configure("grid", objective=word).to_dict()).train.objective == word


def test_an_older_run_of_the_published_form_goes_on_with_its_head(tmp_path):
    """A folder as format 1 wrote it: the word sdb, and a checkpoint with a head for the action given the move."""
    settings = {"side": 3, "stick": 0.25, "batch": 4, "hidden": 8, "steps": 3, "engine": "eager"}
    train("grid", objective="sdb-published", out=tmp_path / "old", **settings)
    whole = train("grid", objective="sdb-published", out=tmp_path / "whole", **settings | {"steps": 6})
    file = tmp_path / "old" / "config.json"
    data = json.loads(file.read_text())
    data["format"], data["train"]["objective"] = 1, "sdb"
    file.write_text(json.dumps(data))
    went_on = resume(tmp_path / "old", steps=6)
    assert went_on.summary["objective"] == "sdb-published"
    assert went_on.summary["tv"] == whole.summary["tv"]
    assert "sdb-published" in went_on.summary["caution"]
    assert went_on.summary["limit_tv"] is None


def test_the_published_form_warns_in_every_summary_and_no_other_does():
    for word in OBJECTIVES:
        said = caution(word)
        assert bool(said) == word.endswith("-published")
        assert said.count(". ") == 0
        if said:
            assert verdict({"tv": 0.5, "floor_tv": None, "caution": said}).endswith(said)
            assert word.removesuffix("-published") in OBJECTIVES
