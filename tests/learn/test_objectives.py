"""Exact facts about every objective: zero at the tabular optimum, blind to padding and order, deaf to the dynamics' weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from stochflow.errors import UserError
from stochflow.law.exact import Graph, exact_law, tabular_solution, target_law
from stochflow.learn.entropy import EntropyAverage, entropy_band, entropy_ratio
from stochflow.learn.evaluate import evaluate
from stochflow.learn.objectives import (
    HEAD,
    INTENDED,
    JOINT,
    MARGINAL,
    PUBLISHED,
    REALISED,
    SGFNKL,
    DetailedBalance,
    FlowKL,
    Form,
    LogVariance,
    SubTrajectoryBalance,
    TrajectoryBalance,
    TrajectoryKL,
    flow_kl,
)
from stochflow.learn.posterior import head_likelihood
from stochflow.learn.rollout import rollout
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known, Neural
from stochflow.ops import masked_log_softmax
from stochflow.scores.oracles import Table
from stochflow.scores.rewards import Power
from stochflow.types import PolicyOut, Task, Trajectories, World
from stochflow.worlds.channels import Exact, Slip
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

BALANCES = [DetailedBalance, TrajectoryBalance, SubTrajectoryBalance, LogVariance]
SOUND = [c(form=f) for c in BALANCES for f in (MARGINAL, JOINT, HEAD)] + [
    FlowKL(),
    SGFNKL(),
    SGFNKL((0.25, 0.5, 0.75)),
    SGFNKL(form=MARGINAL),
]
PUBLISHED_FORMS = [*[c(form=PUBLISHED) for c in BALANCES], SGFNKL(form=PUBLISHED)]
EVERY = [
    *[o for o in SOUND if o.form is not HEAD],  # whose likelihood draws random numbers: it has tests of its own
    *PUBLISHED_FORMS,
    *[c(form=f) for c in BALANCES for f in (REALISED, INTENDED)],
    SGFNKL(per_step=True, balance_weight=0.1),
    TrajectoryKL(),
]


def name(o) -> str:
    return f"{type(o).__name__}-{o.form.name}" + ("-step" if getattr(o, "per_step", False) else "")


class TablePolicy(nn.Module):
    """A row per state, in float64: what exact solutions are written into."""

    def __init__(self, env, logits, backward, log_flow, log_z, back_action=None):
        super().__init__()
        self.env = env
        self.logits, self.backward, self.flow, self.z = (
            nn.Parameter(x.clone()) for x in (logits, backward, log_flow, log_z)
        )
        self.pairs = None if back_action is None else nn.Parameter(back_action.clone())
        self.num_seeds, self.device, self.back_action = 1, torch.device("cpu"), back_action is not None

    def context(self, state):
        return None

    def log_z(self, context):
        return self.z.view(1, 1)

    def forward(self, state, context=None):
        i = self.env.index(state)
        return PolicyOut(self.logits[i], self.backward[i], None if self.pairs is None else self.pairs[i], self.flow[i])

    def along(self, traj, context=None, flows=True):
        return self(traj.states)

    def begin(self, state, context=None):
        return self(state).forward, None

    def advance(self, cache, state, move, t):
        return self(state).forward, None


def world_of(task, policy, dynamics, traj):
    return World(
        task, policy, dynamics, traj, None, lambda states, where: task.reward(task.oracle(states), states, None)
    )


def score_of(task, traj):
    return Trajectories(traj.states, traj.actions, traj.moves, traj.alive, task.oracle(traj.states[-1]), traj.real)


def make_task(kind: str, alpha: float) -> Task:
    gen = torch.Generator().manual_seed(3)
    env = {"tree": Strings("ABC", 3), "stop": Strings("AB", 3, min_length=1), "dag": Grid(2, 4)}[kind]
    rewards = 1 + torch.rand(env.count(), generator=gen)  # mild, so that a channel of .25 can still bring it about
    return Task(env, Slip(alpha) if alpha else Exact(), Table(env, rewards), Power(1.0, 1e-6))


def optimum(task, head: bool = False):
    """The exact solution as a policy; `head` writes the posterior of the action into a learned head, too."""
    graph = Graph(task.env)
    s = tabular_solution(graph, task)
    assert bool(s.feasible.all())
    pairs = None
    if head:  # log pi(a | parent) P(move | a), up to a constant: the softmax normalises it
        env, m = task.env, task.env.num_moves
        pairs = torch.zeros(len(graph), m, m, dtype=torch.float64)
        for i, move in itertools.product(range(len(graph)), range(m)):
            child = int(graph.child[i, move])
            if child >= 0:
                legal = env.real_moves(graph.mask[i])
                into = torch.stack(
                    [task.channel.log_probs(graph.states[i], legal, torch.tensor(a))[move] for a in range(m)]
                )
                pairs[child, move] = s.log_pi[i] + into.double()
    return graph, TablePolicy(task.env, s.log_pi, s.log_pb, s.log_flow, s.log_flow[graph.root], pairs)


WORLDS = [("tree", 0.0), ("tree", 0.25), ("stop", 0.0), ("stop", 0.25), ("dag", 0.0), ("dag", 0.1)]


@pytest.mark.parametrize(("kind", "alpha"), WORLDS)
@pytest.mark.parametrize("objective", SOUND + PUBLISHED_FORMS, ids=name)
def test_residuals_vanish_at_the_exact_solution(kind, alpha, objective):
    task = make_task(kind, alpha)
    for head in (False, True) if objective.form.back_action and kind != "dag" else (False,):
        graph, policy = optimum(task, head)
        assert float((exact_law(graph, task.channel, policy) - target_law(graph, task).target).abs().sum()) < 1e-6
        traj = score_of(task, rollout(task, policy, 300, explore=1.0))
        dynamics = Known(task.env, task.channel)
        terms = evaluate(task, policy, dynamics, traj, None, objective.needs)
        loss = objective.loss(terms, world_of(task, policy, dynamics, traj))
        assert loss.shape == (1,)
        assert loss.item() < 1e-12
        if isinstance(objective, FlowKL):
            _, gap, usable = flow_kl(terms, world_of(task, policy, dynamics, traj))
            assert bool(usable.equal(traj.alive))
            assert float(gap.detach().abs().max()) < 1e-6
        else:
            assert float(objective.residual(terms).detach().abs().max()) < 1e-6


@pytest.mark.parametrize(
    "objective", [c(form=REALISED) for c in BALANCES] + [c(form=INTENDED) for c in BALANCES], ids=name
)
@pytest.mark.parametrize("kind", ["tree", "stop", "dag"])
def test_baselines_balance_where_there_is_no_noise(kind, objective):
    task = make_task(kind, 0.0)
    _, policy = optimum(task)
    traj = score_of(task, rollout(task, policy, 200, explore=1.0))
    terms = evaluate(task, policy, Known(task.env, task.channel), traj, None, objective.needs)
    assert float(objective.residual(terms).detach().abs().max()) < 1e-6


@pytest.mark.parametrize(("kind", "alpha"), WORLDS)
def test_root_and_last_step_are_bound(kind, alpha):
    """A wrong flow at the root, or a wrong reward at the end, is seen by the step that touches it and by no other."""
    task = make_task(kind, alpha)
    graph, policy = optimum(task)
    traj = score_of(task, rollout(task, policy, 100, explore=1.0))
    dynamics, objective = Known(task.env, task.channel), DetailedBalance()
    with torch.no_grad():
        policy.flow[graph.root] += 0.3
    r = objective.residual(evaluate(task, policy, dynamics, traj, None, objective.needs))
    assert torch.allclose(r[0], torch.full_like(r[0], 0.3), atol=1e-6)
    assert float(r[1:].detach().abs().max()) < 1e-6
    with torch.no_grad():
        policy.flow[graph.root] -= 0.3
    doubled = Trajectories(traj.states, traj.actions, traj.moves, traj.alive, traj.score * 2, traj.real)
    r = objective.residual(evaluate(task, policy, dynamics, doubled, None, objective.needs))
    last = traj.alive & ~torch.cat([traj.alive[1:], torch.zeros_like(traj.alive[:1])])
    assert torch.allclose(r, torch.where(last, -torch.log(torch.tensor(2.0, dtype=r.dtype)), 0.0), atol=1e-6)


def network(kind: str, alpha: float, objective, seeds=(0,)):
    task = make_task(kind, alpha)
    policy = Policy(task.env, MLP(16, 1), seeds=seeds, back_action=objective.form.back_action)
    dynamics = Neural(task.env, seeds, 8)
    return task, policy, dynamics, score_of(task, rollout(task, policy, 12))


def loss_and_gradient(objective, task, policy, dynamics, traj):
    terms = evaluate(task, policy, dynamics, traj, None, objective.needs)
    loss = objective.loss(terms, world_of(task, policy, dynamics, traj))
    grads = torch.autograd.grad(loss.sum(), list(policy.parameters()), allow_unused=True)
    return loss.detach(), torch.cat([g.flatten() for g in grads if g is not None])


@pytest.mark.parametrize("kind", ["tree", "stop", "dag"])
@pytest.mark.parametrize("objective", EVERY, ids=name)
def test_dead_steps_and_batch_order_change_nothing(kind, objective):
    task, policy, dynamics, traj = network(kind, 0.25, objective)
    loss, grad = loss_and_gradient(objective, task, policy, dynamics, traj)
    assert float(grad.abs().max()) > 0
    extra = 3
    longer = Trajectories(
        torch.cat([traj.states, traj.states[-1:].expand(extra, *traj.states.shape[1:])]),
        torch.cat([traj.actions, torch.full_like(traj.actions[:1], -1).expand(extra, -1, -1)]),
        torch.cat([traj.moves, torch.full_like(traj.moves[:1], 1).expand(extra, -1, -1)]),
        torch.cat([traj.alive, torch.zeros_like(traj.alive[:1]).expand(extra, -1, -1)]),
        traj.score,
        traj.real,
    )
    order = torch.randperm(traj.score.shape[1])
    shuffled = Trajectories(*[x[:, order] if x.dim() == 2 else x[:, :, order] for x in traj])
    if not getattr(objective, "per_step", False):  # a mean over time steps does see how many there are
        assert_same(objective, task, policy, dynamics, longer, loss, grad)
    assert_same(objective, task, policy, dynamics, shuffled, loss, grad)


def assert_same(objective, task, policy, dynamics, traj, loss, grad):
    other, slope = loss_and_gradient(objective, task, policy, dynamics, traj)
    assert torch.allclose(other, loss, rtol=1e-5, atol=1e-6)
    assert torch.allclose(slope, grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()))


@pytest.mark.parametrize("objective", EVERY, ids=name)
def test_seeds_do_not_meet(objective):
    """A row of a stacked batch has the loss and the gradient it has alone."""
    task, policy, dynamics, traj = network("tree", 0.25, objective, seeds=(0, 1))
    loss, _ = loss_and_gradient(objective, task, policy, dynamics, traj)
    for s in range(2):
        alone = Policy(task.env, MLP(16, 1), seeds=(s,), back_action=objective.form.back_action)
        one = Trajectories(*[x[s : s + 1] if x.dim() == 2 else x[:, s : s + 1] for x in traj])
        mine, _ = loss_and_gradient(objective, task, alone, Neural(task.env, (s,), 8), one)
        assert mine.item() == pytest.approx(loss[s].item(), rel=1e-4)


@pytest.mark.parametrize("objective", EVERY + [c(form=HEAD) for c in BALANCES], ids=name)
def test_the_dynamics_gets_exactly_no_gradient_from_a_flow_loss(objective):
    task, policy, dynamics, traj = network("stop", 0.25, objective)
    terms = evaluate(task, policy, dynamics, traj, None, objective.needs)
    objective.loss(terms, world_of(task, policy, dynamics, traj)).sum().backward()
    assert all(p.grad is None for p in dynamics.parameters())
    assert any(p.grad is not None and float(p.grad.abs().max()) > 0 for p in policy.parameters())


@pytest.mark.parametrize("kind", ["tree", "stop", "dag"])
@pytest.mark.parametrize("balance", BALANCES)
def test_without_noise_the_stochastic_forms_are_the_familiar_ones(kind, balance):
    """alpha = 0: the learned law of the action is masked to what can happen, so nothing of it is left."""
    task = make_task(kind, 0.0)
    dynamics = Known(task.env, task.channel)
    policy = Policy(task.env, MLP(16, 1), back_action=True)
    traj = score_of(task, rollout(task, policy, 20))
    want, slope = loss_and_gradient(balance(form=REALISED), task, policy, dynamics, traj)
    for form in (JOINT, MARGINAL, PUBLISHED):
        loss, grad = loss_and_gradient(balance(form=form), task, policy, dynamics, traj)
        assert torch.allclose(loss, want, rtol=1e-6)
        shared = grad[grad.abs() > 0]
        assert torch.allclose(shared, slope[slope.abs() > 0], rtol=1e-4, atol=1e-6)


# the joint form -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tree", "stop", "dag"])
@pytest.mark.parametrize("balance", [*BALANCES, SGFNKL])
def test_the_joint_form_is_the_marginal_form_gradient_included(kind, balance):
    """With a learned model of the noise, and with the three terms taken apart: log pi + log P - log pi_B."""
    task, policy, dynamics, traj = network(kind, 0.25, balance(form=JOINT))
    spelled = Form("spelled", frozenset({"log_pf", "log_k", "log_pa"}), lambda t: t.log_pf + t.log_k - t.log_pa)
    want, slope = loss_and_gradient(balance(form=MARGINAL), task, policy, dynamics, traj)
    for form in (JOINT, spelled):
        loss, grad = loss_and_gradient(balance(form=form), task, policy, dynamics, traj)
        assert torch.allclose(loss, want, rtol=1e-5)
        assert torch.allclose(grad, slope, rtol=1e-3, atol=1e-5 * float(slope.abs().max()))


@pytest.mark.parametrize("kind", ["tree", "stop", "dag"])
def test_the_exact_posterior_is_that_of_the_policy_and_the_model(kind):
    """log pi_B(a | m) = log pi(a | s) P(m | s, a) / sum over actions, by hand at every step; not detached from the policy."""
    task, policy, dynamics, traj = network(kind, 0.25, DetailedBalance())
    env = task.env
    terms = evaluate(task, policy, dynamics, traj)
    log_pi = masked_log_softmax(policy.along(traj).forward[:-1], env.moves(traj.states[:-1]))
    for t, b in itertools.product(range(len(traj.alive)), range(traj.score.shape[1])):
        here, move, action = traj.states[t, :, b : b + 1], traj.moves[t, 0, b], traj.actions[t, 0, b]
        if not traj.alive[t, 0, b] or (env.stop is not None and move == env.stop):
            continue
        legal = env.real_moves(env.moves(here))
        each = [
            log_pi[t, 0, b, a] + dynamics.log_probs(here, legal, torch.tensor([[a]]))[0, 0, move]
            for a in range(env.num_moves)
            if legal[0, 0, a]
        ]
        chosen = log_pi[t, 0, b, action] + dynamics.log_probs(here, legal, action.view(1, 1))[0, 0, move]
        assert float(terms.log_pa[t, 0, b]) == pytest.approx(float(chosen - torch.stack(each).logsumexp(0)), abs=1e-5)
    assert terms.log_pa.requires_grad


@pytest.mark.parametrize(("kind", "explore"), [("tree", 0.0), ("tree", 1.0), ("stop", 1.0)])
def test_a_head_learned_by_likelihood_ends_at_the_policys_posterior(kind, explore):
    """Whatever the exploration of the batch: at explore 1 the behaviour's own posterior would be far from it."""
    task = make_task(kind, 0.25)
    graph, exact = optimum(task, head=True)
    _, policy = optimum(task, head=True)
    with torch.no_grad():
        policy.pairs.zero_()
    dynamics, optimiser = Known(task.env, task.channel), torch.optim.Adam([policy.pairs], lr=0.05)
    torch.manual_seed(0)
    traj = rollout(task, policy, 2000, explore=explore)
    for step in range(250):
        optimiser.param_groups[0]["lr"] = 0.05 / (1 + step / 50)
        optimiser.zero_grad()
        head_likelihood(world_of(task, policy, dynamics, traj)).sum().backward()
        optimiser.step()
    legal = torch.ones(task.env.num_moves, dtype=torch.bool)
    if task.env.stop is not None:
        legal[task.env.stop] = False
    worst = 0.0
    for i, move in itertools.product(range(len(graph)), range(task.env.num_moves)):
        child = int(graph.child[i, move])
        if child >= 0 and bool(legal[move]):
            learned = policy.pairs[child, move][legal].softmax(0)
            worst = max(worst, float((learned - exact.pairs[child, move][legal].softmax(0)).abs().max()))
    assert worst < 0.06


