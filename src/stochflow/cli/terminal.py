"""What the terminal shows: one progress line, the final table, one sentence for a mistake. Only `cli` uses it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from stochflow.errors import UserError
from stochflow.files.reading import one_line, read_json, shown
from stochflow.law.verdict import number, remarks, verdict
from stochflow.look.labels import LABELS, TERMINAL


class Silence:
    """How long nothing has been said."""

    def __init__(self) -> None:
        self.since = time.monotonic()

    def broken(self) -> None:
        self.since = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self.since


silence = Silence()


def complain(sentence: str) -> None:
    """One line on stderr, without control characters."""
    silence.broken()
    print(f"stochflow: {one_line(sentence)}", file=sys.stderr)


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        silence.broken()
        return f"stochflow: {one_line(record.getMessage())}"


def plain_messages() -> None:
    """What is logged becomes one line each, as complaints are; warnings of other packages are not for the user."""
    logging.basicConfig(level=logging.WARNING)
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setFormatter(_OneLine())
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def details() -> Path | None:
    """The traceback of the error in hand, in a file of its own; None where none can be written."""
    try:
        number, name = tempfile.mkstemp(prefix="stochflow-error-", suffix=".txt")
        with os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(traceback.format_exc())
    except OSError:
        return None
    return Path(name)


class Progress:
    """One live line on a terminal, a plain line at every evaluation otherwise, nothing when quiet."""

    def __init__(self, quiet: bool):
        self.quiet = quiet
        self.path: Path | None = None
        self.told: set[str] = set()  # diagnostics that have been told
        self.bar: Any = None  # rich's, on a terminal
        self.row: Any = None
        self.tv: float | None = None  # the last one measured
        self.begun, self.first = time.monotonic(), 0
        self.spoken = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def start(self, path: Path, step: int, steps: int) -> None:
        self.path = path
        if self.quiet:
            return
        print(f"run folder: {shown(path)}", flush=True)
        with contextlib.suppress(UserError):
            config, found = (read_json(path / name) or {} for name in ("config.json", "environment.json"))
            for line in (config.get("chosen"), found.get("choice")):
                if line and step == 0:
                    print(one_line(str(line)), flush=True)
        self.begun, self.first = time.monotonic(), step
        if sys.stdout.isatty():
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            self.bar = Bar(BarColumn(bar_width=24), TextColumn("{task.description}"))
            self.row = self.bar.add_task("starting", total=steps, completed=step)
            self.bar.start()

    def update(self, record: dict[str, Any], steps: int) -> None:
        if self.quiet:
            return
        step = record["step"]
        fresh = record.get("tv") is not None
        self.tv = record["tv"] if fresh else self.tv
        parts = [f"step {step}/{steps}", f"loss {number(record.get('loss'))}"]
        parts += [] if self.tv is None else [f"TV {number(self.tv)}"]
        if self.spoken:
            rate = (step - self.first) / max(time.monotonic() - self.begun, 1e-9)
            left = (steps - step) / max(rate, 1e-9)
            parts += [
                f"{rate:.0f} it/s" if rate >= 10 else f"{rate:.2g} it/s",
                f"{int(left) // 60}:{int(left) % 60:02d} left",
            ]
        else:  # among the first steps are those that compile and record: they say nothing of the others
            self.begun, self.first = time.monotonic(), step
        line = "  ".join(parts)
        if self.bar is not None:
            self.bar.update(self.row, completed=step, description=line)
            silence.broken()
        elif fresh or "elbo" in record or step == steps or not self.spoken:
            print(line, flush=True)  # the first line at once: a minute of silence looks like a hang
            silence.broken()
        self.spoken = True
        if fresh or "elbo" in record:
            self._health()

    def _health(self) -> None:
        """Tell each diagnostic once, at the look where it first fires."""
        from stochflow.look.report import RunFiles

        assert self.path is not None
        for finding in RunFiles.read(self.path).health():
            if finding.name not in self.told:
                self.told.add(finding.name)
                print(finding, flush=True) if self.bar is None else self.bar.console.print(str(finding), markup=False)


def table(found: dict[str, Any]) -> None:
    rows = []
    for key in TERMINAL:
        if found.get(key) is None:
            continue
        text = LABELS[key].words
        value = one_line(number(found[key]))
        if found.get(f"{key}_low") is not None:
            value += f"  [{number(found[f'{key}_low'])}, {number(found[f'{key}_high'])}]"
        note = {
            "floor_tv": found.get("floor_kind"),
            "modes": f"of {found.get('modes_all')} in {found.get('samples')} samples",
        }.get(key)
        rows.append(f"  {text:<48} {value}{f'  ({one_line(str(note))})' if note else ''}")
    if found.get("floor_tv") is None and found.get("floor_reason"):
        rows.append(f"  {LABELS['floor_tv'].words:<48} -  ({one_line(str(found['floor_reason']))})")
    print("\n".join(rows))


def floor_table(found: dict[str, Any]) -> None:
    columns = ("tv", "l1", "kl_target_model", "kl_model_target")
    for row in found.get("conditions", []):
        print(f"condition {shown(row['condition'])}")
        floor_table(row)
    if "conditions" in found:
        return
    print(f"  {'':<34}" + "".join(f"{c:>17}" for c in columns))
    kind = f"best achievable ({found['floor_kind']})" if found.get("floor_kind") else "best achievable"
    laws = [
        (kind, found),
        ("reverse-KL optimum", found.get("reverse_kl")),
        ("ignoring the noise (naive)", found.get("naive")),
    ]
    for name, row in laws:
        if row is not None:
            print(f"  {name:<34}" + "".join(f"{number(row.get(c)):>17}" for c in columns))
    if found.get("floor_reason"):
        print(f"\nThe best achievable law is not known here: {found['floor_reason']}.")


def closing(summary: dict[str, Any], files: list[Path], quiet: bool, path: Path) -> None:
    if quiet:
        keys = ("tv", "floor_tv", "excess_tv", "elbo")
        print(
            "  ".join(
                [f"{k} {number(summary[k])}" for k in keys if summary.get(k) is not None] + [f"run {shown(path)}"]
            )
        )
        return
    print()
    table(summary)
    print("\n" + verdict(summary))
    for row in summary.get("conditions") or []:
        print(f"condition {shown(row['condition'])}: total variation {number(row['tv'])} from its target")
    for words in remarks(summary):
        print(one_line(words))
    from stochflow.look.report import write_report

    print("\nwritten:")
    for file in [*files, write_report([path])]:
        print(f"  {shown(file)}")
