"""Regular expressions as automata: a parser of a documented subset, Thompson's construction, subsets.

The subset is that of `language.Regex`; what lies outside it (look-around, back-references, classes such as \\d, lazy
quantifiers, anchors) is refused in words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from stochflow.errors import UserError

MOST_REPEATS = 1000  # of a counted repetition
DEEPEST = 50  # groups within groups
MOST_NODES = 20_000  # of the automaton before subsets are taken


@dataclass
class Nfa:
    """Thompson's automaton: from each node an edge by some letters, or up to two empty ones."""

    letters: list[frozenset[str]] = field(default_factory=list)  # empty: no edge by a letter
    to: list[int] = field(default_factory=list)
    empty: list[list[int]] = field(default_factory=list)

    def node(self, where: str) -> int:
        if len(self.to) >= MOST_NODES:
            raise UserError(f"{where} unfolds into more than {MOST_NODES} parts: shorten its counted repetitions")
        self.letters.append(frozenset())
        self.to.append(-1)
        self.empty.append([])
        return len(self.to) - 1


# A parsed expression is a nested tuple: ("set", letters) ("cat", parts) ("or", parts) ("rep", part, least, most | None)
Tree = tuple


def parse(pattern: str, alphabet: str) -> Tree:
    """The expression as a tree; a UserError says what is not understood, and where."""
    return _Parser(pattern, alphabet).whole()


class _Parser:
    def __init__(self, pattern: str, alphabet: str):
        self.text, self.alphabet, self.at, self.depth = pattern, alphabet, 0, 0

    def fail(self, what: str) -> UserError:
        return UserError(
            f"the regular expression {self.text!r}, at letter {self.at + 1}: {what}; understood are letters of the alphabet, "
            ". [..] [^..] (..) (?:..) | * + ? {m,n}"
        )

    def peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def whole(self) -> Tree:
        tree = self.either()
        if self.at < len(self.text):
            raise self.fail("this ) closes nothing")
        return tree

    def either(self) -> Tree:
        parts = [self.row()]
        while self.peek() == "|":
            self.at += 1
            parts.append(self.row())
        return parts[0] if len(parts) == 1 else ("or", tuple(parts))

    def row(self) -> Tree:
        parts = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.repeated())
        return ("cat", tuple(parts))

    def repeated(self) -> Tree:
        part = self.atom()
        mark = self.peek()
        if mark and mark in "*+?":
            self.at += 1
            part = ("rep", part, {"*": 0, "+": 1, "?": 0}[mark], 1 if mark == "?" else None)
        elif mark == "{":
            part = self.counted(part)
        else:
            return part
        if self.peek() and self.peek() in "*+?{":
            raise self.fail(
                "a repetition of a repetition: put the inner one in brackets (lazy and possessive ones are not known)"
            )
        return part

    def counted(self, part: Tree) -> Tree:
        end = self.text.find("}", self.at)
        inside = self.text[self.at + 1 : end] if end > 0 else ""
        low, comma, high = inside.partition(",")
        if not (low.isdigit() or (low == "" and comma and high)) or not (high.isdigit() or high == ""):
            raise self.fail("a count is written {2}, {2,} or {2,5}")
        least, most = int(low or 0), int(high) if high else (None if comma else int(low))
        if most is not None and most < least:
            raise self.fail(f"{{{inside}}} asks for at least {least} and at most {most}")
        if max(least, most or 0) > MOST_REPEATS:
            raise self.fail(f"a count is at most {MOST_REPEATS}")
        self.at = end + 1
        return ("rep", part, least, most)

    def atom(self) -> Tree:
        c = self.peek()
        if c == "(":
            self.at += 1
            if self.peek() == "?":
                if self.text[self.at : self.at + 2] != "?:":
                    raise self.fail("look-around, names and flags are not understood")
                self.at += 2
            self.depth += 1
            if self.depth > DEEPEST:
                raise self.fail(f"groups are nested deeper than {DEEPEST}")
            tree = self.either()
            self.depth -= 1
            if self.peek() != ")":
                raise self.fail("a ( is not closed")
            self.at += 1
            return tree
        if c == "[":
            return self.bracket()
        if c == ".":
            self.at += 1
            return ("set", frozenset(self.alphabet))
        if c in self.alphabet and c not in "*+?{}|)]^$\\":
            self.at += 1
            return ("set", frozenset(c))
        if c in "^$":
            raise self.fail(f"{c} is not needed: the whole string is matched, so write .* where it may stand anywhere")
        upper = f" (did you mean {c.upper()!r}?)" if c.upper() != c and c.upper() in self.alphabet else ""
        raise self.fail(f"{c!r} is not a letter of the alphabet {self.alphabet!r}{upper}")

    def bracket(self) -> Tree:
        end = self.text.find("]", self.at + 1)
        if end < 0:
            raise self.fail("a [ is not closed")
        inside = self.text[self.at + 1 : end]
        negated = inside.startswith("^")
        named = inside[1:] if negated else inside
        if "-" in named:
            raise self.fail(f"the range {inside!r}: list the letters one by one")
        if not named or not set(named) <= set(self.alphabet):
            raise self.fail(f"[{inside}] must hold letters of the alphabet {self.alphabet!r}")
        self.at = end + 1
        found = frozenset(self.alphabet) - frozenset(named) if negated else frozenset(named)
        return ("set", found)


