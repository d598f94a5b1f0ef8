"""Oracles: states [..., D] -> score [...], float32.

`on_device` says whether an oracle is a tensor function that can be part of a captured iteration. `calls` counts the objects
an oracle was asked about; a replayed CUDA graph runs no Python, so there the trainer's step times batch is the count.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stochflow.env import Enumerable, Env
from stochflow.errors import UserError

LARGEST = torch.finfo(torch.float32).max  # scores are kept in float32: beyond this they would be infinite
Texts = Callable[[list[str]], Any]  # what a user writes: list[str] -> one score each


class Table:
    """A score for every state of an enumerable environment, or for the last ones in its order (all strings of full length).

    `scores` [n] in the order of `env.all_states()`. States before those have no score: they read NaN, never a neighbour's
    score. `modes` [n] bool marks the states that count as modes, where that is known.
    """

    on_device = True

    def __init__(self, env: Enumerable, scores: Any, modes: Any = None):
        given = torch.as_tensor(scores, dtype=torch.float64)
        total = len(env.all_states())
        if given.ndim != 1 or not 0 < len(given) <= total:
            raise UserError(f"a table for {env!r} holds one row of at most {total} scores, but this one has shape {tuple(given.shape)}")
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
                    f"the marks of the modes have shape {tuple(mark.shape)}, but the scores {tuple(given.shape)}: give one a score"
                )
            self._marked = torch.zeros(total, dtype=torch.bool)
            self._marked[total - len(given) :] = mark
        self._moved: dict[torch.device, Tensor] = {}  # one copy a device, so that a captured iteration copies nothing

    def __call__(self, state: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():  # a counter inside a compiled graph would recompile it at every call
            self.calls += state[..., 0].numel()
        table = self._moved.get(state.device)
        if table is None:
            table = self._moved[state.device] = self.scores.to(state.device, torch.float32)
        return table[self.env.index(state)]

    def modes(self, state: Tensor) -> Tensor | None:
        """[...] True where the state is a mode; None where modes were not given."""
        return None if self._marked is None else self._marked.to(state.device)[self.env.index(state)]


class Host:
    """A Python callable `list[str] -> scores`, called once a batch with the whole batch. It may be slow; it may not lie:

    a wrong number of scores, a missing one (None, KeyError), NaN or infinity stops with the sample's name.
    """

    on_device = False

    def __init__(self, fn: Texts, env: Env):
        if not hasattr(env, "decode"):
            raise UserError(f"{env!r} has no texts to show an oracle: write the oracle as a function of state tensors instead")
        self.fn, self.env, self.calls = fn, env, 0

    def __call__(self, state: Tensor) -> Tensor:
        texts = self.env.decode(state)  # type: ignore[attr-defined]
        return as_scores(self.ask(texts), state)

    def ask(self, texts: list[str]) -> list[float]:
        """A finite score for each text."""
        values = self.raw(texts)
        check_scores(texts, values)
        return values

    def raw(self, texts: list[str]) -> list[float]:
        """What the callable says, as floats (NaN for None), one a text."""
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
        except Exception as problem:
            raise UserError(
                f"the oracle failed on a batch of {len(texts)} that begins with {texts[0]!r}: {type(problem).__name__}: {problem}"
            ) from problem
        if len(values) != len(texts):
            raise UserError(
                f"the oracle gave {len(values)} scores for {len(texts)} sequences (the first is {texts[0]!r}): give one score each"
            )
        return [_number(text, value) for text, value in zip(texts, values, strict=True)]


def _number(text: str, value: Any) -> float:
    if value is None:
        return math.nan
    if getattr(value, "ndim", 0) > 0:
        raise UserError(f"the oracle gave {text!r} an array of shape {tuple(value.shape)}: give one number a sequence")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"the oracle said {value!r} of {text!r}: give one number a sequence") from None


def check_scores(texts: Sequence[str], values: Sequence[float]) -> None:
    """Raises for the first text whose score is missing, not finite or too large for float32."""
    for i, (text, value) in enumerate(zip(texts, values, strict=True)):
        if not abs(value) <= LARGEST:
            said = "no score (None or NaN)" if math.isnan(value) else f"{value}"
            raise UserError(
                f"the oracle gave {said} for sample {i}, {text!r}: it must give a finite score to every sequence that can be built"
            )


def as_scores(values: Sequence[float], state: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=state.device).reshape(state.shape[:-1])


class Cached:
    """A `Host` that is asked about each text once. `hits` counts the answers that cost nothing.

    With `file`, answers are appended to it as JSON lines as soon as they arrive, and read back when it is opened again:
    what was paid for is never lost, even where a later sample of the same batch fails.
    """

    on_device = False

    def __init__(self, oracle: Host, file: str | Path | None = None):
        self.oracle, self.env, self.hits = oracle, oracle.env, 0
        self.known: dict[str, float] = {}
        self.file = None if file is None else Path(file)
        if self.file is not None and self.file.exists():
            self._read(self.file)

    @property
    def calls(self) -> int:
        return self.oracle.calls

    def __call__(self, state: Tensor) -> Tensor:
        texts = self.env.decode(state)  # type: ignore[attr-defined]
        new = [t for t in dict.fromkeys(texts) if t not in self.known]
        self.hits += len(texts) - len(new)
        values = self.oracle.raw(new)
        self._keep({t: v for t, v in zip(new, values, strict=True) if abs(v) <= LARGEST})  # before anything is refused
        check_scores(new, values)
        return as_scores([self.known[t] for t in texts], state)

    def _keep(self, scores: dict[str, float]) -> None:
        self.known.update(scores)
        if self.file is not None and scores:
            with self.file.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps({"text": t, "score": v}) + "\n" for t, v in scores.items())

    def _read(self, file: Path) -> None:
        content = file.read_text(encoding="utf-8")
        whole = content[: content.rfind("\n") + 1]  # a last line cut short by a crash is dropped
        for place, line in enumerate(whole.splitlines(), start=1):
            try:
                entry = json.loads(line)
                self.known[entry["text"]] = float(entry["score"])
            except (ValueError, KeyError, TypeError):
                raise UserError(f"line {place} of {file} is not an oracle's answer: mend or remove it") from None
        if whole != content:
            file.write_text(whole, encoding="utf-8")


class Command:
    """A shell command as `list[str] -> scores`: sequences on its standard input, one a line; one score a line on its output.

    `Host(Command("./fold --fast"), env)` makes an oracle of it.
    """

    def __init__(self, command: str):
        self.command = command

    def __call__(self, texts: list[str]) -> list[float]:
        for text in texts:
            if text.splitlines() not in ([text], []):
                raise UserError(
                    f"{text!r} holds a line break, but the oracle `{self.command}` reads one sequence a line: use a Python oracle"
                )
        done = subprocess.run(self.command, shell=True, input="".join(t + "\n" for t in texts), capture_output=True, text=True)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(
                f"the oracle `{self.command}` ended with status {done.returncode} on a batch beginning with {texts[0]!r}: {last}"
            )
        lines = done.stdout.split("\n")[: -1 if done.stdout.endswith("\n") else None]
        if len(lines) != len(texts):
            raise UserError(f"the oracle `{self.command}` wrote {len(lines)} lines for {len(texts)} sequences: write one score a line")
        return [_number(text, line) for text, line in zip(texts, lines, strict=True)]
