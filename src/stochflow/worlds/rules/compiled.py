"""Rules compiled for an alphabet and lengths: exact counts, uniform draws, and the environment of what can be completed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.worlds.rules.automaton import build
from stochflow.worlds.rules.language import Rule
from stochflow.worlds.rules.peptides import Summed
from stochflow.worlds.rules.product import Product, multiply
from stochflow.worlds.rules.states import MOST_STATES, TooMany

if TYPE_CHECKING:
    from stochflow.worlds.rules.env import RuledStrings
    from stochflow.worlds.rules.ruleset import Rules
    from stochflow.worlds.strings import Strings

TRIES = 1000  # draws for each string that is wanted, where a rule can only be checked after drawing


def compile_rules(rules: Rules, alphabet: str, lengths: int | tuple[int, int], approximate: bool = False) -> Compiled:
    """`Rules.compile`."""
    from stochflow.worlds.strings import Strings

    shortest, longest = (lengths, lengths) if isinstance(lengths, int) else lengths
    if not 0 <= shortest <= longest or longest < 1:
        raise UserError(f"lengths of {shortest} to {longest} letters: give 0 <= shortest <= longest, and longest >= 1")
    Strings(alphabet, longest)  # refuses what is no alphabet
    held, left_out = list(rules), []
    while True:
        try:
            product = _product(held, alphabet, (shortest, longest))
        except TooMany as problem:
            if not approximate:
                wider = "give it a larger step, " if isinstance(problem.rule, Summed) else ""
                raise UserError(
                    f"the rule '{problem.rule}' {problem.words}: {wider}loosen it, leave it out, or let it be checked after drawing "
                    "(--rules-approximate, or approximate=True), without a count and without masks that know of it"
                ) from None
            held.remove(problem.rule)
            left_out.append(problem.rule)
            continue
        if product.strings == 0:
            raise UserError(_contradiction(held, alphabet, (shortest, longest)))
        return Compiled(rules, alphabet, (shortest, longest), product, tuple(left_out))


def _product(rules: Sequence[Rule], alphabet: str, lengths: tuple[int, int], most: int = MOST_STATES) -> Product:
    automata = [a for rule in rules for a in build(rule, alphabet, lengths[1])]
    return multiply(automata, len(alphabet), lengths, most)


def _contradiction(rules: Sequence[Rule], alphabet: str, lengths: tuple[int, int]) -> str:
    """The smallest set of rules that no string meets: one rule, two, or what is left when no more can be dropped."""

    def empty(some: Sequence[Rule]) -> bool:
        try:
            return _product(some, alphabet, lengths).strings == 0
        except TooMany:  # fewer rules may need more states: then they are taken not to contradict each other
            return False

    few = [pair for size in (1, 2) for pair in combinations(rules, size)]
    smallest = next((list(pair) for pair in few if empty(pair)), None)
    if smallest is None:
        smallest = list(rules)
        for rule in rules:
            fewer = [r for r in smallest if r is not rule]
            if empty(fewer):
                smallest = fewer
    size = f"{lengths[0]}" if lengths[0] == lengths[1] else f"{lengths[0]} to {lengths[1]}"
    what = " and ".join(f"'{rule}'" for rule in smallest)
    if len(smallest) == 1:
        return f"no string of {size} letters meets the rule {what}: loosen it, or change the lengths"
    each = (
        "together, though each alone can be met"
        if len(smallest) == 2
        else "together, though all but any one of them can be met"
    )
    return f"no string of {size} letters meets the rules {what} {each}: loosen or drop one of them"


class Compiled:
    """Rules as one automaton over strings of an alphabet and of these lengths."""

    def __init__(
        self, rules: Rules, alphabet: str, lengths: tuple[int, int], product: Product, left_out: tuple[Rule, ...] = ()
    ):
        self.rules, self.alphabet, self.lengths = rules, alphabet, lengths
        self.product, self.left_out = product, left_out
        self.exact = not left_out
        self.count: int | None = product.strings if self.exact else None
        self.total = sum(len(alphabet) ** n for n in range(lengths[0], lengths[1] + 1))
        self.states = len(product.ends)  # pairs of position and joint state
        self._number = {letter: i for i, letter in enumerate(alphabet)}

    def summary(self) -> str:
        """How much is left, in words."""
        if self.exact:
            return f"{_large(self.product.strings)} of {_large(self.total)} strings meet the rules"
        later = ", ".join(f"'{rule}'" for rule in self.left_out)
        return (
            f"at most {_large(self.product.strings)} of {_large(self.total)} strings meet the rules, of which {later} can only be "
            "checked after drawing: no exact count, and draws are uniform only by rejection"
        )

    def accepts(self, text: str) -> bool:
        """Whether the text is of the alphabet and lengths and meets every rule."""
        p, node = self.product, 0
        for letter in text:
            if letter not in self._number or node >= len(p.ends):
                return False
            node = int(p.after[node, p.letter_class[self._number[letter]]])
        good = node < len(p.ends) and bool(p.ends[node])
        return good and all(rule.meets(text, self.alphabet) for rule in self.left_out)

    def broken(self, text: str) -> list[str]:
        """What the text does not meet, in words."""
        shortest, longest = self.lengths
        foreign = sorted(set(text) - set(self.alphabet))
        if foreign:
            return [f"letters of {self.alphabet}, not {''.join(foreign)}"]
        found = [] if shortest <= len(text) <= longest else [f"{shortest} to {longest} letters"]
        return found + [str(rule) for rule in self.rules if not rule.meets(text, self.alphabet)]

    # drawing ----------------------------------------------------------------------------------------------------

    def sample(self, n: int, generator: torch.Generator | None = None) -> list[str]:
        """n strings that meet all rules, each drawn uniformly among them; by rejection where a rule was left out."""
        if self.exact:
            return self._draw(n, generator)
        found: list[str] = []
        tried = 0
        while len(found) < n:
            drawn = self._draw(max(256, n - len(found)), generator)
            tried += len(drawn)
            found += [t for t in drawn if all(rule.meets(t, self.alphabet) for rule in self.left_out)]
            if len(found) < n and tried >= TRIES * max(n, 10):
                later = ", ".join(f"'{rule}'" for rule in self.left_out)
                raise UserError(
                    f"of {tried:,} strings that meet the other rules only {len(found):,} meet {later}, which is too strict to be "
                    "checked after drawing: loosen a rule so that all of them fit one automaton"
                )
        return found[:n]

    def _draw(self, n: int, generator: torch.Generator | None) -> list[str]:
        p = self.product
        members = [
            [a for a, c in zip(self.alphabet, p.letter_class, strict=True) if c == k] for k in range(p.after.shape[1])
        ]
        share = np.array([len(m) for m in members])
        logs = np.append(p.log_count, -np.inf)
        luck = torch.rand(n, self.lengths[1] + 1, dtype=torch.float64, generator=generator).numpy()
        node = np.zeros(n, dtype=np.int64)
        texts = [[] for _ in range(n)]  # type: list[list[str]]
        going = np.arange(n)
        for t in range(self.lengths[1] + 1):
            here = node[going]
            ways = np.exp(logs[p.after[here]] - logs[here][:, None]) * share
            weight = np.column_stack([ways, p.ends[here] * np.exp(-logs[here])])
            reach = weight.cumsum(1)
            mark = luck[going, t] * reach[:, -1]
            last = weight.shape[1] - 1 - (weight[:, ::-1] > 0).argmax(1)
            choice = np.minimum((reach <= mark[:, None]).sum(1), last)
            # what is left of the random number, within the chosen class, chooses the letter
            before = np.where(choice > 0, np.take_along_axis(reach, np.maximum(choice - 1, 0)[:, None], 1)[:, 0], 0.0)
            width = np.take_along_axis(weight, choice[:, None], 1)[:, 0]
            rest = np.clip((mark - before) / width, 0, 1 - 2**-40)
            on = choice < len(members)
            for i, c, r in zip(going[on].tolist(), choice[on].tolist(), rest[on].tolist(), strict=True):
                texts[i].append(members[c][int(r * len(members[c]))])
            node[going[on]] = p.after[here[on], choice[on]]
            going = going[on]
            if not len(going):
                break
        return ["".join(t) for t in texts]

    def texts(self, most: int = 1 << 17) -> list[str] | None:
        """All strings that meet the rules, by length and then alphabet; None where there may be more than `most`."""
        if self.product.strings > most:
            return None
        p = self.product
        found, front = [], [("", 0)]
        while front:
            found += [text for text, node in front if p.ends[node]]
            front = [
                (text + letter, after)
                for text, node in front
                for letter, after in zip(self.alphabet, p.after[node, p.letter_class].tolist(), strict=True)
                if after < len(p.ends)
            ]
        return [t for t in found if all(rule.meets(t, self.alphabet) for rule in self.left_out)]

    # as an environment ------------------------------------------------------------------------------------------

    @cached_property
    def _ruled(self) -> RuledStrings:
        from stochflow.worlds.rules.env import RuledStrings

        shortest, longest = self.lengths
        return RuledStrings(self, longest, None if shortest == longest else shortest)

    def env(self) -> Strings:
        """Strings whose legal moves are those that can still be completed; plain `Strings` where there is no rule.

        Rules that were left out are not part of it.
        """
        from stochflow.worlds.strings import Strings

        if len(self.rules) > len(self.left_out):
            return self._ruled
        shortest, longest = self.lengths
        return Strings(self.alphabet, longest, None if shortest == longest else shortest)

    def log_counts(self, state: Tensor) -> Tensor:
        """The log number of strings behind each move [..., M], STOP included, -inf where there is none.

        Normalised, they are the policy that draws uniformly.
        """
        return self._ruled.log_counts(state)

    def __repr__(self) -> str:
        return f"Compiled({len(self.rules)} rules, {self.alphabet!r}, {self.lengths}, {self.summary()})"


def _large(n: int) -> str:
    """A count as it is read: whole up to a million, then with two digits."""
    if n < 1_000_000:
        return f"{n:,}"
    digits = len(str(n)) - 1
    lead = round(n / 10 ** (digits - 1)) if digits < 300 else round(int(str(n)[:3]) / 10)
    if lead >= 100:
        lead, digits = 10, digits + 1
    return f"{lead // 10}.{lead % 10}e{digits}"
