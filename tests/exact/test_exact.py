"""The law by dynamic programming against enumeration of all ways, against sampling, and against closed forms."""

from __future__ import annotations

import math
import time

import pytest
import torch
from scipy.stats import chisquare

from stochflow.errors import UserError
from stochflow.law.exact import (
    Graph,
    exact_law,
    expected_modes,
    flows,
    invert,
    law_from_log_pi,
    law_from_moves,
    state_law,
    tabular_solution,
    target_law,
)
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.ops import masked_log_softmax
from stochflow.scores.rewards import Linear, Power
from stochflow.types import Task
from stochflow.worlds.channels import Confusion, Exact, Neighbour, Slip
from stochflow.worlds.env import Channel, Enumerable
from stochflow.worlds.grid import Corners, Grid
from stochflow.worlds.strings import Strings

CHANNELS = [Exact(), Slip(0.3), Slip(1.0), Neighbour(0.4)]
WORLDS = [Grid(2, 3), Grid(3, 2), Strings("ABC", 3), Strings("AB", 3, 1)]


def brute(env, channel, log_pi):
    """Follow every way by hand: the law over finished objects as a dictionary of indices."""
    law: dict[int, float] = {}

    def go(state, chance):
        mask = env.moves(state)
        legal = env.real_moves(mask)
        place = int(env.index(state))
        if not bool(legal.any()):
            law[place] = law.get(place, 0.0) + chance
            return
        pi = log_pi[place].exp()
        for a in mask.nonzero().flatten().tolist():
            if a == env.stop:
                law[place] = law.get(place, 0.0) + chance * float(pi[a])
                continue
            p = channel.log_probs(state, legal, torch.tensor(a)).double().exp()
            for m in legal.nonzero().flatten().tolist():
                if float(p[m]) > 0:
                    go(env.step(state, torch.tensor(m)), chance * float(pi[a]) * float(p[m]))

    go(env.initial(()), 1.0)
    return law


@pytest.mark.parametrize("env", WORLDS, ids=repr)
@pytest.mark.parametrize("channel", CHANNELS, ids=repr)
def test_law_equals_the_sum_over_all_ways(env, channel):
    graph = Graph(env)
    log_pi = masked_log_softmax(torch.randn(len(graph), env.num_moves, dtype=torch.float64), graph.mask)
    law = law_from_log_pi(graph, channel, log_pi)[0]
    want = torch.zeros(len(graph), dtype=torch.float64)
    for place, chance in brute(env, channel, log_pi).items():
        want[place] = chance
    assert torch.allclose(law, want, atol=1e-6)
    assert float(law.sum()) == pytest.approx(1, abs=1e-6)
    assert float(law[~graph.terminal].sum()) == 0


@pytest.mark.parametrize("env", WORLDS, ids=repr)
def test_levels_are_the_longest_ways_and_hold_every_state_once(env):
    graph = Graph(env)
    assert sorted(torch.cat(graph.levels).tolist()) == list(range(len(graph)))
    depth = torch.empty(len(graph), dtype=torch.long)
    for k, level in enumerate(graph.levels):
        depth[level] = k
    for s in range(len(graph)):
        below = graph.child[s][graph.child[s] >= 0].long()
        assert bool((depth[below] > depth[s]).all())
    assert len(graph.levels) == env.horizon + 1
    assert graph.is_tree == (env.tree or env.num_moves == 2)
    size = env.lengths(graph.states) if isinstance(env, Strings) else graph.states.sum(1)
    assert torch.equal(depth, size)


@pytest.mark.parametrize("env", [Grid(2, 4), Strings("ACG", 3), Strings("AB", 4, 1)], ids=repr)
def test_law_of_a_network_equals_its_table_for_every_seed(env, monkeypatch):
    """One call a chunk, S seeds at once: the same as each seed's table by itself, however the states are cut."""
    graph, channel = Graph(env), Slip(0.3)
    policy = Policy(env, MLP(hidden=16, layers=1), seeds=(3, 4, 5))
    with torch.no_grad():
        logits = policy(graph.states.expand(3, -1, -1)).forward.double()
    tables = masked_log_softmax(logits + 0.0, graph.mask)
    whole = exact_law(graph, channel, policy)
    assert whole.shape == (3, len(graph))
    for i in range(3):
        assert torch.allclose(whole[i], law_from_log_pi(graph, channel, tables[i])[0], atol=1e-6)
    monkeypatch.setattr("stochflow.law.exact.CHUNK", 5)
    assert torch.allclose(exact_law(Graph(env), channel, policy), whole, atol=1e-7)


