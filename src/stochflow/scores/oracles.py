"""Oracles: states [..., D] -> score [...], float32.

`on_device`: the oracle is a tensor function and can be part of a captured iteration. `calls` counts the objects scored;
a replayed CUDA graph runs no Python, so there the count is the trainer's step times its batch.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stochflow.errors import UserError, need_kind, one_line
from stochflow.ops import PerDevice
from stochflow.scores.answers import LARGEST, Answer, append, append_shared, on_disk, read_answers, read_shared
from stochflow.worlds.env import Enumerable, Env

PARTS = 20  # in how many parts a long question is asked at most
Texts = Callable[[list[str]], Any]  # a user's function: list[str] -> one score each


def count_calls(oracle: Any, state: Tensor) -> None:
    """Add the states [..., D] to `calls`; not while compiling: a changing counter would recompile at every call."""
    if not torch.compiler.is_compiling():
        oracle.calls += state[..., 0].numel()


class Table:
    """A score for every state of an enumerable environment, or for the last ones in its order (strings of full length).

    `scores` [n] in the order of `env.all_states()`. States before those have no score: they read NaN, never another
    state's score. `modes` [n] bool marks the states that count as modes, where that is known.
    """

    on_device = True

    def __init__(self, env: Enumerable, scores: Any, modes: Any = None):
        given = torch.as_tensor(scores, dtype=torch.float64)
        total = len(env.all_states())
        if given.ndim != 1 or not 0 < len(given) <= total:
            raise UserError(
                f"a table for {env!r} holds one row of at most {total} scores, "
                f"but this one has shape {tuple(given.shape)}"
            )
        if not bool(given.isfinite().all()):
            first = int((~given.isfinite()).nonzero()[0])
            raise UserError(f"score {first} of the table is {float(given[first])}: give finite scores")
        self.env, self.calls = env, 0
        self.scores = torch.full((total,), math.nan, dtype=torch.float64)
        self.scores[total - len(given) :] = given
        self._marked: Tensor | None = None
        if modes is not None:
            mark = torch.as_tensor(modes, dtype=torch.bool)
            if mark.shape != given.shape:
                raise UserError(
                    f"the marks of the modes have shape {tuple(mark.shape)}, but the scores {tuple(given.shape)}: "
                    "give one per score"
                )
            self._marked = torch.zeros(total, dtype=torch.bool)
            self._marked[total - len(given) :] = mark
        self._table = PerDevice(self.scores.float())

    def __call__(self, state: Tensor) -> Tensor:
        count_calls(self, state)
        return self._table(state.device)[0][self.env.index(state)]

    def modes(self, state: Tensor) -> Tensor | None:
        """[...] True where the state is a mode; None where modes were not given."""
        return None if self._marked is None else self._marked.to(state.device)[self.env.index(state)]


class TextOracle(ABC):
    """An oracle that scores texts, on the host. `Patient` and `Cached` wrap any other, in any order."""

    on_device = False
    env: Env
    calls: int

    @abstractmethod
    def raw(self, texts: list[str]) -> list[float]:
        """One float per text, NaN where there is no score."""

    @abstractmethod
    def cancel(self) -> None:
        """Stop the running call, where that can be done."""

    def __call__(self, state: Tensor) -> Tensor:
        texts = finished_texts(self.env, state)
        values = self.raw(texts)
        check_scores(texts, values)
        return torch.tensor(values, dtype=torch.float32, device=state.device).reshape(state.shape[:-1])


class Host(TextOracle):
    """A Python callable `list[str] -> scores`, called once per batch with the whole batch.

    It may be slow. A wrong number of scores, a missing one (None, KeyError), NaN or infinity is a UserError that names
    the sample.
    """

    def __init__(self, fn: Texts, env: Env):
        if not hasattr(env, "decode"):
            raise UserError(
                f"{env!r} has no texts to show an oracle: write the oracle as a function of state tensors instead"
            )
        self.fn, self.env, self.calls = fn, env, 0

    def cancel(self) -> None:
        stop = getattr(self.fn, "cancel", None)
        if callable(stop):
            stop()

    def raw(self, texts: list[str]) -> list[float]:
        """The callable's scores as floats (NaN for None), one per text."""
        if not texts:
            return []
        self.calls += len(texts)
        try:
            values = list(self.fn(list(texts)))
        except UserError:
            raise
        except KeyError as problem:
            unknown = problem.args[0] if problem.args and problem.args[0] in texts else texts[0]
            raise UserError(
                f"the oracle has no score for {unknown!r} (KeyError): it must know every sequence that can be built"
            ) from problem
        except (
            Exception,
            SystemExit,
        ) as problem:  # an oracle that calls sys.exit(0) must not end a run as if it were done
            raise UserError(
                f"the oracle failed on a batch of {len(texts)} that begins with {texts[0]!r}: "
                f"{type(problem).__name__}: {problem}"
            ) from problem
        if len(values) != len(texts):
            raise UserError(
                f"the oracle gave {len(values)} scores for {len(texts)} sequences (the first is {texts[0]!r}): "
                "give one score each"
            )
        return [_number(text, value) for text, value in zip(texts, values, strict=True)]


