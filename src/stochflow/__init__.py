"""stochflow: generative flow networks for stochastic worlds.

Names are resolved when they are first used, so that `import stochflow` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stochflow.errors import UserError as UserError
    from stochflow.law.exact import exact_law as exact_law
    from stochflow.law.floors import floor as floor
    from stochflow.learn.buffer import Buffer as Buffer
    from stochflow.learn.evaluate import evaluate as evaluate
    from stochflow.learn.objectives import DetailedBalance as DetailedBalance
    from stochflow.learn.objectives import FlowKL as FlowKL
    from stochflow.learn.objectives import LogVariance as LogVariance
    from stochflow.learn.objectives import SubTrajectoryBalance as SubTrajectoryBalance
    from stochflow.learn.objectives import TrajectoryBalance as TrajectoryBalance
    from stochflow.learn.rollout import backward_rollout as backward_rollout
    from stochflow.learn.rollout import rollout as rollout
    from stochflow.nets.policy import Policy as Policy
    from stochflow.nets.transformer import Transformer as Transformer
    from stochflow.noise.dynamics import Known as Known
    from stochflow.noise.dynamics import Neural as Neural
    from stochflow.noise.dynamics import Tabular as Tabular
    from stochflow.runs.experiment import train as train
    from stochflow.runs.tasks import grid_task as grid_task
    from stochflow.runs.tasks import strings_task as strings_task
    from stochflow.runs.tasks import tfbind8_task as tfbind8_task
    from stochflow.scores.rewards import Linear as Linear
    from stochflow.scores.rewards import Power as Power
    from stochflow.training.trainer import Trainer as Trainer
    from stochflow.types import Task as Task
    from stochflow.worlds.channels import Confusion as Confusion
    from stochflow.worlds.channels import Exact as Exact
    from stochflow.worlds.channels import Neighbour as Neighbour
    from stochflow.worlds.channels import Slip as Slip
    from stochflow.worlds.check import check_env as check_env
    from stochflow.worlds.check_task import check_channel as check_channel
    from stochflow.worlds.check_task import check_oracle as check_oracle
    from stochflow.worlds.env import Channel as Channel
    from stochflow.worlds.env import Enumerable as Enumerable
    from stochflow.worlds.env import Env as Env
    from stochflow.worlds.grid import Grid as Grid
    from stochflow.worlds.strings import Strings as Strings

__version__ = "0.1.0"

# where each public name lives
_HOME = {
    **dict.fromkeys(["Env", "Enumerable", "Channel"], "worlds.env"),
    **dict.fromkeys(["Exact", "Slip", "Neighbour", "Confusion"], "worlds.channels"),
    "Grid": "worlds.grid",
    "Strings": "worlds.strings",
    "Task": "types",
    **dict.fromkeys(["Power", "Linear"], "scores.rewards"),
    "Policy": "nets.policy",
    "Transformer": "nets.transformer",
    **dict.fromkeys(["Known", "Tabular", "Neural"], "noise.dynamics"),
    **dict.fromkeys(["rollout", "backward_rollout"], "learn.rollout"),
    "evaluate": "learn.evaluate",
    **dict.fromkeys(
        ["TrajectoryBalance", "DetailedBalance", "SubTrajectoryBalance", "LogVariance", "FlowKL"], "learn.objectives"
    ),
    "Buffer": "learn.buffer",
    "Trainer": "training.trainer",
    "check_env": "worlds.check",
    **dict.fromkeys(["check_channel", "check_oracle"], "worlds.check_task"),
    **dict.fromkeys(["strings_task", "grid_task", "tfbind8_task"], "runs.tasks"),
    "exact_law": "law.exact",
    "floor": "law.floors",
    "train": "runs.experiment",
    "UserError": "errors",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stochflow' has no attribute {name!r}")
    return getattr(import_module(f"stochflow.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
