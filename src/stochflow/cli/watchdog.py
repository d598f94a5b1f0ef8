"""While a command computes: a line where it has been silent for long, and an end within a second of Ctrl-C.

A signal is handled between two steps of the interpreter, so a product of large matrices or a solver would have to end first.
What a command leaves is whole at any moment, so the process may end in the middle of one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from types import TracebackType
from typing import NoReturn

from stochflow.cli.terminal import complain, silence
from stochflow.files.progress import stages

FIRST, LATER = 15.0, 30.0  # seconds without a word, after which there is one
SECOND = 1.0  # after Ctrl-C
TICK = 0.5


class Watchdog:
    """Around a command; `quiet` leaves the lines out."""

    def __init__(self, quiet: bool = False):
        self.quiet, self.over = quiet, threading.Event()
        self.begun, self.patient, self.told = time.monotonic(), FIRST, 0
        self.thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if threading.current_thread() is not threading.main_thread():
            return self  # signals are not ours there
        silence.broken()
        self.read, self.write = os.pipe()
        os.set_blocking(self.write, False)
        self.before = signal.set_wakeup_fd(self.write, warn_on_full_buffer=False)
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.thread is None:
            return
        self.over.set()
        signal.set_wakeup_fd(self.before)
        with contextlib.suppress(OSError):
            os.write(self.write, b"\0")  # so that it need not be waited for
        self.thread.join()
        os.close(self.read)
        os.close(self.write)

    def _watch(self) -> None:
        while not self.over.is_set():
            ready, _, _ = select.select([self.read], [], [], TICK)
            if ready and signal.SIGINT in os.read(self.read, 64):
                self.told += 1
                self._end_if_stuck()
            elif not self.quiet and silence.seconds() >= self.patient:
                self._say()

    def _say(self) -> None:
        at = stages()
        complain(f"still at it after {time.monotonic() - self.begun:.0f} s{f': {at}' if at else ''}")
        self.patient = LATER

    def _end_if_stuck(self) -> None:
        """Where the interpreter has not come to its next step a second later, it will not hear of the signal soon."""
        ended = self.over.wait(SECOND / 2)
        first = _place()
        if ended or self.over.wait(SECOND / 2) or first is None or _place() != first:
            return
        mild = signal.getsignal(signal.SIGINT) is not signal.default_int_handler  # training ends its iteration first
        if mild and self.told == 1:
            complain("stopping as soon as this step is done; a second Ctrl-C stops at once")
            return
        complain("interrupted at once; what was written before is whole")
        os._exit(130)


def end_now(code: int) -> NoReturn:
    """End the process and its children, without giving back its memory first."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(code)


def _place() -> tuple[int, int] | None:
    """Where the main thread is: a frame, and an instruction in it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)
