"""One stretch of training into a run folder: logs, looks, checkpoints, the stop that was asked for, the final files."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.files.progress import stage
from stochflow.law import picture
from stochflow.law.measure import listable, not_better
from stochflow.law.parts import noise_tables
from stochflow.learn.rollout import rollout
from stochflow.runs import export, ranks
from stochflow.runs.asked import known_objects
from stochflow.runs.atomic import refuse_special
from stochflow.runs.beside import beside, rivals
from stochflow.runs.build import IN_PYTHON, Experiment
from stochflow.runs.folder import Run
from stochflow.scores.oracles import Cached, Spent
from stochflow.training.ahead import Ahead
from stochflow.training.trainer import Trainer
from stochflow.types import Task
from stochflow.worlds.check_task import check_oracle, check_scores
from stochflow.worlds.env import Enumerable

DRAWN = 10_000  # objects in which one without a score is looked for
LONG = 10_000  # decisions an object, from which an iteration is so slow that silence would look like a hang
log = logging.getLogger("stochflow")

OnStart = Callable[[Path, int, int], None]  # the run folder, the step it starts from, the total
OnProgress = Callable[[dict[str, Any], int], None]  # a record of metrics.jsonl, the total


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop, and did, between two iterations and with everything saved."""


class Diverged(UserError):
    """Every seed's loss has left the finite numbers."""


@dataclass(frozen=True)
class Result:
    """What a finished run leaves behind; `summary` is what summary.json holds."""

    path: Path
    summary: dict[str, Any]
    files: list[Path]
    experiment: Experiment

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row per seed and logged step: the columns of metrics.jsonl, with each seed's own values."""
        seeds = self.experiment.config.train.seeds
        return [
            {k: v for k, v in line.items() if k != "seeds"}
            | {"seed": self.experiment.config.train.seed + i}
            | {k: each[i] for k, each in line.get("seeds", {}).items()}
            for line in Run.open(self.path).metrics()
            for i in range(seeds)
        ]

    def sample(self, n: int, seed: int = 0, condition: str = "") -> list[dict[str, Any]]:
        """`n` objects from the averaged policy; `condition` as in `Experiment.sample`."""
        return list(self.experiment.sample(n, seed, condition))


def may_fail(experiment: Experiment) -> bool:
    """Whether the oracle is Python's, and so can raise in the middle of an iteration."""
    return not getattr(experiment.task.oracle, "on_device", False)


def every(experiment: Experiment) -> int:
    """Iterations between two moments at which something may be due."""
    t = experiment.config.train
    return 1 if may_fail(experiment) else math.gcd(t.log_every, t.eval_every, t.save_every)


def joined(stats: dict[str, Any], looked: dict[str, Any]) -> dict[str, Any]:
    """One line of what training noted and what a look found, the seeds' own values of both included."""
    seeds = {**stats.get("seeds", {}), **looked.get("seeds", {})}
    return stats | looked | ({"seeds": seeds} if seeds else {})


