"""The shape of a value from a file: small checks that are put together, each raising one sentence that names the key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from stochflow.errors import did_you_mean
from stochflow.files.reading import Unreadable, shown

Check = Callable[[Any, str], Any]  # (value, where) -> the value, or Unreadable


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """A finite number between the two."""

    def check(value: Any, where: str) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise Unreadable(f"{where} is {_say(value)}, but it must be a finite number")
        if not low <= value <= high:
            raise Unreadable(f"{where} is {_say(value)}, but it must be {_between(low, high)}")
        return value

    return check


def integer(low: int = -(2**63), high: int = 2**63 - 1) -> Check:
    """A whole number between the two."""

    def check(value: Any, where: str) -> Any:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise Unreadable(f"{where} is {_say(value)}, but it must be a whole number {_between(low, high)}")
        return value

    return check


def text(most: int = 10_000) -> Check:
    """A text of bounded length."""

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, str) or len(value) > most:
            raise Unreadable(f"{where} is {_say(value)}, but it must be a text of at most {most} characters")
        return value

    return check


def flag(value: Any, where: str) -> Any:
    """true or false."""
    if not isinstance(value, bool):
        raise Unreadable(f"{where} is {_say(value)}, but it must be true or false")
    return value


def anything(value: Any, where: str) -> Any:
    """Any JSON."""
    return value


def optional(check: Check) -> Check:
    """The same, or null."""
    return lambda value, where: None if value is None else check(value, where)


def either(*checks: Check) -> Check:
    """What one of the checks takes; the last one's sentence where none does."""

    def check(value: Any, where: str) -> Any:
        for one in checks[:-1]:
            try:
                return one(value, where)
            except Unreadable:
                continue
        return checks[-1](value, where)

    return check


def list_of(check: Check, least: int = 0, most: int = 1_000_000) -> Check:
    """A list of such values."""

    def whole(value: Any, where: str) -> Any:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise Unreadable(f"{where} is {_say(value)}, but it must be a list of {least} to {most} entries")
        return [check(v, f"{where}, entry {i}") for i, v in enumerate(value)]

    return whole


def mapping(known: dict[str, Check], needed: tuple[str, ...] = (), more: Check | None = None) -> Check:
    """An object with these keys; other keys as `more` says, refused where that is None."""

    def check(value: Any, where: str) -> Any:
        _an_object(value, where)
        for key in needed:
            if key not in value:
                raise Unreadable(f'{where} lacks "{key}": restore or remove it')
        found = {}
        for key, one in value.items():
            wanted = known.get(key, more)
            if wanted is None:
                raise Unreadable(f'{where}: "{shown(key, 80)}" is not known here{did_you_mean(key, known)}')
            found[key] = wanted(one, f'{where}, "{shown(key, 80)}"')
        return found

    return check


def whole_part(value: Any, where: str, known: dict[str, Check], more: Check) -> tuple[dict[str, Any], list[str]]:
    """The entries of an object that are as they should be, and a sentence for each that is left out."""
    _an_object(value, where)
    found, gaps = {}, []
    for key, one in value.items():
        try:
            found[key] = known.get(key, more)(one, f'{where}, "{shown(key, 80)}"')
        except Unreadable as error:
            gaps.append(str(error))
    return found, gaps


def _an_object(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise Unreadable(f"{where} is {_say(value)}, but it must be an object of settings or figures")


def _say(value: Any) -> str:
    return shown(value if not isinstance(value, str) else repr(value), 60)


def _between(low: float, high: float) -> str:
    if low == -math.inf or low == -(2**63):
        return "any" if high in (math.inf, 2**63 - 1) else f"at most {high}"
    return f"at least {low}" if high in (math.inf, 2**63 - 1) else f"between {low} and {high}"
