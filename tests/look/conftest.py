"""Run folders made by hand, so that what reads them is tested in milliseconds and without training anything."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest

from stochflow.runs.config import configure


def rows(seeds: int = 3, steps: int = 1000, every: int = 100, tv: float = 0.02, noisy: bool = True, shift: float = 0.0):
    """Lines of a run that goes well: the distance falls to `tv`."""
    made = []
    for step in range(every, steps + 1, every):
        left = math.exp(-12 * step / steps)
        row = {
            "step": step,
            "time": step / 100,
            "oracle_calls": 64 * step,
            "loss": 0.001 + left,
            "dynamics_loss": 0.69,
            "grad_norm": 0.05 + left,
            "log_z_learned": 9.0 - 5 * left,
            "mean_score": 0.6,
            "mean_log_reward": -1.5,
            "mean_length": 8.0,
            "entropy": 1.2 + 0.1 * left,
            "finite": 1.0,
        }
        if step % (2 * every) == 0:
            each = {
                "tv": [tv + shift + 0.3 * left + 0.001 * s for s in range(seeds)],
                "elbo": [9.0 - left - 0.01 * s for s in range(seeds)],
                "eubo": [9.0 + left + 0.01 * s for s in range(seeds)],
                "log_z_estimate": [9.0] * seeds,
                "log_z_learned": [9.0 - 5 * left] * seeds,
                "log_z_error": [0.001 * s for s in range(seeds)],
                "kl_target_model": [0.02 + left] * seeds,
                "kl_model_target": [0.02 + left] * seeds,
                "sample_score": [0.6 + 0.01 * s for s in range(seeds)],
                "top_score": [0.9 + 0.01 * s for s in range(seeds)],
                "modes": [20.0 + s for s in range(seeds)],
                "expected_modes": [21.0 + s for s in range(seeds)],
            }
            each["excess_tv"] = [v - 0.005 for v in each["tv"]]
            if noisy:
                each |= {
                    "dynamics_nll": [0.69 + 0.1 * left] * seeds,
                    "dynamics_nll_true": [0.689] * seeds,
                    "dynamics_tv": [0.01 + left] * seeds,
                }
            for key, values in each.items():
                row |= (
                    {key: float(np.median(values)), f"{key}_low": min(values), f"{key}_high": max(values)}
                    if seeds > 1
                    else {key: values[0]}
                )
            row |= {"seeds": each} if seeds > 1 else {}
            row |= {
                "log_z": 9.0,
                "floor_tv": 0.005,
                "limit_tv": 0.007,
                "naive_tv": 0.1,
                "modes_all": 328,
                "samples": 2000,
                "distinct": 0.9,
                "floor_kind": "min-TV",
            }
        made.append(row)
    return made


def law(seeds: int, side: int = 0):
    """`law.npz` of a law that is nearly the target."""
    rng = np.random.default_rng(0)
    log_reward = np.sort(rng.uniform(-5, 0, 300))
    noise = rng.normal(0, 0.1, (seeds, 300))
    hist = rng.uniform(0, 1, 40)
    found = {
        "score_edges": np.linspace(0, 1, 41),
        "score_target": hist / hist.sum(),
        "score_law": np.stack([hist / hist.sum()] * seeds),
        "log_reward": log_reward,
        "log_prob": log_reward - 9 + noise,
        "log_z": np.array(9.0),
    }
    if side:
        grid = rng.uniform(0, 1, (side, side))
        found |= {"grid_target": grid / grid.sum(), "grid_law": np.stack([grid / grid.sum()] * seeds)}
    return {k: v.astype(np.float32) for k, v in found.items()}


@pytest.fixture
def make_run(tmp_path):
    """A function that writes a run folder; flags as of `stochflow train`."""

    def make(
        name="run",
        task="tfbind8",
        seeds=3,
        done=True,
        tv=0.02,
        shift=0.0,
        lines=None,
        designs=40,
        with_law=True,
        **settings,
    ):
        path = tmp_path / name
        path.mkdir()
        config = configure(task, seeds=seeds, steps=1000, **settings)
        (path / "config.json").write_text(json.dumps(config.to_dict()))
        lines = rows(seeds, tv=tv, shift=shift, noisy=task == "tfbind8") if lines is None else lines
        (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
        (path / "environment.json").write_text(
            json.dumps(
                {"stochflow": "0.1.0", "python": "3.11", "versions": {"torch": "2.13"}, "device": "cpu", "cores": 2}
            )
        )
        if done:
            (path / "summary.json").write_text(json.dumps(lines[-1] | {"seconds": 75.0}))
            if with_law:
                np.savez_compressed(path / "law.npz", **law(seeds, 8 if task == "grid" else 0))
            with (path / "samples.csv").open("w", newline="") as f:
                writer = csv.writer(f)
                rng = np.random.default_rng(1)
                named = "sequence" if task == "tfbind8" else "state"
                writer.writerow(["id", named, "score", "log_reward", "log_pf"])
                for i in range(designs):
                    what = "".join(rng.choice(list("ACGT"), 8)) if named == "sequence" else f"{i // 8} {i % 8}"
                    writer.writerow([f"design_{i + 1:04d}", what, 1 - i / 100, -i / 50, -9.0])
        return path

    make.rows = rows
    return make
