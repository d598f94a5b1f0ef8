"""Groups, folds and intervals that cover what they say on groups they have not seen."""

from __future__ import annotations

import numpy as np
import pytest

from stochflow.design.validation import calibrate, coverage, folds_of, group_quantile, grouped, groups_of


def test_near_identical_sequences_are_one_group():
    texts = ["ACGTACGTAC", "ACGTACGTAA", "TTTTTTTTTT", "TTTTTTTTGG", "ACGTACGAAA", "CCCCCCCCCC"]
    assert groups_of(texts).tolist() == [0, 0, 1, 1, 0, 2]


def test_many_sequences_are_grouped_as_one_by_one():
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("ACGT"), 6)) for _ in range(700)]
    found = groups_of(texts)
    founders: list[str] = []
    for text, group in zip(texts, found, strict=True):
        near = [i for i, f in enumerate(founders) if sum(a != b for a, b in zip(f, text, strict=True)) <= 1]
        if not near:
            founders.append(text)
            near = [len(founders) - 1]
        assert group == near[0]


def test_a_library_around_a_parent_is_grouped_by_what_is_more_alike():
    """Single mutants of 40 letters: those that change the same position differ in one letter, and stay together."""
    parent = "ACDEFGHIKL" * 4
    texts = [parent, *[parent[:i] + c + parent[i + 1 :] for i in range(0, 40, 4) for c in "WYV"]]
    assert len(set(groups_of(texts))) == 1
    groups, identity = grouped(texts)
    assert identity == pytest.approx(1 - 1 / 40)
    by_position = groups[1:].reshape(10, 3)
    assert (by_position == by_position[:, :1]).all()
    assert len(set(by_position[:, 0])) == 10
    far = ["".join(np.random.default_rng(i).choice(list("ACGT"), 20)) for i in range(9)]
    assert grouped(far)[1] == 0.8
    groups, identity = grouped(["AAAA", "AAAC", "AAAG", "AAAT"])
    assert (groups.tolist(), identity) == ([0, 1, 2, 3], 1.0)


def test_folds_keep_groups_whole_and_even():
    groups = np.repeat(np.arange(40), np.random.default_rng(0).integers(1, 9, 40))
    fold = folds_of(groups, 5, 0)
    assert all(len(set(fold[groups == g])) == 1 for g in range(40))
    sizes = np.bincount(fold)
    assert sizes.max() - sizes.min() <= 8


def test_the_group_quantile_is_the_conformal_one_where_groups_are_single():
    ratio = np.random.default_rng(1).random(99)
    assert group_quantile(ratio, np.arange(99), 0.8) == np.sort(ratio)[79]  # ceil(100 * 0.8)-th smallest
    assert group_quantile(ratio[:3], np.arange(3), 0.8) is None  # 4 groups give 80 % at best
    assert group_quantile(ratio[:4], np.arange(4), 0.8) == ratio[:4].max()


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_intervals_cover_new_groups_with_heavy_tails_and_shared_errors(level):
    """Errors share a part within their group, and the model's own sd is wrong by a factor: coverage holds on average."""
    rng = np.random.default_rng(2)
    shares = []
    for _ in range(60):

        def world(count):
            sizes = rng.integers(1, 8, count)
            groups = np.repeat(np.arange(count), sizes)
            sd = rng.gamma(2, 0.2, len(groups))
            error = rng.standard_t(3, count)[groups] * 0.5 + 3 * sd * rng.normal(size=len(groups))
            return groups, sd, error

        groups, sd, error = world(60)
        made = calibrate(error, np.zeros(len(error)), sd, groups)
        groups, sd, error = world(200)
        ends = made.interval(np.zeros(len(error)), sd, level)
        assert ends is not None
        shares.append(coverage(error, *ends, groups))
    assert level - 0.015 < np.mean(shares) < level + 0.04
