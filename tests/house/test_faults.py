"""A run that meets a fault stops with one clear sentence, and resumed it ends as if nothing had happened: every tensor, line and design.

The faults: an oracle that raises, answers NaN or hangs; a disk that is full at any write; a folder that cannot be written; a
checkpoint that is harmed or hostile. (Killed processes are in test_survival.py, two writers of one folder in test_runs.py.)
"""

from __future__ import annotations

import errno
import json
import math
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import types

import pytest
import torch

from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.law import picture
from stochflow.runs import experiment, session
from stochflow.runs.folder import Run, load_checkpoint
from stochflow.runs.tasks import strings_task
from stochflow.scores import oracles
from stochflow.scores.oracles import Cached, Host
from stochflow.types import Task
from stochflow.worlds.channels import Slip

SMALL = """--batch 64 --hidden 8 --layers 1 --steps 12 --log-every 2 --eval-every 4 --save-every 6 --replay 0.5 --replay-size 128
    --dynamics-off-pol --dynamics-sample-size 4 --device cpu --quiet --search none --no-replay-rank --ask-every 1
    --net mlp --objective db""".split()


class Service:
    """An oracle that costs something: it takes down what it was asked, and fails from batch number `at` on until it is mended."""

    def __init__(self):
        self.asked: list[str] = []
        self.batches, self.fault, self.at = 0, "", 0
        self.mended = threading.Event()

    def __call__(self, texts):
        self.batches += 1
        wrong = self.fault and self.batches >= self.at
        if wrong and self.fault == "raise":
            raise ConnectionError("the server went away")
        if wrong and self.fault == "hang":
            self.mended.wait(30)
            return None
        scores = [0.1 + t.count("G") + 0.5 * t.count("CA") for t in texts]
        if wrong:
            self.asked += texts[1:]  # what was answered
            return [math.nan, *scores[1:]]
        self.asked += texts
        return scores

    def mend(self):
        self.fault = ""
        self.mended.set()


AGAIN = ["--task", "faulty:design"]  # a folder alone runs no code


def offer(patch: pytest.MonkeyPatch, service: Service) -> None:
    """Make it the oracle of the task `faulty:design`; pauses between two tries take no time."""

    def design(length: int = 12) -> Task:
        return strings_task(service, "ACGT", length, channel=Slip(0.2))

    module = types.ModuleType("faulty")
    module.design = design
    patch.setitem(sys.modules, "faulty", module)
    patch.setattr(oracles, "time", types.SimpleNamespace(sleep=lambda seconds: None))


@pytest.fixture
def service(monkeypatch):
    made = Service()
    offer(monkeypatch, made)
    yield made
    made.mend()


def train(out, *more) -> int:
    return main(["train", "faulty:design", *more, *SMALL, "--out", str(out)])


def sentence(capfd) -> str:
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1, said
    assert said[0].startswith("stochflow: ")
    return said[0]


def lines(folder) -> list[dict]:
    """Without the time and the tries that had to be repeated, of which a run that met no fault has none."""
    return [{k: v for k, v in r.items() if k not in ("time", "retried")} for r in Run.open(folder).metrics()]


def assert_same_end(folder, reference) -> None:
    for name in ("step-00000012", "best"):
        found, wanted = (load_checkpoint(f / "checkpoints" / f"{name}.safetensors") for f in (folder, reference))
        assert found.step == wanted.step
        assert found.tensors.keys() == wanted.tensors.keys()
        for key, value in wanted.tensors.items():
            assert torch.equal(found.tensors[key], value), key
    assert lines(folder) == lines(reference)
    assert (folder / "samples.csv").read_bytes() == (reference / "samples.csv").read_bytes()
    names = [sorted(str(p.relative_to(f)) for p in f.rglob("*")) for f in (folder, reference)]
    numbered = [[n for n in found if "/step-" not in n] for found in names]  # a stop leaves a checkpoint of its own
    assert numbered[0] == numbered[1]


# the oracle -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that met no fault, of strings too many to list (12 letters) and of few (4); and how many batches each asked for."""
    base, batches = tmp_path_factory.mktemp("whole"), {}
    for length in ("12", "4"):
        made = Service()
        with pytest.MonkeyPatch.context() as patch:
            offer(patch, made)
            assert train(base / length, "--length", length) == 0
        batches[length] = made.batches
        assert len(made.asked) == len(set(made.asked))
    return base, batches


