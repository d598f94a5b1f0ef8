"""A module's parameters in one block, so that clipping, Adam and averaging are a handful of operators, not one a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PIECES = 64  # on a GPU: torch's fused Adam gives 65,536 numbers to one block of threads, and one block is slow (70 us for 75,000)


class FlatParameters:
    """Parameters [S, ...] of a module become views of one vector; their gradients are joined into another.

    The average is a power law over the steps, with most weight on about the last eighth: it needs no plan and no schedule.
    """

    RECENT = 8.0
    FOLLOW = 0.05  # of each step into the follower
    TAU = 1000.0  # steps after which the rate begins to fall, as lr / (1 + step / TAU)^decay

    def __init__(self, module: nn.Module, lr: float, clip: float, decay: float = 0.5, follow: bool = False):
        self.named = dict(module.named_parameters())
        self.clip = clip
        sizes = [p.numel() for p in self.named.values()]
        first = next(iter(self.named.values()))
        self.num_seeds = first.shape[0]
        self.values = nn.Parameter(torch.empty(sum(sizes), device=first.device))
        self.values.grad = torch.zeros_like(self.values)
        self.average = torch.empty_like(self.values, requires_grad=False)
        self.follower = self.average.clone() if follow else None  # a short memory, for targets that bootstrap
        self.slices: dict[str, slice] = {}
        seed_of = []  # [sum(sizes)]: whose each number is
        start = 0
        with torch.no_grad():
            for (name, p), size in zip(self.named.items(), sizes, strict=True):
                here = slice(start, start + size)
                self.values[here] = p.flatten()
                p.data = self.values.data[here].view(p.shape)
                seed_of.append(torch.arange(self.num_seeds).repeat_interleave(size // self.num_seeds))
                self.slices[name] = here
                start += size
            self.average.copy_(self.values)
            if self.follower is not None:
                self.follower.copy_(self.values)
        self.seed_of = torch.cat(seed_of).to(first.device) if self.num_seeds > 1 else None
        self.nothing = [torch.zeros_like(p, requires_grad=False) for p in self.named.values()]  # gradients of what a loss does not touch
        # Adam's rate and the average's weight, both of the form scale * (1 + step / tau)^power, in one expression
        self.paces = torch.tensor([lr, 1.0], device=first.device)
        self.curve = torch.tensor([[lr, 1.0], [self.TAU, self.RECENT], [-decay, -1.0]], dtype=torch.float64, device=first.device)
        self.optimiser, self.moments, self.adam_steps = self._adam(PIECES if first.is_cuda else 1)

    def _adam(self, many: int) -> tuple[torch.optim.Adam, Tensor, Tensor]:
        """Adam on the block in pieces, its mean and square of the gradient [2, n], and its counts of steps, one a piece."""
        values, grad = self.values.data, self.values.grad
        assert grad is not None
        size = max(1024, -(-len(values) // many)) if many > 1 else len(values)
        pieces = values.split(size)
        moments = torch.zeros(2, len(values), device=values.device)
        steps = torch.zeros(len(pieces), device=values.device)
        optimiser = torch.optim.Adam(pieces, lr=self.paces[0], fused=True, capturable=values.is_cuda)
        parts = zip(pieces, grad.split(size), moments.split(size, 1), steps, strict=True)
        for piece, slope, (mean, square), step in parts:
            piece.grad = slope
            optimiser.state[piece] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
        return optimiser, moments, steps

    def differentiate(self, loss: Tensor) -> Tensor:
        """The gradient of the summed loss [S], each seed's scaled to norm at most `clip`; the norms before that, [S]."""
        found = torch.autograd.grad(loss.sum(), list(self.named.values()), allow_unused=True)
        return self.take([none if g is None else g for g, none in zip(found, self.nothing, strict=True)])

    @torch.no_grad()
    def take(self, gradients: list[Tensor]) -> Tensor:
        """Join gradients, one a parameter, and clip them; the norms before that, [S]."""
        whole = self.values.grad
        assert whole is not None
        torch.cat([g.flatten() for g in gradients], out=whole)
        rows = [g.reshape(self.num_seeds, -1) for g in gradients]
        norm = torch.linalg.vector_norm(whole.unsqueeze(0) if self.num_seeds == 1 else torch.cat(rows, 1), dim=1)
        scale = (self.clip / norm.clamp(min=1e-12)).clamp(max=1)
        whole.mul_(scale if self.seed_of is None else scale[self.seed_of])
        return norm

    @torch.no_grad()
    def update(self, step: Tensor) -> None:
        """One Adam step, then the average; `step` = iterations before this one."""
        scale, tau, power = self.curve
        self.paces.copy_(scale * (1 + step / tau) ** power)
        self.optimiser.step()
        self.average.lerp_(self.values, self.paces[1])
        if self.follower is not None:
            self.follower.lerp_(self.values, self.FOLLOW)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages in place."""
        kept = self.values.clone()
        self.values.copy_(self.average)
        self.average.copy_(kept)

    def followed(self) -> dict[str, Tensor]:
        """The follower's parameters by name, as views."""
        assert self.follower is not None
        return {name: self.follower[here].view(self.named[name].shape) for name, here in self.slices.items()}

    def _vectors(self) -> dict[str, Tensor]:
        parts = {"weight": self.values.data, "average": self.average, "adam_mean": self.moments[0], "adam_square": self.moments[1]}
        return parts if self.follower is None else parts | {"follower": self.follower}

    def state_dict(self) -> dict[str, Tensor]:
        parts = self._vectors()
        named = {f"{kind}.{name}": v[here].view(self.named[name].shape) for kind, v in parts.items() for name, here in self.slices.items()}
        return named | {"adam_step": self.adam_steps[0]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for kind, vector in self._vectors().items():
            for name, here in self.slices.items():
                vector[here].copy_(state[f"{kind}.{name}"].flatten())
        self.adam_steps.copy_(state["adam_step"])
