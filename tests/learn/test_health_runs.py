"""Each diagnostic fires on a run broken on purpose for it, and none fires, at any look, on the default runs over five seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stochflow.config import configure
from stochflow.experiment import train
from stochflow.health import CHECKS, diagnose

pytestmark = pytest.mark.slow

QUICK = {"log_every": 25, "eval_every": 100, "save_every": 1000, "device": "cpu"}
BROKEN = {  # what breaks it, and what must be found
    "log_z_lag": ("grid", {"objective": "tb", "lr": 1e-6, "base": 1e-9, "side": 16, "steps": 300}),
    "policy_collapse": ("grid", {"objective": "tb", "side": 16, "base": 1e-9, "explore": 0.0, "lr": 0.02, "steps": 400}),
    "loss_at_floor": ("grid", {"objective": "naive-db", "stick": 0.5, "steps": 600}),
    "dynamics_not_learned": ("grid", {"stick": 0.25, "dynamics_lr": 1e-7, "steps": 300}),
    "gradient_explosion": ("grid", {"objective": "tb", "lr": 10.0, "steps": 400}),
    "replay_staleness": ("grid", {"replay": 0.9, "steps": 1100}),
    "reward_saturation": ("tfbind8", {"floor": 0.99, "batch": 64, "steps": 200}),
    "exploration_too_low": ("grid", {"objective": "tb", "side": 16, "base": 1e-9, "explore": 0.0, "lr": 0.02, "steps": 300}),
}


def findings_at_every_line(path: Path) -> list[set[str]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    config = json.loads((path / "config.json").read_text())
    return [{f.name for f in diagnose(rows[:n], config)} for n in range(1, len(rows) + 1)]


@pytest.mark.parametrize("name", BROKEN)
def test_it_fires_on_the_run_that_was_broken_for_it(name, tmp_path):
    assert BROKEN.keys() == CHECKS.keys()
    task, settings = BROKEN[name]
    train(task, out=tmp_path / "broken", **(QUICK | settings))
    assert name in findings_at_every_line(tmp_path / "broken")[-1]


@pytest.mark.parametrize("settings", [{}, {"stick": 0.25}], ids=str)
def test_none_fires_at_any_line_of_a_default_grid_run_over_five_seeds(settings, tmp_path):
    train("grid", out=tmp_path / "default", seeds=5, **settings)
    assert set().union(*findings_at_every_line(tmp_path / "default")) == set()


def test_none_fires_at_any_line_of_the_default_tfbind8_run_over_five_seeds():
    """Its log was recorded by `stochflow train tfbind8 --seeds 5`, which takes minutes."""
    recorded = Path(__file__).parent / "tfbind8-default-5-seeds.jsonl"
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    config = configure("tfbind8", seeds=5).to_dict()
    assert rows[-1]["step"] == config["train"]["steps"]
    assert len(rows[-1]["seeds"]["tv"]) == 5
    for n in range(1, len(rows) + 1):
        assert [str(f) for f in diagnose(rows[:n], config)] == []
