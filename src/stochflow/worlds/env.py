"""The two abstractions everything stands on: `Env`, the geometry of moves, and `Channel`, where chance lives."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from stochflow.errors import need_kind
from stochflow.ops import NEG, but, gumbel_argmax, keep, pick


class Env(ABC):
    """A deterministic DAG over moves: no chance, no reward, no `done`.

    An object ends by the STOP move or by having nothing but STOP left.
    """

    state_dim: int  # D
    num_moves: int  # M, STOP included
    horizon: int  # T, the longest number of real decisions
    stop: int | None = None  # which move is STOP; None: objects end when they are full
    tree: bool = False  # True: every state but the first has exactly one parent
    # True: objects take exactly T moves, all of them always legal, and step t's move becomes column D - T + t
    free: bool = False
    contexts: Tensor | None = None  # [R, ...] real-valued conditioning, one row per context

    @abstractmethod
    def initial(self, batch: tuple[int, ...], row: Tensor | None = None) -> Tensor:
        """The first state, [*batch, D]; `row` = context row numbers [*batch]."""

    @abstractmethod
    def moves(self, state: Tensor) -> Tensor:
        """Legal moves [..., M]; complete where nothing but STOP is legal."""

    @abstractmethod
    def step(self, state: Tensor, move: Tensor) -> Tensor:
        """The next state [..., D]; STOP leaves the state as it is. Illegal moves give any state, never an error."""

    @abstractmethod
    def parents(self, state: Tensor) -> Tensor:
        """Moves that may have led here [..., M]; never STOP."""

    @abstractmethod
    def unstep(self, state: Tensor, move: Tensor) -> Tensor:
        """The parent from which `move` leads here, [..., D]."""

    @abstractmethod
    def features(self, state: Tensor) -> Tensor:
        """A float vector per state [..., F], the input of networks."""

    def switched(self, move: Tensor, t: int | Tensor) -> Tensor | None:
        """Of a free environment: the number [...] of the one feature that step t's move changes, from 0 to 1.

        None: a move changes more than that.
        """
        return None

    def real_moves(self, mask: Tensor) -> Tensor:
        """A mask of moves [..., M] without STOP, as channels take it."""
        if self.stop is None:
            return mask
        return mask & but(self.num_moves, self.stop, mask.device)

    def unfinished(self, state: Tensor) -> Tensor | None:
        """[...] True where an object must not end: a way that ends there is a dead end. None: it may end anywhere."""
        return None

    def complete(self, state: Tensor) -> Tensor:
        """[...] True where nothing but STOP is left."""
        return ~self.real_moves(self.moves(state)).any(-1)

    def applied(self, channel: Channel) -> Channel:
        """A channel as it acts on the states of this environment."""
        while isinstance(channel, Inside):
            channel = channel.channel
        return channel


def need_env(env: object, what: str = "env") -> None:
    """UserError unless this is an environment."""
    need_kind(what, env, Env, "an environment, such as Grid(2, 8) or Strings('ACGT', 8)")


class Enumerable(Env):
    """An environment small enough to list, which makes the law of any policy exact."""

    @abstractmethod
    def all_states(self, row: int | None = None) -> Tensor:
        """[N, D], parents before children, the initial state first; `row` = the context they belong to."""

    @abstractmethod
    def index(self, state: Tensor) -> Tensor:
        """Position of each state in `all_states`, [...]."""

    def count(self) -> int:
        """N, without listing them where a formula knows."""
        return len(self.all_states())

    def early_count(self, steps: int) -> int:
        """n such that the first n of `all_states` hold every state that fewer than `steps` moves can reach."""
        return self.count()

    def early_states(self, steps: int) -> Tensor:
        """The first `early_count(steps)` states, [n, D]."""
        return self.all_states()


class Channel(ABC):
    """The law from the intended action to the realised move.

    `legal` [..., M] never contains STOP, and STOP is never an action of it: that STOP is exact is settled
    in rollout, evaluate and exact. A channel whose law depends on the past keeps it in `memory`.
    """

    exact: bool = False  # True: no noise, the move is always the action
    whole: bool = False  # True: it sees whole states, the context row of a condition included, and not the inner ones

    @abstractmethod
    def log_probs(self, state: Tensor, legal: Tensor, action: Tensor, memory: Tensor | None = None) -> Tensor:
        """log P(move | state, action) [..., M]; NEG (or less) where impossible."""

    def marginal(self, state: Tensor, legal: Tensor, log_pi: Tensor, memory: Tensor | None = None) -> Tensor:
        """log sum_a pi(a) P(move | a) [..., M] over the legal actions a; log_pi [..., M]."""
        table = torch.stack(
            [self.log_probs(state, legal, torch.full_like(state[..., 0], a), memory) for a in range(legal.shape[-1])],
            -2,
        )
        joint = keep(legal.unsqueeze(-1), log_pi.unsqueeze(-1) + table, NEG)  # [..., M actions, M moves]
        return keep(legal, joint.logsumexp(-2), NEG)

    def arrivals(self, state: Tensor, legal: Tensor, move: Tensor, memory: Tensor | None = None) -> Tensor:
        """log P(the realised move | each action) [..., M]."""
        rows = [self.log_probs(state, legal, torch.full_like(move, a), memory) for a in range(legal.shape[-1])]
        return torch.stack([pick(row, move) for row in rows], -1)

    def sample(self, state: Tensor, legal: Tensor, action: Tensor, memory: Tensor | None = None) -> Tensor:
        """A realised move for each action, [...]."""
        return gumbel_argmax(self.log_probs(state, legal, action, memory))

    def begin(self, state: Tensor) -> Tensor | None:
        """The memory before the first move; None: no memory."""
        return None

    def remember(self, memory: Tensor | None, state: Tensor, action: Tensor, move: Tensor) -> Tensor | None:
        """The memory after a move."""
        return memory


class Inside(Channel):
    """A channel of an inner environment, on states whose first column is a context row: it sees the columns after it."""

    def __init__(self, channel: Channel):
        self.channel = channel

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.channel.exact

    def log_probs(self, state, legal, action, memory=None):
        return self.channel.log_probs(state[..., 1:], legal, action, memory)

    def marginal(self, state, legal, log_pi, memory=None):
        return self.channel.marginal(state[..., 1:], legal, log_pi, memory)

    def arrivals(self, state, legal, move, memory=None):
        return self.channel.arrivals(state[..., 1:], legal, move, memory)

    def sample(self, state, legal, action, memory=None):
        return self.channel.sample(state[..., 1:], legal, action, memory)

    def begin(self, state):
        return self.channel.begin(state[..., 1:])

    def remember(self, memory, state, action, move):
        return self.channel.remember(memory, state[..., 1:], action, move)

    def __repr__(self) -> str:
        return repr(self.channel)


def numbers(env: Env) -> bool:
    """Whether a formula numbers the states in 64 bits; to list them all would cost more than the numbers save."""
    return (
        isinstance(env, Enumerable)
        and env.contexts is None
        and type(env).count is not Enumerable.count
        and env.count() < 2**62
    )
