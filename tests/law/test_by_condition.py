"""Figures of tasks with conditions: each condition by itself, not the first for all."""

from __future__ import annotations

import json

import pytest
import torch

from stochflow import Grid, Power, Slip, Strings, Task, floor
from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.law.by_condition import floor_rows, law_rows, listed
from stochflow.law.exact import Graph
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.worlds.conditioned import Conditioned

WANTED = [0.0, 1.0, 3.0]


def made(inner, alpha: float) -> Task:
    """R = exp(-(sum of the columns - wanted)^2), for three wanted sums."""
    wanted = torch.tensor(WANTED)

    def oracle(state):
        return (-((state[..., 1:].clamp(min=0).sum(-1) - wanted[state[..., 0]]) ** 2)).exp()

    oracle.on_device = True
    return Task(Conditioned(inner, wanted.unsqueeze(1)), Slip(alpha), oracle, Power(1.0, 1e-6))


def alone(inner, alpha: float, wanted: float) -> Task:
    """The same for one wanted sum, without conditions."""

    def oracle(state):
        return (-((state.clamp(min=0).sum(-1) - wanted) ** 2)).exp()

    oracle.on_device = True
    return Task(inner, Slip(alpha), oracle, Power(1.0, 1e-6))


@pytest.mark.parametrize("inner", [Strings("ABC", 3), Grid(2, 3)], ids=repr)
def test_each_floor_is_that_of_the_task_with_this_condition_alone(inner):
    task = made(inner, 0.3)
    found = floor_rows(task, listed(task))
    assert [row["condition"] for row in found] == ["0", "1", "3"]
    for row, wanted in zip(found, WANTED, strict=True):
        one = floor(alone(inner, 0.3, wanted))
        assert row["floor_tv"] == pytest.approx(one.floor_tv, abs=1e-6)
        assert row["naive_tv"] == pytest.approx(one.naive_tv, abs=1e-6)
        assert row["log_z"] == pytest.approx(one.log_z, abs=1e-6)
    assert len({round(row["naive_tv"], 3) for row in found}) > 1
    with pytest.raises(UserError, match="3 conditions"):
        floor(task)
    assert floor(task, Graph(task.env, 1)).floor_tv == pytest.approx(found[1]["floor_tv"], abs=1e-6)


def test_each_law_is_the_policy_under_its_condition():
    task = made(Strings("AB", 2), 0.0)
    policy = Policy(task.env, MLP(8, 1), seeds=(0, 1))
    found = law_rows(task, policy, listed(task))
    for row, wanted in zip(found, WANTED, strict=True):
        number = WANTED.index(wanted)
        reward = {(a, b): torch.exp(torch.tensor(-((a + b - wanted) ** 2))) for a in (0, 1) for b in (0, 1)}
        total = sum(reward.values())
        for seed in (0, 1):
            off = 0.0
            for (a, b), r in reward.items():
                first = torch.tensor([[number, -1, -1]]).expand(2, 1, 3)
                then = torch.tensor([[number, a, -1]]).expand(2, 1, 3)
                p = policy(first).forward.softmax(-1)[seed, 0, a] * policy(then).forward.softmax(-1)[seed, 0, b]
                off += abs(float(p.detach() - r / total)) / 2
            assert row["tv_seeds"][seed] == pytest.approx(off, abs=1e-5)


def test_train_and_floor_tell_each_condition(tmp_path, capsys):
    words = ["gc", "--length", "3", "--stick", "0.2", "--targets", "0.2,0.8", "--betas", "4"]
    assert main(["floor", *words, "--json"]) == 0
    assert [row["condition"] for row in json.loads(capsys.readouterr().out)["conditions"]] == ["0.2,4", "0.8,4"]
    assert main(["floor", *words]) == 0
    assert capsys.readouterr().out.count("best achievable") == 2
    out = tmp_path / "run"
    assert main(["train", *words, "--steps", "3", "--batch", "8", "--hidden", "4", "--out", str(out)]) == 0
    assert "condition 0.8,4: total variation" in capsys.readouterr().out
    found = json.loads((out / "summary.json").read_text())
    assert [0 < row["tv"] < 1 for row in found["conditions"]] == [True, True]
    assert main(["eval", str(out), "--saved"]) == 0
    assert "Under each of its 2 conditions" in capsys.readouterr().out