def test_the_heads_likelihood_changes_the_gradient_and_not_the_value():
    task, policy, dynamics, traj = network("tree", 0.25, DetailedBalance(HEAD))
    loss, grad = loss_and_gradient(DetailedBalance(HEAD), task, policy, dynamics, traj)
    value, published = loss_and_gradient(DetailedBalance(PUBLISHED), task, policy, dynamics, traj)
    assert torch.allclose(loss, value)
    assert not torch.allclose(grad, published, rtol=0.1)
    terms = evaluate(task, policy, dynamics, traj)
    residual = DetailedBalance(HEAD).residual(terms).square().sum()
    slope = torch.autograd.grad(residual, policy.head.weight)[0]
    assert float(slope[..., -(task.env.num_moves**2) :].abs().max()) == 0  # the residual never moves the head


@pytest.mark.parametrize("balance", [TrajectoryBalance, DetailedBalance, SubTrajectoryBalance])
def test_a_detached_posterior_has_the_marginal_forms_expected_gradient(balance):
    """The head at its optimum, in a world whose target is out of reach: the exact on-policy mean over all actions and moves.

    So both forms stand still at the same policies and flows, which is why `limit_tv` is the same for both.
    """
    env, alpha = Strings("AB", 2), 0.8
    rewards = torch.tensor([1.0, 4.0, 0.6, 0.4], dtype=torch.float64)
    task = Task(env, Slip(alpha), Table(env, rewards), Power(1.0, 1e-6))
    gen, n = torch.Generator().manual_seed(1), env.count()
    tables = [torch.randn(n, 2, generator=gen, dtype=torch.float64) for _ in range(2)]
    policy = TablePolicy(env, *tables, torch.randn(n, generator=gen, dtype=torch.float64), torch.tensor(0.3).double())
    every = torch.tensor(list(itertools.product(range(2), repeat=4))).T  # [4, 16]: a1, a2, m1, m2
    actions, moves = every[:2].unsqueeze(1), every[2:].unsqueeze(1)
    state, states = env.initial((1, 16)), []
    states.append(state)
    for move in moves:
        state = env.step(state, move)
        states.append(state)
    alive = torch.ones_like(moves, dtype=torch.bool)
    score = task.oracle(state)
    traj = Trajectories(torch.stack(states), actions, moves, alive, score, torch.ones_like(score, dtype=torch.bool))
    found = {}
    for form in (MARGINAL, HEAD):
        terms = evaluate(task, policy, Known(env, task.channel), traj)
        weight = (terms.log_pf + terms.log_k).sum(0).exp().detach()  # [1, 16], of which the sum is 1
        assert float(weight.sum()) == pytest.approx(1)
        loss = (balance(form=form).residual(terms).square() * weight).sum()
        found[form.name] = torch.autograd.grad(loss, [policy.logits, policy.flow, policy.z], allow_unused=True)
    for marginal, head in zip(found["marginal"], found["head"], strict=True):
        assert (marginal is None) == (head is None)
        if marginal is not None:
            assert torch.allclose(marginal, head, atol=1e-6)
    assert float(found["marginal"][0].abs().max()) > 0.01


