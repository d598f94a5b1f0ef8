"""Thoughts: the history of intended actions beside realised moves, as the input of a model of the noise.

Intended actions inform the model of the noise (`ThoughtDynamics`). Policy, flow and backward policy see realised states
alone, or else the thoughts belong to the state for all three of them (`thought_state`). Shapes as in `types`; a history
is [..., 2T] tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, relu

from stochflow.nets.layers import Embedding, Generators, Linear
from stochflow.nets.transformer import Stack, positions
from stochflow.noise.dynamics import Dynamics, through
from stochflow.ops import masked_log_softmax
from stochflow.worlds.env import Env

# histories ------------------------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """From histories to vectors."""

    width: int

    def forward(self, history: Tensor) -> Tensor:
        """[S, N, 2T] -> [S, N, H]."""
        raise TypeError(f"{type(self).__name__} must define forward(history)")

    def along(self, history: Tensor) -> Tensor:
        """[S, B, 2T] -> [T, S, B, H]: the vectors of the history before each of the T steps."""
        raise TypeError(f"{type(self).__name__} must define along(history)")


class ReaderNet(Protocol):
    """The description of a reader: a value such as `Attention(32)`."""

    def build(self, moves: int, steps: int, gens: Generators) -> Reader: ...


@dataclass(frozen=True)
class Attention:
    """A causal transformer over action, move, action, move, ..., with position encodings learned or sinusoidal."""

    width: int = 32
    heads: int = 4
    layers: int = 2
    positions: Literal["learned", "sinusoidal"] = "learned"

    def build(self, moves: int, steps: int, gens: Generators) -> Reader:
        return _Attention(self, moves, steps, gens)


class _Attention(Reader):
    def __init__(self, spec: Attention, moves: int, steps: int, gens: Generators):
        super().__init__()
        self.width, self.pad = spec.width, 2 * moves + 1
        self.embed = Embedding(2 * moves + 3, spec.width, gens, std=0.5)  # moves, actions, unknown, padding, BOS
        self.place = positions(spec, 2 * steps + 1, gens)
        self.stack = Stack(spec.width, spec.heads, spec.layers, gens)

    def forward(self, history):
        at = (history != self.pad).sum(-1)
        hidden = self._read(history)
        return hidden.gather(2, at[..., None, None].expand(*at.shape, 1, self.width)).squeeze(2)

    def along(self, history):
        return self._read(history)[:, :, :-2:2].permute(2, 0, 1, 3)  # before step t lie BOS and 2t tokens

    def _read(self, history: Tensor) -> Tensor:
        tokens = torch.cat([torch.full_like(history[..., :1], self.pad + 1), history], -1)
        return self.stack(self.embed(tokens) + self.place())


@dataclass(frozen=True)
class Flat:
    """The comparison without attention: fully connected layers on the padded history."""

    hidden: int = 64
    layers: int = 2

    def build(self, moves: int, steps: int, gens: Generators) -> Reader:
        return _Flat(self, moves, steps, gens)


class _Flat(Reader):
    def __init__(self, spec: Flat, moves: int, steps: int, gens: Generators):
        super().__init__()
        self.width, self.steps, self.pad = spec.hidden, steps, 2 * moves + 1
        sizes = [2 * steps * self.pad] + [spec.hidden] * spec.layers
        self.layers = nn.ModuleList(Linear(a, b, gens, gain=2**0.5) for a, b in pairwise(sizes))

    def forward(self, history):
        x = one_hot(history, self.pad + 1)[..., :-1].flatten(-2).float()
        for layer in self.layers:
            x = relu(layer(x))
        return x

    def along(self, history):
        seeds, batch, slots = history.shape
        time = torch.arange(self.steps, device=history.device)[:, None]
        known = torch.arange(slots, device=history.device) < 2 * time
        prefix = torch.where(known[:, None], history.unsqueeze(1), self.pad)  # [S, T, B, 2T]
        return self(prefix.reshape(seeds, -1, slots)).view(seeds, self.steps, batch, self.width).transpose(0, 1)


class ThoughtDynamics(Dynamics):
    """P(move | state, action, earlier actions and moves): softmax of W_a h(history, state), all actions in one pass.

    Its memory is the history. Comparisons: `Flat()` instead of `Attention()` has no attention, `Neural` no history.
    """

    def __init__(
        self,
        env: Env,
        seeds: Sequence[int] = (0,),
        reader: ReaderNet = Attention(),  # noqa: B008 - a frozen value
        hidden: int = 64,
    ):
        nn.Module.__init__(self)
        self.env, self.steps = env, env.horizon
        gens = [torch.Generator().manual_seed(s + 7919) for s in seeds]  # not the policy's stream
        self.reader = reader.build(env.num_moves, self.steps, gens)
        features = env.features(env.initial((1,))).shape[-1]
        self.join = Linear(self.reader.width + features, hidden, gens, gain=2**0.5)
        self.head = Linear(hidden, env.num_moves**2, gens, gain=0.1)

    # the past -------------------------------------------------------------------------------------------------------

    def begin(self, state):
        return empty_history(self.env.num_moves, self.steps, state)

    def remember(self, memory, state, action, move):
        assert memory is not None
        return extend_history(self.env.num_moves, memory, action, move)

    # the next move --------------------------------------------------------------------------------------------------

    def table(self, state: Tensor, legal: Tensor, memory: Tensor) -> Tensor:
        """log P(move | action) for all actions, [..., M actions, M moves], of states [..., S, B, D].

        With a time dimension [T, S, B, ...] the memories belong to one trajectory, each a prefix of the last: one
        forward pass reads them all.
        """
        if state.dim() == 4:
            past = self.reader.along(memory[-1])[: len(state)].transpose(0, 1)  # [S, T, B, H]
        else:
            past = self.reader(memory).unsqueeze(1)
        here = self.env.features(state)
        here = here.transpose(0, 1) if state.dim() == 4 else here.unsqueeze(1)
        seeds, steps, batch, _ = past.shape
        x = torch.cat([past, here], -1).reshape(seeds, steps * batch, -1)
        m = self.env.num_moves
        logits = self.head(relu(self.join(x))).view(seeds, steps, batch, m, m)
        logits = logits.transpose(0, 1) if state.dim() == 4 else logits.squeeze(1)
        return masked_log_softmax(logits, legal.unsqueeze(-2).expand_as(logits))

    def log_probs(self, state, legal, action, memory=None):
        table = self.table(state, legal, self.begin(state) if memory is None else memory)
        row = action[..., None, None].expand(*action.shape, 1, legal.shape[-1])
        return table.gather(-2, row).squeeze(-2)

    def marginal(self, state, legal, log_pi, memory=None):
        with torch.no_grad():
            table = self.table(state, legal, self.begin(state) if memory is None else memory)
        return through(table, legal, log_pi)


def empty_history(moves: int, steps: int, state: Tensor) -> Tensor:
    """[..., 2T] of padding; moves are 0..M-1, actions M..2M-1, an unknown action 2M, padding 2M+1."""
    return torch.full((*state.shape[:-1], 2 * steps), 2 * moves + 1, dtype=torch.long, device=state.device)


def extend_history(moves: int, history: Tensor, action: Tensor, move: Tensor) -> Tensor:
    """The history with one more action and move; a full one stays as it is."""
    at = (history != 2 * moves + 1).sum(-1, keepdim=True)
    slot = torch.arange(history.shape[-1], device=history.device)
    meant = torch.where(action < 0, 2 * moves, moves + action).unsqueeze(-1)
    return torch.where(slot == at, meant, torch.where(slot == at + 1, move.unsqueeze(-1), history))
