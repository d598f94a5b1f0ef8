"""A run: an experiment trained into its folder, resumed, opened. What the command line and Python both call."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from stochflow.errors import UserError, did_you_mean, need_kind, need_path, one_line
from stochflow.law.by_condition import floor_rows
from stochflow.law.exact import expected_modes
from stochflow.law.measure import SAMPLES, Yardstick, forked
from stochflow.law.verdict import verdict
from stochflow.runs import defaults, ranks, trust
from stochflow.runs.answers import ANSWERS, LATER, answers_kept, recall_ranks, workers_ready
from stochflow.runs.beside import rivals
from stochflow.runs.build import IN_PYTHON, Experiment, check_at_the_door, from_folder, lasting, make_task, pick_device
from stochflow.runs.config import Config, Train, UserTask, configure
from stochflow.runs.folder import Checkpoint, Run, environment
from stochflow.runs.session import Interrupted, OnProgress, OnStart, Result, Session, every, may_fail
from stochflow.runs.tracking import check_tracker, open_tracker
from stochflow.runs.trust import Consent
from stochflow.runs.values import MakeSource, Values, taken_out
from stochflow.scores.oracles import Cached, TextOracle
from stochflow.training import distributed
from stochflow.training.sources import Source
from stochflow.types import Task

__all__ = ["Experiment", "Interrupted", "Result", "evaluate_run", "floor_of", "open_run", "resume", "train", "verdict"]

log = logging.getLogger("stochflow")

# running --------------------------------------------------------------------------------------------------------


def _lists_settings(function: Any) -> Any:
    """`help` shows every setting of training with its type and default, not `**settings`."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = {p.name for p in own}
    more = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in dataclasses.fields(Train)
        if f.name not in names
    ]
    function.__signature__ = inspect.Signature([*own, *more], return_annotation="Result")
    return function


@_lists_settings
def train(
    task: Config | Task | str | Any,
    /,
    out: str | Path | None = None,
    on_progress: OnProgress | None = None,
    on_start: OnStart | None = None,
    track: str = "none",
    source: Source | MakeSource | None = None,
    free: Collection[str] | None = None,
    **settings: Any,
) -> Result:
    """Train into a new run folder. `task` is a Config, a task's name, its settings, or a `Task`; the rest as the flags
    (`stochflow train TASK --help` explains each), the task's own among them.

    `objective`, `net` and `dynamics` take the words of the command line or values: `objective=SubTrajectoryBalance()`,
    `net=MLP(32, 3)`, `dynamics=Tabular`. `source` is a source of batches, or a function of task and policy that makes one.
    `track` sends the log to wandb, trackio or tensorboard too. `free` names the settings that may be chosen for the task
    (by default those that were not given; none of a Config).

    Examples:
        >>> train("grid", side=8, stick=0.25, steps=500, out="runs/mine")
    """
    if isinstance(task, type) or task is None or (callable(task) and not dataclasses.is_dataclass(task)):
        raise UserError(
            f"{task!r} is no task: give a task's name, its settings, or a Task, and call a function that makes one, "
            "as in train(my_task())"
        )
    _check_callbacks(track, on_progress, on_start)
    if out is not None:
        need_path("out", out)
    given = task if isinstance(task, Task) else None
    if free is None:
        free = () if isinstance(task, Config) else {f.name for f in dataclasses.fields(Train)} - settings.keys()
        free = set(free) - (
            {"search", "children", "replay", "replay_rank", "ask_every"} if source is not None else set()
        )
    if source is not None:
        settings["source"] = source
    values = taken_out(settings)
    if isinstance(task, Config):
        config = task
    else:
        config = configure(UserTask(IN_PYTHON) if given is not None else task, **settings)
    config = dataclasses.replace(config, values=values.described())
    made = make_task(config.task) if given is None else given
    rivals(config.train.beside, made.env)
    if track != "none":
        check_tracker(track)
    chosen, why = defaults.choose(made, config.train, free, not isinstance(config.task, UserTask))
    config = dataclasses.replace(config, train=chosen, chosen=why)
    if why:
        log.info(why)
    if isinstance(config.task, UserTask):
        # an oracle that fails at the first question is wrong, not busy
        once = lasting(made, dataclasses.replace(config.train, oracle_retries=0, oracle_workers=""))
        check_at_the_door(once)
        made = lasting(made, config.train, once, _made_from(given, config.task))
    else:
        made = lasting(made, config.train, made_from=config.task)
    config, out = ranks.apart(config, out)
    with workers_ready(made), _ranks(config.train.ranks == "apart") as group:
        experiment = Experiment(config, made, values=values)
        if group is not None:
            ranks.begin(experiment.trainer, group, config.train.seed)
            if group.rank > 0:
                return _follow(experiment, group)
        with Run.create(out or default_folder(config), config) as run, _tracked(track, run, on_progress) as progress:
            _write_environment(run, experiment)
            with answers_kept(made, run):
                return Session(experiment, run, progress, on_start).go(config.train.steps)