# the KL family ----------------------------------------------------------------------------------------------------------


def random_tables(kind: str, alpha: float):
    task = make_task(kind, alpha)
    graph = Graph(task.env)
    n, m = graph.mask.shape
    g = torch.Generator().manual_seed(5)
    tables = [torch.randn(n, m, generator=g, dtype=torch.float64) for _ in range(2)] + [
        torch.randn(n, generator=g, dtype=torch.float64)
    ]
    policy = TablePolicy(task.env, *tables, torch.zeros((), dtype=torch.float64))
    return task, graph, policy, score_of(task, rollout(task, policy, 400, explore=1.0))


@pytest.mark.parametrize(("kind", "alpha"), WORLDS)
def test_mean_residual_is_kl_plus_flow_gap(kind, alpha):
    """E_f[delta] = KL + log F - log B at every state: the sum on the left by hand, over the tables."""
    task, graph, policy, traj = random_tables(kind, alpha)
    env, dynamics = task.env, Known(task.env, task.channel)
    terms = evaluate(task, policy, dynamics, traj, None, FlowKL().needs)
    kl, gap, usable = flow_kl(terms, world_of(task, policy, dynamics, traj))
    assert float(kl.detach().min()) >= 0
    assert float(kl.detach()[usable].min()) > 1e-4  # random tables are out of balance everywhere
    log_reward = target_law(graph, task).log_reward
    log_flow = torch.where(graph.complete, log_reward, policy.flow.detach())
    log_pi = torch.where(graph.mask, policy.logits.detach(), -torch.inf).log_softmax(1)
    log_pb = torch.where(env.parents(graph.states), policy.backward.detach(), -torch.inf).log_softmax(1)
    place = env.index(traj.states[:-1])
    for t, b in itertools.product(range(env.horizon), range(60)):
        if not traj.alive[t, 0, b]:
            continue
        i = int(place[t, 0, b])
        real = env.real_moves(graph.mask[i])
        n, pi = int(real.sum()), log_pi[i].exp()
        mean = 0.0
        for move in range(env.num_moves):
            if not graph.mask[i, move]:
                continue
            if move == env.stop:
                p, onward = pi[move], log_reward[i]
            else:
                p = (1 - alpha) * pi[move] + alpha / n * pi[real].sum()
                child = int(graph.child[i, move])
                onward = log_flow[child] + (0.0 if env.tree else log_pb[child, move])
            mean = mean + p * (log_flow[i] + p.log() - onward)
        assert float(mean) == pytest.approx(float(kl[t, 0, b] + gap[t, 0, b]), abs=1e-6)


