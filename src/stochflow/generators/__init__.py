"""The classes that the source documents name, working: thin adapters over the engine, which holds every formula.

`bulk_trajs`, a list of (string, thought string, reward), is all they need: what came out, what was meant, what it scored.
Which name of which document lives where, and what was put right, is in docs/source-documents.md.
"""

from stochflow.forecast.generator import SeriesGenerator
from stochflow.generators.args import GeneratorArgs, Tokenizer
from stochflow.generators.base import GeneratorBase
from stochflow.generators.dynamics import LogDynamics
from stochflow.generators.log import LogBook, ReplayBuffer, trajectories
from stochflow.generators.mlp import MLP
from stochflow.generators.models import (
    DeterministicDBGFlowNetGenerator,
    StochasticDBGFlowNetGenerator,
    StochasticKL2GFlowNetGenerator,
    StochasticKL3GFlowNetGenerator,
    StochasticKLGFlowNetGenerator,
    TrajectoryBalanceGFlowNetGenerator,
)
from stochflow.generators.space import one_hot_contexts
from stochflow.generators.worker import RolloutWorker
from stochflow.law.modes import calculate_num_modes

GFlowNetGenerator = GeneratorBase  # an earlier name

__all__ = [
    "MLP",
    "DeterministicDBGFlowNetGenerator",
    "GFlowNetGenerator",
    "GeneratorArgs",
    "GeneratorBase",
    "LogBook",
    "LogDynamics",
    "ReplayBuffer",
    "RolloutWorker",
    "SeriesGenerator",
    "StochasticDBGFlowNetGenerator",
    "StochasticKL2GFlowNetGenerator",
    "StochasticKL3GFlowNetGenerator",
    "StochasticKLGFlowNetGenerator",
    "Tokenizer",
    "TrajectoryBalanceGFlowNetGenerator",
    "calculate_num_modes",
    "one_hot_contexts",
    "trajectories",
]
