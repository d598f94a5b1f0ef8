"""Rules that every ordered string must meet, compiled into one automaton with exact look-ahead: no dead ends, exact counts."""

from stochflow.worlds.rules.language import (
    GC,
    Allowed,
    Charge,
    EditBudget,
    Fixed,
    Forbidden,
    Homopolymer,
    Hydrophobicity,
    Length,
    Regex,
    Required,
    Rule,
)
from stochflow.worlds.rules.ruleset import Rules

__all__ = [
    "GC", "Allowed", "Charge", "EditBudget", "Fixed", "Forbidden", "Homopolymer", "Hydrophobicity", "Length", "Regex",
    "Required", "Rule", "Rules",
]  # fmt: skip
