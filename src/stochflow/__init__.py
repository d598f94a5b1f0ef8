"""stochflow: generative flow networks for stochastic worlds.

Names are resolved when they are first used, so that `import stochflow` does not import torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stochflow.buffer import Buffer as Buffer
    from stochflow.channels import Confusion as Confusion
    from stochflow.channels import Exact as Exact
    from stochflow.channels import Neighbour as Neighbour
    from stochflow.channels import Slip as Slip
    from stochflow.check import check_channel as check_channel
    from stochflow.check import check_env as check_env
    from stochflow.check import check_oracle as check_oracle
    from stochflow.dynamics import Known as Known
    from stochflow.dynamics import Neural as Neural
    from stochflow.dynamics import Tabular as Tabular
    from stochflow.env import Channel as Channel
    from stochflow.env import Enumerable as Enumerable
    from stochflow.env import Env as Env
    from stochflow.envs import Grid as Grid
    from stochflow.envs import Strings as Strings
    from stochflow.errors import UserError as UserError
    from stochflow.evaluate import evaluate as evaluate
    from stochflow.exact import exact_law as exact_law
    from stochflow.experiment import train as train
    from stochflow.floors import floor as floor
    from stochflow.objectives import DetailedBalance as DetailedBalance
    from stochflow.objectives import FlowKL as FlowKL
    from stochflow.objectives import LogVariance as LogVariance
    from stochflow.objectives import SubTrajectoryBalance as SubTrajectoryBalance
    from stochflow.objectives import TrajectoryBalance as TrajectoryBalance
    from stochflow.policy import Policy as Policy
    from stochflow.rewards import Linear as Linear
    from stochflow.rewards import Power as Power
    from stochflow.rollout import backward_rollout as backward_rollout
    from stochflow.rollout import rollout as rollout
    from stochflow.tasks import grid_task as grid_task
    from stochflow.tasks import strings_task as strings_task
    from stochflow.tasks import tfbind8_task as tfbind8_task
    from stochflow.trainer import Trainer as Trainer
    from stochflow.transformer import Transformer as Transformer
    from stochflow.types import Task as Task

__version__ = "0.1.0"

# where each public name lives
_HOME = {
    **dict.fromkeys(["Env", "Enumerable", "Channel"], "env"),
    **dict.fromkeys(["Exact", "Slip", "Neighbour", "Confusion"], "channels"),
    **dict.fromkeys(["Grid", "Strings"], "envs"),
    "Task": "types",
    **dict.fromkeys(["Power", "Linear"], "rewards"),
    "Policy": "policy",
    "Transformer": "transformer",
    **dict.fromkeys(["Known", "Tabular", "Neural"], "dynamics"),
    **dict.fromkeys(["rollout", "backward_rollout"], "rollout"),
    "evaluate": "evaluate",
    **dict.fromkeys(["TrajectoryBalance", "DetailedBalance", "SubTrajectoryBalance", "LogVariance", "FlowKL"], "objectives"),
    "Buffer": "buffer",
    "Trainer": "trainer",
    **dict.fromkeys(["check_env", "check_channel", "check_oracle"], "check"),
    **dict.fromkeys(["strings_task", "grid_task", "tfbind8_task"], "tasks"),
    "exact_law": "exact",
    "floor": "floors",
    "train": "experiment",
    "UserError": "errors",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stochflow' has no attribute {name!r}")
    return getattr(import_module(f"stochflow.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


class _Package(ModuleType):
    """The import system binds a loaded submodule to its package under its name; `stochflow.rollout` and
    `stochflow.evaluate` are functions, though, whichever way their modules were loaded."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOME.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