@pytest.mark.parametrize("fault", ["raise", "nan", "hang"])
@pytest.mark.parametrize(
    ("length", "at", "step"),
    [
        ("12", 2, 0),  # the first batch: nothing is learned yet (batch 1 was the question at the door)
        ("12", 7, 5),  # between two checkpoints
        ("12", 8, 6),  # right after one
        ("12", 14, 12),  # when all is learned, at the last look
        ("4", 3, 0),  # (batch 2 was to see how quick it is)
        ("4", 7, 4),  # at a look between two iterations: its line and its best are owed
    ],
)
def test_an_oracle_that_fails_stops_the_run_which_then_goes_on_as_if_it_had_not(
    fault, length, at, step, service, whole, tmp_path, capfd
):
    base, batches = whole
    assert at <= batches[length]
    service.fault, service.at = fault, at
    out = tmp_path / "run"
    patience = ["--oracle-timeout", "0.3", "--oracle-retries", "0"] if fault == "hang" else []
    assert train(out, "--length", length, *patience) == 2
    said = sentence(capfd)
    words = {
        "raise": "went away (the last of 3 tries)",
        "nan": "no score (None or NaN)",
        "hang": "did not answer within 0.3 s on a batch",
    }
    assert words[fault] in said
    assert f"everything is saved in {out}: mend it and go on from step {step} with `stochflow resume {out}`" in said
    assert Run.open(out).load().step == step
    kept = [json.loads(line)["text"] for line in (out / "oracle.jsonl").read_text().splitlines()]
    assert sorted(kept) == sorted(service.asked)  # all that was answered, once
    service.mend()
    assert main(["resume", str(out), "--quiet", *AGAIN]) == 0
    assert_same_end(out, base / length)
    assert len(service.asked) == len(set(service.asked))  # nothing was asked for again


def test_an_oracle_that_fails_now_and_then_goes_unnoticed(service, whole, tmp_path, monkeypatch):
    answer, tries = service.__call__, []

    def flaky(self, texts):
        tries.append(len(texts))
        if len(tries) % 3 == 2:
            raise ConnectionError("busy")
        return answer(texts)

    monkeypatch.setattr(Service, "__call__", flaky)
    assert train(tmp_path / "run") == 0
    assert_same_end(tmp_path / "run", whole[0] / "12")
    assert len(tries) > service.batches


