"""The `stochflow` command. Arguments are parsed before torch is imported; only this module prints.

Exit codes: 0 done, 1 our fault, 2 the user's (one sentence on stderr), 130 interrupted with the run folder whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from stochflow import __version__
from stochflow.cli.complaints import parsed
from stochflow.cli.forecast import compare_forecasts, is_forecast, report_forecast, resume_forecast, sample_forecast
from stochflow.cli.parsing import as_config, explained, not_asked_for, of_user, one_line, parse_task, task_and_flags
from stochflow.cli.terminal import Progress, closing, complain, details, floor_table, plain_messages, table
from stochflow.cli.watchdog import Watchdog, end_now
from stochflow.errors import UserError, did_you_mean
from stochflow.files.progress import counted
from stochflow.files.reading import shown
from stochflow.law.verdict import verdict
from stochflow.runs.config import OBJECTIVES, TASKS, Config, Train, UserTask
from stochflow.runs.ranges import check_numbers

COMMANDS = {
    "train TASK": "train a sampler and measure it against the best that is possible",
    "resume RUN": "go on with a run, exactly as if it had never stopped",
    "sample RUN": "draw objects from a trained run, as CSV, FASTA or JSON",
    "eval RUN": "measure a trained run again",
    "floor TASK": "how close to the target any sampler can come under the task's noise",
    "report RUN...": "one self-contained HTML page about what was learned",
    "compare RUN...": "runs side by side, paired by seed, with a verdict in plain words",
    "sweep TASK": "many settings of a task, each in a run folder, compared best first",
    "watch RUN": "follow a run in the browser while it trains",
    "forecast": "forecast series from a CSV file by sampling futures",
    "design ...": "campaigns: from a CSV of measured sequences to the next plate, round after round",
    "tasks": "list the tasks and the objectives",
    "doctor [TASK]": "what this machine offers, and which engine would run a task",
}


@dataclass(frozen=True)
class Resume:
    """Go on with a run, exactly as if it had never stopped."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="the run folder")]
    steps: int = 0
    """total number of training iterations; 0 takes the total that was asked for before"""
    quiet: bool = False
    """say only the final figures"""
    track: Literal["none", "wandb", "trackio", "tensorboard"] = "none"
    """send the log to a tracker too"""
    task: str = ""
    """a task of one's own is code: name it again, as my_module:my_function, to have it imported and called"""
    trust: bool = False
    """import and call whatever task the folder names, after it has been shown"""


@dataclass(frozen=True)
class Sample:
    """Draw objects from a trained run, each with its score, log-reward, mode and the log-probability of the way it was built."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="the run folder")]
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 100
    """how many"""
    format: Literal["auto", "csv", "fasta", "json"] = "auto"
    """auto goes by the name of --out, and is CSV without one"""
    out: Path | None = None
    """file to write; without it they are printed"""
    seed: int = 0
    """the same seed draws the same objects"""
    unique: bool = False
    """leave out objects drawn before"""
    min_distance: int = 0
    """keep only objects at least this far from every better one that is kept"""
    top: int = 0
    """keep only this many, the best by score; 0: all"""
    simulate: int = 0
    """make each of them this often through the task's noise, and sort by the mean score of what comes out"""
    condition: str = ""
    """draw under one condition alone: its values with commas between, such as 0.5,12, or its number, or real values between those that were learned; learned values are tried first, then a whole number as the number of a condition, then values between (a whole one is written 1.0)"""
    task: str = ""
    """a task of one's own is code: name it again, as my_module:my_function, to have it imported and called"""
    trust: bool = False
    """import and call whatever task the folder names, after it has been shown"""


@dataclass(frozen=True)
class Eval:
    """Measure a trained run again, with its averaged weights."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="the run folder")]
    json: bool = False
    """print one JSON object"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one"""
    saved: bool = False
    """show the figures that the run saved at its end: nothing is computed, and no code of the run's is needed"""
    task: str = ""
    """a task of one's own is code: name it again, as my_module:my_function, to have it imported and called"""
    trust: bool = False
    """import and call whatever task the folder names, after it has been shown"""


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about one run or several."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(help="run folders")]
    out: Path | None = None
    """file to write; by default report.html in the folder of a single run, in the current one for several"""


