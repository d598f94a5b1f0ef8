"""The small API: its snippets run as written, its loss, law and samples are what the formulas say."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from torch.nn.functional import one_hot

from stochflow.errors import UserError
from stochflow.quickstart import (
    DOWN,
    RIGHT,
    TERMINATE,
    BackwardPolicy,
    ForwardPolicy,
    GFlowNet,
    Grid,
    Log,
    exact_law,
    exact_tv,
    plot_samples,
    trajectory_balance_loss,
)

GUIDE = Path(__file__).parents[2] / "docs" / "quickstart.md"

PREAMBLE = """
import torch
from torch.nn.functional import one_hot
from torch.optim import Adam
from stochflow.quickstart import Grid, ForwardPolicy, BackwardPolicy, GFlowNet, Log, trajectory_balance_loss
"""
# the document's three snippets, letter by letter; its first one leaves the backward policy to the reader
BACKWARD = "backward_policy = BackwardPolicy(env.state_dim, num_actions=3)\n"
MAKE = """env = Grid(size=16)
forward_policy = ForwardPolicy(env.state_dim, hidden_dim=32, num_actions=3)
model = GFlowNet(forward_policy, backward_policy, env)
opt = Adam(model.parameters(), lr=5e-3)
"""
TRAIN = """for i in range(num_epochs):
  s0 = one_hot(torch.zeros(batch_size).long(), env.state_dim).float()
  s, log = model.sample_states(s0, return_log=True)
  loss = trajectory_balance_loss(log.total_flow, log.rewards, log.fwd_probs, log.back_probs)
  loss.backward()
  opt.step()
  opt.zero_grad()
