"""The command line, end to end on small tasks: what is written, what is printed, and that resuming changes nothing."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.runs import experiment, tasks
from stochflow.runs.config import configure
from stochflow.runs.folder import Run
from stochflow.training.trainer import Trainer

SMALL = [
    "--steps",
    "30",
    "--log-every",
    "10",
    "--eval-every",
    "10",
    "--save-every",
    "10",
    "--batch",
    "16",
    "--hidden",
    "16",
]
KEYS = """tv l1 mean_l1 kl_target_model kl_model_target floor_tv floor_kind floor_tv_reverse_kl limit_tv naive_tv excess_tv
          log_z_error modes expected_modes""".split()


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """A small finished run under noise."""
    path = tmp_path_factory.mktemp("runs") / "noisy"
    assert main(["train", "grid", "--side", "4", "--stick", "0.25", "--out", str(path), "--quiet", *SMALL]) == 0
    return path


def test_a_run_folder_holds_everything(noisy):
    names = {p.name for p in noisy.iterdir()} - {".lock"}
    assert names == {
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "checkpoints",
        "samples.csv",
        "law.npz",
        "summary.json",
    }
    kept = sorted(p.name for p in (noisy / "checkpoints").iterdir())
    assert kept == ["best.safetensors", "step-00000020.safetensors", "step-00000030.safetensors"]
    environment = json.loads((noisy / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["threads"] == torch.get_num_threads()
    assert [r["step"] for r in Run.open(noisy).metrics()] == [10, 20, 30]


def test_the_same_keys_everywhere(noisy, capsys):
    summary = json.loads((noisy / "summary.json").read_text())
    assert main(["eval", str(noisy), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    last = Run.open(noisy).metrics()[-1]
    for key in KEYS:
        assert key in summary
        assert found[key] == summary[key] == last[key]
    assert found["excess_tv"] == pytest.approx(found["tv"] - found["floor_tv"], abs=1e-12)
    assert found["dynamics_tv"] > 0
    assert main(["floor", "grid", "--side", "4", "--stick", "0.25", "--json"]) == 0
    floor = json.loads(capsys.readouterr().out)
    assert floor["floor_tv"] == found["floor_tv"]
    assert floor["naive_tv"] == found["naive_tv"]


def test_looking_does_not_touch_the_folder_or_the_random_stream(noisy, capsys):
    before = {p: p.read_bytes() for p in noisy.rglob("*") if p.is_file()}
    stream = torch.get_rng_state()
    with torch.random.fork_rng([]):
        for words in (["eval", str(noisy)], ["sample", str(noisy), "-n", "5"]):
            assert main(words) == 0
    assert torch.equal(torch.get_rng_state(), stream)
    assert {p: p.read_bytes() for p in noisy.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    "flags",
    [
        ["--objective", "tb"],
        ["--stick", "0.25", "--replay", "0.5", "--replay-priority", "--dynamics-off-pol", "--seeds", "2"],
        ["--stick", "0.25", "--dynamics", "tabular", "--objective", "sdb"],
    ],
    ids=["plain", "replay-and-learned-dynamics", "counts"],
)
def test_stopping_and_resuming_is_the_run_that_never_stopped(tmp_path, flags):
    common = [
        "grid",
        "--side",
        "4",
        "--batch",
        "16",
        "--hidden",
        "16",
        "--eval-every",
        "7",
        "--save-every",
        "5",
        "--quiet",
        *flags,
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["train", *common, "--steps", "24", "--out", str(whole)]) == 0
    assert main(["train", *common, "--steps", "13", "--out", str(parts)]) == 0
    assert main(["resume", str(parts), "--steps", "24", "--quiet"]) == 0
    one, other = Run.open(whole).load(), Run.open(parts).load()
    assert one.step == other.step == 24
    assert one.tensors.keys() == other.tensors.keys()
    different = [name for name in one.tensors if not torch.equal(one.tensors[name], other.tensors[name])]
    assert different == []
    assert Run.open(parts).config == Run.open(whole).config
    timeless = [{k: v for k, v in r.items() if k != "time"} for r in Run.open(parts).metrics() if r["step"] != 13]
    assert timeless == [{k: v for k, v in r.items() if k != "time"} for r in Run.open(whole).metrics()]


def test_how_often_one_looks_does_not_change_what_is_learned(tmp_path):
    common = [
        "train",
        "grid",
        "--side",
        "4",
        "--stick",
        "0.25",
        "--steps",
        "12",
        "--batch",
        "8",
        "--hidden",
        "8",
        "--quiet",
    ]
    assert main([*common, "--out", str(tmp_path / "often"), "--eval-every", "1", "--log-every", "1"]) == 0
    assert main([*common, "--out", str(tmp_path / "never")]) == 0
    often, never = (Run.open(tmp_path / name).load().tensors for name in ("often", "never"))
    assert all(torch.equal(often[name], never[name]) for name in never)


def test_several_seeds_give_a_median_and_an_interval(tmp_path):
    done = experiment.train("grid", side=3, steps=6, batch=8, hidden=8, seeds=3, out=tmp_path / "run")
    values = done.summary["seeds"]["tv"]
    assert len(values) == 3
    assert done.summary["tv"] == sorted(values)[1]
    assert min(values) <= done.summary["tv_low"] <= done.summary["tv"] <= done.summary["tv_high"] <= max(values)


def test_samples_are_reproducible_and_come_in_three_formats(noisy, tmp_path, capsys):
    def draw(*more):
        assert main(["sample", str(noisy), "-n", "20", *more]) == 0
        return capsys.readouterr().out

    assert draw("--seed", "3") == draw("--seed", "3") != draw("--seed", "4")
    rows = json.loads(draw("--format", "json"))
    assert len(rows) == 20
    env = tasks.grid_task(side=4).env
    for row in rows:
        state = torch.tensor(row["state"])
        assert row["score"] == pytest.approx(float(tasks.grid_task(side=4).oracle(state)), abs=1e-5)
        assert 0 <= int(env.index(state)) < 16
    file = tmp_path / "some.csv"
    draw("--out", str(file))
    with file.open() as f:
        table = list(csv.DictReader(f))
    assert [int(v) for v in table[0]["state"].split()] == rows[0]["state"]


def test_a_users_own_function_is_a_task(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_task_module.py").write_text(
        textwrap.dedent(
            """
            from stochflow import Task, strings_task

            def gc(length: int = 3, bonus: float = 0.1) -> Task:
                '''Strings rich in G and C.'''
                return strings_task(lambda texts: [t.count("G") + t.count("C") + bonus for t in texts], "ACGT", length)
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["train", "own_task_module:gc", "--help"]) == 0
    helped = capsys.readouterr().out
    assert "--bonus" in helped
    assert "Strings rich in G and C." in helped
    assert main(["train", "own_task_module:gc", "--length", "2", "--out", "run", *SMALL]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run folder: run\n")
    assert f"\n{json.loads((tmp_path / 'run' / 'environment.json').read_text())['choice']}\n" in out
    assert "run/samples.fasta" in out
    assert main(["sample", "run", "-n", "4", "--format", "fasta", "--task", "own_task_module:gc"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines[0].startswith(">design_0001 score=")
    assert set("".join(lines[1::2])) <= set("ACGT")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["task"] == {
        "name": "own_task_module:gc",
        "length": 2,
        "bonus": 0.1,
    }


def test_a_saved_configuration_is_a_command(noisy, tmp_path):
    out = tmp_path / "again"
    assert main(["train", "--config", str(noisy / "config.json"), "--batch", "8", "--out", str(out), "--quiet"]) == 0
    before, after = Run.open(noisy).config, Run.open(out).config
    assert after.task == before.task
    assert after.train.batch == 8
    assert after.train.steps == before.train.steps


def test_a_task_made_in_python_can_be_trained_and_gone_on_with(tmp_path):
    task = tasks.strings_task(lambda texts: [len(set(t)) for t in texts], "AB", 3)
    done = experiment.train(task, steps=4, batch=8, hidden=8, out=tmp_path / "run")
    assert len(done.sample(5)) == 5
    assert main(["resume", str(done.path), "--steps", "6"]) == 2  # the command line cannot rebuild it
    assert experiment.resume(done.path, 6, task=task).summary["step"] == 6


def test_an_interrupted_run_is_whole_and_goes_on_exactly(tmp_path):
    """In a process of its own: Ctrl-C means a signal."""
    out, words = tmp_path / "run", ["train", "grid", "--side", "4", "--batch", "16", "--hidden", "16"]
    command = [
        sys.executable,
        "-m",
        "stochflow",
        *words,
        "--steps",
        "1000000",
        "--log-every",
        "5",
        "--eval-every",
        "100000",
        "--out",
        str(out),
    ]
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not (out / "metrics.jsonl").exists():
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    watchdog.cancel()
    assert process.returncode == 130
    assert f"stochflow resume {out}" in said
    assert "Traceback" not in said
    stopped = Run.open(out).load().step
    assert stopped >= 5
    assert main(["resume", str(out), "--steps", str(stopped + 3), "--quiet"]) == 0
    whole = tmp_path / "whole"
    assert main([*words, "--steps", str(stopped + 3), "--out", str(whole), "--quiet"]) == 0
    one, other = Run.open(out).load().tensors, Run.open(whole).load().tensors
    assert all(torch.equal(one[name], other[name]) for name in other)


def run_that_fails(error, out, monkeypatch, capsys):
    """What is said of a run in which this is raised at its eighth step."""

    def broken(self, note=True):
        if self.steps_done == 7:
            raise error
        iterate(self)

    iterate = Trainer.iterate
    monkeypatch.setattr(Trainer, "iterate", broken)
    assert main(["train", "grid", "--side", "4", "--out", str(out), *SMALL]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert Run.open(out).load().step == 7
    return said


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 640000000000 bytes."),
    ],
)
def test_what_does_not_fit_into_memory_is_said_in_a_sentence(error, tmp_path, monkeypatch, capsys):
    said = run_that_fails(error, tmp_path / "run", monkeypatch, capsys)
    assert "does not fit into memory" in said
    assert str(tmp_path / "run") in said


def test_a_fault_of_ours_is_written_down_and_the_run_is_saved(tmp_path, monkeypatch, capsys):
    said, file = (
        run_that_fails(RuntimeError("a wire came loose"), tmp_path / "run", monkeypatch, capsys),
        tmp_path / "run" / "error.txt",
    )
    assert "a wire came loose" in said
    assert str(file) in said
    assert "RuntimeError: a wire came loose" in file.read_text()


def test_a_loss_that_is_not_finite_stops_with_the_checkpoint_before_it(tmp_path, monkeypatch):
    def poisoned(self, note=True):
        iterate(self)
        if self.steps_done > 12:
            self.raw_stats[-1].zero_()  # the device-side flag

    iterate = Trainer.iterate
    monkeypatch.setattr(Trainer, "iterate", poisoned)
    with pytest.raises(UserError, match=r"not finite at step 20.*--lr"):
        experiment.train(
            configure("grid", side=4, steps=30, batch=8, hidden=8, log_every=10, save_every=10), out=tmp_path / "run"
        )
    assert Run.open(tmp_path / "run").load().step == 10


def test_the_end_of_a_run_teaches(capsys, noisy):
    assert main(["eval", str(noisy)]) == 0
    out = capsys.readouterr().out
    for words in (
        "TV to the target",
        "best achievable TV",
        "excess over the best",
        "The learned law is",
        "That is far; try",
    ):
        assert words in out
    assert "reached exactly" in experiment.verdict({"tv": 0.001, "floor_tv": 0.0, "excess_tv": 0.001})
    assert "far" not in experiment.verdict({"tv": 0.05, "floor_tv": 0.045, "excess_tv": 0.005})
    assert "flow-kl" in experiment.verdict(
        {"tv": 0.1, "floor_tv": 0.02, "excess_tv": 0.08, "limit_tv": 0.095, "objective": "db"}
    )
    assert "db or tb" in experiment.verdict(
        {"tv": 0.1, "floor_tv": 0.02, "excess_tv": 0.08, "limit_tv": 0.095, "objective": "naive-db"}
    )
    assert "too large to list" in experiment.verdict({"tv": None, "elbo": 1.0, "log_z_estimate": 3.0})


def test_tasks_lists_every_task_and_objective(capsys):
    assert main(["tasks"]) == 0
    out = capsys.readouterr().out
    for word in ("grid", "tfbind8", "flow-kl", "naive-db"):
        assert f"  {word} " in out


def test_a_checkpoint_of_other_settings_is_refused_in_one_sentence(tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", "grid", "--side", "4", "--batch", "4", "--steps", "3", "--quiet", "--out", str(run)]) == 0
    config = json.loads((run / "config.json").read_text())
    config["task"]["side"] = 5
    (run / "config.json").write_text(json.dumps(config))
    for command in (["resume", str(run), "--steps", "6"], ["sample", str(run), "-n", "2"]):
        assert main(command) != 0
        said = capsys.readouterr().err
        assert "is of another network or world than its config.json says" in said
        assert "Traceback" not in said


def test_a_line_of_two_seeds_tells_the_median_of_both(tmp_path):
    found = experiment.train("grid", side=4, batch=4, seeds=2, steps=200, out=tmp_path / "run")
    row = next(r for r in Run.open(found.path).metrics() if r["step"] == 100)
    for name in ("loss", "mean_score", "grad_norm"):
        assert row[name] == pytest.approx(sum(row["seeds"][name]) / 2, rel=1e-3)


@pytest.mark.parametrize("given", [None, int, lambda: 1])
def test_what_is_no_task_is_refused(given):
    with pytest.raises(UserError, match="is no task: give a task's name"):
        experiment.train(given, steps=1)


@pytest.mark.parametrize(
    ("names", "said"),
    [([], "there is no checkpoint yet"), (["step-00000500.safetensors"], "step-00000500.safetensors is whole")],
)
def test_a_second_ctrl_c_says_what_is_kept(tmp_path, names, said):
    """In a process of its own: Ctrl-C means a signal."""
    code = f"""
import signal
from pathlib import Path
from types import SimpleNamespace
from stochflow.runs.session import Session
session = Session.__new__(Session)
session.finishing, session.trainer = False, SimpleNamespace(stop_requested=False, group=None)
session.run = SimpleNamespace(path="mine", checkpoints=lambda: [Path(name) for name in {names!r}])
try:
    with session._stoppable():
        signal.raise_signal(signal.SIGINT)
        assert session.trainer.stop_requested
        signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt as end:
    print(end)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "interrupted at once; in mine" in done.stdout
    assert said in done.stdout
