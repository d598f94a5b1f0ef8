"""The live view: the report's own parts, on loopback alone, fresh when the folder changes; and what is sent on to trackers."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import sqlite3
import subprocess
import sys
import threading
import types

import pytest

from stochflow.errors import UserError
from stochflow.look.watch import Watcher, watch_command
from stochflow.runs.tracking import open_tracker, scalars


@pytest.fixture
def serve():
    """A function that starts a watcher of a folder; all are stopped at the end."""
    started = []

    def start(path):
        server = Watcher(path, 0, every=3)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def ask(server, path="/", host=None):
    link = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    link.request("GET", path, headers={"Host": host} if host else {})
    answer = link.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_is_the_report_and_follows_the_run(make_run, serve):
    lines = make_run.rows()
    path = make_run(done=False, lines=lines[:3])
    server = serve(path)
    assert server.server_address[0] == "127.0.0.1"
    status, text = ask(server)
    assert status == 200
    assert "step 300 of" in text.replace("\u2009", "")
    assert 'aria-label="Loss over training steps"' in text
    assert "every 3 seconds" in text
    _, before = ask(server, "/version")
    assert json.dumps(before) in text.replace("&#34;", '"') or before in text
    with (path / "metrics.jsonl").open("a") as f:
        f.write(json.dumps(lines[3]) + "\n")
    assert ask(server, "/version")[1] != before
    assert "step 400 of" in ask(server)[1]


def test_a_page_is_rendered_once_for_one_state_of_the_folder(make_run, serve, monkeypatch):
    server = serve(make_run(done=False))
    count = []
    real = Watcher.version
    first = server.html()
    monkeypatch.setattr("stochflow.look.watch.page", lambda *a, **k: count.append(1))
    assert server.html() is first
    assert count == []
    assert real(server) == server.version()


def test_only_this_machine_is_answered(make_run, serve):
    """A foreign name that resolves to loopback is how another site would try to read it."""
    server = serve(make_run(done=False))
    assert ask(server, host="evil.example")[0] == 403
    assert ask(server, host="evil.example:80")[0] == 403
    assert ask(server, "/version", host=f"localhost:{server.server_address[1]}")[0] == 200
    for path in ("/config.json", "/../../etc/passwd", "/checkpoints/"):
        assert ask(server, path)[0] == 404


def test_a_folder_that_breaks_is_told_and_not_crashed_on(make_run, serve):
    path = make_run(done=False)
    server = serve(path)
    (path / "config.json").write_text("{")
    status, text = ask(server)
    assert status == 200
    assert "cannot be read just now" in text
    assert "is not JSON" in text


def test_mistakes_are_told_before_a_port_is_taken(make_run, tmp_path, serve):
    with pytest.raises(UserError, match="does not exist"):
        Watcher(tmp_path / "nowhere")
    path = make_run(done=False)
    taken = serve(path).server_address[1]
    with pytest.raises(UserError, match=f"port {taken}.*--port"):
        Watcher(path, taken)
    with pytest.raises(UserError, match="--every"):
        watch_command(path, 0, every=0)


# trackers -------------------------------------------------------------------------------------------------------


class FakeRun:
    def __init__(self):
        self.sent, self.finished = [], False

    def log(self, values, step):
        self.sent.append((step, values))

    def finish(self):
        self.finished = True


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_lines_are_sent_on(kind, monkeypatch, tmp_path):
    run, asked = FakeRun(), {}
    module = types.ModuleType(kind)
    module.init = lambda **k: asked.update(k) or run
    monkeypatch.setitem(sys.modules, kind, module)
    with open_tracker(kind, tmp_path / "mine", {"task": {"name": "grid"}, "train": {"lr": 0.1}}) as track:
        track({"step": 100, "loss": 0.5, "tv": None, "finite": 1.0, "seeds": {"tv": [0.1, None]}})
    assert run.sent == [(100, {"loss": 0.5, "finite": 1.0, "tv/seed_0": 0.1})]
    assert run.finished
    assert asked["name"] == "mine"
    assert asked["config"] == {"task.name": "grid", "train.lr": 0.1}


def test_tensorboard_gets_scalars(monkeypatch, tmp_path):
    got = []

    class Writer:
        def __init__(self, where):
            self.where = where

        def add_scalar(self, name, value, step):
            got.append((name, value, step))

        def flush(self): ...

        def close(self):
            got.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with open_tracker("tensorboard", tmp_path, {}) as track:
        track({"step": 7, "loss": 1.5})
    assert got == [("loss", 1.5, 7), "closed"]


def test_a_tracker_that_fails_never_costs_the_run(monkeypatch, tmp_path, caplog):
    run = FakeRun()
    run.log = lambda *a, **k: (_ for _ in ()).throw(ConnectionError("gone"))
    module = types.ModuleType("wandb")
    module.init = lambda **k: run
    monkeypatch.setitem(sys.modules, "wandb", module)
    with caplog.at_level(logging.WARNING, "stochflow"), open_tracker("wandb", tmp_path, {}) as track:
        track({"step": 1, "loss": 1.0})
        track({"step": 2, "loss": 1.0})
    assert len(caplog.records) == 1
    assert "metrics.jsonl has everything" in caplog.text


def test_a_tracker_that_is_not_there_is_named_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"stochflow\[track\]"):
        open_tracker("wandb", tmp_path, {})
    with pytest.raises(UserError, match="did you mean"):
        open_tracker("wandv", tmp_path, {})
    assert scalars({"step": 1, "floor_kind": "min-TV", "ok": True, "x": float("inf")}) == {}


# for real, where they are installed: `pip install 'stochflow[track]'`


FEW = "--side 4 --steps 30 --batch 8 --hidden 8 --layers 1 --log-every 10 --eval-every 10 --seeds 2 --device cpu --quiet".split()


def tracked(kind, folder, **environment):
    """A run that is sent to this tracker, in a process of its own; what it logged itself, and what was said."""
    run = folder / "mine"
    words = [sys.executable, "-m", "stochflow", "train", "grid", *FEW, "--track", kind, "--out", str(run)]
    done = subprocess.run(words, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "the run goes on without it" not in said, said
    assert "Reserved" not in said
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [10, 20, 30]
    return run, rows


@pytest.mark.extra
def test_tensorboard_reads_back_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard", reason="the tracker itself: pip install 'stochflow[track]'")
    run, rows = tracked("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    seen.Reload()
    for key, of in (
        ("tv", lambda r: r["tv"]),
        ("loss", lambda r: r["loss"]),
        ("tv/seed_1", lambda r: r["seeds"]["tv"][1]),
    ):
        assert [(e.step, e.value) for e in seen.Scalars(key)] == [
            (r["step"], pytest.approx(of(r), rel=1e-6)) for r in rows
        ]


@pytest.mark.extra
def test_trackio_reads_back_what_was_logged(tmp_path):
    pytest.importorskip("trackio", reason="the tracker itself: pip install 'stochflow[track]'")
    _, rows = tracked("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "store"))
    (store,) = (tmp_path / "store").glob("*.db")
    with contextlib.closing(sqlite3.connect(store)) as base:
        lines = base.execute("select step, metrics from metrics where run_name = 'mine' order by step").fetchall()
    assert [step for step, _ in lines] == [10, 20, 30]
    for (_, text), row in zip(lines, rows, strict=True):
        assert json.loads(text)["tv/seed_1"] == pytest.approx(row["seeds"]["tv"][1])
        assert json.loads(text)["seconds"] == pytest.approx(row["time"])


@pytest.mark.extra
def test_wandb_offline_holds_what_was_logged(tmp_path):
    pytest.importorskip("wandb", reason="the tracker itself: pip install 'stochflow[track]'")
    run, rows = tracked("wandb", tmp_path, WANDB_MODE="offline")
    (store,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    held = store.read_bytes()  # a log of records whose values are JSON texts
    for row in rows:
        assert json.dumps(row["loss"]).encode()[:12] in held
    assert b"log_z_estimate/seed_1" in held
