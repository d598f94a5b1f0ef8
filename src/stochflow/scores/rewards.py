"""From an oracle's score to a log-reward, always in log space, so that rewards never underflow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stochflow.errors import UserError


@dataclass(frozen=True)
class Power:
    """R = max(score, floor)^beta. While training, the exponent ramps from 1 to beta as in the sources' `l2r`:

    beta(step) = 1 + (beta - 1)(1 - 1/(1 + step/ramp)); ramp = 0 is constant beta. Evaluation uses the final beta.
    """

    beta: float = 1.0
    floor: float = 1e-3
    ramp: float = 0.0

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise UserError(f"beta = {self.beta} must be above 0: it is the exponent of the reward")
        if not self.floor > 0:
            raise UserError(f"the reward floor is {self.floor}, but it must be above 0, because the log of it is taken")

    def exponent(self, step: Tensor | float | None) -> Tensor | float:
        """beta at this training step; None = the final beta."""
        if step is None or self.ramp <= 0:
            return self.beta
        return 1 + (self.beta - 1) * (1 - 1 / (1 + step / self.ramp))

    def __call__(self, score: Tensor, state: Tensor, step: Tensor | float | None = None) -> Tensor:
        exponent, log = self.exponent(step), torch.log(score.clamp(min=self.floor))
        return log if isinstance(exponent, float | int) and exponent == 1 else exponent * log


@dataclass(frozen=True)
class Linear:
    """log R = beta * score, for scores that are already logarithms (energies, log-likelihoods, minus errors)."""

    beta: float = 1.0

    def __call__(self, score: Tensor, state: Tensor, step: Tensor | float | None = None) -> Tensor:
        return self.beta * score
