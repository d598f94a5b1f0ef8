"""The few tuples that flow through the house.

Shape letters, used in every file:
    S seeds    B batch    T env.horizon    D state columns    M moves (= actions, STOP included)
    N any number of states    C context width    H hidden width    F feature width
States, moves and actions are int64; masks are bool, True = allowed; networks are float32;
exact laws, floors and metrics are float64. Leading dimensions are batch, always.

`action` is what the agent meant, `move` is what happened.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from stochflow.nets.policy import Policy
    from stochflow.noise.dynamics import Dynamics
    from stochflow.worlds.env import Channel, Env


class _Task(NamedTuple):
    env: Env
    channel: Channel
    oracle: Callable[[Tensor], Tensor]  # states [..., D] -> score [...]
    reward: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (score, state, step | None) -> log-reward [...]


class Task(_Task):
    """What is to be sampled: a geometry of moves, its noise, and a reward on finished objects.

    The channel is kept as it acts on the environment's states: under a condition it sees the inner state.
    """

    __slots__ = ()

    def __new__(cls, env: Env, channel: Channel, oracle: Any, reward: Any) -> Task:
        applied = getattr(env, "applied", None)
        return super().__new__(cls, env, channel if applied is None else applied(channel), oracle, reward)

    def _replace(self, **parts: Any) -> Task:
        return Task(**{**self._asdict(), **parts})


class Fading(NamedTuple):
    """A chance of start / (1 + step / tau), worked out where it is needed: in a kernel it costs nothing."""

    start: float
    tau: float
    step: Tensor  # 0-D

    def now(self) -> Tensor:
        return self.at(self.step)

    def on_cpu(self) -> float:
        """The same as a number, which costs less than operators."""
        return self.at(float(self.step))

    def at(self, step: Any) -> Any:
        return self.start * self.tau / (step + self.tau)


Explore: TypeAlias = "Fading | Tensor | float | None"  # probability of a uniform legal action


class PolicyOut(NamedTuple):
    """Raw network outputs; masks are laid on in `evaluate`, `rollout` and `exact` and nowhere else."""

    forward: Tensor  # [..., M] logits of the actions
    backward: Tensor  # [..., M] logits of the move that led here
    back_action: Tensor | None  # [..., M, M] logits of the action (last) given the move, or None: exact posterior
    log_flow: Tensor  # [...]


class Trajectories(NamedTuple):
    """A batch of ways from the initial state to a finished object."""

    states: Tensor  # [T+1, S, B, D], frozen from the end on
    actions: Tensor  # [T, S, B], -1 where unknown
    moves: Tensor  # [T, S, B]
    alive: Tensor  # [T, S, B] bool: a decision was taken at t
    score: Tensor  # [S, B] of states[-1], by the oracle
    real: Tensor  # [S, B] bool: executed in the world, so it may train the dynamics


class Terms(NamedTuple):
    """Everything an objective may read; [T, S, B] and zero where not alive, unless said.

    Only the fields that the objective names in `needs` are filled; reading another one is a mistake (it is None).
    """

    alive: Tensor
    log_pf: Tensor  # policy at the intended action
    log_pf_move: Tensor  # policy at the realised move (naive baseline)
    log_k: Tensor  # dynamics at (action, move), detached
    log_move: Tensor  # marginal over actions of policy and (detached) dynamics, at the move
    log_pb: Tensor  # backward policy at the move
    log_pa: Tensor  # backward law of the action given the move
    log_flow: Tensor  # [T+1, S, B], log_reward from the end on
    log_z: Tensor  # [S, B]
    log_reward: Tensor  # [S, B]
    entropy: Tensor  # of the policy over legal actions
    choices: Tensor  # number of legal actions
    law: Tensor  # [T, S, B, M] log-probability of every move at each state


class World(NamedTuple):
    """What an objective that looks beyond the trajectory may use (`Objective.loss`)."""

    task: Task
    policy: Policy
    dynamics: Dynamics
    trajectories: Trajectories
    step: Tensor | None  # 0-D, the training step the reward ramp reads; None = the final reward
    ask: Callable[
        [Tensor, Tensor], Tensor | None
    ]  # (states, where it matters) -> log-reward (NaN: unknown), counted; None: too slow to ask
    steady: Callable[[Tensor], PolicyOut] | None = (
        None  # the policy with slowly following weights, for targets that bootstrap; None: the policy itself
    )


def plain(value: Any) -> Any:
    """The value as JSON can say it: what is not finite becomes null, arrays and tensors become lists."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
