"""Modes: the published counts, the edge cases, and an independent count by brute force."""

from __future__ import annotations

import itertools
import sys
import time

import numpy as np
import pytest
import torch

from stochflow.errors import UserError
from stochflow.law.exact import expected_modes
from stochflow.law.modes import (
    calculate_num_modes,
    distances,
    families,
    family_distance,
    find_modes,
    local_maxima,
    nearest,
    num_modes,
    tfbind8_modes,
)
from stochflow.scores.data import digits, tfbind8

FIVE = ["abc", "abd", "xyz", "xzy", "abc"]


def hamming(a, b):
    return sum(x != y for x, y in zip(a, b, strict=True))


def levenshtein(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def plain(texts, scores, threshold, min_distance, distance):
    """The rule, as it is written."""
    accepted = []
    for i in sorted(range(len(texts)), key=lambda i: (-scores[i], texts[i], i)):
        if scores[i] >= threshold and all(distance(texts[i], texts[j]) >= min_distance for j in accepted):
            accepted.append(i)
    return accepted


def test_tfbind8_has_the_328_published_modes():
    y = tfbind8()
    modes = tfbind8_modes()
    assert (y >= 0.889).sum() == 1124
    assert len(modes) == 328
    assert len(set(modes.tolist())) == 328
    assert round(y[modes].min(), 4) == 0.8892
    assert (np.diff(y[modes]) <= 0).all()
    x = digits()[modes]
    apart = (x[:, None] != x[None]).sum(-1) + 99 * np.eye(328, dtype=int)
    assert apart.min() == 2


def test_tfbind8_other_counts():
    x, y = digits(), tfbind8()
    assert num_modes(x, y, 0.889, 3) == 81
    assert len(local_maxima(x, y, 0.889)) == 44


def test_local_maxima_by_definition():
    x, y = digits(), tfbind8()
    cube = y.reshape((4,) * 8)
    strict = np.ones(cube.shape, dtype=bool)
    for axis in range(8):
        for turn in range(1, 4):
            strict &= cube > np.roll(cube, turn, axis)
    assert local_maxima(x, y).tolist() == np.flatnonzero(strict.reshape(-1)).tolist()


def test_local_maxima_of_part_of_a_space():
    assert local_maxima(["aa", "ab", "bb", "cc"], [1.0, 2.0, 2.0, 0.1]).tolist() == [3]  # a tie is no strict maximum
    assert local_maxima(["aa", "ab", "ab"], [1.0, 2.0, 3.0]).tolist() == [2]
    assert local_maxima(["a", "b"], [1.0, 2.0], threshold=5.0).tolist() == []
    assert local_maxima([], []).tolist() == []


@pytest.mark.parametrize("metric", ["hamming", "edit"])
def test_five_strings(metric):
    assert num_modes(FIVE, [0.0] * 5, min_distance=3, metric=metric) == 2
    assert num_modes(FIVE, [0.0] * 5, min_distance=1, metric=metric) == 4


def test_the_sources_name_and_convention():
    assert calculate_num_modes(FIVE, distance_threshold=2) == 2
    assert calculate_num_modes(FIVE, distance_threshold=0) == 4
    letters = [list(s) for s in FIVE]  # the two-dimensional array that the listing computes with
    assert calculate_num_modes(letters) == calculate_num_modes(np.array(letters)) == 2
    assert calculate_num_modes(np.array(FIVE).astype("S")) == calculate_num_modes(np.array(letters).astype("S"), 2) == 2
    assert (
        calculate_num_modes(["ACGTACGT", "ACGTACGA", "TTTTTTTT"]) == 2
    )  # the sources' own code answers 1 to any list of strings
    assert calculate_num_modes(FIVE, 0, scores=[5, 4, 3, 2, 1], threshold=3) == 3


@pytest.mark.parametrize("metric", ["hamming", "edit"])
@pytest.mark.parametrize("min_distance", [1, 2, 3, 5])
def test_agrees_with_the_rule_as_written(metric, min_distance):
    rng = np.random.default_rng(min_distance)
    x = rng.integers(0, 3, (1300, 6))  # more than one block, and many repeats
    scores = rng.integers(0, 40, 1300) / 40  # and many ties
    texts = ["".join("abc"[t] for t in row) for row in x]
    expected = plain(texts, scores, 0.2, min_distance, hamming if metric == "hamming" else levenshtein)
    assert find_modes(texts, scores, 0.2, min_distance, metric).tolist() == expected
    assert find_modes(x, scores, 0.2, min_distance, metric).tolist() == expected
    assert find_modes(torch.as_tensor(x), torch.as_tensor(scores), 0.2, min_distance, metric).tolist() == expected


@pytest.mark.parametrize("metric", ["hamming", "edit"])
def test_order_of_the_input_does_not_matter(metric):
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("ACGT"), 6)) for _ in range(400)]
    scores = rng.integers(0, 5, 400) / 5
    modes = {texts[i] for i in find_modes(texts, scores, 0.2, 3, metric)}
    for _ in range(5):
        turn = rng.permutation(400)
        again = [texts[i] for i in turn]
        assert {again[i] for i in find_modes(again, scores[turn], 0.2, 3, metric)} == modes


