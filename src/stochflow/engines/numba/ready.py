"""Loops compiled before they are needed, so that one that does not compile is known when an engine is chosen.

Each is called for no seed at all: that compiles it, or reads it from the cache, and computes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stochflow.engines.base import Compile, Job
from stochflow.engines.numba.gradient import (
    arguments,
    backward,
    balance_of,
    feature_gradients,
    residuals,
    weight_gradients,
)
from stochflow.engines.numba.jit import Share, call
from stochflow.engines.numba.noise import NOWHERE, Batch, model_of, new_noise, noise_forward, noise_gradient, rules_of
from stochflow.engines.numba.update import Update, rates, update
from stochflow.engines.numba.walk import Draws, Span, Workspace, new_paths, walk
from stochflow.nets.lookup import inner_mlp
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Dynamics

_compiled: set[tuple[str, int]] = set()  # operations and numbers of layers: machine code differs in nothing else


def walks(policy: Policy) -> None:
    """`Compile` where the loop of a walk does not compile."""
    key = "walk", len(inner_mlp(policy.trunk).layers)
    if key not in _compiled:
        space = Workspace(policy, 1, False)
        slip: Any = np.float32(0)
        draws = Draws(np.empty((1, 0), np.float32), -1, np.empty(1, np.float32), -1, slip, space.even)
        paths = new_paths(policy.env, *space.shape)
        _compile(walk, 0, Span(0, 0), space.world, space.net, space.rows, paths, draws)
        _compiled.add(key)


def gradients(job: Job) -> None:
    """The same for the loops of a gradient, and of the update after it."""
    key = "gradient", len(inner_mlp(job.policy.trunk).layers)
    if key not in _compiled:
        space = Workspace(job.policy, 1, True)
        balance = balance_of(job.objective, space, np.empty(0, np.float32), True, None, job.weights)
        given = arguments(space, new_paths(job.task.env, *space.shape), balance)
        _compile(residuals, *given.residuals)
        _compile(backward, *given.backward)
        _compile(weight_gradients, *given.weights)
        _compile(feature_gradients, *given.features)
        _compile(update, True, True, 0, rates(job.weights, 0, 1), Update(job.weights).state)
        _compiled.add(key)


def noise(dynamics: Dynamics) -> None:
    """The same for the loops of a learned model of the noise."""
    key = "noise", 1
    if key not in _compiled:
        rules, model = rules_of(dynamics), model_of(dict(dynamics.named_parameters()))
        paths = new_paths(dynamics.env, len(model.first), 1)
        memory, batch = new_noise(model, paths.moves.shape), Batch(*paths[:4])
        losses = np.empty(len(model.first), np.float32)
        _compile(noise_forward, rules, batch, model, memory, NOWHERE)
        _compile(noise_gradient, rules, batch, batch.alive, model, memory, model, losses)
        _compiled.add(key)


def _compile(loop: Any, *given: Any) -> None:
    try:
        call(loop, Share(0, 0), *given)
    except Exception as error:
        raise Compile(str(error)) from error