@contextlib.contextmanager
def _ranks(apart: bool) -> Iterator[distributed.Group | None]:
    """The processes that learn together; None where this one is alone, or on its own."""
    if apart:
        yield None
        return
    yield distributed.join()
    distributed.leave()  # where an error passes, the others are not waited for


def _check_callbacks(track: Any, *functions: Any) -> None:
    """UserError unless the tracker is named and the callbacks can be called."""
    need_kind("track", track, str, "the name of a tracker, such as wandb, or none")
    for name, function in zip(("on_progress", "on_start"), functions, strict=True):
        if function is not None and not callable(function):
            raise UserError(f"{name} is {one_line(repr(function), 80)}, but it must be a function, or None")


def _follow(experiment: Experiment, group: distributed.Group, resumed: Checkpoint | None = None) -> Result:
    """What a rank other than the first does: learn, write its own oracle's answers alone, and hear how it ended."""
    path, total = group.from_first()
    oracle = experiment.task.oracle
    if isinstance(oracle, Cached) and Path(path).is_dir():  # else the folder is on another machine
        oracle.keep_in(Path(path) / f"oracle.rank{group.rank}.jsonl")
        oracle.recall(Path(path) / ANSWERS)
    if resumed is not None:
        _load(experiment, resumed._replace(tensors=distributed.of_rank(resumed.tensors, group.rank)), path)
    owing = resumed is not None and bool(resumed.scalars.get("owing"))
    summary = ranks.follow(experiment.trainer, group, total, every(experiment), may_fail(experiment), owing)
    return Result(Path(path), summary, [], experiment)


def resume(
    path: str | Path,
    steps: int | None = None,
    on_progress: OnProgress | None = None,
    on_start: OnStart | None = None,
    task: Task | Consent | str | None = None,
    track: str = "none",
    **objects: Any,
) -> Result:
    """Go on until `steps` iterations are done in all: the same run, bit for bit on CPU, as if it had never stopped.

    `task`: the run's task where it was made in Python, or its name `module:function` again: a folder alone runs no code.
    `objects`: the same `objective`, `net`, `dynamics` and `source` that the run was trained with, where they were values.
    """
    need_path("path", path)
    _check_callbacks(track, on_progress, on_start)
    apart = ranks.own_folder(path) != Path(path)
    path = ranks.own_folder(path)
    with _ranks(apart) as group:
        if group is not None and group.rank > 0:
            config, found, threads = group.from_first()
            _same_threads(config, threads)
            made = lasting(
                _rebuilt(task, config.task, path), from_folder(config.train), made_from=_made_from(task, config.task)
            )
            experiment = Experiment(config, made, values=_values(objects, config, path))
            ranks.begin(experiment.trainer, group, config.train.seed)
            return _follow(experiment, group, found)
        with Run.open(path, write=True) as run:
            values = _values(objects, run.config, path)
            total = run.config.train.steps if steps is None else steps
            config = dataclasses.replace(run.config, train=dataclasses.replace(run.config.train, steps=total))
            found = run.load()
            if found is not None and total < found.step:
                raise UserError(
                    f"{path} has already done {found.step} steps, but --steps {total} is the total asked for: give a larger one"
                )
            if found is not None:
                ranks.check_ranks(found.tensors, group, path)
            threads = (run.read("environment.json") or {}).get("threads")
            _same_threads(config, threads)
            if group is not None:
                group.from_first((config, found, threads))
            made = lasting(
                _rebuilt(task, config.task, path), from_folder(config.train), made_from=_made_from(task, config.task)
            )
            with workers_ready(made), answers_kept(made, run), _tracked(track, run, on_progress) as progress:
                experiment = Experiment(config, made, values=values)
                if group is not None:
                    ranks.begin(experiment.trainer, group, config.train.seed)
                session = Session(experiment, run, progress, on_start)
                _take_up(session, found, config, path)
                return session.go(total)


def _same_threads(config: Config, threads: int | None) -> None:
    """Sums are bitwise repeatable only with the same number of threads."""
    if threads and config.train.threads == 0:
        torch.set_num_threads(threads)


