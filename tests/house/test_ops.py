"""Small functions hold what their names say."""

from __future__ import annotations

import pytest
import torch

from stochflow import ops


@pytest.mark.parametrize("shape", [(7, 2, 5, 4), (3, 8), (2, 3, 9), (4,)])
def test_log_softmax_is_that_of_torch_with_its_gradient(shape):
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    slope = torch.randn(*shape, dtype=torch.float64)
    found, want = ops.log_softmax(x), x.log_softmax(-1)
    assert found.shape == want.shape
    assert torch.allclose(found, want, atol=1e-14)
    (a,), (b,) = (torch.autograd.grad(y, x, slope) for y in (found, want))
    assert torch.allclose(a, b, atol=1e-14)


def test_noise_is_exponential_and_never_infinite():
    torch.manual_seed(0)
    drawn = ops.log_exponential(torch.empty(400_000)).double()
    assert bool(drawn.isfinite().all())
    at = torch.tensor([-3.0, -1.0, 0.0, 1.0])
    below = (drawn[:, None] < at).double().mean(0)
    assert torch.allclose(below, 1 - (-at.exp()).exp().double(), atol=4e-3)