def test_visits_of_a_grid_and_its_law():
    """With STOP, a state's law is its visits times the chance of STOP; a full string ends where it is visited."""
    env = Grid(2, 5)
    graph, policy = Graph(env), Policy(Grid(2, 5), MLP(hidden=8, layers=1), seeds=(1,))
    visits, law = state_law(graph, Slip(0.4), policy)[0], exact_law(graph, Slip(0.4), policy)[0]
    with torch.no_grad():
        stop = masked_log_softmax(policy(graph.states.unsqueeze(0)).forward[0].double(), graph.mask).exp()[:, env.stop]
    assert torch.allclose(law, visits * stop, atol=1e-9)
    assert float(visits[graph.root]) == 1


def test_law_matches_drawn_objects():
    """Monte Carlo of policy and channel by hand, chi-square against the exact law."""
    env, channel, draws = Strings("ABC", 3), Slip(0.3), 20_000
    graph = Graph(env)
    log_pi = masked_log_softmax(torch.randn(len(graph), 3, dtype=torch.float64), graph.mask)
    law = law_from_log_pi(graph, channel, log_pi)[0]
    state = env.initial((draws,))
    for _ in range(env.horizon):
        action = torch.multinomial(log_pi[env.index(state)].exp(), 1).squeeze(1)
        slip = torch.rand(draws) < 0.3
        state = env.step(state, torch.where(slip, torch.randint(3, (draws,)), action))
    seen = torch.bincount(env.index(state), minlength=len(graph)).double()[graph.terminal]
    want = law[graph.terminal]
    assert chisquare(seen.numpy(), (want / want.sum() * draws).numpy()).pvalue > 1e-4


# targets and solutions --------------------------------------------------------------------------------------------


def test_target_and_log_z_of_the_grid():
    env = Grid(2, 8)
    graph = Graph(env)
    target = target_law(graph, Task(env, Exact(), Corners(8), Power(1.0, 1e-9)))
    reward = Corners(8)(graph.states).double()
    assert target.log_z == pytest.approx(math.log(float(reward.sum())), abs=1e-6)
    assert torch.allclose(target.target, reward / reward.sum(), atol=1e-7)


def test_only_full_strings_are_objects_without_stop():
    env = Strings("AB", 3)
    graph = Graph(env)
    target = target_law(graph, Task(env, Exact(), lambda s: s.sum(-1).double(), Linear()))
    assert int(graph.terminal.sum()) == 8
    assert bool((target.target[~graph.terminal] == 0).all())
    assert target.log_z == pytest.approx(3 * math.log(1 + math.e))


@pytest.mark.parametrize("env", [*WORLDS, Strings("ABCD", 3)], ids=repr)
@pytest.mark.parametrize("channel", [Exact(), Slip(0.05), Neighbour(0.05), "confusion"], ids=str)
def test_tabular_solution_balances_and_reaches_the_target(env, channel):
    """F(s) p(m|s) = F(child) P_B(m|child) on every edge, F = R at the end, and the law is the target."""
    if channel == "confusion":
        real = env.num_moves - (env.stop is not None)
        channel = Confusion(0.9 * torch.eye(real) + 0.1 * torch.eye(real).roll(1, 1))
    graph = Graph(env)
    task = Task(env, channel, lambda s: 1 + 0.1 * s.sum(-1).double().sin(), Power(1.0, 1e-9))
    target = target_law(graph, task)
    solution = tabular_solution(graph, task, target)
    assert bool(solution.feasible.all())
    assert float(solution.log_flow[graph.root]) == pytest.approx(target.log_z, abs=1e-9)
    s, m = (graph.child >= 0).nonzero(as_tuple=True)
    c = graph.child[s, m].long()
    residual = solution.log_flow[s] + solution.log_q[s, m] - solution.log_flow[c] - solution.log_pb[c, m]
    assert float(residual.abs().max()) < 1e-9
    if env.stop is not None:
        ends = graph.terminal & ~graph.complete
        gap = solution.log_flow + solution.log_q[:, env.stop] - target.log_reward
        assert float(gap[ends].abs().max()) < 1e-9
    assert torch.allclose(solution.log_flow[graph.complete], target.log_reward[graph.complete])
    law = law_from_log_pi(graph, channel, solution.log_pi)[0]
    assert float((law - target.target).abs().sum()) < 1e-5


def test_infeasible_states_are_told():
    """At stick 0.5 the grid's uniform backward flows ask for moves that slips make too likely (24 % inside at 0.25)."""
    env = Grid(2, 8)
    graph = Graph(env)
    inside = (graph.states < 7).all(1)
    task = Task(env, Slip(0.25), Corners(8), Power(1.0, 1e-9))
    solution = tabular_solution(graph, task)
    assert float((~solution.feasible)[inside].double().mean()) == pytest.approx(0.245, abs=0.001)
    assert bool(solution.feasible[~inside].all())


