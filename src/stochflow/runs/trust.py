"""What a folder may have run: nothing, unless the user says so. A folder is data, and people share folders.

A task named `module:function` in a file is code of somebody's. Before it is imported it is located without importing
anything (parent packages included), and the user names it again (`--task module:function`) or says `--trust`.
A function is called with arguments from a file only where it says that it returns a `Task`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

from stochflow.errors import UserError
from stochflow.files.reading import Unreadable, one_line, read_json, shown
from stochflow.runs.config import UserTask
from stochflow.runs.imports import find_spec, lies_in, search_path
from stochflow.scores.oracles import Command

SPEC = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")  # package.module:function
log = logging.getLogger("stochflow")


class Consent(NamedTuple):
    """What the user agreed to on this command line or in this call; never anything that a file says."""

    name: str | None = None  # the task, named again
    trust: bool = False  # whatever the folder names

    def covers(self, name: str) -> bool:
        return self.trust or self.name == name


class Part(NamedTuple):
    """A module that an import would run."""

    module: str
    file: str | None  # where it lies; None where there is no such module
    digest: str | None  # sha256 of its source, None where that is no file


# agreeing --------------------------------------------------------------------------------------------------------


def agreed(task: UserTask, consent: Consent, folder: Path, remembered: Mapping[str, Any] | None = None) -> UserTask:
    """The task of a file, allowed to be imported and called; UserError where the user has not agreed.

    `remembered` is what `source_of` noted when the run was trained: what has changed since is said.
    """
    if task.origin != "file":
        return task
    if consent.name is not None and consent.name != task.name:
        raise UserError(
            f"{shown(folder)} names the task {shown(task.name)}, not --task {shown(consent.name)}: name the one it was trained with"
        )
    parts = locate(task.name)
    _refuse_inside(parts, folder, task.name)
    what = described(task, parts)
    changed = changes(remembered, parts)
    if not consent.covers(task.name):
        raise UserError(
            f"{shown(folder)} names a task that is code, which would run with your rights: {what}{changed}; if you trust it, "
            f"say --task {shown(task.name)} (in Python task={shown(task.name)!r}), or --trust"
        )
    if consent.trust:
        log.warning("%s%s", what, changed)
    elif changed:
        log.warning("%s%s", shown(task.name), changed)
    return task.agreed(consent.trust)


def refuse_commands(oracle: object, task: UserTask, function: Callable[..., Any]) -> None:
    """UserError where an oracle runs a shell command that is among the settings of a file's task, which was named but not trusted.

    Naming a task again is consent to its code, defaults included, and not to what else a stranger's file hands it.
    """
    own = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    foreign = [value for name, value in task.settings.items() if value != own.get(name)]
    given = [text for text in _texts(foreign) if text.strip()]
    for command in _commands(oracle):
        if any(text.strip() in command for text in given):
            raise UserError(
                f"the settings of {shown(task.name)} name a shell command, which would run with your rights: "
                f"{shown(command, 400)!r}; if you trust it, say --trust (in Python task=Consent(trust=True))"
            )


def _commands(oracle: object) -> list[str]:
    """The shell commands that an oracle runs, whatever wraps them."""
    found = []
    while oracle is not None:
        inner = getattr(oracle, "fn", None)
        if isinstance(inner, Command):
            found.append(inner.command)
        oracle = getattr(oracle, "oracle", None)
    return found


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [text for one in inside for text in _texts(one)]


def described(task: UserTask, parts: list[Part]) -> str:
    """What would be imported, from where, and what would be called with which arguments."""
    function = task.name.partition(":")[2]
    given = ", ".join(
        f"{k}={shown(v, 60)}" if not isinstance(v, str) else f"{k}={shown(v, 60)!r}" for k, v in task.settings.items()
    )
    places = " and ".join(f"{shown(p.module)} from {_place(p)}" for p in parts)
    return one_line(f"importing {places}, calling {shown(function)}({given})")


def _place(part: Part) -> str:
    if part.file is None:
        return "nowhere (there is no such module)"
    real = os.path.realpath(part.file) if os.path.islink(part.file) else part.file
    return shown(part.file) if real == part.file else f"{shown(part.file)} (a link to {shown(real)})"


# locating --------------------------------------------------------------------------------------------------------


def locate(spec: str) -> list[Part]:
    """The modules that importing `package.module:function` would run, parents first; nothing is imported."""
    if not SPEC.fullmatch(spec):
        raise UserError(f"{shown(spec)!r} names no task function: write it as package.module:function")
    names = spec.partition(":")[0].split(".")
    parts: list[Part] = []
    path: Any = None
    importlib.invalidate_caches()
    for i in range(len(names)):
        module = ".".join(names[: i + 1])
        loaded = sys.modules.get(module)
        if loaded is not None and getattr(loaded, "__spec__", None) is None:
            parts.append(Part(module, getattr(loaded, "__file__", None) or "memory (it is imported already)", None))
            path = list(getattr(loaded, "__path__", []))
            continue
        found = find_spec(module, search_path() if path is None else path)
        if found is None:
            parts.append(Part(module, None, None))
            break
        parts.append(_part(module, found))
        path = list(found.submodule_search_locations or [])
    return parts


def _part(module: str, found: ModuleSpec) -> Part:
    origin = found.origin
    if origin is None:  # a namespace package: no code of its own
        return Part(module, f"the folders {', '.join(found.submodule_search_locations or [])}", None)
    if origin in ("built-in", "frozen"):
        return Part(module, f"Python itself ({origin})", None)
    try:
        digest = hashlib.sha256(Path(origin).read_bytes()).hexdigest()
    except OSError:
        digest = None
    return Part(module, os.path.abspath(origin), digest)


def _refuse_inside(parts: list[Part], folder: Path, spec: str) -> None:
    """Code that travels in the run folder itself is never imported, whatever the user says: it is not data."""
    own = os.path.realpath(folder if folder.is_dir() else folder.parent)
    if not (Path(own) / "config.json").exists():
        return
    for part in parts:
        if part.file is None or not os.path.isabs(part.file):
            continue
        if lies_in(os.path.realpath(part.file), own) or lies_in(_named_place(part.file), own):
            raise UserError(
                f"the task {shown(spec)} would be imported from within the run folder ({shown(part.file)}), which is data: "
                "read it, and move it where your own code lies if you trust it"
            )


def _named_place(file: str) -> str:
    """Where the name lies that a module is imported by, though it may be a link to elsewhere."""
    return os.path.join(os.path.realpath(os.path.dirname(file)), os.path.basename(file))


# what was trained with -------------------------------------------------------------------------------------------


def source_of(spec: str) -> dict[str, str]:
    """Digests of a task's code, for environment.json: of its function and of the modules that lead to it."""
    parts = locate(spec)
    found = {part.module: part.digest for part in parts if part.digest is not None}
    own = _function_source(parts[-1], spec.partition(":")[2])
    return found if own is None else found | {spec: own}


