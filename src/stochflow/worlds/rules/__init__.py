"""Rules that every ordered string must meet, compiled into one automaton with exact look-ahead: no dead ends, exact counts."""

from stochflow.worlds.rules.language import (
    GC,
    Allowed,
    EditBudget,
    Fixed,
    Forbidden,
    Homopolymer,
    Length,
    Regex,
    Required,
    Rule,
)
from stochflow.worlds.rules.peptides import Charge, Hydrophobicity
from stochflow.worlds.rules.ruleset import Rules

__all__ = [
    "GC", "Allowed", "Charge", "EditBudget", "Fixed", "Forbidden", "Homopolymer", "Hydrophobicity", "Length", "Regex",
    "Required", "Rule", "Rules",
]  # fmt: skip
