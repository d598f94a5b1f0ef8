"""The run folder: whole files only, the last two checkpoints and the best, one writer, nothing unpickled."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch

from stochflow.errors import UserError
from stochflow.runs import folder as runs
from stochflow.runs.config import configure
from stochflow.runs.folder import DamagedCheckpoint, Run, load_checkpoint, pack


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "run", configure("grid")) as made:
        yield made


def tensors(value: float) -> dict[str, torch.Tensor]:
    shared = torch.arange(6.0)
    return {
        "weight": torch.full((2, 3), value),
        "step": torch.tensor(value, dtype=torch.float64),
        "random": torch.get_rng_state(),
        "mask": torch.tensor([True, False]),
        "small": torch.tensor([1, -1], dtype=torch.int16),
        "empty": torch.empty(0, 4),
        "view": shared[:3],  # two names for one memory, and a transposed one
        "other": shared.view(2, 3).T,
    }


def test_a_checkpoint_comes_back_bit_for_bit(run):
    before = tensors(1.5)
    path = run.save(12, before, best_so_far=0.25)
    assert path.name == "step-00000012.safetensors"
    found = run.load()
    assert found.step == 12
    assert found.scalars["best_so_far"] == 0.25
    assert found.tensors.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(found.tensors[name], value)
        assert found.tensors[name].dtype == value.dtype


def test_the_last_two_and_the_best_are_kept(run):
    for step in (100, 200, 99_999_999, 100_000_000):
        run.save(step, tensors(step))
    run.save(150, tensors(150.0), best=True)
    names = sorted(p.name for p in (run.path / "checkpoints").iterdir())
    assert names == ["best.safetensors", "step-100000000.safetensors", "step-99999999.safetensors"]
    assert run.load().step == 100_000_000


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "pickle", "foreign"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run, harm, caplog):
    run.save(100, tensors(1.0))
    path = run.save(200, tensors(2.0))
    content = path.read_bytes()
    if harm == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif harm == "flip":  # inside a tensor: the structure stays whole
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "pickle":
        path.write_bytes(pickle.dumps(Hostile(str(run.path / "hacked"))))
    else:
        path.write_bytes(safetensors.torch.save({"weight": torch.zeros(2)}))
    with pytest.raises(DamagedCheckpoint, match="step-00000200"):
        load_checkpoint(path)
    assert run.load().step == 100
    assert "step-00000200.safetensors is damaged" in caplog.text
    assert not (run.path / "hacked").exists()


class Hostile:
    """Unpickling it would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_where_every_checkpoint_is_damaged_it_says_so(run):
    run.save(100, tensors(1.0)).write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"step-00000100.*another --out"):
        run.load()


def test_a_newer_format_is_refused_by_name(run, monkeypatch):
    monkeypatch.setattr(runs, "FORMAT", 9)
    path = run.save(100, tensors(1.0))
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"step-00000100.*format 9.*upgrade"):
        load_checkpoint(path)


def test_a_failed_write_leaves_the_file_before_it(run, monkeypatch):
    path = run.save(100, tensors(1.0))
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        run.save(100, tensors(2.0))
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_packing_is_deterministic():
    assert pack(tensors(1.0), {"step": 1}) == pack(tensors(1.0), {"step": 1})


def test_metrics_survive_a_cut_line_and_are_truncated_to_a_step(run):
    for step in (10, 20, 30):
        run.log({"step": step, "loss": 1.0 / step, "worst": float("inf")})
    with (run.path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 40, "lo')
    assert [r["step"] for r in run.metrics()] == [10, 20, 30]
    assert run.metrics()[0] == {"step": 10, "loss": 0.1, "worst": None}
    run.truncate_metrics(20)
    run.log({"step": 21})
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 20, 21]


def test_a_folder_that_holds_a_run_is_refused_with_both_remedies(run):
    with pytest.raises(UserError, match=r"resume .* choose another --out"):
        Run.create(run.path, configure("grid"))


def test_a_folder_without_a_run_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="stochflow train"):
            Run.open(path)


def test_reading_needs_no_lock_and_a_second_writer_is_refused(run):
    assert Run.open(run.path).config == run.config
    with pytest.raises(UserError, match="another process"):
        Run.open(run.path, write=True)
    run.close()
    Run.open(run.path, write=True).close()


def _try_to_write(path, answer):
    try:
        Run.open(path, write=True).close()
        answer.put("opened")
    except UserError as error:
        answer.put(str(error))


def test_the_lock_holds_between_processes(run):
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    other = context.Process(target=_try_to_write, args=(run.path, answer))
    other.start()
    said = answer.get(timeout=30)
    other.join()
    assert "another process is writing" in said


def test_a_writer_clears_what_a_killed_one_left(run):
    left = run.path / "checkpoints" / "step-00000001.safetensors.tmp"
    left.write_bytes(b"half")
    run.close()
    Run.open(run.path, write=True).close()
    assert not left.exists()


def test_opening_a_run_removes_its_own_leftovers_and_nobody_elses(tmp_path):
    with Run.create(tmp_path / "run", configure("grid")) as run:
        path = run.path
    (path / "notes").mkdir()
    theirs = [path / "notes" / "thesis.tmp", path / "draft.tmp"]
    ours = [path / "metrics.jsonl.tmp", path / "checkpoints" / "step-00000001.safetensors.tmp"]
    for file in theirs + ours:
        file.parent.mkdir(exist_ok=True)
        file.write_text("x")
    with Run.open(path, write=True):
        assert all(file.exists() for file in theirs)
        assert not any(file.exists() for file in ours)


def test_the_table_of_what_a_run_takes_is_that_of_the_measured_figures():
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("run_folder", root / "benchmarks" / "run_folder.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (root / "docs" / "report.md").read_text()
    found = json.loads(module.RESULT.read_text())
    assert module.table(found) in page
    assert module.rendered(page, found) == page, "run `python benchmarks/run_folder.py --page docs/report.md`"
    few, many = found["samples"]
    assert many["samples"] >= 1_000_000
    assert many["memory_mb"] < 1.5 * few["memory_mb"]  # a hundred times the samples in the same memory
    assert found["compare"]["runs"] >= 20
    assert found["compare"]["seconds"] < 30
    assert found["long_run"]["folder_mb"] < 10 * found["long_run"]["steps"] / 1e6
