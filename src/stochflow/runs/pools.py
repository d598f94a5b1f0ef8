"""Places where the cells of a sweep run: here one after another, in processes, or on Ray. Each yields results as they come."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent import futures
from typing import Any

from stochflow.errors import UserError
from stochflow.runs.config import Config
from stochflow.scores.cluster import start_ray, stop_ray

Job = tuple[str, Config, Collection[str]]  # a cell's folder, its configuration, and what may be chosen for the task
Run = Callable[..., dict[str, Any]]
RunAll = Callable[[Sequence[Job]], Iterator[tuple[int, dict[str, Any]]]]


@contextlib.contextmanager
def here(run: Run) -> Iterator[RunAll]:
    """One after another, in this process."""

    def run_all(jobs: Sequence[Job]) -> Iterator[tuple[int, dict[str, Any]]]:
        for place, job in enumerate(jobs):
            found = run(*job)
            yield place, found
            if "interrupted" in found:
                return

    yield run_all


@contextlib.contextmanager
def processes(workers: int, run: Run) -> Iterator[RunAll]:
    """So many at once, in processes of this machine. A signal is passed on to them once, and they save what they have."""
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with futures.ProcessPoolExecutor(workers, context, _begin) as pool:
        stopped = False

        def stop(number: int, frame: object) -> None:
            nonlocal stopped
            if not stopped:
                for child in multiprocessing.active_children():
                    child.terminate()  # SIGTERM: training ends between two iterations, with everything saved
            stopped = True

        def run_all(jobs: Sequence[Job]) -> Iterator[tuple[int, dict[str, Any]]]:
            left = list(enumerate(jobs))[::-1]
            waiting: dict[Any, int] = {}
            while waiting or (left and not stopped):
                while (
                    left and not stopped and len(waiting) < workers
                ):  # no more: a queued one would begin after a signal
                    place, job = left.pop()
                    waiting[pool.submit(run, *job)] = place
                done, _ = futures.wait(waiting, timeout=0.5, return_when=futures.FIRST_COMPLETED)
                for future in done:
                    place = waiting.pop(future)
                    try:
                        yield place, future.result()
                    except futures.process.BrokenProcessPool as error:
                        if stopped:
                            yield place, {"interrupted": True}
                            continue
                        raise UserError(
                            f"a process died while it trained {jobs[place][0]} (too little memory?): "
                            "start the sweep again, with fewer --workers; finished cells are kept"
                        ) from error
            if stopped:
                yield 0, {"interrupted": True}

        with _handling(stop):
            yield run_all


def _begin() -> None:
    """A worker is in a process group of its own, so that Ctrl-C reaches it through `stop` alone."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    signal.signal(signal.SIGTERM, _idle)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _idle(number: int, frame: object) -> None:
    os._exit(0)  # nothing to save


def _end_with_parent() -> None:
    """Where the sweep's own process is killed nobody tells its cells: they save what they have, and end."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    while signal.getsignal(signal.SIGTERM) is not _idle:  # training has its own handler until all is saved
        time.sleep(0.1)
    os._exit(0)


@contextlib.contextmanager
def _handling(stop: Callable[[int, object], None]) -> Iterator[None]:
    try:
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def on_ray(workers: int, run: Run) -> Iterator[RunAll]:
    """On a Ray cluster, one core a cell; the folder must lie where every machine of the cluster sees it."""
    ray = start_ray(workers)
    remote = ray.remote(num_cpus=1, max_retries=2)(run)  # a cell whose machine died goes on from its last checkpoint

    def run_all(jobs: Sequence[Job]) -> Iterator[tuple[int, dict[str, Any]]]:
        waiting = {remote.remote(os.path.abspath(job[0]), *job[1:]): place for place, job in enumerate(jobs)}
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1)
            for reference in done:
                place = waiting.pop(reference)
                try:
                    yield place, ray.get(reference)
                except ray.exceptions.RayError as error:
                    yield place, {"failed": str(error).strip().splitlines()[-1]}

    try:
        yield run_all
    finally:
        stop_ray()
