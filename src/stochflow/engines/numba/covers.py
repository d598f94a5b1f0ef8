"""What the engine covers, as reasons in words. Nothing here needs numba."""

from __future__ import annotations

import torch

from stochflow.engines.base import Job, Request, first, unless
from stochflow.engines.flat import FlatParameters
from stochflow.engines.lower import lower
from stochflow.learn.objectives import JOINT, MARGINAL, DetailedBalance, TrajectoryBalance
from stochflow.nets.lookup import LookupTrunk, inner_mlp
from stochflow.nets.mlp import MLPTrunk
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Dynamics, Neural
from stochflow.ops import ALL_AT_ONCE
from stochflow.worlds.channels import Slip
from stochflow.worlds.env import Channel

MOST = 1 << 20  # activations of a seed's step
MOST_KEPT = 1 << 28  # activations of all layers, steps and seeds, should all rows be needed
MOST_LAYERS = 64  # each is compiled by itself: of a thousand LLVM makes minutes
MOST_MOVES = 16  # of a model of the noise: beyond, most pairs of action and move never occur, and autograd is faster
COMPILED = "its steps are compiled by torch.compile"


def walks(request: Request) -> str | None:
    """Why it cannot walk."""
    env, policy = request.task.env, request.policy
    trunk = getattr(policy, "trunk", None)
    rules, given = lower(env), type(trunk).__name__.strip("_").removesuffix("Trunk").lower()
    return first(
        unless(request.steps is None, COMPILED),
        unless(rules is not None and request.row is None, f"numba does not cover the environment {type(env).__name__}"),
        unless(type(policy) is Policy, f"numba does not cover the policy {type(policy).__name__}"),
        unless(type(trunk) in (MLPTrunk, LookupTrunk), f"numba covers MLP and lookup networks, not a {given}"),
    ) or first(
        unless(policy.device.type == "cpu", "numba runs on the CPU"),
        unless(policy.head.weight.dtype == torch.float32, "numba covers float32 only"),
        unless(policy.env is env or repr(policy.env) == repr(env), "the policy is of another environment"),
        unless(
            rules is not None and (rules.append or rules.numbered),
            "numba does not cover a lattice of 2^62 states or more",
        ),
        unless(request.task.channel.begin(env.initial((1, 1))) is None, "numba does not cover a channel with memory"),
        _fits(policy, request.batch),
    )


def _fits(policy: Policy, batch: int) -> str | None:
    env, width, layers = policy.env, policy.trunk.width, len(inner_mlp(policy.trunk).layers)
    if layers > MOST_LAYERS:
        return f"numba covers networks of up to {MOST_LAYERS} layers"
    kept = policy.num_seeds * batch * (env.horizon + 1) * width * layers
    drawn = policy.num_seeds * batch * env.horizon * env.num_moves
    small = batch * width <= MOST and kept <= MOST_KEPT and drawn <= ALL_AT_ONCE
    return unless(small, f"the batch is too large for numba ({batch} trajectories, {policy.num_seeds} seeds)")


def learns(job: Job) -> str | None:
    """Why it cannot take the gradient of what it walks."""
    objective, policy, task = job.objective, job.policy, job.task
    balance = type(objective) in (TrajectoryBalance, DetailedBalance)
    return first(
        unless(not job.compiled, COMPILED),
        unless(job.plain_source == "", job.plain_source),
        unless(balance, f"numba does not cover the objective {type(objective).__name__}"),
    ) or first(
        unless(
            objective.form in (MARGINAL, JOINT),  # the two are equal
            f"numba covers the marginal form of a balance, and the joint one, which equals it, not the {objective.form.name} one",
        ),
        unless(not policy.back_action, "numba does not cover a head for the action given the move"),
        unless(
            job.dynamics.begin(task.env.initial((policy.num_seeds, 1)).to(policy.device)) is None,
            "numba does not cover a model of the noise with memory",
        ),
        walks(Request(task, policy, job.batch)),
        updates(job.weights),
    )


def models(dynamics: Dynamics) -> str | None:
    """Why it cannot compute, or learn, a model of the noise."""
    if not isinstance(dynamics, Neural) or type(dynamics) is not Neural:
        return f"numba does not cover the noise model {type(dynamics).__name__}"
    weight, rules = dynamics.head.weight, lower(dynamics.env)
    return first(
        unless(rules is not None, f"numba does not cover the environment {type(dynamics.env).__name__}"),
        unless(weight.device.type == "cpu", "numba runs on the CPU"),
        unless(weight.dtype == torch.float32, "numba covers float32 only"),
        unless(len(dynamics.layers) == 1, "numba covers noise models of one hidden layer"),
        unless(dynamics.env.num_moves <= MOST_MOVES, f"numba covers noise models of up to {MOST_MOVES} moves"),
        unless(rules is not None and rules.numbered, "numba covers noise models of fewer than 2^62 states"),
    )


def updates(flat: FlatParameters) -> str | None:
    """Why it cannot update these parameters."""
    return first(
        unless(flat.device.type == "cpu", "numba runs on the CPU"),
        unless(flat.values.dtype == torch.float32, "numba covers float32 only"),
        unless(flat.follower is None, "numba does not cover a following copy of the weights"),
    )


def iterates(job: Job) -> str | None:
    """Why it cannot do several iterations in one call."""
    learned, dynamics = job.noise_weights is not None, job.dynamics
    return first(
        learns(job),
        unless(not job.replays_noise, "the noise model learns from earlier batches"),
        unless(job.worth is not None, "the rewards of all states are not known beforehand"),
        unless(known_ahead(job.task.channel), "the channel is asked at every step"),
        unless(learned or dynamics.exact, f"the noise model {type(dynamics).__name__} is asked at every iteration"),
        unless(type(dynamics).observe is Dynamics.observe, "the noise model observes every batch"),
        models(dynamics) if learned else None,
        None if job.noise_weights is None else updates(job.noise_weights),
    )


def known_ahead(channel: Channel) -> bool:
    """Whether what happens follows from random numbers drawn before the walk; else the channel is asked at every step."""
    return channel.exact or type(channel) is Slip
