"""Shortlists: different, far apart, best first, the same whatever the order of drawing, in bounded memory."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from stochflow.errors import UserError
from stochflow.law.modes import find_modes
from stochflow.look import shortlist as module
from stochflow.look.shortlist import known_modes, shortlist, synthesised
from stochflow.runs.tasks import grid_task, strings_task, tfbind8_task
from stochflow.worlds.channels import Exact, Slip


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
    assert [[r[k] for k in keys] for r in shortlist(rows, **wish)] == [
        [r[k] for k in keys] for r in shortlist(drawn(2000), **wish)
    ]


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
    rows = [
        {"id": "x", "sequence": s, "score": v, "log_pf": 0.0}
        for s, v in [("AAAA", 1.0), ("AAAC", 0.9), ("CCCC", 0.8), ("CCCA", 0.7)]
    ]
    assert [r["mode"] for r in shortlist(rows, unique=True, top=4)] == [1, 1, 2, 2]
    states = [{"id": "x", "state": s, "score": v} for s, v in [([0, 0], 1.0), ([0, 1], 0.5), ([7, 7], 0.9)]]
    assert [(r["state"], r["mode"]) for r in shortlist(states, min_distance=2)] == [([0, 0], 1), ([7, 7], 2)]


def by_definition(rows, heads):
    """Each row's nearest head, the first of equally near ones."""
    return [1 + min(range(len(heads)), key=lambda i: (hamming(r["sequence"], heads[i]), i)) for r in rows]


def test_thousands_get_their_modes_in_seconds_and_rightly():
    """The double loop that this replaces took 2 microseconds a letter: four minutes here."""
    rows = list({r["sequence"]: r for r in drawn(30_000, letters=8)}.values())
    begun = time.process_time()
    found = list(shortlist(rows, unique=True, top=5_000))
    assert time.process_time() - begun < 20
    assert len(found) == 5_000
    heads = [
        found[i]["sequence"]
        for i in find_modes([r["sequence"] for r in found], [r["score"] for r in found], min_distance=2)
    ]
    assert len(heads) > 1_000
    some = found[::250]
    assert [r["mode"] for r in some] == by_definition(some, heads)


# the modes of a run ---------------------------------------------------------------------------------------------


def as_csv(rows):
    return [{k: str(v) for k, v in r.items()} for r in rows]


def test_what_passes_through_is_held_against_the_modes_of_the_report():
    task = tfbind8_task()
    designs = [
        {"sequence": s, "score": v}
        for s, v in [("AAAAAAAA", 1.0), ("AAAAAACC", 0.9), ("GGGGAAAA", 0.8), ("TTTTTTTT", 0.7)]
    ]
    known = known_modes(as_csv(designs), task)  # two modes differ in at least four of eight letters: the second is none
    heads = ["AAAAAAAA", "GGGGAAAA", "TTTTTTTT"]
    rows = list(drawn(2_500, letters=8))
    found = list(shortlist(iter(rows), known=known))
    assert [r["mode"] for r in found] == by_definition(rows, heads)
    assert [{k: v for k, v in r.items() if k != "mode"} for r in found] == rows
    once = list(shortlist(rows, unique=True, known=known))
    assert [r["mode"] for r in once] == by_definition(once, heads)
    endless = shortlist(({"id": str(i), "sequence": "AAAACCCC", "score": 0.0} for i in itertools.count()), known=known)
    assert next(endless)["mode"] == 1


def test_strings_that_may_stop_are_held_against_modes_by_edit_distance(monkeypatch, caplog):
    pytest.importorskip("rapidfuzz", reason="edit distance of many strings")
    task = strings_task(lambda texts: [float(len(t)) for t in texts], length=6, min_length=1)
    designs = as_csv([{"sequence": "ACGTAC", "score": 2.0}, {"sequence": "TTTTTT", "score": 1.0}])
    rows = [
        {"id": "1", "sequence": s, "score": 0.0} for s in ("CGTAC", "TTT", "ACGTAC")
    ]  # by position CGTAC would be nearer to T...
    assert [r["mode"] for r in shortlist(rows, known=known_modes(designs, task))] == [1, 2, 1]
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert known_modes(designs, task) is None
    assert "rapidfuzz" in caplog.text


def test_a_grid_has_its_bright_regions_for_modes():
    task = grid_task(side=8)
    known = known_modes([], task)
    corners = [[1, 1], [1, 6], [6, 1], [6, 6]]
    rows = [{"id": "1", "state": s, "score": 0.0} for s in [*corners, [0, 0], [2, 1], [7, 6]]]
    found = [r["mode"] for r in shortlist(rows, known=known)]
    assert sorted(found[:4]) == [1, 2, 3, 4]
    assert found[4:] == [found[0], found[0], found[3]]


def test_without_designs_there_are_no_modes_and_that_is_said(caplog):
    assert known_modes([], tfbind8_task()) is None
    assert "not written its designs" in caplog.text
    assert list(shortlist(drawn(3), known=None)) == list(drawn(3))


SAMPLED = """
import itertools, resource, sys
from stochflow.runs import export
from stochflow.look.shortlist import known_modes, shortlist
from stochflow.runs.tasks import tfbind8_task

def rows(count):  # as `Experiment.sample` yields them
    for i in range(count):
        text = "".join("ACGT"[(i * 2654435761 >> 2 * k) % 4] for k in range(8))
        yield {"id": f"design_{i:07d}", "sequence": text, "score": i % 1000 / 1000, "log_reward": -0.1, "log_pf": -9.0}

designs = [{"sequence": r["sequence"], "score": str(r["score"])} for r in rows(100)]
known = known_modes(designs, tfbind8_task())
for count in (20_000, 200_000):
    with open("/dev/null", "w") as file:
        export.write_rows(shortlist(rows(count), known=known), "csv", file)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="resource and /dev/null are POSIX")
def test_ten_times_the_samples_take_no_more_memory():
    """Peak resident memory of a process of its own, in kB (of 1024 bytes on Linux, bytes on macOS)."""
    done = subprocess.run([sys.executable, "-c", SAMPLED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    some, many = map(int, done.stdout.split())
    unit = 1 if sys.platform == "darwin" else 1024
    assert (many - some) * unit < 20e6


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
    assert [(r["sequence"], r["made_score"], r["made_exact"]) for r in found] == [
        ("GGGG", 4.0, 1.0),
        ("GGG", 3.0, 1.0),
        ("A", 0.0, 1.0),
    ]


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