"""
SAMPLE = """s0 = one_hot(torch.zeros(10**4).long(), env.state_dim).float()
s = model.sample_states(s0)
"""


def make(size: int, spread: float = 1.0) -> GFlowNet:
    """A float64 model whose policy is far from uniform."""
    env = Grid(size)
    model = GFlowNet(ForwardPolicy(env.state_dim, hidden_dim=8), BackwardPolicy(env.state_dim), env).double()
    with torch.no_grad():
        model._log_z.fill_(0.07)
        for p in model.forward_policy.parameters():
            p.normal_(std=spread)
    return model


def start(env: Grid, n: int) -> torch.Tensor:
    return one_hot(torch.zeros(n).long(), env.state_dim).float()


def optimum(env: Grid) -> tuple[torch.nn.Module, float]:
    """The policy that solves the grid under the fixed backward policy, as a table, and log Z: flows from the far corner back."""
    n, flow = env.size, {}
    table = torch.zeros(env.state_dim, 3, dtype=torch.float64)
    for i, j in sorted(((i, j) for i in range(n) for j in range(n)), key=lambda ij: -sum(ij)):
        out = [0.0, 0.0, float(env.rewards[i * n + j])]
        if i + 1 < n:
            out[DOWN] = flow[i + 1, j] * (0.5 if j > 0 else 1.0)
        if j + 1 < n:
            out[RIGHT] = flow[i, j + 1] * (0.5 if i > 0 else 1.0)
        flow[i, j] = sum(out)
        table[i * n + j] = torch.tensor(out, dtype=torch.float64) / flow[i, j]

    class Table(torch.nn.Module):
        def forward(self, s):
            return s.double() @ table

    return Table(), math.log(flow[0, 0])


def walks(env: Grid, cell: int = 0):
    """All action sequences from a cell to the end, Terminate included."""
    row, column = divmod(cell, env.size)
    yield (TERMINATE,)
    if row + 1 < env.size:
        yield from ((DOWN, *rest) for rest in walks(env, cell + env.size))
    if column + 1 < env.size:
        yield from ((RIGHT, *rest) for rest in walks(env, cell + 1))


def step_probs(model: GFlowNet, actions: tuple[int, ...]) -> tuple[torch.Tensor, float, int]:
    """By hand, from the network at one state at a time: prod P_F, prod P_B, the cell where the walk ends."""
    size = model.env.size
    forward, backward, row, column = torch.ones((), dtype=torch.float64), 1.0, 0, 0
    for action in actions:
        s = one_hot(torch.tensor([row * size + column]), size * size).double()
        legal = torch.tensor([row + 1 < size, column + 1 < size, True])
        p = model.forward_policy(s)[0] * legal
        forward = forward * p[action] / p.sum()
        row, column = row + (action == DOWN), column + (action == RIGHT)
        if action != TERMINATE:
            backward *= 0.5 if row > 0 and column > 0 else 1.0
    return forward, backward, row * size + column


def test_the_documents_snippets_run_letter_by_letter():
    space = {"num_epochs": 3, "batch_size": 32}
    exec(PREAMBLE + MAKE.split("\n")[0] + "\n" + BACKWARD + MAKE + TRAIN + SAMPLE, space)
    s, log = space["s"], space["log"]
    assert s.shape == (10_000, 256)
    assert s.dtype == torch.float32
    assert torch.equal(s.sum(-1), torch.ones(10_000))
    assert isinstance(log, Log)
    assert log.traj.shape == (32, 31, 256)
    assert log.fwd_probs.shape == log.back_probs.shape == log.actions.shape == (32, 30)
    assert torch.equal(log.traj.argmax(-1), log.cells)
    assert not torch.equal(space["model"].log_z, torch.zeros(()))


def test_the_guide_holds_the_snippets_and_all_its_blocks_run(tmp_path, monkeypatch, capsys):
    text = GUIDE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert {TRAIN, SAMPLE} <= set(blocks)
    assert MAKE.split("\n")[0] + "\n" + BACKWARD + "\n".join(MAKE.split("\n")[1:]) in blocks
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks)
    assert code.count("num_epochs = 1000") == 1  # the whole training is in tests/learn
    exec(code.replace("num_epochs = 1000", "num_epochs = 3"), {"__name__": "guide"})
    assert "exactly 42.56" in capsys.readouterr().out
    assert (tmp_path / "samples.png").read_bytes()[:4] == b"\x89PNG"


def test_reward_bands_are_integers_four_modes_and_z():
    env = Grid(size=16)
    assert env.state_dim == 256
    assert env.rewards.sum().item() == pytest.approx(42.56, abs=1e-12)
    bright = (env.rewards > 2).nonzero().flatten().tolist()
    assert bright == [16 * i + j for i in (2, 13) for j in (2, 13)]
    by_hand = [
        0.01 + 0.5 * all(abs(2 * x - 15) > 7.5 for x in (i, j)) + 2.0 * all(9 < abs(2 * x - 15) < 12 for x in (i, j))
        for i in range(16)
        for j in range(16)
    ]
    assert env.rewards.tolist() == pytest.approx(by_hand, abs=1e-15)
    assert torch.equal(env.reward(torch.eye(256)), env.rewards)


def test_actions_move_and_edges_are_masked():
    env = Grid(size=3)
    cells = torch.tensor([0, 0, 4, 2, 6, 8])
    actions = torch.tensor([DOWN, RIGHT, TERMINATE, DOWN, RIGHT, TERMINATE])
    s = env.state(cells)
    assert env.step(s, actions).argmax(-1).tolist() == [3, 1, 4, 5, 7, 8]
    assert env.mask(s).int().tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 1], [0, 1, 1], [0, 0, 1]]


def test_backward_policy_is_one_half_but_for_single_parents():
    p = BackwardPolicy(9, num_actions=3)(torch.eye(9)).view(3, 3, 3)  # row, column, action
    assert p[0, 0].tolist() == [0, 0, 0]
    assert p[0, 1:].tolist() == [[0, 1, 0]] * 2  # the top row is entered from the left
    assert p[1:, 0].tolist() == [[1, 0, 0]] * 2
    assert p[1:, 1:].reshape(-1, 3).tolist() == [[0.5, 0.5, 0]] * 4
    assert list(BackwardPolicy(9).parameters()) == []


def test_the_table_of_all_states_is_the_network_at_one_hot_vectors():
    policy = ForwardPolicy(25, hidden_dim=7).double()
    assert torch.allclose(policy.logits().softmax(-1), policy(torch.eye(25).double()), atol=1e-14)


def test_a_subclass_decides_by_its_own_forward():
    class Lazy(ForwardPolicy):
        def forward(self, s):
            return torch.tensor([0.0, 0.0, 1.0]).expand(len(s), 3)

    model = GFlowNet(Lazy(9), BackwardPolicy(9), Grid(3))
    assert exact_law(model)[0].item() == pytest.approx(1.0)
    assert (model.sample_states(start(model.env, 50)).argmax(-1) == 0).all()


def test_loss_and_its_gradient_equal_the_product_formula():
    model = make(3)
    _, log = model.sample_states(start(model.env, 64), return_log=True)
    loss = trajectory_balance_loss(log.total_flow, log.rewards, log.fwd_probs, log.back_probs)
    residuals = []
    z = torch.exp(10.0 * model._log_z)
    for actions, cell in zip(log.actions.tolist(), log.cells[:, -1].tolist(), strict=True):
        done = tuple(a for a in actions if a >= 0)
        forward, backward, end = step_probs(model, done)
        assert end == cell
        residuals.append((z * forward / (float(model.env.rewards[end]) * backward)).log())
    brute = torch.stack(residuals).square().mean()
    assert loss.item() == pytest.approx(brute.item(), rel=1e-12)
    parameters = list(model.parameters())
    for ours, by_hand in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(brute, parameters), strict=True
    ):
        assert torch.allclose(ours, by_hand, atol=1e-12)


def test_exact_law_equals_the_sum_over_all_walks():
    model = make(3)
    law = torch.zeros(9, dtype=torch.float64)
    everything = list(walks(model.env))
    assert len(everything) == 19  # sum of binomial(i + j, i): number of walks to each cell
    with torch.no_grad():
        for actions in everything:
            forward, _, end = step_probs(model, actions)
            law[end] += forward
    assert law.sum().item() == pytest.approx(1.0, abs=1e-14)
    assert torch.allclose(exact_law(model), law, atol=1e-14)
    assert exact_tv(model) == pytest.approx(0.5 * (law - model.env.target).abs().sum().item(), abs=1e-14)


def test_at_the_optimum_every_residual_is_zero_and_the_law_is_the_target():
    env = Grid(size=16)
    policy, log_z = optimum(env)
    assert log_z == pytest.approx(math.log(42.56), abs=1e-12)
    model = GFlowNet(policy, BackwardPolicy(env.state_dim), env).double()
    with torch.no_grad():
        model._log_z.fill_(log_z / 10.0)
        _, log = model.sample_states(start(env, 256), return_log=True)
        assert trajectory_balance_loss(log.total_flow, log.rewards, log.fwd_probs, log.back_probs).item() < 1e-20
    assert exact_tv(model) < 1e-14


def test_samples_follow_the_exact_law():
    model = make(4, spread=0.4).float()
    n = 40_000
    with torch.no_grad():
        s, log = model.sample_states(start(model.env, n), return_log=True)
    expected = n * exact_law(model)
    assert expected.min() > 5  # what the chi-square statistic needs
    for states in (s, model.sample_states(start(model.env, n))):
        seen = torch.bincount(states.argmax(-1), minlength=16).double()
        assert chisquare(seen.numpy(), expected.numpy() * seen.sum().item() / expected.sum().item()).pvalue > 1e-4
    assert torch.equal(log.cells[:, -1], s.argmax(-1))
    assert torch.equal(log.rewards, model.env.reward(s))


def test_after_the_end_nothing_moves_and_probabilities_are_one():
    model = make(5, spread=0.3)
    _, log = model.sample_states(start(model.env, 200), return_log=True)
    over = log.actions < 0
    assert over.any()
    assert torch.equal(over, torch.cat([torch.zeros(200, 1), (log.actions == TERMINATE).cumsum(1)[:, :-1]], 1).bool())
    assert (log.fwd_probs[over] == 1).all()
    assert (log.back_probs[over] == 1).all()
    assert torch.equal(log.cells[:, 1:][over], log.cells[:, :-1][over])


def test_long_walks_neither_underflow_nor_lose_the_gradient():
    env = Grid(size=128)
    model = GFlowNet(ForwardPolicy(env.state_dim, hidden_dim=32), BackwardPolicy(env.state_dim), env)
    with torch.no_grad():
        model.forward_policy.out.bias[TERMINATE] = -12.0  # walks of about 250 steps
        model._log_z.fill_(30.0)  # Z = exp(300), beyond float32
    _, log = model.sample_states(start(env, 64), return_log=True)
    assert log.back_probs.float().prod(1).max() == 0  # the plain product of the steps is nothing but zero
    assert (log.actions >= 0).sum(1).float().mean() > 150
    loss = trajectory_balance_loss(log.total_flow, log.rewards, log.fwd_probs, log.back_probs)
    residual = 300 + (log.fwd_probs.detach().log() - log.back_probs.log()).sum(1) - log.rewards.log()
    assert loss.item() == pytest.approx(residual.square().mean().item(), rel=1e-6)
    loss.backward()
    assert model._log_z.grad.item() == pytest.approx(
        10 * 2 * residual.mean().item(), rel=1e-5
    )  # d loss / d log Z, by its scale
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in model.parameters())


def test_looking_does_not_change_training(tmp_path):
    model = make(4).float()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert plot_samples(model, n=100, path=tmp_path / "a.png").stat().st_size > 10_000
    assert torch.equal(torch.rand(4), expected)


def test_weights_save_and_load(tmp_path):
    model = make(4)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    other = GFlowNet(ForwardPolicy(16, hidden_dim=8), BackwardPolicy(16), Grid(4)).double()
    other.load_state_dict(torch.load(tmp_path / "w.pt"))
    assert torch.equal(exact_law(other), exact_law(model))


def states(*cells: int) -> torch.Tensor:
    return one_hot(torch.tensor(cells), 9).float()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Grid(size=1), ["size=1", "at least 2"]),
        (lambda: Grid(size=2.5), ["2.5", "whole number"]),
        (lambda: ForwardPolicy(10, 32, 3), ["state_dim=10", "env.state_dim"]),
        (lambda: BackwardPolicy(10, num_actions=3), ["state_dim=10", "env.state_dim"]),
        (lambda: ForwardPolicy(9, 32, num_actions=4), ["num_actions=4", "num_actions=3"]),
        (lambda: BackwardPolicy(9, num_actions=2), ["num_actions=2", "num_actions=3"]),
        (lambda: ForwardPolicy(9, hidden_dim=0), ["hidden_dim=0", "at least 1"]),
        (lambda: GFlowNet(ForwardPolicy(16), BackwardPolicy(9), Grid(3)), ["ForwardPolicy", "16", "env.state_dim"]),
        (lambda: GFlowNet(ForwardPolicy(9), BackwardPolicy(16), Grid(3)), ["BackwardPolicy", "16", "env.state_dim"]),
        (lambda: GFlowNet(ForwardPolicy(9), BackwardPolicy(9), 3), ["int", "Grid(size=16)"]),
        (
            lambda: GFlowNet(torch.nn.Linear(9, 4), BackwardPolicy(9), Grid(3)).sample_states(states(0)),
            ["Linear", "(9, 4)", "(9, 3)"],
        ),
        (lambda: make(3).sample_states(torch.zeros(5, 16)), ["[N, 9]", "(5, 16)", "one_hot"]),
        (lambda: make(3).sample_states(torch.zeros(5, 9)), ["one-hot"]),
        (lambda: make(3).sample_states(2 * states(0)), ["one-hot"]),
        (lambda: make(3).sample_states(states(0, 4), return_log=True), ["first cell", "return_log"]),
        (lambda: plot_samples(make(3), n=0), ["n=0", "at least 1"]),
        (lambda: plot_samples(make(3), n=5, path="no/such/folder/a.png"), ["no/such/folder", "existing folder"]),
        (
            lambda: trajectory_balance_loss(torch.ones(()), torch.zeros(2), torch.ones(2, 3), torch.ones(2, 3)),
            ["rewards", "above zero"],
        ),
        (
            lambda: trajectory_balance_loss(torch.tensor(-1.0), torch.ones(2), torch.ones(2, 3), torch.ones(2, 3)),
            ["total_flow"],
        ),
        (
            lambda: trajectory_balance_loss(torch.ones(()), torch.ones(2), torch.ones(2, 3), torch.ones(2, 4)),
            ["(2, 4)", "[N, T]"],
        ),
    ],
)
def test_bad_input_is_named_with_its_remedy(call, words):
    with pytest.raises(UserError) as error:
        call()
    for word in words:
        assert word in str(error.value)
