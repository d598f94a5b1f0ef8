"""Two processes that learn together are one process with both batches: the same weights up to rounding, equal on both ranks."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stochflow.training import distributed

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"
program = runpy.run_path(str(HERE / "ranks_program.py"), run_name="program")


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A folder with the states that two gloo ranks ended with."""
    out = tmp_path_factory.mktemp("ranks")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*words, str(HERE / "ranks_program.py"), str(out)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
@pytest.mark.parametrize("case", program["CASES"])
def test_two_ranks_learn_what_one_process_learns_from_both_batches(case, learned):
    make, steps, batch = program["make"], program["STEPS"], program["BATCH"]
    objective, dynamics = program["CASES"][case]
    first, second = (torch.load(learned / f"{case}-{rank}.pt") for rank in (0, 1))
    alone = make(objective, dynamics, slice(None))
    begun = alone.state_dict()
    alone.train(steps, every=5)
    expected = alone.state_dict()
    assert int(first["calls"]) == alone.oracle_calls == steps * 2 * 2 * batch  # two seeds, two batches
    moved = 0
    for name, value in expected.items():
        if name.startswith(("random.", "source.", "stats", "oracle")):
            continue
        assert torch.equal(first[name], second[name]), f"{name} differs between the ranks"
        torch.testing.assert_close(first[name], value, rtol=1e-3, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")
        moved += int(not torch.equal(value, begun[name]))
    assert moved > 10, "weights that never moved prove nothing"


@pytest.mark.slow
@pytest.mark.skipif(not program["TASKS"].exists(), reason="the system does not list the threads of a process")
def test_a_rank_that_has_left_keeps_no_thread_of_the_group(learned):
    """Such a thread, cut off at the end of the process, now and then ended a finished rank by SIGABRT."""
    for rank in (0, 1):
        names = (learned / f"threads-{rank}.txt").read_text().split("\n")
        assert names
        assert not [name for name in names if "gloo" in name]


def test_the_state_of_ranks_is_joined_and_taken_apart():
    state = {"step": torch.ones(()), "random.cpu": torch.zeros(3), "policy.weight": torch.ones(2)}
    other = {"random.cpu": torch.full((3,), 7.0)}
    joined = distributed.with_ranks(state, [other])
    assert distributed.ranks_in(joined) == 2
    assert distributed.ranks_in(state) == 1
    assert distributed.of_rank(joined, 0).keys() == state.keys()
    assert torch.equal(distributed.of_rank(joined, 1)["random.cpu"], other["random.cpu"])
    assert torch.equal(distributed.of_rank(joined, 1)["policy.weight"], state["policy.weight"])