def test_best_first_and_the_threshold_is_included():
    found = find_modes(["aa", "bb", "cc", "dd"], [0.5, 0.9, 0.7, 0.4], threshold=0.5, min_distance=2)
    assert found.tolist() == [1, 2, 0]


def test_edit_distance_takes_strings_of_any_length():
    assert num_modes(["ACGT", "ACG", "TTTTTT"], [3, 2, 1], min_distance=2, metric="edit") == 2


def test_hamming_names_the_remedy_for_strings_of_different_lengths():
    with pytest.raises(UserError, match=r"lengths 4 and 3.*sequence 1.*metric='edit'"):
        num_modes(["ACGT", "ACG"], [1, 0])


def test_padded_tokens():
    x = torch.tensor([[0, 1, 2, 4], [0, 1, 2, 3], [3, 3, 4, 4]])
    assert num_modes(x, [3.0, 2.0, 1.0], min_distance=2, metric="edit", pad=4) == 2
    with pytest.raises(UserError, match="edit"):
        num_modes(x, [3.0, 2.0, 1.0], min_distance=2, pad=4)


@pytest.mark.parametrize("metric", ["hamming", "edit"])
def test_nothing_in_nothing_out(metric):
    assert num_modes([], [], metric=metric) == 0
    assert num_modes(np.zeros((0, 8), dtype=int), [], metric=metric) == 0
    assert num_modes(["ACGT"], [0.1], threshold=0.5, metric=metric) == 0
    assert calculate_num_modes([]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sequences": ["a", "b"], "scores": [1.0]}, ["2 sequences", "1 scores"]),
        ({"sequences": ["a", "b"], "scores": [1.0, np.nan]}, ["sequence 1", "NaN"]),
        ({"sequences": ["a"], "scores": [1.0], "min_distance": 0}, ["min_distance", "at least 1"]),
        ({"sequences": ["a"], "scores": [1.0], "min_distance": 1.5}, ["1.5"]),
        ({"sequences": ["a"], "scores": [1.0], "metric": "haming"}, ["haming", 'did you mean "hamming"']),
        ({"sequences": np.zeros((2, 3, 4), dtype=int), "scores": [1.0, 1.0]}, ["(2, 3, 4)"]),
        ({"sequences": np.zeros((2, 3)), "scores": [1.0, 1.0]}, ["float64"]),
    ],
)
def test_bad_input_is_named(arguments, words):
    with pytest.raises(UserError) as error:
        find_modes(**arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("package", [True, False], ids=["rapidfuzz", "without it"])
def test_distances_and_the_nearest_head_are_those_of_the_definition(package, monkeypatch):
    if package:
        pytest.importorskip("rapidfuzz", reason="the other case covers its absence")
    else:
        monkeypatch.setitem(sys.modules, "rapidfuzz.process", None)
    rng = np.random.default_rng(3)
    texts = ["".join(rng.choice(list("ACGT"), 6)) for _ in range(600)]
    heads = texts[:7]
    by_hand = np.array([[sum(x != y for x, y in zip(a, b, strict=True)) for b in heads] for a in texts])
    assert (distances(texts, heads, "hamming") == by_hand).all()
    assert (nearest(texts, heads, "hamming") == by_hand.argmin(1)).all()
    assert distances(["kitten", "", "ACGT"], ["sitting", "A"], "edit").tolist() == [[3, 6], [7, 1], [7, 3]]
    assert nearest(["CGTAC", "TT"], ["ACGTAC", "TTTTTT"], "edit").tolist() == [0, 1]
    assert nearest([], heads, "hamming").tolist() == []


def test_families_are_half_of_the_letters_apart_best_first():
    texts, score = ["AAAA", "AACC", "AAAC", "GGGG"], [0.5, 0.9, 0.8, 0.7]
    heads, gap = families(texts, score)
    assert [texts[h] for h in heads] == ["AACC", "GGGG", "AAAA"]  # AAAC is one letter from a better one
    assert family_distance(texts) == 2
    assert gap[0].tolist() == [0, 2, 1, 4]


def test_expected_modes_by_hand_and_by_sampling():
    def expected(law, n):
        return float(expected_modes(torch.tensor(law), torch.arange(len(law)), n))

    assert expected([0.5, 0.25], 2) == pytest.approx(0.75 + 7 / 16, abs=1e-12)
    assert expected([1.0, 0.0], 3) == 1.0
    assert expected([0.3], 0) == 0.0
    assert expected([1e-18], 10) == pytest.approx(1e-17, rel=1e-6)  # 1 - (1 - P)^n would say 0
    p = np.array([0.1, 0.02, 0.005, 0.875])
    rng = np.random.default_rng(0)
    seen = [len(set(draw.tolist()) & {0, 1, 2}) for draw in rng.choice(4, (20_000, 30), p=p)]
    error = np.std(seen) / np.sqrt(len(seen))
    assert abs(np.mean(seen) - float(expected_modes(torch.tensor(p), torch.tensor([0, 1, 2]), 30))) < 4 * error


@pytest.mark.parametrize(("samples", "target", "uniform"), [(2048, 52.7, 10.1), (16_000, 244.0, 71.1)])
def test_expected_modes_of_tfbind8(samples, target, uniform):
    reward = np.maximum(tfbind8(), 1e-3) ** 3
    modes = torch.from_numpy(tfbind8_modes().copy())
    assert round(float(expected_modes(torch.from_numpy(reward / reward.sum()), modes, samples)), 1) == target
    assert round(float(expected_modes(torch.full((4**8,), 4.0**-8), modes, samples)), 1) == uniform


@pytest.mark.parametrize(("metric", "limit"), [("hamming", 30), ("edit", 120)])
@pytest.mark.slow
def test_twenty_thousand_sequences_of_length_fifty(metric, limit):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 4, (20_000, 50))
    start = time.perf_counter()
    assert (
        num_modes(x, rng.random(20_000), min_distance=5, metric=metric) == 20_000
    )  # random ones are far apart: the slowest case
    assert time.perf_counter() - start < limit


def test_the_count_does_not_depend_on_the_order_of_the_list():
    """A chain a-b-c of neighbours: scanned from an end it has two modes, from the middle one; here always by score, then alphabet."""
    chain = ["AAA", "AAC", "ACC"]
    for order in itertools.permutations(range(3)):
        given = [chain[i] for i in order]
        assert calculate_num_modes(given, distance_threshold=1) == 2
        assert calculate_num_modes(given, distance_threshold=1, scores=[[0.1, 0.9, 0.2][i] for i in order]) == 1
