"""From a task's settings to a `Task`: the ones that ship, and the user's own."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from pathlib import Path, PurePath
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from stochflow.errors import UserError, did_you_mean, need_kind, need_number, need_whole, one_line
from stochflow.files.memory import need
from stochflow.law.modes import tfbind8_modes
from stochflow.runs import config, ranges, trust
from stochflow.runs.config import BitsTask, GCTask, GridTask, PeptideTask, RNATask, TFBind8Task
from stochflow.runs.imports import import_user
from stochflow.runs.ranges import check_numbers
from stochflow.scores.data import tfbind8
from stochflow.scores.landscapes import BitModes, GCContent, PeptideProxy, RNAFold, Tempered, bit_alphabet
from stochflow.scores.oracles import Cached, Host, Table
from stochflow.scores.orders import orders
from stochflow.scores.rewards import Default, Linear, Power
from stochflow.types import Task
from stochflow.worlds.channels import Confusion, Exact, Neighbour, Slip
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.confusion import read_table
from stochflow.worlds.env import Channel, Env
from stochflow.worlds.grid import Corners, Grid
from stochflow.worlds.rules import Rules
from stochflow.worlds.strings import PROTEIN, Strings


def build(settings: Any) -> Task:
    """The task that a settings dataclass of `config` describes."""
    if isinstance(settings, config.UserTask):
        return user_task(settings)
    makers: dict[str, Callable[..., Task]] = {
        "grid": grid_task,
        "tfbind8": tfbind8_task,
        "bits": bits_task,
        "gc": gc_task,
        "peptide": peptide_task,
        "rna": rna_task,
    }
    ships = type(settings) in config.TASKS.values() and settings.name in makers
    if not ships:
        known = ", ".join(t.__name__ for name, t in config.TASKS.items() if name in makers)
        raise UserError(
            f"{settings!r} describes no task that ships: give one of {known}, or load your own with tasks.load"
        )
    return makers[settings.name](**asdict(settings))


def grid_task(
    ndim: int = GridTask.ndim,
    side: int = GridTask.side,
    base: float = GridTask.base,
    stick: float = GridTask.stick,
    noise: str = GridTask.noise,
    confusion: str = GridTask.confusion,
) -> Task:
    """The hypergrid with bright corners; R is the oracle's score itself."""
    need_number("base", base)
    if not base > 0:
        raise UserError(f"base = {base} must be above 0: the reward away from the corners has a logarithm")
    env = Grid(ndim, side)
    return Task(env, make_channel(env, stick, noise, confusion), Corners(side, base), Power(beta=1.0, floor=base))


def tfbind8_task(
    stick: float = TFBind8Task.stick,
    beta: float = TFBind8Task.beta,
    floor: float = TFBind8Task.floor,
    ramp: float = TFBind8Task.ramp,
    table: str = TFBind8Task.table,
    noise: str = TFBind8Task.noise,
    confusion: str = TFBind8Task.confusion,
    open_loop: bool = TFBind8Task.open_loop,
) -> Task:
    """DNA 8-mers scored by a measured landscape; R = max(y, floor)^beta."""
    need_kind("open_loop", open_loop, bool, "True or False")
    env = Strings("ACGT", 8)
    scores = tfbind8(table)
    bright = np.zeros(len(scores), dtype=bool)
    bright[tfbind8_modes(table)] = True
    task = Task(env, make_channel(env, stick, noise, confusion), Table(env, scores, bright), Power(beta, floor, ramp))
    return orders(task) if open_loop else task