@pytest.mark.parametrize("kind", ["tree", "stop", "dag"])
def test_gamma_one_is_the_plain_kl_and_weight_zero_is_stochastic_balance(kind):
    task, policy, dynamics, traj = network(kind, 0.25, SGFNKL())
    plain = loss_and_gradient(DetailedBalance(), task, policy, dynamics, traj)[0]
    kl = loss_and_gradient(FlowKL(), task, policy, dynamics, traj)[0]
    assert loss_and_gradient(SGFNKL((1.0,), 0.7), task, policy, dynamics, traj)[0].item() == pytest.approx(
        (plain + 0.7 * kl).item(), rel=1e-6
    )
    assert loss_and_gradient(SGFNKL((0.3,), 0.0), task, policy, dynamics, traj)[0].item() == pytest.approx(
        plain.item(), rel=1e-6
    )


def test_ratio_weighs_the_kl_term_and_is_reported():
    objective = SGFNKL((0.25,), 2.0)
    task, policy, dynamics, traj = network("tree", 0.25, objective)
    terms = evaluate(task, policy, dynamics, traj, None, objective.needs)
    loss, stats = objective.loss_and_stats(terms, world_of(task, policy, dynamics, traj))
    assert tuple(stats) == objective.reports
    assert all(v.shape == (1,) and not v.requires_grad for v in stats.values())
    r = entropy_ratio(*entropy_band(terms.entropy, terms.choices, terms.alive), 0.25)
    assert stats["r_gamma"].item() == pytest.approx(r.item())
    assert 1 <= r.item() <= 4
    balance = loss_and_gradient(DetailedBalance(), task, policy, dynamics, traj)[0]
    kl = loss_and_gradient(FlowKL(), task, policy, dynamics, traj)[0]
    assert loss.item() == pytest.approx((balance + 2.0 * r * kl).item(), rel=1e-6)
    assert stats["kl_adjusted"].item() == pytest.approx((stats["kl"] - r.log()).item(), abs=1e-6)