@dataclass(frozen=True)
class Compare:
    """The same figures of several runs side by side, paired by seed."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(help="run folders")]
    out: Path = Path("compare.html")
    """HTML file to write"""
    json: bool = False
    """print one JSON object"""


@dataclass(frozen=True)
class Watch:
    """A page on this machine that follows a run while it trains."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="the run folder")]
    port: int = 8787
    """port on 127.0.0.1"""
    every: int = 5
    """seconds between two looks"""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    plain_messages()
    try:
        with Watchdog(quiet="--quiet" in words) if words[:1] != ["watch"] else contextlib.nullcontext():
            return _dispatch(words)
    except UserError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt as stop:
        complain(str(stop) or "interrupted")
        if argv is None:  # the command itself: millions of objects need not be given back one by one before it ends
            end_now(130)
        return 130
    except SystemExit as stop:  # tyro's help (0) and its own complaints (2)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        sys.stderr.close()
        return 0
    except Exception as error:
        place = getattr(error, "written_to", None)
        if _out_of_memory(error):
            saved = "" if place is None else f" (what was computed is saved in {place.parent})"
            complain(
                f"this does not fit into memory: take a smaller batch, fewer seeds, a narrower network or a smaller world{saved}"
            )
            return 1
        place = place or details()
        what = f"something went wrong inside ({type(error).__name__}: {error})"
        complain(f"{what}: please report it" + (f", with the details in {place}" if place else ""))
        return 1


