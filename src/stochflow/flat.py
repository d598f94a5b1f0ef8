"""A module's parameters in one block, so that clipping, Adam and averaging are a handful of operators, not one a layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stochflow import adam_kernel
from stochflow.cpu_compiled import in_parts, loops, one_by_one
from stochflow.ops import nothing

ALIGN = 32  # numbers: every parameter begins where wide loads may
PIECES = 64  # on a GPU without kernels of our own: torch's fused Adam gives 65,536 numbers to one block of threads, and one block is slow


class FlatParameters:
    """Parameters [S, ...] of a module become views of one vector; their gradients are joined into another.

    The average is a power law over the steps, with most weight on about the last eighth: it needs no plan and no schedule.
    """

    RECENT = 8.0
    FOLLOW = 0.05  # of each step into the follower
    TAU = 1000.0  # steps after which the rate begins to fall, as lr / (1 + step / TAU)^decay

    def __init__(self, module: nn.Module, lr: float, clip: float, decay: float = 0.5, follow: bool = False):
        self.named = dict(module.named_parameters())
        self.clip, self.lr, self.decay = clip, lr, decay
        self.kernel = fused_kernel(next(module.parameters()).device, follow)
        sizes = [p.numel() for p in self.named.values()]
        gaps = [-size % ALIGN for size in sizes]
        first = next(iter(self.named.values()))
        self.num_seeds = first.shape[0]
        self.values = nn.Parameter(torch.zeros(sum(sizes) + sum(gaps), device=first.device))
        self.values.grad = torch.zeros_like(self.values)
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
        whole = self.values.grad
        self.slopes = {
            name: whole[here].view(self.named[name].shape) for name, here in self.slices.items()
        }  # the gradient by name, as views
        self._by_seed = [g.view(self.num_seeds, -1) for g in self.slopes.values()]
        self._gaps = [self.values.new_zeros(gap, requires_grad=False) for gap in gaps]
        # Adam's rate and the average's weight, both of the form scale * (1 + step / tau)^power
        self.curves = (lr, self.TAU, -decay), (1.0, self.RECENT, -1.0)
        self._curves = torch.tensor(self.curves, dtype=torch.float64, device=first.device).T  # the same where a GPU reads it
        self.paces = torch.tensor([lr, 1.0], device=first.device)
        many = len(self.values)
        piece = max(1024, -(-many // PIECES)) if first.is_cuda else many
        self.moments = torch.zeros(2, many, device=first.device)  # Adam's means of the gradient and of its square
        self.adam_steps = torch.zeros(-(-many // piece), device=first.device)  # a piece
        self._pieces = [x.split(piece) for x in (self.values.data, whole, *self.moments)]
        if self.kernel is not None:
            self.spans = self.kernel.spans(self.seed_spans(), first.device)
        self.norms = torch.zeros(self.num_seeds, device=first.device)  # of the last gradient, each seed's, before it was clipped
        self._compiled: _Compiled | None = None

    def seed_spans(self) -> list[tuple[int, int, int]]:
        """Of every parameter each seed's numbers: from where to where, and whose."""
        each = [(here.start, (here.stop - here.start) // self.num_seeds) for here in self.slices.values()]
        return [(at + s * n, at + (s + 1) * n, s) for at, n in each for s in range(self.num_seeds)]

    def compile(self) -> None:
        """From now on update by compiled loops, if there are any: where a gradient takes as long as an operator."""
        if self.values.device.type == "cpu" and self.follower is None and loops() is not None:
            self._compiled = _Compiled(self)

    def _adam(self, rate: Any) -> None:
        """torch's fused Adam on the block in pieces, without the optimiser around it, which takes as long as the update of a small network."""
        self.adam_steps += 1
        values, grad, means, squares = self._pieces
        torch._fused_adam_(
            values,
            grad,
            means,
            squares,
            [],
            self.adam_steps.unbind(),
            lr=rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def differentiate(self, loss: Tensor) -> None:
        """Take the gradient of the summed loss [S]; `update` uses it."""
        found = torch.autograd.grad(loss.sum(), list(self.named.values()), allow_unused=True)
        self.take([nothing(p.shape, p.device) if g is None else g for g, p in zip(found, self.named.values(), strict=True)])

    @torch.no_grad()
    def take(self, gradients: list[Tensor]) -> None:
        """Join gradients, one a parameter."""
        pieces = [x for g, gap in zip(gradients, self._gaps, strict=True) for x in (g.flatten(), gap) if len(x)]
        torch.cat(pieces, out=self.values.grad)

    def update(self, step: Tensor, ends: bool = False) -> Tensor:
        """Scale each seed's gradient to a norm of at most `clip`, one Adam step, then the average; `step` = iterations before this one, to which it is
        added where this update `ends` it (a GPU would need another kernel).

        The norms before clipping [S], in memory that the next update overwrites.
        """
        if self.kernel is not None:
            self._by_kernel(step, ends)
            return self.norms
        if self._compiled is not None:
            rate, share = self._pace(step)
            self._compiled.update(rate, share, float(self.clip))
        else:
            self._by_operators(step)
        if ends and step.device.type == "cpu":
            step.numpy().fill(step.item() + 1)  # without the way through an operator
        elif ends:
            step += 1
        return self.norms

    @torch.no_grad()
    def _by_kernel(self, step: Tensor, ends: bool) -> None:
        grad = self.values.grad
        assert grad is not None
        pace = {"lr": self.lr, "tau": self.TAU, "decay": self.decay, "recent": self.RECENT, "follow": self.FOLLOW, "clip": self.clip}
        state = (self.values, grad, self.moments, self.average, self.follower, self.norms, self.adam_steps, self.spans)
        with torch.cuda.device(grad.device):
            self.kernel.update(*state, step, ends, **pace)

    @torch.no_grad()
    def _by_operators(self, step: Tensor) -> None:
        grad, (rate, share) = self.values.grad, self._pace(step)
        assert grad is not None
        self._clip(grad)
        self._adam(rate)
        self.average.lerp_(self.values, share)
        if self.follower is not None:
            self.follower.lerp_(self.values, self.FOLLOW)

    def _pace(self, step: Tensor) -> Any:
        """Adam's rate and the average's weight: on a CPU as numbers, which cost less than operators; else where nobody has to wait for them."""
        if step.device.type == "cpu":
            return self._pace_at(step.item())
        scale, tau, power = self._curves
        return self.paces.copy_(scale * (1 + step / tau) ** power).unbind()

    def _pace_at(self, done: float) -> list[float]:
        return [float(np.float32(scale * (1 + done / tau) ** power)) for scale, tau, power in self.curves]

    def for_loops(self, done: float, many: int) -> tuple[Any, ...]:
        """For compiled loops that update by themselves: what they work on, and the paces of so many steps."""
        assert self._compiled is not None
        before = float(self._compiled.steps[0])
        paces = np.array([_pace_of_adam(before + k, *self._pace_at(done + k)) for k in range(many)]).reshape(many, 3)
        return self._compiled.given(float(self.clip), paces)

    def passed(self, many: int) -> None:
        """So many steps were taken by others."""
        self.adam_steps += many

    def _clip(self, grad: Tensor) -> None:
        """By pieces, each seed's its own: a vector that says whose each number is would be read as often as the gradient."""
        if self.num_seeds == 1:
            torch.linalg.vector_norm(grad.unsqueeze(0), dim=1, out=self.norms)
        else:
            each = torch.stack([torch.linalg.vector_norm(g, dim=1) for g in self._by_seed])
            torch.linalg.vector_norm(each, dim=0, out=self.norms)
        if grad.is_cuda or not all(norm <= self.clip for norm in self.norms.tolist()):  # NaN is not below either
            scale = (self.clip / self.norms.clamp(min=1e-12)).clamp(max=1)
            for g in self._by_seed:
                g.mul_(scale.unsqueeze(1))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages in place."""
        kept = self.values.clone()
        self.values.copy_(self.average)
        self.average.copy_(kept)

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


class _Compiled:
    """Clipping, Adam and the average of a block on the CPU. A sum of squares is one of pieces, which no number of threads changes."""

    PIECE = 1 << 11  # numbers, which stay in the first cache
    PART = 1 << 18  # and so many are worth a thread

    def __init__(self, flat: FlatParameters):
        spans = sorted(flat.seed_spans(), key=lambda span: span[2])
        pieces = np.array([(at, min(at + self.PIECE, end), s) for begin, end, s in spans for at in range(begin, end, self.PIECE)])
        self.seeds, self.pieces = flat.num_seeds, pieces[:, :2].copy()
        self.first = np.searchsorted(pieces[:, 2], np.arange(self.seeds + 1))  # where each seed's begin
        self.found, self.parts = np.empty(len(pieces), dtype=np.float32), 1 + len(flat.values) // self.PART
        values, grad = flat.values.detach(), flat.values.grad
        assert grad is not None
        self.state = (grad.numpy(), values.numpy(), *flat.moments.numpy(), flat.average.numpy())
        self.norms, self.steps = flat.norms.numpy(), flat.adam_steps.numpy()

    def given(self, clip: float, paces: np.ndarray) -> tuple[Any, ...]:
        """What the loop works on."""
        return self.first, self.pieces, self.found, self.norms, clip, *self.state, paces

    def update(self, rate: float, share: float, clip: float) -> None:
        compiled, given = loops(), (0, *self.given(clip, np.array([_pace_of_adam(float(self.steps[0]), rate, share)])))
        self.steps[0] += 1
        parts = min(self.parts, torch.get_num_threads()) if self.seeds == 1 else 1
        if parts == 1:
            in_parts(lambda s, e: compiled.update(s, e, 0, 1, True, True, *given), self.seeds, self.parts)
            return
        for sums in (True, False):  # the norm is of all parts
            one_by_one(lambda part: compiled.update(0, 1, part, parts, sums, not sums, *given), parts)  # noqa: B023 - it is over before the next begins


def _pace_of_adam(done: float, rate: float, share: float) -> tuple[float, float, float]:
    """What a compiled loop has to know of one of Adam's steps, after so many."""
    return rate / (1 - 0.9 ** (done + 1)), (1 - 0.999 ** (done + 1)) ** -0.5, share


def fused_kernel(device: torch.device, follow: bool) -> Any:
    """The module of the kernels that do an update at once; None where they cannot be had."""
    return adam_kernel if device.type == "cuda" and adam_kernel.kernels(device, follow) is not None else None