def finished_texts(env: Any, state: Tensor) -> list[str]:
    """The texts of finished objects; an unfinished one is refused before anybody pays for it."""
    refuse_unfinished(env, state)
    return env.decode(state)


def refuse_unfinished(env: Any, state: Tensor) -> None:
    """UserError, with the state, where an object [..., D] ended though its environment says that it is unfinished."""
    find = getattr(env, "unfinished", None)
    short = None if find is None else find(state)
    if short is not None and bool(short.any()):
        first = state.reshape(-1, state.shape[-1])[int(short.flatten().nonzero()[0])]
        text = f"{env.decode(first.unsqueeze(0))[0]!r}, " if hasattr(env, "decode") else ""
        raise UserError(
            f"a way ended at {text}state {first.tolist()}, which is unfinished under {env!r}: "
            "let moves() keep to what can still be completed"
        )


def _number(text: str, value: Any) -> float:
    if value is None:
        return math.nan
    if getattr(value, "ndim", 0) > 0:
        raise UserError(
            f"the oracle gave {text!r} an array of shape {tuple(value.shape)}: give one number per sequence"
        )
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"the oracle gave {value!r} for {text!r}: give one number per sequence") from None


def check_scores(texts: Sequence[str], values: Sequence[float]) -> None:
    """Raises for the first text whose score is missing, not finite or too large for float32."""
    for i, (text, value) in enumerate(zip(texts, values, strict=True)):
        if not abs(value) <= LARGEST:
            blank = math.isnan(value)
            given = "no score (None or NaN)" if blank else f"{value}"
            raise UserError(
                f"the oracle gave {given} for sample {i}, {text!r}: "
                "it must give a finite score to every sequence that can be built"
                + (", or train with --on-nan skip or floor" if blank else "")
            )


class Around(TextOracle):
    """An oracle that wraps another."""

    def __init__(self, oracle: TextOracle):
        self.oracle, self.env = oracle, oracle.env

    @property
    def calls(self) -> int:  # type: ignore[override]
        return self.oracle.calls

    def cancel(self) -> None:
        self.oracle.cancel()


class Patient(Around):
    """Calls an oracle again, up to `retries` times, where it raises or has not answered after `timeout` seconds.

    `timeout` 0 waits for ever. Before try number k it waits backoff * 2^(k-2) seconds, so that a busy server can
    recover; `retried` counts these tries. NaN is an answer and is not retried. With a time-out the call runs in its own thread; Python cannot stop a
    thread, so a call that hangs is left behind (a `Command` is killed), and its late answer is not used.
    """

    def __init__(self, oracle: TextOracle, timeout: float = 0.0, retries: int = 2, backoff: float = 1.0):
        if timeout < 0 or retries < 0 or backoff < 0:
            raise UserError(
                f"timeout={timeout}, retries={retries} and backoff={backoff} of a patient oracle must be 0 or more"
            )
        super().__init__(oracle)
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self.retried = 0

    def raw(self, texts: list[str]) -> list[float]:
        for done in range(self.retries):
            try:
                return self._once(texts)
            except (UserError, _Late):
                time.sleep(self.backoff * 2**done)
                self.retried += 1
        tries = self.retries + 1
        try:
            return self._once(texts)
        except UserError as error:
            raise error if tries == 1 else UserError(f"{error} (the last of {tries} tries)") from error
        except _Late:
            often = f", {tries} times," if tries > 1 else ""
            raise UserError(
                f"the oracle did not answer within {self.timeout:g} s{often} on a batch of {len(texts)} that begins "
                f"with {texts[0]!r}: "
                "mend it, or allow it more with a larger oracle_timeout"
            ) from None

    def _once(self, texts: list[str]) -> list[float]:
        if self.timeout == 0 or not texts:
            return self.oracle.raw(texts)
        answer: queue.SimpleQueue[tuple[list[float] | None, BaseException | None]] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answer.put((self.oracle.raw(texts), None))
            except BaseException as error:  # re-raised in the waiting thread
                answer.put((None, error))

        # a daemon thread: one that hangs does not keep the process alive
        threading.Thread(target=ask, name="oracle", daemon=True).start()
        try:
            values, error = answer.get(timeout=self.timeout)
        except queue.Empty:
            self.cancel()
            raise _Late from None
        if error is not None:
            raise error
        assert values is not None
        return values


