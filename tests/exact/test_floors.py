"""Floors against published values, against brute force over policies, and against another formulation of the program."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize

from stochflow.law.exact import Graph, expected_modes, law_from_log_pi, target_law
from stochflow.law.floors import GAP, floor, forward_projection, limit_tv, reverse_projection, waterfill
from stochflow.law.metrics import kl, tv
from stochflow.law.task_modes import task_modes
from stochflow.learn.evaluate import move_law
from stochflow.ops import masked_log_softmax
from stochflow.runs.tasks import grid_task, tfbind8_task
from stochflow.scores.rewards import Power
from stochflow.types import Task
from stochflow.worlds.channels import Confusion, Exact, Neighbour, Slip
from stochflow.worlds.grid import Corners, Grid
from stochflow.worlds.strings import Strings

ROUGH = [[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.0, 0.4, 0.6]]


def scored(env, channel, spread=2.0, seed=0):
    """A rough landscape: an own random log-reward for every state."""
    table = (
        torch.randn(len(env.all_states()), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread
    )
    return Task(env, channel, lambda s: table[env.index(s)].exp(), Power(1.0, 1e-9))


def four_leaves(alpha):
    table = torch.tensor([1, 4, 0.6, 0.4], dtype=torch.float64)
    env = Strings("AB", 2)
    return Task(env, Slip(alpha), lambda s: table[env.index(s) - 3], Power(1.0, 1e-9))


# published values -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tfbind8_graph():
    return Graph(Strings("ACGT", 8))


@pytest.mark.parametrize(
    ("alpha", "best", "reverse", "naive", "kl_best", "kl_reverse", "score"),
    [
        (0.1, 0.0004, 0.0007, 0.0416, 0.00016, 0.00027, 0.6471),
        (0.25, 0.0053, 0.0075, 0.1037, 0.00199, 0.00303, 0.6454),
        (0.5, 0.0459, 0.0515, 0.2057, 0.0178, 0.0246, 0.6321),
    ],
)
def test_tfbind8(tfbind8_graph, alpha, best, reverse, naive, kl_best, kl_reverse, score):
    task = tfbind8_task(stick=alpha, beta=3)
    found = floor(task, tfbind8_graph)
    assert found.kind == "forward-KL"
    assert found.log_z == pytest.approx(9.1596, abs=1e-4)
    assert found.floor_tv == pytest.approx(best, abs=1e-4)
    assert found.floor_tv_reverse_kl == pytest.approx(reverse, abs=1e-4)
    assert found.naive_tv == pytest.approx(naive, abs=1e-4)
    assert found.best.kl_target_model == pytest.approx(kl_best, abs=1e-4)
    assert found.reverse_kl.kl_model_target == pytest.approx(kl_reverse, abs=1e-4)
    ends = tfbind8_graph.terminal
    y = task.oracle(tfbind8_graph.states[ends]).double()
    assert float((found.laws["best"][ends] * y).sum()) == pytest.approx(score, abs=1e-4)
    assert not found.feasible
    assert limit_tv("db", found) == found.floor_tv_reverse_kl
    assert limit_tv("flow-kl", found) == pytest.approx(
        found.floor_tv, abs=1e-9
    )  # Slip, one length: the two projections are one
    assert limit_tv("naive-tb", found) == found.naive_tv
    assert limit_tv("intended-db", found) is None


def test_tfbind8_expected_modes_and_uniform(tfbind8_graph):
    """Of 328 modes: the target finds 52.7 in 2,048 draws, the best law at 0.5 50.5, the uniform law (alpha = 1) 10.1."""
    task = tfbind8_task(stick=0.5, beta=3)
    modes = task_modes(task)
    assert len(modes) == 328
    target = target_law(tfbind8_graph, task)
    found = floor(task, tfbind8_graph, target)
    assert float(expected_modes(target.target, modes, 2048)) == pytest.approx(52.7, abs=0.05)
    assert float(expected_modes(target.target, modes, 16_000)) == pytest.approx(244.0, abs=0.05)
    assert float(expected_modes(found.laws["best"], modes, 2048)) == pytest.approx(50.5, abs=0.05)
    assert float(expected_modes(found.laws["naive"], modes, 2048)) == pytest.approx(26.7, abs=0.05)
    nothing = floor(tfbind8_task(stick=1.0, beta=3), tfbind8_graph)
    for law in nothing.laws.values():
        assert torch.allclose(
            law[tfbind8_graph.terminal], torch.full((65_536,), 1 / 65_536, dtype=torch.float64), atol=1e-9
        )
    assert nothing.floor_tv == pytest.approx(0.4034, abs=1e-4)
    assert float(expected_modes(nothing.laws["best"], modes, 2048)) == pytest.approx(10.1, abs=0.05)


@pytest.mark.parametrize(("alpha", "best", "naive"), [(0.1, 0.0, 0.125), (0.25, 0.0, 0.295), (0.5, 0.0930, 0.528)])
def test_grid_8x8(alpha, best, naive):
    found = floor(grid_task(2, 8, stick=alpha))
    assert found.kind == "min-TV"
    assert found.best.l1 == pytest.approx(best, abs=1e-4)
    assert found.best.mean_l1 == pytest.approx(best / 64, abs=1e-6)
    assert found.naive.l1 == pytest.approx(naive, abs=5e-4)
    assert found.feasible == (alpha < 0.5)
    assert found.floor_tv_reverse_kl is None
    assert found.uniform_feasible == (alpha < 0.25)
    assert limit_tv("db", found) == (0.0 if alpha < 0.5 else None)
    assert limit_tv("db", found, backward="uniform") == (0.0 if alpha < 0.25 else None)
    assert limit_tv("naive-db", found, backward="uniform") == found.naive_tv
    assert limit_tv("naive-db", found) is None


@pytest.mark.parametrize(("alpha", "best"), [(0.3, 0.0), (0.5, 0.1042), (0.8, 0.3067)])
def test_four_leaves(alpha, best):
    found = floor(four_leaves(alpha))
    assert found.floor_tv == pytest.approx(best, abs=1e-4)
    assert found.feasible == (alpha < 0.5)


def test_two_terminal_toy():
    """R = (1, 2) and a flip with probability 1/4: feasible; the naive law is (5/12, 7/12)."""
    env = Strings("AB", 1)
    found = floor(Task(env, Slip(0.5), lambda s: 1.0 + s[..., 0].double(), Power(1.0, 1e-9)))
    assert found.floor_tv == pytest.approx(0, abs=1e-9)
    assert found.laws["best"][1:].tolist() == pytest.approx([1 / 3, 2 / 3])
    assert found.laws["naive"][1:].tolist() == pytest.approx([5 / 12, 7 / 12], abs=1e-6)
    assert found.naive_tv == pytest.approx(1 / 12, abs=1e-6)


# brute force ------------------------------------------------------------------------------------------------------


def differentiable_law(graph, channel, logits):
    """The law of a tabular policy on a tree, with gradients: [N, M] -> log-law of all states [N]."""
    env = graph.env
    log_pi = masked_log_softmax(logits, graph.mask)
    log_p = move_law(env, channel, graph.states, graph.mask, log_pi)
    visits: list[torch.Tensor | None] = [None] * len(graph)
    visits[graph.root] = torch.zeros((), dtype=torch.float64)
    law: list[torch.Tensor] = [torch.tensor(-1e9, dtype=torch.float64)] * len(graph)
    for s in range(len(graph)):
        here = visits[s]
        assert here is not None
        if bool(graph.complete[s]):
            law[s] = here
        elif env.stop is not None and bool(graph.mask[s, env.stop]):
            law[s] = here + log_p[s, env.stop]
        for m, c in enumerate(graph.child[s].tolist()):
            if c >= 0:
                visits[c] = here + log_p[s, m]
    return torch.stack(law)


def least(graph, channel, cost):
    """The least cost of any policy, by quasi-Newton over x with pi ~ x^2, which reaches the edge of the simplex."""

    def run(x):
        root = torch.tensor(x, dtype=torch.float64).reshape(graph.mask.shape).requires_grad_()
        value = cost(differentiable_law(graph, channel, (root**2 + 1e-20).log()))
        (slope,) = torch.autograd.grad(value, root)
        return value.item(), slope.numpy().ravel()

    return min(
        minimize(
            run,
            start,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 2000, "maxfun": 20_000, "ftol": 1e-14, "gtol": 1e-9},
        ).fun
        for start in (np.ones(graph.mask.numel()), np.random.default_rng(0).uniform(0.5, 2, size=graph.mask.numel()))
    )


@pytest.mark.parametrize("channel", [Slip(0.6), Neighbour(0.7), Confusion(ROUGH)], ids=repr)
@pytest.mark.parametrize("env", [Strings("ABC", 3), Strings("ABC", 2, 0)], ids=repr)
def test_no_policy_does_better_in_either_kl(env, channel):
    graph, task = Graph(env), scored(env, channel)
    target = target_law(graph, task)
    found = floor(task, graph, target)
    ends = graph.terminal
    p = target.target[ends]
    forward = least(graph, channel, lambda law: (p * (p.log() - law[ends])).sum())
    reverse = least(graph, channel, lambda law: (law[ends].exp() * (law[ends] - p.log())).sum())
    assert found.best.kl_target_model > 0.01  # the case is a hard one
    assert found.best.kl_target_model == pytest.approx(forward, abs=1e-4)
    assert found.reverse_kl.kl_model_target == pytest.approx(reverse, abs=1e-4)
    # and the laws are the best ones, not only their distances
    assert found.best.kl_target_model <= float(kl(target.target, found.laws["reverse_kl"]))
    assert found.reverse_kl.kl_model_target <= float(kl(found.laws["best"], target.target))
    for law in found.laws.values():
        assert float(law.sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("side", [4, 8])
@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.8, 1.0])
def test_grid_program_in_move_flows(side, alpha):
    """The same optimum by moves instead of actions: each inside flow is at least alpha/2 of both together."""
    env, count = Grid(2, side), side * side
    graph, task = Graph(env), grid_task(2, side, stick=alpha)
    target = target_law(graph, task).target.numpy()
    inside, e = (graph.states < side - 1).all(1).numpy(), np.eye(count)
    # columns: t, f0, f1, e
    balance = np.zeros((count, 4 * count))
    rows, right = [], []
    for s in range(count):
        balance[s, [s, count + s, 2 * count + s]] = 1
        for m in (0, 1):
            c = int(graph.child[s, m])
            if c >= 0:
                balance[c, (1 + m) * count + s] -= 1
        if inside[s]:
            for m in (0, 1):
                row = np.zeros(4 * count)
                row[[count + s, 2 * count + s]] = alpha / 2
                row[(1 + m) * count + s] -= 1
                rows.append(row)
                right.append(0.0)
    zero = np.zeros((count, 2 * count))
    rows = np.vstack([*rows, np.hstack([e, zero, -e]), np.hstack([-e, zero, -e])])
    right = np.concatenate([right, target, -target])
    bounds = (
        [(0, None)] * count
        + [(0, None if int(graph.child[s, m]) >= 0 else 0) for m in (0, 1) for s in range(count)]
        + [(0, None)] * count
    )
    start = np.eye(count)[graph.root]
    want = linprog(np.repeat([0, 0, 0, 1], count), A_ub=rows, b_ub=right, A_eq=balance, b_eq=start, bounds=bounds).fun
    assert floor(task, graph).best.l1 == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("channel", [Neighbour(0.6), Confusion([[0.8, 0.2], [0.5, 0.5]])], ids=repr)
def test_least_l1_on_a_dag_beats_every_policy_tried(channel):
    env = Grid(2, 4)
    graph, task = Graph(env), scored(env, channel, spread=1.5)
    target = target_law(graph, task).target
    found = floor(task, graph)
    assert found.kind == "min-TV"
    tried = law_from_log_pi(graph, channel, torch.randn(2000, len(graph), 3, dtype=torch.float64) * 2)
    assert found.floor_tv <= float(tv(tried, target).min())
    assert found.floor_tv <= found.naive_tv


def test_least_tv_of_a_tree_lies_below_the_forward_kl_floor():
    """Why an excess over a tree's floor may be negative: P_fk has the least KL, not the least TV."""
    from stochflow.law.floors import _least_l1

    graph, task = Graph(Strings("ABC", 3)), scored(Strings("ABC", 3), Slip(0.6))
    target = target_law(graph, task).target
    law, reason = _least_l1(graph, task.channel, target)
    assert reason is None
    assert float(tv(law, target)) < floor(task, graph).floor_tv - 1e-3


