"""Public functions called with anything: they return, or raise a UserError of one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import stochflow as sf
from stochflow.errors import UserError
from stochflow.law.exact import Graph
from stochflow.nets.mlp import MLP
from stochflow.scores.oracles import Cached, Command, Host
from stochflow.worlds.conditioned import Conditioned

ODD = [None, -1, 0, 2.5, float("nan"), float("inf"), "x", "", [], {}, (), object(), 10**30, True, b"x", ("a",), "\x1b[31m", torch.zeros(2), np.zeros(3), [["a"]], int, len, Path("no"), "a\x00b"]  # fmt: skip
GRID, TEXTS = sf.Grid(2, 3), sf.Strings("AC", 3)
TASK = sf.grid_task(2, 3)
POLICY = sf.Policy(GRID, MLP(4, 1))
DOORS = {
    "Strings(alphabet)": lambda x: sf.Strings(x, 3),
    "Strings(length)": lambda x: sf.Strings("AC", x),
    "Strings(min_length)": lambda x: sf.Strings("AC", 3, x),
    "Grid(ndim)": lambda x: sf.Grid(x, 3),
    "Grid(side)": lambda x: sf.Grid(2, x),
    "Slip": sf.Slip,
    "Neighbour": sf.Neighbour,
    "Confusion(table)": sf.Confusion,
    "Confusion(alphabet)": lambda x: sf.Confusion([[1.0, 0.0], [0.0, 1.0]], x),
    "Power(beta)": sf.Power,
    "Power(floor)": lambda x: sf.Power(1.0, x),
    "Power(ramp)": lambda x: sf.Power(1.0, 1e-3, x),
    "Linear": sf.Linear,
    "strings_task(oracle)": sf.strings_task,
    "strings_task(channel)": lambda x: sf.strings_task(len, "AC", 2, channel=x),
    "strings_task(reward)": lambda x: sf.strings_task(len, "AC", 2, reward=x),
    "strings_task(rules)": lambda x: sf.strings_task(len, "AC", 2, rules=x),
    "grid_task(base)": lambda x: sf.grid_task(2, 3, x),
    "grid_task(noise)": lambda x: sf.grid_task(2, 3, 0.1, 0.1, x),
    "grid_task(confusion)": lambda x: sf.grid_task(2, 3, 0.1, 0.0, "confusion", x),
    "tfbind8_task(table)": lambda x: sf.tfbind8_task(table=x),
    "check_env(env)": sf.check_env,
    "check_env(samples)": lambda x: sf.check_env(GRID, x),
    "check_env(largest)": lambda x: sf.check_env(GRID, 4, x),
    "check_env(seed)": lambda x: sf.check_env(GRID, 4, 10, x),
    "check_channel(channel)": lambda x: sf.check_channel(x, GRID),
    "check_channel(env)": lambda x: sf.check_channel(sf.Slip(0.1), x),
    "check_channel(samples)": lambda x: sf.check_channel(sf.Slip(0.1), GRID, x),
    "check_oracle(task)": sf.check_oracle,
    "check_oracle(samples)": lambda x: sf.check_oracle(TASK, x),
    "rollout(task)": lambda x: sf.rollout(x, POLICY, 4),
    "rollout(policy)": lambda x: sf.rollout(TASK, x, 4),
    "rollout(batch)": lambda x: sf.rollout(TASK, POLICY, x),
    "exact_law(graph)": lambda x: sf.exact_law(x, sf.Slip(0.1), POLICY),
    "exact_law(channel)": lambda x: sf.exact_law(Graph(GRID), x, POLICY),
    "floor(task)": sf.floor,
    "Policy(env)": lambda x: sf.Policy(x, MLP(4, 1)),
    "Policy(net)": lambda x: sf.Policy(GRID, x),
    "Policy(seeds)": lambda x: sf.Policy(GRID, MLP(4, 1), seeds=x),
    "MLP(hidden)": lambda x: sf.Policy(GRID, MLP(x, 1)),
    "MLP(layers)": lambda x: sf.Policy(GRID, MLP(4, x)),
    "Transformer(width)": lambda x: sf.Policy(TEXTS, sf.Transformer(x)),
    "Transformer(heads)": lambda x: sf.Policy(TEXTS, sf.Transformer(8, x)),
    "Transformer(layers)": lambda x: sf.Policy(TEXTS, sf.Transformer(8, 2, x)),
    "Buffer(env)": lambda x: sf.Buffer(x, 4, 1),
    "Buffer(capacity)": lambda x: sf.Buffer(GRID, x, 1),
    "Buffer(seeds)": lambda x: sf.Buffer(GRID, 4, x),
    "Buffer(priority)": lambda x: sf.Buffer(GRID, 4, 1, x),
    "Tabular(env)": sf.Tabular,
    "Tabular(seeds)": lambda x: sf.Tabular(GRID, x),
    "Neural(env)": sf.Neural,
    "Neural(seeds)": lambda x: sf.Neural(GRID, x),
    "Conditioned(inner)": lambda x: Conditioned(x, torch.zeros(2, 1)),
    "Conditioned(contexts)": lambda x: Conditioned(GRID, x),
    "Host(env)": lambda x: Host(len, x),
    "Cached(oracle)": Cached,
    "Cached(file)": lambda x: Cached(Host(len, TEXTS), x),
    "Command": Command,
    "Trainer(task)": lambda x: sf.Trainer(x, POLICY, sf.Known(GRID, sf.Exact()), sf.TrajectoryBalance(), None),
}


@pytest.mark.parametrize("door", DOORS)
def test_anything_is_taken_or_refused_in_one_sentence(door, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    for odd in ODD:
        try:
            DOORS[door](odd)
        except UserError as error:
            said.append(str(error))
    assert said
    assert all(sentence.strip() and sentence.isprintable() for sentence in said)