def test_several_gammas_use_the_mean_ratio():
    task, policy, dynamics, traj = network("tree", 0.25, SGFNKL())

    def loss(*gammas):
        return loss_and_gradient(SGFNKL(gammas), task, policy, dynamics, traj)[0].item()

    assert loss(0.25, 0.5, 0.75) == pytest.approx((loss(0.25) + loss(0.5) + loss(0.75)) / 3, rel=1e-6)


def test_a_ratio_per_step_is_one_at_the_root_where_there_is_one_state():
    objective = SGFNKL((0.25,), per_step=True)
    task, policy, dynamics, traj = network("tree", 0.25, objective)
    terms = evaluate(task, policy, dynamics, traj, None, objective.needs)
    band = objective.band(terms)
    r = entropy_ratio(band.high, band.low, 0.25)
    assert r.shape == (task.env.horizon, 1)
    assert r[0].item() == pytest.approx(1, abs=1e-5)
    remembering = SGFNKL((0.25,), per_step=True, memory=EntropyAverage(1, task.env.horizon))
    assert torch.allclose(remembering.band(terms).high, band.high)


def test_exploration_is_tempered_by_the_remembered_ratio():
    objective = SGFNKL((0.25, 1.0), memory=EntropyAverage(1))
    assert objective.temper().tolist() == [[[1.0]]]
    task, policy, dynamics, traj = network("tree", 0.25, objective)
    terms = evaluate(task, policy, dynamics, traj, None, objective.needs)
    _, stats = objective.loss_and_stats(terms, world_of(task, policy, dynamics, traj))
    assert objective.temper().item() == pytest.approx(stats["r_gamma"].item())
    with pytest.raises(UserError, match="EntropyAverage"):
        SGFNKL().temper()


