"""Thoughts in the state: an environment whose states hold the intended actions too, and its channel and task.

Balance equations on states have no solution where the noise depends on the history (docs/sequence-models.md); on states
that hold the history they have one. Shapes as in `types`; a history is [..., 2T] tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from stochflow.errors import UserError
from stochflow.noise.dynamics import Dynamics
from stochflow.noise.thoughts import ThoughtDynamics
from stochflow.ops import NEG
from stochflow.types import Task, Trajectories
from stochflow.worlds.env import Channel, Enumerable, Env
from stochflow.worlds.strings import Strings


class ThoughtState(Enumerable):
    """Strings of fixed length beside the intended actions: states are [tokens | actions], each padded with K.

    While a string is built a move is a pair (action, token), number action * K + token; the agent's choice of the token
    has no effect (`Augmented`). A finished string then forgets its actions, the last one first (move K * K + action),
    until only the string is left, which is the rewarded object. Backwards the actions are guessed one by one, by the
    backward policy; without it the histories of one string would have to be equally likely, which no policy achieves.
    """

    def __init__(self, strings: Env):
        if not isinstance(strings, Strings) or strings.min_length is not None:
            raise UserError(
                f"thoughts can join the state of strings of fixed length only, and this is {strings!r}: "
                "leave thought_state out"
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
        """The numbers of tokens and of actions, [..., 1] each."""
        known = state != self.letters
        return known[..., : self.length].sum(-1, keepdim=True), known[..., self.length :].sum(-1, keepdim=True)

    def _last(self, columns: Tensor, size: Tensor) -> Tensor:
        """The last of the first `size` columns, [..., 1]."""
        return columns.gather(-1, (size - 1).clamp(min=0))

    def moves(self, state: Tensor) -> Tensor:
        tokens, actions = self._sizes(state)
        every = torch.arange(self.num_moves, device=state.device)
        builds = (tokens < self.length) & (every < self.pairs)
        last = self.pairs + self._last(self.thoughts(state), actions)
        forgets = (tokens == self.length) & (actions > 0) & (every == last)
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

    def _change(
        self, state: Tensor, move: Tensor, token_at: Tensor, action_at: Tensor, forget_at: Tensor, forward: bool
    ) -> Tensor:
        """The state after a move: a pair written at its two places, or the action at `forget_at` removed.

        Backwards (`forward=False`): the pair removed, or the action written back.
        """
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
        for number, size in enumerate(sizes):  # a sum of constants: no table is copied to the device
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
    """A channel of strings, or a model of one, on the states of `ThoughtState`: its memory is read from the state.

    The intended pair (a, *) becomes (a, m) with m ~ P(. | string, a, history); forgetting is exact.
    """

    env: ThoughtState

    def __init__(self, env: ThoughtState, inner: Channel):
        nn.Module.__init__(self)
        self.env, self.inner = env, inner

    def log_probs(self, state, legal, action, memory=None):
        k, pairs = self.env.letters, self.env.pairs
        table = self._table(state)  # [..., K, K]
        row = (action // k).clamp(max=k - 1)[..., None, None].expand(*action.shape, 1, k)
        chosen = table.gather(-2, row)  # [..., 1, K]
        meant = (torch.arange(k, device=state.device) == (action // k).unsqueeze(-1)).unsqueeze(-1)
        law = torch.where(meant, chosen, NEG).flatten(-2)  # [..., K * K]
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
        building = state[: env.length] if state.dim() == 4 else state  # the second half of a trajectory only forgets
        text = env.text(building)
        legal = strings.real_moves(strings.moves(text))
        memory = self._memory(building)
        if isinstance(self.inner, ThoughtDynamics):
            assert memory is not None
            table = self.inner.table(text, legal, memory)
        else:
            every = [torch.full_like(text[..., 0], a) for a in range(env.letters)]
            table = torch.stack([self.inner.log_probs(text, legal, action, memory) for action in every], -2)
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
        """The same trajectories in the inner environment: the first half of the steps, tokens and actions apart."""
        env, steps = self.env, self.env.length
        actions = torch.where(traj.actions < 0, -1, traj.actions // env.letters)[:steps]
        moves = traj.moves[:steps] % env.letters
        return Trajectories(
            env.text(traj.states[: steps + 1]), actions, moves, traj.alive[:steps], traj.score, traj.real
        )

    def __repr__(self) -> str:
        return f"Augmented({self.inner!r})"


class OfText:
    """An oracle of strings on states that hold thoughts too."""

    def __init__(self, env: ThoughtState, oracle: Callable[[Tensor], Tensor]):
        self.env, self.oracle = env, oracle
        self.on_device = bool(getattr(oracle, "on_device", False))

    def __call__(self, state: Tensor) -> Tensor:
        return self.oracle(self.env.text(state))


def step_memory(env: Env, seeds: int, batch: int, width: int, layers: int, positions: int) -> float:
    """Bytes that the activations of a training step hold, about: `positions` is what a trunk reads of a state (1: an MLP)."""
    states = seeds * batch * (2 * env.horizon + 1)
    masks = states * (env.num_moves**2 + env.num_moves) * 8  # moves are pairs, and each is masked
    return (
        states * positions * width * layers * 22 * 4 + masks
    )  # 22 vectors a block and position, measured with two blocks


def augment(task: Task) -> Task:
    """The task with thoughts in its state (`thought_state=True`): all networks see the history, the reward does not.

    The space grows from K^T to about K^(2T) states: for small worlds.
    """
    env = ThoughtState(task.env)

    def reward(score: Tensor, state: Tensor, step: Any = None) -> Tensor:
        return task.reward(score, env.text(state), step)

    return Task(env, Augmented(env, task.channel), OfText(env, task.oracle), reward)
