"""The products that compiled loops are made of, against numpy's."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

numba = pytest.importorskip("numba")
loops = pytest.importorskip("stochflow.engines.numba.loops")

SHAPES = [
    (1, 256, 256),
    (5, 43, 256),
    (33, 7, 6),
    (20, 100, 100),
    (3, 1, 17),
    (40, 256, 272),
    (2, 0, 16),
    (17, 64, 15),
    (16, 33, 128),
]


@numba.njit
def _product(x, w, out, a, b, low):
    loops.product(x, w, out, a, b, low)


@numba.njit
def _turn(x, many, a, b):
    return loops.turn(x, many, a, b)


@pytest.mark.parametrize("low", [0.0, -np.inf])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_of_some_rows_is_added_to_what_is_there(shape, low):
    rows, terms, wide = shape
    draw = np.random.default_rng(0)
    x, w, out = (draw.standard_normal(of).astype(np.float32) for of in ((rows, terms), (terms, wide), (rows, wide)))
    x[draw.random(x.shape) < 0.3] = 0
    a, b = rows // 4, rows - rows // 5
    expected = out.astype(np.float64)
    expected[a:b] += np.maximum(x, low)[a:b].astype(np.float64) @ w
    _product(x, w, out, a, b, np.float32(low))
    np.testing.assert_allclose(out, expected, atol=1e-5 * max(terms, 1) ** 0.5)
    assert np.array_equal(out[:a], expected[:a].astype(np.float32))
    assert np.array_equal(out[b:], expected[b:].astype(np.float32))


@pytest.mark.parametrize("low", [0.0, -np.inf])
@pytest.mark.parametrize("place", [3, 40])
def test_what_is_not_a_number_is_not_passed_over(low, place):
    x, w, out = (
        np.zeros((2, 43), dtype=np.float32),
        np.ones((43, 130), dtype=np.float32),
        np.zeros((2, 130), dtype=np.float32),
    )
    x[1, place] = np.nan
    _product(x, w, out, 0, 2, np.float32(low))
    assert np.array_equal(out[0], np.zeros(130))
    assert np.isnan(out[1]).all()


@pytest.mark.parametrize("low", [0.0, -np.inf])
def test_a_row_has_the_same_digits_among_any_others(low):
    draw = np.random.default_rng(1)
    x, w = draw.standard_normal((50, 70)).astype(np.float32), draw.standard_normal((70, 300)).astype(np.float32)
    alone, together = np.zeros((50, 300), dtype=np.float32), np.zeros((50, 300), dtype=np.float32)
    _product(x, w, together, 0, 50, np.float32(low))
    for r in range(50):
        _product(x, w, alone, r, r + 1, np.float32(low))
    assert np.array_equal(alone, together)


@pytest.mark.parametrize("shape", [(16, 16), (43, 256), (5, 100), (33, 47), (1, 1)])
def test_rows_become_columns(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    rows, columns = shape
    assert np.array_equal(_turn(x, rows, 0, columns), x.T)
    assert np.array_equal(_turn(x, rows - 1, columns // 5, columns), x[: rows - 1, columns // 5 :].T)


def test_a_processor_without_wide_vectors_has_the_same_products():
    """The tests above once more, where numba is told to compile for any processor: with vectors of eight numbers, and no instruction that lists some."""
    code = """
import sys, pytest
from stochflow.engines.numba import loops as cpu_loops
assert cpu_loops.LANES == 8
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "not without_wide", sys.argv[1]]))
"""
    told = {**os.environ, "NUMBA_CPU_NAME": "generic"}
    subprocess.run([sys.executable, "-c", code, __file__], check=True, stdout=subprocess.DEVNULL, env=told)