@pytest.mark.parametrize("alphabet", ["AB", "ABC"])
@pytest.mark.parametrize(
    "objective", [SGFNKL(), SGFNKL((1.0,)), SGFNKL(per_step=True), SGFNKL(balance_weight=1.0), TrajectoryKL()], ids=name
)
def test_gradients_are_finite_for_one_hot_policies_and_batches_of_one(alphabet, objective):
    env = Strings(alphabet, 2)
    task = Task(env, Slip(0.25), Table(env, torch.ones(env.count())), Power(1.0, 1e-6))
    policy = Policy(env, MLP(8, 1), back_action=objective.form.back_action)
    with torch.no_grad():
        policy.head.bias[..., 0] = 80.0  # as good as certain
    traj = score_of(task, rollout(task, policy, 1))
    loss, grad = loss_and_gradient(objective, task, policy, Known(env, task.channel), traj)
    assert bool(loss.isfinite().all())
    assert bool(grad.isfinite().all())


@pytest.mark.parametrize("bad", [(0.0,), (0.5, 1.5), (), (-0.25,)])
def test_what_is_no_gamma_is_refused(bad):
    with pytest.raises(UserError, match="gamma"):
        SGFNKL(bad)


def test_unknown_rewards_leave_their_states_out():
    """NaN for one finished child: exactly the states above it stop counting, and nothing becomes NaN."""
    task, _, policy, traj = random_tables("tree", 0.25)
    dynamics, objective = Known(task.env, task.channel), FlowKL()
    hidden = task.env.encode(["ABC"])[0]

    def ask(states, where):
        reward = task.reward(task.oracle(states), states, None)
        return torch.where((states == hidden).all(-1), torch.nan, reward)

    terms = evaluate(task, policy, dynamics, traj, None, objective.needs)
    _, _, usable = flow_kl(terms, World(task, policy, dynamics, traj, None, ask))
    above = torch.zeros_like(usable)
    above[-1] = (traj.states[-2][..., :2] == hidden[:2]).all(-1)
    assert bool(above.any())
    assert bool(usable.equal(traj.alive & ~above))
    loss = objective.loss(terms, World(task, policy, dynamics, traj, None, ask))
    grads = torch.autograd.grad(loss.sum(), [policy.logits, policy.flow])
    assert all(bool(g.isfinite().all()) for g in grads)
    nobody = objective.loss(terms, World(task, policy, dynamics, traj, None, lambda states, where: None))
    assert bool(nobody.isfinite().all())