# projections ------------------------------------------------------------------------------------------------------


def test_waterfill_by_bisection():
    torch.manual_seed(1)
    want = torch.distributions.Dirichlet(torch.full((5,), 0.3, dtype=torch.float64)).sample((200,))
    legal = torch.rand(200, 5) < 0.8
    legal[:, 0] = True
    want = torch.where(legal, want, 0) + 1e-12 * legal
    want = want / want.sum(1, keepdim=True)
    alpha = torch.rand(200, 1, dtype=torch.float64)
    low = alpha / legal.sum(1, keepdim=True)
    got = waterfill(want, legal, low)
    assert torch.allclose(got.sum(1), torch.ones(200, dtype=torch.float64))
    small, large = torch.zeros(200, 1, dtype=torch.float64), torch.full((200, 1), 1e14, dtype=torch.float64)
    for _ in range(300):  # the scale at which max(low, scale * want) sums to one
        middle = (small + large) / 2
        over = torch.where(legal, torch.maximum(low, middle * want), 0).sum(1, keepdim=True) > 1
        small, large = torch.where(over, small, middle), torch.where(over, middle, large)
    assert torch.allclose(got, torch.where(legal, torch.maximum(low, small * want), 0), atol=1e-9)


def em(want, table, rounds):
    pi = torch.full_like(want, 1 / want.shape[1])
    for _ in range(rounds):
        p = (pi.unsqueeze(1) @ table).squeeze(1)
        pi = pi * (table @ (want / p).unsqueeze(2)).squeeze(2)
    return (pi.unsqueeze(1) @ table).squeeze(1)


