"""The transformer inside a recorded iteration on a GPU: the same figures as eager evaluation, for every kind of string."""

from __future__ import annotations

import pytest
import torch

from stochflow.learn.objectives import DetailedBalance, TrajectoryBalance
from stochflow.learn.rollout import rollout
from stochflow.nets.policy import Policy
from stochflow.nets.transformer import Transformer
from stochflow.noise.dynamics import Neural
from stochflow.noise.thoughts import Attention, ThoughtDynamics
from stochflow.runs.tasks import bits_task
from stochflow.scores.rewards import Linear
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Trainer
from stochflow.types import Task
from stochflow.worlds.channels import Slip
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.memory import Fatigue
from stochflow.worlds.strings import Strings

pytestmark = pytest.mark.gpu


def score(state):
    return (state == 0).sum(-1).float() / 4


score.on_device = True
ENVS = {
    "fixed": lambda: Strings("ACGT", 6),
    "variable": lambda: Strings("ACGT", 6, 1),
    "conditioned": lambda: Conditioned(Strings("ACGT", 5), torch.tensor([[0.0], [1.0]])),
}


@pytest.mark.parametrize("name", ENVS)
def test_a_recorded_iteration_learns(name):
    env = ENVS[name]()
    task = Task(env, Slip(0.1), score, Linear())
    policy = Policy(env, Transformer(32, 4, 2), seeds=(0, 1)).to("cuda")
    trainer = Trainer(
        task, policy, Neural(env, (0, 1)).to("cuda"), TrajectoryBalance(), OnPolicy(task, policy, 64, 0.1), lr=2e-3
    )
    trainer.train(5)
    before = trainer.stats["loss"]
    trainer.train(200)
    assert bool((trainer.stats["finite"] == 1).all())
    assert bool((trainer.stats["loss"] < before).all())


@pytest.mark.parametrize("name", ENVS)
@torch.no_grad()
def test_the_cache_and_one_pass_agree_on_the_gpu(name):
    env = ENVS[name]()
    policy = Policy(env, Transformer(32, 4, 2), seeds=(0, 1)).to("cuda")
    row = torch.zeros(2, 50, dtype=torch.long, device="cuda")
    traj = rollout(Task(env, Slip(0.3), score, Linear()), policy, 50, row=row)
    context = policy.context(traj.states[0])
    want = policy.along(traj, context).forward
    logits, cache = policy.begin(traj.states[0], context)
    for t in range(env.horizon):
        alive = traj.alive[t]
        torch.testing.assert_close(logits[alive], want[t][alive], atol=1e-5, rtol=1e-5)
        logits, cache = policy.advance(cache, traj.states[t + 1], traj.moves[t], t)


def test_more_sequences_than_one_kernel_takes():
    env = Strings("ACGT", 3)
    policy = Policy(env, Transformer(8, 2, 1)).to("cuda")
    state = torch.randint(4, (1, 70_000, 3), device="cuda")
    with torch.no_grad():
        many = policy(state).log_flow
        few = policy(state[:, -10:]).log_flow
    torch.testing.assert_close(many[:, -10:], few, atol=1e-5, rtol=1e-5)


def test_a_world_with_a_memory_and_a_reader_of_thoughts_are_recorded():
    env = Strings("ABC", 4)
    task = Task(env, Fatigue(0.2, 0.4), score, Linear())
    policy = Policy(env, Transformer(16, 2, 1)).to("cuda")
    dynamics = ThoughtDynamics(env, (0,), Attention(16, 2, 1)).to("cuda")
    trainer = Trainer(task, policy, dynamics, DetailedBalance(), OnPolicy(task, policy, 64), lr=2e-3)
    trainer.train(3)
    before = trainer.stats["dynamics_loss"]
    trainer.train(200)
    assert bool((trainer.stats["dynamics_loss"] < before).all())


def test_long_bit_sequences_are_recorded():
    task = bits_task(length=120, bits=4, stick=0.1)
    policy = Policy(task.env, Transformer(32, 4, 2)).to("cuda")
    trainer = Trainer(
        task, policy, Neural(task.env, (0,)).to("cuda"), TrajectoryBalance(), OnPolicy(task, policy, 32, 0.1), lr=1e-3
    )
    trainer.train(20)
    assert bool((trainer.stats["finite"] == 1).all())
