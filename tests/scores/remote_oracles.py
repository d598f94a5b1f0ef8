"""Oracles that workers of another process can import, for test_workers.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from stochflow import Strings, Task, strings_task
from stochflow.scores.oracles import Host, TextOracle

DNA = Strings("ACGT", 6)


def value(text: str) -> float:
    return sum((i + 1) * "ACGT".index(letter) for i, letter in enumerate(text)) / 7 + 0.1


def plain(texts: list[str]) -> list[float]:
    return [value(t) for t in texts]


def slow(texts: list[str]) -> list[float]:
    """50 ms per object, without using the processor."""
    time.sleep(0.05 * len(texts))
    return plain(texts)


class DiesOnce:
    """Kills its process at the first part that holds `word`, once in all."""

    def __init__(self, word: str, note: str):
        self.word, self.note = word, note

    def __call__(self, texts: list[str]) -> list[float]:
        time.sleep(0.02)
        if self.word in texts and not Path(self.note).exists():
            Path(self.note).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(texts)


class DiesAlways:
    def __call__(self, texts: list[str]) -> list[float]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []


class Fails:
    """Raises for every part that holds `word`."""

    def __init__(self, word: str):
        self.word = word

    def __call__(self, texts: list[str]) -> list[float]:
        if self.word in texts:
            raise RuntimeError(f"no licence for {self.word}")
        return plain(texts)


def oracle(function) -> TextOracle:
    return Host(function, DNA)


def task(letters: int = 4) -> Task:
    scale = 1.0
    return strings_task(
        lambda texts: [scale * value(t) for t in texts], "ACGT", letters
    )  # a closure: it cannot be pickled
