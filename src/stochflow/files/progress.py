"""Progress of long computations: which stage runs and how far it is. Whoever computes notes it; the command line prints it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Stage:
    """A part of a computation; `done` says how many of the `total` are behind it."""

    def __init__(self, words: str, total: int | None, done: Callable[[], int] | None):
        self.words, self.total, self.count = words, total, 0
        self.done = done

    def __str__(self) -> str:
        if self.total is None:
            return self.words
        return f"{self.words}, {self.count if self.done is None else self.done():,} of {self.total:,}"


_stages: list[Stage] = []  # the outermost first


@contextlib.contextmanager
def stage(words: str, total: int | None = None, done: Callable[[], int] | None = None) -> Iterator[Stage]:
    """Inside, this is what is being done."""
    begun = Stage(words, total, done)
    _stages.append(begun)
    try:
        yield begun
    finally:
        _stages.remove(begun)


def counted(items: Iterable[T], words: str, total: int) -> Iterator[T]:
    """The items, counted as they are asked for."""
    with stage(words, total) as begun:
        for item in items:
            yield item
            begun.count += 1


def stages() -> str:
    """All that is being done, the outermost first; empty where nobody said."""
    return ": ".join(map(str, list(_stages)))
