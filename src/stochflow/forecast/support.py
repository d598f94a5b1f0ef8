"""What values a series can take: futures are held to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stochflow.errors import UserError
from stochflow.worlds.series import Track


class Limits(NamedTuple):
    """Least value, and whether values are whole."""

    least: float | None = None
    whole: bool = False


def limits(tracks: Sequence[Track], word: str) -> dict[str, Limits]:
    """By the name of a series; under the empty name, of one that is new: what holds for all."""
    made = {t.name: _of(t, word) for t in tracks}
    every = list(made.values())
    least = 0.0 if all(x.least == 0.0 for x in every) else None
    return {**made, "": Limits(least, all(x.whole for x in every))}


def _of(track: Track, word: str) -> Limits:
    seen = track.y[np.isfinite(track.y)]
    positive, whole = bool((seen >= 0).all()), bool((seen == np.round(seen)).all())
    if word in ("nonnegative", "counts") and not positive:
        raise UserError(f"series {track.name!r} holds the value {seen.min():g}, which --support {word} excludes")
    if word == "counts" and not whole:
        raise UserError(f"series {track.name!r} holds values that are not whole, which --support counts excludes")
    if word == "any":
        return Limits()
    if word == "auto":
        return Limits(0.0 if positive else None, positive and whole)
    return Limits(0.0, word == "counts")


def within(values: np.ndarray, limit: Limits) -> np.ndarray:
    """Values moved to the nearest ones that are possible."""
    if limit.least is not None:
        values = np.maximum(values, limit.least)
    return np.round(values) if limit.whole else values
