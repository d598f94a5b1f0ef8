"""Two processes started by torchrun: a run goes on exactly, an oracle that fails on one rank loses nothing, seeds are shared out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stochflow.errors import UserError
from stochflow.runs import experiment, ranks
from stochflow.runs.config import configure
from stochflow.runs.folder import Run

SRC = Path(__file__).parents[2] / "src"
SMALL = "--batch 8 --eval-every 20 --save-every 20 --log-every 20 --quiet".split()


def torchrun(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "stochflow"]
    paths = os.pathsep.join([str(SRC), str(cwd)])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*start, *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=200)


def state(path: Path) -> dict[str, torch.Tensor]:
    found = Run.open(path).load()
    assert found is not None
    return found.tensors


@pytest.mark.slow
def test_a_run_of_two_ranks_goes_on_bit_for_bit(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for done in (
        torchrun("train", "grid", "--stick", 0.25, *SMALL, "--steps", 80, "--out", whole, cwd=tmp_path),
        torchrun("train", "grid", "--stick", 0.25, *SMALL, "--steps", 40, "--out", parts, cwd=tmp_path),
        torchrun("resume", parts, "--steps", 80, "--quiet", cwd=tmp_path),
    ):
        assert done.returncode == 0, done.stderr[-2000:]
    a, b = state(whole), state(parts)
    assert a.keys() == b.keys()
    assert all(torch.equal(value, b[name]) for name, value in a.items())
    assert not torch.equal(a["random.cpu"], a["rank1.random.cpu"]), "the ranks draw from different streams"
    assert Run.open(whole).read("summary.json")["oracle_calls"] == 80 * 8 * 2
    assert len(list(whole.glob("checkpoints/step-*"))) == 2
    with pytest.raises(UserError, match="was trained by 2 rank"):
        experiment.resume(whole, steps=100)
    assert experiment.open_run(whole).trainer.steps_done == 80  # looking needs one process


@pytest.mark.slow
def test_an_oracle_that_fails_on_one_rank_loses_nothing(tmp_path):
    (tmp_path / "gc_tasks.py").write_text(
        "import os\nfrom stochflow import Task, strings_task\nasked = []\n"
        "def gc(texts):\n"
        "    asked.append(len(texts))\n"
        "    if len(asked) > 12 and os.environ.get('RANK') == '1' and not os.path.exists('mended'):\n"
        "        raise RuntimeError('the licence server is away')\n"
        "    return [0.1 + t.count('G') for t in texts]\n"
        "def task(length: int = 4) -> Task:\n    return strings_task(gc, 'ACGT', length)\n"
    )
    words = ("train", "gc_tasks:task", *SMALL, "--steps", 40, "--oracle-retries", 0, "--out", "run")
    failed = torchrun(*words, cwd=tmp_path)
    assert failed.returncode != 0
    assert "the licence server is away" in failed.stderr
    assert "everything is saved" in failed.stderr
    done = Run.open(tmp_path / "run").load()
    assert done is not None
    assert 0 < done.step < 20
    (tmp_path / "mended").touch()
    again = torchrun("resume", "run", "--quiet", "--task", "gc_tasks:task", cwd=tmp_path)
    assert again.returncode == 0, again.stderr[-2000:]
    assert Run.open(tmp_path / "run").read("summary.json")["step"] == 40


def test_seeds_are_shared_out_over_the_ranks(monkeypatch, tmp_path):
    def share(rank: int, count: int, seeds: int):
        for name, value in {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(name, str(value))
        config, out = ranks.apart(configure("grid", seeds=seeds, seed=10, ranks="apart"), tmp_path)
        return list(range(config.train.seed, config.train.seed + config.train.seeds)), out

    shares = [share(rank, 3, 8) for rank in range(3)]
    assert sorted(s for seeds, _ in shares for s in seeds) == list(range(10, 18))
    assert [out.name for _, out in shares] == ["rank-0", "rank-1", "rank-2"]
    with pytest.raises(UserError, match="--seeds 2 cannot be spread over 3 ranks"):
        share(0, 3, 2)


def test_a_budget_is_refused_where_several_ranks_would_each_spend_it():
    trainer = SimpleNamespace(task=SimpleNamespace(oracle=SimpleNamespace(budget=10)))
    with pytest.raises(UserError, match="--oracle-calls is for one process"):
        ranks.begin(trainer, SimpleNamespace(rank=0, ranks=2), 0)
