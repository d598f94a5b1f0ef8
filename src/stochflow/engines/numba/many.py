"""Several iterations in one compiled call: the loops of single iterations in their order, with the same random numbers.

They give what as many single iterations give, to the last digit. Seeds do not touch, so each goes through all its iterations alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.engines.base import Job, Schedule
from stochflow.engines.lower import Lowered
from stochflow.engines.numba import cache
from stochflow.engines.numba.covers import iterates
from stochflow.engines.numba.gradient import (
    Arguments,
    arguments,
    backward,
    balance_of,
    feature_gradients,
    residuals,
    shared,
    weight_gradients,
)
from stochflow.engines.numba.jit import Share, in_parts, loop, numba, part
from stochflow.engines.numba.noise import (
    NOWHERE,
    Batch,
    Model,
    Noise,
    model_of,
    new_noise,
    noise_forward,
    noise_gradient,
)
from stochflow.engines.numba.update import State, Update, rates, update
from stochflow.engines.numba.walk import NumbaTraces, Span, Workspace, draw, new_paths, walk
from stochflow.types import Explore, Fading

log = logging.getLogger("stochflow")

BEFORE = 2000  # iterations one by one, before this is compiled: a short run need not wait for it
MOST, NUMBERS = 64, 1 << 19  # iterations in one call, and random numbers
SECONDS = 0.05  # of a call, during which nothing interrupts it


class Head(NamedTuple):
    """A head [S, H + W, O] and its bias, and their copies in the form of `Net`."""

    weight: np.ndarray
    bias: np.ndarray
    hidden: np.ndarray
    table: np.ndarray
    copied_bias: np.ndarray


class Learned(NamedTuple):
    """What a learned model of the noise needs."""

    rules: Lowered
    batch: Batch
    averaged: Model
    model: Model
    noise: Noise
    log_k: np.ndarray
    nowhere: np.ndarray  # in its place, where it is not asked for
    gradient: Model
    losses: np.ndarray
    rates: np.ndarray
    state: State


class Policies(NamedTuple):
    """What the policy's part of an iteration works on."""

    span: Span
    walk: tuple[Any, ...]
    head: Head
    head_gradient: Head
    gradient: Arguments
    rates: np.ndarray
    state: State


@part
def _copy_head(seed, few, back, head):
    """A head into its copies or, `back`, from there."""
    width = head.hidden.shape[2] if few else head.hidden.shape[1]
    for i in range(head.weight.shape[1]):
        for o in range(head.weight.shape[2]):
            copy, line = (head.hidden, i) if i < width else (head.table, i - width)
            a, b = (o, line) if few else (line, o)
            if back:
                head.weight[seed, i, o] = copy[seed, a, b]
            else:
                copy[seed, a, b] = head.weight[seed, i, o]
    for o in range(head.weight.shape[2]):
        if back:
            head.bias[seed, 0, o] = head.copied_bias[seed, 0, o]
        else:
            head.copied_bias[seed, 0, o] = head.bias[seed, 0, o]


@loop
def iterations(seeds, count, finished, policy, noise):
    """So many iterations of some seeds, counted in `finished` [S]; `noise`: None where none is learned."""
    world, begin = policy.gradient.residuals[0], policy.gradient.residuals[1]
    rows = policy.gradient.backward[1]
    for seed in range(seeds.first, seeds.last):
        for k in range(count):
            share = Share(seed, seed + 1, 0, 1)
            _copy_head(seed, world.few, False, policy.head)
            walk(share, k, policy.span, *policy.walk)
            rows[seed] = begin[seed, world.asked]
            if noise is not None:
                noise_forward(share, noise.rules, noise.batch, noise.averaged, noise.noise, noise.log_k)
            residuals(share, *policy.gradient.residuals)
            backward(share, *policy.gradient.backward)
            weight_gradients(share, *policy.gradient.weights)
            feature_gradients(share, *policy.gradient.features)
            _copy_head(seed, world.few, True, policy.head_gradient)
            update(share, True, True, k, policy.rates, policy.state)
            if noise is not None:
                batch, model = noise.batch, noise.model
                noise_forward(share, noise.rules, batch, model, noise.noise, noise.nowhere)
                noise_gradient(share, noise.rules, batch, batch.alive, model, noise.noise, noise.gradient, noise.losses)
                update(share, True, True, k, noise.rates, noise.state)
            finished[seed] += 1


