"""What every policy promises, whatever its trunk: three ways to the same figures, and seeds that do not know of each other.

A trunk that is added belongs into NETS; the promises are then made for it too.
"""

from __future__ import annotations

import pytest
import torch

from stochflow.errors import UserError
from stochflow.learn.evaluate import evaluate
from stochflow.learn.objectives import DetailedBalance
from stochflow.learn.rollout import rollout
from stochflow.nets.lookup import Lookup
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.nets.transformer import Transformer
from stochflow.noise.dynamics import Known
from stochflow.scores.rewards import Linear
from stochflow.types import Task, Trajectories, World
from stochflow.worlds.channels import Slip
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.grid import Grid
from stochflow.worlds.rules import GC, Homopolymer, Rules
from stochflow.worlds.strings import Strings

NETS = {"mlp": MLP(16, 2), "narrow": MLP(4, 2), "lookup": Lookup(16, 1, 8), "transformer": Transformer(16, 2, 2)}
CONTEXTS = torch.tensor([[0.0, 1.0], [0.5, -1.0], [2.0, 0.3]])
ENVS = {
    "grid": lambda: Grid(2, 4),
    "fixed": lambda: Strings("ACGT", 5),
    "variable": lambda: Strings("ACG", 5, min_length=1),
    "ruled": lambda: Rules(Homopolymer(2), GC(0.2, 0.8)).compile("ACGT", 5).env(),
    "ruled variable": lambda: Rules(Homopolymer(2)).compile("ACGT", (2, 5)).env(),
    "conditioned": lambda: Conditioned(Strings("ACGT", 4), CONTEXTS),
    "conditioned variable": lambda: Conditioned(Strings("AC", 6, min_length=0), CONTEXTS),
    "conditioned grid": lambda: Conditioned(Grid(2, 3), CONTEXTS),
}
CASES = [(net, env) for net in NETS for env in ENVS if not (net == "transformer" and "grid" in env)]
SEEDS = (3, 11, 5)


def make_policy(net: str, env, seeds=SEEDS) -> Policy:
    policy = Policy(env, NETS[net], seeds=seeds, back_action=True)
    with torch.no_grad():
        policy.head.weight.mul_(10)  # far enough from zero for a difference to show
    return policy


def make_batch(env, policy: Policy, batch: int = 9) -> Trajectories:
    """Real trajectories of all lengths; every context occurs."""
    row = torch.arange(batch).expand(policy.num_seeds, -1) % len(CONTEXTS)
    task = Task(env, Slip(0.5), lambda s: s, Linear())
    return rollout(task, policy, batch, row=row, explore=0.5)


@pytest.mark.parametrize(("net", "env"), CASES)
@torch.no_grad()
def test_forward_along_and_advance_agree(net, env):
    env = ENVS[env]()
    policy = make_policy(net, env)
    traj = make_batch(env, policy)
    context = policy.context(traj.states[0])
    at_once = policy.along(traj, context)
    out, cache = policy.begin(traj.states[0], context)
    stepwise = [out]
    for t in range(env.horizon):
        out, cache = policy.advance(cache, traj.states[t + 1], traj.moves[t], t)
        stepwise.append(out)
    alone = [policy(state) for state in traj.states]
    asked = torch.cat([torch.ones_like(traj.alive[:1]), traj.alive[1:]])  # after the end a rollout asks no more
    for name in ("forward", "backward", "back_action", "log_flow"):
        want = getattr(at_once, name)
        spread = float(want.std())
        assert spread > 0.05 or (
            name == "backward" and env.tree
        )  # equal because they agree, not because nothing differs
        torch.testing.assert_close(torch.stack([getattr(o, name) for o in alone]), want, atol=1e-5, rtol=1e-5)
    decoded = torch.stack(stepwise[:-1])
    torch.testing.assert_close(decoded[asked], at_once.forward[:-1][asked], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("net", "env"), CASES)
@torch.no_grad()
def test_a_batch_of_any_shape_gives_the_same_as_its_members_alone(net, env):
    env = ENVS[env]()
    policy = make_policy(net, env)
    final = make_batch(env, policy).states[-1]
    together = policy(final).log_flow
    torch.testing.assert_close(
        torch.cat([policy(final[:, i : i + 1]).log_flow for i in range(final.shape[1])], 1),
        together,
        atol=1e-5,
        rtol=1e-5,
    )


def row_of(policy: Policy, i: int, single: Policy) -> None:
    """The weights of row i in a policy of one seed."""
    for mine, theirs in zip(single.parameters(), policy.parameters(), strict=True):
        mine.data.copy_(theirs.data[i : i + 1])


