"""Ehrlich functions: strings that must hold spaced motifs and no forbidden pair of neighbours, as published by
Stanton, Alberstein, Frey et al. (2024), "Closed-form test functions for biophysical sequence design benchmarking".

A string is feasible if every transition between neighbouring letters is allowed. The score of a feasible string is the
product over the motifs of the largest part of the motif, in steps of 1 / quantization, that some place of the string
holds with the motif's spacing; that of any other is 0. The optimum is 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.worlds.rules import Forbidden, Rules
from stochflow.worlds.strings import Strings

LETTERS = "ACDEFGHIKLMNPQRSTVWYBJOUXZ0123456789"
CHANCE = 0.3  # of a transition to be forbidden


class Ehrlich:
    """One function: `allowed` [K, K] bool transitions, `motifs` [c, k] letters, `offsets` [c, k] places, the first 0.

    Called with texts it gives their scores; `score` takes tokens [..., L].
    """

    def __init__(self, allowed: Tensor, motifs: Tensor, offsets: Tensor, length: int, quantization: int | None = None):
        size = motifs.shape[1]
        self.quantization = quantization or size
        if not 1 <= self.quantization <= size:
            raise UserError(f"quantization = {quantization} must be from 1 to the motifs' length {size}")
        if len(allowed) > len(LETTERS):
            raise UserError(f"{len(allowed)} letters are more than the {len(LETTERS)} that have a name: give fewer")
        if int(offsets.max()) >= length:
            raise UserError(f"a motif of span {int(offsets.max()) + 1} does not fit strings of length {length}")
        self.allowed, self.motifs, self.offsets, self.length = allowed, motifs, offsets, length
        self.alphabet = LETTERS[: len(allowed)]
        self._code = {letter: i for i, letter in enumerate(self.alphabet)}

    @staticmethod
    def random(
        letters: int, length: int, motifs: int, size: int, seed: int = 0, quantization: int | None = None
    ) -> Ehrlich:
        """One drawn by a seed, with a feasible optimum: motifs are feasible one after another, and together no longer than a string.

        A letter may always follow itself, and some order of all letters stays allowed, so that every letter can be reached.
        """
        if motifs * size > length:
            raise UserError(
                f"{motifs} motifs of {size} letters do not fit strings of length {length}: give a longer one"
            )
        dice = torch.Generator().manual_seed(seed)
        order = torch.randperm(letters, generator=dice)
        allowed = torch.rand(letters, letters, generator=dice) >= CHANCE
        allowed |= torch.eye(letters, dtype=torch.bool)
        allowed[order, order.roll(-1)] = True
        walk = [int(torch.randint(letters, (1,), generator=dice))]
        while len(walk) < motifs * size:
            fresh = allowed[walk[-1]].clone()
            if len(walk) < letters:  # while there are new letters, none comes twice
                unused = fresh.clone()
                unused[walk] = False
                fresh = unused if bool(unused.any()) else fresh
            walk.append(int(torch.multinomial(fresh.float(), 1, generator=dice)))
        span = length // motifs
        gaps = []
        for _ in range(motifs):
            inner = 1 + torch.randperm(span - 1, generator=dice)[: size - 1].sort().values
            gaps.append(torch.cat([torch.zeros(1, dtype=torch.long), inner]))
        return Ehrlich(allowed, torch.tensor(walk).view(motifs, size), torch.stack(gaps), length, quantization)

    def feasible(self, tokens: Tensor) -> Tensor:
        """[...] whether every transition of tokens [..., L] is allowed."""
        return self.allowed[tokens[..., :-1], tokens[..., 1:]].all(-1)

    def score(self, tokens: Tensor) -> Tensor:
        """[...] in float64."""
        found = torch.ones(tokens.shape[:-1], dtype=torch.float64)
        for motif, offset in zip(self.motifs.tolist(), self.offsets.tolist(), strict=True):
            places = self.length - offset[-1]
            hits = sum((tokens[..., o : o + places] == m).long() for m, o in zip(motif, offset, strict=True))
            best = torch.as_tensor(hits).amax(-1)
            found = found * (best * self.quantization // len(motif)) / self.quantization
        return torch.where(self.feasible(tokens), found, 0.0)

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return self.score(torch.tensor([[self._code[c] for c in t] for t in texts]).reshape(len(texts), -1)).tolist()

    def optimum(self) -> str:
        """A string of score 1: every motif in its spacing, gaps filled by repeating the letter before."""
        row: list[int] = []
        for motif, offset in zip(self.motifs.tolist(), self.offsets.tolist(), strict=True):
            for m, o, after in zip(motif, offset, [*offset[1:], offset[-1] + 1], strict=True):
                row += [m] * (after - o)
        row += [row[-1]] * (self.length - len(row))
        return "".join(self.alphabet[i] for i in row)

    def start(self, seed: int = 0) -> str:
        """A feasible string, drawn letter by letter."""
        dice = torch.Generator().manual_seed(seed)
        row = [int(torch.randint(len(self.allowed), (1,), generator=dice))]
        while len(row) < self.length:
            row.append(int(torch.multinomial(self.allowed[row[-1]].float(), 1, generator=dice)))
        return "".join(self.alphabet[i] for i in row)

    def env(self) -> Strings:
        """The feasible strings alone, where the rule is known."""
        pairs = [self.alphabet[a] + self.alphabet[b] for a, b in (~self.allowed).nonzero().tolist()]
        return Rules(Forbidden(pairs)).compile(self.alphabet, self.length).env()
