"""A run folder made by version 0.1 before its modules became packages still opens, resumes and reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stochflow.look.report import RunFiles, write_report
from stochflow.runs.experiment import open_run, resume
from stochflow.runs.folder import Run

FOLDER = Path(__file__).parent / "first_version_run"  # grid, side 4, stick .25, hidden 8, 40 steps
AT_60 = 0.52967521  # TV that the version which made it reached at step 60


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "run"))


def test_it_opens_with_the_figures_it_ended_with(folder):
    found, saved = open_run(folder).measure(final=True), json.loads((folder / "summary.json").read_text())
    for key in ("tv", "floor_tv", "naive_tv", "elbo", "log_z_error", "dynamics_tv", "spearman", "oracle_calls"):
        assert found[key] == pytest.approx(saved[key], abs=1e-5), key


def test_it_resumes_as_it_would_have_gone_on(folder):
    done = resume(folder, steps=60)
    assert done.summary["tv"] == pytest.approx(AT_60, abs=1e-4)
    assert Run.open(folder).load().step == 60
    assert [row["step"] for row in done.history][-1] == 60


def test_it_reports(folder):
    assert "The learned law is" in write_report([folder]).read_text()
    assert RunFiles.read(folder).done
