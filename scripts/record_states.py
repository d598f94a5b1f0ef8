"""The state after 200 steps of each engine, task, objective and noise, so that two versions of the code can be compared bit by bit.

    PYTHONPATH=OLD/src python scripts/record_states.py /tmp/old.safetensors
    PYTHONPATH=src python scripts/record_states.py /tmp/new.safetensors
    python scripts/record_states.py --compare /tmp/old.safetensors /tmp/new.safetensors

It runs with the flat modules of the first versions too. `single` makes one iteration after the other, `many` several in a call.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import Any

import torch

STEPS, BEFORE = 200, 20
ENGINES, TASKS, OBJECTIVES, STICKS = ("eager", "single", "many"), ("grid", "tfbind8"), ("tb", "db"), (0.0, 0.25)


def trainer_of(engine: str, settings: dict[str, Any], task: str) -> Any:
    try:
        from stochflow.engines.numba import many
        from stochflow.runs.build import Experiment
        from stochflow.runs.config import configure

        many.BEFORE = BEFORE
        return Experiment(configure(task, **settings, engine="eager" if engine == "eager" else "numba")).trainer
    except ModuleNotFoundError:
        from stochflow import cpu_recording
        from stochflow.build import Experiment
        from stochflow.config import configure

        cpu_recording.BEFORE = BEFORE
        trainer = Experiment(configure(task, **settings)).trainer
        if engine == "eager":
            trainer._noise, trainer.source.traces, trainer.source.kernel = None, False, False
        return trainer


def ready(trainer: Any) -> bool:
    """Whether what makes several iterations at once is compiled."""
    made = getattr(getattr(trainer, "_recording", None), "compiled", None)
    if made is not None:
        return made.kept is None or bool(made.look())
    kept = getattr(trainer.source, "traces", None) or getattr(trainer.source, "trace", None)
    found = getattr(kept, "many", None)
    return found is None or bool(getattr(found, "ready", True))


def state(engine: str, task: str, objective: str, stick: float) -> dict[str, torch.Tensor]:
    settings = {
        "stick": stick,
        "objective": objective,
        "batch": 16,
        "net": "mlp",
        "hidden": 64,
        "seeds": 2,
        "lr": 2e-3,
        "threads": 1,
    }
    trainer = trainer_of(engine, settings, task)
    if engine != "many":
        for k in range(STEPS):
            trainer.iterate(note=k == STEPS - 1)
        return trainer.state_dict()
    trainer.train(BEFORE + 2, BEFORE + 2)
    begun = time.monotonic()
    while not ready(trainer) and time.monotonic() - begun < 300:
        time.sleep(0.2)
    trainer.train(STEPS, STEPS)
    return trainer.state_dict()


def record(path: str) -> None:
    from safetensors.torch import save_file

    found = {}
    for case in itertools.product(ENGINES, TASKS, OBJECTIVES, STICKS):
        name = "-".join(map(str, case))
        found |= {f"{name}/{key}": value.contiguous() for key, value in state(*case).items()}
        print(name, flush=True)
    save_file(found, path)


def compare(paths: list[str]) -> None:
    from safetensors.torch import load_file

    one, other = map(load_file, paths)
    cases = dict.fromkeys(key.split("/")[0] for key in one)
    for case in cases:
        keys = {key for key in one if key.startswith(f"{case}/")} & set(other)
        missing = {key for key in {*one, *other} if key.startswith(f"{case}/")} - keys
        differing = {
            key: float((one[key].double() - other[key].double()).abs().max())
            for key in keys
            if not torch.equal(one[key], other[key])
        }
        random = [key.split("/")[1] for key in differing if "random" in key]
        worst = max(differing, key=lambda key: differing[key], default="")
        words = (
            "the same bits"
            if not differing
            else f"{len(differing)} of {len(keys)} differ, at most by {differing[worst]:.2g} in {worst.split('/')[1]}"
        )
        print(
            f"{case}: {words}"
            + (f"; {', '.join(random)}" if random else "")
            + (f"; in one alone: {sorted(k.split('/')[1] for k in missing)}" if missing else "")
        )


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("paths", nargs="+")
    a.add_argument("--compare", action="store_true")
    given = a.parse_args()
    if given.compare:
        compare(given.paths)
    else:
        record(given.paths[0])


if __name__ == "__main__":
    sys.exit(main())
