"""The one error a user's mistake raises: what was wrong, where, what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from operator import index
from pathlib import PurePath
from typing import Any


class UserError(ValueError):
    """A mistake in what the user gave us, told in one sentence with its remedy: one line, whatever names it quotes."""

    def __init__(self, sentence: str = ""):
        super().__init__(one_line(str(sentence)))


def one_line(text: str, most: int = 4000) -> str:
    """The text on one line: what is not printable becomes an escape such as \\x1b, and the middle of a long one is left out."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-(most // 2) :]}"
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


def need_whole(name: str, value: Any, least: int, remedy: str = "") -> None:
    """UserError unless this is a whole number of at least `least` that fits into 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise UserError(f"{name} is {value!r}, but it must be a whole number of at least {least}{remedy}")


def need_number(name: str, value: Any, above: float | None = None) -> None:
    """UserError unless this is a finite number, above a bound where one is given."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or (above is not None and not value > above):
        bound = "" if above is None else f" above {above:g}"
        raise UserError(f"{name} is {value!r}, but it must be a finite number{bound}")


def need_kind(name: str, value: Any, kind: type | tuple[type, ...], what: str) -> None:
    """UserError unless this is an instance of the kind; `what` says what to give."""
    if not isinstance(value, kind):
        raise UserError(f"{name} is {one_line(repr(value), 80)}, but it must be {what}")


def need_path(name: str, value: Any) -> None:
    """UserError unless this names a file or folder."""
    need_kind(name, value, (str, PurePath), "a path, as text or a Path")


def need_seeds(value: Any) -> None:
    """UserError unless these are seeds: at least one whole number."""
    try:
        good = len(value) > 0 and all(-(2**63) <= index(s) < 2**63 for s in value)
    except TypeError:
        good = False
    if not good:
        raise UserError(f"seeds are {one_line(repr(value), 80)}, but they must be whole numbers, as in seeds=(0, 1, 2)")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`' (did you mean "grid"?)'`, or an empty string where nothing is close; the case of letters is no difference."""
    named = {as_word(name): name for name in known}
    close = difflib.get_close_matches(as_word(word), list(named), n=1, cutoff=0.5)
    return f' (did you mean "{named[close[0]]}"?)' if close else ""


def as_word(text: str) -> str:
    """A word however it was written: `SGFN_DB` and `sgfn db` are `sgfn-db`."""
    return text.strip().lower().replace("_", "-").replace(" ", "-")