def _take_up(session: Session, found: Checkpoint | None, config: Config, path: str | Path) -> None:
    """Put a session where its run's last checkpoint left off."""
    experiment, run = session.experiment, session.run
    _same_yardstick(run, experiment)
    if found is not None:
        _load(experiment, found, path)
        best = run.load_best()  # a final look keeps its best after its checkpoint, whose header does not know of it
        latest = best if best is not None and best.step <= found.step else found
        session.best = latest.scalars.get("best_so_far")
        session.beta = latest.scalars.get("best_beta")
        session.owing = bool(found.scalars.get("owing"))
    else:
        log.warning(f"there is no checkpoint in {path}, so that it begins at its first step")
    oracle = experiment.task.oracle
    met = found.scalars.get("met") if found is not None else (run.read("environment.json") or {}).get("met")
    if isinstance(oracle, Cached) and isinstance(met, int):  # answers that came later come again
        oracle.met = dict(list(oracle.met.items())[:met])
    done = experiment.trainer.steps_done
    # the line of the last step, as one that is owed, comes after its checkpoint: it is written again
    run.truncate_metrics(done - 1 if done == config.train.steps or session.owing else done)
    rows = run.metrics()
    _note_gap(rows, done, config.train.log_every)
    # time counts from the first stretch
    session.begun -= max((row.get("time") or 0.0 for row in rows), default=0.0)
    noted = run.read("environment.json")
    if noted is None:  # killed between its first two files, or damaged since
        _write_environment(run, experiment)
    else:
        _note_other_versions(noted, experiment.device.type)
    run.config = config
    run.write("config.json", config.to_dict())


def _note_other_versions(noted: dict[str, Any], device: str) -> None:
    """Another version may round otherwise: the run goes on, but not to the last digit as it would have."""
    now = environment(device)
    before = {"stochflow": noted.get("stochflow"), "python": noted.get("python"), **(noted.get("versions") or {})}
    today = {"stochflow": now["stochflow"], "python": now["python"], **now["versions"]}
    other = [f"{k} {v} (now {today.get(k, 'none')})" for k, v in before.items() if v is not None and today.get(k) != v]
    if other:
        log.warning(
            "the run was begun with %s: it goes on, but may differ from there in its last digits", ", ".join(other)
        )


def _note_gap(rows: list[dict[str, Any]], done: int, every: int) -> None:
    """Lines are written in order: one that is missing between others was lost."""
    due = range(every, done, every)
    there = {row["step"] for row in rows if row["step"] in due}
    lost = len(due) - len(there)
    if lost:  # a checkpoint may say that it comes after any number of steps: what is due is not listed
        first, last = (next(step for step in order if step not in there) for order in (due, reversed(due)))
        log.warning(
            "metrics.jsonl lacks %d line%s between steps %d and %d: curves have a gap there",
            lost, "" if lost == 1 else "s", first, last,
        )  # fmt: skip


def open_run(
    path: str | Path, task: Task | Consent | str | None = None, device: str = "auto", **objects: Any
) -> Experiment:
    """A trained run, ready to look at or to sample from; its folder only gains answers of a Python oracle. `task`, `objects` as in `resume`."""
    need_path("path", path)
    run = Run.open(path)
    values = _values(objects, run.config, path)
    found = run.load()
    if found is None:
        raise UserError(f"{path} has no checkpoint yet: train it further with `stochflow resume {path}`")
    made = lasting(
        _rebuilt(task, run.config.task, path), dataclasses.replace(from_folder(run.config.train), oracle_workers="")
    )
    if isinstance(made.oracle, Cached):
        made.oracle.recall(run.path / ANSWERS)
        recall_ranks(made.oracle, run.path)
        if (run.path / LATER).exists():
            made.oracle.recall(run.path / LATER)
        made.oracle.budget = None  # that was training's; who draws from a run asks for scores
        if os.access(run.path, os.W_OK):
            made.oracle.file = run.path / LATER  # what is asked from now on is kept there, beside the run's own answers
    with forked(0, pick_device(device)):  # looking at a run leaves the caller's random stream alone
        experiment = Experiment(run.config, made, device, values)
        _same_yardstick(run, experiment)
        _load(experiment, found, path)
    return experiment


def _values(objects: dict[str, Any], config: Config, path: str | Path) -> Values:
    """The objects a run was trained with, given again."""
    values = taken_out(objects)
    if objects:
        name = next(iter(objects))
        raise UserError(f'"{name}" is not something a run can be given again{did_you_mean(name, Values._fields)}')
    values.check(config.values, str(path))
    return values


