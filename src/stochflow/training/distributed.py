"""Several processes that train one policy, as `torchrun` starts them: each takes trajectories of its own, gradients are averaged.

A rank draws from its own random stream, computes the gradient of its own batch, and adds it to the others', weighted by the number
of terms in its mean: the sum is the gradient of one batch that holds all trajectories. What follows (clipping, Adam, averages) is
computed by every rank alike, so that weights stay equal bit for bit and never travel. Objectives whose loss compares the
trajectories of a batch (log-variance, KL, entropy ratio) compare those of their own rank.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stochflow.engines.flat import FlatParameters
from stochflow.errors import UserError
from stochflow.learn.objectives import Objective, SubTrajectoryBalance
from stochflow.noise.dynamics import Dynamics, trainable_steps
from stochflow.types import Terms, Trajectories

PATIENCE = datetime.timedelta(days=7)  # a look or a slow oracle on one rank is no reason for the others to give up
OWN = ("random.", "source.", "dynamics_buffer.", "objective.")  # what differs from rank to rank in a trainer's state
T = TypeVar("T")


class Elsewhere(UserError):
    """Another rank failed in this iteration, and reports why."""


class Group:
    """The processes of one run; rank 0 alone writes. Every method is called by all ranks, in the same order."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    # inside an iteration ----------------------------------------------------------------------------------------

    def average(self, flat: FlatParameters, terms: Tensor) -> None:
        """Replace each seed's gradient by that of all ranks' batches; `terms` [S] = the terms of this rank's mean."""
        total = terms.double()
        share = total.clone()
        dist.all_reduce(total)
        share /= total.clamp(min=1)
        for g in flat.gradients.values():
            g.mul_(share.to(g).view(-1, *[1] * (g.dim() - 1)))
        dist.all_reduce(flat.grad)

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the ranks, of the same shape."""
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.ranks

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks, of the same shape."""
        total = value.detach().clone()
        dist.all_reduce(total)
        return total

    def observe(self, dynamics: Dynamics, traj: Trajectories) -> None:
        """Count the steps of all ranks."""
        before = {name: b.clone() for name, b in dynamics.named_buffers()}
        dynamics.observe(traj)
        for name, b in dynamics.named_buffers():
            b.copy_(before[name] + self.sum(b - before[name]))

    def any(self, flag: bool) -> bool:
        """Whether it is true of some rank."""
        found = torch.tensor(int(flag))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def guarded(self, ask: Callable[[], T]) -> T:
        """What `ask` returns; where it fails on one rank it fails on all, so that none waits for an answer that never comes."""
        failure: BaseException | None = None
        result: Any = None
        try:
            result = ask()
        except BaseException as error:  # raised again below, after the others have heard of it
            failure = error
        failed = self.any(failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise Elsewhere("the oracle of another rank failed, which says why")
        return result

    # between iterations -----------------------------------------------------------------------------------------

    def from_first(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, own: Any) -> list[Any]:
        """Every rank's value, on rank 0; an empty list elsewhere."""
        found: list[Any] | None = [None] * self.ranks if self.rank == 0 else None
        dist.gather_object(own, found, dst=0)
        return found or []


def started() -> tuple[int, int] | None:
    """(rank, ranks) where torchrun, or something alike, started this process as one of several; else None."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return (rank, ranks) if ranks > 1 else None


def follows() -> bool:
    """Whether this process is one of several, and not the one that writes and prints."""
    here = started()
    return here is not None and here[0] > 0


def join() -> Group | None:
    """Join the other ranks; None where this process is alone."""
    if started() is None:
        return None
    if not dist.is_available():
        raise UserError("this build of torch has no torch.distributed: train in one process, without torchrun")
    if not dist.is_initialized():
        # Its functions take the group of all ranks as a default when it is first imported, which an optimiser does: afterwards
        # they would keep that group, whose threads would then be cut off wherever they are when the process ends.
        from torch.distributed.nn import functional  # noqa: F401

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=PATIENCE)
    return Group()


def leave() -> None:
    """Leave the other ranks, where there are any."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()  # a rank that leaves while another still receives would close the connection
        dist.destroy_process_group()


def terms_in(traj: Trajectories, objective: Objective) -> Tensor:
    """[S] terms in the mean that an objective takes over a batch: trajectories, steps, or weighted pairs of states."""
    if isinstance(objective, SubTrajectoryBalance):
        span = torch.arange(len(traj.alive) + 1, device=traj.alive.device)
        longest = torch.where(
            span > 0, objective.decay ** span.double(), 0
        )  # of the pairs that a longer trajectory adds
        return longest.cumsum(0).cumsum(0)[traj.alive.sum(0)].sum(1)
    if _per_step(objective):
        return traj.alive.sum((0, 2))
    return torch.full((traj.score.shape[0],), traj.score.shape[1], device=traj.score.device)


@cache
def _per_step(objective: Objective) -> bool:
    """Whether it has a residual for each step, rather than for each trajectory."""
    step, whole, law = torch.zeros(1, 1, 1), torch.zeros(1, 1), torch.zeros(1, 1, 1, 2)
    flow = torch.zeros(2, 1, 1)
    terms = Terms(step > 0, step, step, step, step, step, step, flow, whole, whole, step, step, law)
    return objective.residual(terms).dim() == 3


def noise_terms_of(dynamics: Dynamics, traj: Trajectories) -> Tensor:
    """[S] steps in the mean of `Dynamics.loss`."""
    return trainable_steps(dynamics.env, traj).sum((0, 2))


def own_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The part of a trainer's state that differs from rank to rank."""
    return {name: value for name, value in state.items() if name.startswith(OWN)}


def with_ranks(state: dict[str, Tensor], others: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rank 0's state with the own parts of ranks 1, 2, ... beside it."""
    for rank, own in enumerate(others, start=1):
        state = state | {f"rank{rank}.{name}": value for name, value in own.items()}
    return state


def of_rank(state: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What `with_ranks` joined, as this rank's trainer loads it."""
    prefix = f"rank{rank}."
    shared = {name: value for name, value in state.items() if not name.startswith("rank")}
    return shared | {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def ranks_in(state: dict[str, Tensor]) -> int:
    """How many ranks a state is of."""
    return 1 + max((int(name[4 : name.index(".")]) for name in state if name.startswith("rank")), default=0)
