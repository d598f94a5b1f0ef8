"""Entropy of the policy over a batch: its quantile band, the ratio r_gamma, and the losses made of them.

Shapes as in `types`. The band and the ratio carry no gradient: they weigh a loss, and a positive weight never moves the
point where the loss is zero. Definitions and proofs are in docs/source-documents.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stochflow.errors import UserError
from stochflow.ops import keep, masked_mean, masked_quantile

HIGH, LOW = 0.75, 0.25  # the quantiles of the band; apart from gamma, so that high >= low always
EPS = 1e-6  # keeps the ratio defined where every policy is deterministic: r = 1 there
EDGE = 1e-3  # how near rho may come to 0 and 1 before its logarithm is taken


class Band(NamedTuple):
    """Entropies, as fractions of the largest possible one, of exploring and of decided states."""

    high: Tensor  # [S], or [T, S] with one band per time step
    low: Tensor


def check_gamma(gamma: float) -> float:
    """gamma as a float; a UserError unless 0 < gamma <= 1."""
    if isinstance(gamma, bool) or not isinstance(gamma, (int, float)) or not 0 < gamma <= 1:
        raise UserError(
            f"gamma is {gamma!r}, but it must lie above 0 and be at most 1 (1 makes the entropy ratio 1): try 0.5"
        )
    return float(gamma)


def compute_entropy(probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """H = -sum p log p over the allowed entries, [..., M] -> [...]; its gradient is finite where p = 0, too."""
    inside = probs > 0 if mask is None else mask & (probs > 0)
    return -(torch.where(inside, probs, 0) * torch.where(inside, probs, 1).log()).sum(-1)


def normalised_entropy(entropy: Tensor, choices: Tensor) -> Tensor:
    """H / log(number of legal actions), between 0 and 1; 0 where there is no choice."""
    most = choices.clamp(min=2).to(entropy).log()
    return torch.where(choices > 1, entropy / most, 0)


@torch.no_grad()
def entropy_high(entropy: Tensor, where: Tensor | None = None, *, per_step: bool = False, q: float = HIGH) -> Tensor:
    """The upper quantile of the entropies [T, S, B] that count: [S], or [T, S] `per_step`; 0 where none counts.

    Fewer dimensions are one seed's: of entropies [N] at hand it is [1].
    """
    where = torch.ones_like(entropy, dtype=torch.bool) if where is None else where
    if entropy.dim() < 3:
        entropy, where = entropy.reshape(1, 1, -1), where.reshape(1, 1, -1)
    if per_step:
        return masked_quantile(entropy.movedim(2, 0), where.movedim(2, 0), q)
    seeds = entropy.shape[1]
    return masked_quantile(entropy.transpose(1, 2).reshape(-1, seeds), where.transpose(1, 2).reshape(-1, seeds), q)


def entropy_low(entropy: Tensor, where: Tensor | None = None, *, per_step: bool = False, q: float = LOW) -> Tensor:
    """The lower quantile; otherwise as `entropy_high`."""
    return entropy_high(entropy, where, per_step=per_step, q=q)


def entropy_band(entropy: Tensor, choices: Tensor, alive: Tensor, per_step: bool = False) -> Band:
    """The band of a batch, over the normalised entropies of alive states with more than one legal action."""
    share, where = normalised_entropy(entropy, choices), alive & (choices > 1)
    return Band(entropy_high(share, where, per_step=per_step), entropy_low(share, where, per_step=per_step))


@torch.no_grad()
def entropy_ratio(high: Tensor | float, low: Tensor | float, gamma: float, eps: float = EPS) -> Tensor:
    """r = high / (gamma high + (1 - gamma) low), so 1 <= r <= 1 / gamma whenever high >= low >= 0."""
    check_gamma(gamma)
    high, low = torch.as_tensor(high) + eps, torch.as_tensor(low) + eps
    return (high / (gamma * high + (1 - gamma) * low)).clamp(1, 1 / gamma)


def mean_entropy_ratio(high: Tensor, low: Tensor, gammas: Sequence[float], eps: float = EPS) -> Tensor:
    """The mean of `entropy_ratio` over several gammas, shaped like `high`."""
    return torch.stack([entropy_ratio(high, low, g, eps) for g in gammas]).mean(0)


def entropy_balance_loss(share: Tensor, where: Tensor, r: Tensor, gamma: float) -> Tensor:
    """[S]: -mean[h log rho + (1 - gamma)(1 - h) log(1 - rho)] of normalised entropies h [T, S, B], with rho = gamma r.

    The documents' `dynamics_loss` takes log(1 - r), which is never finite because r >= 1; rho instead lies in
    [gamma, 1] and is clamped away from both ends. It is a regulariser: it moves the law, so its weight must decay.
    """
    check_gamma(gamma)
    rho = (gamma * r.detach()).clamp(EDGE, 1 - EDGE).unsqueeze(-1)  # [S, 1] or [T, S, 1]
    return masked_mean(-(share * rho.log() + (1 - gamma) * (1 - share) * (1 - rho).log()), where, (0, 2))


def temperature(r: Tensor) -> Tensor:
    """r [S] as `rollout`'s `temper` [S, 1, 1]: actions are drawn from pi^(1/r), flatter and never sharper than pi."""
    return r.detach().view(-1, 1, 1)


