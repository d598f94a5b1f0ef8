"""stochflow, answering the questions of compare.py; `--export FOLDER` writes the tables that all libraries share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # any optimiser imports it when it is made: before the fork, it counts as import and not as memory of training
from work import HIDDEN, LAYERS, LR, TASKS, resident, serve

import stochflow
from stochflow.law.exact import Graph, target_law
from stochflow.runs.config import configure
from stochflow.runs.experiment import Experiment
from stochflow.runs.tasks import build


def settings(task: str) -> tuple[str, dict[str, Any]]:
    """The shipped task behind a name of `work.TASKS`, without noise."""
    spec = TASKS[task]
    if spec["kind"] == "grid":
        return "grid", {"ndim": spec["ndim"], "side": spec["side"]}
    if spec["kind"] == "bits":
        return "bits", {
            "length": spec["length"] * spec["word"],
            "bits": spec["word"],
            "modes": spec["modes"],
            "beta": 1.0,
        }
    return "tfbind8", {"stick": 0.0}


class Run:
    def __init__(self, tables: dict[str, Any], spec: dict[str, Any]):
        self.spec, self.offset = (
            spec,
            float(TASKS["bits"]["length"] * TASKS["bits"]["word"]) if spec["task"] == "bits" else 0.0,
        )
        self.restart(0)

    def restart(self, seed: int) -> None:
        spec = self.spec
        name, given = settings(spec["task"])
        given |= spec.get("settings", {})
        if "stick" in spec:
            given["stick"] = spec["stick"]
        config = configure(
            name,
            # its default exploration stays on, at its own cost: without it this grid's policy may settle near the start, and short
            # trajectories are quick ones
            **{"lr": LR, "seed": 1000 * seed} | given,
            batch=spec["batch"],
            seeds=spec.get("seeds", 1),
            device=spec["device"],
            threads=spec["threads"],
            net="mlp",
            hidden=HIDDEN,
            layers=LAYERS,
            objective="tb",
        )
        self.made = Experiment(config)
        self.trainer, self.cuda = self.made.trainer, spec["device"] == "cuda"
        self.parameters = sum(p.numel() for p in self.made.policy.parameters()) // config.train.seeds

    @property
    def steps(self) -> int:
        return self.trainer.steps_done

    def train(self, steps: int) -> list[float]:
        self.trainer.train(self.trainer.steps_done + steps)
        return [float(self.trainer.raw_stats[0].median())]  # reading it waits for the device

    @torch.no_grad()
    def logits(self, states: np.ndarray) -> np.ndarray:
        with self.trainer.averaged():  # what one evaluates, samples and saves
            parts = torch.from_numpy(states).to(self.made.device).split(1 << 15)
            return (
                torch.cat([self.made.policy(p.expand(self.made.policy.num_seeds, -1, -1)).forward[0] for p in parts])
                .cpu()
                .numpy()
            )

    def log_rewards(self, states: np.ndarray) -> np.ndarray:
        """The shipped bit task pays exp(bits that agree), which is the peers' exp(-bits that differ) times a constant."""
        state, task = torch.from_numpy(states).to(self.made.device), self.made.task
        return task.reward(task.oracle(state), state, None).cpu().numpy() - self.offset

    def length(self) -> float:
        return float(self.trainer.stats["mean_length"].mean())

    def memory(self) -> int:
        return torch.cuda.max_memory_allocated() if self.cuda else resident()


def export(folder: Path) -> None:
    """States, moves and rewards of every task, by the library whose exact laws are tested against closed forms."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        name, given = settings(task)
        made = build(configure(name, **given).task)
        tables: dict[str, Any] = {}
        if name == "bits":
            few = torch.randint(
                made.env.num_moves, (4096, made.env.state_dim), generator=torch.Generator().manual_seed(0)
            )
            modes = made.oracle.mode_bits
            tables |= {
                "modes": modes.numpy(),
                "objects": few.numpy(),
                "log_rewards": -made.oracle.distances(few).amin(-1).numpy(),
            }
        else:
            graph = Graph(made.env)
            target = target_law(graph, made)
            level = torch.empty(len(graph), dtype=torch.long)
            for depth, which in enumerate(graph.levels):
                level[which] = depth
            ends = graph.terminal
            tables |= {
                "states": graph.states.numpy(),
                "child": graph.child.numpy(),
                "level": level.numpy(),
                "log_reward": target.log_reward.numpy(),
                "stop": np.int64(-1 if made.env.stop is None else made.env.stop),
                "objects": graph.states[ends].numpy(),
                "log_rewards": target.log_reward[ends].numpy(),
            }
        np.savez(folder / f"{task}.npz", **tables)


def versions() -> dict[str, str]:
    return {"stochflow": stochflow.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--export"]:
        export(Path(sys.argv[2]))
    else:
        serve(Run, versions)
