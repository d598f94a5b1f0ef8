"""The lines of `metrics.jsonl`, sent on to a tracker for those who live in one. Off by default; the run folder stays the truth.

`open_tracker` gives a function to call with each line, and one to close it; a tracker that fails later is dropped with one
warning, because a dashboard must never cost a run.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stochflow.errors import UserError, did_you_mean

TRACKERS = ("wandb", "trackio", "tensorboard")
log = logging.getLogger("stochflow")


class Tracker:
    """Sends records on. Made by `open_tracker`; use it as a context, or call `close` at the end."""

    def __init__(self, kind: str, send: Callable[[dict[str, float], int], None], finish: Callable[[], None]):
        self.kind, self._send, self._finish = kind, send, finish
        self.broken = False

    def __call__(self, record: dict[str, Any]) -> None:
        """Send the numbers of one line."""
        if not self.broken:
            self._guard(lambda: self._send(scalars(record), int(record["step"])))

    def close(self) -> None:
        if not self.broken:
            self._guard(self._finish)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _guard(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever a foreign service raises
            self.broken = True
            log.warning(
                "%s failed (%s: %s); the run goes on without it, and metrics.jsonl has everything",
                self.kind,
                type(error).__name__,
                error,
            )


def check_tracker(kind: str) -> None:
    """UserError where there is no tracker of this name."""
    if kind not in TRACKERS:
        raise UserError(
            f"there is no tracker {kind!r}{did_you_mean(str(kind), TRACKERS)}: take one of {', '.join(TRACKERS)}"
        )


def open_tracker(kind: str, folder: Path, config: dict[str, Any]) -> Tracker:
    """A tracker for a run folder; `config` is what `config.json` holds."""
    check_tracker(kind)
    if kind == "tensorboard":
        module = _import("torch.utils.tensorboard", kind)
        writer = module.SummaryWriter(str(folder / "tensorboard"))

        def send(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return Tracker(kind, send, writer.close)
    module = _import(kind, kind)
    more = {"dir": str(folder)} if kind == "wandb" else {}
    run = module.init(project="stochflow", name=folder.resolve().name, config=_flat(config), **more)
    return Tracker(kind, lambda values, step: run.log(values, step=step), run.finish)


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line; single seeds become `tv/seed_0`, ...; `time` is a word trackers keep for themselves, so it is `seconds`."""
    found = {"seconds" if k == "time" else k: float(v) for k, v in record.items() if _finite(v) and k != "step"}
    for key, each in (record.get("seeds") or {}).items():
        found |= {f"{key}/seed_{i}": float(v) for i, v in enumerate(each) if _finite(v)}
    return found


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    return {f"{part}.{k}": v for part in ("task", "train") for k, v in config.get(part, {}).items()}


def _import(name: str, kind: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"--track {kind} needs a package that is not installed ({error}): pip install 'stochflow[track]'"
        ) from error
