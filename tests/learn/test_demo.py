"""`make demo` keeps its promise: within two minutes on two CPU cores, within 0.03 of the target, with designs to read."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Two minutes of two cores. Processor time and not the clock, because a machine that runs tests runs several at once, and the clock then
# tells how busy it is; the demo itself works with one thread, so that alone on a machine it has half of this to spare.
PROCESSOR_SECONDS = 240


def demo() -> list[str]:
    """The words of the Makefile's recipe."""
    recipe = re.search(r"^demo:.*\n\t(.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None
    command, *words = shlex.split(recipe.group(1))
    assert command == "$(BIN)/stochflow"
    return words


@pytest.mark.slow
def test_the_demo_is_quick_and_close(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # the promise is about processors
    done = subprocess.run(
        [sys.executable, "-m", "stochflow", *demo()],
        cwd=tmp_path,
        env=hidden,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr[-2000:]
    (folder,) = [p for p in (tmp_path / "runs").iterdir() if p.is_dir()]
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["tv"] < 0.03
    assert last["dynamics_tv"] < 0.05  # it learned the noise, and was not told
    assert len((folder / "samples.csv").read_text().splitlines()) > 50
    assert (folder / "samples.fasta").read_text().startswith(">")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < PROCESSOR_SECONDS
