"""A page on this machine that follows a run while it goes on: the report itself, rendered again when the folder changes.

Bound to the loopback interface alone, and only requests that name it are answered, so that no other site can read it.
"""

from __future__ import annotations

import os
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from stochflow.errors import UserError
from stochflow.files.reading import shown
from stochflow.look.report import RunFiles, page
from stochflow.look.report.pages import render

LOOPBACK = "127.0.0.1"
# the page brings all that it needs, and asks its own server alone
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
WATCHED = ("config.json", "metrics.jsonl", "summary.json", "samples.csv", "law.npz")
DAY = 86_400  # seconds: browsers take a longer wait for none


class Watcher(ThreadingHTTPServer):
    """Serves the report of one run: `/` the page, `/version` a word that changes when the page would."""

    daemon_threads = True

    def __init__(self, run: str | os.PathLike[str], port: int = 0, every: int = 5):
        self.run, self.every = Path(run), every
        self._lock = threading.Lock()  # one rendering at a time; the others wait for it and share it
        self._kept: tuple[str, str] | None = None
        RunFiles.read(self.run)  # what is no run is refused before a port is taken
        try:
            super().__init__((LOOPBACK, port), _Answer)
        except OSError as error:
            raise UserError(
                f"port {port} of this machine cannot be used ({error.strerror}): choose another --port, or 0 for any"
            ) from error

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def version(self) -> str:
        marks = []
        for name in WATCHED:
            try:
                found = (self.run / name).stat()
                marks.append(f"{found.st_mtime_ns:x}.{found.st_size:x}")
            except OSError:
                marks.append("-")
        return "/".join(marks)

    def html(self) -> str:
        """The page as the folder is now; a folder caught in the middle of a change is told, not crashed on."""
        with self._lock:
            version = self.version()
            if self._kept is None or self._kept[0] != version:
                try:
                    text = page([RunFiles.read(self.run)], live=self.every, version=version)
                except (UserError, OSError) as error:
                    return render("trouble", message=str(error), live=self.every)
                self._kept = (version, text)
            return self._kept[1]


class _Answer(BaseHTTPRequestHandler):
    server: Watcher

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._send(self.server.html(), "text/html; charset=utf-8")
        elif self.path == "/version":
            self._send(self.server.version(), "text/plain; charset=utf-8")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, text: str, kind: str) -> None:
        body = text.encode("utf-8", "backslashreplace")
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the terminal shows the address and nothing else."""


def watch_command(run: Path, port: int = 8787, every: int = 5) -> int:
    """`stochflow watch RUN`: serve until interrupted."""
    if not 0 <= port < 65536:
        raise UserError(f"--port is {port}, but ports are numbered 0 (any) to 65535")
    if not 1 <= every <= DAY:
        raise UserError(f"--every is {shown(every, 40)}, but it must be a number of seconds from 1 to {DAY}")
    with Watcher(run, port, every) as server:
        print(f"watching {shown(run)} at {server.url} (Ctrl-C stops watching, not the run)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