class Session:
    """One stretch of training into a run folder: logs, looks, saves, and stops when asked to."""

    def __init__(self, experiment: Experiment, run: Run, on_progress: OnProgress | None, on_start: OnStart | None):
        self.experiment, self.run, self.on_progress, self.on_start = experiment, run, on_progress, on_start
        self.trainer, self.lead = experiment.trainer, ranks.Lead(experiment.trainer.group)
        self.best: float | None = None  # lower is better: TV, or minus the ELBO
        self.finishing = False  # training is over and saved; what is left can be done again
        self.owing = False  # an iteration is done, but the line, look or checkpoint that was due after it is not
        self.beta: float | None = None  # of the target that `best` was measured against, where it is found in training
        self.spent = False  # the budget of oracle calls ended training
        self.random: dict[str, Tensor] = {}  # the random state at the start of the iteration in flight
        self.total = 0
        self.begun = time.monotonic()

    def go(self, total: int) -> Result:
        self.total = total
        self.lead.begin(self.run.path, total)
        if self.on_start is not None:
            self.on_start(self.run.path, self.trainer.steps_done, total)
        horizon = self.experiment.task.env.horizon
        if horizon > LONG:
            log.warning(
                "an object of this task may take %d decisions, and every iteration goes through all of them: an iteration may take minutes; "
                "a smaller --side or --length is quicker",
                horizon,
            )
        try:
            with self._stoppable(), self._settled():
                if self.owing:
                    self._between(self.trainer)
                self._note_random()
                with stage("training, step", total, lambda: self.trainer.steps_done):
                    self._train(total)
                checkpoint = self._save()  # what was learned is safe, whatever comes now
                self.finishing = True
                if self.trainer.stop_requested:
                    raise self._interrupted()
                with stage("training is over, the final look"):
                    done = self._finish(checkpoint)
                self.lead.end(done.summary)
                return done
        except Diverged:
            self.lead.fail()
            raise  # nothing worth keeping has happened since the last checkpoint
        except Interrupted:
            self.lead.fail()
            raise
        except UserError as error:
            where, step = self.run.path, self.trainer.steps_done
            try:
                self._save_at_failure()
                self.lead.fail()
            except Exception:  # the error that stopped us is the one to tell
                before = (
                    f"the last checkpoint in {where} is from before"
                    if self.run.checkpoints()
                    else "no checkpoint was saved"
                )
                raise UserError(f"{error} (stopped at step {step}; {before})") from error
            python = self.experiment.config.task.name == IN_PYTHON
            how = f"experiment.resume({str(where)!r}, task=...)" if python else ranks.command(where, self.trainer.group)
            raise UserError(
                f"{error}; everything is saved in {where}: mend it and go on from step {step} with `{how}`"
            ) from error
        except Exception as error:
            file = self.run.path / "error.txt"
            with contextlib.suppress(OSError, UserError):
                refuse_special(file)
                file.write_text(traceback.format_exc())
                error.written_to = file  # type: ignore[attr-defined]
            if (
                self.trainer.group is None
            ):  # else the other ranks wait for this one's gradient, and cannot hear of a checkpoint
                with contextlib.suppress(Exception):
                    self._save_at_failure()
            raise

    def _train(self, total: int) -> None:
        """Up to the last step, or to where the oracle's budget without the final look's part is spent."""
        oracle, t = self.experiment.task.oracle, self.experiment.config.train
        if not isinstance(oracle, Cached) or not t.oracle_calls:
            self.trainer.train(total, every(self.experiment), self._between)
            return
        oracle.budget = max(0, t.oracle_calls - self.experiment.yardstick.samples * t.seeds)
        if self.trainer.steps_done and oracle.paid > oracle.budget and not self.experiment.yardstick.exact:
            self.spent = True  # a final look has begun on its part, which would not do for the look of a later step
            oracle.budget = t.oracle_calls
            return
        try:
            self.trainer.train(total, every(self.experiment), self._between)
        except Spent:
            torch.set_rng_state(self.random["random.cpu"])  # the iteration in flight has changed nothing else
            if self.trainer.steps_done == 0:
                raise
            self.spent = True
        finally:
            self._settle()  # what is in flight is still within training's part
            oracle.budget = t.oracle_calls

    def _interrupted(self) -> Interrupted:
        done = self.trainer.steps_done
        where = (
            f"interrupted at step {done}" if done < self.total else "interrupted before the final figures were written"
        )
        return Interrupted(
            f"{where}, everything saved: go on with "
            f"`{ranks.command(self.run.path, self.trainer.group)} --steps {self.total}`"
        )

    def _note_random(self) -> None:
        if may_fail(self.experiment):
            self.random = {"random.cpu": torch.get_rng_state()}
            if self.experiment.device.type == "cuda":
                self.random["random.cuda"] = torch.cuda.get_rng_state(self.experiment.device)

    def _save_at_failure(self) -> None:
        """The last whole iteration: until the oracle has answered, the one in flight has changed nothing but the random state."""
        state = self.lead.state(self.trainer)
        if not self.owing:
            state |= self.random
        more = {"owing": True} if self.owing else {}
        self.run.save(self.trainer.steps_done, state, best_so_far=self.best, **more, **self._law())

    def _between(self, trainer: Trainer) -> None:
        """Between two iterations: a log line, a look, a checkpoint, where they are due."""
        t, step = self.experiment.config.train, trainer.steps_done
        last = step == self.total
        self.owing = True
        look = step % t.eval_every == 0 and not last  # the last look, line and checkpoint are those of _finish
        if (step % t.log_every == 0 or look) and not last:
            record = self._stats()
            if look:
                with stage("a look"):
                    record = joined(record, self.experiment.measure())
            self._tell(record)
            if look:
                self._keep_if_best(record)
        if step % t.save_every == 0 and not last:
            self._save()
        self.owing = False
        self._note_random()
        self.lead.go_on()

    def _stats(self) -> dict[str, Any]:
        stats = self.trainer.stats
        if not bool(stats["finite"].any()):
            where = f"the loss is not finite at step {self.trainer.steps_done}"
            try:
                self._check_scores()
            except UserError as error:  # then a smaller --lr would not help
                raise Diverged(f"{where}, because {error}") from error
            kept = (
                f"the checkpoints in {self.run.path} are from before"
                if self.run.checkpoints()
                else "there is no checkpoint yet"
            )
            raise Diverged(f"{where}: lower --lr or --clip and train again; {kept}")
        calls = int(self.trainer.oracle_calls)  # the budget's count is ahead of a checkpoint after a resume
        fixed = {"time": round(time.monotonic() - self.begun, 3), "oracle_calls": calls}
        medians = {
            k: float(np.median(v[torch.isfinite(v)].numpy())) for k, v in stats.items() if bool(torch.isfinite(v).any())
        }
        record: dict[str, Any] = {"step": self.trainer.steps_done, **fixed, **medians}
        if self.experiment.config.train.seeds > 1:  # five digits: a million steps of five seeds stay below 20 MB
            record["seeds"] = {k: [float(f"{x:.5g}") for x in v.tolist()] for k, v in stats.items()}
        return record

    @torch.no_grad()
    def _check_scores(self) -> None:
        """UserError that names an object without a finite score: among random ones, all where they can be listed, or those that
        a policy draws, the one of the last checkpoint and one that takes all moves alike."""
        task, policy = self.experiment.yardstick.task, self.trainer.policy
        check_oracle(task, 512)
        if isinstance(task.env, Enumerable) and listable(task.env):
            for row in range(1 if task.env.contexts is None else len(task.env.contexts)):
                for state in task.env.all_states(row).split(DRAWN):
                    stops = task.env.moves(state)[:, task.env.stop] if task.env.stop is not None else False
                    check_scores(task, state[task.env.complete(state) | stops].to(policy.device))
            return
        kept = self.run.load()
        if kept is not None:
            self.trainer.load_state_dict(kept.tensors)  # nothing of the present weights is kept
            self._check_drawn(task)
        for weights in policy.parameters():
            weights.zero_()
        self._check_drawn(task)

    def _check_drawn(self, task: Task) -> None:
        batch = self.experiment.config.train.batch
        for _ in range(-(-DRAWN // batch)):
            traj = rollout(task, self.trainer.policy, batch)
            check_scores(task, traj.states[-1].flatten(0, 1))

    def _tell(self, record: dict[str, Any]) -> None:
        self.run.log(record)
        if self.on_progress is not None:
            self.on_progress(record, self.total)

    def _keep_if_best(self, record: dict[str, Any]) -> None:
        if record.get("beta") != self.beta:  # figures of another target law do not compare
            self.best, self.beta = None, record.get("beta")
        elbo = record.get("elbo")
        value = record["tv"] if record.get("tv") is not None else (None if elbo is None else -elbo)
        if not not_better(value, self.best):
            self.run.save(
                self.trainer.steps_done, self.lead.state(self.trainer), best=True, best_so_far=value, **self._law()
            )
            self.best = value  # after it is written: where that fails, it is still to be done

    def _law(self) -> dict[str, Any]:
        oracle = self.experiment.task.oracle
        met = {"met": len(oracle.met)} if isinstance(oracle, Cached) else {}
        return met if self.beta is None else {"best_beta": self.beta, **met}

    def _save(self) -> Path:
        return self.run.save(
            self.trainer.steps_done, self.lead.state(self.trainer), best_so_far=self.best, **self._law()
        )

    def _finish(self, checkpoint: Path) -> Result:
        """The figures of the last average, never of the best; then the files a person wants."""
        found = self.experiment.measure(final=True)
        self._tell(joined(self._stats(), found))
        before = self.best
        self._keep_if_best(found)
        if self.best != before:
            checkpoint = self._save()  # its header knows of the final look too, whether or not it was interrupted
        files = [checkpoint, self._write_designs("csv"), self._write_law()]
        if hasattr(self.experiment.task.env, "decode"):
            letters = getattr(self.experiment.task.env, "alphabet", "")
            if isinstance(letters, str) and not export.fits_fasta(letters.lstrip(">;")):
                log.warning("no samples.fasta is written: FASTA cannot hold the letters %r", letters)
            else:
                files.append(self._write_designs("fasta"))
        t = self.experiment.config.train
        if t.beside:
            task = self.experiment.yardstick.task
            start = known_objects(t.start, task.env) if t.start else None
            names = rivals(t.beside)
            found["beside"] = beside(task, names, self.experiment.oracle_calls, t.seed, self.run.path, start)
        if self.experiment.config.chosen:
            found["chosen"] = self.experiment.config.chosen
        found |= {"engine": self.trainer.engines.sentence(), "seconds": round(time.monotonic() - self.begun, 1)}
        files.append(self.run.write("summary.json", found))
        files += [self.run.path / name for name in ("config.json", "environment.json", "metrics.jsonl")]
        return Result(self.run.path, found, files, self.experiment)

    def _write_law(self) -> Path:
        """What the report draws of the law itself."""
        e = self.experiment
        with self.trainer.averaged():
            arrays = picture.law_picture(e.yardstick, e.policy, e.drawn) | noise_tables(e.task, e.dynamics, e.drawn)
        with self.run.file("law.npz") as file:
            picture.save_picture(arrays, file)
        return self.run.path / "law.npz"

    def _write_designs(self, kind: str) -> Path:
        name = f"samples.{kind}"
        with self.run.file(name, text=True) as file:
            export.write_rows(self.experiment.best_designs(), kind, file)
        return self.run.path / name

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        """However it ends, the answers that an oracle still owes are waited for, and kept."""
        try:
            yield
        finally:
            self._settle()

    def _settle(self) -> None:
        for part in self.trainer.source.modules():
            if isinstance(part, Ahead):
                part.settle()

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """The first Ctrl-C (or a scheduler's SIGTERM) ends training between two iterations, and the final look at once, since
        everything is saved by then; a second one ends training at once too."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: object) -> None:
            if self.finishing:
                raise self._interrupted()
            if self.trainer.stop_requested and self.trainer.group is not None:
                return  # torchrun and the terminal both tell us
            if self.trainer.stop_requested:
                kept = self.run.checkpoints()  # each is there whole or not at all
                whole = f"{kept[0].name} is whole" if kept else "there is no checkpoint yet, so that nothing is kept"
                raise KeyboardInterrupt(f"interrupted at once; in {self.run.path} {whole}")
            self.trainer.stop_requested = True
            log.warning("stopping after this step; a second Ctrl-C stops at once")

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