def test_two_terminal_toy():
    """R = (1, 2), a flip with probability 1/4: pi(a1) = 1/6 is right; taking F for the policy gives (5/12, 7/12)."""
    env = Strings("AB", 1)
    graph = Graph(env)
    task = Task(env, Slip(0.5), lambda s: 1.0 + s[..., 0].double(), Power(1.0, 1e-9))
    solution = tabular_solution(graph, task)
    assert float(solution.log_pi[0].exp()[0]) == pytest.approx(1 / 6, abs=1e-6)
    right = law_from_log_pi(graph, task.channel, solution.log_pi)[0]
    naive = law_from_log_pi(graph, task.channel, solution.log_q)[0]
    assert right[1:].tolist() == pytest.approx([1 / 3, 2 / 3], abs=1e-6)
    assert naive[1:].tolist() == pytest.approx([5 / 12, 7 / 12], abs=1e-6)


def test_zero_rewards_are_never_sampled():
    env = Strings("AB", 2)
    graph = Graph(env)
    log_reward = torch.tensor([-math.inf] * 3 + [0.0, -math.inf, -math.inf, -math.inf], dtype=torch.float64)
    log_flow, log_q = flows(graph, log_reward)
    law = law_from_moves(graph, log_q)
    assert law.tolist() == pytest.approx([0, 0, 0, 1, 0, 0, 0])
    assert float(log_flow[0]) == 0
    assert bool(invert(graph, Exact(), log_q)[1].all())


# modes, size, refusals --------------------------------------------------------------------------------------------


def test_expected_modes_against_inclusion_exclusion_and_tiny_chances():
    law = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    mask = torch.tensor([True, False, True, True])
    want = [sum(1 - (1 - p) ** 5 for p in row) for row in ([0.5, 0.2, 0.0], [0.1, 0.3, 0.4])]
    assert expected_modes(law, mask, 5).tolist() == pytest.approx(want)
    assert expected_modes(law, torch.tensor([0, 2, 3]), 5).tolist() == pytest.approx(want)
    assert float(expected_modes(torch.tensor([1e-20]), torch.tensor([0]), 1000)) == pytest.approx(1e-17)


def test_tfbind8_sized_graph_is_quick():
    start = time.perf_counter()
    graph = Graph(Strings("ACGT", 8))
    built = time.perf_counter()
    law = law_from_log_pi(graph, Slip(0.25), torch.randn(len(graph), 4))
    done = time.perf_counter()
    assert len(graph) == 87_381
    assert float(law.sum()) == pytest.approx(1, abs=1e-6)
    assert built - start < 5  # 0.2 s on an idle machine
    assert done - built < 1  # 0.02 s


class Remembers(Slip):
    def begin(self, state):
        return torch.zeros(state.shape[:-1])


class Circle(Enumerable):
    """Two states that lead to one another, behind a first one."""

    state_dim = num_moves = horizon = 1

    def initial(self, batch, row=None):
        return torch.zeros(*batch, 1, dtype=torch.long)

    def moves(self, state):
        return torch.ones_like(state, dtype=torch.bool)

    def step(self, state, move):
        return torch.where(state == 2, 1, state + 1)

    def parents(self, state):
        return state > 0

    def unstep(self, state, move):
        return state - 1

    def features(self, state):
        return state.float()

    def all_states(self, row=None):
        return torch.arange(3).unsqueeze(1)

    def index(self, state):
        return state[..., 0]


class Unlisted(Grid):
    def all_states(self, row=None):
        return super().all_states()[:-1]


class Unreached(Grid):
    def moves(self, state):
        return super().moves(state) & (state.sum(-1, keepdim=True) < 3)


def test_what_has_no_exact_law_is_refused():
    graph = Graph(Grid(2, 3))
    with pytest.raises(UserError, match="depends on the past"):
        law_from_log_pi(graph, Remembers(0.1), torch.zeros(len(graph), 3))
    with pytest.raises(UserError, match="circle"):
        Graph(Circle())
    with pytest.raises(UserError, match="check_env"):
        Graph(Unlisted(2, 3))
    with pytest.raises(UserError, match=r"\[2, 2\].*cannot be reached"):
        Graph(Unreached(2, 3))
    with pytest.raises(UserError, match="finite reward"):
        target_law(graph, Task(graph.env, Exact(), lambda s: s.sum(-1) * math.nan, Linear()))
    with pytest.raises(UserError, match="cannot be enumerated"):
        Graph(object())  # type: ignore[arg-type]


def test_user_channels_have_an_exact_law():
    """Five lines: a world in which the first letter is drawn in place of the last one now and then."""

    class Falls(Channel):
        def log_probs(self, state, legal, action, memory=None):
            p = 0.9 * (torch.arange(legal.shape[-1]) == action.unsqueeze(-1)) + 0.1 * (
                torch.arange(legal.shape[-1]) == 0
            )
            return (p.double() + 1e-30).log()

    env = Strings("ABC", 2)
    graph = Graph(env)
    law = law_from_log_pi(graph, Falls(), torch.zeros(len(graph), 3))[0][graph.terminal].reshape(3, 3)
    one = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64)
    assert torch.allclose(law, one.unsqueeze(1) * one, atol=1e-6)
