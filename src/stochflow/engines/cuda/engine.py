"""The engine of NVIDIA GPUs: hand-written kernels for the walk, the gradient, the noise model and the update."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from stochflow.engines.base import Job, Request, Residuals, Rewards, Schedule, Support, Traces, Walk, first
from stochflow.engines.cuda import driver, gradient, noise, update, walk
from stochflow.engines.cuda.walk import words
from stochflow.engines.flat import FlatParameters
from stochflow.noise.dynamics import Dynamics
from stochflow.types import Trajectories


class Cuda:
    """Its operations are those of `Eager` in a few launches each; `why_not_...` also compile what they accept."""

    name = "cuda"
    support = Support(
        worlds="grids and strings, without contexts",
        channels="exact, slip",
        nets=f"mlp and (on strings) lookup, two hidden layers of {words(walk.WIDTHS)}; gradients from {gradient.LEAST_WIDTH} on",
        objectives="trajectory and detailed balance, marginal form and the joint one, which equals it",
        noise_models=f"any without memory; learned here: of one hidden layer ({words(noise.WIDTHS)}) and at most {noise.MOST_MOVES} moves",
        limits=f"GPU of compute capability {'.'.join(map(str, driver.LEAST_CAPABILITY))} or more; float32; {walk.MOST_MOVES} moves "
        f"({walk.SMALL_HEAD} outputs on grids, with a table, and for detailed balance); {walk.MOST_COLUMNS} state columns; "
        f"{gradient.MOST_BATCH} trajectories per seed",
    )

    def __init__(self) -> None:
        self._spans: WeakKeyDictionary[FlatParameters, update.Spans] = WeakKeyDictionary()

    def unavailable(self) -> str | None:
        return driver.unavailable()

    def why_not_walk(self, request: Request) -> str | None:
        if request.policy.device.type != "cuda":
            return "the policy is on the CPU"
        if request.temper is not None:
            return "cuda does not cover a flattened policy"
        if request.row is not None or request.batch < 1:
            return "cuda covers walks without contexts, of at least one trajectory"
        if isinstance(request.explore, Tensor) and request.explore.numel() != 1:
            return "cuda covers one probability of exploration for all trajectories"
        return walk.why_not(request.task, request.policy) or walk.compile(request)

    def why_not(self, job: Job) -> str | None:
        """Of a whole iteration by trace: the traced walk and the updates are compiled too."""
        probe = Request(job.task, job.policy, job.batch, traces=walk.CudaTraces(job.weights))
        flats = [flat for flat in (job.weights, job.noise_weights) if flat is not None]
        return (
            (job.plain_source or None)
            or self.why_not_walk(probe)
            or gradient.why_not(job)
            or first(*[self.why_not_update(flat) for flat in flats])
        )

    def why_not_noise(self, dynamics: Dynamics) -> str | None:
        if not any(p.is_cuda for p in dynamics.parameters()):
            return "the model of the noise has no weights on the GPU"
        return noise.why_not(dynamics)

    def why_not_update(self, flat: FlatParameters) -> str | None:
        if flat.device.type != "cuda":
            return "the weights are on the CPU"
        if flat.values.dtype != torch.float32 or flat.values.numel() >= 2**31:
            return "cuda updates fewer than 2^31 weights, in float32"
        update.kernels(flat)
        return None

    def walk(self, request: Request) -> Walk:
        return walk.walk(request)

    def traces(self, job: Job) -> Traces:
        return walk.CudaTraces(job.weights)

    def gradient(self, job: Job, walk: Walk, rewards: Rewards, log_k: Tensor | None, note: bool) -> Residuals:
        return gradient.gradient(job, walk, rewards, log_k, note)

    def arrivals(self, dynamics: Dynamics, flat: FlatParameters | None, traj: Trajectories) -> Tensor:
        assert flat is not None, "why_not_noise refuses a model without weights"
        return noise.arrivals(dynamics, flat.averaged(), traj)

    def learn_noise(self, dynamics: Dynamics, flat: FlatParameters, traj: Trajectories) -> Tensor:
        return noise.learn(dynamics, flat, traj)

    def update(self, flat: FlatParameters, step: Tensor, ends: bool) -> Tensor:
        if flat not in self._spans:
            self._spans[flat] = update.spans(flat.seed_spans(), flat.device)
        return update.update(flat, self._spans[flat], step, ends)

    def many(self, job: Job, schedule: Schedule, most: int) -> int:
        return 0