def gradient(policy: Policy, task: Task, traj: Trajectories) -> tuple[torch.Tensor, list[torch.Tensor]]:
    objective = DetailedBalance()
    dynamics = Known(task.env, task.channel)
    terms = evaluate(task, policy, dynamics, traj, None, objective.needs)
    loss = objective.loss(terms, World(task, policy, dynamics, traj, None, lambda s, w: None))
    return loss.detach(), list(torch.autograd.grad(loss.sum(), list(policy.parameters()), allow_unused=True))


@pytest.mark.parametrize(("net", "env"), CASES)
def test_a_seed_row_learns_what_a_single_run_learns(net, env):
    """Loss and gradient of row i, beside those of one policy with the same weights and trajectories."""
    env = ENVS[env]()
    task = Task(env, Slip(0.25), lambda s: s, Linear())
    policy = Policy(env, NETS[net], seeds=SEEDS)
    traj = make_batch(env, policy)
    traj = traj._replace(score=torch.randn_like(traj.score))
    loss, grads = gradient(policy, task, traj)
    for i in range(len(SEEDS)):
        single = Policy(env, NETS[net], seeds=(0,))
        row_of(policy, i, single)
        mine = Trajectories(*[x[:, i : i + 1] if x.dim() > 2 else x[i : i + 1] for x in traj])
        alone, alone_grads = gradient(single, task, mine)
        torch.testing.assert_close(alone, loss[i : i + 1], atol=1e-6, rtol=1e-5)
        for got, want in zip(grads, alone_grads, strict=True):
            if got is None or want is None:
                assert got is None
                assert want is None
            else:
                torch.testing.assert_close(got[i : i + 1], want, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("net", "env"), CASES)
def test_row_i_starts_from_seed_i_alone(net, env):
    env = ENVS[env]()
    together = Policy(env, NETS[net], seeds=SEEDS)
    for i, seed in enumerate(SEEDS):
        alone = Policy(env, NETS[net], seeds=(seed,))
        for a, b in zip(together.parameters(), alone.parameters(), strict=True):
            assert torch.equal(a[i], b[0])


@pytest.mark.parametrize("net", ["mlp", "lookup", "transformer"])
def test_mixed_lengths_in_one_batch_are_the_same_as_one_at_a_time(net):
    """Loss and gradients of a ragged batch equal those of its strings alone, weighted by their numbers of steps."""
    env = Strings("ACG", 6, min_length=1)
    task = Task(env, Slip(0.25), lambda s: s, Linear())
    policy = Policy(env, NETS[net], seeds=(0, 1))
    traj = make_batch(env, policy, 8)
    traj = traj._replace(score=torch.randn_like(traj.score))
    steps = traj.alive.sum(0)  # [S, B]
    assert len(steps.unique()) > 2  # lengths do differ
    loss, grads = gradient(policy, task, traj)
    total = torch.zeros_like(loss)
    sums = [torch.zeros_like(p) for p in policy.parameters()]
    for b in range(8):
        one = Trajectories(*[x[:, :, b : b + 1] if x.dim() > 2 else x[:, b : b + 1] for x in traj])
        alone, alone_grads = gradient(policy, task, one)
        weight = steps[:, b].float() / steps.sum(1)
        total += weight * alone
        for into, g in zip(sums, alone_grads, strict=True):
            if g is not None:
                into += weight.view(-1, *[1] * (g.dim() - 1)) * g
    torch.testing.assert_close(total, loss, atol=1e-6, rtol=1e-5)
    for got, want in zip(sums, grads, strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


def test_a_trunk_of_strings_refuses_what_is_none():
    with pytest.raises(UserError, match=r"reads strings.*--net mlp"):
        Policy(Grid(2, 4), Transformer())


@pytest.mark.parametrize("env", [Grid(2, 5), Strings("ACGT", 4), Strings("AB", 4, 1)], ids=repr)
@pytest.mark.parametrize("net", [MLP(16, 2), Lookup(16, 2, 8)], ids=repr)
@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)], ids=["one", "three"])
def test_distinct_states_once_are_all_states(env, net, seeds, monkeypatch):
    """On the CPU every distinct state of a seed is computed once; outputs and gradients are those of computing all of them."""
    policy = Policy(env, net, seeds=seeds)
    traj = rollout(Task(env, Slip(0.3), lambda s: s, Linear()), policy, 50)
    assert policy._repeats(traj.states)
    found = []
    for shared in (True, False):
        monkeypatch.setattr(Policy, "_repeats", lambda self, states, shared=shared: shared)
        out = policy.along(traj)
        weights = torch.linspace(-1, 1, out.forward.numel()).view_as(out.forward)
        total = (out.forward * weights).sum() + out.log_flow.square().sum() + (out.backward * weights.flip(0)).sum()
        found.append((out, torch.autograd.grad(total, list(policy.parameters()))))
    (once, slope), (each, want) = found
    for name in ("forward", "backward", "log_flow"):
        torch.testing.assert_close(getattr(once, name), getattr(each, name), atol=1e-6, rtol=1e-5)
    for a, b in zip(slope, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
