"""Plain torch: the reference for the other engines, the fallback where they refuse, and the page to read first.

One iteration is `rollout`, the oracle, `evaluate`, the objective's loss and autograd, then clipping, Adam and the averages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stochflow.engines.base import Job, Request, Residuals, Rewards, Schedule, Support, Walk
from stochflow.engines.flat import FlatParameters
from stochflow.learn.rollout import rollout
from stochflow.noise.dynamics import Dynamics
from stochflow.types import Fading, Trajectories


class Eager:
    """Covers everything; its gradients come from `Trainer.loss` and autograd, because objectives are written in torch."""

    name = "eager"
    support = Support("any", "any", "any", "any", "any", "none but memory")

    def __init__(self) -> None:
        self._optimisers: dict[int, tuple[FlatParameters, torch.optim.Adam]] = {}

    def unavailable(self) -> str | None:
        return None

    def why_not(self, job: Job) -> str | None:
        return None

    def why_not_walk(self, request: Request) -> str | None:
        return None

    def why_not_noise(self, dynamics: Dynamics) -> str | None:
        return None

    def why_not_update(self, flat: FlatParameters) -> str | None:
        return None

    def walk(self, request: Request) -> Walk:
        explore = request.explore.now() if isinstance(request.explore, Fading) else request.explore
        r = request
        return Walk(rollout(r.task, r.policy, r.batch, row=r.row, explore=explore, temper=r.temper, steps=r.steps))

    def traces(self, job: Job) -> None:
        return None

    def gradient(self, job: Job, walk: Walk, rewards: Rewards, log_k: Tensor | None, note: bool) -> Residuals:
        raise TypeError("eager takes gradients by autograd, of the trainer's loss")

    @torch.no_grad()
    def arrivals(self, dynamics: Dynamics, flat: FlatParameters | None, traj: Trajectories) -> Tensor:
        env, here = dynamics.env, traj.states[:-1]
        if flat is not None:
            flat.swap()
        try:
            return dynamics.arrivals(here, env.real_moves(env.moves(here)), traj.moves)
        finally:
            if flat is not None:
                flat.swap()

    def learn_noise(self, dynamics: Dynamics, flat: FlatParameters, traj: Trajectories) -> Tensor:
        loss = dynamics.loss(traj)
        flat.differentiate(loss)
        return loss.detach()

    @torch.no_grad()
    def update(self, flat: FlatParameters, step: Tensor, ends: bool) -> Tensor:
        rate, share = _rates(flat, step)
        _clip(flat)
        optimiser = self._optimiser(flat)
        optimiser.param_groups[0]["lr"] = rate
        optimiser.step()
        flat.average.lerp_(flat.values, share)
        if flat.follower is not None:
            flat.follower.lerp_(flat.values, flat.FOLLOW)
        if ends:
            step += 1
        flat.changed()
        return flat.norms

    def many(self, job: Job, schedule: Schedule, most: int) -> int:
        return 0

    def _optimiser(self, flat: FlatParameters) -> torch.optim.Adam:
        """Adam on the block, with the moments that a checkpoint saves."""
        if id(flat) not in self._optimisers:
            adam = torch.optim.Adam([flat.values], lr=flat.lr, fused=True, capturable=flat.device.type == "cuda")
            mean, square = flat.moments
            adam.state[flat.values] = {"step": flat.adam_step, "exp_avg": mean, "exp_avg_sq": square}
            self._optimisers[id(flat)] = flat, adam
        return self._optimisers[id(flat)][1]


def _rates(flat: FlatParameters, step: Tensor) -> tuple[float, float] | tuple[Tensor, Tensor]:
    """Adam's rate and the average's weight: numbers on a CPU; on a GPU tensors, so that nothing has to be waited for."""
    if step.device.type == "cpu":
        return flat.rates(step.item())
    rate, share = ((scale * (1 + step / tau) ** power).float() for scale, tau, power in flat.curves)
    return rate, share


def _clip(flat: FlatParameters) -> None:
    """Scale each seed's gradient to a norm of at most `clip`; the norms before that go into `flat.norms`."""
    parts = [g.view(flat.num_seeds, -1) for g in flat.gradients.values()]
    if flat.num_seeds == 1:
        torch.linalg.vector_norm(flat.grad.unsqueeze(0), dim=1, out=flat.norms)
    else:
        each = torch.stack([torch.linalg.vector_norm(g, dim=1) for g in parts])
        torch.linalg.vector_norm(each, dim=0, out=flat.norms)
    if flat.grad.is_cuda or not all(norm <= flat.clip for norm in flat.norms.tolist()):  # NaN is not below either
        scale = (flat.clip / flat.norms.clamp(min=1e-12)).clamp(max=1)
        for g in parts:
            g.mul_(scale.unsqueeze(1))