def test_an_oracle_that_never_answered_is_not_tried_again(service, tmp_path, capfd):
    service.fault, service.at = "raise", 1
    assert train(tmp_path / "run") == 2
    assert "the server went away" in sentence(capfd)
    assert service.batches == 1
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_asks_for_nothing_it_knows(service, whole, tmp_path):
    """All answers are there, the checkpoints are not: it trains again, and pays nothing."""
    base, _ = whole
    shutil.copytree(base / "12", tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints").iterdir():
        file.unlink()
    with (tmp_path / "run" / "oracle.jsonl").open("a") as f:
        f.write('{"text": "ACGTACGT')  # the line it was writing when it was killed
    assert main(["resume", str(tmp_path / "run"), "--quiet", *AGAIN]) == 0
    assert service.asked == []
    assert_same_end(tmp_path / "run", base / "12")
    assert (tmp_path / "run" / "oracle.jsonl").read_bytes() == (base / "12" / "oracle.jsonl").read_bytes()


def test_looking_at_a_run_asks_for_nothing_it_knows_and_changes_nothing(service, whole, capfd):
    base, _ = whole
    before = {p: p.read_bytes() for p in base.rglob("*") if p.is_file()}
    assert main(["eval", str(base / "12"), "--json", *AGAIN]) == 0
    found = json.loads(capfd.readouterr().out)
    assert service.asked == []
    assert main(["sample", str(base / "12"), "-n", "20", *AGAIN]) == 0  # new designs, which are paid for
    after = {p: p.read_bytes() for p in base.rglob("*") if p.is_file()}
    later = after.pop(base / "12" / "oracle.later.jsonl")  # where those answers are kept
    assert len(later.splitlines()) == len(service.asked) > 0
    assert after == before
    summary = json.loads((base / "12" / "summary.json").read_text())
    assert {k: found[k] for k in ("elbo", "top_score")} == {k: summary[k] for k in ("elbo", "top_score")}


def test_answers_from_the_file_do_not_make_a_slow_oracle_look_quick(service, tmp_path, monkeypatch):
    """A space is listed where asking about all of it is quick: decided once, by the oracle and not by its memory."""
    with monkeypatch.context() as patch:
        patch.setattr("stochflow.law.measure.LISTED_SECONDS", 0.0)
        assert train(tmp_path / "run", "--length", "8") == 0
    asked = len(service.asked)
    assert asked < 2500  # the looks' sample, of 65,536 strings
    assert main(["resume", str(tmp_path / "run"), "--quiet", *AGAIN]) == 0
    assert len(service.asked) == asked
    assert json.loads((tmp_path / "run" / "summary.json").read_text()).get("tv") is None


def test_a_task_made_in_python_is_told_how_to_go_on(service, tmp_path):
    mine = tmp_path / "mine.jsonl"
    task = strings_task(service, "ACGT", 11)
    task = task._replace(oracle=Cached(task.oracle, mine))
    service.fault, service.at = "raise", 4
    settings = {"steps": 6, "batch": 8, "hidden": 8, "oracle_retries": 0, "eval_every": 2, "device": "cpu"}
    settings |= {"search": "none", "replay": 0.0, "replay_rank": False, "ask_every": 1, "net": "mlp", "objective": "db"}
    with pytest.raises(UserError, match=r"experiment\.resume\('.*', task=\.\.\.\)"):
        experiment.train(task, out=tmp_path / "run", **settings)
    service.mend()
    done = experiment.resume(tmp_path / "run", task=task)
    assert done.summary["step"] == 6
    assert len(service.asked) == len(set(service.asked))
    assert mine.read_bytes() == (tmp_path / "run" / "oracle.jsonl").read_bytes()  # the user's own file, and the run's
    kept = (tmp_path / "run" / "oracle.jsonl").read_bytes()
    done.sample(500, seed=1)  # the folder was given back: another process may be writing it now
    assert (tmp_path / "run" / "oracle.jsonl").read_bytes() == kept != mine.read_bytes()
    assert isinstance(task.oracle.oracle, Host)
    assert task.oracle.file == mine


OWN = """
import os, signal
from stochflow import Task, strings_task

batches = []

def score(texts):
    batches.append(texts)
    if len(batches) == 9 and not os.path.exists("mended"):
        os.kill(os.getpid(), signal.SIGKILL)
    with open("asked.txt", "a") as f:
        f.writelines(t + "\\n" for t in texts)
    return [0.1 + t.count("G") for t in texts]

def design() -> Task:
    return strings_task(score, "ACGT", 12)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills")
def test_a_run_killed_while_it_waits_for_its_oracle_asks_for_nothing_again(tmp_path, monkeypatch):
    """In a process of its own; the newest checkpoint is behind what was answered."""
    (tmp_path / "killed_while_asking.py").write_text(OWN)
    words = ["train", "killed_while_asking:design", *SMALL, "--out", "run"]
    done = subprocess.run([sys.executable, "-m", "stochflow", *words], cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert Run.open(tmp_path / "run").load().step == 6  # of 7 that were done
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mended").touch()
    assert main(["resume", "run", "--quiet", "--trust"]) == 0
    assert main([*words[:-1], "whole"]) == 0
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    asked = (tmp_path / "asked.txt").read_text().split()
    answers = [f / "oracle.jsonl" for f in (tmp_path / "run", tmp_path / "whole")]
    assert sorted(answers[0].read_text().splitlines()) == sorted(answers[1].read_text().splitlines())
    assert len(asked) == 2 * len(set(asked))  # once for each of the two runs


# the disk -------------------------------------------------------------------------------------------------------

GRID = ["train", "grid", "--side", "4", "--stick", "0.25", *SMALL, "--out"]


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """A run that met no fault, and how often it synced a file."""
    out, synced = tmp_path_factory.mktemp("grid") / "whole", []
    with pytest.MonkeyPatch.context() as patch:
        fsync = os.fsync
        patch.setattr(os, "fsync", lambda number: synced.append(number) or fsync(number))
        assert main([*GRID, str(out)]) == 0
    return out, len(synced)


def whole_checkpoints(folder) -> list[int]:
    """The steps of the checkpoints, each of them read to its end."""
    return sorted(load_checkpoint(p).step for p in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("lasting", [True, False], ids=["for good", "for a moment"])
@pytest.mark.parametrize(
    "last", [1, 4, 6, 8, *range(-8, 0)]
)  # the write that still succeeds, counted from either end; the first makes a run
def test_a_full_disk_is_said_and_costs_nothing_that_was_saved(last, lasting, grid, tmp_path, monkeypatch, capfd):
    reference, syncs = grid
    last = last if last > 0 else syncs + last
    assert 8 < syncs > last
    done, fsync = [], os.fsync

    def full(number):
        done.append(number)
        if len(done) == last + 1 or (lasting and len(done) > last):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(number)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main([*GRID, str(out)]) == 2
        said = sentence(capfd)
    assert "No space left on device" in said
    assert str(out) in said
    assert "what was saved before is whole" in said
    assert ("the last checkpoint in" in said) == ("(stopped" in said and len(Run.open(out).checkpoints()) > 0)
    assert not list(out.rglob("*.tmp"))
    whole_checkpoints(out)  # raises for one that is not
    assert main(["resume", str(out), "--quiet"]) == 0
    assert_same_end(out, reference)


@pytest.mark.parametrize("moment", ["the look", "the designs", "the law"])
def test_one_ctrl_c_ends_the_final_look_and_it_can_be_taken_again(moment, grid, tmp_path, monkeypatch, capfd):
    """Training is over and saved by then, so that nothing is gained by waiting; it used to be swallowed."""
    reference, _ = grid
    owner, name = {
        "the look": (experiment.Experiment, "measure"),
        "the designs": (experiment.Experiment, "best_designs"),
        "the law": (picture, "law_picture"),
    }[moment]
    real = getattr(owner, name)

    def slow(*args, **kwargs):
        if moment != "the look" or kwargs.get("final"):
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **kwargs)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, slow)
        assert main([*GRID, str(out)]) == 130
    said = capfd.readouterr().err
    assert "before the final figures were written, everything saved" in said
    assert f"stochflow resume {out} --steps 12" in said
    assert not (out / "summary.json").exists()
    assert not list(out.rglob("*.tmp"))
    assert main(["resume", str(out), "--quiet"]) == 0
    assert_same_end(out, reference)


def test_a_task_of_very_long_objects_says_that_an_iteration_will_take_long(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(session, "LONG", 5)
    assert main([*GRID, str(tmp_path / "long")]) == 0  # a side of 4: six decisions
    assert "may take 6 decisions" in caplog.text
    caplog.clear()
    monkeypatch.setattr(session, "LONG", 6)
    assert main([*GRID, str(tmp_path / "short")]) == 0
    assert caplog.text == ""


def test_a_disk_that_fills_under_the_log_is_said_too(grid, tmp_path, monkeypatch, capfd):
    """Half of a line reaches metrics.jsonl; resumed, the log is the one of a run that met no fault."""
    reference, _ = grid
    log, left = Run.log, [3]

    def full(self, record):
        left[0] -= 1
        if left[0] > 0:
            return log(self, record)
        with (self.path / "metrics.jsonl").open("a") as f:
            f.write(json.dumps(record)[:9])
        raise UserError(f"cannot use the run folder {self.path}: {os.strerror(errno.ENOSPC)}")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "log", full)
        assert main([*GRID, str(tmp_path / "run")]) == 2
    assert "No space left" in sentence(capfd)
    assert Run.open(tmp_path / "run").load().step == 6
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert_same_end(tmp_path / "run", reference)


def test_a_folder_that_cannot_be_written_is_named_and_can_still_be_read(grid, tmp_path, monkeypatch, capfd):
    """The system's refusal is played: root, whom permissions do not bind, runs tests too."""
    out = tmp_path / "run"
    shutil.copytree(grid[0], out)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    opened = pathlib.Path.open

    def refuse(path, mode="r", *args, **kwargs):
        if set(mode) & set("wax+") and str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, mode, *args, **kwargs)

    monkeypatch.setattr(pathlib.Path, "open", refuse)
    assert main(["resume", str(out), "--steps", "14"]) == 2
    said = sentence(capfd)
    assert "Read-only file system" in said
    assert str(out) in said
    assert main([*GRID, str(tmp_path / "new")]) == 2
    assert "another --out" in sentence(capfd)
    assert main(["eval", str(out)]) == 0
    assert main(["sample", str(out), "-n", "3"]) == 0
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


class Hostile:
    """Unpickling it would make a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("harm", ["cut", "hostile"])
def test_a_run_goes_on_from_the_checkpoint_before_a_harmed_one(harm, grid, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(grid[0], out)
    newest = out / "checkpoints" / "step-00000012.safetensors"
    content = newest.read_bytes()
    newest.write_bytes(content[: len(content) // 2] if harm == "cut" else pickle.dumps(Hostile(str(out / "hacked"))))
    assert main(["resume", str(out), "--quiet"]) == 0
    assert not (out / "hacked").exists()
    assert_same_end(out, grid[0])
