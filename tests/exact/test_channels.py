"""Channels: each closed form equals the sum it stands for, and what is drawn follows the law that is stated."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chisquare

from stochflow.errors import UserError
from stochflow.ops import masked_log_softmax
from stochflow.worlds.channels import Confusion, Exact, Neighbour, Slip
from stochflow.worlds.env import Channel
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

WORLDS = [Grid(2, 4), Grid(3, 3), Strings("ACGT", 3), Strings("ABCDE", 2, 0)]
ROUGH = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.0, 0.5, 0.5, 0.0], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.3, 0.7]])


def rough(env) -> Confusion:
    """A lopsided table with zeros, as wide as the environment."""
    real = env.num_moves - (env.stop is not None)
    table = torch.eye(real, dtype=torch.float64)
    k = min(real, 4)
    table[:k, :k] = ROUGH[:k, :k] / ROUGH[:k, :k].sum(1, keepdim=True)
    return Confusion(table)


def channels(env) -> list[Channel]:
    return [Exact(), Slip(0.0), Slip(0.3), Slip(1.0), Neighbour(0.0), Neighbour(0.4), Neighbour(1.0), rough(env)]


CASES = [pytest.param(env, c, id=f"{env!r}-{c!r}") for env in WORLDS for c in channels(env)]


def deciding(env):
    states = env.all_states()
    states = states[~env.complete(states)]
    mask = env.moves(states)
    return states, mask, env.real_moves(mask)


@pytest.mark.parametrize(("env", "channel"), CASES)
def test_closed_form_marginal_is_the_sum_over_actions(env, channel):
    states, mask, legal = deciding(env)
    log_pi = masked_log_softmax(torch.randn(*mask.shape, dtype=torch.float64) * 2, mask)
    closed = channel.marginal(states, legal, log_pi).exp()
    summed = Channel.marginal(channel, states, legal, log_pi).exp()
    assert torch.allclose(closed, summed, atol=1e-6)
    go = torch.where(legal, log_pi.exp(), 0).sum(1)  # STOP's share never enters the channel
    assert torch.allclose(torch.where(legal, closed, 0).sum(1), go, atol=1e-6)


@pytest.mark.parametrize(("env", "channel"), CASES)
def test_arrivals_are_the_column_of_a_move(env, channel):
    states, _, legal = deciding(env)
    for move in range(env.num_moves):
        there = legal[:, move]
        columns = [
            channel.log_probs(states, legal, torch.full((len(states),), a))[:, move] for a in range(env.num_moves)
        ]
        found = channel.arrivals(states, legal, torch.full((len(states),), move))
        meant = legal & there.unsqueeze(1)  # what is said of other actions is anything
        assert torch.allclose(found[meant].exp(), torch.stack(columns, 1)[meant].exp(), atol=1e-6)


@pytest.mark.parametrize(("env", "channel"), CASES)
def test_rows_are_laws_on_the_legal_moves(env, channel):
    states, _, legal = deciding(env)
    for a in range(env.num_moves):
        rows = legal[:, a]
        p = channel.log_probs(states, legal, torch.full((len(states),), a)).exp()[rows]
        assert torch.allclose(p.sum(1), torch.ones(int(rows.sum())), atol=1e-6)
        assert float(torch.where(legal[rows], 0, p).sum()) == 0


@pytest.mark.parametrize("channel", [Slip(0.25), Slip(1.0), Neighbour(0.5), Confusion(ROUGH.double())], ids=repr)
def test_draws_follow_the_law(channel):
    env, draws = Strings("ACGT", 2), 20_000
    state = env.initial((draws,))
    legal = env.real_moves(env.moves(state))
    for a in range(4):
        action = torch.full((draws,), a)
        seen = torch.bincount(channel.sample(state, legal, action), minlength=4).double()
        want = channel.log_probs(state[:1], legal[:1], action[:1])[0].double().exp() * draws
        some = want > 0
        assert float(seen[~some].sum()) == 0
        if int(some.sum()) > 1:
            want = want[some] * seen.sum() / want[some].sum()  # float32 sums to one within 1e-7
            assert chisquare(seen[some].numpy(), want.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("alpha", [0.1, 0.25, 0.5, 0.75, 0.9])
def test_stick_on_strings(alpha):
    """P(x | a) = (1-alpha) 1[x=a] + alpha/K; action and move differ with probability alpha (K-1)/K."""
    env, draws = Strings("ACGT", 8), 40_000
    state = env.initial((draws,))
    legal = env.moves(state)
    p = Slip(alpha).log_probs(state[:1], legal[:1], torch.tensor([2]))[0].exp()
    assert p.tolist() == pytest.approx([alpha / 4, alpha / 4, 1 - 3 * alpha / 4, alpha / 4], abs=1e-6)
    action = torch.randint(4, (draws,))
    rate = float((Slip(alpha).sample(state, legal, action) != action).double().mean())
    want = alpha * 3 / 4
    assert abs(rate - want) < 4 * math.sqrt(want * (1 - want) / draws)


@pytest.mark.parametrize(
    ("alpha", "entropy"), [(0.1, 0.3488), (0.25, 0.6886), (0.5, 1.0735), (0.75, 1.3033), (0.9, 1.3721)]
)
def test_entropy_of_stick_on_four_letters(alpha, entropy):
    """What the cross-entropy of learned dynamics must reach, never ln 4."""
    env = Strings("ACGT", 8)
    state = env.initial((1,))
    log_p = Slip(alpha).log_probs(state, env.moves(state), torch.tensor([0]))
    assert float(-(log_p.exp() * log_p).sum()) == pytest.approx(entropy, abs=1e-4)


def test_stick_on_the_grid_is_noisy_inside_and_exact_at_the_edge():
    env, alpha = Grid(2, 8), 0.25
    state = torch.tensor([[3, 4], [7, 4], [3, 7]])
    legal = env.real_moves(env.moves(state))
    p = Slip(alpha).log_probs(state, legal, torch.tensor([0, 1, 0])).exp()
    assert p[0].tolist() == pytest.approx([1 - alpha / 2, alpha / 2, 0], abs=1e-6)
    assert p[1].tolist() == pytest.approx([0, 1, 0], abs=1e-6)
    assert p[2].tolist() == pytest.approx([1, 0, 0], abs=1e-6)
    inside = Slip(alpha).log_probs(state[:1], legal[:1], torch.tensor([0]))[0, :2]
    assert float(-(inside.exp() * inside).sum()) == pytest.approx(0.3768, abs=1e-4)  # h2(alpha/2)


def test_slip_in_three_dimensions_draws_from_the_legal_moves():
    env = Grid(3, 4)
    state = torch.tensor([[3, 1, 1]])  # one wall: two of three moves are left
    p = Slip(0.4).log_probs(state, env.real_moves(env.moves(state)), torch.tensor([1]))[0].exp()
    assert p.tolist() == pytest.approx([0, 0.8, 0.2, 0], abs=1e-6)


def test_neighbour_keeps_what_would_leave_the_range():
    env = Strings("ACGT", 2)
    state = env.initial((4,))
    p = Neighbour(0.4).log_probs(state, env.moves(state), torch.arange(4)).exp()
    want = [[0.8, 0.2, 0, 0], [0.2, 0.6, 0.2, 0], [0, 0.2, 0.6, 0.2], [0, 0, 0.2, 0.8]]
    assert torch.allclose(p, torch.tensor(want), atol=1e-6)


def test_confusion_is_renormalised_over_legal_moves_and_an_empty_row_keeps_the_action():
    channel = Confusion([[0.5, 0.3, 0.2], [0, 0, 1], [0.2, 0.2, 0.6]])
    state = torch.zeros(2, 1, dtype=torch.long)
    legal = torch.tensor([[True, True, False], [True, True, False]])
    p = channel.log_probs(state, legal, torch.tensor([0, 1])).exp()
    assert torch.allclose(p, torch.tensor([[0.625, 0.375, 0], [0, 1, 0]]), atol=1e-6)


def test_confusion_from_a_file_equals_the_table(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("\n".join(",".join(str(float(x)) for x in row) for row in ROUGH))
    assert torch.allclose(Confusion(str(path)).table, ROUGH.double(), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Slip(1.5), "1.5"),
        (lambda: Slip(-0.1), "between 0 and 1"),
        (lambda: Neighbour(math.nan), "between 0 and 1"),
        (lambda: Confusion([[1, 0], [0.5, 0.4]]), "row 2 of 2 in the confusion table sums to 0.9, off by -0.1"),
        (lambda: Confusion([[1, 0, 0], [0, 1, 0]]), "square"),
        (lambda: Confusion([[1.5, -0.5], [0, 1]]), "row 1 of 2 in the"),
        (lambda: Confusion("no/such/file.csv"), "no/such/file.csv"),
    ],
)
def test_bad_channels_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()
