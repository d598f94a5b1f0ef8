"""One thread and one seed for every test: what a test says is then the same on every machine."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(autouse=True)
def _same_draws():
    """Tests draw from torch's default generator, seeded afresh for each."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def assert_gradient_of_autograd():
    """Of a trainer whose source keeps a trace: the gradient taken from it is that of the plain way, to `within` of its length, as are loss and entropy."""
    import torch

    def check(trainer, within: float) -> None:
        traj = trainer.score(trainer.act())
        assert trainer.source.trace_of(traj) is not None
        for slope in trainer.policy_flat.slopes.values():
            slope.fill_(torch.nan)
        quick, noted = trainer._judge_by_trace(traj, True)
        found = trainer.policy_flat.values.grad.clone()
        with trainer._steady_dynamics():
            loss, figures = trainer.judge(traj, True)
        trainer.policy_flat.differentiate(loss)
        want = trainer.policy_flat.values.grad
        assert torch.allclose(quick, loss, rtol=1e-4)
        for one, other in zip(noted, figures, strict=True):  # log Z, score, log-reward, length, entropy
            assert torch.allclose(one.to(other), other, rtol=1e-4, atol=1e-5)
        assert float((found - want).norm()) <= within * float(want.norm())

    return check


def pytest_collection_modifyitems(items):
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
