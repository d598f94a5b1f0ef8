"""Metrics against hand-made cases, scipy, and identities they must keep."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.distance import jensenshannon

from stochflow.errors import UserError
from stochflow.law import metrics
from stochflow.law.exact import Graph, law_from_log_pi, tabular_solution, target_law
from stochflow.ops import masked_log_softmax
from stochflow.scores.rewards import Power
from stochflow.types import Task, Terms, Trajectories
from stochflow.worlds.channels import Exact, Slip
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

P = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
Q = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)


# laws -------------------------------------------------------------------------------------------------------------


def test_distances_by_hand():
    assert float(metrics.l1(P, Q)) == 1.0
    assert float(metrics.tv(P, Q)) == 0.5
    assert float(metrics.kl(P, Q)) == pytest.approx(math.log(2))
    assert float(metrics.kl(Q, P)) == math.inf
    assert float(metrics.kl(P, P)) == 0


def test_divergences_against_scipy():
    p, q = torch.distributions.Dirichlet(torch.ones(20, dtype=torch.float64)).sample((2, 7))
    assert metrics.kl(p, q).tolist() == pytest.approx(stats.entropy(p.numpy(), q.numpy(), axis=1).tolist())
    assert metrics.jsd(p, q).tolist() == pytest.approx((jensenshannon(p.numpy(), q.numpy(), axis=1) ** 2).tolist())
    assert torch.allclose(metrics.jsd(p, q), metrics.jsd(q, p))
    assert bool((metrics.tv(p, q) ** 2 <= metrics.kl(p, q) / 2).all())  # Pinsker


def test_one_target_for_many_seeds_and_float32_laws():
    law = torch.stack([P, Q]).float()
    assert metrics.tv(law, P).tolist() == [0.0, 0.5]
    assert metrics.tv(law, P).dtype == torch.float64
    assert metrics.kl(law, Q).tolist() == pytest.approx([math.log(2), 0])
    assert float(metrics.jsd(P, torch.tensor([0.0, 0.0, 1.0]))) == pytest.approx(math.log(2))


# log Z ------------------------------------------------------------------------------------------------------------


def terms(log_move, log_pb, log_reward):
    rest = dict.fromkeys(Terms._fields)
    return Terms(**{**rest, "log_move": log_move, "log_pb": log_pb, "log_reward": log_reward})


def test_log_weights_and_their_means():
    log_w = metrics.log_weights(terms(torch.zeros(3, 2, 4), torch.full((3, 2, 4), -1.0), torch.full((2, 4), 5.0)))
    assert torch.equal(log_w, torch.full((2, 4), 2.0, dtype=torch.float64))
    with pytest.raises(UserError, match="log_move"):
        metrics.log_weights(terms(None, torch.zeros(1, 1, 1), torch.zeros(1, 1)))
    log_w = torch.tensor([[0.0, math.log(3)], [1000.0, 1000.0]], dtype=torch.float64)
    assert metrics.log_z_estimate(log_w).tolist() == pytest.approx([math.log(2), 1000])
    assert metrics.log_z_error(log_w, math.log(2)).tolist() == pytest.approx([0, 1000 - math.log(2)])
    assert metrics.elbo(log_w).tolist() == pytest.approx([math.log(3) / 2, 1000])


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_bounds_hold_in_feasible_and_infeasible_worlds(alpha):
    """On a tree log w = log R(x) - log P(x): its exact means are log Z - KL(P||T) and log Z + KL(T||P); E[w] = Z always."""
    env = Strings("AB", 2)
    graph, table = Graph(env), torch.tensor([1, 4, 0.6, 0.4], dtype=torch.float64)
    task = Task(env, Slip(alpha), lambda s: table[env.index(s) - 3], Power(1.0, 1e-9))
    target = target_law(graph, task)
    policy = masked_log_softmax(torch.randn(len(graph), 2, dtype=torch.float64), graph.mask)
    law, ends = law_from_log_pi(graph, task.channel, policy)[0], graph.terminal
    log_w = target.log_reward[ends] - law[ends].log()
    assert float((law[ends] * log_w.exp()).sum()) == pytest.approx(math.exp(target.log_z), abs=1e-5)
    assert float((law[ends] * log_w).sum()) == pytest.approx(
        target.log_z - float(metrics.kl(law, target.target)), abs=1e-6
    )
    assert float((target.target[ends] * log_w).sum()) == pytest.approx(
        target.log_z + float(metrics.kl(target.target, law)), abs=1e-6
    )
    # and so from samples, by the functions
    forward = log_w[torch.multinomial(law[ends], 4000, replacement=True)].unsqueeze(0)
    backward = log_w[torch.multinomial(target.target[ends], 4000, replacement=True)].unsqueeze(0)
    assert float(metrics.elbo(forward)) < target.log_z < float(metrics.eubo(backward))
    assert float(metrics.log_z_error(forward, target.log_z)) < 0.1


def test_at_the_optimum_every_weight_is_z():
    env = Grid(2, 4)
    graph, task = Graph(env), Task(env, Exact(), lambda s: 1.0 + s.sum(-1).double(), Power(1.0, 1e-9))
    solution, log_z = tabular_solution(graph, task), target_law(graph, task).log_z
    here, log_move, log_pb = graph.root, [], []
    for m in (0, 1, 1, 0, env.stop):
        log_move.append(solution.log_q[here, m])
        here = here if m == env.stop else int(graph.child[here, m])
        log_pb.append(torch.zeros(()) if m == env.stop else solution.log_pb[here, m])
    log_r = target_law(graph, task).log_reward[here]
    log_w = metrics.log_weights(
        terms(torch.stack(log_move)[:, None, None], torch.stack(log_pb)[:, None, None], log_r.view(1, 1))
    )
    assert float(log_w) == pytest.approx(log_z, abs=1e-9)


# samples ----------------------------------------------------------------------------------------------------------


def test_spearman_against_scipy_with_ties():
    x, y = torch.randint(0, 5, (3, 40)).double(), torch.randn(3, 40)
    want = [stats.spearmanr(a, b).statistic for a, b in zip(x.numpy(), y.numpy(), strict=True)]
    assert metrics.spearman(x, y).tolist() == pytest.approx(want)
    assert float(metrics.spearman(x[0], x[0].exp())) == pytest.approx(1)
    assert math.isnan(float(metrics.spearman(torch.ones(5), torch.arange(5))))


def test_top_k():
    score = torch.tensor([[1.0, 5.0, 3.0], [2.0, 2.0, 8.0]])
    assert metrics.top_k_mean(score, 2).tolist() == [4.0, 5.0]
    assert metrics.top_k_mean(score, 100).tolist() == [3.0, 4.0]
    with pytest.raises(UserError, match="at least 1"):
        metrics.top_k_mean(score, 0)


def test_diversity_is_the_mean_hamming_distance_of_pairs():
    states = torch.randint(0, 5, (3, 12, 6))
    for rows, got in zip(states, metrics.diversity(states).tolist(), strict=True):
        pairs = [(a != b).sum().item() for i, a in enumerate(rows) for b in rows[i + 1 :]]
        assert got == pytest.approx(np.mean(pairs))
    assert float(metrics.diversity(torch.ones(4, 3, dtype=torch.long))) == 0
    assert float(metrics.diversity(torch.ones(1, 3, dtype=torch.long))) == 0


def test_distinct_fraction():
    states = torch.tensor([[[0, 1], [0, 1], [1, 1], [2, 0]], [[0, 0]] * 4])
    assert metrics.distinct_fraction(states).tolist() == [0.75, 0.25]


def test_novelty():
    reference = torch.tensor([[0, 0, 0], [1, 1, 1]])
    states = torch.tensor([[0, 0, 0], [0, 0, 1], [2, 2, 2], [1, 1, 1]])
    assert metrics.novelty(states, reference) == (0.5, pytest.approx((0 + 1 + 3 + 0) / 4))
    assert metrics.novelty(states, reference, chunk=1) == metrics.novelty(states, reference)
    with pytest.raises(UserError, match="at least one"):
        metrics.novelty(states[:0], reference)


# dynamics ---------------------------------------------------------------------------------------------------------


def drawn(env, channel, batch, seeds=2):
    """Uniform actions through a channel, as trajectories."""
    state = env.initial((seeds, batch))
    states, actions, moves, alive = [state], [], [], []
    for _ in range(env.horizon):
        mask = env.moves(state)
        go = env.real_moves(mask).any(-1)
        if alive:
            go = go & alive[-1] & (moves[-1] != (-1 if env.stop is None else env.stop))
        action = torch.where(mask, torch.rand(mask.shape), -1.0).argmax(-1)
        move = channel.sample(state, env.real_moves(mask), action)
        if env.stop is not None:
            move = torch.where(action == env.stop, action, move)
        state = torch.where(go.unsqueeze(-1), env.step(state, move), state)
        states.append(state)
        actions.append(action)
        moves.append(move)
        alive.append(go)
    stack = torch.stack
    return Trajectories(
        stack(states),
        stack(actions),
        stack(moves),
        stack(alive),
        torch.zeros(seeds, batch),
        torch.ones(seeds, batch, dtype=torch.bool),
    )


def test_dynamics_report_on_strings():
    """Slip(0.25) modelled as Slip(0.5): TV 3/16 a step on four letters, at most that times the length on the law."""
    env, truth, model = Strings("ACGT", 5), Slip(0.25), Slip(0.5)
    traj = drawn(env, truth, 4000)
    report = metrics.dynamics_report(env, model, truth, traj)
    assert report.kernel_tv.tolist() == pytest.approx([3 / 16] * 2, abs=1e-6)
    assert report.law_bound.tolist() == pytest.approx([5 * 3 / 16] * 2, abs=1e-6)
    assert report.nll_true.tolist() == pytest.approx([0.6886] * 2, abs=0.02)  # the channel's entropy
    assert bool((report.nll > report.nll_true).all())
    perfect = metrics.dynamics_report(env, truth, truth, traj)
    assert perfect.law_bound.tolist() == [0, 0]
    assert torch.equal(perfect.nll, perfect.nll_true)


def test_the_bound_on_the_law_holds():
    env, truth = Strings("AB", 3), Slip(0.2)
    graph = Graph(env)
    uniform = torch.zeros(len(graph), 2)
    skew = uniform.clone()
    skew[:, 0] = 2.0  # a policy that prefers A, so that the channel matters
    for model in (Slip(0.3), Slip(0.9)):
        apart = float(metrics.tv(law_from_log_pi(graph, truth, skew), law_from_log_pi(graph, model, skew)))
        bound = float(metrics.dynamics_report(env, model, truth, drawn(env, truth, 50, seeds=1)).law_bound)
        assert 0 < apart <= bound


def test_dynamics_report_leaves_out_stop_padding_and_imagined_rows():
    env, truth, model = Grid(2, 3), Slip(0.25), Slip(0.75)
    traj = drawn(env, truth, 500)
    report = metrics.dynamics_report(env, model, truth, traj)
    here = traj.states[:-1]
    inside = (here < 2).all(-1) & traj.alive & (traj.moves != env.stop)  # noise is felt only where two moves are legal
    assert report.law_bound.tolist() == pytest.approx((inside.sum((0, 2)) * 0.25 / 500).tolist(), abs=1e-6)
    # rows that were never executed change nothing
    real = traj.real.clone()
    real[:, 250:] = False
    half = Trajectories(*(x[:, :, :250] for x in traj[:4]), traj.score[:, :250], traj.real[:, :250])
    marked = Trajectories(*traj[:5], real)
    for a, b in zip(
        metrics.dynamics_report(env, model, truth, marked),
        metrics.dynamics_report(env, model, truth, half),
        strict=True,
    ):
        assert torch.allclose(a, b)


# seeds ------------------------------------------------------------------------------------------------------------


def test_interval_over_seeds():
    found = metrics.interval([0.1, 0.3, 0.2, 0.5, 0.4])
    assert found.median == pytest.approx(0.3)
    assert 0.1 <= found.low < found.median < found.high <= 0.5
    assert found.seeds == 5
    assert (
        metrics.interval(torch.tensor([0.1, 0.3, 0.2, 0.5, 0.4], dtype=torch.float64)) == found
    )  # the draws are fixed
    assert metrics.interval([2.0]) == (2.0, 2.0, 2.0, 1)
    assert metrics.interval([2.0, 2.0, 2.0]) == (2.0, 2.0, 2.0, 3)
    assert math.isnan(metrics.interval([1.0, math.nan]).low)
    with pytest.raises(UserError, match="at least one"):
        metrics.interval([])


def test_interval_covers_the_median_as_often_as_it_says():
    dice = np.random.default_rng(0)
    hits = sum(
        low <= 0 <= high
        for _, low, high, _ in (metrics.interval(dice.normal(size=15), resamples=200) for _ in range(200))
    )
    assert hits / 200 > 0.85
