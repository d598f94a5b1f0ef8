"""`stochflow forecast`, and what `report`, `sample`, `resume` and `compare` do with its folders."""

from __future__ import annotations

import dataclasses
import inspect
import math
import time
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import tyro

from stochflow.cli.parsing import explained, parsed
from stochflow.cli.terminal import Progress
from stochflow.errors import UserError
from stochflow.files.reading import shown
from stochflow.forecast.config import Forecast


def is_forecast(folder: Path) -> bool:
    """Whether a folder is one of `stochflow forecast`; told without torch."""
    return (folder / "model.json").is_file() and (folder / "forecasts.csv").is_file()


def tell(show: Progress, look: Any, out: Path) -> None:
    """A forecast trains several times over: each time is named, and has the progress line of a run."""
    if show.quiet:
        return
    if show.path is None:
        show.start(out, 0, look.steps)
    if look.step == 0:
        show.begun, show.spoken = time.monotonic(), False
        print(look.stage, flush=True) if show.bar is None else show.bar.console.print(
            look.stage, markup=False, highlight=False
        )
        return
    if show.bar is not None:
        show.bar.update(show.row, total=look.steps)
    if look.loss is not None:
        show.update({"step": look.step, "loss": look.loss}, look.steps)


def run_forecast(words: list[str]) -> int:
    fields = [
        (
            "data",
            Annotated[
                str, tyro.conf.Positional, explained("CSV of unique_id, ds, y, or a shipped series (co2 by default)")
            ],
            field(default=""),
        ),
        ("settings", Forecast, field(default=Forecast())),
        ("out", Annotated[Path, explained("folder to write; it must not exist yet")], field(default=Path("forecast"))),
        (
            "model",
            Annotated[
                str,
                explained(
                    "folder of an earlier forecast: use its forecaster on DATA, or on its own past, without training"
                ),
            ],
            field(default=""),
        ),
        (
            "score",
            Annotated[str, explained("module:function from futures [n, horizon] to n numbers: tilt futures by it")],
            field(default=""),
        ),
        (
            "at_least",
            Annotated[
                float | None,
                explained(
                    "instead of BETA: the probability that the score reaches this, and the futures in which it does"
                ),
            ],
            field(default=None),
        ),
        ("series", Annotated[str, explained("the series that is tilted, where there are several")], field(default="")),
        ("quiet", Annotated[bool, explained("say only the final figures")], field(default=False)),
    ]
    made = dataclasses.make_dataclass("forecast", fields, frozen=True)
    made.__doc__ = inspect.getdoc(Forecast)
    asked: Any = parsed(made, words, prog="stochflow forecast", config=(tyro.conf.OmitArgPrefixes,))
    if not asked.score:  # a tilt may go either way
        asked.settings.check()
    if asked.at_least is not None and not asked.score:
        raise UserError(
            "--at-least says which level of a score is asked for: name the score with --score module:function"
        )
    if asked.settings.beta and not asked.score and asked.settings.mode == "nll":
        raise UserError("--beta says how strongly futures are tilted by a score: name it with --score module:function")
    if not math.isfinite(asked.settings.beta):
        raise UserError(f"--beta is {asked.settings.beta}, but it must be a finite number")
    if asked.settings.beta and asked.at_least is not None:
        raise UserError(
            "--at-least asks for the futures that reach a level, and --beta for a tilt: give one of the two"
        )
    score = _score(asked.score) if asked.score else None
    from stochflow.forecast.command import Tilt, forecast_command

    tilt, settings = None, asked.settings
    if score is not None:  # `--beta` is then the tilt's, and no sharpness of an error reward
        tilt = Tilt(score, asked.score, settings.beta or 1.0, asked.at_least, asked.series or None)
        settings = dataclasses.replace(settings, beta=0.0).check()
    show = Progress(asked.quiet)
    with show:
        done = forecast_command(
            settings, asked.data or None, asked.out, lambda look: tell(show, look, asked.out), asked.model or None, tilt
        )
    print(done.summary if asked.quiet else "\n" + done.summary)
    print("\nwritten:")
    for file in done.files:
        print(f"  {shown(file)}")
    return 0


def _score(word: str) -> Any:
    """The function that the user names on this command line."""
    from stochflow.runs.imports import import_user

    module, _, name = word.partition(":")
    if not (module and name):
        raise UserError(f"--score {word!r} names no function: write module:function")
    try:
        found = getattr(import_user(module), name, None)
    except Exception as problem:  # whatever the user's module does
        words = str(problem) if isinstance(problem, ImportError) else f"{type(problem).__name__}: {problem}"
        raise UserError(
            f"--score {word!r} cannot be imported ({words}): check the module's name, folder and code"
        ) from None
    if not callable(found):
        raise UserError(f"--score {word!r}: the module {module} has no function {name!r}")

    def score(paths: Any) -> Any:
        try:
            return found(paths)
        except UserError:
            raise
        except Exception as problem:
            raise UserError(
                f"--score {word!r} fails on futures of shape {paths.shape} ({type(problem).__name__}: {problem}): mend the function"
            ) from problem

    return score


# folders of a forecast --------------------------------------------------------------------------------------------------


def report_forecast(folder: Path, out: Path | None) -> int:
    from stochflow.forecast.page import page
    from stochflow.runs.atomic import write_text

    print(write_text(out or folder / "report.html", page(folder, folder.resolve().name)))
    return 0


def sample_forecast(folder: Path, n: int, seed: int, out: Path | None) -> int:
    from stochflow.forecast.command import sample_folder

    print(sample_folder(folder, n, seed, out), end="")
    return 0


def resume_forecast(folder: Path, steps: int, quiet: bool) -> int:
    from stochflow.forecast.command import resume_folder

    show = Progress(quiet)
    with show:
        print(resume_folder(folder, steps, lambda look: tell(show, look, folder)))
    return 0


def compare_forecasts(folders: list[Path]) -> int:
    from stochflow.forecast.command import compare_folders

    print(compare_folders(folders), end="")
    return 0
