"""A slow oracle asked by several workers at once: processes of this machine, or a Ray cluster.

A batch is split into parts, and the scores come back in the order of the texts, so that the result is that of one worker, bit for bit.
Each part is handed on as it arrives (`arrived`), so that what is paid for is kept even where a later part fails. A part whose worker
died is asked again of another one.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from stochflow.errors import UserError
from stochflow.files.memory import need
from stochflow.scores.cluster import start_ray, stop_ray
from stochflow.scores.oracles import Around, TextOracle

Make = Callable[[], TextOracle]
WORKER = 150 << 20  # bytes of a process that has imported torch
DEATHS = 3  # workers that may die, without an answer in between, before it is the oracle's fault
PARTS = 4  # for each worker and batch: a slow part at the end keeps the others waiting no longer than a quarter


def workers_of(word: str) -> tuple[int, bool]:
    """`4` -> (4, on this machine), `ray:4` -> (4, on Ray), `ray` -> (one per core, on Ray); an empty word: (0, False)."""
    kind, _, count = word.partition(":")
    ray = kind == "ray"
    number = count if ray else kind
    if not word or word == "0":
        return 0, False
    if (number and not number.isdecimal()) or (ray and word == "ray:") or (not ray and count):
        raise UserError(f"--oracle-workers {word}: give a number of processes, ray, or ray:N")
    found = (int(number) if len(number) < 8 else 10**8) if number else multiprocessing.cpu_count()
    if found < 1:
        raise UserError(f"--oracle-workers {word}: give at least one worker")
    if not ray:
        need(found * WORKER, f"--oracle-workers {word[:12]}", "take fewer processes")
    return found, ray


class Remote(Around):
    """`oracle`, asked by `workers` at once: a number of processes, or "ray:N" (a cluster of RAY_ADDRESS, else one here).

    `make` builds the oracle in each worker; without it the oracle itself is sent there. To processes only what is picklable can be
    sent, as functions at module level are; to Ray also functions of a script or a notebook. `smallest` is the fewest texts worth a
    part of their own.
    """

    def __init__(self, oracle: TextOracle, workers: int | str = 2, make: Make | None = None, smallest: int = 1):
        if not isinstance(oracle, TextOracle):
            raise UserError(
                f"Remote wraps an oracle over texts, not {type(oracle).__name__}: for a function list[str] -> scores give "
                "Remote(Host(function, env))"
            )
        super().__init__(oracle)
        self.workers, on_ray = workers_of(str(workers))
        if self.workers < 1:
            raise UserError(f"Remote(workers={workers!r}): give at least one worker")
        self.smallest, self.asked, self.retried = smallest, 0, 0
        self.arrived: Callable[[list[str], list[float]], None] | None = None
        sent = (make is not None, oracle if make is None else make)
        self.pool: Pool = RayPool(self.workers, sent) if on_ray else Processes(self.workers, sent)

    @property
    def calls(self) -> int:  # type: ignore[override]
        return self.asked

    def warm(self) -> None:
        """Start the workers now, so that starting them is not taken for the oracle's time."""
        self.pool.start()

    def close(self) -> None:
        self.pool.stop()

    def cancel(self) -> None:
        self.pool.stop()

    def raw(self, texts: list[str]) -> list[float]:
        if not texts:
            return []
        width = max(self.smallest, -(-len(texts) // (PARTS * self.workers)))
        parts = [texts[i : i + width] for i in range(0, len(texts), width)]
        found: dict[int, list[float]] = {}
        failure: tuple[int, UserError] | None = None
        for place, scores, error, retried in self.pool.ask(parts):
            self.retried += retried
            if error is not None:  # the first in the order of the texts is the one to tell, as one worker would
                failure = min(failure or (place, error), (place, error), key=lambda pair: pair[0])
                continue
            found[place] = scores
            self.asked += len(scores)
            if self.arrived is not None:
                self.arrived(parts[place], scores)
        if failure is not None:
            raise failure[1]
        return [score for place in range(len(parts)) for score in found[place]]


Sent = tuple[bool, Any]  # whether it makes the oracle, and that function or the oracle itself
Outcome = tuple[list[float], UserError | None, int]  # scores, or why there are none; tries that had to be repeated
Answer = tuple[int, list[float], UserError | None, int]  # the part's number, and the same of it


class Pool(ABC):
    """Workers that each hold the oracle."""

    def __init__(self, workers: int, sent: Sent):
        self.workers, self.sent = workers, sent

    @abstractmethod
    def start(self) -> None:
        """Have the workers ready."""

    @abstractmethod
    def stop(self) -> None:
        """Let them go; the next question starts them again."""

    @abstractmethod
    def ask(self, parts: list[list[str]]) -> Iterator[Answer]:
        """Each part's answer, as it arrives."""


class Processes(Pool):
    """Worker processes; where one dies all are started again, and unanswered parts are asked again."""

    def __init__(self, workers: int, sent: Sent):
        super().__init__(workers, sent)
        self._payload = pickled(sent)
        self._pool: futures.ProcessPoolExecutor | None = None

    def start(self) -> None:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
            self._pool = futures.ProcessPoolExecutor(self.workers, context, _hold, (self._payload,))
        try:
            answers = [ready.result() for ready in [self._pool.submit(_ready) for _ in range(2 * self.workers)]]
            failure = next((error for error in answers if error is not None), None)
        except BrokenProcessPool:
            failure = UserError(
                "an oracle's worker process ended as it began (too little memory?); in a script of your own, let what "
                'trains stand under `if __name__ == "__main__":`, and the oracle in a file that can be imported'
            )
        if failure is not None:
            self.stop()
            raise failure

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None

    def ask(self, parts):
        waiting = dict(enumerate(parts))
        deaths = 0
        while waiting:
            try:
                if self._pool is None:
                    self.start()
                assert self._pool is not None
                asked = {self._pool.submit(_score, part): place for place, part in waiting.items()}
                for future in futures.as_completed(asked):
                    place = asked[future]
                    outcome = future.result()
                    del waiting[place]
                    deaths = 0
                    yield place, *outcome
            except BrokenProcessPool as error:
                self.stop()
                deaths += 1
                if deaths > DEATHS:
                    place, part = next(iter(waiting.items()))
                    raise UserError(
                        f"an oracle's worker process died {deaths} times, with {len(waiting)} parts unanswered (the first begins "
                        f"with {part[0]!r}): it needs too much memory, or crashes; try fewer --oracle-workers"
                    ) from error


class RayPool(Pool):
    """Ray tasks of one core each; Ray itself asks another worker where one dies."""

    def __init__(self, workers: int, sent: Sent):
        super().__init__(workers, sent)
        self._ray: Any = None
        self._score: Any = None
        self._payload: Any = None  # where it lies in the cluster

    def start(self) -> None:
        if self._ray is not None:
            return
        ray = start_ray(self.workers)
        self._payload = ray.put((list(sys.path), pickled(self.sent, ray.cloudpickle.dumps)))
        self._score = ray.remote(num_cpus=1, max_retries=DEATHS)(_score_there)
        try:
            answers = ray.get([self._score.remote(self._payload, []) for _ in range(2 * self.workers)])
            failure = next((error for _, error, _ in answers if error is not None), None)
        except ray.exceptions.RayError as problem:
            failure = UserError(f"Ray's workers cannot begin: {_last_line(problem)}")
        if failure is not None:
            stop_ray()
            raise failure
        self._ray = ray

    def stop(self) -> None:
        if self._ray is not None:
            stop_ray()
        self._ray = None

    def ask(self, parts):
        self.start()
        waiting = {self._score.remote(self._payload, part): place for place, part in enumerate(parts)}
        while waiting:
            done, _ = self._ray.wait(list(waiting), num_returns=1)
            for reference in done:
                place = waiting.pop(reference)
                try:
                    outcome = self._ray.get(reference)
                except self._ray.exceptions.RayError as problem:
                    where = f"the part beginning with {parts[place][0]!r}"
                    outcome = [], UserError(f"a Ray worker failed on {where}: {_last_line(problem)}"), 0
                yield place, *outcome


def _last_line(problem: Exception) -> str:
    return str(problem).strip().splitlines()[-1]


# inside a worker ------------------------------------------------------------------------------------------------

_held: dict[bytes, TextOracle | UserError] = {}  # this worker's oracle, or why there is none, by what it was made from


def pickled(sent: Sent, dumps: Callable[[Any], bytes] = pickle.dumps) -> bytes:
    """What a worker makes its oracle from."""
    try:
        return dumps(sent)
    except Exception as error:
        raise UserError(
            f"this oracle cannot be sent to other processes ({type(error).__name__}: {error}): "
            "make it of functions and classes at module level, or name its task as module:function"
        ) from error


def _oracle(payload: bytes) -> TextOracle | UserError:
    """The oracle of this worker; where it cannot be made, why: an exception here would look like a worker that died."""
    if payload not in _held:
        import torch

        torch.set_num_threads(1)  # the workers share the cores
        _held.clear()
        try:
            is_make, made = pickle.loads(payload)
            _held[payload] = made() if is_make else made
        except UserError as error:
            _held[payload] = error
        except Exception as error:
            _held[payload] = UserError(
                f"a worker cannot make the oracle ({type(error).__name__}: {error}): its functions must stand in a module "
                "that can be imported there"
            )
    return _held[payload]


def _hold(payload: bytes) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends training between two iterations, not an answer half way
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _oracle(payload)


def _end_with_parent() -> None:
    """Where the training process is killed nobody tells its workers, and they would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _ready() -> UserError | None:
    return _score([])[1]


def _score(texts: list[str]) -> Outcome:
    oracle = next(iter(_held.values()))
    if isinstance(oracle, UserError):
        return [], oracle, 0
    before = getattr(oracle, "retried", 0)
    try:
        scores, error = (oracle.raw(texts) if texts else []), None
    except UserError as problem:
        scores, error = [], problem
    return scores, error, getattr(oracle, "retried", 0) - before


def _score_there(payload: tuple[list[str], bytes], texts: list[str]) -> Outcome:
    path, made_from = payload
    sys.path.extend(p for p in path if p not in sys.path)
    _oracle(made_from)
    return _score(texts)
