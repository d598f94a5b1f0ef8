"""Which engine does which operation: the fastest that fits, with the reasons of those that do not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

from stochflow.engines.base import Compile, Engine, Job, Request, Walk
from stochflow.engines.eager import Eager
from stochflow.errors import UserError, did_you_mean

log = logging.getLogger("stochflow")
Word = Literal["auto", "eager", "numba", "cuda"]
OPERATIONS = ("walk", "gradient", "noise", "update")


@cache
def engines() -> dict[str, Engine]:
    """All of them, the fastest first. (Modules of an engine that is not available are not imported.)"""
    from stochflow.engines.cuda.engine import Cuda
    from stochflow.engines.numba.engine import Numba

    return {"cuda": Cuda(), "numba": Numba(), "eager": Eager()}


class Chosen(NamedTuple):
    """The engine of each operation, and for each why the faster ones were not taken."""

    walk: Engine
    gradient: Engine
    noise: Engine
    update: Engine
    reasons: dict[str, list[str]]
    because: str | None = None  # why eager takes the gradient, where another engine of the device would be faster

    def describe(self) -> dict[str, Any]:
        """As it stands in environment.json."""
        names = {op: getattr(self, op).name for op in OPERATIONS}
        return {"engine": self.gradient.name, "choice": self.sentence(), "operations": names, "reasons": self.reasons}

    def sentence(self) -> str:
        """One line: "engine: eager, because numba does not cover ..."."""
        return f"engine: {self.gradient.name}" + ("" if self.because is None else f", because {self.because}")


FASTEST = {"cuda": "cuda", "cpu": "numba"}  # on each kind of device


def choose(job: Job, word: Word = "auto") -> Chosen:
    """The fastest engine that fits, per operation; a gradient without autograd also needs its own engine's walk.
    An engine that is asked for by name must do both, or it is an error with the reason."""
    if word not in get_args(Word):
        raise UserError(
            f"--engine {word}: there is no such engine{did_you_mean(word, get_args(Word))}; take one of {', '.join(get_args(Word))}"
        )
    request = Request(job.task, job.policy, job.batch)
    candidates = [e for name, e in engines().items() if word in ("auto", name) or name == "eager"]
    found: dict[str, dict[str, str]] = {op: {} for op in OPERATIONS}  # reasons by engine

    def take(operation: str, why_not: WhyNot) -> Engine:
        for engine in candidates:
            reason = _asked(engine, operation, why_not)
            if reason is None:
                return engine
            found[operation][engine.name] = reason
        raise AssertionError("eager covers everything")

    gradient = take("gradient", lambda e: e.why_not(job))
    refused = found["gradient"]
    if gradient.name != "eager":
        found |= {"walk": refused, "update": refused}
    if word in refused:
        raise UserError(f"--engine {word} was asked for, but {refused[word]}: take --engine auto")
    walk = gradient if gradient.name != "eager" else take("walk", lambda e: e.why_not_walk(request))
    noise = take("noise", lambda e: e.why_not_noise(job.dynamics))
    update = gradient if gradient.name != "eager" else take("update", lambda e: e.why_not_update(job.weights))
    reasons = {op: list(each.values()) for op, each in found.items()}
    because = refused.get(FASTEST.get(job.policy.device.type, "")) if gradient.name == "eager" else None
    return Chosen(walk, gradient, noise, update, reasons, because)


WhyNot = Callable[[Engine], str | None]


def _asked(engine: Engine, operation: str, why_not: WhyNot) -> str | None:
    """Why an engine does not do it. A kernel that does not compile is reported once, in the compiler's words."""
    missing = engine.unavailable()
    if missing is not None:
        return missing
    try:
        return why_not(engine)
    except Compile as error:
        _report(engine.name, str(error))
        return f"{engine.name}'s {operation} does not compile: {_gist(str(error))}"


@cache
def _report(name: str, message: str) -> None:
    log.warning("a kernel of the engine %s does not compile: %s", name, " | ".join(message.splitlines()))


def _gist(message: str) -> str:
    """The line of a compiler's message that names the error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")


def walk(request: Request, word: Word = "auto") -> Walk:
    """A walk by the fastest engine that can do it, for looks and samples."""
    for name, engine in engines().items():
        asked = word == "auto" or name in (word, "eager")
        if asked and _asked(engine, "walk", lambda e: e.why_not_walk(request)) is None:
            return engine.walk(request)
    raise AssertionError("eager walks everywhere")
