"""Recurrent trunks over the letters of a string: `torch.nn.GRU` and `torch.nn.LSTM`, one set of weights per seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stochflow.errors import UserError
from stochflow.nets.layers import Embedding, Generators, Linear, Trunk
from stochflow.nets.transformer import strings_of
from stochflow.types import Trajectories
from stochflow.worlds.env import Env


@dataclass(frozen=True)
class Recurrent:
    """`layers` recurrent layers read the letters after a first token; a context enters the first hidden state."""

    width: int = 64
    layers: int = 1
    kind: Literal["gru", "lstm"] = "gru"

    def __post_init__(self) -> None:
        if self.kind not in ("gru", "lstm"):
            raise UserError(f"a recurrent trunk is of kind gru or lstm, not {self.kind!r}")

    def build(self, env: Env, gens: Generators, context: int) -> Trunk:
        return _RecurrentTrunk(env, self, gens, context)


class _RecurrentTrunk(Trunk):
    def __init__(self, env: Env, spec: Recurrent, gens: Generators, context: int):
        super().__init__()
        strings = strings_of(env, "recurrent")
        self.columns = slice(
            env.state_dim - strings.length, env.state_dim
        )  # a conditioned state begins with its row number
        self.tokens, self.length = strings.tokens, strings.length
        self.width, self.kind = spec.width, spec.kind
        self.embed = Embedding(self.tokens + 2, spec.width, gens, std=0.5)  # letters, padding, first token
        self.context = Linear(context, spec.layers * spec.width, gens) if context else None
        cell: nn.RNNBase = (nn.GRU if spec.kind == "gru" else nn.LSTM)(
            spec.width, spec.width, spec.layers, batch_first=True
        )
        self._cell = [cell]  # held for its computation alone: the weights are the stacked ones
        self._names = [name for name, _ in cell.named_parameters()]
        bound = spec.width**-0.5
        for name, p in cell.named_parameters():
            drawn = torch.stack([torch.empty(p.shape).uniform_(-bound, bound, generator=g) for g in gens])
            self.register_parameter(name, nn.Parameter(drawn))

    def _run(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        """Outputs [S, N, P, H] of inputs [S, N, P, H], and the hidden state after them, one pair or tensor per seed."""
        made, after = [], []
        for s in range(len(x)):
            weights = {name: self.get_parameter(name)[s] for name in self._names}
            out, state = functional_call(self._cell[0], weights, (x[s], None if hidden is None else hidden[s]))
            made.append(out)
            after.append(state)
        return torch.stack(made), after

    def _first_hidden(self, context: Tensor | None) -> Any:
        """The hidden state that a context [S, N, C] asks for; None: zeros."""
        if self.context is None or context is None:
            return None
        h = self.context(context).unflatten(-1, (-1, self.width)).permute(0, 2, 1, 3).contiguous()  # [S, layers, N, H]
        return list(h) if self.kind == "gru" else [(one, torch.zeros_like(one)) for one in h]

    def _read(self, text: Tensor, context: Tensor | None) -> Tensor:
        """Letters [S, N, L] -> [S, N, L + 1, H], the first entry before any letter."""
        tokens = torch.cat([torch.full_like(text[..., :1], self.tokens + 1), text], -1)
        return self._run(self.embed(tokens), self._first_hidden(context))[0]

    def forward(self, state, context):
        text = state[..., self.columns]
        at = (text != self.tokens).sum(-1)
        hidden = self._read(text, context)
        return hidden.gather(2, at[..., None, None].expand(*at.shape, 1, self.width)).squeeze(2)

    def along(self, traj: Trajectories, context: Tensor | None) -> Tensor:
        text = traj.states[-1][..., self.columns]
        hidden = self._read(text, context).permute(2, 0, 1, 3)  # [L + 1, S, B, H]
        time = torch.arange(len(traj.states), device=text.device)[:, None, None]
        at = torch.minimum(time, (text != self.tokens).sum(-1))  # after the end a state does not change
        return hidden.gather(0, at.unsqueeze(-1).expand(*at.shape, self.width))

    def begin(self, state: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        first = torch.full_like(state[..., :1], self.tokens + 1)
        hidden, cache = self._run(self.embed(first), self._first_hidden(context))
        return hidden[:, :, 0], (hidden[:, :, 0], cache)

    def advance(self, cache: Any, state: Tensor, move: Tensor, t: int) -> tuple[Tensor, Any]:
        before, inner = cache
        letter = state[..., self.columns][..., t : t + 1]  # padding where the string has ended
        hidden, inner = self._run(self.embed(letter), inner)
        now = torch.where(letter != self.tokens, hidden[:, :, 0], before)
        return now, (now, inner)
