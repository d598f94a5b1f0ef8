"""A run as one page of HTML that travels by itself: no network, no script, light and dark, on a phone and on paper.

It reads the run folder alone, so a run can be reported on while it goes on, after it broke, and on another machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from stochflow.errors import UserError
from stochflow.files.reading import shown
from stochflow.look.report.files import RunFiles
from stochflow.look.report.pages import page
from stochflow.runs.atomic import write_text

__all__ = ["RunFiles", "page", "report_command", "write_report"]


def write_report(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Path:
    """One HTML file about these runs: `report.html` inside the folder of a single one, in the current folder for several."""
    if not runs:
        raise UserError("a report is about at least one run, but none was given: stochflow report RUN ...")
    files = [RunFiles.read(path) for path in runs]
    where = Path(out) if out is not None else (files[0].path if len(files) == 1 else Path()) / "report.html"
    return write_text(where, page(files))


def report_command(runs: Sequence[Path], out: Path | None = None) -> int:
    """`stochflow report RUN...`: write the page and say where it is."""
    print(shown(write_report(runs, out)))
    return 0
