"""What the host tells the rollout kernel, without a GPU: the launches cover all steps and all trajectories, and fit the chip."""

from __future__ import annotations

import re
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stochflow.engines.cuda import walk as rollout_kernel
from stochflow.nets.lookup import Lookup
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.scores.rewards import Linear
from stochflow.types import Fading, Task
from stochflow.worlds.channels import Exact, Slip
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

MANY = "".join(chr(0x100 + i) for i in range(256))
CHIPS = {"large": 232_448, "small": 101_376}  # bytes of shared memory a block may have
CASES: list[tuple[Any, Any, Any, int, int]] = [
    (Grid(2, 8), MLP(16, 2), Slip(0.2), 2, 33),
    (Grid(4, 20), MLP(256, 2), Exact(), 1, 16),
    (Grid(4, 20), MLP(256, 2), Exact(), 8, 512),
    (Strings("ACGT", 8), MLP(256, 2), Exact(), 1, 4096),
    (Strings("ACGT", 8), Lookup(64, 2, 32), Slip(0.25), 5, 4096),
    (Strings("ABC", 12, 2), MLP(64, 2), Exact(), 2, 3000),
    (Strings(MANY, 15), MLP(256, 2), Exact(), 1, 16),
    (Strings(MANY, 15), MLP(256, 2), Exact(), 1, 4096),
    (Strings(MANY[:40], 5), MLP(32, 2), Exact(), 2, 400),
]


@pytest.fixture
def launched(monkeypatch):
    """Runs the host's side of a walk; the launches it would make: (defines, grid, threads, arguments, bytes of shared memory)."""

    def walk(task: Task, policy: Policy, batch: int, explore: Any, trace: bool, most: int) -> list[Any]:
        found: list[Any] = []

        def compiled(names, kernel, defines, shared, capability, device):
            return lambda grid, block, arguments, given: found.append((dict(defines), grid, block[0], arguments, given))

        chip = SimpleNamespace(shared_memory_per_block_optin=most, multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(rollout_kernel.cuda_source, "compiled", compiled)
        assert rollout_kernel.fits(task, policy)
        made = rollout_kernel._walk(task, policy, batch, explore, trace)
        assert (made is None) == (not found)
        return found

    return walk


def plain(state):
    return state.float().sum(-1)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("trace", [False, True])
def test_launches_cover_all_steps_and_all_trajectories_and_fit_the_chip(launched, chip, case, trace):
    env, net, channel, seeds, batch = CASES[case]
    policy = Policy(env, net, seeds=range(seeds))
    launches = launched(Task(env, channel, plain, Linear()), policy, batch, 0.1, trace, CHIPS[chip])
    assert 1 <= len(launches) <= 2
    at = 0
    for defines, grid, threads, _, shared in launches:
        assert defines["BEGIN"] == at < defines["END"]
        assert defines["HANDS_ON"] == (defines is not launches[-1][0])
        assert defines["NETWORK"] == (at >= defines["EARLY"])
        at = defines["END"]
        assert 0 < shared <= CHIPS[chip]
        assert defines["ROWS"] <= threads // 32
        assert grid[0] >= 1
        assert grid[0] <= -(-batch // defines["ROWS"])  # a block without a trajectory would be idle
        assert grid[1] == seeds
        assert 0 <= defines["HEAD_KEPT"] <= defines["H"] * defines["COLUMNS"] // threads // 2
    assert at == env.horizon + (trace and not env.tree)


@pytest.mark.parametrize("explore", [None, 0.1, Fading(1, 200, torch.zeros((), dtype=torch.float64))])
def test_arguments_are_of_the_kinds_that_the_kernel_declares(launched, explore):
    source = files("stochflow.engines.cuda").joinpath("walk.cu").read_text()
    declared = re.search(r"walk\(\n(.*?)\) \{", source, re.S)
    assert declared is not None
    kinds = [p.strip() for p in re.sub(r"//.*", "", declared.group(1)).replace("\n", " ").split(",")]
    env = Strings("ACGT", 8)
    (launch,) = launched(
        Task(env, Exact(), plain, Linear()), Policy(env, MLP(64, 2)), 16, explore, True, CHIPS["large"]
    )
    for kind, value in zip(kinds, launch[3], strict=True):
        wanted = torch.Tensor if "*" in kind else float if kind.startswith("double") else int
        assert type(value) is wanted or (wanted is torch.Tensor and isinstance(value, wanted)), (kind, value)


@pytest.mark.parametrize("width", rollout_kernel.WIDTHS)
@pytest.mark.parametrize("letters", [32, 40, 100, 256])
def test_every_network_has_threads_for_a_large_head(width, letters):
    env = Strings(MANY[:letters], 4)
    task, policy = Task(env, Exact(), plain, Linear()), Policy(env, MLP(width, 2))
    assert rollout_kernel.fits(task, policy)
    assert rollout_kernel.columns(policy) <= 4 * rollout_kernel._threads(width)


def test_there_may_be_more_letters_than_threads():
    env = Strings(MANY, 3, 1)  # and STOP
    assert not rollout_kernel.fits(Task(env, Exact(), plain, Linear()), Policy(env, MLP(64, 2)))
