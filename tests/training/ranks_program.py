"""What each of two ranks runs in test_distributed.py: `torchrun ranks_program.py FOLDER` learns every case and saves its state."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from stochflow.learn.objectives import DetailedBalance, Objective, SubTrajectoryBalance, TrajectoryBalance
from stochflow.learn.rollout import rollout
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Neural, Tabular
from stochflow.scores.rewards import Power
from stochflow.training import distributed
from stochflow.training.sources import Source
from stochflow.training.trainer import Iteration, Trainer
from stochflow.types import Task, Trajectories
from stochflow.worlds.channels import Slip
from stochflow.worlds.grid import Corners, Grid

CASES: dict[str, tuple[Objective, type]] = {
    "tb": (TrajectoryBalance(), Neural),
    "db": (DetailedBalance(), Tabular),
    "subtb": (SubTrajectoryBalance(0.8), Neural),
}
BATCH, STEPS, SEEDS = 6, 12, (0, 1)
TASKS = Path("/proc/self/task")  # the threads of this process, where the system lists them


class Given(Source):
    """Batches made beforehand, so that one process and two can learn from the same; a rank takes its own columns."""

    def __init__(self, batches: list[Trajectories], columns: slice):
        super().__init__()
        self.batches, self.columns, self.at = batches, columns, 0

    def act(self, step):
        b, c = self.batches[self.at], self.columns
        self.at += 1
        return Trajectories(
            b.states[:, :, c], b.actions[:, :, c], b.moves[:, :, c], b.alive[:, :, c], b.score[:, c], b.real[:, c]
        )


def make(objective: Objective, dynamics: type, columns: slice) -> Trainer:
    torch.manual_seed(3)
    task = Task(Grid(2, 4), Slip(0.25), Corners(4), Power(1.0, 1e-6))
    policy = Policy(task.env, MLP(16, 2), seeds=SEEDS)
    # at its first batch's estimate the gradient of log Z is rounding alone, and Adam divides by its size: start beside it
    start = policy.start_log_z
    policy.start_log_z = lambda estimate: start(estimate + 1)  # type: ignore[method-assign]
    batches = [rollout(task, policy, 2 * BATCH) for _ in range(STEPS)]
    return Trainer(
        task, policy, dynamics(task.env, SEEDS), objective, Given(batches, columns), iteration=Iteration(engine="eager")
    )


def both(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer.state_dict() | {"calls": torch.tensor(trainer.oracle_calls)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    group = distributed.join()
    assert group is not None
    for name, (objective, dynamics) in CASES.items():
        trainer = make(objective, dynamics, slice(group.rank * BATCH, (group.rank + 1) * BATCH))
        trainer.join(group)
        trainer.train(STEPS, every=5)
        torch.save(both(trainer), f"{sys.argv[1]}/{name}-{group.rank}.pt")
    distributed.leave()
    if TASKS.exists():
        names = [(thread / "comm").read_text().strip() for thread in TASKS.iterdir()]
        Path(f"{sys.argv[1]}/threads-{group.rank}.txt").write_text("\n".join(names))
