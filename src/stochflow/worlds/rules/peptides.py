"""Rules on sums over the residues of a peptide, in whole steps of a scale: net charge, mean hydrophobicity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stochflow.errors import UserError, did_you_mean
from stochflow.worlds.rules.language import SLACK, Rule, span
from stochflow.worlds.rules.letters import SCALES, is_nucleic

FINEST = 1e-6  # step of a rounded scale


class Summed(Rule):
    """A sum over letters, in whole steps."""

    step: float

    def values(self, alphabet: str) -> dict[str, int]:
        """What each letter adds, in steps."""
        raise NotImplementedError

    def bounds(self, letters: int) -> tuple[float, float]:
        """The least and the greatest sum that a string of so many letters may have."""
        raise NotImplementedError

    def meets(self, text: str, alphabet: str) -> bool:
        value = self.values(alphabet)
        total = sum(value[c] for c in text) * self.step
        low, high = self.bounds(len(text))
        return low - SLACK <= total <= high + SLACK


def _check_sums(rule: Rule, low: float, high: float, step: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise UserError(f"{rule}: give finite bounds with low <= high")
    if not FINEST <= step <= 1e6:
        raise UserError(f"{rule}: a step of {step} cannot be rounded to: give one of at least {FINEST:g}")


@dataclass(frozen=True)
class Charge(Summed):
    """Net charge of a peptide: K and R +1, D and E -1, H as stated; termini do not count. Rounded to `step`."""

    low: float
    high: float
    histidine: float = 0.0
    step: float = 0.1

    def __post_init__(self) -> None:
        _check_sums(self, self.low, self.high, self.step)
        if not math.isfinite(self.histidine):
            raise UserError(f"the charge of histidine is {self.histidine}: give a finite number")

    def values(self, alphabet: str) -> dict[str, int]:
        charge = {"K": 1.0, "R": 1.0, "D": -1.0, "E": -1.0, "H": self.histidine}
        return {a: round(charge.get(a, 0.0) / self.step) for a in alphabet}

    def bounds(self, letters: int) -> tuple[float, float]:
        return self.low, self.high

    def check(self, alphabet: str, longest: int) -> None:
        if is_nucleic(alphabet) or not set("KRDE") & set(alphabet):
            raise UserError(f"{self} has no meaning for the alphabet {alphabet!r}: it is a rule for peptides")

    def __str__(self) -> str:
        rounded = "" if self.step == 0.1 else f" (rounded to {self.step:g})"
        return f"net charge {span(self.low, self.high)}{rounded}"


@dataclass(frozen=True)
class Hydrophobicity(Summed):
    """Mean hydrophobicity over the residues. `scale`: "kyte-doolittle", or (letter, value) pairs; rounded to `step` per residue."""

    low: float
    high: float
    scale: str | tuple[tuple[str, float], ...] = "kyte-doolittle"
    step: float = 0.1

    def __init__(
        self, low: float, high: float, scale: str | Mapping[str, float] | Iterable[tuple[str, float]] = "kyte-doolittle", step: float = 0.1
    ):  # fmt: skip
        if isinstance(scale, str):
            if scale not in SCALES:
                raise UserError(
                    f'there is no scale "{scale}"{did_you_mean(scale, SCALES)}: take {", ".join(SCALES)}, or give a value for each letter'
                )
            kept: str | tuple[tuple[str, float], ...] = scale
        else:
            kept = tuple(sorted(dict(scale).items()))
            for letter, value in kept:
                if not math.isfinite(value):
                    raise UserError(f"the scale gives {letter!r} the value {value}: give finite numbers")
        for name, given in {"low": low, "high": high, "scale": kept, "step": step}.items():
            object.__setattr__(self, name, given)
        _check_sums(self, low, high, step)

    def _scale(self) -> dict[str, float]:
        return SCALES[self.scale] if isinstance(self.scale, str) else dict(self.scale)

    def values(self, alphabet: str) -> dict[str, int]:
        scale = self._scale()
        return {a: round(scale[a] / self.step) for a in alphabet}

    def bounds(self, letters: int) -> tuple[float, float]:
        return self.low * letters, self.high * letters

    def check(self, alphabet: str, longest: int) -> None:
        scale = self._scale()
        missing = "".join(a for a in alphabet if a not in scale)
        if missing:
            raise UserError(f"{self}: the scale has no value for {missing!r}: give one for each letter of the alphabet")
        if is_nucleic(alphabet) and isinstance(self.scale, str):
            raise UserError(f"{self} has no meaning for the alphabet {alphabet!r}: it is a rule for peptides")

    def __str__(self) -> str:
        named = self.scale if isinstance(self.scale, str) else "own scale"
        return f"mean hydrophobicity {span(self.low, self.high)} ({named}, rounded to {self.step:g})"
