"""What a sequence is worth measuring for: predictions to one number each, larger is better.

Predictions are oriented before (a column to be minimised has its sign turned), so that larger is always better.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import erfcx, ndtr

from stochflow.design.surrogates import Prediction
from stochflow.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Greedy:
    """The predicted mean."""

    name: str = "greedy"

    def __call__(self, p: Prediction, best: float) -> np.ndarray:
        return p.mean


@dataclass(frozen=True)
class UCB:
    """Upper confidence bound: mean + kappa * sd."""

    kappa: float = 1.0
    name: str = "ucb"

    def __call__(self, p: Prediction, best: float) -> np.ndarray:
        return p.mean + self.kappa * p.sd


@dataclass(frozen=True)
class ExpectedImprovement:
    """E[max(y - best, 0)] of a normal prediction: sd * (z Phi(z) + phi(z)), z = (mean - best) / sd.

    `rank`: against which of the values so far, 1 for the best. Against the n-th best it is n times the expected gain in the
    mean of the n best.
    """

    rank: int = 1
    name: str = "ei"

    def __call__(self, p: Prediction, best: float) -> np.ndarray:
        sd = np.maximum(p.sd, 1e-12)
        z = (p.mean - best) / sd
        return sd * (z * ndtr(z) + np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi))

    def log(self, p: Prediction, best: float) -> np.ndarray:
        """Its logarithm, finite where the value itself is too small for a float: strings far below `best` keep their order.

        For z < -1, log(z Phi(z) + phi(z)) = -z^2/2 - log(2 pi)/2 + log(1 - sqrt(pi/2) |z| erfcx(|z| / sqrt 2)), whose last
        term tends to -2 log |z| (Ament et al. 2023).
        """
        sd = np.maximum(p.sd, 1e-12)
        z = (p.mean - best) / sd
        near = np.maximum(z, -1.0)
        far = np.minimum(z, -1.0)
        middle = np.maximum(far, -1e4)
        log_near = np.log(near * ndtr(near) + np.exp(-0.5 * near**2) / np.sqrt(2 * np.pi))
        rest = np.log1p(-np.sqrt(np.pi / 2) * -middle * erfcx(-middle / np.sqrt(2)))
        rest = np.where(far > -1e4, rest, -2 * np.log(-far))
        log_far = -0.5 * far**2 - 0.5 * np.log(2 * np.pi) + rest
        found: np.ndarray = np.log(sd) + np.where(z > -1.0, log_near, log_far)
        return found


@dataclass(frozen=True)
class Thompson:
    """The value under one function drawn from the model; the batch takes its designs from all draws in turn."""

    draw: int = 0
    name: str = "thompson"

    def __call__(self, p: Prediction, best: float) -> np.ndarray:
        return p.draws[self.draw % len(p.draws)]


Acquisition = Greedy | UCB | ExpectedImprovement | Thompson
KINDS = ("gain", "ucb", "ei", "thompson", "greedy")


def acquisition(name: str, kappa: float = 1.0, batch: int = 1) -> Acquisition:
    """The acquisition of this name; `gain` is the expected gain in the mean of the `batch` best."""
    if name not in KINDS:
        raise UserError(f"there is no acquisition {name!r}{did_you_mean(name, KINDS)}: take one of {', '.join(KINDS)}")
    if not kappa >= 0:
        raise UserError(f"kappa = {kappa} must be at least 0: it is how many standard deviations are added to the mean")
    made: dict[str, Acquisition] = {
        "ucb": UCB(kappa),
        "ei": ExpectedImprovement(),
        "gain": ExpectedImprovement(batch),
        "thompson": Thompson(),
        "greedy": Greedy(),
    }
    return made[name]


def log_target(values: np.ndarray, kind: Acquisition) -> np.ndarray:
    """The acquisition on a scale on which differences count: EI is a product of chances, so its logarithm is taken."""
    if isinstance(kind, ExpectedImprovement):
        return np.log(np.maximum(values, 1e-300))
    return values


def on_its_scale(kind: Acquisition, p: Prediction, best: float) -> np.ndarray:
    """`log_target` of the acquisition itself, without the loss of what is too small for a float."""
    return kind.log(p, best) if isinstance(kind, ExpectedImprovement) else kind(p, best)
