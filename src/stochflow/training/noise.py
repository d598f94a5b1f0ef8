"""The model of the noise while it learns: from real steps alone, with averaged weights that the flows balance against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from stochflow.engines.choose import Chosen
from stochflow.engines.flat import FlatParameters
from stochflow.errors import UserError
from stochflow.learn.buffer import Buffer
from stochflow.noise.dynamics import Dynamics
from stochflow.ops import zeros
from stochflow.training import distributed
from stochflow.types import Trajectories


class NoiseTraining(NamedTuple):
    """How a model of the noise learns: from the current batch, or from a buffer of earlier ones."""

    lr: float = 1e-3
    clip: float = 10.0  # largest gradient norm, per seed
    buffer: Buffer | None = None
    rounds: int = 1  # updates per iteration and
    sample_size: int = 16  # trajectories per update, with a buffer


class NoiseLearner:
    """A model and its flat parameters (None where it has none to learn by gradient)."""

    def __init__(self, dynamics: Dynamics, how: NoiseTraining, seeds: int):
        self.dynamics, self.how, self.seeds = dynamics, how, seeds
        learns = any(True for _ in dynamics.parameters())
        self.flat = FlatParameters(dynamics, how.lr, how.clip) if learns else None
        if self.flat is not None and self.flat.num_seeds != seeds:
            raise UserError(
                f"the policy has {seeds} seeds, but the model of the noise has {self.flat.num_seeds}: "
                "build both from the same seeds"
            )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Flows balance against the averaged model: the last step's noise in P would be noise in every residual."""
        if self.flat is None:
            yield
            return
        self.flat.swap()
        try:
            yield
        finally:  # also after a failure, so that a checkpoint has weights and averages in their places
            self.flat.swap()

    def arrivals(self, engines: Chosen, traj: Trajectories) -> Tensor | None:
        """[T, S, B, M] log P(the realised move | each action) by the averaged model; None: what is intended happens."""
        return None if self.dynamics.exact else engines.noise.arrivals(self.dynamics, self.flat, traj)

    def learn(
        self, engines: Chosen, fresh: Trajectories, step: Tensor, note: bool, group: distributed.Group | None
    ) -> tuple[Tensor, Tensor]:
        """From real steps alone: of this batch, or of a buffer of earlier ones. Loss and gradient norm, each [S]."""
        if group is None:
            self.dynamics.observe(fresh)
        else:
            group.observe(self.dynamics, fresh)
        if self.flat is None:
            zero = zeros((self.seeds,), fresh.moves.device)
            return self.dynamics.loss(fresh) if note else zero, zero
        buffer = self.how.buffer
        if buffer is None:
            return self._update(engines, self.flat, fresh, step, group, ends=True)
        buffer.add(fresh)
        for left in reversed(range(self.how.rounds)):
            batch = buffer.sample(self.how.sample_size)
            loss, norm = self._update(engines, self.flat, batch, step, group, ends=left == 0)
        return loss, norm

    def _update(
        self,
        engines: Chosen,
        flat: FlatParameters,
        traj: Trajectories,
        step: Tensor,
        group: distributed.Group | None,
        ends: bool,
    ) -> tuple[Tensor, Tensor]:
        loss = engines.noise.learn_noise(self.dynamics, flat, traj)
        if group is not None:
            group.average(flat, distributed.noise_terms_of(self.dynamics, traj))
        return loss, engines.update.update(flat, step, ends)
