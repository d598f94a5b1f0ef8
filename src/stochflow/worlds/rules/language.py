"""Rules on strings, as frozen values. Each one says itself in words and can check a text letter by letter.

`meets` is the plain definition of a rule; the automata of `automaton.py` are held to it by brute force in the tests.
Positions are counted from 1, as on a plasmid map.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stochflow.errors import UserError
from stochflow.worlds.rules.letters import is_nucleic, pattern_sets, reverse_complement

SLACK = 1e-9  # bounds are compared with this tolerance: 0.6 * 5 must be 3


class Rule(ABC):
    """One rule on a string."""

    @abstractmethod
    def meets(self, text: str, alphabet: str) -> bool:
        """Whether the text meets the rule."""

    @abstractmethod
    def check(self, alphabet: str, longest: int) -> None:
        """A UserError where the rule makes no sense for strings of this alphabet and at most this length."""

    @abstractmethod
    def __str__(self) -> str: ...


def span(low: float, high: float) -> str:
    return f"{low:g} to {high:g}"


def _texts(value: str | Iterable[str], what: str) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else tuple(value)
    if not found or not all(isinstance(t, str) and t for t in found):
        raise UserError(f"{what} is {value!r}: give one motif or a list of motifs, none of them empty")
    return found


@dataclass(frozen=True)
class GC(Rule):
    """The share of G and C lies between `low` and `high`, in the whole string or in every stretch of `window` letters."""

    low: float = 0.0
    high: float = 1.0
    window: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise UserError(f"GC is asked to be {span(self.low, self.high)}: give shares with 0 <= low <= high <= 1")
        if self.window is not None and self.window < 1:
            raise UserError(f"a GC window of {self.window} letters holds none: give 1 or more")

    def fits(self, count: int, letters: int) -> bool:
        """Whether `count` G or C among so many letters is within the range."""
        return self.low * letters - SLACK <= count <= self.high * letters + SLACK

    def meets(self, text: str, alphabet: str) -> bool:
        marks = [c in "GC" for c in text]
        if self.window is None:
            return self.fits(sum(marks), len(marks))
        w = self.window
        return all(self.fits(sum(marks[i : i + w]), w) for i in range(len(marks) - w + 1))

    def check(self, alphabet: str, longest: int) -> None:
        if not is_nucleic(alphabet):
            raise UserError(f"{self} has no meaning for the alphabet {alphabet!r}: only DNA and RNA have a GC content")
        if self.window is not None and self.window > longest:
            raise UserError(f"{self}: no string of at most {longest} letters holds such a window: make it shorter")

    def __str__(self) -> str:
        where = "" if self.window is None else f" in every {self.window} letters"
        return f"GC {span(self.low, self.high)}{where}"


class _Motifs(Rule):
    """Motifs with IUPAC letters, on one strand or on both."""

    motifs: tuple[str, ...]
    strands: str

    def _tidy(self, motifs: str | Iterable[str]) -> None:
        object.__setattr__(self, "motifs", _texts(motifs, f"motifs of {type(self).__name__}"))
        if self.strands not in ("one", "both"):
            raise UserError(f'strands is {self.strands!r}, but it must be "one" or "both"')

    def forms(self, motif: str, alphabet: str) -> tuple[tuple[str, ...], ...]:
        """The letters allowed at each place of the motif, for each strand that counts."""
        plain = pattern_sets(motif, alphabet, str(self))
        return (plain, reverse_complement(plain, alphabet, str(self))) if self.strands == "both" else (plain,)

    def holds(self, text: str, motif: str, alphabet: str) -> bool:
        """Whether the text contains the motif."""
        return any(
            all(c in allowed for c, allowed in zip(text[i:], form, strict=False))
            for form in self.forms(motif, alphabet)
            for i in range(len(text) - len(form) + 1)
        )

    def check(self, alphabet: str, longest: int) -> None:
        for motif in self.motifs:
            self.forms(motif, alphabet)

    def _named(self) -> str:
        shown = ", ".join(self.motifs[:4]) + (f" and {len(self.motifs) - 4} more" if len(self.motifs) > 4 else "")
        return shown + (" on both strands" if self.strands == "both" else "")


@dataclass(frozen=True)
class Forbidden(_Motifs):
    """None of the motifs occurs anywhere."""

    motifs: tuple[str, ...]
    strands: str = "one"

    def __init__(self, motifs: str | Iterable[str], strands: str = "one"):
        object.__setattr__(self, "strands", strands)
        self._tidy(motifs)

    def meets(self, text: str, alphabet: str) -> bool:
        return not any(self.holds(text, m, alphabet) for m in self.motifs)

    def __str__(self) -> str:
        return f"without {self._named()}"


@dataclass(frozen=True)
class Required(_Motifs):
    """Every motif occurs somewhere (on either strand, with strands = "both")."""

    motifs: tuple[str, ...]
    strands: str = "one"

    def __init__(self, motifs: str | Iterable[str], strands: str = "one"):
        object.__setattr__(self, "strands", strands)
        self._tidy(motifs)

    def meets(self, text: str, alphabet: str) -> bool:
        return all(self.holds(text, m, alphabet) for m in self.motifs)

    def __str__(self) -> str:
        return f"with {self._named()}"


@dataclass(frozen=True)
class Fixed(Rule):
    """The string begins with `prefix`, ends with `suffix`, and has these letters at these positions (counted from 1)."""

    prefix: str = ""
    suffix: str = ""
    positions: tuple[tuple[int, str], ...] = ()

    def __init__(
        self, prefix: str = "", suffix: str = "", positions: Mapping[int, str] | Iterable[tuple[int, str]] = ()
    ):
        pairs = tuple(sorted(positions.items() if isinstance(positions, Mapping) else positions))
        object.__setattr__(self, "prefix", prefix)
        object.__setattr__(self, "suffix", suffix)
        object.__setattr__(self, "positions", pairs)
        for place, letter in pairs:
            if place < 1 or len(letter) != 1:
                raise UserError(f"fixed position {place} = {letter!r}: positions count from 1 and hold one letter")
        if not (prefix or suffix or pairs):
            raise UserError("a fixed rule fixes nothing: give prefix, suffix or positions")

    def places(self) -> dict[int, str]:
        """What is fixed from the front, by position; a UserError where two letters are asked for."""
        found = dict(enumerate(self.prefix, start=1))
        for place, letter in self.positions:
            if found.setdefault(place, letter) != letter:
                raise UserError(f"position {place} is fixed to {found[place]!r} and to {letter!r}: drop one of the two")
        return found

    def meets(self, text: str, alphabet: str) -> bool:
        there = all(place <= len(text) and text[place - 1] == letter for place, letter in self.places().items())
        return there and text.endswith(self.suffix)

    def check(self, alphabet: str, longest: int) -> None:
        for letter in "".join(self.places().values()) + self.suffix:
            if letter not in alphabet:
                raise UserError(f"{self}: {letter!r} is not in the alphabet {alphabet!r}")
        most = max([len(self.suffix), *self.places()])
        if most > longest:
            raise UserError(f"the rule '{self}' needs {most} letters, but strings have at most {longest}")

    def __str__(self) -> str:
        parts = [f"begins with {self.prefix}"] if self.prefix else []
        parts += [f"ends with {self.suffix}"] if self.suffix else []
        if self.positions:
            shown = ", ".join(f"{letter} at {place}" for place, letter in self.positions[:6])
            parts.append("has " + shown + (" ..." if len(self.positions) > 6 else ""))
        return ", ".join(parts)


@dataclass(frozen=True)
class Allowed(Rule):
    """From position `at` on, letters are those of an IUPAC pattern such as `NNRY[AC].`; what lies beyond it is free.

    A string that ends within the pattern is held to the part that it covers.
    """

    pattern: str
    at: int = 1

    def __post_init__(self) -> None:
        if not self.pattern or self.at < 1:
            raise UserError(
                f"allowed letters {self.pattern!r} from position {self.at}: give a pattern, and a position from 1 on"
            )

    def meets(self, text: str, alphabet: str) -> bool:
        sets = pattern_sets(self.pattern, alphabet, str(self))
        return all(c in allowed for c, allowed in zip(text[self.at - 1 :], sets, strict=False))

    def check(self, alphabet: str, longest: int) -> None:
        end = self.at - 1 + len(pattern_sets(self.pattern, alphabet, str(self)))
        if end > longest:
            raise UserError(f"{self} reaches to position {end}, but strings have at most {longest} letters")

    def __str__(self) -> str:
        shown = self.pattern if len(self.pattern) <= 24 else self.pattern[:21] + "..."
        return f"letters {shown}" + (f" from position {self.at}" if self.at > 1 else "")


@dataclass(frozen=True)
class Homopolymer(Rule):
    """No letter is repeated more than `longest` times in a row."""

    longest: int

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise UserError(f"homopolymers of at most {self.longest} letters leave no string: give 1 or more")

    def meets(self, text: str, alphabet: str) -> bool:
        return all(len(run.group()) <= self.longest for run in re.finditer(r"(.)\1*", text, flags=re.S))

    def check(self, alphabet: str, longest: int) -> None:
        pass

    def __str__(self) -> str:
        return f"no letter more than {self.longest} times in a row"


@dataclass(frozen=True)
class EditBudget(Rule):
    """At least `least` and at most `most` edits from a wild type: substitutions, with `indels` insertions and deletions too."""

    wild_type: str
    most: int
    indels: bool = False
    least: int = 0

    def __post_init__(self) -> None:
        if not self.wild_type:
            raise UserError("an edit budget needs a wild type to count from: give wild_type")
        if not 0 <= self.least <= self.most:
            raise UserError(f"{self.least} to {self.most} edits: give 0 <= least <= most")

    def distance(self, text: str) -> float:
        """Edits from the wild type."""
        wild = self.wild_type
        if not self.indels:
            return sum(a != b for a, b in zip(text, wild, strict=True)) if len(text) == len(wild) else math.inf
        row = list(range(len(wild) + 1))
        for j, letter in enumerate(text, start=1):
            before, row = row, [j]
            for i, w in enumerate(wild, start=1):
                row.append(min(before[i - 1] + (w != letter), before[i] + 1, row[i - 1] + 1))
        return row[-1]

    def meets(self, text: str, alphabet: str) -> bool:
        return self.least <= self.distance(text) <= self.most

    def check(self, alphabet: str, longest: int) -> None:
        for place, letter in enumerate(self.wild_type, start=1):
            if letter not in alphabet:
                raise UserError(
                    f"the wild type has {letter!r} at position {place}, which is not in the alphabet {alphabet!r}"
                )
        fewest = len(self.wild_type) - (self.most if self.indels else 0)
        if fewest > longest:
            raise UserError(
                f"{self}: the wild type has {len(self.wild_type)} letters, but strings have at most {longest}"
            )

    def __str__(self) -> str:
        kind = "edits (substitutions, insertions, deletions)" if self.indels else "substitutions"
        count = f"{self.least} to {self.most}" if self.least else f"at most {self.most}"
        shown = self.wild_type if len(self.wild_type) <= 16 else self.wild_type[:13] + "..."
        return f"{count} {kind} from {shown}"


@dataclass(frozen=True)
class Length(Rule):
    """The string has `least` to `most` letters."""

    least: int = 0
    most: int | None = None

    def __post_init__(self) -> None:
        if self.least < 0 or (self.most is not None and self.most < self.least):
            raise UserError(f"lengths of {self.least} to {self.most} letters: give 0 <= least <= most")

    def meets(self, text: str, alphabet: str) -> bool:
        return self.least <= len(text) and (self.most is None or len(text) <= self.most)

    def check(self, alphabet: str, longest: int) -> None:
        pass

    def __str__(self) -> str:
        return f"{self.least} letters or more" if self.most is None else f"{self.least} to {self.most} letters"


@dataclass(frozen=True)
class Regex(Rule):
    """The whole string matches a regular expression; with `forbid` it must not.

    Understood: letters, `.`, `[AC]`, `[^AC]`, `(..)`, `(?:..)`, `|`, `*`, `+`, `?`, `{m}`, `{m,}`, `{m,n}`, with Python's
    meaning. Write `.*` where the expression may stand anywhere.
    """

    pattern: str
    forbid: bool = False

    def meets(self, text: str, alphabet: str) -> bool:
        from stochflow.worlds.rules.regex import matches  # in time that grows with the text alone, whatever the pattern

        return matches(self.pattern, text, alphabet) != self.forbid

    def check(self, alphabet: str, longest: int) -> None:
        from stochflow.worlds.rules.regex import parse

        parse(self.pattern, alphabet)

    def __str__(self) -> str:
        return f"{'does not match' if self.forbid else 'matches'} {self.pattern}"
