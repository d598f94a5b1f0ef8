"""The compiled loops of `cpu_loops`, where there is numba to compile them, and threads to run them on."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

MOST_WAIT = 60.0  # seconds, for what is compiled beside


@lru_cache(maxsize=1)
def loops() -> Any:
    """The module; None without numba, or where it may not compile."""
    try:
        from stochflow.engines.numba import loops as cpu_loops
    except ImportError as error:  # it is not there, or does not go with this numpy
        logging.getLogger("stochflow").warning(
            f"there is no numba here, so that the CPU goes the plain and slower way: {error}"
        )
        return None
    if cpu_loops.config.DISABLE_JIT:  # somebody wants to look into Python's own code, which these loops are not
        return None
    kept = getattr(getattr(cpu_loops.walk, "_cache", None), "cache_path", None)
    if kept is not None and sys.executable and not any(Path(kept).glob("cpu_loops.walk-*")):
        _compile_beside(cpu_loops, Path(kept))
    return cpu_loops


def _compile_beside(module: Any, kept: Path) -> None:
    """Where nothing was ever compiled: half of it in a process of its own, which leaves it on the disk while the walk is compiled here."""
    logging.getLogger("stochflow").warning(
        "compiling loops for this machine, some ten seconds: what is compiled is kept for the next time"
    )
    code = f"import sys; sys.path[:] = {sys.path!r}; from stochflow import cpu_loops; cpu_loops.warm()"
    no = subprocess.DEVNULL
    with suppress(OSError):  # then all of it here
        beside = subprocess.Popen([sys.executable, "-c", code], stdin=no, stdout=no, stderr=no)
        threading.Thread(target=beside.wait, daemon=True).start()
        for name in module.BESIDE:
            setattr(module, name, _awaited(module, name, beside, kept))


def _awaited(module: Any, name: str, beside: subprocess.Popen[bytes], kept: Path) -> Callable[..., object]:
    """A loop that is being compiled beside, whose first call waits for that: two processes at the same work would both be late."""
    loop, process, until = getattr(module, name), os.getpid(), time.monotonic() + MOST_WAIT

    def first(*given: Any) -> object:
        while (
            os.getpid() == process
            and time.monotonic() < until
            and beside.poll() is None
            and not any(kept.glob(f"cpu_loops.{name}-*.nbc"))
        ):
            time.sleep(0.02)
        setattr(module, name, loop)
        return loop(*given)

    return first


class Beside:
    """A loop that is compiled for some arguments in a process of its own while others go the plain way; the next time it is on the disk."""

    def __init__(self, loop: Any, given: tuple[Any, ...]):
        from numba import typeof

        self.loop, self.kinds = loop, tuple(typeof(x) for x in given)
        self.kept = getattr(loop, "_cache", None) if sys.executable else None
        if getattr(self.kept, "cache_path", None) is None:  # there is nowhere to leave it
            self.kept = None
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = self.kinds in loop.overloads or self._load()

    def look(self) -> bool:
        """Whether it is there; the first look that finds nothing has it compiled."""
        if self.ready or self.kept is None:
            return self.ready
        if self.process is None:
            self.process = self._start()
        if self.process is None or self.process.poll() is not None:
            self.ready = self._load()
            self.kept = None  # whatever came of it, nobody tries again
        return self.ready

    def _load(self) -> bool:
        from numba.core.compiler_lock import global_compiler_lock

        with global_compiler_lock:
            found = None if self.kept is None else self.kept.load_overload(self.kinds, self.loop.targetctx)
            if found is not None:
                self.loop.add_overload(found)
        return found is not None

    def _start(self) -> subprocess.Popen[bytes] | None:
        made = f"from {self.loop.__module__} import {self.loop.__name__} as loop; loop.compile(pickle.load(sys.stdin.buffer))"
        no = subprocess.DEVNULL
        with suppress(OSError):
            process = subprocess.Popen(
                [sys.executable, "-c", f"import pickle, sys; sys.path[:] = {sys.path!r}; {made}"],
                stdin=subprocess.PIPE,
                stdout=no,
                stderr=no,
            )
            threading.Thread(target=process.communicate, args=(pickle.dumps(self.kinds),), daemon=True).start()
            return process
        return None


def in_parts(work: Callable[[int, int], object], count: int, most: int | None = None) -> None:
    """`work(begin, end)` over `count` things, in as many parts as torch may use threads, or fewer: compiled loops let others run beside them."""
    parts = min(torch.get_num_threads(), count, count if most is None else most)
    if parts <= 1:
        work(0, count)
        return
    *others, own = pairwise([count * i // parts for i in range(parts + 1)])
    given = [_threads(os.getpid()).submit(work, *part) for part in others]
    try:
        work(*own)
    finally:  # whatever happens, nobody writes any more when this is over
        errors = [one.exception() for one in given]
    for error in errors:
        if error is not None:
            raise error


def one_by_one(work: Callable[[int], object], count: int) -> None:
    """`work(i)` for each of `count` things, on as many threads."""
    in_parts(lambda begin, end: [work(i) for i in range(begin, end)], count)


def helped(work: Callable[[bool], object], helpers: int, board: np.ndarray, place: int, end: int) -> None:
    """`work(False)` here and `work(True)` on so many threads, as long as it lasts: whatever happens, `end` is written on the board, in this place, and all
    of them are waited for. It goes without those that cannot come."""
    given = []
    try:
        with suppress(RuntimeError):  # the interpreter is about to end
            for _ in range(helpers):
                given.append(_threads(os.getpid()).submit(work, True))
        work(False)
    finally:
        board[place] = end
        errors = [one.exception() for one in given]
    for error in errors:
        if error is not None:
            raise error


def floats(*shape: int) -> np.ndarray:
    """Room for numbers, which begins where a whole vector may be read at once: numpy's own does not always."""
    return torch.empty(shape, dtype=torch.float32, device="cpu").numpy()


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Of this process: one that was forked off has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count(), "stochflow")
