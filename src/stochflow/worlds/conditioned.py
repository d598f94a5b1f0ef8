"""Any environment under a condition: one more column that moves never change, the row number of a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.ops import PerDevice
from stochflow.worlds.channels import Confusion, Exact, Neighbour, Slip
from stochflow.worlds.env import Channel, Enumerable, Env, Inside, need_env


class Conditioned(Enumerable):
    """States are [row | inner state]; `contexts` [R, ...] holds the values of row r and stays out of the state.

    The policy encodes contexts[row] once per batch; oracle and reward find their target by the row. Those that read
    `contexts` at each call also know conditions that were not learned (`with_row`).
    """

    contexts: Tensor

    def __init__(self, inner: Env, contexts: Tensor):
        need_env(inner, "the inner environment")
        try:
            contexts = torch.as_tensor(contexts)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise UserError("contexts must be a table of numbers, [rows, width]") from problem
        if contexts.dim() < 2 or len(contexts) == 0:
            raise UserError(
                f"contexts must be a table of at least one row, [rows, width], but have shape {tuple(contexts.shape)}"
            )
        if not bool(torch.isfinite(contexts.float()).all()):
            row = int((~torch.isfinite(contexts.float())).flatten(1).any(1).nonzero()[0])
            raise UserError(f"context row {row} holds a NaN or infinite value: fill or mask missing values before")
        self.inner, self.contexts, self.rows = inner, contexts, len(contexts)
        self.state_dim = inner.state_dim + 1
        self.num_moves, self.horizon, self.stop, self.tree = inner.num_moves, inner.horizon, inner.stop, inner.tree
        same = all(getattr(type(self), name) is getattr(Conditioned, name) for name in ("initial", "moves", "step"))
        self.free = inner.free and same

    @contextmanager
    def with_row(self, values: Tensor) -> Iterator[int]:
        """For a while the table has one more row, of these values: its number."""
        before = self.contexts
        row = values.to(before).reshape(1, *before.shape[1:])
        self.contexts, self.rows = torch.cat([before, row]), len(before) + 1
        try:
            yield len(before)
        finally:
            self.contexts, self.rows = before, len(before)

    def _with(self, state: Tensor, inner: Tensor) -> Tensor:
        """The inner state under the condition of `state`."""
        return torch.cat([state[..., :1], inner], -1)

    def initial(self, batch, row=None):
        row = torch.zeros(batch, dtype=torch.long) if row is None else row
        return torch.cat([row.unsqueeze(-1), self.inner.initial(batch, row)], -1)

    def moves(self, state: Tensor) -> Tensor:
        return self.inner.moves(state[..., 1:])

    def step(self, state: Tensor, move: Tensor) -> Tensor:
        return self._with(state, self.inner.step(state[..., 1:], move))

    def parents(self, state: Tensor) -> Tensor:
        return self.inner.parents(state[..., 1:])

    def unstep(self, state: Tensor, move: Tensor) -> Tensor:
        return self._with(state, self.inner.unstep(state[..., 1:], move))

    def features(self, state: Tensor) -> Tensor:
        return self.inner.features(state[..., 1:])

    def applied(self, channel: Channel) -> Channel:
        """The channel on the inner state: noise speaks of the object, not of the condition."""
        bare = super().applied(channel)
        # those of the package look at no state; as they are, compiled engines know them
        if bare.whole or type(bare) in (Exact, Slip, Neighbour, Confusion):
            return bare
        return Inside(self.inner.applied(bare))

    @property
    def decode(self) -> Callable[[Tensor], list[str]]:
        """States to texts, without the condition.

        The attribute is missing, as `hasattr` sees it, where the inner environment has no printable letters: a grid has
        none, and the bins of a series are numbers.
        """
        if not hasattr(self.inner, "decode") or not getattr(self.inner, "alphabet", "a").isprintable():
            raise AttributeError(f"{self.inner!r} has no text form")
        read = self.inner.decode
        return lambda state: read(state[..., 1:])

    def switched(self, move, t):
        return self.inner.switched(move, t) if type(self).features is Conditioned.features else None

    def _listed(self) -> Enumerable:
        if not isinstance(self.inner, Enumerable):
            raise UserError(f"{self.inner!r} cannot be enumerated, so neither can it under a condition")
        return self.inner

    def all_states(self, row=None) -> Tensor:
        """The states of one context (row 0 if none is named)."""
        inner = self._listed().all_states()
        return torch.cat([torch.full_like(inner[:, :1], row or 0), inner], -1)

    def index(self, state: Tensor) -> Tensor:
        return self._listed().index(state[..., 1:])

    def count(self) -> int:
        return self._listed().count()

    def __repr__(self) -> str:
        return f"Conditioned({self.inner!r}, {self.rows} contexts)"


class Contexts:
    """An environment's contexts as they are at each call, as numbers [R, W], with one copy per device.

    The copies of the table that it begins with stay, for a CUDA graph may have recorded them.
    """

    def __init__(self, env: Env):
        self.env = env
        self._first = self._last = self._read()

    def _read(self) -> tuple[Tensor, PerDevice]:
        assert self.env.contexts is not None
        return self.env.contexts, PerDevice(self.env.contexts.flatten(1).float())

    def __call__(self, device: torch.device) -> Tensor:
        given = self.env.contexts
        if given is not self._last[0]:
            self._last = self._first if given is self._first[0] else self._read()
        return self._last[1](device)[0]
