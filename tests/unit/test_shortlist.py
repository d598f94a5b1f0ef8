"""Shortlists: different, far apart, best first, the same whatever the order of drawing, in bounded memory."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from stochflow import shortlist as module
from stochflow.channels import Exact, Slip
from stochflow.errors import UserError
from stochflow.shortlist import shortlist, synthesised
from stochflow.tasks import strings_task, tfbind8_task


def drawn(count: int, seed: int = 0, letters: int = 5):
    """Rows as `Experiment.sample` makes them; the score is a function of the sequence."""
    rng = random.Random(seed)
    for i in range(count):
        text = "".join(rng.choice("ACGT") for _ in range(letters))
        score = sum((3 * k + ord(c)) % 7 for k, c in enumerate(text)) / 30
        yield {"id": f"design_{i + 1:04d}", "sequence": text, "score": score, "log_reward": 0.0, "log_pf": -1.0}


def hamming(a, b):
    return sum(x != y for x, y in zip(a, b, strict=True))


def test_with_no_wish_rows_pass_through_as_they_come():
    assert list(shortlist(drawn(50))) == list(drawn(50))
    endless = shortlist({"id": str(i), "sequence": "A", "score": 0.0} for i in itertools.count())
    assert next(endless)["id"] == "0"


def test_unique_keeps_the_first_of_each():
    texts = [r["sequence"] for r in shortlist(drawn(3000), unique=True)]
    assert texts == list(dict.fromkeys(r["sequence"] for r in drawn(3000)))


def test_top_is_the_best_by_score_and_counts_repeats():
    found = list(shortlist(drawn(3000), unique=True, top=20))
    every = {r["sequence"]: r["score"] for r in drawn(3000)}
    best = sorted(every, key=lambda s: (-every[s], s))[:20]
    assert [r["sequence"] for r in found] == best
    assert [r["id"] for r in found[:2]] == ["design_0001", "design_0002"]
    times = [sum(r["sequence"] == b for r in drawn(3000)) for b in best]
    assert [r["count"] for r in found] == times
    repeated = list(shortlist(drawn(3000), top=20))
    assert [r["score"] for r in repeated] == sorted((r["score"] for r in drawn(3000)), reverse=True)[:20]


@pytest.mark.parametrize("distance", [2, 3, 5])
def test_a_distance_gives_the_greedy_choice(distance):
    """Against the definition: best first, a row is taken if it is far enough from all that were taken."""
    found = [r["sequence"] for r in shortlist(drawn(3000), min_distance=distance)]
    every = {r["sequence"]: r["score"] for r in drawn(3000)}
    taken: list[str] = []
    for text in sorted(every, key=lambda s: (-every[s], s)):
        if all(hamming(text, t) >= distance for t in taken):
            taken.append(text)
    assert found == taken
    assert [r["sequence"] for r in shortlist(drawn(3000), min_distance=distance, top=3)] == taken[:3]


def test_the_order_of_drawing_does_not_matter():
    rows = list(drawn(2000))
    random.Random(1).shuffle(rows)
    wish = {"unique": True, "min_distance": 2, "top": 10}
    keys = ("sequence", "score", "count", "mode")
    assert [[r[k] for k in keys] for r in shortlist(rows, **wish)] == [[r[k] for k in keys] for r in shortlist(drawn(2000), **wish)]


def test_a_small_pool_gives_the_same_shortlist(monkeypatch):
    """What is let go scores too little to be chosen, so the memory may be bounded."""
    whole = list(shortlist(drawn(5000), unique=True, min_distance=2, top=8))
    monkeypatch.setattr(module, "POOL", 120)
    assert list(shortlist(drawn(5000), unique=True, min_distance=2, top=8)) == whole


def test_a_pool_that_is_too_small_says_so(monkeypatch, caplog):
    monkeypatch.setattr(module, "POOL", 20)
    assert len(list(shortlist(drawn(5000), min_distance=5, top=15))) < 15
    assert "shorter than --top" in caplog.text
    with pytest.raises(UserError, match="--top"):
        list(shortlist(drawn(5000), min_distance=2))


def test_modes_are_the_nearest_head():
    rows = [{"id": "x", "sequence": s, "score": v, "log_pf": 0.0} for s, v in [("AAAA", 1.0), ("AAAC", 0.9), ("CCCC", 0.8), ("CCCA", 0.7)]]
    assert [r["mode"] for r in shortlist(rows, unique=True, top=4)] == [1, 1, 2, 2]
    states = [{"id": "x", "state": s, "score": v} for s, v in [([0, 0], 1.0), ([0, 1], 0.5), ([7, 7], 0.9)]]
    assert [(r["state"], r["mode"]) for r in shortlist(states, min_distance=2)] == [([0, 0], 1), ([7, 7], 2)]


@pytest.mark.parametrize("wish", [{"top": -1}, {"min_distance": -2}, {"top": 10**9}])
def test_mistakes_are_told(wish):
    with pytest.raises(UserError, match="--"):
        shortlist(drawn(3), **wish)


# the noise of making it -----------------------------------------------------------------------------------------


def test_what_synthesis_makes_is_the_channel_letter_by_letter():
    """A slip of alpha leaves a base of four as ordered with probability 1 - 3 alpha / 4: eight of them, independently."""
    task = tfbind8_task(stick=0.25)
    row = {"id": "design_0001", "sequence": "GATATCAA", "score": 0.99}
    (made,) = synthesised(task, [row], draws=20_000)
    exact = (1 - 0.75 * 0.25) ** 8
    assert abs(made["made_exact"] - exact) < 5 * np.sqrt(exact / 20_000)
    states = task.env.all_states()[-(4**8) :]
    wanted = task.env.encode(["GATATCAA"])
    same = (states == wanted).sum(1)
    weight = (1 - 0.75 * 0.25) ** same * (0.25 / 4) ** (8 - same)
    score = task.oracle(states).double()
    mean = float((weight * score).sum())
    spread = float(((weight * score**2).sum() - mean**2).sqrt())
    assert abs(made["made_score"] - mean) < 5 * spread / np.sqrt(20_000)
    assert made["made_low"] < made["made_score"]


def test_without_noise_what_is_ordered_is_made():
    task = strings_task(lambda texts: [t.count("G") for t in texts], length=4, min_length=1, channel=Exact())
    rows = [{"id": "1", "sequence": "GGG"}, {"id": "2", "sequence": "GGGG"}, {"id": "3", "sequence": "A"}]
    found = synthesised(task, rows, draws=3)
    assert [(r["sequence"], r["made_score"], r["made_exact"]) for r in found] == [("GGGG", 4.0, 1.0), ("GGG", 3.0, 1.0), ("A", 0.0, 1.0)]


def test_simulation_is_repeatable_and_leaves_the_stream_alone():
    task = strings_task(lambda texts: [t.count("G") for t in texts], length=4, channel=Slip(0.5))
    rows = [{"id": "1", "sequence": "GGGG"}]
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    assert synthesised(task, rows, seed=1) == synthesised(task, rows, seed=1) != synthesised(task, rows, seed=2)
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(UserError, match="--simulate"):
        synthesised(task, [{"id": "1", "state": [0, 1]}])
    with pytest.raises(UserError, match="--simulate"):
        synthesised(task, rows, draws=0)
