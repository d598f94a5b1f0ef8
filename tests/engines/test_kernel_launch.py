"""What the host tells the kernels of an iteration, without a GPU: arguments are of the kinds that each declares, and launches fit the chip."""

from __future__ import annotations

import contextlib
import re
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stochflow.engines.cuda import driver as cuda_source
from stochflow.engines.cuda import gradient as balance_kernel
from stochflow.engines.cuda import noise as noise_kernel
from stochflow.engines.cuda import update as adam_kernel
from stochflow.engines.cuda import walk as rollout_kernel
from stochflow.engines.flat import FlatParameters
from stochflow.learn.objectives import DetailedBalance, TrajectoryBalance
from stochflow.nets.lookup import Lookup
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known, Neural
from stochflow.scores.rewards import Linear
from stochflow.types import Task
from stochflow.worlds.channels import Exact, Slip
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

MANY = "".join(chr(0x100 + i) for i in range(256))
SHARED = 232_448  # bytes a block may have
CASES: dict[str, tuple[Any, Any, Any, Any, int, int]] = {
    "a grid": (Grid(2, 8), MLP(128, 2), Slip(0.2), DetailedBalance(), 2, 33),
    "a long way": (Grid(4, 20), MLP(256, 2), Exact(), TrajectoryBalance(), 8, 512),
    "shared beginnings": (Strings("ACGT", 8), Lookup(64, 2, 64), Slip(0.25), DetailedBalance(), 5, 4096),
    "any length": (Strings("ABC", 7, 2), Lookup(32, 2, 16), Slip(0.25), DetailedBalance(), 1, 1024),
    "many letters": (Strings(MANY, 15), MLP(256, 2), Exact(), TrajectoryBalance(), 1, 16),
}


def declared(kernel: str) -> list[str]:
    """The parameters of a kernel, as its source has them."""
    sources = [file.read_text() for file in files("stochflow.engines.cuda").iterdir() if file.name.endswith(".cu")]
    found = [
        re.search(rf"__global__ void __launch_bounds__\([^\n]*\) {kernel}\((.*?)\) \{{", source, re.S)
        for source in sources
    ]
    (one,) = [match for match in found if match is not None]
    return [p.strip() for p in re.sub(r"//.*", "", one.group(1)).replace("\n", " ").split(",")]


@pytest.fixture
def launches(monkeypatch):
    """A list that fills with the launches of whatever kernels are called: (kernel, defines, grid, threads, arguments, shared memory)."""
    made: list[Any] = []

    def compiled(names, kernel, defines, shared, capability, device):
        return lambda grid, block, arguments, given: made.append(
            (kernel, dict(defines), grid, block[0], arguments, given)
        )

    chip = SimpleNamespace(shared_memory_per_block_optin=SHARED, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cuda_source, "compiled", compiled)
    return made


@pytest.mark.parametrize("case", CASES)
def test_arguments_are_of_the_kinds_that_kernels_declare(launches, case):
    env, net, channel, objective, seeds, batch = CASES[case]
    task, policy = (
        Task(env, channel, lambda state: state.float().sum(-1), Linear()),
        Policy(env, net, seeds=range(seeds)),
    )
    model = Neural(env, range(seeds)) if env.num_moves <= noise_kernel.MOST_MOVES else Known(env, channel)
    assert balance_kernel.fits(task, policy, Known(env, channel), objective, batch)
    flat = FlatParameters(policy, 1e-3, 10.0)
    with torch.no_grad():
        traj, trace = rollout_kernel._walk(task, policy, batch, 0.1, True)
    wanted = {"walk", "residuals", "back", "weights", "squares", "update"}
    log_k = None
    if isinstance(model, Neural):
        model_flat = FlatParameters(model, 1e-3, 10.0)
        log_k = noise_kernel.arrivals(model, model_flat.averaged(), traj)
        noise_kernel.differentiate(model, traj, model_flat)
        wanted |= {"arrivals", "learn"}
    if env.num_moves == len(MANY):
        wanted |= {"letters"}
    balance_kernel.gradient(task, policy, objective, traj, trace, traj.score, False, log_k, flat, True)
    where = adam_kernel.spans([(0, 100, 0), (100, 200, 1), (224, 300, 0), (300, 376, 1)], flat.values.device)
    state = [
        torch.zeros(376),
        torch.zeros(376),
        torch.zeros(2, 376),
        torch.zeros(376),
        None,
        torch.zeros(2),
        torch.zeros(1),
    ]
    pace = {"clip": 10.0, "lr": 1e-3, "tau": 1e3, "decay": 0.5, "recent": 8.0, "follow": 0.05}
    adam_kernel.update(*state, where, torch.zeros((), dtype=torch.float64), True, **pace)
    assert {launch[0] for launch in launches} == wanted
    for kernel, _, grid, threads, arguments, shared in launches:
        assert all(n >= 1 for n in grid)
        assert 32 <= threads <= 1024
        assert shared <= SHARED
        for kind, value in zip(declared(kernel), arguments, strict=True):
            kept = torch.Tensor if "*" in kind else float if kind.startswith("double") else int
            assert isinstance(value, kept), (kernel, kind, value)


@pytest.mark.parametrize("case", CASES)
def test_every_state_of_a_trajectory_has_a_thread(launches, case):
    env, net, _, objective, seeds, batch = CASES[case]
    policy = Policy(env, net, seeds=range(seeds))
    kernel, together, threads = balance_kernel._residuals(policy, batch, True, isinstance(objective, DetailedBalance))
    kernel((1, 1, 1), (threads, 1, 1), [], 0)
    defines = launches[-1][1]
    assert threads == together * defines["LANES"]
    at_once = defines["LANES"] // defines["GROUP"]
    assert defines["LANES"] % 32 == 0 or 32 % defines["LANES"] == 0
    assert at_once >= defines["N"] or defines["GROUP"] == 32  # the others come later, which detailed balance cannot
    assert defines["GROUP"] == 1 or not defines["DETAILED"]


def test_the_spans_of_an_update_cover_every_number_once_and_come_seed_by_seed():
    pieces = [(0, 3000, 0), (3000, 6000, 1), (6016, 6021, 0), (6021, 6026, 1)]
    for rows in adam_kernel.spans(pieces, torch.device("cpu")):
        seen = torch.full((6026,), -1)
        for first, last, seed in rows.tolist():
            assert first < last
            assert bool((seen[first:last] == -1).all())
            seen[first:last] = seed
        for first, last, seed in pieces:
            assert bool((seen[first:last] == seed).all())
        assert bool((seen[6000:6016] == -1).all())
        seeds = rows[:, 2]
        assert bool((seeds[1:] >= seeds[:-1]).all())
        assert int((seeds == 0).sum()) == int((seeds == 1).sum())