def state_kl(log_forward: Tensor, log_backward: Tensor, mask: Tensor) -> Tensor:
    """KL(f || b / sum b) >= 0 over the allowed entries, [..., M] -> [...].

    Both are laws over the moves that leave one state: `log_forward` is normalised, `log_backward` need not be.
    """
    log_forward = keep(mask, log_forward, 0)
    log_backward = torch.where(mask, log_backward, float("-inf")).log_softmax(-1)
    gap = keep(mask, log_forward - keep(mask, log_backward, 0), 0)
    return (keep(mask, log_forward.exp(), 0) * gap).sum(-1).clamp(min=0)  # below 0 only by rounding


def kl_divergence_loss(log_forward: Tensor, log_backward: Tensor, mask: Tensor, where: Tensor) -> Tensor:
    """[S]: mean of `state_kl` over the states [T, S, B] that count; zero only where f = b / sum b at each of them."""
    some = mask | ~where.unsqueeze(-1)  # a state that does not count may have no allowed entry
    return masked_mean(state_kl(log_forward, log_backward, some), where, (0, 2))


class EntropyAverage(nn.Module):
    """A moving average of the band, for batches so small that their quantiles jump; unbiased from the first batch."""

    def __init__(self, seeds: int, steps: int | None = None, decay: float = 0.99):
        """`steps` = the horizon for a band per time step; None = one band per batch."""
        super().__init__()
        if not 0 <= decay < 1:
            raise UserError(
                f"the decay of a moving average is {decay!r}, but it must be at least 0 and below 1: try 0.99"
            )
        self.decay = decay
        shape = (seeds,) if steps is None else (steps, seeds)
        self.high: Tensor
        self.low: Tensor
        self.mass: Tensor
        self.register_buffer("high", torch.zeros(shape))
        self.register_buffer("low", torch.zeros(shape))
        self.register_buffer("mass", torch.zeros(()))

    @torch.no_grad()
    def forward(self, band: Band) -> Band:
        """Add a band to the average; returns the averaged band."""
        for total, new in ((self.high, band.high), (self.low, band.low), (self.mass, torch.ones_like(self.mass))):
            total.mul_(self.decay).add_(new.to(total), alpha=1 - self.decay)
        return self.band

    @property
    def band(self) -> Band:
        """The average so far; zeros before the first batch, whose ratio is 1."""
        mass = self.mass.clamp(min=1e-12)
        return Band(self.high / mass, self.low / mass)