class Many:
    """The iterations of one job in one workspace."""

    def __init__(self, job: Job, space: Workspace, policy: Update, noise: Update | None):
        self.job, self.space = job, space
        self.noise: Callable[[float, int], Learned] | None = None
        assert job.worth is not None
        env, head, flat = job.task.env, job.policy.head, job.noise_weights
        self.paths = paths = new_paths(env, *space.shape)
        self.batch = Batch(*paths[:4])
        log_k = np.empty((*paths.moves.shape, env.num_moves), dtype=np.float32) if flat is not None else None
        balance = balance_of(job.objective, space, job.worth[1].numpy(), True, log_k, job.weights)
        self.gradient, net, buffers = arguments(space, paths, balance), space.net, space.found
        (hidden, table), copied = net.stages[-2:], net.biases[-1]
        self.head = Head(head.weight.detach().numpy(), head.bias.detach().numpy(), hidden, table, copied)
        (weight, bias), (hidden, table) = buffers.head, buffers.stages[-2:]
        self.head_gradient = Head(weight, bias, hidden, table, buffers.biases[-1])
        self.state = policy.state
        if flat is not None and noise is not None and log_k is not None:
            models = model_of(flat.averaged()), model_of(dict(flat.named))
            memory, losses = new_noise(models[0], paths.moves.shape), np.empty(space.shape[0], dtype=np.float32)
            fixed: tuple[Any, ...] = (
                space.world.rules,
                self.batch,
                *models,
                memory,
                log_k,
                NOWHERE,
                model_of(flat.gradients),
                losses,
            )
            self.noise = lambda done, count: Learned._make((*fixed, rates(flat, done, count), noise.state))
        numbers = space.shape[0] * space.batch * env.horizon * (2 * env.num_moves + 2)
        self.most, self.now = max(1, min(MOST, NUMBERS // numbers)), 1  # in one call: the first call is timed
        self.ready = False
        given = (Share(0, 1), 0, self._finished(), *self._given(0.0, 0, None))
        signature = tuple(numba.typeof(x) for x in given)
        threading.Thread(target=self._compile, args=(signature,), name="stochflow-compile").start()

    def serves(self, job: Job, space: Workspace) -> bool:
        """Whether it is of this job and this workspace, with the arrays of this gradient."""
        names = ("task", "policy", "dynamics", "objective", "weights", "noise_weights", "worth")
        same = all(getattr(job, name) is getattr(self.job, name) for name in names)
        return same and space is self.space and space.found.flat is job.weights

    def run(self, schedule: Schedule, count: int) -> int:
        """So many iterations."""
        finished, given = self._finished(), self._given(schedule.done, count, schedule.explore)
        begun = time.perf_counter()
        try:
            in_parts(lambda s, e: iterations(Share(s, e), count, finished, *given), self.space.shape[0])
        finally:
            for flat in (self.job.weights, self.job.noise_weights):
                if flat is not None:
                    flat.adam_step += int(finished.min())
                    flat.changed()
        self.now = max(1, min(self.most, int(SECONDS * count / max(time.perf_counter() - begun, 1e-9))))
        return count

    def _finished(self) -> np.ndarray:
        return np.zeros(self.space.shape[0], dtype=np.int64)

    def _given(self, done: float, count: int, explore: Explore) -> tuple[Policies, Learned | None]:
        """What so many iterations work on; their random numbers are drawn."""
        space, world = self.space, self.space.world
        chances = None if explore is None else [_chance(explore, done + k) for k in range(count)]
        draws, after = draw(self.job.task, space, chances, count)
        if after is not None:
            torch.default_generator.manual_seed(after)
        steps = (world, space.net, space.rows, self.paths, draws)
        own = rates(self.job.weights, done, count)
        policy = Policies(Span(0, world.asked), steps, self.head, self.head_gradient, self.gradient, own, self.state)
        return policy, None if self.noise is None else self.noise(done, count)

    def _compile(self, signature: tuple[Any, ...]) -> None:
        """In a thread of its own, while iterations go on one by one."""
        try:
            try:
                iterations.compile(signature)
            except Exception:  # a damaged file of the cache, for one
                cache.clear()
                iterations.compile(signature)
            self.ready = True
        except Exception:
            log.warning("iterations go one by one: several in one call do not compile", exc_info=True)


def many(job: Job, schedule: Schedule, most: int, policy: Update, noise: Update | None) -> int:
    """`Engine.many`: 0 before it is compiled, and where threads share the work on one seed, which they do one by one."""
    traces = schedule.traces
    if not isinstance(traces, NumbaTraces) or most <= 0 or traces.walks < BEFORE:
        return 0
    space = traces.space
    if space.found is None or shared(space) > 1:
        return 0
    if traces.many is None or (isinstance(traces.many, Many) and not traces.many.serves(job, space)):
        traces.many = iterates(job) or Many(job, space, policy, noise)
    if isinstance(traces.many, str) or not traces.many.ready:
        return 0
    return traces.many.run(schedule, min(most, traces.many.now))


def _chance(explore: Fading | Tensor | float, step: float) -> float:
    return explore.at(step) if isinstance(explore, Fading) else float(explore)
