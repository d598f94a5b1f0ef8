"""The words after a command: a task, its own flags and those of training, side by side. No torch here."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import field
from typing import Any, Literal, get_type_hints

import tyro

from stochflow.cli.complaints import parsed
from stochflow.errors import UserError, did_you_mean
from stochflow.files.reading import shown
from stochflow.runs.config import TASKS, Config, Train, UserTask, find_task, refuse_idle_stick


def task_and_flags(command: str, words: list[str]) -> tuple[str, list[str]]:
    """The task that stands first, and the rest."""
    if not words or words[0] in ("-h", "--help"):
        names = "\n".join(f"  {name:<10} {one_line(task)}" for name, task in TASKS.items())
        print(
            f"usage: stochflow {command} TASK [flags]\n\nTASK is one of\n{names}\nor a function of your own as my_module:my_function.\n"
        )
        print(f"`stochflow {command} TASK --help` shows the task's flags.")
        raise SystemExit(0 if words else 2)
    if words[0].startswith("-"):
        raise UserError(f"the task comes first: stochflow {command} TASK {words[0]} ...")
    if words[0].lower().endswith((".csv", ".csv.gz", ".tsv")):
        raise UserError(
            f"{shown(words[0])} is a table of measurements, not a task: stochflow design new CAMPAIGN --data {shown(words[0])}"
        )
    return words[0], words[1:]


def one_line(thing: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def settings_class(name: str) -> Any:
    """A dataclass of the task's flags: one that ships, or made from the signature of the user's function."""
    if ":" not in name:
        return find_task(name)
    from stochflow.runs import tasks

    function = tasks.find(name)
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise UserError(
            f"the types of {name} cannot be read ({error}): import them where the function stands"
        ) from error
    reserved = {f.name for f in dataclasses.fields(Train)} | {
        "out",
        "quiet",
        "config",
        "json",
        "track",
        "name",
        "trust",
        "task",
    }
    fields: list[Any] = []
    for p in inspect.signature(function).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            raise UserError(
                f'the parameter "{p}" of {name} cannot become a flag: give the function plain keyword parameters'
            )
        if p.name in reserved:
            raise UserError(f'the parameter "{p.name}" of {name} is already a word of every task: rename it')
        kind = hints.get(p.name, str if p.default in (p.empty, None) else type(p.default))
        fields.append((p.name, kind) if p.default is p.empty else (p.name, kind, field(default=p.default)))
    made = dataclasses.make_dataclass(getattr(function, "__name__", "task"), fields, frozen=True)
    made.__doc__ = one_line(function) or f"The task that {name} makes."
    return made


def of_user(name: str, settings: dict[str, Any]) -> Any:
    """The saved settings of a user's task as its flags' defaults."""
    from stochflow.runs import tasks, trust

    trust.refuse_any_callable(tasks.find(name), name)
    kind = settings_class(name)
    known = [f.name for f in dataclasses.fields(kind)]
    for word in settings:
        if word not in known:
            raise UserError(f'--config: the task {name} has no parameter "{word}"{did_you_mean(word, known)}')
    return kind(**settings)


TITLES = {
    "train": "Train a sampler. --steps is the total; --out is the run folder itself.",
    "floor": "The best law any policy can have.",
    "sweep": "Train every cell of a grid of settings; the flags of training are the same for all cells.",
    "doctor": "Which engine would run this task, and why not a faster one.",
}


def parse_task(
    command: str, name: str, words: list[str], extra: list[Any], train: Train | None, defaults: Any = None
) -> Any:
    """Flags of the task, of training and of the command, side by side and without prefixes."""
    kind = settings_class(name) if defaults is None else type(defaults)
    for own in dataclasses.fields(kind):
        if own.name in {flag for flag, *_ in extra}:
            raise UserError(f'the parameter "{own.name}" of {name} is a flag of `stochflow {command}` too: rename it')
    needed = any(
        f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING for f in dataclasses.fields(kind)
    )
    task_field: Any = (
        ("task", kind)
        if needed and defaults is None
        else ("task", kind, field(default=kind() if defaults is None else defaults))
    )
    fields = [task_field, *([("train", Train, field(default=train))] if train else []), *extra]
    made = dataclasses.make_dataclass(command, fields, frozen=True, kw_only=True)
    made.__doc__ = TITLES[command]
    words = _with_feedback(kind, words)
    asked: Any = parsed(made, words, prog=f"stochflow {command} {name}", config=(tyro.conf.OmitArgPrefixes,))
    if ":" not in name:
        refuse_idle_stick(asked.task, [w[2:].partition("=")[0] for w in words if w.startswith("--")])
    return asked


def _with_feedback(kind: Any, words: list[str]) -> list[str]:
    """--feedback is the closed loop in its own words; it is what every task does unless told otherwise."""
    names = {f.name for f in dataclasses.fields(kind)}
    if "--feedback" not in words or "feedback" in names:  # a user's own parameter comes first
        return words
    if "--open-loop" in words:
        raise UserError("--feedback and --open-loop exclude one another: with feedback, each letter sees what was made")
    asked = ["--no-open-loop"] if "open_loop" in names else []
    return [*[w for w in words if w != "--feedback"], *asked]


def as_config(name: str, task: Any, train: Train | None, origin: Literal["caller", "agreed"] = "caller") -> Config:
    """The configuration that the parsed flags ask for."""
    if name not in TASKS:
        task = UserTask(name, dataclasses.asdict(task), origin)
    return Config(task, train) if train else Config(task)


def not_asked_for(flags: list[str]) -> set[str]:
    """Settings of training that no flag names, and so may be chosen for the task."""
    given = {w[2:].partition("=")[0].replace("-", "_").removeprefix("no_") for w in flags if w.startswith("--")}
    return {f.name for f in dataclasses.fields(Train)} - given


def explained(text: str) -> Any:
    """A flag's help."""
    return tyro.conf.arg(help=text)
