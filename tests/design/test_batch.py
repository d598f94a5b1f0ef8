"""The batch: distances kept, losses counted, wells named."""

from __future__ import annotations

import numpy as np
import pytest

from stochflow.design.acquisition import UCB, ExpectedImprovement, Greedy, Thompson, acquisition
from stochflow.design.batch import clusters, select, spread, wells
from stochflow.design.features import distances
from stochflow.design.surrogates import Prediction
from stochflow.errors import UserError


def pool(n, length=8, seed=0):
    rng = np.random.default_rng(seed)
    texts = list(dict.fromkeys("".join(rng.choice(list("ACGT"), length)) for _ in range(n)))
    return texts, rng.random(len(texts))


@pytest.mark.parametrize("distance", [0, 1, 3, 5])
def test_the_batch_is_what_one_by_one_would_take(distance):
    texts, value = pool(900)
    excluded = set(texts[::7])
    found = select(texts, value, 60, distance, excluded, taken=["AAAAAAAA"])
    chosen, lost = ["AAAAAAAA"], 0
    for i in np.argsort(-value, kind="stable"):
        if texts[i] in excluded:
            continue
        if distance and distances([texts[i]], chosen).min() < distance:
            lost += 1
            continue
        if len(chosen) == 61:
            break
        chosen.append(texts[i])
    assert [texts[i] for i in found.chosen] == chosen[1:]


def test_a_short_batch_says_what_it_cost():
    texts, value = pool(300, length=4)
    found = select(texts, value, 200, 3, set(texts[:10]))
    assert found.short > 0
    assert found.lost["are measured or ordered already"] == 10
    assert found.lost["are closer than 3 to a better one"] + len(found.chosen) + 10 == len(texts)
    assert "of the 200 designs asked for" in found.sentence(len(texts))
    free = spread(texts, value, 100, None, set())
    assert (free.short, free.distance) == (0, 1)


def test_no_distance_is_bought_with_strings_that_would_never_be_drawn():
    """Sixteen good strings, at most two letters apart, and four far from all that an untrained policy drew."""
    texts = ["ACGTACGTACGTAC" + a + b for a in "ACGT" for b in "ACGT"] + [16 * c for c in "ACGT"]
    good = np.linspace(1.0, 0.9, 16)
    made = spread(texts, np.append(good, [-50.0] * 4), 3, None, set())
    assert (made.distance, made.short) == (2, 0)
    assert max(made.chosen) < 16
    worth_it = spread(texts, np.append(good, [0.8] * 4), 3, None, set())
    assert worth_it.distance == 3  # a fifth of the length


def test_wells_run_over_the_plate_and_on():
    assert wells(96)[:13] == ["A1", "A2", "A3", "A4", "A5", "A6", "A7", "A8", "A9", "A10", "A11", "A12", "B1"]
    assert wells(96)[-1] == "H12"
    assert len(set(wells(200))) == 200
    assert wells(200)[96] == "2:A1"


def test_clusters_are_around_the_best():
    texts = ["AAAAAAAA", "AAAAAAAT", "TTTTTTTT", "TTTTTTTA"]
    assert clusters(texts, np.array([1.0, 0.5, 2.0, 0.1])).tolist() == [2, 2, 1, 1]


def test_acquisitions_are_their_formulas():
    rng = np.random.default_rng(0)
    p = Prediction(np.array([0.1, 0.5, -1.0]), np.array([0.2, 0.1, 1.0]), rng.normal(size=(4, 3)))
    assert np.array_equal(Greedy()(p, 0.3), p.mean)
    assert np.allclose(UCB(2.0)(p, 0.3), [0.5, 0.7, 1.0])
    assert np.array_equal(Thompson(5)(p, 0.3), p.draws[1])
    drawn = p.mean + p.sd * rng.normal(size=(400_000, 3))
    assert np.allclose(ExpectedImprovement()(p, 0.3), np.maximum(drawn - 0.3, 0).mean(0), atol=3e-3)
    near = Prediction(np.linspace(-5, 3, 81), np.full(81, 0.2), np.zeros((1, 81)))
    kind, worth = ExpectedImprovement(), ExpectedImprovement()(near, 0.3)
    assert np.allclose(kind.log(near, 0.3)[worth > 1e-14], np.log(worth[worth > 1e-14]), rtol=1e-5)
    far = Prediction(np.array([-1.0, -1.1, -3.0, -1e6]), np.full(4, 1e-3), np.zeros((1, 4)))
    found = kind.log(far, 0.3)
    assert np.isfinite(found).all()
    assert (np.diff(found) < 0).all()
    assert found[0] == pytest.approx(-0.5 * 1300**2 - 0.5 * np.log(2 * np.pi) - 2 * np.log(1300) + np.log(1e-3))
    with pytest.raises(UserError, match="acquisition"):
        acquisition("ubc")
