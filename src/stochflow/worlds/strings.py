"""Strings built from left to right, of fixed or variable length, over any alphabet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stochflow.errors import UserError, need_whole
from stochflow.ops import arange
from stochflow.worlds.env import Enumerable

DNA = "ACGT"
RNA = "ACGU"
PROTEIN = "ACDEFGHIKLMNPQRSTVWY"
BYTES = "".join(chr(i) for i in range(256))


class Strings(Enumerable):
    """A state is its tokens, padded with K; a move appends a token; with `min_length` the last move is STOP.

    Without `min_length` every string has exactly `length` letters and there is no STOP.
    """

    tree = True

    def __init__(self, alphabet: str = DNA, length: int = 8, min_length: int | None = None):
        if not isinstance(alphabet, str):
            raise UserError(f"an alphabet is a text of its letters, not {alphabet!r}")
        for name, value in (("length", length), ("min_length", 0 if min_length is None else min_length)):
            need_whole(f"{name} of strings", value, -(2**63))
        if len(alphabet) < 2 or len(set(alphabet)) != len(alphabet):
            raise UserError(
                f"an alphabet needs at least two different letters, each once, but this one is {alphabet!r}"
            )
        if length < 1:
            raise UserError(f"strings of length {length} cannot be built: give a length of at least 1")
        if min_length is not None and not 0 <= min_length <= length:
            raise UserError(f"min_length = {min_length} must lie between 0 and length = {length}")
        self.alphabet, self.length, self.min_length = alphabet, length, min_length
        self.tokens = len(alphabet)  # K, also the padding token
        self.pad = self.tokens
        self.state_dim = length
        self.stop = None if min_length is None else self.tokens
        self.num_moves = self.tokens + (self.stop is not None)
        self.horizon = length
        same = all(getattr(type(self), name) is getattr(Strings, name) for name in ("initial", "moves", "step"))
        self.free = self.stop is None and same  # not for a subclass that forbids letters or writes them elsewhere
        self._places: dict[torch.device, Tensor] = {}  # one per device, kept: recorded iterations point to it
        self._code = {letter: i for i, letter in enumerate(alphabet)}

    # geometry ---------------------------------------------------------------------------------------------------

    def initial(self, batch, row=None):
        device = None if row is None else row.device
        return torch.full((*batch, self.length), self.pad, dtype=torch.long, device=device)

    def lengths(self, state: Tensor) -> Tensor:
        """Number of letters so far, [...]."""
        return (state != self.pad).sum(-1)

    def moves(self, state: Tensor) -> Tensor:
        letters = (state[..., -1:] == self.pad).expand(*state.shape[:-1], self.tokens)
        if self.min_length is None:
            return letters
        return torch.cat([letters, self.lengths(state).unsqueeze(-1) >= self.min_length], -1)

    def step(self, state: Tensor, move: Tensor) -> Tensor:
        here = arange(self.length, state.device) == self.lengths(state).unsqueeze(-1)
        letter = move.unsqueeze(-1)
        return torch.where(here if self.stop is None else here & (letter < self.tokens), letter, state)

    def unfinished(self, state: Tensor) -> Tensor:
        return self.lengths(state) < (self.length if self.min_length is None else self.min_length)

    def parents(self, state: Tensor) -> Tensor:
        size = self.lengths(state)
        last = state.gather(-1, (size - 1).clamp(min=0).unsqueeze(-1))
        return (arange(self.num_moves, state.device) == last) & (size > 0).unsqueeze(-1)

    def unstep(self, state: Tensor, move: Tensor) -> Tensor:
        last = arange(self.length, state.device) == self.lengths(state).unsqueeze(-1) - 1
        return torch.where(last & (move.unsqueeze(-1) < self.tokens), self.pad, state)

    def features(self, state: Tensor) -> Tensor:
        return (state.unsqueeze(-1) == arange(self.tokens, state.device)).flatten(-2).float()  # padding is all zeros

    def switched(self, move, t):
        return move + t * self.tokens if type(self).features is Strings.features else None

    # enumeration ------------------------------------------------------------------------------------------------

    def all_states(self, row=None) -> Tensor:
        return self.early_states(self.length + 1)

    def early_count(self, steps):
        steps = min(steps, self.length + 1)
        return (self.tokens**steps - 1) // (self.tokens - 1)

    def early_states(self, steps):
        levels = []
        for size in range(min(steps, self.length + 1)):
            digits = torch.arange(self.tokens**size).unsqueeze(-1)
            place = self.tokens ** torch.arange(size - 1, -1, -1)
            level = torch.full((self.tokens**size, self.length), self.pad)
            level[:, :size] = (digits // place) % self.tokens
            levels.append(level)
        return torch.cat(levels)

    def index(self, state: Tensor) -> Tensor:
        """Strings by length, then alphabet, form a K-ary heap: index = sum_j (token_j + 1) K^(size - 1 - j), [...]."""
        if state.device not in self._places:
            back = torch.arange(self.length + 1).unsqueeze(1) - 1 - torch.arange(self.length)
            self._places[state.device] = torch.where(back >= 0, self.tokens ** back.clamp(min=0), 0).to(state.device)
        return ((state + 1) * self._places[state.device][self.lengths(state)]).sum(-1)

    def next_index(self, index: Tensor, move: Tensor) -> Tensor:
        """The index after one more letter."""
        return index * self.tokens + 1 + move

    def count(self) -> int:
        return self.early_count(self.length + 1)

    # text -------------------------------------------------------------------------------------------------------

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Texts to states [N, D]; a UserError names a foreign letter or a wrong length."""
        quick = self._encode_at_once(texts)
        if quick is not None:
            return quick
        rows = []
        for i, text in enumerate(texts):
            if len(text) > self.length or (self.min_length is None and len(text) != self.length):
                want = f"exactly {self.length}" if self.min_length is None else f"at most {self.length}"
                raise UserError(f"sequence {i} ({text[:40]!r}) has {len(text)} letters, but {want} are allowed")
            for place, letter in enumerate(text):
                if letter not in self._code:
                    raise UserError(
                        f"sequence {i} ({text[:40]!r}) has the letter {letter!r} at position {place}, "
                        f"which is not in the alphabet {self.alphabet!r}"
                    )
            rows.append([self._code[c] for c in text] + [self.pad] * (self.length - len(text)))
        return torch.tensor(rows, dtype=torch.long).reshape(len(texts), self.length)

    def _encode_at_once(self, texts: Sequence[str]) -> Tensor | None:
        """The same by code points, for texts of the full length; None: something needs a closer look."""
        if not len(texts) or not all(type(text) is str and len(text) == self.length for text in texts):
            return None
        points = np.array(texts).view(np.uint32).reshape(len(texts), -1)
        letters = np.array(list(self.alphabet)).view(np.uint32)
        if points.shape[1] != self.length:
            return None
        order = letters.argsort()
        place = np.searchsorted(letters[order], points).clip(max=len(letters) - 1)
        return torch.from_numpy(order[place]) if (letters[order][place] == points).all() else None

    def decode(self, state: Tensor) -> list[str]:
        """The texts of states [..., D], as one flat list."""
        tokens = state.reshape(-1, self.length)
        if "\0" in self.alphabet:  # which numpy's strings do not keep
            letters = [*self.alphabet, ""]
            return ["".join(letters[t] for t in row) for row in tokens.tolist()]
        return np.array([*self.alphabet, ""])[tokens.cpu().numpy()].view(f"U{self.length}").ravel().tolist()

    def __repr__(self) -> str:
        return f"Strings({self.alphabet!r}, {self.length}, min_length={self.min_length})"