def bits_task(
    length: int = BitsTask.length,
    bits: int = BitsTask.bits,
    modes: int = BitsTask.modes,
    beta: float = BitsTask.beta,
    mode_seed: int = BitsTask.mode_seed,
    stick: float = BitsTask.stick,
    noise: str = BitsTask.noise,
    confusion: str = BitsTask.confusion,
) -> Task:
    """Sequences of `length` bits, `bits` of them a token, drawn to `modes` known ones: R = exp(-beta * distance to the nearest)."""
    for name, value in (("length", length), ("bits", bits), ("modes", modes), ("mode_seed", mode_seed)):
        need_whole(name, value, 0)
    need_number("beta", beta)
    check_numbers({"beta": beta}, ranges.OF_ALL_TASKS, where="")
    if not 1 <= bits <= 10:
        raise UserError(f"a token of {bits} bits makes an alphabet of 2^{bits} letters: give 1 to 10 bits")
    if not 8 <= length <= 120 or length % 8 or length % bits:
        raise UserError(
            f"length = {length} bits cannot be built: give a multiple of 8 and of bits = {bits}, from 8 to 120"
        )
    if modes < 1:
        raise UserError(f"modes = {modes} leaves nothing to find: give 1 or more")
    if not beta > 0:
        raise UserError(f"beta = {beta} must be above 0: it is what a wrong bit costs")
    need(min(modes, 5 ** (length // 8)) * (12 * length + 200), f"the table of {modes} modes", "give fewer --modes")
    env = Strings(bit_alphabet(bits), length // bits)
    return Task(
        env, make_channel(env, stick, noise, confusion), BitModes(env, bits, modes, mode_seed), Linear(beta * length)
    )


def gc_task(
    length: int = GCTask.length,
    targets: str = GCTask.targets,
    betas: str = GCTask.betas,
    stick: float = GCTask.stick,
    noise: str = GCTask.noise,
    confusion: str = GCTask.confusion,
) -> Task:
    """DNA of a GC content on demand, at a temperature on demand: one context for every pair of target and beta; R = exp(beta * (1 - |GC - target|))."""
    wanted, sharp = _numbers("targets", targets), _numbers("betas", betas)
    if min(wanted) < 0 or max(wanted) > 1:
        raise UserError(f"targets = {targets!r} are shares of G and C: give numbers between 0 and 1")
    if min(sharp) < 0:
        raise UserError(f"betas = {betas!r} are inverse temperatures: give numbers of at least 0")
    need(
        len(wanted) * len(sharp) * 16,
        f"the table of {len(wanted)} x {len(sharp)} conditions",
        "give fewer --targets or --betas",
    )
    env = Conditioned(Strings("ACGT", length), torch.cartesian_prod(torch.tensor(wanted), torch.tensor(sharp)))
    return Task(env, make_channel(env, stick, noise, confusion), GCContent(env), Tempered(env))


def peptide_task(
    min_length: int = PeptideTask.min_length,
    beta: float | Literal["auto"] = PeptideTask.beta,
    floor: float = PeptideTask.floor,
    ramp: float = PeptideTask.ramp,
    stick: float = PeptideTask.stick,
    noise: str = PeptideTask.noise,
    confusion: str = PeptideTask.confusion,
    open_loop: bool = PeptideTask.open_loop,
) -> Task:
    """Peptides of up to 50 residues that look antimicrobial to a network trained on shipped data; R = max(score, floor)^beta."""
    env = Strings(PROTEIN, 50, min_length)
    task = Task(env, make_channel(env, stick, noise, confusion), PeptideProxy(env), _power(beta, floor, ramp))
    return orders(task) if open_loop else task


def rna_task(
    structure: str = RNATask.structure,
    beta: float | Literal["auto"] = RNATask.beta,
    floor: float = RNATask.floor,
    ramp: float = RNATask.ramp,
    stick: float = RNATask.stick,
    noise: str = RNATask.noise,
    confusion: str = RNATask.confusion,
    open_loop: bool = RNATask.open_loop,
) -> Task:
    """RNA that folds into a structure (dot-bracket), by ViennaRNA on the host, each sequence folded once."""
    fold = RNAFold(structure)
    env = Strings("ACGU", len(structure))
    task = Task(env, make_channel(env, stick, noise, confusion), Cached(Host(fold, env)), _power(beta, floor, ramp))
    return orders(task) if open_loop else task


def _power(beta: float | Literal["auto"], floor: float, ramp: float) -> Power:
    """The score to a power; or, for auto, what is found while training where the space is too large to list."""
    return Default(3.0, floor, ramp) if beta == "auto" else Power(beta, floor, ramp)


def _numbers(what: str, text: str) -> list[float]:
    need_kind(what, text, str, "numbers with commas between, such as '0.2,0.5,0.8'")
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"{what} = {text!r} must be numbers with commas between, such as 0.2,0.5,0.8") from None
    if not all(math.isfinite(x) for x in found):
        raise UserError(f"{what} = {text!r} must be finite numbers")
    return found


def strings_task(
    oracle: Callable[[list[str]], Any],
    alphabet: str = "ACGT",
    length: int = 8,
    min_length: int | None = None,
    channel: Channel | None = None,
    reward: Callable[..., Tensor] | None = None,
    rules: Rules | None = None,
) -> Task:
    """Any `list[str] -> scores` as a task over strings; with `min_length` strings may stop early.

    Under `rules` only strings that meet them are built (docs/rules.md); they bind orders, so the channel must be exact, and
    `orders` puts the noise after.
    Where the space can be listed, the reward is the score, but at least 1e-3 (`Power()`); give `Linear()` where scores
    are logarithms or may be negative. Elsewhere it is exp(beta * score) with a beta found while training (`Sharpening`).
    A slow oracle is asked once a sequence after `task = task._replace(oracle=Cached(task.oracle))`.
    """
    if not callable(oracle):
        raise UserError(
            f"the oracle is {oracle!r}, which cannot be called: give a function from a list of strings to their scores"
        )
    need_kind("channel", channel, (Channel, type(None)), "a channel, such as Slip(0.1), or None")
    need_kind("rules", rules, (Rules, type(None)), "rules, as Rules.read reads them, or None")
    if reward is not None and not callable(reward):
        raise UserError(
            f"reward is {one_line(repr(reward), 80)}, but it must be a function such as Power(1.0), or None"
        )
    env = Strings(alphabet, length, min_length)
    if rules is not None:
        if channel is not None and not channel.exact:
            raise UserError(
                f"rules bind what is ordered, and under {channel!r} something else may be made: leave the channel out, and put the "
                "noise after the order with stochflow.scores.orders.orders(task, Synthesis(...))"
            )
        env = rules.compile(alphabet, length if min_length is None else (min_length, length)).env()
    return Task(env, channel or Exact(), Host(oracle, env), reward or Default())


def make_channel(env: Env, stick: float, noise: str = "slip", confusion: str = "") -> Channel:
    """The noise that three flags describe. A confusion table is the whole law by itself, so `stick` plays no part in it."""
    need_kind("noise", noise, str, f"one of {', '.join(get_args(config.Noise))}")
    need_kind("confusion", confusion, (str, Path), "the path of a CSV file, or empty")
    if noise not in get_args(config.Noise):
        raise UserError(
            f"there is no noise {noise!r}{did_you_mean(noise, get_args(config.Noise))}: take one of {', '.join(get_args(config.Noise))}"
        )
    if noise != "confusion":
        if confusion:
            raise UserError(
                f"the confusion table {confusion} is not used with --noise {noise}: add --noise confusion or leave the table out"
            )
        channel = Slip(stick) if noise == "slip" else Neighbour(stick)  # either refuses a stick outside [0, 1]
        return Exact() if stick == 0 else channel
    if not confusion:
        raise UserError(
            "--noise confusion needs a table: give --confusion FILE.csv, one row an action, one column a move"
        )
    letters = getattr(getattr(env, "inner", env), "alphabet", None)
    # moves without letters are in the order of the columns, however these are named
    table = Confusion(read_table(confusion).rows) if letters is None else Confusion(confusion, letters)
    real = env.num_moves - (env.stop is not None)
    if table.table.shape[0] != real:
        raise UserError(
            f"the confusion table {confusion} has {table.table.shape[0]} rows, but {env!r} has {real} moves besides STOP: give one row each"
        )
    return table


# the user's own -------------------------------------------------------------------------------------------------


def user_task(settings: config.UserTask) -> Task:
    """The task of a `UserTask`. One that a file names is code that nobody has agreed to: see `trust.agreed`."""
    if settings.origin == "file":
        raise UserError(
            f"the task {settings.name} is named by a file and is code, which is not run unasked: name it again "
            f"(task={settings.name!r} in Python, --task {settings.name} on the command line)"
        )
    function = find(settings.name)
    if settings.origin != "caller":
        trust.refuse_any_callable(function, settings.name)
    own = settings.settings
    if settings.origin == "caller":  # what config.json could not give back is refused before it is trained with
        again = as_meant(function, json.loads(json.dumps(config.kept(own), default=repr)))
        for name, value in own.items():
            if type(again[name]) is not type(value) or (again[name] != value and value == value):
                raise UserError(
                    f"{name} = {value!r} of {settings.name} would not come back from config.json as it is: annotate the parameter "
                    "with its type, or let it take text, numbers, or lists of them"
                )
    else:
        own = as_meant(function, own)
    made = load(settings.name, **own)
    if settings.origin == "agreed":
        trust.refuse_commands(made.oracle, settings, function)
    return made


def as_meant(function: Callable[..., Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Settings from JSON as the function's annotations mean them: paths, tuples, names of an Enum, infinities."""
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        hints = {}
    defaults = {n: p.default for n, p in inspect.signature(function).parameters.items()}

    def meant(value: Any, hint: Any) -> Any:
        kind = get_origin(hint) or hint
        if get_origin(hint) in (Union, UnionType):
            found = (meant(value, one) for one in get_args(hint) if one is not type(None))
            return next((x for x in found if x is not value), value)
        if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str):
            return kind.__members__.get(value, value)
        if isinstance(kind, type) and issubclass(kind, PurePath) and isinstance(value, str):
            return kind(value)
        if kind is tuple and isinstance(value, list):
            own = get_args(hint)
            inner = own[:1] * len(value) if len(own) == 2 and own[1] is Ellipsis else own
            return (
                tuple(meant(v, h) for v, h in zip(value, inner, strict=True))
                if len(inner) == len(value)
                else tuple(value)
            )
        if kind is list and isinstance(value, list) and get_args(hint):
            return [meant(v, get_args(hint)[0]) for v in value]
        if kind is float and value in ("inf", "-inf", "nan"):
            return float(value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        return value

    return {n: meant(v, hints.get(n, type(defaults.get(n)))) for n, v in settings.items()}


def find(spec: str) -> Callable[..., Any]:
    """The function that `pkg.module:function` names, searched from the current directory too (but for a run folder)."""
    need_kind("spec", spec, str, "the name of a task function, as package.module:function")
    module_name, _, function = spec.partition(":")
    if not trust.SPEC.fullmatch(spec):
        raise UserError(f"{spec!r} names no task function: write it as package.module:function")
    try:
        module = import_user(module_name)
    except ModuleNotFoundError as problem:
        if problem.name is not None and (module_name == problem.name or module_name.startswith(problem.name + ".")):
            raise UserError(
                f"there is no module {problem.name!r} (for the task {spec}): run from the folder that holds it, or install it"
            ) from None
        raise UserError(
            f"the module {module_name} needs {problem.name!r}, which is not installed: install it and try again"
        ) from problem
    except (Exception, SystemExit) as problem:
        raise UserError(
            f"the module {module_name} cannot be imported: {type(problem).__name__}: {problem}"
        ) from problem
    found = getattr(module, function, None)
    if not callable(found):
        own = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
        raise UserError(
            f"the module {module_name} has no function {function!r}{did_you_mean(function, own)}: it has {', '.join(own) or 'none'}"
        )
    return found


def load(spec: str, /, **kwargs: Any) -> Task:
    """The task that the user's function `pkg.module:function` returns for these keyword arguments."""
    function = find(spec)
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for word in kwargs:
            if word not in parameters:
                raise UserError(
                    f"the task {spec} takes no {word!r}{did_you_mean(word, parameters)}: it takes {', '.join(parameters) or 'nothing'}"
                )
    missing = [
        n
        for n, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and n not in kwargs
    ]
    if missing:
        raise UserError(f"the task {spec} needs {', '.join(missing)}: give a value, or a default in the function")
    try:
        task = function(**kwargs)
    except UserError:
        raise
    except (Exception, SystemExit) as problem:
        raise UserError(f"the task function {spec} failed: {type(problem).__name__}: {problem}") from problem
    if not isinstance(task, Task):
        raise UserError(
            f"the task function {spec} returned {type(task).__name__}, not a Task: return strings_task(...) or Task(env, channel, oracle, reward)"
        )
    return task
