"""Your own objective: a residual over the terms that `evaluate` computed and masked; the loss is its mean square.

An objective says what it `needs` and knows nothing about the environment, so it serves every one of them.
"""

from dataclasses import dataclass

import torch

from stochflow import Policy, Tabular, Trainer, exact_law, grid_task
from stochflow.law.exact import Graph, target_law
from stochflow.law.metrics import tv
from stochflow.learn.objectives import Objective
from stochflow.training.sources import OnPolicy


@dataclass(frozen=True)
class PrefixBalance(Objective):
    """Trajectory balance of every beginning of a trajectory: Z prod p = F(s_t) prod P_B, one residual for each time t."""

    needs = frozenset({"log_move", "log_pb", "log_flow"})

    def residual(self, t):  # [T, S, B]
        travelled = (t.log_move - t.log_pb).cumsum(0)
        return t.log_flow[0] + travelled - t.log_flow[1:]


if __name__ == "__main__":
    torch.manual_seed(0)
    task = grid_task(side=8, stick=0.25)
    policy, dynamics = Policy(task.env), Tabular(task.env)
    trainer = Trainer(task, policy, dynamics, PrefixBalance(), OnPolicy(task, policy, batch=64, explore=0.1), lr=2e-3)
    trainer.train(1000)
    graph = Graph(task.env)
    with trainer.averaged():
        law = exact_law(graph, task.channel, policy)
    print(f"exact TV {float(tv(law[0], target_law(graph, task).target)):.3f}")
