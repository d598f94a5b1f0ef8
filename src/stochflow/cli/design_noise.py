"""`stochflow design noise`: a synthesiser's confusion table from pairs of ordered and sequenced strings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from stochflow.cli.complaints import parsed


@dataclass(frozen=True)
class DesignNoise:
    """A synthesiser's noise from pairs of ordered and sequenced strings: who is made for whom, insertions, deletions, with intervals."""

    pairs: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="CSV with one pair a line")]
    ordered: str = ""
    """column of what was ordered; by itself one called ordered, design or expected, or the first of two"""
    sequenced: str = ""
    """column of what was made; by itself one called sequenced, read or observed, or the second of two"""
    alphabet: str = ""
    """letters that orders are written in; DNA, RNA and protein are told apart by themselves"""
    level: float = 0.95
    """of the intervals, each by itself"""
    out: Path | None = None
    """write the table here, as --noise confusion --confusion FILE reads it"""
    json: bool = False
    """print one JSON object"""


def run(words: list[str]) -> int:
    """The command; returns the exit code."""
    asked = parsed(DesignNoise, words, prog="stochflow design noise")
    from stochflow.design.data import guess_alphabet
    from stochflow.runs.atomic import write_text
    from stochflow.types import plain
    from stochflow.worlds.pairs import estimate, read_pairs

    ordered, sequenced = read_pairs(asked.pairs, asked.ordered, asked.sequenced)
    letters = asked.alphabet or guess_alphabet(ordered, [f"what pair {i} orders" for i in range(1, len(ordered) + 1)])
    found = estimate(ordered, sequenced, letters, asked.level)
    if asked.json:
        print(json.dumps(plain(found._asdict())))
    else:
        print(found)
        left = f", {found.left_out} left out for letters outside {found.alphabet}" if found.left_out else ""
        print(f"from {found.pairs} pairs{left}; intervals at {found.level:g}, each number by itself (Clopper-Pearson)")
    if asked.out is not None:
        write_text(asked.out, found.csv())
        if not asked.json:
            rates = f" --insertion {found.insertion.value:.3g} --deletion {found.deletion.value:.3g}"
            print(asked.out)
            print(f"next: stochflow design new CAMPAIGN --data FILE.csv --noise {asked.out}{rates}")
    return 0
