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


def pytest_collection_modifyitems(items):
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
