"""What the report draws of a law is the law: masses add up, points lie where the exact law puts them, the file stays small."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stochflow.law import metrics
from stochflow.law.exact import exact_law
from stochflow.law.measure import Yardstick, by_condition, scored
from stochflow.law.picture import BINS, POINTS, law_picture, save_picture
from stochflow.learn.rollout import rollout
from stochflow.nets.lookup import Lookup
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.runs.tasks import grid_task, strings_task, tfbind8_task


def look(task, net, seeds=2):
    policy = Policy(task.env, net, seeds=list(range(seeds)))
    drawn = scored(task, rollout(task, policy, 200))
    return Yardstick(task, torch.device("cpu")), policy, drawn


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_a_grid_is_mapped_cell_by_cell(ndim):
    task = grid_task(ndim=ndim, side=5, stick=0.25)
    yardstick, policy, drawn = look(task, MLP(16, 1))
    found = law_picture(yardstick, policy, drawn)
    law = exact_law(yardstick.graph, task.channel, policy).numpy().reshape(2, *[5] * ndim)
    target = yardstick.target.target.numpy().reshape([5] * ndim)
    rest = tuple(range(2, ndim))
    assert found["grid_law"].shape == (2, 5, 5 if ndim > 1 else 1)
    np.testing.assert_allclose(
        found["grid_law"].reshape(2, 5, -1), law.sum(tuple(r + 1 for r in rest)).reshape(2, 5, -1), atol=1e-6
    )
    np.testing.assert_allclose(found["grid_target"].reshape(5, -1), target.sum(rest).reshape(5, -1), atol=1e-6)
    np.testing.assert_allclose(found["score_law"].sum(1), 1, atol=1e-5)


def test_strings_keep_their_masses_and_points(tmp_path):
    task = tfbind8_task(stick=0.25)
    yardstick, policy, drawn = look(task, Lookup(8, 1))
    found = law_picture(yardstick, policy, drawn)
    assert found["score_law"].shape == (2, BINS)
    assert len(found["log_reward"]) == POINTS
    assert "grid_law" not in found
    law = exact_law(yardstick.graph, task.channel, policy)[:, yardstick.graph.terminal].numpy()
    score = task.oracle(yardstick.graph.states[yardstick.graph.terminal]).numpy()
    # the mean score by the histogram's middles is the law's, up to half a bin
    middle = (found["score_edges"][1:] + found["score_edges"][:-1]) / 2
    half = (found["score_edges"][1] - found["score_edges"][0]) / 2
    np.testing.assert_allclose(found["score_law"] @ middle, law @ score, atol=half)
    np.testing.assert_allclose(found["score_target"].sum(), 1, atol=1e-5)
    # the best object is shown, and each seed's point is its log-probability
    reward = yardstick.target.log_reward[yardstick.graph.terminal].numpy()
    best = reward.argmax()
    at = found["log_reward"].argmax()
    assert found["log_reward"][at] == pytest.approx(reward[best], abs=1e-6)
    np.testing.assert_allclose(found["log_prob"][:, at], np.log(law[:, best]), atol=1e-5)
    path = tmp_path / "law.npz"
    with path.open("wb") as file:
        save_picture(found, file)
    assert path.stat().st_size < 60_000
    with np.load(path, allow_pickle=False) as file:
        np.testing.assert_array_equal(file["log_prob"], found["log_prob"])


def test_a_space_too_large_to_list_is_drawn_from_the_sample():
    task = strings_task(lambda texts: [t.count("G") / 30 for t in texts], length=30)
    yardstick, policy, drawn = look(task, MLP(16, 1))
    assert not yardstick.exact
    found = law_picture(yardstick, policy, drawn)
    assert not {"score_target", "log_z"} & found.keys()
    np.testing.assert_allclose(found["score_law"].sum(1), 1, atol=1e-5)
    assert found["log_prob"].shape == (1, 400)
    assert (found["log_prob"] < 0).all()
    assert np.isfinite(found["log_prob"]).all()


def test_equal_scores_have_a_histogram_too():
    task = strings_task(lambda texts: [1.0] * len(texts), length=3)
    found = law_picture(*look(task, MLP(8, 1)))
    np.testing.assert_allclose(found["score_law"].max(1), 1, atol=1e-5)


def test_each_condition_has_a_log_z_of_its_own():
    """A perfect sampler's weights are the Z of their condition; a mean of all of them would be the largest one's."""
    log_z = torch.tensor([1.0, 20.0, 5.0], dtype=torch.float64)
    row = torch.tensor([[0, 0, 1, 2], [2, 2, 2, 2]])
    found, share = by_condition(log_z[row], row)
    assert found.tolist() == pytest.approx([(1 + 1 + 20 + 5) / 4, 5.0])
    assert share.tolist() == pytest.approx([1.0, 1.0])
    log_w = torch.randn(3, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, share = by_condition(log_w, torch.zeros(3, 500, dtype=torch.long))
    assert torch.allclose(found, metrics.log_z_estimate(log_w), atol=1e-12)
    w = log_w.exp()
    assert torch.allclose(share, w.sum(1) ** 2 / (w**2).sum(1) / 500, atol=1e-12)
    row = torch.arange(500).expand(3, 500) % 4
    found, _ = by_condition(log_w, row)
    by_hand = torch.stack([torch.stack([w[s, row[s] == c].mean().log() for c in range(4)]).mean() for s in range(3)])
    assert torch.allclose(found, by_hand, atol=1e-12)
