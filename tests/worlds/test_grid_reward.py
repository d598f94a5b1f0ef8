"""The corner reward in exact integers: floats would round the edges of the bands."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from stochflow.worlds.grid import Corners, Grid


@pytest.mark.parametrize(("side", "cells"), [(8, 4), (32, 36), (64, 144), (128, 676)])
def test_mode_cells(side, cells):
    states = Grid(2, side).all_states()
    assert int(Corners(side).modes(states).sum()) == cells


@pytest.mark.parametrize("side", [2, 3, 8, 11, 16, 21, 31])
def test_bands_equal_rational_arithmetic(side):
    """On the line x_i = -1 + 2i/(side-1) in fractions, bounds strict; side 16 and 31 hit |x| = 0.6 exactly."""
    score = Corners(side, base=0.125)(torch.arange(side).unsqueeze(1))
    for i in range(side):
        x = abs(Fraction(2 * i, side - 1) - 1)
        plateau = x > Fraction(1, 2)
        band = Fraction(3, 5) < x < Fraction(4, 5)
        assert float(score[i]) == 0.125 + 0.5 * plateau + 2.0 * band


@pytest.mark.parametrize(("side", "ndim"), [(8, 2), (16, 2), (9, 3)])
def test_reward_is_symmetric(side, ndim):
    states = Grid(ndim, side).all_states()
    oracle = Corners(side)
    assert torch.equal(oracle(states), oracle(side - 1 - states))
    assert torch.equal(oracle(states), oracle(states.flip(-1)))


def test_values_at_named_cells():
    score = Corners(8)(torch.tensor([[0, 0], [1, 1], [1, 0], [3, 3], [6, 1]]))
    assert score.tolist() == pytest.approx([0.501, 2.501, 0.501, 0.001, 2.501])
