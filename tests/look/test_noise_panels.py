"""The pictures of the noise, of the residual's parts and of the entropy-ratio term, from a run that was really made."""

from __future__ import annotations

import pytest

from stochflow.look.report import RunFiles
from stochflow.look.report.noise import noise_panels
from stochflow.runs.experiment import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("noise") / "run"
    small = {"side": 4, "stick": 0.25, "steps": 30, "eval_every": 10, "log_every": 10, "batch": 16, "hidden": 8}
    train("grid", objective="sgfn-kl", seeds=2, out=out, engine="eager", **small)
    return RunFiles.read(out)


def test_a_run_with_learned_noise_has_all_three_pictures(run):
    assert not run.gaps
    found = {panel.key: panel for panel in noise_panels(run)}
    assert list(found) == ["noise", "parts", "kl_part"]
    assert "2 moves" in found["noise"].svg
    assert "learned" in found["noise"].svg
    assert "number" in found["noise"].caption
    assert "- log P_B" in found["parts"].svg  # a grid has several ways back
    assert "% of the loss" in found["kl_part"].caption


def test_the_parts_are_in_the_metrics_at_every_look(run):
    looks = [row for row in run.rows if "part_log_flow" in row]
    assert [row["step"] for row in looks] == [10, 20, 30]
    for row in looks:
        for name in ("part_log_pf", "part_log_k", "part_end_log_flow", "part_log_pa", "part_log_pb", "ll_diff"):
            assert len(row["seeds"][name]) == 2
        assert row["part_log_k"] < 0
        assert row["ll_diff"] > 0
    assert all(row["kl_part"] >= 0 for row in run.rows if "kl_part" in row)


def test_tables_that_do_not_fit_are_left_out(run):
    import dataclasses

    broken = dataclasses.replace(run, law={k: v for k, v in run.law.items() if k != "noise_learned"})
    assert [panel.key for panel in noise_panels(broken)] == ["parts", "kl_part"]
