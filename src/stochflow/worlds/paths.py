"""A law over whole futures in bins: a mixture over residual paths, known step by step.

    K components    L horizon    M bins    R windows    F factors (one per series, and one for series that were not there)
Component k gives step t the bins' probabilities `table[t, k]`, independent of its other steps. The law of a path is the weighted mean over
components of their products, so that its steps have the probabilities p(x_t | x_<t) = sum_k w_k(x_<t) table[t, k, x_t], with the weights
multiplied by each step's probability once it is known: sums and marginals are exact, and dependence between steps comes from the weights.
Bins are of standardised innovations z; `factor` turns those into the correlated errors of a future, e = factor z.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stochflow.ops import NEG


class Paths(NamedTuple):
    """The components, and where each came from."""

    table: Tensor  # [L, K, M] probabilities, each row sums to 1
    logs: Tensor  # [L, M, K] their logarithms
    weight: Tensor  # [K] log-weights
    series: Tensor  # [K] number of the series a component was seen in; -1: of none
    origin: Tensor  # [K] its origin there
    factor: Tensor  # [F, L, L] lower triangular, float64

    def to(self, device: torch.device) -> Paths:
        return Paths(*[x.to(device) for x in self])

    def start(self, series: Tensor, origin: Tensor) -> Tensor:
        """Log-weights [..., K] before the first step; a component whose target overlaps the window's own is left out.

        It would give away the target. Where all would be left out, none is.
        """
        reach = len(self.table)
        same = (self.series == series.unsqueeze(-1)) & ((self.origin - origin.unsqueeze(-1)).abs() < reach)
        same = same & ~same.all(-1, keepdim=True)
        return torch.where(same, NEG, self.weight)

    def law(self, weight: Tensor, t: int) -> Tensor:
        """Log-probabilities [..., M] of the bins of step t, from log-weights [..., K]."""
        return (weight.softmax(-1) @ self.table[t]).clamp(min=1e-30).log()

    def seen(self, weight: Tensor, t: int, move: Tensor) -> Tensor:
        """Log-weights after bin `move` [...] at step t."""
        return weight + self.logs[t][move]

    def along(self, weight: Tensor, moves: Tensor) -> Tensor:
        """Log-probabilities [T, ..., M] of every step of paths [T, ...], given their own earlier steps."""
        made = []
        for t, move in enumerate(moves):
            made.append(self.law(weight, t))
            weight = self.seen(weight, t, move)
        return torch.stack(made)
