"""How loops are compiled and called: numba's options, the cache, and the thread pool."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from stochflow.engines.numba import cache, settings

numba = settings.shielded()

FAR = -1e9  # the log-probability of what is not legal, as `ops.NEG`


def compiled(entry: bool, *fastmath: str) -> Callable[[Any], Any]:
    """Decorate a loop: an `entry` is called from Python and cached, any other is part of entries. Products and sums may be
    contracted to one instruction; `fastmath` is what else the compiler may do to the order of sums."""
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": {"contract", *fastmath},
        "no_cfunc_wrapper": True,
        "no_cpython_wrapper": not entry,
    }

    def decorate(function: Any) -> Any:
        config: Any = numba.config
        here, kept = cache.folder(), config.CACHE_DIR
        if not entry or here is None:
            return numba.njit(**options)(function)
        config.CACHE_DIR = str(here)  # read while decorating
        try:
            return numba.njit(cache=True, **options)(function)
        finally:
            config.CACHE_DIR = kept

    return decorate


loop, part = compiled(True), compiled(False)


class Share(NamedTuple):
    """Seeds, and which part of each: threads may share one seed."""

    first: int
    last: int
    part: int = 0
    parts: int = 1


_loaded: set[Any] = set()


def call(entry: Any, *given: Any) -> Any:
    """entry(*given). A first call that fails may be a damaged file of the cache: then it is cleared, and the loop compiled."""
    try:
        found = entry(*given)
    except Exception:
        if entry in _loaded or cache.folder() is None:
            raise
        cache.clear()
        found = entry(*given)
    _loaded.add(entry)
    return found


def in_parts(work: Callable[[int, int], object], count: int, most: int | None = None) -> None:
    """`work(first, last)` over `count` items, in as many ranges as torch may use threads, `most` at most."""
    parts = min(torch.get_num_threads(), count, count if most is None else most)
    if parts <= 1:
        work(0, count)
        return
    *others, own = pairwise([count * i // parts for i in range(parts + 1)])
    given = [_pool(os.getpid()).submit(work, *span) for span in others]
    try:
        work(*own)
    finally:  # nothing is written any more when this returns
        errors = [one.exception() for one in given]
    for error in errors:
        if error is not None:
            raise error


def each_part(work: Callable[[int], object], parts: int) -> None:
    """`work(i)` for i < parts, on as many threads."""
    in_parts(lambda first, last: [work(i) for i in range(first, last)], parts)


def floats(*shape: int) -> np.ndarray:
    """An uninitialised float32 array, aligned for vectors: numpy's own is not always."""
    return torch.empty(shape, dtype=torch.float32, device="cpu").numpy()


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """The thread pool of this process: a fork has none of its parent's threads."""
    return ThreadPoolExecutor(os.cpu_count(), "stochflow")
