"""What an engine is: the operations of a training iteration, what it supports, and why it refuses.

    walk       rollouts of the policy; a traced one also keeps what the network computed at each state
    gradient   the objective's gradient, from a traced walk or (eager) from any batch
    noise      log-probabilities of a batch's moves under a model of the noise, and its gradient
    update     clipping, Adam and the averages on the flat block of parameters
    many       several whole iterations in one call, where nothing has to be asked in between

An engine refuses an operation with a reason in words; `choose` collects them. Shapes as in `types`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from stochflow.types import Explore, Task, Trajectories

if TYPE_CHECKING:
    from stochflow.engines.flat import FlatParameters
    from stochflow.learn.objectives import Objective
    from stochflow.learn.rollout import Steps
    from stochflow.nets.policy import Policy
    from stochflow.noise.dynamics import Dynamics


class Request(NamedTuple):
    """A walk that is asked for."""

    task: Task
    policy: Policy
    batch: int  # trajectories per seed
    explore: Explore = None  # probability of a uniform legal action
    temper: Tensor | float | None = None  # flattens the policy, pi^(1/temper)
    row: Tensor | None = None  # [S, B] context rows
    steps: Steps | None = None  # the parts of a step by torch.compile
    traces: Traces | None = None  # keep a trace, in this memory
    key: Tensor | None = None  # [1] and
    step: Tensor | None = None  # 0-D: where a GPU kernel draws its random numbers from, instead of torch's generator


class Traces:
    """Where an engine keeps the traces of a policy's walks. Memory is used again once the weights have changed."""

    keyed = False  # whether random numbers come from `Request.key` and `Request.step`

    def __init__(self, weights: FlatParameters):
        self.weights = weights


class Trace:
    """What the network computed at each state of one walk. It holds until the weights change; `use` is an error after
    that, never a wrong gradient."""

    def __init__(self, weights: FlatParameters, final: Tensor):
        self.weights, self.version = weights, weights.version
        self.final = final  # [S, B] the numbers of the last states, where the environment numbers states

    @property
    def holds(self) -> bool:
        return self.version == self.weights.version

    def use(self, weights: FlatParameters) -> None:
        """Raise unless it is of these weights, as they are now."""
        if self.weights is not weights:
            raise RuntimeError("this trace is of a walk of another policy: walk again")
        if not self.holds:
            raise RuntimeError("this trace is of a walk before the weights changed: walk again")


class Walk(NamedTuple):
    """Trajectories and, in the same value, the trace they came with (None: none was kept)."""

    trajectories: Trajectories
    trace: Trace | None = None


class Rewards(NamedTuple):
    """Log-rewards of a batch [S, B] or, `by_number`, of all states of the environment [N]."""

    log: Tensor
    by_number: bool


class Residuals(NamedTuple):
    """What is found on the way to a gradient; numba overwrites it with the next."""

    loss: Tensor  # [S] where autograd was used; [S, B], a trajectory's part, elsewhere: their mean is the loss
    log_z_estimate: Tensor  # [S, B] log R - sum of (log p(move) - log P_B)
    entropy: Tensor | None = None  # [S, B] of the policy, summed over the steps; None: not asked for
    log_flow: Tensor | None = None  # [S, 1] of the first state as learned, log Z; None: not asked for


@dataclass(frozen=True)
class Job:
    """What one iteration consists of."""

    task: Task
    policy: Policy
    dynamics: Dynamics
    objective: Objective
    batch: int  # fresh trajectories per seed
    weights: FlatParameters
    noise_weights: FlatParameters | None
    compiled: bool = False  # by torch.compile
    plain_source: str = ""  # why batches are not fresh rollouts of this policy alone; "": they are
    replays_noise: bool = False  # the noise model learns from a buffer of earlier batches
    worth: Tensor | None = None  # [2, N] scores and log-rewards of all states, where they are known beforehand


class Support(NamedTuple):
    """What an engine covers, as `stochflow doctor` prints it."""

    worlds: str
    channels: str
    nets: str
    objectives: str
    noise_models: str
    limits: str


class Engine(Protocol):
    """`why_not` and its like answer with the unmet row of the support table in words (None: it fits), and raise `Compile`
    where a kernel of what they accept does not compile."""

    name: str
    support: Support

    def unavailable(self) -> str | None:
        """Why it cannot be had on this machine at all."""

    def why_not(self, job: Job) -> str | None:
        """Of the job's walk and gradient, together."""

    def why_not_walk(self, request: Request) -> str | None: ...
    def why_not_noise(self, dynamics: Dynamics) -> str | None: ...
    def why_not_update(self, flat: FlatParameters) -> str | None: ...

    def walk(self, request: Request) -> Walk: ...
    def traces(self, job: Job) -> Traces | None:
        """Memory for the traces of this job's walks, to be given with a request; None: gradients are taken by autograd."""

    def gradient(self, job: Job, walk: Walk, rewards: Rewards, log_k: Tensor | None, note: bool) -> Residuals:
        """The gradient of each seed's loss into `job.weights`; `log_k` [T, S, B, M] = log P(the realised move | each action),
        None: what is intended happens."""

    def arrivals(self, dynamics: Dynamics, flat: FlatParameters | None, traj: Trajectories) -> Tensor:
        """log P(the realised move | each action) [T, S, B, M] by the averaged model; anything where no move was made."""

    def learn_noise(self, dynamics: Dynamics, flat: FlatParameters, traj: Trajectories) -> Tensor:
        """The gradient of each seed's `Dynamics.loss` into `flat`; the loss [S]."""

    def update(self, flat: FlatParameters, step: Tensor, ends: bool) -> Tensor:
        """One clipped Adam step and the averages; where it `ends` an iteration, `step` is counted. The norms before clipping [S]."""

    def many(self, job: Job, schedule: Schedule, most: int) -> int:
        """At most so many iterations at once, without statistics; how many were made (0: the next one is made alone)."""


class Schedule(NamedTuple):
    """What iterations in one call have to know of the trainer."""

    done: float  # iterations before these
    explore: Explore
    traces: Traces


class Compile(Exception):
    """A kernel does not compile; the compiler's own words."""


def first(*reasons: str | None) -> str | None:
    """The first reason there is."""
    return next((reason for reason in reasons if reason is not None), None)


def unless(fits: bool, reason: str) -> str | None:
    return None if fits else reason