def _out_of_memory(error: Exception) -> bool:
    """Whether Python, numpy or torch could not have what it asked for; on a CPU torch says so in words alone."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"stochflow {__version__}")
        return 0
    commands = {
        "train": _train,
        "resume": _resume,
        "sample": _sample,
        "eval": _eval,
        "floor": _floor,
        "report": _report,
        "compare": _compare,
        "watch": _watch,
        "forecast": _forecast,
        "tasks": _tasks,
        "doctor": _doctor,
        "design": _design,
        "sweep": _sweep,
    }
    if words[0] not in commands:
        raise UserError(
            f'there is no command "{words[0]}"{did_you_mean(words[0], commands)}: `stochflow --help` lists them'
        )
    return commands[words[0]](words[1:])


def _overview() -> str:
    rows = "\n".join(f"  {name:<15} {text}" for name, text in COMMANDS.items())
    return (
        "usage: stochflow COMMAND ...\n\nGenerative flow networks for stochastic worlds: learn to sample in proportion to reward.\n\n"
        f"{rows}\n\nTASK is one of {', '.join(TASKS)}, or a function of your own as my_module:my_function.\n"
        "RUN is the folder that `stochflow train` prints. `stochflow train TASK --help` shows every flag.\n\n"
        "  stochflow train grid --side 8\n  stochflow train tfbind8 --stick 0.25\n\n"
        "Exit codes: 0 done, 1 our fault, 2 what was asked cannot be done, 130 interrupted with the run folder whole.\n"
    )


# commands -------------------------------------------------------------------------------------------------------


def _consent(asked: Any) -> Any:
    """What was agreed to on this command line."""
    from stochflow.runs.trust import Consent

    return Consent(asked.task or None, asked.trust)


def _train(words: list[str]) -> int:
    saved, words = _saved_config(words)
    if saved is not None and (not words or words[0].startswith("-")):
        words = [saved.task.name, *words]
    name, flags = task_and_flags("train", words)
    if saved is not None and saved.task.name != name:
        raise UserError(f'the --config file is for the task "{saved.task.name}", not for "{name}"')
    defaults = None
    if saved is not None:
        defaults = of_user(name, saved.task.settings) if isinstance(saved.task, UserTask) else saved.task
    base = saved.train if saved else Train(**getattr(TASKS.get(name), "train", {}))
    extra = [
        (
            "out",
            Annotated[str, explained("the run folder; by default runs/<task>-<objective>-<time>")],
            field(default=""),
        ),
        ("quiet", Annotated[bool, explained("say only the final figures")], field(default=False)),
        (
            "track",
            Annotated[Literal["none", "wandb", "trackio", "tensorboard"], explained("send the log to a tracker too")],
            field(default="none"),
        ),
        (
            "config",
            Annotated[str, explained("a config.json to take every setting from; flags go before it")],
            field(default=""),
        ),
    ]
    asked = parse_task("train", name, flags, extra, base, defaults)
    config = as_config(name, asked.task, asked.train, "caller" if saved is None else "agreed")
    from stochflow.runs import experiment
    from stochflow.training.distributed import follows

    show = Progress(asked.quiet or follows())
    with show:
        done = experiment.train(
            config,
            out=asked.out or None,
            on_start=show.start,
            on_progress=show.update,
            track=asked.track,
            free=not_asked_for(flags) if saved is None else (),
        )
    if not follows():
        closing(done.summary, done.files, asked.quiet, done.path)
    return 0


def _saved_config(words: list[str]) -> tuple[Config | None, list[str]]:
    """The file behind --config, read before the flags because it sets their defaults, and the words without those that
    agree to run the code that it names."""
    path, rest, again, trusted = None, list[str](), "", False
    named = iter(words)
    for word in named:
        flag, equals, value = word.partition("=")
        if flag == "--config":
            value = value if equals else next(named, "")
            path = Path(value)
            rest += [flag, value]
        elif flag == "--task":
            again = value if equals else next(named, "")
        elif word == "--trust":
            trusted = True
        else:
            rest.append(word)
    if path is None:
        return None, words
    from stochflow.files.reading import read_json
    from stochflow.runs import trust

    saved = read_json(path, Config.from_dict, in_folder=False)
    if isinstance(saved.task, UserTask):
        first = rest[0] if rest and ":" in rest[0] else ""
        consent = trust.Consent(again or first or None, trusted)
        saved = dataclasses.replace(saved, task=trust.agreed(saved.task, consent, path, trust.remembered(path.parent)))
    return saved, rest


def _resume(words: list[str]) -> int:
    asked = parsed(Resume, words, prog="stochflow resume")
    if is_forecast(asked.run):
        return resume_forecast(asked.run, asked.steps or 0, asked.quiet)
    from stochflow.runs import experiment
    from stochflow.training.distributed import follows

    show = Progress(asked.quiet or follows())
    with show:
        done = experiment.resume(asked.run, asked.steps or None, show.update, show.start, _consent(asked), asked.track)
    if not follows():
        closing(done.summary, done.files, asked.quiet, done.path)
    return 0


def _sample(words: list[str]) -> int:
    asked = parsed(Sample, words, prog="stochflow sample")
    if asked.n < 1:
        raise UserError(f"-n is {asked.n}, but at least one object must be drawn")
    check_numbers({"n": asked.n, "seed": asked.seed}, {"n": (1, 10**9), "seed": (-(2**31), 2**63 - 1)})
    if is_forecast(asked.run):
        return sample_forecast(asked.run, asked.n, asked.seed, asked.out)
    kind: str = asked.format
    if kind == "auto":
        by_name = {".fasta": "fasta", ".fa": "fasta", ".json": "json"}
        kind = by_name.get(asked.out.suffix.lower() if asked.out else "", "csv")
    from stochflow.runs import experiment, export
    from stochflow.runs.cost import check_sample

    opened = experiment.open_run(asked.run, _consent(asked))
    from stochflow.look.shortlist import known_modes, shortlist, synthesised

    # a shortlist has modes of its own; what passes through is held against those of the run
    known = (
        None
        if asked.min_distance or asked.top
        else known_modes(export.read_rows(asked.run / "samples.csv"), opened.task)
    )
    if not asked.top and not asked.min_distance:  # a shortlist is chosen from a bounded number
        check_sample(opened.task.env, asked.n, asked.unique, asked.simulate > 0)
    drawn = counted(opened.sample(asked.n, asked.seed, asked.condition), "drawing objects", asked.n)
    rows = shortlist(drawn, asked.unique, asked.min_distance, asked.top, known)
    rows = iter(synthesised(opened.task, rows, asked.simulate, asked.seed)) if asked.simulate else rows
    if asked.out is None:
        export.write_rows(rows, kind, sys.stdout)
        return 0
    export.write_file(rows, kind, asked.out)
    print(shown(asked.out))
    return 0


def _eval(words: list[str]) -> int:
    asked = parsed(Eval, words, prog="stochflow eval")
    from stochflow.runs import experiment

    if asked.saved:
        found = experiment.saved_figures(asked.run)
    else:
        found = experiment.evaluate_run(asked.run, asked.device, _consent(asked))
    if asked.json:
        print(json.dumps(found))
    else:
        table(found)
        print(shown(verdict(found), 4000))
    return 0


def _floor(words: list[str]) -> int:
    name, flags = task_and_flags("floor", words)
    extra = [("json", Annotated[bool, explained("print one JSON object")], field(default=False))]
    asked = parse_task("floor", name, flags, extra, None)
    config = as_config(name, asked.task, None)
    from stochflow.runs import experiment

    found = experiment.floor_of(config)
    if asked.json:
        print(json.dumps(found))
    else:
        floor_table(found)
    return 0


def _report(words: list[str]) -> int:
    asked = parsed(Report, words, prog="stochflow report")
    if len(asked.runs) == 1 and is_forecast(asked.runs[0]):
        return report_forecast(asked.runs[0], asked.out)
    from stochflow.look.report import report_command

    return report_command(asked.runs, asked.out)


def _compare(words: list[str]) -> int:
    asked = parsed(Compare, words, prog="stochflow compare")
    if asked.runs and all(is_forecast(run) for run in asked.runs):
        return compare_forecasts(asked.runs)
    from stochflow.look.compare import compare_command

    return compare_command(asked.runs, asked.out, asked.json)


def _watch(words: list[str]) -> int:
    asked = parsed(Watch, words, prog="stochflow watch")
    from stochflow.look.watch import watch_command

    return watch_command(asked.run, asked.port, asked.every)


def _forecast(words: list[str]) -> int:
    from stochflow.cli.forecast import run_forecast

    return run_forecast(words)


def _design(words: list[str]) -> int:
    from stochflow.cli import design

    return design.run(words)


def _sweep(words: list[str]) -> int:
    from stochflow.cli.sweep import sweep

    return sweep(words)


def _doctor(words: list[str]) -> int:
    clear = "--clear-cache" in words
    words = [word for word in words if word != "--clear-cache"]
    if words and words[0] in ("-h", "--help"):
        print(
            "usage: stochflow doctor [TASK [flags]] [--clear-cache]\n\nVersions, devices, engines and where compiled code is kept; "
            "with a task and its flags, which engine would run each operation.\n--clear-cache deletes the compiled code."
        )
        return 0
    config = None
    if words:
        name, flags = task_and_flags("doctor", words)
        base = Train(**getattr(TASKS.get(name), "train", {}))
        asked = parse_task("doctor", name, flags, [], base)
        config = as_config(name, asked.task, asked.train)
    from stochflow.cli import doctor

    if clear:
        print(doctor.clear_cache())
    else:
        print(doctor.doctor(config))
    return 0


def _tasks(words: list[str]) -> int:
    if words and words[0] in ("-h", "--help"):
        print("usage: stochflow tasks\n\nList the tasks and the objectives.")
        return 0
    if words:
        raise UserError(f'`stochflow tasks` takes nothing, but was given "{words[0]}"')
    print("tasks (stochflow train TASK)")
    for name, task in TASKS.items():
        print(f"  {name:<12} {one_line(task)}")
    print("  MODULE:FUNC  a function of your own that returns a Task; its keyword parameters become flags")
    print("\nobjectives (--objective)")
    for name, text in OBJECTIVES.items():
        print(f"  {name:<{max(map(len, OBJECTIVES))}} {text}")
    return 0