def _load(experiment: Experiment, found: Checkpoint, path: str | Path) -> None:
    try:
        if float(found.tensors["step"]) != found.step:
            raise ValueError("its tensors are of another step than its header says")
        experiment.trainer.load_state_dict(found.tensors)
    except (RuntimeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise UserError(
            f"the checkpoint of step {found.step} in {path} is of another network or world than its config.json says: "
            "put back the settings it was trained with"
        ) from error


def _rebuilt(task: Task | Consent | str | None, settings: Any, path: str | Path) -> Task:
    """The run's task: as it was given, or made again from its settings, where that needs code only as far as agreed to."""
    if isinstance(task, Task):
        return task
    need_kind("task", task, (Consent, str, type(None)), "a Task, or the name of the run's task, as my_module:my_task")
    consent = task if isinstance(task, Consent) else Consent(task)
    if isinstance(settings, UserTask) and settings.name != IN_PYTHON:
        settings = trust.agreed(settings, consent, Path(path), trust.remembered(Path(path)))
    elif consent.name is not None and consent.name != settings.name:
        raise UserError(f"{path} is a run of the task {settings.name}, not of {consent.name!r}: leave --task out")
    return make_task(settings)


def _made_from(task: Any, settings: Any) -> Any:
    """The settings from which an oracle's worker makes the task again; None where it was given as an object.

    Whether a file's code may run has been settled by `_rebuilt`.
    """
    if isinstance(task, Task) or settings.name == IN_PYTHON:
        return None
    return settings.agreed(trusted=True) if isinstance(settings, UserTask) else settings


def evaluate_run(path: str | Path, device: str = "auto", task: Task | Consent | str | None = None) -> dict[str, Any]:
    """The figures of a trained run, from its averaged weights."""
    return open_run(path, task, device).measure(final=True)


def saved_figures(path: str | Path) -> dict[str, Any]:
    """The final figures as the run wrote them: nothing is computed, and none of its code is needed."""
    need_path("path", path)
    run = Run.open(path)
    found = run.read("summary.json")
    if not found:
        raise UserError(f"{path} holds no final figures: the run has not ended, go on with `stochflow resume {path}`")
    return found


def floor_of(config: Config) -> dict[str, Any]:
    """The best achievable law of a task, beside the naive one; of each condition where it has conditions."""
    need_kind("config", config, Config, "a Config, as configure('grid') makes one")
    yardstick = Yardstick(make_task(config.task), torch.device("cpu"))
    if yardstick.conditions:
        return {"conditions": floor_rows(yardstick.task, yardstick.conditions)}
    if not yardstick.exact:
        raise UserError(
            "the floor needs a space that can be listed, and this one is too large or its oracle too slow: make it smaller"
        )
    found = (
        dict.fromkeys(("limit_tv", "excess_tv", "log_z_error", "modes", "expected_modes")) | yardstick.floor.to_json()
    )
    best = yardstick.floor.laws.get("best")
    if best is not None:  # the best law is a law as any other: no excess over itself, and modes to expect of it
        found["excess_tv"] = 0.0
        if yardstick.modes is not None:
            found |= {"expected_modes": float(expected_modes(best, yardstick.modes, SAMPLES)), "samples": SAMPLES}
    return found


def default_folder(config: Config) -> Path:
    """runs/<task>-<objective>-<time>; a second run within the same second gets a number."""
    name = config.task.name.replace(":", ".")
    stem = f"{name}-{config.train.objective}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / stem, 2
    while path.exists():
        path, number = Path("runs") / f"{stem}-{number}", number + 1
    return path


# the oracle of a run ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _tracked(kind: str, run: Run, on_progress: OnProgress | None) -> Iterator[OnProgress | None]:
    """What hears of each logged line: the caller and, if one was asked for, a tracker."""
    if kind == "none":
        yield on_progress
        return
    with open_tracker(kind, run.path, run.config.to_dict()) as tracker:

        def tell(record: dict[str, Any], total: int) -> None:
            tracker(record)
            if on_progress is not None:
                on_progress(record, total)

        yield tell


def _write_environment(run: Run, experiment: Experiment) -> None:
    chosen = experiment.trainer.engines
    log.info(chosen.sentence())
    more = {"listed": experiment.yardstick.exact} | chosen.describe()
    if isinstance(experiment.task.oracle, Cached):
        more["met"] = len(experiment.task.oracle.met)  # at the door
    task = run.config.task
    if isinstance(task, UserTask) and task.name != IN_PYTHON:
        more["task"] = trust.source_of(task.name)  # so that a change of the code can be noticed
    run.write("environment.json", environment(experiment.device.type) | more)


def _same_yardstick(run: Run, experiment: Experiment) -> None:
    """Whether a slow oracle can be asked about all of the space was timed at the start; remembered answers would look quick now."""
    listed = (run.read("environment.json") or {}).get("listed")
    if listed is not None and isinstance(experiment.task.oracle, TextOracle):
        experiment.yardstick.exact = listed
