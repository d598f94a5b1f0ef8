"""Distances, folds and features."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stochflow.design.features import Features, _edits, distances, nearest


def brute(a, b):
    table = np.zeros((len(a) + 1, len(b) + 1), dtype=int)
    table[:, 0], table[0] = range(len(a) + 1), range(len(b) + 1)
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (a[i - 1] != b[j - 1]))
    return table[-1, -1]


def test_edit_distances_without_rapidfuzz_are_those_of_the_table():
    rng = np.random.default_rng(1)
    texts = ["".join(rng.choice(list("ACGT"), rng.integers(0, 12))) for _ in range(30)]
    for text in texts[:10]:
        assert _edits(text, texts).tolist() == [brute(text, other) for other in texts]
    assert distances(texts[:5], texts).tolist() == [[brute(a, b) for b in texts] for a in texts[:5]]


def test_hamming_and_nearest():
    assert distances(["AAAA", "ACGT"], ["AAAT", "ACGT", "TTTT"]).tolist() == [[1, 3, 4], [2, 0, 3]]
    at, far = nearest(["AAAA", "ACGT"], ["AAAT", "ACGT"])
    assert (at.tolist(), far.tolist()) == ([0, 1], [1, 0])


def test_features_read_letters_from_both_ends_and_count_words():
    features = Features("ACGT", 5, same_length=False)
    tokens = features.tokens(["ACG", "ACGTA"])
    assert tokens.tolist() == [[0, 1, 2, 4, 4], [0, 1, 2, 3, 0]]
    x = features(tokens)
    assert x.shape == (2, features.count)
    left, right = x[:, :20].view(2, 5, 4), x[:, 20:40].view(2, 5, 4)
    assert left[0].argmax(1)[:3].tolist() == [0, 1, 2]
    assert left[0, 3:].sum() == 0
    assert right[0].sum(1).tolist() == [0, 0, 1, 1, 1]  # ACG stands at the right end
    assert right[0, 2:].argmax(1).tolist() == [0, 1, 2]
    words = x[0, 44:60] * 2**0.5  # two pairs: AC and CG
    assert torch.allclose(words[[1, 6]], torch.ones(2))
    assert float(words.sum()) == pytest.approx(2)
    assert x[:, -1].tolist() == [0.6000000238418579, 1.0]
