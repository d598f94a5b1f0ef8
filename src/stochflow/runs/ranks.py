"""A run of several processes under `torchrun`: rank 0 writes the folder, looks and decides; the others learn with it.

Between two iterations the others wait for rank 0's word: "state" (give what is yours, for a checkpoint), "go" (the next iteration),
"end" or "fail". `--ranks apart` is the other way: every rank trains its share of the seeds in a folder of its own, in silence.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.runs.config import Config
from stochflow.training import distributed
from stochflow.training.distributed import Group
from stochflow.training.trainer import Trainer

STREAMS = 7_368_787  # between the random streams of two ranks


class Failed(UserError):
    """Rank 0 gave up; it says itself why."""


def begin(trainer: Trainer, group: Group, seed: int) -> None:
    """From here on this rank draws from its own random stream, and learns with the others."""
    if getattr(trainer.task.oracle, "budget", None):
        raise UserError("--oracle-calls is for one process, which counts: leave torchrun out, or take --oracle-workers")
    trainer.join(group)
    if group.rank > 0:
        torch.manual_seed(seed + STREAMS * group.rank)


def own_folder(path: str | Path) -> Path:
    """The folder of this rank's run: the folder itself or, where ranks trained apart, the one inside it."""
    here = distributed.started()
    inside = Path(path) / f"rank-{0 if here is None else here[0]}"
    return inside if here is not None and (inside / "config.json").exists() else Path(path)


def apart(config: Config, out: str | Path | None) -> tuple[Config, str | Path | None]:
    """This rank's share of the seeds, and its folder; unchanged where there is one process or the ranks learn together."""
    here = distributed.started()
    if here is None or config.train.ranks == "together":
        return config, out
    rank, ranks = here
    seeds = config.train.seeds
    if out is None:
        raise UserError("--ranks apart makes a run folder for each rank inside --out: give --out")
    if seeds < ranks:
        raise UserError(
            f"--seeds {seeds} cannot be spread over {ranks} ranks: give at least {ranks}, or fewer processes"
        )
    first, last = rank * seeds // ranks, (rank + 1) * seeds // ranks
    own = dataclasses.replace(config.train, seed=config.train.seed + first, seeds=last - first)
    return dataclasses.replace(config, train=own), Path(out) / f"rank-{rank}"


def command(path: str | Path, group: Group | None) -> str:
    """How the run is taken up again from the shell."""
    many = "" if group is None else f"torchrun --nproc-per-node {group.ranks} -m "
    return f"{many}stochflow resume {path}"


def check_ranks(state: dict[str, Tensor], group: Group | None, path: str | Path) -> None:
    """A run goes on exactly with as many ranks as before, and so with no other number."""
    was, now = distributed.ranks_in(state), 1 if group is None else group.ranks
    if was != now:
        how = f"torchrun --nproc-per-node {was} -m stochflow" if was > 1 else "stochflow"
        raise UserError(f"{path} was trained by {was} rank(s), but there are {now}: go on with `{how} resume {path}`")


class Lead:
    """What rank 0 says to the others; alone, it says it to nobody."""

    def __init__(self, group: Group | None):
        self.group = group

    def begin(self, path: Path, total: int) -> None:
        if self.group is not None:
            self.group.from_first((path, total))

    def state(self, trainer: Trainer) -> dict[str, Tensor]:
        """The state of all ranks, for a checkpoint."""
        own = trainer.state_dict()
        if self.group is None:
            return own
        self.group.from_first(("state", None))
        return distributed.with_ranks(own, self.group.gather(None)[1:])

    def go_on(self) -> None:
        if self.group is not None:
            self.group.from_first(("go", None))

    def end(self, summary: dict[str, Any]) -> None:
        if self.group is not None:
            self.group.from_first(("end", summary))

    def fail(self) -> None:
        if self.group is not None:
            self.group.from_first(("fail", None))


def follow(trainer: Trainer, group: Group, total: int, every: int, may_fail: bool, owing: bool) -> dict[str, Any]:
    """Learn with rank 0 until it says that this is the end; its summary. `owing`: it first writes what was due before."""
    follower = _Follower(group, may_fail)
    failure: UserError | None = None
    with _stoppable(trainer):
        if owing:
            follower.serve(trainer)
        follower.note_random()
        try:
            trainer.train(total, every, follower.serve)
        except UserError as error:  # of this rank's oracle, or word of another's: rank 0 knows, and saves first
            failure = error
        try:
            while not follower.over:
                follower.serve(trainer)
        except Failed:
            if failure is None or isinstance(failure, distributed.Elsewhere):
                raise
            raise failure from None
    return follower.summary


class _Follower:
    def __init__(self, group: Group, may_fail: bool):
        self.group, self.may_fail = group, may_fail
        self.random: dict[str, Tensor] = {}  # at the start of the iteration in flight, where an oracle may stop it
        self.summary: dict[str, Any] = {}
        self.over = False

    def note_random(self) -> None:
        if self.may_fail:
            self.random = {"random.cpu": torch.get_rng_state()}
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                self.random["random.cuda"] = torch.cuda.get_rng_state()

    def serve(self, trainer: Trainer) -> None:
        """Do what rank 0 says until it says to go on."""
        while True:
            word, said = self.group.from_first()
            if word == "state":
                self.group.gather(distributed.own_state(trainer.state_dict()) | self.random)
                continue
            if word == "fail":
                self.over = True
                raise Failed("rank 0 stopped, and says why")
            self.over, self.summary = word == "end", said or {}
            self.note_random()
            return


class _stoppable:
    """A signal asks for the end between two iterations; `Trainer.train` tells the other ranks."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.before: dict[int, Any] = {}

    def __enter__(self) -> None:
        def stop(number: int, frame: object) -> None:
            self.trainer.stop_requested = True

        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
