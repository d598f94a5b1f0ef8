"""The hypergrid: coordinates that only grow, and STOP anywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from stochflow.errors import UserError, need_whole
from stochflow.ops import PerDevice, arange
from stochflow.worlds.env import Enumerable


class Grid(Enumerable):
    """States are coordinates in {0..side-1}^ndim; move d adds one to coordinate d; the last move is STOP."""

    def __init__(self, ndim: int = 2, side: int = 8):
        need_whole("ndim of a grid", ndim, -(2**63))
        need_whole("side of a grid", side, -(2**63))
        if ndim < 1:
            raise UserError(f"a grid needs at least one dimension, not ndim = {ndim}: give --ndim 1 or more")
        if side < 2:
            raise UserError(f"a grid of side {side} has nowhere to go: give --side 2 or more")
        self.ndim, self.side = ndim, side
        self.state_dim = ndim
        self.num_moves = ndim + 1
        self.stop = ndim
        self.horizon = ndim * (side - 1)
        self._places: dict[torch.device, Tensor] = {}

    def initial(self, batch, row=None):
        device = None if row is None else row.device
        return torch.zeros(*batch, self.ndim, dtype=torch.long, device=device)

    def moves(self, state: Tensor) -> Tensor:
        return torch.cat([state < self.side - 1, torch.ones_like(state[..., :1], dtype=torch.bool)], -1)

    def parents(self, state: Tensor) -> Tensor:
        return torch.cat([state > 0, torch.zeros_like(state[..., :1], dtype=torch.bool)], -1)

    def _axis(self, state: Tensor, move: Tensor) -> Tensor:
        return (arange(self.ndim, state.device) == move.unsqueeze(-1)).long()  # zero for STOP

    def step(self, state: Tensor, move: Tensor) -> Tensor:
        return (state + self._axis(state, move)).clamp(max=self.side - 1)

    def unstep(self, state: Tensor, move: Tensor) -> Tensor:
        return (state - self._axis(state, move)).clamp(min=0)

    def features(self, state: Tensor) -> Tensor:
        return (state.unsqueeze(-1) == arange(self.side, state.device)).flatten(-2).float()

    def all_states(self, row=None) -> Tensor:
        axes = [torch.arange(self.side)] * self.ndim
        return torch.cartesian_prod(*axes).reshape(-1, self.ndim)

    def index(self, state: Tensor) -> Tensor:
        if state.device not in self._places:
            with torch.inference_mode(False):
                self._places[state.device] = self.side ** torch.arange(self.ndim - 1, -1, -1, device=state.device)
        return (state * self._places[state.device]).sum(-1)

    def count(self) -> int:
        return self.side**self.ndim

    def __repr__(self) -> str:
        return f"Grid(ndim={self.ndim}, side={self.side})"


class Corners:
    """The grid reward of Bengio et al.: a plateau near each corner and a bright band inside it.

    R = base + 0.5 prod(|x| > 0.5) + 2 prod(0.6 < |x| < 0.8) on x = linspace(-1, 1, side), decided in integers:
    with d = |2i - (side-1)| the bands are 2d > side-1 and 3(side-1) < 5d < 4(side-1). Floats would round the edges.
    """

    on_device = True

    def __init__(self, side: int, base: float = 1e-3):
        self.side, self.base = side, base
        n = side - 1
        d = (2 * torch.arange(side) - n).abs()
        bands = (2 * d > n).long() + ((5 * d > 3 * n) & (5 * d < 4 * n))
        self._tables = PerDevice(bands, torch.tensor([base, base + 0.5, base + 2.5]))

    def _band(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The band of each state, [...], and the reward of each band, [3].

        Band 2 is the bright cells, 1 the rest of the plateaus, 0 all else: the lowest among the coordinates.
        """
        bands, rewards = self._tables(state.device)
        return bands[state].amin(-1), rewards

    def __call__(self, state: Tensor) -> Tensor:
        band, rewards = self._band(state)
        return rewards[band]

    def modes(self, state: Tensor) -> Tensor:
        """[...] True on the bright cells."""
        return self._band(state)[0] == 2
