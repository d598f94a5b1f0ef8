"""What would go wrong in silence is said or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stochflow import Slip, Task, strings_task, train
from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.law.exact import Graph, exact_law
from stochflow.learn.objectives import DetailedBalance
from stochflow.nets.layers import Trunk
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known
from stochflow.scores.rewards import Linear, Power
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Trainer
from stochflow.worlds.channels import Exact
from stochflow.worlds.grid import Corners, Grid
from stochflow.worlds.memory import Fatigue

RARE = {
    "steps": 400,
    "batch": 64,
    "hidden": 16,
    "lr": 1e-2,
    "log_every": 5,
    "eval_every": 400,
    "save_every": 5,
    "look": 50,
}
QUICK = {"steps": 4, "batch": 4, "hidden": 4, "log_every": 2}


class Shared(Trunk):
    """A plain module: one set of weights for all seeds."""

    width = 5

    def __init__(self, env):
        super().__init__()
        self.env, self.inner = env, nn.Linear(env.features(env.initial((1,))).shape[-1], 5)

    def forward(self, state, context=None):
        return self.inner(self.env.features(state)).relu()


class Plain(nn.Module):
    """No trunk of ours at all."""

    width, forward = 5, Shared.forward

    def __init__(self, env):
        super().__init__()
        self.env, self.inner = env, nn.Linear(env.features(env.initial((1,))).shape[-1], 5)


class PlainNet:
    def build(self, env, gens, context):
        return Plain(env)


class SharedNet:
    def build(self, env, gens, context):
        return Shared(env)


def test_a_trunk_that_shares_weights_between_seeds_is_refused(tmp_path):
    for seeds in (2, 5):  # 5: as many as the layer is wide, so that shapes alone do not tell
        with pytest.raises(UserError, match="shares its weights between"):
            train("grid", side=3, net=SharedNet(), seeds=seeds, out=tmp_path / "run", **QUICK)
    assert not (tmp_path / "run").exists()
    task, shared = Task(Grid(2, 3), Exact(), Corners(3), Power()), Policy(Grid(2, 3), SharedNet(), seeds=(0, 1))
    with pytest.raises(UserError, match="shares its weights between the 2 seeds"):  # a trainer made by hand as well
        Trainer(task, shared, Known(task.env, Exact()), DetailedBalance(), OnPolicy(task, shared, 4))
    Policy(Grid(2, 3), MLP(4, 1), seeds=(0, 1)).refuse_shared()
    Policy(Grid(2, 3), SharedNet(), seeds=(0,)).refuse_shared()


def test_a_module_that_is_no_trunk_is_refused(tmp_path):
    for seeds in (1, 2):
        with pytest.raises(UserError, match="the trunk Plain is"):
            train("grid", side=3, net=PlainNet(), seeds=seeds, out=tmp_path / "run", **QUICK)
    assert not (tmp_path / "run").exists()


def test_a_tensor_oracle_that_gives_nan_is_named_with_the_object(tmp_path):
    def oracle(state):
        score = state.sum(-1).float()
        return torch.where(state[..., 0] == 2, torch.nan, score + 1)

    oracle.on_device = True
    made = strings_task(len, "AC", 2)
    task = Task(Grid(2, 3), Exact(), oracle, Power())
    assert made.env.length == 2
    with pytest.raises(UserError, match=r"state \[2, \d\]"):
        train(task, out=tmp_path / "run", **QUICK)


@pytest.mark.parametrize("ndim", [4, 10], ids=["listed", "drawn"])
def test_a_rare_object_without_a_score_is_named(ndim, tmp_path):
    """Not among the random objects that are asked about at the door: training alone comes to it."""
    alone = torch.tensor([1] + [0] * (ndim - 1))

    def oracle(state):
        return torch.where((state == alone).all(-1), torch.nan, 1.0 + state.sum(-1))

    oracle.on_device = True
    task = Task(Grid(ndim, 8), Exact(), oracle, Power())
    named = r"is not finite at step \d+, because the oracle gives nan for .*state \[1, 0, 0.*finite score"
    with pytest.raises(UserError, match=named):
        train(task, out=tmp_path / "run", **RARE)


def test_negative_scores_under_a_power_are_counted(tmp_path, caplog):
    def energy(texts):
        return [t.count("A") - 1.5 for t in texts]

    train(strings_task(energy, "AC", 2), out=tmp_path / "one", **QUICK)
    assert "scores of random objects are negative" in caplog.text
    caplog.clear()
    train(strings_task(energy, "AC", 2, channel=Slip(0.1), reward=Linear()), out=tmp_path / "two", **QUICK)
    assert "negative" not in caplog.text


def test_rare_negative_scores_are_counted_where_all_objects_are_listed(tmp_path, caplog):
    """One of 1,024 strings: the few random ones that are asked about at the door are all positive."""
    train(strings_task(lambda texts: [t.count("A") - 0.5 for t in texts], "AC", 10, reward=Power()), out=tmp_path / "run", **QUICK)  # fmt: skip
    assert "random objects" not in caplog.text
    assert "1 of 1024 scores of all objects are negative" in caplog.text


def test_a_law_of_noise_with_a_past_points_to_the_one_that_takes_it_in():
    env = Grid(1, 3)
    with pytest.raises(UserError, match="memory_law"):
        exact_law(Graph(env), Fatigue(), Policy(env, MLP(4, 1)))


def test_the_names_of_the_literature_are_understood(capsys):
    names = {"sgfn-db": "sdb", "SGFN_DB": "sdb", "trajectory balance": "tb", "TB": "tb", "vargrad": "logvar"}
    for word, meant in names.items():
        with pytest.raises(UserError, match=f'did you mean "{meant}"'):
            train("grid", objective=word)
        assert main(["train", "grid", "--objective", word]) == 2
        assert f'(did you mean "{meant}"?)' in capsys.readouterr().err
    assert main(["train", "grid", "--net", "transfomer"]) == 2
    assert '(did you mean "transformer"?)' in capsys.readouterr().err
