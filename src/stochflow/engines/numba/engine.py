"""The engine's operations. Its loops are compiled when they are first used: only then numba is imported."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from stochflow.engines.base import Job, Request, Residuals, Rewards, Schedule, Support, Traces, Walk
from stochflow.engines.flat import FlatParameters
from stochflow.engines.numba import covers, settings
from stochflow.noise.dynamics import Dynamics
from stochflow.types import Trajectories


class Numba:
    """Compiled loops on the CPU; the seeds of a batch are shared among threads, and no number of threads changes a digit."""

    name = "numba"
    support = Support(
        worlds="grids and strings, without contexts",
        channels="any without memory",
        nets="mlp and lookup, of any depth and width",
        objectives="trajectory and detailed balance, marginal form and the joint one, which equals it",
        noise_models=f"any without memory; learned here: of one hidden layer and at most {covers.MOST_MOVES} moves",
        limits=f"CPU; float32; batch times width of at most {covers.MOST}",
    )

    def __init__(self) -> None:
        self._updates: WeakKeyDictionary[FlatParameters, Any] = WeakKeyDictionary()

    def unavailable(self) -> str | None:
        try:
            numba = settings.shielded()
        except ImportError as error:  # it is not there, or does not go with this numpy
            missing = isinstance(error, ModuleNotFoundError) and error.name == "numba"
            return "numba is not installed" if missing else f"numba cannot be imported ({error})"
        return "NUMBA_DISABLE_JIT is set" if numba.config.DISABLE_JIT else settings.why_not()

    def why_not(self, job: Job) -> str | None:
        reason = covers.learns(job)
        if reason is None:
            from stochflow.engines.numba import ready

            ready.walks(job.policy)
            ready.gradients(job)
        return reason

    def why_not_walk(self, request: Request) -> str | None:
        reason = covers.walks(request)
        if reason is None:
            from stochflow.engines.numba import ready

            ready.walks(request.policy)
        return reason

    def why_not_noise(self, dynamics: Dynamics) -> str | None:
        reason = covers.models(dynamics)
        if reason is None:
            from stochflow.engines.numba import ready

            ready.noise(dynamics)
        return reason

    def why_not_update(self, flat: FlatParameters) -> str | None:
        return "the gradient is taken by autograd, beside which a compiled update gains little"

    def walk(self, request: Request) -> Walk:
        from stochflow.engines.numba.walk import walk_once

        return walk_once(request)

    def traces(self, job: Job) -> Traces:
        from stochflow.engines.numba.walk import NumbaTraces

        return NumbaTraces(job.weights, job.policy, job.batch)

    def gradient(self, job: Job, walk: Walk, rewards: Rewards, log_k: Tensor | None, note: bool) -> Residuals:
        from stochflow.engines.numba.gradient import gradient

        return gradient(job, walk, rewards, log_k, note)

    def arrivals(self, dynamics: Dynamics, flat: FlatParameters | None, traj: Trajectories) -> Tensor:
        from stochflow.engines.numba.noise import arrivals

        return arrivals(dynamics, dict(dynamics.named_parameters()) if flat is None else flat.averaged(), traj)

    def learn_noise(self, dynamics: Dynamics, flat: FlatParameters, traj: Trajectories) -> Tensor:
        from stochflow.engines.numba.noise import learn

        return learn(dynamics, flat, traj)

    def update(self, flat: FlatParameters, step: Tensor, ends: bool) -> Tensor:
        norms = self._update(flat).step(flat, step.item())
        if ends:
            step += 1
        return norms

    def many(self, job: Job, schedule: Schedule, most: int) -> int:
        from stochflow.engines.numba.many import many

        noise = None if job.noise_weights is None else self._update(job.noise_weights)
        return many(job, schedule, most, self._update(job.weights), noise)

    def _update(self, flat: FlatParameters) -> Any:
        from stochflow.engines.numba.update import Update

        if flat not in self._updates:
            self._updates[flat] = Update(flat)
        return self._updates[flat]
