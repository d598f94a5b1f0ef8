"""Thoughts: what the agent meant, read beside what happened, to predict what the world will do.

Intended actions inform the model of the noise (`ThoughtDynamics`). Policy, flow and backward policy see realised states alone, or
else the thoughts belong to the state for all three of them (`augment`): a balance that is written on states and fed with a
kernel of histories has no solution (docs/sequence-models.md). Shapes as in `types`; a history is [..., 2T] tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, relu

from stochflow.dynamics import Dynamics, through
from stochflow.env import Channel, Enumerable, Env
from stochflow.envs import Strings
from stochflow.errors import UserError
from stochflow.nets import Embedding, Generators, Linear
from stochflow.ops import NEG, masked_log_softmax
from stochflow.transformer import Stack
from stochflow.types import Task, Trajectories

# histories ------------------------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """From histories to vectors."""

    width: int

    def forward(self, history: Tensor) -> Tensor:
        """[S, N, 2T] -> [S, N, H]."""
        raise TypeError(f"{type(self).__name__} must define forward(history)")

    def along(self, history: Tensor) -> Tensor:
        """[S, B, 2T] -> [T, S, B, H]: what was known before each of the T steps."""
        raise TypeError(f"{type(self).__name__} must define along(history)")


class ReaderNet(Protocol):
    """The description of a reader: a value such as `Attention(32)`."""

    def build(self, moves: int, steps: int, gens: Generators) -> Reader: ...


@dataclass(frozen=True)
class Attention:
    """A causal transformer over action, move, action, move, ..."""

    width: int = 32
    heads: int = 4
    layers: int = 2

    def build(self, moves: int, steps: int, gens: Generators) -> Reader:
        return _Attention(self, moves, steps, gens)


class _Attention(Reader):
    def __init__(self, spec: Attention, moves: int, steps: int, gens: Generators):
        super().__init__()
        self.width, self.pad = spec.width, 2 * moves + 1
        self.embed = Embedding(2 * moves + 3, spec.width, gens, std=0.5)  # moves, actions, unknown, padding, BOS
        self.place = Embedding(2 * steps + 1, spec.width, gens, std=0.5)
        self.stack = Stack(spec.width, spec.heads, spec.layers, gens)

    def forward(self, history):
        at = (history != self.pad).sum(-1)
        hidden = self._read(history)
        return hidden.gather(2, at[..., None, None].expand(*at.shape, 1, self.width)).squeeze(2)

    def along(self, history):
        return self._read(history)[:, :, :-2:2].permute(2, 0, 1, 3)  # before step t lie BOS and 2t tokens

    def _read(self, history: Tensor) -> Tensor:
        tokens = torch.cat([torch.full_like(history[..., :1], self.pad + 1), history], -1)
        return self.stack(self.embed(tokens) + self.place.weight.unsqueeze(1))


@dataclass(frozen=True)
class Flat:
    """The rival without attention: fully connected layers on the padded history."""

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
        known = torch.arange(slots, device=history.device) < 2 * torch.arange(self.steps, device=history.device)[:, None]
        prefix = torch.where(known[:, None], history.unsqueeze(1), self.pad)  # [S, T, B, 2T]
        return self(prefix.reshape(seeds, -1, slots)).view(seeds, self.steps, batch, self.width).transpose(0, 1)


class ThoughtDynamics(Dynamics):
    """P(move | state, action, all earlier actions and moves): softmax over moves of W_a h(history, state), all actions in one pass.

    Its memory is the history. `Flat()` instead of `Attention()` is the rival without attention, `Neural` the one without history.
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

        With a time dimension [T, S, B, ...] the memories are those of one trajectory, each a prefix of the last: one pass reads them all.
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


# thoughts as part of the state ------------------------------------------------------------------------------------------


