"""A wrong argument of the exact laws and the metrics is one sentence that names it."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch

from stochflow.errors import UserError
from stochflow.law import exact, exact_memory, floors, metrics, modes
from stochflow.law.exact import Graph
from stochflow.nets.policy import Policy
from stochflow.runs.tasks import grid_task
from stochflow.worlds.strings import Strings

WRONG = [None, 0, -1, 1.5, math.nan, math.inf, 10**30, "", "x", b"x", [], {}, object(), torch.zeros(0), torch.zeros(2, 3, 4), np.zeros(3), lambda: None, int, True]  # fmt: skip
TASK = grid_task(side=3, stick=0.1)
GRAPH, POLICY = Graph(TASK.env), Policy(TASK.env)
TARGET = exact.target_law(GRAPH, TASK)
LAW = exact.exact_law(GRAPH, TASK.channel, POLICY)
STATES = torch.tensor([[0, 1], [2, 2], [1, 0]])
TEXTS, SCORES = ["AC", "CA", "AA"], [1.0, 2.0, 3.0]
ACTING = {"graph": GRAPH, "channel": TASK.channel, "policy": POLICY, "seeds": 1}
CALLS = [
    (Graph, {"env": TASK.env, "row": None, "device": None}),
    (exact.exact_law, ACTING),
    (exact.state_law, ACTING),
    (exact_memory.memory_law, ACTING),
    (exact.target_law, {"graph": GRAPH, "task": TASK}),
    (exact.tabular_solution, {"graph": GRAPH, "task": TASK, "target": TARGET}),
    (exact.flows, {"graph": GRAPH, "log_reward": TARGET.log_reward}),
    (exact.invert, {"graph": GRAPH, "channel": TASK.channel, "log_q": exact.flows(GRAPH, TARGET.log_reward)[1], "tolerance": 1e-6}),
    (exact.expected_modes, {"law": LAW, "modes": torch.tensor([1, 2]), "samples": 10}),
    (floors.floor, {"task": TASK, "graph": GRAPH, "target": TARGET}),
    (floors.limit_tv, {"objective": "tb", "floor": floors.floor(TASK)}),
    *((f, {"p": LAW, "q": TARGET.target}) for f in (metrics.l1, metrics.tv, metrics.kl, metrics.jsd)),
    (metrics.spearman, {"x": LAW, "y": LAW}),
    (metrics.top_k_mean, {"score": torch.rand(5), "k": 2}),
    *((f, {"states": STATES}) for f in (metrics.diversity, metrics.distinct_fraction, metrics.commonest_fraction)),
    (metrics.novelty, {"states": STATES, "reference": STATES, "chunk": 2}),
    (metrics.interval, {"values": SCORES, "level": 0.9, "resamples": 10}),
    (modes.find_modes, {"sequences": TEXTS, "scores": SCORES, "threshold": 0.0}),
    (modes.local_maxima, {"sequences": TEXTS, "scores": SCORES, "threshold": 0.0}),
    (modes.nearest, {"sequences": TEXTS, "heads": TEXTS, "metric": "hamming"}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("function", "good"), CALLS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_wrong_argument_is_a_sentence(function, good):
    function(**good)
    said = []
    for name in good:
        for wrong in WRONG:
            try:
                function(**good | {name: wrong})
            except UserError as error:
                said.append(str(error))
    assert len(said) >= len(inspect.signature(function).parameters)
    assert all("\n" not in text and len(text) > 12 for text in said)


def test_what_does_not_fit_is_refused_before_it_is_made():
    for make in (lambda: Graph(Strings("ACGT", 18)), lambda: metrics.interval(SCORES, resamples=10**12)):
        with pytest.raises(UserError, match="memory"):
            make()
