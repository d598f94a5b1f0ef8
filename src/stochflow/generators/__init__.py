"""The classes that the source documents name, working: thin adapters over the engine, which holds every formula.

`bulk_trajs`, a list of (string, thought string, reward), is all they need: what came out, what was meant, what it scored.
Which name of which document lives where, and what was put right, is in docs/source-documents.md.
"""

from stochflow.generators.args import GeneratorArgs, Tokenizer
from stochflow.generators.dynamics import LogDynamics
from stochflow.generators.log import LogBook, ReplayBuffer, trajectories
from stochflow.generators.models import (
    DeterministicDBGFlowNetGenerator,
    GFlowNetGenerator,
    StochasticDBGFlowNetGenerator,
    StochasticKL2GFlowNetGenerator,
    StochasticKL3GFlowNetGenerator,
    StochasticKLGFlowNetGenerator,
    TrajectoryBalanceGFlowNetGenerator,
)
from stochflow.generators.worker import RolloutWorker
from stochflow.law.modes import calculate_num_modes

__all__ = [
    "DeterministicDBGFlowNetGenerator",
    "GFlowNetGenerator",
    "GeneratorArgs",
    "LogBook",
    "LogDynamics",
    "ReplayBuffer",
    "RolloutWorker",
    "StochasticDBGFlowNetGenerator",
    "StochasticKL2GFlowNetGenerator",
    "StochasticKL3GFlowNetGenerator",
    "StochasticKLGFlowNetGenerator",
    "Tokenizer",
    "TrajectoryBalanceGFlowNetGenerator",
    "calculate_num_modes",
    "trajectories",
]
