"""The one error a user's mistake raises: what was wrong, where, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user gave us, told in one sentence with its remedy."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`' (did you mean "grid"?)'`, or an empty string where nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f' (did you mean "{close[0]}"?)' if close else ""