def remembered(folder: Path) -> Mapping[str, Any] | None:
    """What `source_of` noted in a run folder; None where it is not there or damaged."""
    try:
        noted = read_json(folder / "environment.json")
    except Unreadable:
        return None
    found = noted.get("task") if isinstance(noted, dict) else None
    return found if isinstance(found, dict) else None


def changes(remembered: Mapping[str, Any] | None, parts: list[Part]) -> str:
    """`"; its source has changed ..."` where a digest differs from the one remembered, else an empty string."""
    if not remembered:
        return ""
    spec = next((name for name in remembered if ":" in name), None)
    now = {part.module: part.digest for part in parts}
    if spec is not None and remembered[spec] != _function_source(parts[-1], spec.partition(":")[2]):
        return "; this function's source has changed since the run was trained"
    other = [name for name, digest in remembered.items() if ":" not in name and now.get(name) != digest]
    return f"; the source of {shown(other[0])} has changed since the run was trained" if other else ""


def _function_source(part: Part, name: str) -> str | None:
    """sha256 of the function's text, read without importing; None where it stands elsewhere."""
    if part.file is None or not part.file.endswith(".py"):
        return None
    try:
        text = Path(part.file).read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return hashlib.sha256((ast.get_source_segment(text, node) or "").encode()).hexdigest()
    except (OSError, ValueError, SyntaxError, RecursionError):
        pass
    return None


# calling ---------------------------------------------------------------------------------------------------------


def refuse_any_callable(function: Callable[..., Any], spec: str) -> None:
    """UserError unless this is a Python function that says by its annotation that it returns a `Task`."""
    from stochflow.types import Task

    if not inspect.isfunction(function):
        raise UserError(
            f"{spec} is not a function written in Python: name a function that returns a Task, as in `def my_task(...) -> Task`"
        )
    if function.__module__.startswith("stochflow."):
        raise UserError(
            f"{spec} belongs to stochflow itself: shipped tasks go by their names, which `stochflow tasks` lists"
        )
    said = function.__annotations__.get("return")
    if isinstance(said, str):
        place: Any = function.__globals__
        words = said.strip("\"' ").split(".")
        for word in words:
            place = place.get(word) if isinstance(place, dict) else getattr(place, word, None)
        said = Task if place is None and words[-1] == "Task" else place  # imported for type checkers alone
    if said is not Task:
        raise UserError(
            f"{spec} does not say that it returns a Task, and only such a function is called with arguments from a file: "
            "write `-> Task` behind its parameters (from stochflow import Task)"
        )
