"""From an order to what is made of it: a synthesiser is not steered letter by letter, so the noise comes after the order.

A cycle of the machine for each ordered letter x: with probability `deletion` no letter is made, else one letter is drawn
from row x of `table`; then, with probability `insertion`, one more letter, uniform over the alphabet. Cycles are
independent. Unlike a `Channel` it is never asked in the middle of an order, and lengths may change.

Shape letters: K letters, n ordered letters, J made letters, N texts, R makings of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.ops import NEG
from stochflow.worlds.channels import Confusion, Exact
from stochflow.worlds.env import Channel

MOST_ENTRIES = 1 << 24  # of the largest table of expectations


class Synthesis:
    """The law of the made string, given the ordered one.

    `law` is a channel without memory, applied to each letter by itself, or its table [K, K] (ordered x made).
    """

    def __init__(
        self,
        alphabet: str,
        law: Channel | Tensor | Sequence[Sequence[float]] = Exact(),  # noqa: B008
        insertion: float = 0.0,
        deletion: float = 0.0,
    ):
        self.alphabet, self.letters = alphabet, len(alphabet)
        self.table = _table(law, alphabet)  # [K, K] float64
        for name, rate in (("insertion", insertion), ("deletion", deletion)):
            if not (isinstance(rate, (int, float)) and 0 <= rate < 1):
                raise UserError(f"the rate of {name}s is {rate!r}, but it must be a probability below 1")
        self.insertion, self.deletion = float(insertion), float(deletion)
        self._code = {letter: i for i, letter in enumerate(alphabet)}

    @property
    def keeps_length(self) -> bool:
        """Whether what is made always has the length of its order."""
        return self.insertion == 0 and self.deletion == 0

    @property
    def exact(self) -> bool:
        """Whether what is made is always what was ordered."""
        return self.keeps_length and bool((self.table.diagonal() == 1).all())

    def __repr__(self) -> str:
        errors = float(1 - self.table.diagonal().mean())
        return f"Synthesis({self.alphabet!r}, errors {errors:.3g} a letter, insertion={self.insertion:g}, deletion={self.deletion:g})"

    # exact laws -------------------------------------------------------------------------------------------------

    def _weights(self) -> tuple[float, np.ndarray, np.ndarray]:
        """A cycle's chance to make no letter; one letter [K, K]; two letters, the second uniform [K, K first]."""
        r, d = self.insertion, self.deletion
        p = self.table.numpy()
        return d * (1 - r), (1 - d) * (1 - r) * p + d * r / self.letters, (1 - d) * r * p / self.letters

    def log_prob(self, order: str, made: str) -> float:
        """log P(made | order), over all ways in which it can come about; -inf where it cannot."""
        return float(self.log_probs([order], [made])[0])

    def log_probs(self, orders: Sequence[str], mades: Sequence[str]) -> Tensor:
        """The same for pairs, [N] float64."""
        x, made = self.encode(orders), self.encode(mades)
        forward, scale = self.forward(x, made)
        ends = forward[-1][np.arange(len(made)), (made >= 0).sum(1)]
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(ends) + scale)

    def forward(self, x: np.ndarray, made: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """P(the first j made letters after i cycles) [n+1, N, J+1], each text scaled to a largest entry of 1, and log scales [N].

        x [N, n] and made [N, J] are letter numbers, -1 beyond the end.
        """
        none, one, two = self._weights()
        count, wide = made.shape
        found = np.zeros((x.shape[1] + 1, count, wide + 1))
        found[0, :, 0] = 1
        scale = np.zeros(count)
        for i in range(x.shape[1]):
            here, on = found[i], x[:, i] >= 0
            row, letter = x[:, i : i + 1].clip(0), made.clip(0)
            first = np.where(made >= 0, one[row, letter], 0)  # [N, J]
            after = none * here
            after[:, 1:] += first * here[:, :-1]
            if wide > 1:
                pair = np.where(made >= 0, two[row, letter], 0)[:, :-1] * (made[:, 1:] >= 0)
                after[:, 2:] += pair * here[:, :-2]
            after = np.where(on[:, None], after, here)
            top = after.max(1)
            after /= np.where(top > 0, top, 1)[:, None]
            with np.errstate(divide="ignore"):
                scale += np.where(top > 0, np.log(np.where(top > 0, top, 1)), -np.inf)
            found[i + 1] = after
        return found, scale

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Letter numbers [N, longest], -1 beyond the end; a UserError names a foreign letter."""
        wide = max(map(len, texts), default=0)
        found = np.full((len(texts), wide), -1, dtype=np.int64)
        for i, text in enumerate(texts):
            for j, letter in enumerate(text):
                if letter not in self._code:
                    raise UserError(
                        f"sequence {i} ({text[:40]!r}) has the letter {letter!r} at position {j + 1}, "
                        f"which is not in the alphabet {self.alphabet!r}"
                    )
                found[i, j] = self._code[letter]
        return found

    def chance_exact(self, texts: Sequence[str]) -> Tensor:
        """The chance that each comes out as ordered, [N] float64."""
        if self.keeps_length:
            x = torch.from_numpy(self.encode(texts))
            right = self.table.diagonal()[x.clamp(min=0)]
            return torch.where(x >= 0, right, 1.0).prod(1)
        return self.log_probs(texts, texts).exp()

    def expect(self, values: Mapping[int, Tensor], length: int, other: float) -> Tensor | None:
        """E[value(made) | order] for every order of this length, [K^length] float64 in alphabetical order.

        `values[j]` [K^j] are the values of the made strings of length j; all other lengths have the value `other`.
        None where the tables on the way would be too large. The channel is applied position by position, from the last
        cycle back: value(y, x) is what is expected after the first cycles made y and the letters x are still to come.
        """
        k, longest = self.letters, max(values)
        wide = 2 if self.insertion else 1
        least = 0 if self.deletion else 1  # letters that a cycle makes at least
        reach = [range(least * i, min(wide * i, longest) + 1) for i in range(length + 1)]
        if max((k ** (j + length - i) for i, js in enumerate(reach) for j in js), default=0) > MOST_ENTRIES:
            return None
        none, one, two = (torch.as_tensor(w, dtype=torch.float64) for w in self._weights())
        later: dict[int, Tensor] = {}
        for j in reach[length]:
            value = values.get(j)
            later[j] = (
                torch.full((k**j, 1), other, dtype=torch.float64) if value is None else value.double().reshape(-1, 1)
            )
        for i in range(length, 0, -1):
            rest, now = k ** (length - i), {}
            for j in reach[i - 1]:
                # [K^j, K letters of cycle i, K^rest]
                total = torch.zeros(k**j, k, rest, dtype=torch.float64)
                if least == 0:
                    total += none * later[j].unsqueeze(1)
                total += _through(one, later.get(j + 1), j, other)
                if wide == 2:
                    after = later.get(j + 2)
                    summed = None if after is None else after.view(k ** (j + 1), k, rest).sum(1)
                    total += _through(two, summed, j, other * k)
                now[j] = total.reshape(k**j, k * rest)
            later = now
        return later[0].reshape(-1)

    # makings ----------------------------------------------------------------------------------------------------

    @cached_property
    def _by_chance(self) -> tuple[Tensor, Tensor]:
        """Of each ordered letter: the letters, itself first [K, K], and the chances up to each [K, K].

        An order's own letter comes first, so that with common random numbers all orders err in the same cycles.
        """
        own = torch.eye(self.letters, dtype=torch.float64)
        order = (self.table + 2 * own).argsort(dim=1, descending=True, stable=True)
        return order, self.table.gather(1, order).cumsum(1)

    def draws(self, makings: int, length: int, seed: int) -> Tensor:
        """Uniform numbers [R, length, 4] for makings of orders of up to so many letters; a longer one begins with a shorter one's."""
        dice = torch.Generator().manual_seed(seed)
        return torch.rand(length, makings, 4, dtype=torch.float64, generator=dice).transpose(0, 1)

    def make_states(
        self, state: Tensor, draws: Tensor, by_chance: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """What comes out of orders [..., n], padded with K: letters [R, ..., n] and sizes [R, ...].

        With insertions there are 2 n columns. The same draws are used for every order.
        """
        letters, chances = by_chance or self._by_chance
        k, n = self.letters, state.shape[-1]
        luck = draws.view(-1, *[1] * (state.dim() - 1), n, 4)  # [R, 1.., n, 4]
        there = state < k
        row = state.clamp(max=k - 1)
        place = (luck[..., 1:2] >= chances[row]).sum(-1).clamp(max=k - 1)  # [R, ..., n]
        made = letters[row.expand(place.shape), place]
        if self.keeps_length:
            return torch.where(there, made, k), there.sum(-1).expand(made.shape[:-1])
        extra = (luck[..., 3] * k).long().expand(made.shape)
        kept = there & (luck[..., 0] >= self.deletion)
        more = there & (luck[..., 2] < self.insertion)
        flags = torch.stack([kept, more.expand(kept.shape)], -1).flatten(-2)  # [R, ..., 2n]
        both = torch.stack([made, extra], -1).flatten(-2)
        where = torch.where(flags, flags.cumsum(-1) - 1, 2 * n)
        out = torch.full((*flags.shape[:-1], 2 * n + 1), k, dtype=state.dtype, device=state.device)
        return out.scatter(-1, where, both)[..., : 2 * n], flags.sum(-1)

    def make(self, texts: Sequence[str], makings: int, seed: int = 0) -> list[list[str]]:
        """`makings` made strings of each order, all orders with the same random numbers."""
        if makings < 1:
            raise UserError(f"{makings} makings tell nothing: give 1 or more")
        x = torch.from_numpy(self.encode(texts))
        state = torch.where(x >= 0, x, self.letters)
        made, _ = self.make_states(state, self.draws(makings, state.shape[1], seed))
        names = [*self.alphabet, ""]
        return [["".join(names[t] for t in row) for row in each] for each in made.transpose(0, 1).tolist()]


def _through(weights: Tensor, later: Tensor | None, j: int, other: float) -> Tensor | float:
    """sum_c weights[x, c] later[y c, rest], [K^j, K, rest]; `other` stands for every later value where there is none."""
    k = len(weights)
    if later is None:
        return (weights.sum(1) * other).view(1, k, 1)
    return torch.einsum("xc,ycr->yxr", weights, later.view(k**j, k, -1))


def _table(law: Channel | Tensor | Sequence[Sequence[float]] | Any, alphabet: str) -> Tensor:
    """The table of a channel, or a table given, checked; [K, K] float64."""
    k = len(alphabet)
    if not isinstance(law, Channel):
        law = Confusion(law)
    if isinstance(law, Confusion):
        table = law.table.double()
    else:
        state = torch.zeros(k, 1, dtype=torch.long)
        if law.begin(state) is not None:
            raise UserError(
                f"{law!r} remembers earlier letters, and a synthesis takes each letter by itself: give another law"
            )
        log_p = law.log_probs(state, torch.ones(k, k, dtype=torch.bool), torch.arange(k)).double()
        table = torch.where(log_p > NEG / 2, log_p.exp(), 0.0)
        table = table / table.sum(1, keepdim=True)
    if table.shape != (k, k):
        raise UserError(
            f"the law of a synthesis has {len(table)} letters, but the alphabet {alphabet!r} has {k}: give one row each"
        )
    return table