def test_trajectory_kl_has_the_gradient_of_the_kl_in_the_mean():
    """The mean over all pairs of trajectories, each with its probability, against autograd through the exact KL(P || R) sum."""
    env = Strings("AB", 2)
    rewards = torch.tensor([1.0, 4.0, 0.6, 0.4], dtype=torch.float64)
    task = Task(env, Slip(0.3), Table(env, rewards), Power(1.0, 1e-6))
    gen = torch.Generator().manual_seed(1)
    n = env.count()
    policy = TablePolicy(
        env,
        torch.randn(n, 2, generator=gen, dtype=torch.float64),
        *[torch.zeros(n, 2).double(), torch.zeros(n).double()],
        torch.zeros(()),
    )
    log_pi = policy.logits.log_softmax(1)
    p = 0.7 * log_pi.exp() + 0.15
    law = torch.stack([p[0, i] * p[1 + i, j] for i in range(2) for j in range(2)])
    exact = torch.autograd.grad((law * (law.log() - rewards.log())).sum(), policy.logits)[0]

    leaves = env.encode(["AA", "AB", "BA", "BB"])
    pairs = torch.tensor(list(itertools.product(range(4), repeat=2)))  # 16 batches of two, one per seed
    final = leaves[pairs]  # [16, 2, D]
    states = torch.stack(
        [torch.full_like(final, env.pad), torch.where(torch.tensor([True, False]), final, env.pad), final]
    )
    moves = final.permute(2, 0, 1)
    alive = torch.ones(2, 16, 2, dtype=torch.bool)
    traj = Trajectories(states, moves, moves, alive, task.oracle(final), torch.ones(16, 2, dtype=torch.bool))
    objective, dynamics = TrajectoryKL(), Known(env, task.channel)
    terms = evaluate(task, policy, dynamics, traj, None, objective.needs)
    loss = objective.loss(terms, world_of(task, policy, dynamics, traj))
    weight = law.detach()[pairs].prod(1)
    value = float((weight * loss.detach()).sum())
    assert value == pytest.approx(float((law * (law.log() - rewards.log())).sum().detach()), abs=1e-6)
    mean = torch.autograd.grad((weight * loss).sum(), policy.logits, retain_graph=True)[0]
    assert torch.allclose(mean, exact, atol=1e-6)

    # on-policy trajectory balance has the same gradient, halved, whatever its log Z: the pairs' own mean of D grad log P
    r = (terms.log_move.sum(0) - terms.log_reward) + 0.37
    half = torch.autograd.grad((weight * 0.5 * r.square().mean(1)).sum(), policy.logits)[0]
    assert torch.allclose(half, exact, atol=1e-6)


def test_trajectory_kl_is_still_at_the_optimum():
    task = make_task("tree", 0.25)
    graph, policy = optimum(task)
    traj = score_of(task, rollout(task, policy, 50))
    objective, dynamics = TrajectoryKL(), Known(task.env, task.channel)
    terms = evaluate(task, policy, dynamics, traj, None, objective.needs)
    loss = objective.loss(terms, world_of(task, policy, dynamics, traj))
    assert loss.item() == pytest.approx(
        -target_law(graph, task).log_z, abs=1e-6
    )  # KL = 0, so minus the ELBO is minus log Z
    assert float(torch.autograd.grad(loss.sum(), policy.logits)[0].abs().max()) < 1e-6
    assert objective.on_policy
    assert not any(o.on_policy for o in SOUND)