class ThoughtState(Enumerable):
    """Strings of fixed length beside the actions that were meant: states are [tokens | actions], each padded with K.

    While a string is built a move is a pair (action, token), number action * K + token; the agent's choice of the token plays no
    part (`Augmented`). A finished string then forgets its actions, the last one first (move K * K + action), until it stands
    alone as the object that is rewarded. To go back is to guess the actions one by one: that is the backward policy's share,
    and without it the histories of one string would have to be equally likely, which no policy can bring about.
    """

    def __init__(self, strings: Env):
        if not isinstance(strings, Strings) or strings.min_length is not None:
            raise UserError(
                f"thoughts can join the state of strings of fixed length only, and this is {strings!r}: leave thought_state out"
            )
        self.strings, self.letters, self.length = strings, strings.tokens, strings.length
        self.pairs = self.letters**2
        self.state_dim, self.num_moves, self.horizon = 2 * self.length, self.pairs + self.letters, 2 * self.length

    # geometry ---------------------------------------------------------------------------------------------------------

    def initial(self, batch, row=None):
        device = None if row is None else row.device
        return torch.full((*batch, self.state_dim), self.letters, dtype=torch.long, device=device)

    def text(self, state: Tensor) -> Tensor:
        """The string so far, [..., L]."""
        return state[..., : self.length]

    def thoughts(self, state: Tensor) -> Tensor:
        """The actions that are still known, [..., L]."""
        return state[..., self.length :]

    def _sizes(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """How many tokens and how many actions, [..., 1] each."""
        known = state != self.letters
        return known[..., : self.length].sum(-1, keepdim=True), known[..., self.length :].sum(-1, keepdim=True)

    def _last(self, columns: Tensor, size: Tensor) -> Tensor:
        return columns.gather(-1, (size - 1).clamp(min=0))  # [..., 1]

    def moves(self, state: Tensor) -> Tensor:
        tokens, actions = self._sizes(state)
        every = torch.arange(self.num_moves, device=state.device)
        builds = (tokens < self.length) & (every < self.pairs)
        forgets = (tokens == self.length) & (actions > 0) & (every == self.pairs + self._last(self.thoughts(state), actions))
        return builds | forgets

    def step(self, state: Tensor, move: Tensor) -> Tensor:
        tokens, actions = self._sizes(state)
        return self._change(state, move, tokens, actions, actions - 1, forward=True)

    def parents(self, state: Tensor) -> Tensor:
        tokens, actions = self._sizes(state)
        every = torch.arange(self.num_moves, device=state.device)
        pair = self._last(self.thoughts(state), actions) * self.letters + self._last(self.text(state), tokens)
        built = (tokens == actions) & (tokens > 0) & (every == pair)
        forgot = (tokens == self.length) & (actions < self.length) & (every >= self.pairs)
        return built | forgot

    def unstep(self, state: Tensor, move: Tensor) -> Tensor:
        tokens, actions = self._sizes(state)
        return self._change(state, move, tokens - 1, actions - 1, actions, forward=False)

    def _change(self, state: Tensor, move: Tensor, token_at: Tensor, action_at: Tensor, forget_at: Tensor, forward: bool) -> Tensor:
        """Write (or take away) a pair at the two places, or take away (or write back) the action at `forget_at`."""
        move = move.unsqueeze(-1)
        slot = torch.arange(self.length, device=state.device)
        pad = torch.full_like(move, self.letters)
        action, token = move // self.letters, move % self.letters
        text = torch.where(slot == token_at, token if forward else pad, self.text(state))
        thoughts = torch.where(slot == action_at, action if forward else pad, self.thoughts(state))
        other = torch.where(slot == forget_at, pad if forward else move - self.pairs, self.thoughts(state))
        return torch.where(move < self.pairs, torch.cat([text, thoughts], -1), torch.cat([self.text(state), other], -1))

    def features(self, state: Tensor) -> Tensor:
        return one_hot(state, self.letters + 1)[..., :-1].flatten(-2).float()

    # enumeration --------------------------------------------------------------------------------------------------------

    def _layers(self) -> list[tuple[int, int]]:
        """(tokens, actions) of each layer: building, then forgetting."""
        return [(n, n) for n in range(self.length + 1)] + [(self.length, n) for n in range(self.length - 1, -1, -1)]

    def all_states(self, row=None) -> Tensor:
        listed = []
        for tokens, actions in self._layers():
            text, thoughts = self._words(tokens), self._words(actions)
            listed.append(torch.cat([text.repeat_interleave(len(thoughts), 0), thoughts.repeat(len(text), 1)], 1))
        return torch.cat(listed)

    def _words(self, size: int) -> Tensor:
        """All words of one size, padded, [K^size, L]."""
        word = torch.full((self.letters**size, self.length), self.letters)
        place = self.letters ** torch.arange(size - 1, -1, -1)
        word[:, :size] = torch.arange(self.letters**size).unsqueeze(1) // place % self.letters
        return word

    def index(self, state: Tensor) -> Tensor:
        tokens, actions = self._sizes(state)
        layer = torch.where(tokens == actions, tokens, 2 * self.length - actions).squeeze(-1)
        sizes = [self.letters ** (n + k) for n, k in self._layers()]
        offset = torch.zeros_like(layer)
        for number, size in enumerate(sizes):  # a sum of constants: nothing is copied to the device
            offset = offset + (layer > number) * size
        within = self._number(self.text(state), tokens) * self.letters ** actions.squeeze(-1)
        return offset + within + self._number(self.thoughts(state), actions)

    def _number(self, word: Tensor, size: Tensor) -> Tensor:
        slot = torch.arange(self.length, device=word.device)
        power = (size - 1 - slot).clamp(min=0)
        return torch.where(slot < size, word * self.letters**power, 0).sum(-1)

    def count(self) -> int:
        return sum(self.letters ** (n + k) for n, k in self._layers())

    def decode(self, state: Tensor) -> list[str]:
        return self.strings.decode(self.text(state))

    def __repr__(self) -> str:
        return f"ThoughtState({self.strings!r})"


class Augmented(Dynamics):
    """A channel of strings, or a model of one, in the world of `ThoughtState`: the history it remembers is read off the state.

    The intended pair (a, *) becomes (a, m) with m ~ P(. | string, a, history); to forget is exact.
    """

    env: ThoughtState

    def __init__(self, env: ThoughtState, inner: Channel):
        nn.Module.__init__(self)
        self.env, self.inner = env, inner

    def log_probs(self, state, legal, action, memory=None):
        k, pairs = self.env.letters, self.env.pairs
        table = self._table(state)  # [..., K, K]
        row = (action // k).clamp(max=k - 1)[..., None, None].expand(*action.shape, 1, k)
        told = table.gather(-2, row)  # [..., 1, K]
        meant = (torch.arange(k, device=state.device) == (action // k).unsqueeze(-1)).unsqueeze(-1)
        law = torch.where(meant, told, NEG).flatten(-2)  # [..., K * K]
        forget = torch.where(torch.arange(k, device=state.device) == (action - pairs).unsqueeze(-1), 0.0, NEG).to(law)
        return torch.where(legal, torch.cat([law, forget], -1), NEG)

    def marginal(self, state, legal, log_pi, memory=None):
        k, pairs = self.env.letters, self.env.pairs
        with torch.no_grad():
            table = self._table(state)
        log_action = log_pi[..., :pairs].unflatten(-1, (k, k)).logsumexp(-1, keepdim=True)  # [..., K, 1]
        law = torch.cat([(log_action + table).flatten(-2), log_pi[..., pairs:]], -1)
        return torch.where(legal, law, NEG)

    def _table(self, state: Tensor) -> Tensor:
        """log P(token | action) for all actions at the string and history of each state, [..., K, K]."""
        env, strings = self.env, self.env.strings
        building = state[: env.length] if state.dim() == 4 else state  # along a trajectory the later half only forgets
        text = env.text(building)
        legal = strings.real_moves(strings.moves(text))
        memory = self._memory(building)
        if isinstance(self.inner, ThoughtDynamics):
            assert memory is not None
            table = self.inner.table(text, legal, memory)
        else:
            every = range(env.letters)
            table = torch.stack([self.inner.log_probs(text, legal, torch.full_like(text[..., 0], a), memory) for a in every], -2)
        rest = len(state) - len(building)
        return torch.cat([table, table[:1].expand(rest, *table.shape[1:])]) if rest else table

    def _memory(self, state: Tensor) -> Tensor | None:
        """The inner channel's memory after the history that each state holds."""
        env = self.env
        text, thoughts = env.text(state), env.thoughts(state)
        prefix = torch.full_like(text, env.letters)
        memory = self.inner.begin(prefix)
        if memory is None:
            return None
        for t in range(env.length):
            action, token = thoughts[..., t], text[..., t]
            done = (action != env.letters) & (token != env.letters)
            after = self.inner.remember(memory, prefix, torch.where(done, action, 0), torch.where(done, token, 0))
            assert after is not None
            memory = torch.where(done.view(*done.shape, *[1] * (after.dim() - done.dim())), after, memory)
            prefix = torch.where(torch.arange(env.length, device=text.device) == t, text, prefix)
        return memory

    def loss(self, traj):
        if not isinstance(self.inner, Dynamics):
            with torch.no_grad():
                return super().loss(traj)
        return self.inner.loss(self.strings_only(traj))

    def observe(self, traj):
        if isinstance(self.inner, Dynamics):
            self.inner.observe(self.strings_only(traj))

    def strings_only(self, traj: Trajectories) -> Trajectories:
        """The same trajectories as the inner world saw them: the first half of the time, tokens and actions apart."""
        env, steps = self.env, self.env.length
        actions = torch.where(traj.actions < 0, -1, traj.actions // env.letters)[:steps]
        moves = traj.moves[:steps] % env.letters
        return Trajectories(env.text(traj.states[: steps + 1]), actions, moves, traj.alive[:steps], traj.score, traj.real)

    def __repr__(self) -> str:
        return f"Augmented({self.inner!r})"


class OfText:
    """An oracle or a reward of strings, asked about states that carry thoughts too."""

    def __init__(self, env: ThoughtState, oracle: Callable[[Tensor], Tensor]):
        self.env, self.oracle = env, oracle
        self.on_device = bool(getattr(oracle, "on_device", False))

    def __call__(self, state: Tensor) -> Tensor:
        return self.oracle(self.env.text(state))


def augment(task: Task) -> Task:
    """The task with thoughts in its state (`thought_state=True`): flow, policy and backward policy see the history, the reward does not.

    The space grows from K^T to about K^(2T) states: for small worlds.
    """
    env = ThoughtState(task.env)

    def reward(score: Tensor, state: Tensor, step: Any = None) -> Tensor:
        return task.reward(score, env.text(state), step)

    return Task(env, Augmented(env, task.channel), OfText(env, task.oracle), reward)
