"""Recurrent trunks: one law from every way of asking, seeds apart, and torch's own cells inside."""

from __future__ import annotations

import pytest
import torch

from stochflow.errors import UserError
from stochflow.learn.rollout import rollout
from stochflow.nets.policy import Policy
from stochflow.nets.recurrent import Recurrent
from stochflow.scores.oracles import Table
from stochflow.scores.rewards import Power
from stochflow.types import Task
from stochflow.worlds.channels import Slip
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

WORLDS = {
    "fixed": Strings("ABC", 4),
    "ragged": Strings("ABC", 4, 1),
    "conditioned": Conditioned(Strings("ABC", 4), torch.randn(5, 2, generator=torch.Generator().manual_seed(0))),
}


@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.parametrize("world", WORLDS)
def test_forward_along_and_advance_agree(world, kind):
    env = WORLDS[world]
    policy = Policy(env, Recurrent(16, 2, kind), seeds=[0, 1])
    task = Task(env, Slip(0.2), lambda state: torch.ones(state.shape[:-1]), Power(1.0, 1e-6))
    traj = rollout(task, policy, 9)
    context = policy.context(traj.states[0])
    along = policy.along(traj, context)
    state, move = traj.states, traj.moves
    logits, cache = policy.begin(state[0], context)
    for t in range(env.horizon):
        alone = policy(state[t], context)
        assert torch.allclose(along.forward[t], alone.forward, atol=1e-5)
        assert torch.allclose(along.log_flow[t], alone.log_flow, atol=1e-4)
        assert torch.allclose(logits[traj.alive[t]], alone.forward[traj.alive[t]], atol=1e-5)
        if t + 1 < env.horizon:
            logits, cache = policy.advance(cache, state[t + 1], move[t], t)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_it_is_torchs_cell_and_seeds_do_not_meet(kind):
    env = Strings("ABC", 3)
    both, second = Policy(env, Recurrent(8, 1, kind), seeds=[4, 5]), Policy(env, Recurrent(8, 1, kind), seeds=[5])
    states = env.all_states().expand(2, -1, -1)
    assert torch.allclose(both(states).forward[1], second(states[:1]).forward[0], atol=1e-6)
    trunk = second.trunk
    cell = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}[kind](8, 8, 1, batch_first=True)
    cell.load_state_dict({name: p[0] for name, p in trunk.named_parameters() if name in dict(cell.named_parameters())})
    text = env.encode(["ABC"])
    x = trunk.embed(torch.cat([torch.tensor([[4]]), text], -1).unsqueeze(0))[0]
    assert torch.allclose(trunk(text.unsqueeze(0), None)[0, 0], cell(x)[0][0, -1], atol=1e-6)


def test_it_learns_a_small_law():
    from stochflow.law import metrics
    from stochflow.law.exact import Graph, exact_law, target_law
    from stochflow.learn.objectives import DetailedBalance
    from stochflow.noise.dynamics import Known
    from stochflow.training.sources import OnPolicy
    from stochflow.training.trainer import Trainer

    env = Strings("AB", 3)
    task = Task(
        env,
        Slip(0.1),
        Table(env, 1 + torch.rand(env.count(), generator=torch.Generator().manual_seed(1))),
        Power(2.0, 1e-6),
    )
    torch.manual_seed(0)
    policy = Policy(env, Recurrent(16, 1, "gru"))
    trainer = Trainer(
        task, policy, Known(env, task.channel), DetailedBalance(), OnPolicy(task, policy, 64, 0.05), lr=1e-2
    )
    trainer.train(250)
    graph = Graph(env)
    with trainer.averaged():
        assert float(metrics.tv(exact_law(graph, task.channel, policy), target_law(graph, task).target)[0]) < 0.03


def test_what_it_cannot_read_is_refused():
    with pytest.raises(UserError, match="recurrent trunk reads strings"):
        Policy(Grid(2, 4), Recurrent())
    with pytest.raises(UserError, match="gru or lstm"):
        Recurrent(kind="rnn")
