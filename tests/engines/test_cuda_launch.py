"""The host's side of the CUDA engine, without a GPU: sources and defines, launches that fit the device, arguments, errors."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stochflow.engines.base import Compile, Job, Request, Rewards
from stochflow.engines.choose import choose
from stochflow.engines.cuda import driver, gradient, noise, update, walk
from stochflow.engines.cuda.engine import Cuda
from stochflow.engines.flat import FlatParameters
from stochflow.engines.numba.engine import Numba
from stochflow.errors import UserError
from stochflow.learn.objectives import PUBLISHED, DetailedBalance, SubTrajectoryBalance, TrajectoryBalance
from stochflow.nets.lookup import Lookup
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known, Neural, Tabular
from stochflow.scores.rewards import Linear
from stochflow.types import Fading, Task
from stochflow.worlds.channels import Confusion, Exact, Slip
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.grid import Grid
from stochflow.worlds.memory import Fatigue
from stochflow.worlds.strings import Strings

MANY = "".join(chr(0x100 + i) for i in range(256))
CHIPS = {"large": 232_448, "small": 101_376}  # bytes of shared memory per block
CASES: dict[str, tuple[Any, Any, Any, Any, int, int]] = {
    "a grid": (Grid(2, 8), MLP(128, 2), Slip(0.2), DetailedBalance(), 2, 33),
    "a far corner": (Grid(4, 20), MLP(256, 2), Exact(), TrajectoryBalance(), 8, 512),
    "shared beginnings": (Strings("ACGT", 8), Lookup(64, 2, 64), Slip(0.25), DetailedBalance(), 5, 4096),
    "any length": (Strings("ABC", 7, 2), Lookup(32, 2, 16), Slip(0.25), DetailedBalance(), 1, 1024),
    "many letters": (Strings(MANY, 15), MLP(256, 2), Exact(), TrajectoryBalance(), 1, 16),
}
WALKS: list[tuple[Any, Any, Any, int, int]] = [
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
DTYPES = {"float": torch.float32, "i64": torch.long, "int": torch.int32, "double": torch.float64}
UNREAD = {"log_ks", "decisions", "table", "entries", "early", "reals", "counts", "d_table"}  # may be a stand-in


def score(state):
    return state.float().sum(-1)


def job_of(env, net, channel, objective, seeds, batch, dynamics=None) -> Job:
    task, policy = Task(env, channel, score, Linear()), Policy(env, net, seeds=range(seeds))
    dynamics = Known(env, channel) if dynamics is None else dynamics
    return Job(task, policy, dynamics, objective, batch, FlatParameters(policy, 1e-3, 10.0), None)


def declared(file: str, kernel: str) -> list[str]:
    """The parameters of a kernel, as its source has them."""
    text = re.sub(r"//.*", "", files("stochflow.engines.cuda").joinpath(file).read_text())
    found = re.search(rf"__global__ void __launch_bounds__\([^\n]*\) {kernel}\((.*?)\) \{{", text, re.S)
    assert found is not None
    return [" ".join(p.split()) for p in found.group(1).split(",")]


@pytest.fixture
def launches(monkeypatch):
    """Fills with the launches of the kernels that are called; its entries are SimpleNamespaces."""
    made: list[Any] = []
    made_of = SimpleNamespace(shared_memory_per_block_optin=CHIPS["large"], multi_processor_count=132)

    def kernel(file, name, defines, shared, device):
        def launch(grid, threads, arguments):
            made.append(SimpleNamespace(file=file, name=name, defines=defines, grid=grid, threads=threads,
                                        arguments=arguments, shared=shared))  # fmt: skip

        return launch

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: made_of)
    for module in (walk, gradient, noise, update):
        monkeypatch.setattr(module, "kernel", kernel)
    return SimpleNamespace(made=made, chip=made_of)


def all_launches(case: str) -> set[str]:
    """Every operation once; the kernels that this should launch."""
    env, net, channel, objective, seeds, batch = CASES[case]
    job = job_of(env, net, channel, objective, seeds, batch)
    assert walk.why_not(job.task, job.policy) is None
    assert gradient.why_not(job) is None
    made = walk.walk(Request(job.task, job.policy, batch, 0.1, traces=walk.CudaTraces(job.weights)))
    walk.walk(Request(job.task, job.policy, batch))
    wanted, log_k = {"walk", "residuals", "backward", "weight_gradients", "squares", "update"}, None
    if env.num_moves <= noise.MOST_MOVES:
        model = Neural(env, range(seeds))
        flat = FlatParameters(model, 1e-3, 10.0)
        assert noise.why_not(model) is None
        log_k = noise.arrivals(model, flat.averaged(), made.trajectories)
        noise.learn(model, flat, made.trajectories)
        wanted |= {"arrivals", "learn"}
    if env.num_moves == len(MANY):
        wanted |= {"letter_gradients"}
    gradient.gradient(job, made, Rewards(made.trajectories.score, False), log_k, True)
    Cuda().update(job.weights, torch.zeros((), dtype=torch.float64), True)
    return wanted


@pytest.mark.parametrize("case", CASES)
def test_arguments_are_of_the_kinds_that_kernels_declare(launches, case):
    wanted = all_launches(case)
    assert {launch.name for launch in launches.made} == wanted
    for launch in launches.made:
        assert all(n >= 1 for n in launch.grid)
        assert 32 <= launch.threads <= 1024
        assert launch.shared <= CHIPS["large"]
        for kind, value in zip(declared(launch.file, launch.name), launch.arguments, strict=True):
            what = (launch.name, kind, value if not isinstance(value, torch.Tensor) else value.dtype)
            if "*" not in kind:
                assert type(value) is {"double": float, "int": int}[kind.split()[0]], what
                continue
            assert isinstance(value, torch.Tensor), what
            assert value.is_contiguous(), what
            pointed, name = re.fullmatch(r"(?:const )?([\w ]+)\* (\w+)", kind).groups()  # type: ignore[union-attr]
            if name not in UNREAD:
                assert value.dtype == DTYPES.get(pointed, torch.bool), what


@pytest.mark.parametrize("case", CASES)
def test_a_source_reads_the_defines_that_it_is_given_and_no_others(launches, case):
    all_launches(case)
    for launch in launches.made:
        text = driver.Source(launch.file, launch.name, ()).text()
        text = re.sub(r'//.*|"[^"]*"', "", text)
        own = set(re.findall(r"#define (\w+)", text)) | set(re.findall(r"\b(?:int|bool) ([A-Z][A-Z_]*)\b", text))
        own |= set(re.findall(r"([A-Z][A-Z_]*) = ", text))
        read = set(re.findall(r"\b[A-Z][A-Z0-9_]*\b", text)) - own
        shared = {"LISTED", "LEAST", "M", "T", "STOP", "APPEND", "SIZE", "D"}  # a kernel may do without
        assert read - set(launch.defines) == set(), launch.name
        assert set(launch.defines) - read <= shared, launch.name


@pytest.mark.parametrize("case", CASES)
def test_every_state_of_a_trajectory_has_a_thread(launches, case):
    env, net, channel, objective, seeds, batch = CASES[case]
    of = gradient.sizes(job_of(env, net, channel, objective, seeds, batch))
    kernel, together, threads = gradient._residuals_kernel(of)
    kernel((1, 1, 1), threads, [])
    defines = launches.made[-1].defines
    assert threads == together * defines["LANES"]
    assert defines["LANES"] % 32 == 0 or 32 % defines["LANES"] == 0
    assert defines["LANES"] // defines["GROUP"] >= defines["N"] or defines["GROUP"] == 32  # the others come later,
    assert defines["GROUP"] == 1 or not defines["DETAILED"]  # which detailed balance cannot


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", range(len(WALKS)))
@pytest.mark.parametrize("traced", [False, True])
def test_launches_cover_all_steps_and_all_trajectories_and_fit_the_chip(launches, chip, case, traced):
    launches.chip.shared_memory_per_block_optin = CHIPS[chip]
    env, net, channel, seeds, batch = WALKS[case]
    job = job_of(env, net, channel, TrajectoryBalance(), seeds, batch)
    assert walk.why_not(job.task, job.policy) is None
    traces = walk.CudaTraces(job.weights) if traced else None
    found = walk.walk(Request(job.task, job.policy, batch, 0.1, traces=traces))
    assert (found.trace is not None) == traced
    assert 1 <= len(launches.made) <= 2
    at = 0
    for launch in launches.made:
        defines = launch.defines
        assert defines["BEGIN"] == at < defines["END"]
        assert defines["HANDS_ON"] == (launch is not launches.made[-1])
        assert defines["NETWORK"] == (at >= defines["EARLY"])
        at = defines["END"]
        assert 0 < launch.shared <= CHIPS[chip]
        assert defines["ROWS"] <= launch.threads // 32
        assert 1 <= launch.grid[0] <= -(-batch // defines["ROWS"])  # a block without a trajectory would be idle
        assert launch.grid[1] == seeds
        assert 0 <= defines["HEAD_KEPT"] <= defines["H"] * defines["COLUMNS"] // launch.threads // 2
    assert at == env.horizon + (traced and not env.tree)


@pytest.mark.parametrize("explore", [None, 0.1, Fading(1, 200, torch.tensor(7.0, dtype=torch.float64))])
def test_exploration_is_what_the_kernel_computes(explore):
    """start / (1 + number / tau), or with tau 0 the number itself."""
    number, start, tau = walk._exploration(explore, torch.tensor(3.0, dtype=torch.float64))
    chance = start * tau / (tau + float(number)) if tau > 0 else float(number)
    assert chance == pytest.approx({None: 0.0, 0.1: 0.1}.get(explore, 200 / 207))


@pytest.mark.parametrize("width", walk.WIDTHS)
@pytest.mark.parametrize("letters", [32, 40, 100, 256])
def test_every_network_has_threads_for_a_large_head(width, letters):
    policy = Policy(Strings(MANY[:letters], 4), MLP(width, 2))
    assert walk.why_not(Task(policy.env, Exact(), score, Linear()), policy) is None
    assert walk.network(policy).columns <= 4 * min(256, width * width // 4)


def test_the_spans_of_an_update_cover_every_number_once_and_come_seed_by_seed():
    pieces = [(0, 3000, 0), (3000, 6000, 1), (6016, 6021, 0), (6021, 6026, 1)]
    for rows in update.spans(pieces, torch.device("cpu")):
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


# reasons in words -----------------------------------------------------------------------------------------------------

WALK_REASONS = {
    "does not cover the environment Conditioned": (
        Conditioned(Strings("AB", 3), torch.tensor([[0.0], [1.0]])), MLP(64, 2), Exact(),
    ),
    "does not cover a channel with memory": (Strings("AB", 3), MLP(64, 2), Fatigue(0.2, 0.4)),
    "Exact and Slip, not Confusion": (Strings("AB", 3), MLP(64, 2), Confusion([[0.9, 0.1], [0.2, 0.8]])),
    "two hidden layers, not 3": (Strings("AB", 3), MLP(64, 3), Exact()),
    "16, 32, 64, 128 or 256, not 96": (Strings("AB", 3), MLP(96, 2), Exact()),
    "look-up table on strings": (Grid(2, 4), Lookup(64, 2, 64), Exact()),
    "width 16, 32, 64, 128 or 256, not 24": (Strings("AB", 3), Lookup(64, 2, 24), Exact()),
    "at most 256 outputs": (Strings(MANY, 3, 1), MLP(64, 2), Exact()),  # STOP is one more
}  # fmt: skip


@pytest.mark.parametrize("reason", WALK_REASONS)
def test_a_walk_is_refused_in_words(reason):
    env, net, channel = WALK_REASONS[reason]
    assert reason in str(walk.why_not(Task(env, channel, score, Linear()), Policy(env, net)))


def test_shared_memory_that_does_not_suffice_is_a_reason(launches):
    launches.chip.shared_memory_per_block_optin = 4096
    job = job_of(*CASES["a far corner"])
    assert "bytes of shared memory for the walk" in str(walk.compile(Request(job.task, job.policy, 512)))
    assert "bytes of shared memory for the gradient" in str(gradient.why_not(job))
    assert "shared memory" in str(noise.why_not(Neural(Grid(4, 20))))
    assert not launches.made


GRADIENT_REASONS: dict[str, tuple[Any, Any, Any, int]] = {
    "not SubTrajectoryBalance": (Strings("AB", 3), MLP(64, 2), SubTrajectoryBalance(), 16),
    "marginal form of a balance": (Strings("AB", 3), MLP(64, 2), DetailedBalance(PUBLISHED), 16),
    "32 or more, not 16": (Strings("AB", 3), MLP(16, 2), TrajectoryBalance(), 16),
    "at most 8192 trajectories": (Strings("AB", 3), MLP(64, 2), TrajectoryBalance(), 10_000),
    "detailed balance with at most 32": (Strings(MANY[:40], 5), MLP(64, 2), DetailedBalance(), 16),
}


@pytest.mark.parametrize("reason", GRADIENT_REASONS)
def test_a_gradient_is_refused_in_words(launches, reason):
    env, net, objective, batch = GRADIENT_REASONS[reason]
    assert reason in str(gradient.why_not(job_of(env, net, Exact(), objective, 1, batch)))


def test_noise_models_are_refused_in_words(launches):
    assert "not Tabular" in str(noise.why_not(Tabular(Grid(2, 8))))
    assert "one hidden layer, not 2" in str(noise.why_not(Neural(Grid(2, 8), layers=2)))
    assert "16, 32 or 64 hidden units, not 48" in str(noise.why_not(Neural(Grid(2, 8), hidden=48)))
    assert "at most 5 moves, not 10" in str(noise.why_not(Neural(Strings("ABCDEFGHIJ", 4))))


def test_what_is_on_the_cpu_is_refused():
    engine, job = Cuda(), job_of(*CASES["a grid"])
    assert engine.why_not_walk(Request(job.task, job.policy, 16)) == "the policy is on the CPU"
    assert engine.why_not(job) == "the policy is on the CPU"
    assert engine.why_not_update(job.weights) == "the weights are on the CPU"
    assert engine.why_not_noise(Neural(Grid(2, 8))) is not None
    assert engine.many(job, None, 5) == 0  # type: ignore[arg-type]


def test_a_trace_is_refused_after_the_weights_changed(launches):
    job = job_of(*CASES["a grid"])
    made = walk.walk(Request(job.task, job.policy, 33, traces=walk.CudaTraces(job.weights)))
    job.weights.changed()
    with pytest.raises(RuntimeError, match="walk again"):
        gradient.gradient(job, made, Rewards(made.trajectories.score, False), None, False)


# the driver -----------------------------------------------------------------------------------------------------------


class Library:
    """NVRTC and the CUDA driver, pretended: notes calls, and answers with `codes` by function name."""

    def __init__(self, **codes: int):
        self.codes, self.calls, self.seen = codes, list[str](), list[Any]()
        self.log = b'walk.cu(3): error: identifier "x" is undefined'

    def _answer(self, name: str) -> int:
        self.calls.append(name)
        return self.codes.get(name, 0)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("cu", "nvrtc")) or (name == "cuGetErrorString" and "words" in self.codes):
            raise AttributeError(name)
        return lambda *given: self._answer(name)

    def cuGetErrorString(self, code, found):
        found._obj.value = b"out of memory"
        return 0

    def cuLaunchKernel(self, function, *rest):
        *size, _stream, places, _extra = rest
        kinds = (ctypes.c_void_p, ctypes.c_int, ctypes.c_double)
        self.seen = [kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)]
        self.size = size
        return self._answer("cuLaunchKernel")


class Compiler:
    """NVRTC alone, which refuses."""

    def __init__(self, log: bytes):
        self.log = log

    def nvrtcCreateProgram(self, *given):
        return 0

    nvrtcDestroyProgram = nvrtcCreateProgram

    def nvrtcCompileProgram(self, program, count, options):
        assert [options[i] for i in range(count)] == [b"--gpu-architecture=sm_90", b"--std=c++17"]
        return 6

    def nvrtcGetProgramLogSize(self, program, size):
        size._obj.value = len(self.log) + 1
        return 0

    def nvrtcGetProgramLog(self, program, log):
        log.value = self.log
        return 0

    def nvrtcGetErrorString(self, code):
        return b"NVRTC_ERROR_COMPILATION"


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))


def test_arguments_are_packed_by_their_kinds(on_cuda, monkeypatch):
    library, tensor = Library(), torch.zeros(4)
    kernel = driver.Kernel(library, b"", "walk", 64, 0)
    assert "cuFuncSetAttribute" in library.calls
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    kernel((2, 3, 1), 128, [tensor, -7, 0.1])
    assert library.seen == [tensor.data_ptr(), -7, 0.1]
    assert library.size == [2, 3, 1, 128, 1, 1, 64]
    with pytest.raises(ValueError, match="contiguous"):
        kernel((1, 1, 1), 32, [torch.zeros(4, 4).T])
    with pytest.raises(TypeError, match="not str"):
        kernel((1, 1, 1), 32, ["seven"])


def test_a_tensor_on_the_cpu_is_refused(on_cuda):
    with pytest.raises(ValueError, match=r"kernel on cuda:0 was given a tensor on cpu"):
        driver.Kernel(Library(), b"", "walk", 0, 0)((1, 1, 1), 32, [torch.zeros(4)])


def test_a_thread_without_a_context_takes_the_device_own(on_cuda):
    library = Library(cuCtxGetDevice=201)
    driver.Kernel(library, b"", "walk", 0, 0)
    assert library.calls[:4] == ["cuCtxGetDevice", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    library = Library()
    driver.Kernel(library, b"", "walk", 0, 0)
    assert "cuCtxSetCurrent" not in library.calls


@pytest.mark.parametrize("function", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_a_status_is_an_error_in_the_drivers_words(on_cuda, function):
    with pytest.raises(RuntimeError, match="CUDA error 2: out of memory"):
        driver.Kernel(Library(**{function: 2}), b"", "walk", 0, 0)


def test_a_source_that_does_not_compile_is_an_error_in_the_compilers_words():
    with pytest.raises(Compile, match='identifier "x" is undefined'):
        driver.compiled(Compiler(Library().log), "", "walk.cu", (9, 0))
    with pytest.raises(Compile, match="NVRTC_ERROR_COMPILATION"):
        driver.compiled(Compiler(b""), "", "walk.cu", (9, 0))


def test_a_kernel_that_does_not_compile_leaves_the_iteration_to_the_next_engine(launches, monkeypatch, caplog):
    """From NVRTC's refusal to the sentence that a run prints, with a pretended device."""
    job = job_of(*CASES["a grid"])
    monkeypatch.setattr(Policy, "device", torch.device("cuda", 0))
    monkeypatch.setattr(walk, "kernel", driver.kernel)
    monkeypatch.setattr(driver, "unavailable", lambda: None)
    monkeypatch.setattr(Numba, "unavailable", lambda self: "numba is not installed")
    monkeypatch.setattr(
        driver, "nvrtc", lambda: Compiler(b"walk.cu(2): warning: unused\nwalk.cu(3): error: no such x\n")
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with caplog.at_level(logging.WARNING, "stochflow"):
        chosen, again = choose(job), choose(job)
    assert chosen.gradient.name == chosen.walk.name == again.gradient.name == "eager"
    assert chosen.sentence() == (
        "engine: eager, because cuda's gradient does not compile: walk.cu(3): error: no such x"
    )
    assert sum("walk.cu(2): warning" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(UserError, match=r"--engine cuda was asked for, but .* error: no such x: take --engine auto"):
        choose(job, "cuda")


def test_every_c_function_is_declared():
    """A pointer that is passed without a declared type would be cut to 32 bits."""
    text = files("stochflow.engines.cuda").joinpath("driver.py").read_text()
    used = set(re.findall(r"\.(cu[A-Z]\w+|nvrtc[A-Z]\w+)\(", text))
    assert used - {"nvrtcGetErrorString"} == set(driver.NVRTC) | set(driver.DRIVER)
    library = SimpleNamespace(**{name: SimpleNamespace() for name in driver.DRIVER})
    driver._declared(library, driver.DRIVER)
    assert library.cuLaunchKernel.restype is ctypes.c_int
    assert len(library.cuLaunchKernel.argtypes) == 11


def test_the_version_of_torch_is_looked_for_first(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    names = [name for name in driver._places() if "/" not in name]
    assert names[:4] == ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so.11", "libnvrtc.so"]


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Cuda().unavailable() == "torch sees no CUDA device"


def test_without_nvrtc_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(driver, "_places", lambda: iter(["libnvrtc.so.nowhere"]))
    driver.nvrtc.cache_clear()
    assert str(Cuda().unavailable()).startswith("NVRTC cannot be loaded: ")
    driver.nvrtc.cache_clear()
