"""Strings under rules: the legal moves are those that can still be completed, so there is no dead end."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.ops import PerDevice
from stochflow.worlds.strings import Strings

if TYPE_CHECKING:
    from stochflow.worlds.rules.compiled import Compiled

LISTED = 1 << 22  # beginnings of strings up to which they are listed and numbered in order


class RuledStrings(Strings):
    """`Strings` whose mask is that of an automaton; everything else is theirs.

    A state is its tokens; the automaton reads them from the left whenever it is asked, so nothing has to be kept
    beside them. States are the beginnings of strings that meet the rules, by length and then alphabet.
    """

    index_stays = False
    next_index = None  # type: ignore[assignment]  # no formula leads from one number to the next

    def __init__(self, compiled: Compiled, length: int, min_length: int | None):
        super().__init__(compiled.alphabet, length, min_length)
        self.compiled = compiled
        p = compiled.product
        self.horizon = len(p.begins) - 2 - int((np.diff(p.begins)[::-1] > 0).argmax())  # the longest string there is
        if self.horizon == 0:
            raise UserError("only the empty string meets the rules, so there is nothing to decide: loosen them")
        self._nodes = len(p.ends)  # also the node of what cannot be completed
        dead = np.full((1, p.after.shape[1]), self._nodes)
        by_letter = np.concatenate([p.after, dead]).astype(np.int64)[:, p.letter_class]  # [N+1, K]
        stay = np.arange(self._nodes + 1)[:, None]
        table = torch.from_numpy(np.concatenate([by_letter, stay], 1).astype(np.int32))  # padding stays where it is
        ends = torch.from_numpy(np.append(p.ends, False))
        logs = torch.from_numpy(np.append(p.log_count, -np.inf))
        self._tables = PerDevice(table.flatten(), ends, logs)

    def node(self, state: Tensor) -> Tensor:
        """The automaton's node after the letters of each state, [...]."""
        table = self._tables(state.device)[0]
        node = torch.zeros_like(state[..., 0])
        for place in range(self._read(state)):
            node = table[node * (self.tokens + 1) + state[..., place]].long()
        return node

    def _read(self, state: Tensor) -> int:
        """Columns that may hold a letter; on a GPU all of them, because to look would wait for it."""
        if state.device.type != "cpu" or torch.compiler.is_compiling() or not state.numel():
            return self.length
        return int(self.lengths(state).max())

    def _after(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The node of each state [...], and the node after each letter [..., K]."""
        table = self._tables(state.device)[0].view(-1, self.tokens + 1)
        node = self.node(state)
        after = table[node][..., : self.tokens].long()
        full = state[..., -1:] != self.pad
        return node, torch.where(full, self._nodes, after)

    def moves(self, state: Tensor) -> Tensor:
        node, after = self._after(state)
        letters = after < self._nodes
        if self.min_length is None:
            return letters
        return torch.cat([letters, self._tables(state.device)[1][node].unsqueeze(-1)], -1)

    def log_counts(self, state: Tensor) -> Tensor:
        """The log number of strings behind each move [..., M] float64, -inf where there is none."""
        logs, ends = self._tables(state.device)[2], self._tables(state.device)[1]
        node, after = self._after(state)
        letters = logs[after]
        if self.min_length is None:
            return letters
        stop = torch.where(ends[node], 0.0, -torch.inf).to(letters)
        return torch.cat([letters, stop.unsqueeze(-1)], -1)

    def parents(self, state: Tensor) -> Tensor:
        return super().parents(state) & (self.node(state) < self._nodes).unsqueeze(-1)

    # enumeration ------------------------------------------------------------------------------------------------

    def _by_position(self) -> list[slice]:
        begins = self.compiled.product.begins.tolist()
        return [slice(a, b) for a, b in pairwise(begins)]

    @cached_property
    def _below(self) -> np.ndarray:
        """[N+1] the number of beginnings from each node on, itself included, modulo 2^64."""
        p = self.compiled.product
        found = np.zeros(self._nodes + 1, dtype=np.int64)
        for here in reversed(self._by_position()):
            found[here] = 1 + found[p.after[here]] @ self._share
        return found

    @cached_property
    def _share(self) -> np.ndarray:
        """[C] the letters of each class."""
        return np.bincount(self.compiled.product.letter_class)

    @cached_property
    def _layers(self) -> list[int]:
        """The number of beginnings of each length; of few enough to be listed."""
        p = self.compiled.product
        ways = np.zeros(self._nodes + 1, dtype=np.int64)
        ways[0] = 1
        for here in self._by_position():
            np.add.at(ways, p.after[here], ways[here][:, None] * self._share)
        return [int(ways[here].sum()) for here in self._by_position()]

    @cached_property
    def _count(self) -> int:
        p = self.compiled.product
        later, begin = np.zeros(1, dtype=object), self._nodes
        for here in reversed(self._by_position()):  # Python's integers: there may be very many
            now = np.ones(here.stop - here.start, dtype=object)
            for c, letters in enumerate(self._share.tolist()):
                now = now + later[np.minimum(p.after[here, c] - begin, len(later) - 1)] * letters
            later, begin = np.append(now, 0), here.start
        return int(later[0])

    def count(self) -> int:
        return self._count

    def early_count(self, steps):
        if self.count() > LISTED:  # too many to be numbered by length
            return self.count()
        return sum(self._layers[:steps])

    def early_states(self, steps):
        return self.all_states()[: self.early_count(steps)]

    @cached_property
    def _listed(self) -> tuple[Tensor, Tensor]:
        """All beginnings [n, D], and the place of each by its depth-first number [n]."""
        if self.count() > LISTED:
            raise UserError(
                f"{self.count():,} beginnings of strings meet the rules, too many to list (at most {LISTED:,}): "
                "take a network that needs no list, such as mlp or transformer"
            )
        table = self._tables(torch.device("cpu"))[0].view(-1, self.tokens + 1).long()
        state, node = self.initial((1,)), torch.zeros(1, dtype=torch.long)
        layers = [state]
        for t in range(self.horizon):
            after = table[node][:, : self.tokens]
            here, letter = (after < self._nodes).nonzero(as_tuple=True)
            state, node = state[here].clone(), after[here, letter]
            state[:, t] = letter
            layers.append(state)
        listed = torch.cat(layers)
        place = torch.empty(len(listed), dtype=torch.long)
        place[self._depth_first(listed)] = torch.arange(len(listed))
        return listed, place

    @cached_property
    def _skips(self) -> PerDevice:
        """[(N+1) * (K+1)] how far each letter leads in the depth-first order: 1 and all beginnings behind earlier letters.

        Modulo 2^64: where there are more, the number is no place in a list, but still a number.
        """
        p = self.compiled.product
        after = np.concatenate([p.after, np.full((1, p.after.shape[1]), self._nodes)])[:, p.letter_class]
        behind = self._below[after]  # [N+1, K]
        skip = np.zeros((self._nodes + 1, self.tokens + 1), dtype=np.int64)
        skip[:, : self.tokens] = 1 + np.cumsum(behind, 1) - behind
        return PerDevice(torch.from_numpy(skip.reshape(-1)))

    def _depth_first(self, state: Tensor) -> Tensor:
        """The number of each state where a beginning comes before all that go on from it, [...]."""
        table, (skip,) = self._tables(state.device)[0], self._skips(state.device)
        node, number = torch.zeros_like(state[..., 0]), torch.zeros_like(state[..., 0])
        for place in range(self._read(state)):
            at = node * (self.tokens + 1) + state[..., place]
            number, node = number + skip[at], table[at].long()
        return number

    def all_states(self, row=None) -> Tensor:
        return self._listed[0]

    def index(self, state: Tensor) -> Tensor:
        """The place of each state in `all_states`, [...]; where they are too many to list, a number of its own."""
        number = self._depth_first(state)
        if self.count() > LISTED:
            return number
        return self._kept(state.device)[0][number.clamp(0, self.count() - 1)]

    @cached_property
    def _kept(self) -> PerDevice:
        return PerDevice(self._listed[1])

    def __repr__(self) -> str:
        return (
            f"RuledStrings({self.alphabet!r}, {self.length}, min_length={self.min_length}, {self.compiled.summary()})"
        )
