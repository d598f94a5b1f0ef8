"""A set of rules as a value. Nothing here imports torch or numpy until it is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stochflow.errors import UserError
from stochflow.worlds.rules.language import Rule

if TYPE_CHECKING:
    from stochflow.worlds.rules.compiled import Compiled


class Rules:
    """Rules that every ordered string meets, all of them."""

    def __init__(self, *rules: Rule):
        for rule in rules:
            if not isinstance(rule, Rule):
                raise UserError(f"{rule!r} is not a rule: give GC(...), Forbidden(...), Length(...) and the like")
        self.rules = tuple(dict.fromkeys(rules))

    @staticmethod
    def read(path: str | Path, wild_type: str | None = None) -> Rules:
        """The rules of a TOML file; an edit budget without a wild type counts from this one."""
        from stochflow.worlds.rules.read import read_rules

        return Rules(*read_rules(Path(path), wild_type))

    @staticmethod
    def parse(data: Mapping[str, Any], wild_type: str | None = None, where: str = "the rules") -> Rules:
        """The same from what a TOML file holds."""
        from stochflow.worlds.rules.read import parse_rules

        return Rules(*parse_rules(data, wild_type, where))

    def compile(self, alphabet: str, lengths: int | tuple[int, int], approximate: bool = False) -> Compiled:
        """One automaton for strings of these lengths (from, to), with exact counts.

        Rules that contradict each other are a UserError that names a smallest set of them. Where all rules together
        need too many states, the one that multiplies them is named and refused, or, with `approximate`, left to be
        checked after drawing.
        """
        from stochflow.worlds.rules.compiled import compile_rules

        return compile_rules(self, alphabet, lengths, approximate)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and self.rules == other.rules

    def __hash__(self) -> int:
        return hash(self.rules)

    def __repr__(self) -> str:
        return f"Rules({', '.join(map(repr, self.rules))})"