def _build(nfa: Nfa, tree: Tree, start: int, end: int, where: str) -> None:
    """Edges from `start` to `end` that read what the tree describes."""
    kind = tree[0]
    if kind == "set":
        middle = nfa.node(where)
        nfa.empty[start].append(middle)
        nfa.letters[middle], nfa.to[middle] = tree[1], end
    elif kind == "cat":
        here = start
        for part in tree[1]:
            after = nfa.node(where)
            _build(nfa, part, here, after, where)
            here = after
        nfa.empty[here].append(end)
    elif kind == "or":
        for part in tree[1]:
            inner, outer = nfa.node(where), nfa.node(where)
            nfa.empty[start].append(inner)
            _build(nfa, part, inner, outer, where)
            nfa.empty[outer].append(end)
    else:
        _, part, least, most = tree
        here = start
        for _ in range(least):
            after = nfa.node(where)
            _build(nfa, part, here, after, where)
            here = after
        if most is None:
            inner, outer = nfa.node(where), nfa.node(where)
            nfa.empty[here].append(inner)
            _build(nfa, part, inner, outer, where)
            nfa.empty[outer].append(inner)
            nfa.empty[inner].append(end)
            return
        for _ in range(most - least):
            nfa.empty[here].append(end)
            after = nfa.node(where)
            _build(nfa, part, here, after, where)
            here = after
        nfa.empty[here].append(end)


class Matcher:
    """The expression as a deterministic automaton whose states are sets of nodes, made as they are asked for."""

    def __init__(self, pattern: str, alphabet: str):
        self.nfa = Nfa()
        where = f"the regular expression {pattern!r}"
        start, self.end = self.nfa.node(where), self.nfa.node(where)
        _build(self.nfa, parse(pattern, alphabet), start, self.end, where)
        self.start = self._closed({start})

    def _closed(self, nodes: set[int]) -> frozenset[int]:
        """With every node that empty edges lead to; nodes that neither read a letter nor end are left out."""
        seen, todo = set(nodes), list(nodes)
        while todo:
            for after in self.nfa.empty[todo.pop()]:
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return frozenset(n for n in seen if self.nfa.to[n] >= 0 or n == self.end)

    def step(self, state: frozenset[int], letter: str) -> frozenset[int]:
        return self._closed({self.nfa.to[n] for n in state if letter in self.nfa.letters[n]})

    def accepts(self, state: frozenset[int]) -> bool:
        return self.end in state


@lru_cache(maxsize=64)
def _matcher(pattern: str, alphabet: str) -> Matcher:
    return Matcher(pattern, alphabet)


def matches(pattern: str, text: str, alphabet: str) -> bool:
    """Whether the whole text matches."""
    matcher = _matcher(pattern, alphabet)
    state = matcher.start
    for letter in text:
        state = matcher.step(state, letter)
    return matcher.accepts(state)