class _Late(Exception):
    """No answer in time."""


class Spent(UserError):
    """The budget of oracle calls is used up; what it paid for is stored."""


class Cached(Around):
    """Scores each text once and caches the score. `hits` counts the answers from the cache, `paid` those asked for.

    `met` holds the score of every text that was wanted, in the order in which they were first wanted. `budget`
    is the largest `paid` (None: no limit): what it still allows is asked for and stored, then `Spent` is raised.
    `on_nan` says what becomes of a text without a score, `blank` counts them: "stop" raises, "skip" gives NaN, "floor"
    the lowest score known. `share` joins a file of answers that other runs read and write too; those are not paid for.

    With `file`, scores are appended to it as JSON lines as soon as they arrive, and read back when it is opened again:
    no score is lost, even where a later sample of the same batch fails. One call scores at most `at_most` texts (0: no
    limit), so that a time-out applies to parts of one size. A question longer than `part` (0: any) is asked in parts of
    that size, or of a twentieth of it if that is more, so that little is lost where it is broken off.
    """

    def __init__(self, oracle: TextOracle, file: str | Path | None = None, at_most: int = 0, part: int = 0):
        if not hasattr(oracle, "raw"):
            raise UserError(
                f"the oracle is {one_line(repr(oracle), 80)}, but it must be one over texts, such as Host(function, env)"
            )
        need_kind("file", file, (str, os.PathLike, type(None)), "the path of a file, or None")
        super().__init__(oracle)
        self.hits, self.at_most, self.part = 0, at_most, part
        if hasattr(oracle, "arrived"):  # parts of a batch are stored as they come
            oracle.arrived = lambda texts, scores: self._keep(dict(zip(texts, scores, strict=True)))
        self.known: dict[str, float] = {}
        self.met: dict[str, float] = {}
        self.free: set[str] = set()  # texts whose answers came from elsewhere
        self.blanks: set[str] = set()  # texts without a score
        self.budget: int | None = None
        self.on_nan = "stop"
        self.shared: Path | None = None
        self._others: dict[str, float] = {}  # answers that need not be paid for
        self.file: Path | None = None
        self._one = threading.RLock()  # a batch in flight and a look are asked one after the other
        if file is not None:
            self.keep_in(file)

    def __getstate__(self) -> dict[str, Any]:  # a lock is not sent to other processes
        return {name: value for name, value in self.__dict__.items() if name != "_one"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_one": threading.RLock()}

    @property
    def paid(self) -> int:
        return len(self.known) - len(self.free)

    @property
    def blank(self) -> int:
        return len(self.blanks)

    def raw(self, texts: list[str]) -> list[float]:
        with self._one:
            return self._raw(texts)

    def _raw(self, texts: list[str]) -> list[float]:
        new = [t for t in dict.fromkeys(texts) if t not in self.known]
        self.hits += len(texts) - len(new)
        found = {t: self._others[t] for t in new if t in self._others}
        if found:
            self.free |= found.keys()
            self.known |= found
            self._append(found)
            new = [t for t in new if t not in found]
        for t in texts:
            if t in self.known and not math.isnan(self.known[t]):
                self.met.setdefault(t, self.known[t])
        left = len(new) if self.budget is None else max(0, self.budget - self.paid)
        refused, new = len(new) - left, new[:left]
        width = self.at_most or max(self.part or len(new), -(-len(new) // PARTS)) or 1
        for part in (new[i : i + width] for i in range(0, len(new), width)):
            scores = dict(zip(part, self.oracle.raw(part), strict=True))
            good = self._keep(scores) + self._keep_blank(scores)  # stored before a bad score raises
            if good < len(part):  # the caller raises: the remaining parts are not scored
                return [self.known.get(t, scores.get(t, math.nan)) for t in texts]
        if refused > 0:
            raise Spent(f"the budget of {self.budget} oracle calls is spent: give a larger --oracle-calls to go on")
        return [self.known[t] for t in texts]

    def _keep(self, scores: dict[str, float]) -> int:
        """Store scores, each once; how many of them are scores."""
        good = {t: v for t, v in scores.items() if abs(v) <= LARGEST}
        news = {t: v for t, v in good.items() if t not in self.known}
        self.known |= news
        self.met |= news
        self._append(news)
        if self.shared is not None and news:
            append_shared(self.shared, [Answer(t, v) for t, v in news.items()])
            self._others |= news
        return len(good)

    def _keep_blank(self, scores: dict[str, float]) -> int:
        """Store the texts without a score, where they do not stop the run; how many."""
        blank = [t for t, v in scores.items() if math.isnan(v) and t not in self.known]
        usable = [v for v in self.known.values() if not math.isnan(v)]
        if not blank or self.on_nan == "stop" or (self.on_nan == "floor" and not usable):
            return 0
        given = dict.fromkeys(blank, min(usable) if self.on_nan == "floor" else math.nan)
        self.blanks |= given.keys()
        self.known |= given
        self._append(given)
        if self.on_nan == "floor":
            self.met |= given
        return len(given)

    def share(self, file: str | Path) -> None:
        """Take answers from this file too, and add new ones to it."""
        self.shared = Path(file)
        with on_disk(self.shared):
            self._others |= read_shared(self.shared)

    def __call__(self, state: Tensor) -> Tensor:
        texts = finished_texts(self.env, state)
        values = self.raw(texts)
        if self.on_nan == "floor" and not self.met and all(map(math.isnan, values)):
            raise UserError(
                f"none of the {len(set(texts))} objects asked about has a score, so that there is no lowest one for --on-nan floor: "
                "begin from sequences that have one (--start), or take --on-nan skip"
            )
        scored = [(t, v) for t, v in zip(texts, values, strict=True) if not (self.on_nan == "skip" and math.isnan(v))]
        check_scores([t for t, _ in scored], [v for _, v in scored])
        return torch.tensor(values, dtype=torch.float32, device=state.device).reshape(state.shape[:-1])

    def also(self, answers: dict[str, float]) -> None:
        """Take these answers too; they are not paid for."""
        self._others |= {t: v for t, v in answers.items() if not math.isnan(v)}

    def go_on_from(self, other: Cached) -> None:
        """Know what another one knows, and count it as it does."""
        self.known |= other.known
        self.met |= other.met
        self.free |= other.free
        self.blanks |= other.blanks

    def keep_in(self, file: str | Path) -> None:
        """Use this file from now on: its scores are read, and scores that it lacks are appended."""
        self.file = Path(file)
        before, free, blanks = self.known, self.free, self.blanks
        self.known, self.free, self.blanks = {}, set(), set()
        with on_disk(self.file):
            if self.recall(self.file):
                append(self.file, [])  # cuts off what a crash cut short
        news = {t: v for t, v in before.items() if t not in self.known}
        self.free |= free & news.keys()
        self.blanks |= blanks & news.keys()
        self.known |= news
        self._append(news)
        self.met = {t: v for t, v in self.known.items() if not math.isnan(v)}

    def recall(self, file: str | Path, in_folder: bool = True) -> int:
        """Read the scores of a file, without changing it; returns the bytes of a last line that a crash cut short.

        Of two scores of one text the first is taken: it is the one that training used.
        """
        answers, torn = read_answers(Path(file), in_folder)
        for answer in answers:
            if answer.text not in self.known:
                self.known[answer.text] = answer.score
                if answer.free:
                    self.free.add(answer.text)
                if answer.blank:
                    self.blanks.add(answer.text)
        return torn

    def _append(self, scores: dict[str, float]) -> None:
        if self.file is not None and scores:
            append(self.file, [Answer(t, v, t in self.blanks, t in self.free) for t, v in scores.items()])


class Command:
    """A shell command as `list[str] -> scores`: one sequence per line on its standard input, one score per line back.

    `Host(Command("./fold --fast"), env)` makes an oracle of it.
    """

    def __init__(self, command: str):
        need_kind("the command", command, str, "a text that the shell runs, such as './fold --fast'")
        self.command = command
        self._running: subprocess.Popen[str] | None = None

    def __call__(self, texts: list[str]) -> list[float]:
        for text in texts:
            if text.splitlines() not in ([text], []):
                raise UserError(
                    f"{text!r} holds a line break, but the oracle `{self.command}` reads one sequence per line: "
                    "use a Python oracle"
                )
        pipe = subprocess.PIPE
        # a session of its own: Ctrl-C ends training between two iterations, not the command in the middle of one
        running = subprocess.Popen(
            self.command, shell=True, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        self._running = running
        try:
            written, complaints = running.communicate("".join(t + "\n" for t in texts))
        except BaseException:
            self.cancel()
            raise
        if running.returncode != 0:
            last = (complaints.strip().splitlines() or ["it wrote no error message"])[-1]
            raise UserError(
                f"the oracle `{self.command}` ended with status {running.returncode} on a batch beginning with "
                f"{texts[0]!r}: {last}"
            )
        lines = written.split("\n")[: -1 if written.endswith("\n") else None]
        if len(lines) != len(texts):
            raise UserError(
                f"the oracle `{self.command}` wrote {len(lines)} lines for {len(texts)} sequences: "
                "write one score per line"
            )
        return [_number(text, line) for text, line in zip(texts, lines, strict=True)]

    def cancel(self) -> None:
        """Kill the running command and the processes it started."""
        running = self._running
        if running is None or running.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if os.name == "posix":
                os.killpg(running.pid, signal.SIGKILL)
            else:
                running.kill()
