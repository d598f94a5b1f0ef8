"""One policy for every condition: the law of each context row is exact, and so is its log Z."""

from __future__ import annotations

import pytest
import torch

from stochflow.law.exact import Graph, exact_law, target_law
from stochflow.law.metrics import tv
from stochflow.learn.objectives import DetailedBalance, TrajectoryBalance
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.nets.transformer import Transformer
from stochflow.noise.dynamics import Known, Neural
from stochflow.runs.tasks import gc_task
from stochflow.training.sources import Mixed, OnPolicy
from stochflow.training.trainer import NoiseTraining, Trainer

pytestmark = pytest.mark.slow


def worst(trainer: Trainer, task) -> tuple[float, float]:
    """Over all context rows and seeds: the largest TV of the exact law, and the largest error of the learned log Z."""
    policy = trainer.policy
    far, off = 0.0, 0.0
    with trainer.averaged(), torch.no_grad():
        for row in range(len(task.env.contexts)):
            graph = Graph(task.env, row)
            target = target_law(graph, task)
            law = exact_law(graph, task.channel, policy)
            assert torch.allclose(law.sum(1), torch.ones(policy.num_seeds, dtype=torch.float64))
            far = max(far, float(tv(law, target.target).max()))
            first = graph.states[graph.root].expand(policy.num_seeds, 1, -1)
            learned = (
                policy.log_z(policy.context(first))
                if isinstance(trainer.objective, TrajectoryBalance)
                else policy(first).log_flow
            )
            off = max(off, float((learned - target.log_z).abs().max()))
    return far, off


@pytest.mark.parametrize("net", [MLP(64, 2), Transformer(16, 2, 1)], ids=["mlp", "transformer"])
def test_gc_content_on_demand(net):
    task = gc_task(length=4, targets="0,0.5,1", betas="2,6", stick=0.1)
    torch.manual_seed(0)
    policy = Policy(task.env, net, seeds=(0, 1))
    source = OnPolicy(task, policy, 192, 0.1, 100.0)
    trainer = Trainer(task, policy, Known(task.env, task.channel), TrajectoryBalance(), source, lr=5e-3)
    trainer.train(450)
    far, off = worst(trainer, task)
    assert far < 0.04
    assert off < 0.1


def test_replay_keeps_the_condition_beside_the_string():
    """A replayed string comes back under the row it was made for; training with replay reaches every row's law as well."""
    from stochflow.learn.buffer import Buffer

    task = gc_task(length=3, targets="0,1", betas="5", stick=0.1)
    torch.manual_seed(0)
    policy = Policy(task.env, MLP(32, 2), seeds=(0, 1))
    buffer = Buffer(task.env, 1000, 2)
    source = Mixed(OnPolicy(task, policy, 96, 0.1, 100.0), buffer, 64)
    trainer = Trainer(
        task, policy, Neural(task.env, (0, 1)), DetailedBalance(), source, lr=5e-3, noise=NoiseTraining(5e-3)
    )
    trainer.train(500)
    again = buffer.sample(500)
    assert set(again.states[0, ..., 0].unique().tolist()) == {0, 1}
    torch.testing.assert_close(task.oracle(again.states[-1]), again.score)  # the score was given for that row
    far, _ = worst(trainer, task)
    assert far < 0.04