def exponentiated(log_weight, table, rounds):
    pi = torch.full_like(log_weight, 1 / log_weight.shape[1])
    for _ in range(rounds):
        p = (pi.unsqueeze(1) @ table).squeeze(1)
        pi = pi * (-(table @ (p.log() - log_weight).unsqueeze(2)).squeeze(2)).exp()
        pi = pi / pi.sum(1, keepdim=True)
    return (pi.unsqueeze(1) @ table).squeeze(1)


def test_projections_equal_em_and_exponentiated_gradient():
    """The interior-point method against the two textbook iterations, on random channels and wishes."""
    torch.manual_seed(2)
    dirichlet = torch.distributions.Dirichlet(torch.full((4,), 0.5, dtype=torch.float64))
    table = 0.5 * dirichlet.sample((100, 4)) + 0.5 * torch.eye(4, dtype=torch.float64)
    want = dirichlet.sample((100,)).clamp(min=1e-6)
    want = want / want.sum(1, keepdim=True)
    legal = torch.ones(100, 4, dtype=torch.bool)
    near, slow = forward_projection(want, table, legal), em(want, table, 5000)
    assert torch.allclose(near, slow, atol=2e-4)
    assert bool((kl(want, near) <= kl(want, slow) + GAP).all())
    near, slow = reverse_projection(want.log() + 3, table, legal), exponentiated(want.log(), table, 5000)
    assert torch.allclose(near, slow, atol=2e-4)
    assert bool((kl(near, want) <= kl(slow, want) + GAP).all())


