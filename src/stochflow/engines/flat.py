"""A module's parameters in one block, so that clipping, Adam and averaging are a handful of operators, not one per layer."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from stochflow.ops import zeros

ALIGN = 32  # numbers: every parameter begins where wide loads may


class FlatParameters:
    """Parameters [S, ...] of a module become views of one vector; their gradients are joined into another.

    The average is a power law over the steps, with most weight on about the last eighth: it needs no plan and no schedule.
    Engines read and write `values`, `grad`, `moments`, `average`, `follower`, `norms` and `adam_step`; code that changes the
    weights calls `changed`.
    """

    RECENT = 8.0
    FOLLOW = 0.05  # of each step into the follower
    TAU = 1000.0  # steps after which the rate begins to fall, as lr / (1 + step / TAU)^decay

    def __init__(self, module: nn.Module, lr: float, clip: float, decay: float = 0.5, follow: bool = False):
        self.named = dict(module.named_parameters())
        self.clip, self.lr, self.decay = clip, lr, decay
        sizes = [p.numel() for p in self.named.values()]
        gaps = [-size % ALIGN for size in sizes]
        first = next(iter(self.named.values()))
        self.num_seeds, self.device = first.shape[0], first.device
        self.values = nn.Parameter(torch.zeros(sum(sizes) + sum(gaps), device=first.device))
        self.grad = torch.zeros_like(self.values, requires_grad=False)
        self.values.grad = self.grad
        self.average = torch.empty_like(self.values, requires_grad=False)
        self.follower = self.average.clone() if follow else None  # a short memory, for targets that bootstrap
        self.slices: dict[str, slice] = {}
        start = 0
        with torch.no_grad():
            for (name, p), size, gap in zip(self.named.items(), sizes, gaps, strict=True):
                here = slice(start, start + size)
                self.values[here] = p.flatten()
                p.data = self.values.data[here].view(p.shape)
                self.slices[name] = here
                start += size + gap
            self.average.copy_(self.values)
            if self.follower is not None:
                self.follower.copy_(self.values)
        self.gradients = self._views(self.grad)  # by name, as views
        self._gaps = [self.grad.new_zeros(gap) for gap in gaps]
        # Adam's rate and the average's weight, both of the form scale * (1 + step / tau)^power
        self.curves = (lr, self.TAU, -decay), (1.0, self.RECENT, -1.0)
        self.moments = torch.zeros(
            2, len(self.values), device=first.device
        )  # Adam's means of the gradient and of its square
        self.adam_step = torch.zeros((), device=first.device)
        self.norms = torch.zeros(self.num_seeds, device=first.device)  # of the last gradient, per seed, before clipping
        self.version = 0  # of the weights: a trace of an older version is of no use

    def changed(self) -> None:
        """The weights are no longer those of before."""
        self.version += 1

    def seed_spans(self) -> list[tuple[int, int, int]]:
        """Each seed's part of every parameter: first, last + 1, seed."""
        each = [(here.start, (here.stop - here.start) // self.num_seeds) for here in self.slices.values()]
        return [(at + s * n, at + (s + 1) * n, s) for at, n in each for s in range(self.num_seeds)]

    def rates(self, done: float) -> tuple[float, float]:
        """Adam's rate and the average's weight after so many steps, in float32."""
        adam, share = (float(np.float32(scale * (1 + done / tau) ** power)) for scale, tau, power in self.curves)
        return adam, share

    def differentiate(self, loss: Tensor) -> None:
        """Take the gradient of the summed loss [S] by autograd."""
        found = torch.autograd.grad(loss.sum(), list(self.named.values()), allow_unused=True)
        self.take(
            [zeros(p.shape, p.device) if g is None else g for g, p in zip(found, self.named.values(), strict=True)]
        )

    @torch.no_grad()
    def take(self, gradients: list[Tensor]) -> None:
        """Join gradients, one per parameter."""
        pieces = [x for g, gap in zip(gradients, self._gaps, strict=True) for x in (g.flatten(), gap) if len(x)]
        torch.cat(pieces, out=self.grad)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages in place."""
        kept = self.values.clone()
        self.values.copy_(self.average)
        self.average.copy_(kept)
        self.changed()

    def followed(self) -> dict[str, Tensor]:
        """The follower's parameters by name, as views."""
        assert self.follower is not None
        return self._views(self.follower)

    def averaged(self) -> dict[str, Tensor]:
        """The averaged parameters by name, as views."""
        return self._views(self.average)

    def _views(self, whole: Tensor) -> dict[str, Tensor]:
        return {name: whole[here].view(self.named[name].shape) for name, here in self.slices.items()}

    def _vectors(self) -> dict[str, Tensor]:
        mean, square = self.moments
        parts = {"weight": self.values.data, "average": self.average, "adam_mean": mean, "adam_square": square}
        return parts if self.follower is None else parts | {"follower": self.follower}

    def state_dict(self) -> dict[str, Tensor]:
        views = {kind: self._views(vector) for kind, vector in self._vectors().items()}
        named = {f"{kind}.{name}": view for kind, of in views.items() for name, view in of.items()}
        return named | {"adam_step": self.adam_step}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for kind, vector in self._vectors().items():
            for name, here in self.slices.items():
                vector[here].copy_(state[f"{kind}.{name}"].flatten())
        self.adam_step.copy_(state["adam_step"])
        self.changed()