def test_a_slip_written_as_a_table_has_the_same_floor():
    """Two roads to one number: water-filling and the general projection."""
    env = Strings("ABC", 3)
    for alpha in (0.3, 0.7):
        table = (1 - alpha) * torch.eye(3, dtype=torch.float64) + alpha / 3
        one, other = floor(scored(env, Slip(alpha))), floor(scored(env, Confusion(table)))
        for name in ("best", "reverse_kl", "state_kl", "naive"):
            assert torch.allclose(one.laws[name], other.laws[name], atol=1e-6)


# where objectives end ---------------------------------------------------------------------------------------------


def ways(graph):
    """All complete ways through a tree: for each its states and moves, STOP included."""
    env, found = graph.env, []

    def go(s, states, moves):
        if bool(graph.complete[s]):
            found.append((states, moves, s))
            return
        if env.stop is not None and bool(graph.mask[s, env.stop]):
            found.append((states, [*moves, env.stop], s))
        for m, c in enumerate(graph.child[s].tolist()):
            if c >= 0:
                go(c, [*states, c], [*moves, m])

    go(graph.root, [graph.root], [])
    return found


def descend(task, objective, steps=800):
    """Minimise an objective's exact on-policy expectation over tables of logits and flows; the law at the end."""
    graph = Graph(task.env)
    env, target = task.env, target_law(graph, task)
    logits = torch.zeros(graph.mask.shape, dtype=torch.float64, requires_grad=True)
    log_flow = torch.zeros(len(graph), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([logits, log_flow], lr=0.05)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    paths = ways(graph)
    long = max(len(moves) for _, moves, _ in paths)
    s = torch.tensor([(states + [0] * long)[:long] for states, _, _ in paths])  # [W, T] states in which a move is taken
    m = torch.tensor([(moves + [0] * long)[:long] for _, moves, _ in paths])
    alive = torch.tensor([[t < len(moves) for t in range(long)] for _, moves, _ in paths])
    log_r = target.log_reward[torch.tensor([end for _, _, end in paths])]
    for _ in range(steps):
        log_pi = masked_log_softmax(logits, graph.mask)
        law = move_law(env, task.channel, graph.states, graph.mask, log_pi)
        step = torch.where(alive, law[s, m], 0)
        weight = step.sum(1).exp().detach()
        flow = torch.where(alive, log_flow[s], log_r.unsqueeze(1))
        flow = torch.cat([flow, log_r.unsqueeze(1)], 1)  # [W, T+1]
        if objective == "tb":
            loss = (weight * (log_flow[graph.root] + step.sum(1) - log_r) ** 2).sum()
        elif objective == "logvar":
            score = step.sum(1) - log_r
            loss = (weight * (score - (weight * score).sum()) ** 2).sum()
        elif objective == "db":
            loss = (weight.unsqueeze(1) * alive * (flow[:, :-1] + step - flow[:, 1:]) ** 2).sum()
        elif objective == "subtb":
            total = torch.cat([torch.zeros_like(step[:, :1]), step.cumsum(1)], 1)
            pairs = [(i, j) for i in range(long) for j in range(i + 1, long + 1)]
            loss = sum(
                (weight * 0.9 ** (j - i) * (flow[:, i] + total[:, j] - total[:, i] - flow[:, j]) ** 2).sum()
                for i, j in pairs
            )
        else:  # flow-kl, with the children's flows detached: here, exact
            q = floor_flows(graph, target)
            p = law.exp()
            loss = torch.where(graph.mask, p * (law - q), 0).sum(1)[~graph.complete].sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        rate.step()
    return law_from_log_pi(graph, task.channel, masked_log_softmax(logits.detach(), graph.mask))[0], graph, target


def floor_flows(graph, target):
    from stochflow.law.exact import flows

    return flows(graph, target.log_reward)[1]


@pytest.mark.parametrize("objective", ["tb", "db", "subtb", "logvar", "flow-kl"])
def test_limits_of_objectives_where_the_target_is_out_of_reach(objective):
    """On-policy, on a fixed-length tree at stick 0.8: balance objectives end at P_rk, the flow KL at P_fk."""
    task = four_leaves(0.8)
    law, _, target = descend(task, objective)
    found = floor(task)
    assert found.fixed_length
    assert float(tv(law, found.laws["best" if objective == "flow-kl" else "reverse_kl"])) < 2e-3
    assert float(tv(law, target.target)) == pytest.approx(limit_tv(objective, found), abs=2e-3)


@pytest.mark.parametrize("objective", ["tb", "logvar", "flow-kl"])
def test_limits_with_stop(objective):
    """With STOP the trajectory objectives still end at P_rk; the flow KL at its own per-state law, not quite P_fk."""
    task = scored(Strings("AB", 2, 0), Slip(0.7), spread=1.5, seed=3)
    law, _, target = descend(task, objective)
    found = floor(task)
    assert not found.fixed_length
    assert float(tv(law, target.target)) == pytest.approx(limit_tv(objective, found), abs=2e-3)
    assert limit_tv("db", found) is None
    assert float(tv(found.laws["state_kl"], found.laws["best"])) > 1e-3


# the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", [Grid(2, 5), Strings("ABC", 3), Strings("AB", 3, 1)], ids=repr)
@pytest.mark.parametrize("channel", [Exact(), Slip(0.0), Neighbour(0.0)], ids=repr)
def test_without_noise_everything_is_reached(env, channel):
    found = floor(scored(env, channel))
    assert found.floor_tv == found.naive_tv == found.best.kl_target_model == 0
    assert found.floor_tv_reverse_kl == (0 if env.tree else None)
    assert found.kind == ("forward-KL" if env.tree else "min-TV")
    for word in ("tb", "db", "naive-tb", "intended-db", "flow-kl"):
        assert limit_tv(word, found) == 0


def test_where_only_stop_can_be_chosen():
    """alpha = 1: on the grid nothing but STOP is left to choose, and the program finds the best use of it."""
    found = floor(grid_task(2, 8, stick=1.0))
    assert found.best.l1 == pytest.approx(0.7905, abs=1e-4)
    assert found.naive_tv > found.floor_tv


def test_a_dag_that_is_too_large_says_so(monkeypatch):
    monkeypatch.setattr("stochflow.law.floors.LP_VARIABLES", 10)
    found = floor(grid_task(2, 8, stick=0.5))
    assert found.floor_tv is None
    assert found.kind is None
    assert "112 action flows" in found.reason
    assert found.naive_tv == pytest.approx(0.528 / 2, abs=5e-4)
    assert limit_tv("db", found) is None
    told = found.to_json()
    assert told["floor_tv"] is None
    assert told["tv"] is None
    assert "112" in told["floor_reason"]


def test_a_dag_that_takes_too_long_says_so(monkeypatch):
    monkeypatch.setattr("stochflow.law.floors.LP_SECONDS", 1e-9)
    found = floor(grid_task(2, 32, stick=0.5))
    assert found.floor_tv is None
    assert "not solved" in found.reason


def test_a_move_that_never_happens_has_no_kl_floor():
    found = floor(scored(Strings("ABC", 2), Confusion([[1, 0, 0], [0, 1, 0], [0, 1, 0]])))
    assert found.floor_tv is None
    assert "move 2" in found.reason
    assert math.isinf(found.naive.kl_target_model)


@pytest.mark.parametrize("task", [grid_task(2, 8, stick=0.5), four_leaves(0.5)], ids=["dag", "tree"])
def test_json_has_the_agreed_keys_and_no_infinities(task):
    told = floor(task).to_json()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    keys = {
        "tv",
        "l1",
        "mean_l1",
        "kl_target_model",
        "kl_model_target",
        "floor_tv",
        "floor_kind",
        "floor_tv_reverse_kl",
        "naive_tv",
        "log_z",
    }
    assert keys <= told.keys()
    assert told["tv"] == told["floor_tv"]
    assert told["naive"]["tv"] == told["naive_tv"]


def test_corner_cells_of_a_three_dimensional_grid():
    env = Grid(3, 5)
    found = floor(Task(env, Slip(0.4), Corners(5), Power(1.0, 1e-6)))
    assert found.kind == "min-TV"
    assert 0 <= found.floor_tv <= found.naive_tv
