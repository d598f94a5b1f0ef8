"""From a configuration to tensors: the task, the policy, the model of the noise, the objective, the trainer, and how they are looked at.

What runs this into a folder is `experiment`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stochflow.engines.base import Request
from stochflow.engines.choose import walk
from stochflow.errors import UserError, did_you_mean, need_kind
from stochflow.files.reading import shown
from stochflow.law.floors import caution
from stochflow.law.measure import SAMPLES, Yardstick, forked, summarise
from stochflow.law.parts import residual_parts
from stochflow.learn.buffer import Buffer
from stochflow.learn.evaluate import evaluate
from stochflow.learn.objectives import (
    SGFNKL,
    Objective,
)
from stochflow.nets.layers import Trunk
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known
from stochflow.noise.thought_state import augment, step_memory
from stochflow.runs import defaults, tasks
from stochflow.runs.asked import best_asked, figures, known_objects, random_figures
from stochflow.runs.beside import check_beside
from stochflow.runs.condition import Under
from stochflow.runs.config import Config, Train, UserTask
from stochflow.runs.cost import check_law, check_memory, check_step
from stochflow.runs.values import Values, make_dynamics, make_net, make_objective, make_source
from stochflow.scores.answers import append_shared
from stochflow.scores.oracles import Cached, Patient, TextOracle
from stochflow.scores.orders import look_ahead, open_loop_of
from stochflow.scores.rewards import Sharpening
from stochflow.scores.workers import Remote, workers_of
from stochflow.training.ahead import Ahead
from stochflow.training.search.local import LocalSearch
from stochflow.training.search.paths import ways_to
from stochflow.training.search.population import Population
from stochflow.training.search.replay import RankBuffer, RankReplay
from stochflow.training.search.start import Start
from stochflow.training.sources import Mixed, OnPolicy, Source
from stochflow.training.trainer import Iteration, NoiseTraining, Trainer
from stochflow.types import Task, Trajectories
from stochflow.worlds.check import check_env
from stochflow.worlds.check_task import check_channel, check_oracle

log = logging.getLogger("stochflow")
IN_PYTHON = "python:task"  # the name of a task that was handed over as an object and cannot be rebuilt from a folder
DESIGNS = 100  # best objects written at the end
CHUNK = 10_000  # objects sampled together,
NUMBERS = 10_000_000  # or fewer where their ways are long: all states of a batch of them hold this many numbers


def make_task(settings: Any) -> Task:
    """The task that a configuration names."""
    if not isinstance(settings, UserTask):
        return tasks.build(settings)
    if settings.name == IN_PYTHON:
        raise UserError(
            "this run's task was made in Python and cannot be rebuilt from its folder: in Python, `stochflow.runs.experiment` has `resume(path, task=...)` and `open_run(path, task=...)` for it"
        )
    return tasks.user_task(settings)


def lasting(task: Task, settings: Train, before: Task | None = None, made_from: Any = None) -> Task:
    """The task with an oracle in Python asked patiently, by as many workers as are wanted, and once about each text.

    What was answered `before` is known. `made_from`: the settings from which a worker makes the task again; None: it is sent there.
    """
    task = defaults.rewarded(task, settings)
    if not isinstance(task.oracle, TextOracle):
        return task
    batch = settings.batch * settings.seeds  # a look asks about more at once, and would always be late
    patient: TextOracle = Patient(task.oracle, settings.oracle_timeout, settings.oracle_retries)
    if workers_of(settings.oracle_workers)[0]:
        make = None if made_from is None else partial(_patient_oracle, made_from, settings)
        patient = Remote(patient, settings.oracle_workers, make)
    oracle = Cached(patient, at_most=batch if settings.oracle_timeout else 0, part=batch)
    oracle.budget, oracle.on_nan = settings.oracle_calls or None, settings.on_nan
    if settings.oracle_cache:
        oracle.share(settings.oracle_cache)
    if before is not None and isinstance(before.oracle, Cached):
        oracle.go_on_from(before.oracle)
    return task._replace(oracle=oracle)


def from_folder(settings: Train) -> Train:
    """Settings as a run folder names them, which may be a stranger's: no file is made where it says, only one that is there is shared."""
    if settings.oracle_cache and not os.path.isfile(settings.oracle_cache):
        log.warning("the shared answers %s are not there and are left out", shown(settings.oracle_cache))
        return replace(settings, oracle_cache="")
    return settings


def _patient_oracle(made_from: Any, settings: Train) -> TextOracle:
    """The oracle that a worker holds."""
    return Patient(make_task(made_from).oracle, settings.oracle_timeout, settings.oracle_retries)  # type: ignore[arg-type]


def look_size(budget: int, seeds: int) -> int:
    """Objects a seed that the final look draws: few of a budget, which is for the search."""
    return SAMPLES if not budget else max(1, min(100, budget // 20) // seeds)


def check_at_the_door(task: Task) -> None:
    """What a user brought must hold together; asked before a folder is made. The tasks that ship are held by the test suite."""
    if isinstance(task.oracle, Cached) and task.oracle.shared is not None:
        append_shared(task.oracle.shared)  # before anything is paid for
    check_env(task.env)
    check_channel(task.channel, task.env)
    check_oracle(task)


def pick_device(word: str) -> torch.device:
    """`auto` is cuda where there is one, else cpu."""
    need_kind("device", word, str, "auto, cpu or cuda")
    if word not in ("auto", "cpu", "cuda"):
        raise UserError(
            f"there is no device {word!r}{did_you_mean(str(word), ('auto', 'cpu', 'cuda'))}: take auto, cpu or cuda"
        )
    if word == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was asked for, but torch sees no CUDA device: use --device cpu")
    return torch.device("cuda" if word == "cuda" or (word == "auto" and torch.cuda.is_available()) else "cpu")


def _say_memory(t: Train, env: Any, device: torch.device) -> None:
    """Thoughts in the state multiply what a step holds: said before it is held, and refused where it cannot be."""
    positions = env.horizon + 1 if t.net == "transformer" else 1
    needed = step_memory(env, t.seeds, t.batch, t.hidden, t.layers, positions)
    there = (
        torch.cuda.mem_get_info()[1]
        if device.type == "cuda"
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    words = f"--thought-state: a step of {t.seeds} x {t.batch} trajectories holds about {needed / 2**30:.1f} GB"
    if needed > there:
        raise UserError(f"{words}, and this machine has {there / 2**30:.0f} GB: take a smaller --batch")
    if needed > there / 8:
        log.warning("%s; a smaller --batch needs less", words)


class Experiment:
    """A configuration made into tensors: the task, its trainer, and what it is measured against."""

    def __init__(
        self,
        config: Config,
        task: Task | None = None,
        device: str | None = None,
        values: Values = Values(),  # noqa: B008
    ):
        t = config.train
        self.config, self.values = config, values
        self.device = pick_device(device or t.device)
        if t.threads:
            torch.set_num_threads(t.threads)
        self.inner = make_task(config.task) if task is None else task
        self.task = augment(self.inner) if t.thought_state else self.inner
        if t.thought_state:
            _say_memory(t, self.inner.env, self.device)
        check_memory(self.task, t, self.device.type == "cuda")
        check_beside(t.beside, self.task.env)
        limit = t.oracle_calls if isinstance(self.task.oracle, TextOracle) else 0
        self.yardstick = Yardstick(self.task, self.device, t.look or look_size(limit, t.seeds), limit or None)
        if self.yardstick.exact and self.device.type == "cpu":
            check_law(self.task.env, t.seeds)
        if limit and not self.yardstick.exact and t.look * t.seeds >= limit:
            raise UserError(
                f"--look {t.look} leaves nothing of --oracle-calls {limit} to learn from: make the look smaller"
            )
        if isinstance(self.task.reward, Sharpening) and self.yardstick.exact:
            raise UserError(
                "beta auto is for spaces that are too large to list, and this one is listed: give a number, such as beta=3"
            )
        torch.manual_seed(t.seed)  # the run's one stream; networks are initialised from each row's own seed
        rows = [t.seed + i for i in range(t.seeds)]
        objective = values.objective or make_objective(t)
        net, learned = values.net or make_net(t), t.backward == "learned"
        self.policy = Policy(
            self.task.env, net, seeds=rows, learned_backward=learned, back_action=objective.form.back_action
        )
        self.policy.to(self.device)
        if values.net is not None:
            what = "derived from stochflow.nets.layers.Trunk, whose weights are stacked as [seeds, ...]"
            need_kind(f"the trunk {type(self.policy.trunk).__name__}", self.policy.trunk, Trunk, what)
        if objective.memory is not None:
            objective.memory.to(self.device)
        self.dynamics = make_dynamics(values.dynamics, t.dynamics, self.task, self.inner.env, rows).to(self.device)
        off_policy = t.dynamics_off_pol and any(True for _ in self.dynamics.parameters())
        self.trainer = Trainer(
            self.task,
            self.policy,
            self.dynamics,
            objective,
            self._make_source(objective),
            lr=t.lr,
            noise=NoiseTraining(
                t.dynamics_lr,
                t.dynamics_clip,
                self._make_buffer(0.0) if off_policy else None,
                t.dynamics_off_pol_rounds,
                t.dynamics_sample_size,
            ),
            iteration=Iteration(t.clip, compile=t.compile, engine=t.engine),
        )
        chosen = self.trainer.engines
        if self.device.type == "cpu" and chosen.gradient.name == "eager" and values.net is None:
            check_step(self.task, t, objective, chosen.noise.name == "eager" and values.dynamics is None)

    def _make_buffer(self, priority: float) -> Buffer:
        t = self.config.train
        if t.replay_size < t.batch:
            raise UserError(f"--replay-size {t.replay_size} does not hold one --batch of {t.batch}: make it larger")
        return Buffer(self.task.env, t.replay_size, t.seeds, priority).to(self.device)

    def _make_source(self, objective: Objective) -> Source:
        if self.values.source is not None:
            return make_source(self.values.source, self.task, self.policy)
        t, on_policy = self.config.train, objective.on_policy
        replayed = round(t.replay * t.batch)
        if on_policy and replayed:
            raise UserError(
                f"--objective {t.objective} learns from its own fresh trajectories alone: leave out --replay, or take --objective logvar"
            )
        if t.ask_every > 1 and not (t.replay_rank and replayed):
            raise UserError(
                f"--ask-every {t.ask_every} learns from replay in between: add --replay-rank and a --replay"
            )
        searched = t.children if t.search != "none" else 0
        if replayed + searched >= t.batch:
            more = f" and --children {searched}" if searched else ""
            raise UserError(f"--replay {t.replay}{more} of --batch {t.batch} leave no fresh trajectory: lower one")
        if (searched or t.start) and (on_policy or objective.needs & {"log_pf", "log_pa"}):
            raise UserError(
                f"--objective {t.objective} cannot learn from objects that a search found: take tb, db, subtb or logvar"
            )
        temper = objective.temper if t.explore_entropy and isinstance(objective, SGFNKL) else None
        fresh = OnPolicy(
            self.task,
            self.policy,
            t.batch - replayed - searched,
            0.0 if on_policy else t.explore,
            t.explore_tau,
            temper,
            compile=t.compile,
        )
        first: Source = fresh
        if t.lag:
            if getattr(self.task.oracle, "on_device", False):
                raise UserError(
                    f"--lag {t.lag} is for an oracle in Python, and this task's answers at once: leave it out"
                )
            if on_policy:
                raise UserError(f"--objective {t.objective} learns from fresh trajectories alone: leave out --lag")
            if searched or t.start:
                raise UserError(
                    f"--lag {t.lag} lets batches wait for the oracle, and --search and --start ask it at once: leave one out"
                )
            first = Ahead(fresh, self.task, t.lag, self.device)
        source = self._searching(first)
        if replayed == 0:
            return source
        if t.replay_rank:
            best = RankBuffer(self.task.env, t.replay_size, t.seeds).to(self.device)
            return RankReplay(source, best, replayed, t.ask_every)
        return Mixed(source, self._make_buffer(0.5 if t.replay_priority else 0.0), replayed)

    def _searching(self, source: Source) -> Source:
        t = self.config.train
        if t.start:
            source = Start(source, self.task, self.policy, known_objects(t.start, self.task.env))
        if t.search == "none":
            return source
        local = t.children if t.search == "local" else t.children // 2 if t.search == "both" else 0
        if local:
            source = LocalSearch(source, self.task, self.policy, local)
        if t.children - local:
            source = Population(source, self.task, self.policy, t.children - local)
        return source

    # looking ----------------------------------------------------------------------------------------------------

    def measure(self, final: bool = False) -> dict[str, Any]:
        """The figures of the averaged weights at this step; the same step always gives the same figures."""
        t = self.config.train
        with self.trainer.averaged():
            each, known, self.drawn = self.yardstick.measure(self.policy, self.dynamics, self._look_seed(), final)
            if "elbo" in each and "log_flow" in self.trainer.objective.needs:
                each |= residual_parts(self.task, self.policy, self.dynamics, self.drawn)
        each["log_z_learned"] = self.trainer.stats["log_z_learned"]
        if final or self.yardstick.floor_is_quick:
            word = t.objective if self.values.objective is None else ""  # no limit is known of one given in Python
            known |= self.yardstick.floor_figures(word, t.backward)
        if final:
            warning = "" if self.values.objective is not None else caution(t.objective)
            known |= {"caution": warning} if warning else {}
            named = {"objective": t.objective, "net": t.net} | self.values.described()
            known |= {k: named[k] for k in ("objective", "net")} | {"oracle_calls": self.oracle_calls}
            if isinstance(self.task.reward, Sharpening):
                known |= {"law": self.task.reward.describe(), "beta_frozen": bool(self.task.reward.frozen)}
            if isinstance(self.task.oracle, Cached):
                known["without_score"] = self.task.oracle.blank
                known["retried"] = getattr(self.task.oracle.oracle, "retried", 0)
                known["from_cache"] = len(self.task.oracle.free)
        known |= figures(self.task, self.trainer.source)
        if not self.yardstick.exact:
            at_the_door = isinstance(self.config.task, UserTask)
            known |= random_figures(self.task, t, at_the_door, int(self.trainer.oracle_calls))
        if isinstance(self.task.reward, Sharpening):
            known["beta"] = float(self.task.reward.beta)
        return {"step": self.trainer.steps_done, **summarise(each, known)}

    @property
    def oracle_calls(self) -> int:
        """How many different objects an oracle in Python was asked about; of any other, how many objects."""
        oracle = self.task.oracle
        return oracle.paid if isinstance(oracle, Cached) else int(self.trainer.oracle_calls)

    def _look_seed(self) -> int:
        return (self.config.train.seed * 1_000_003 + self.trainer.steps_done + 1) % 2**31

    def sample(self, n: int, seed: int = 0, condition: str = "") -> Iterator[dict[str, Any]]:
        """Rows of `n` objects drawn from the averaged policy through the channel, spread evenly over the seeds.

        `condition`: the values of one context, its number, or values between those of the learned ones (docs/how-to/oracles.md);
        without it conditioned tasks draw under every context alike.
        """
        need_kind(
            "condition", condition, str, "the values of one condition with commas between, or its number, as text"
        )
        under = Under(self.yardstick.task, condition)
        for what, value, least in (("n", n, 1), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
                raise UserError(f"{what} is {value!r}, but it must be a whole number of at least {least}")
        seeds = self.config.train.seeds
        width = len(str(n))
        made = 0
        while made < n:
            batch = min(self._together(), math.ceil((n - made) / seeds))
            with self.trainer.averaged(), forked((seed * 1_000_003 + made) % 2**31, self.device), under.table():
                request = Request(under.task, self.policy, batch, row=under.rows(seeds, batch, self.device))
                rows = self.rows(*under.scored(walk(request, self.config.train.engine).trajectories))
            for row in with_prospects(self.task.oracle, rows[: n - made]):
                made += 1
                yield {"id": f"design_{made:0{max(4, width)}d}", **under.told(row)}

    def _together(self) -> int:
        """Objects a seed drawn at once: what a batch takes is bounded whatever the number of seeds and the length."""
        env = self.task.env
        return max(1, min(CHUNK, NUMBERS // (env.horizon * env.state_dim)) // self.config.train.seeds)

    @torch.no_grad()
    def rows(self, traj: Trajectories, task: Task | None = None) -> list[dict[str, Any]]:
        """One row per object: what it is, its score, its log-reward, and the log-probability of the way it was built."""
        task = task or self.yardstick.task
        terms = evaluate(task, self.policy, Known(task.env, task.channel), traj, None, frozenset({"log_move"}))
        assert terms.log_move is not None

        def flat(x: Tensor) -> list[Any]:  # [S, B] -> rows in the order in which the seeds take turns
            return x.transpose(0, 1).flatten(0, 1).cpu().tolist()

        log_pf, states = terms.log_move.double().sum(0), traj.states[-1]
        if hasattr(task.env, "decode"):
            what, named = task.env.decode(states.transpose(0, 1)), "sequence"
        else:
            what, named = flat(states), "state"
        values = zip(what, flat(traj.score), flat(terms.log_reward), flat(log_pf), strict=True)
        found = [
            {named: w, "score": round(s, 6), "log_reward": round(r, 6), "log_pf": round(p, 6)} for w, s, r, p in values
        ]
        if task.env.contexts is None:
            return found
        return [{**row, "condition": number} for row, number in zip(found, flat(states[..., 0]), strict=True)]

    def best_designs(self) -> list[dict[str, Any]]:
        """The best different objects ever asked about, then the best of those last drawn (`origin` says which), by score."""
        with self.trainer.averaged():
            drawn = self._ordered([r for r in self.rows(self.drawn) if not math.isnan(r["score"])])
            found = best_asked(self.task, self.trainer.source, DESIGNS)
            asked = [] if found is None else self._ordered(self.rows(self._as_trajectories(*found)))
        asked, drawn = (with_prospects(self.task.oracle, rows) for rows in (asked, drawn))
        rows = [(r, "asked") for r in asked] + [(r, "draw") for r in drawn]
        return [{"id": f"design_{i:04d}", **r, "origin": origin} for i, (r, origin) in enumerate(rows, 1)]

    def _ordered(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        different = {
            (str(next(iter(r.values()))), r.get("condition")): r for r in rows
        }  # one object may be good under one condition only
        return sorted(different.values(), key=lambda r: (-r["score"], str(next(iter(r.values())))))[:DESIGNS]

    def _as_trajectories(self, states: Tensor, scores: Tensor) -> Trajectories:
        """Ways to objects [n, D], the same for the first seed alone: one row per object."""
        with forked(0, self.device):
            seeds = self.policy.num_seeds
            way = ways_to(self.task, self.policy, states.to(self.device).expand(seeds, -1, -1))
        return way._replace(score=scores.to(way.score).expand(seeds, -1))


def with_prospects(oracle: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of orders with the chance that each is made exactly and the 10 % quantile of its scores; other rows as they are."""
    loop = open_loop_of(oracle)
    if loop is None or not rows:
        return rows
    texts = list(dict.fromkeys(str(r["sequence"]) for r in rows))
    found = look_ahead(loop, texts)
    of = {t: (e, q) for t, e, q in zip(texts, found.exact.tolist(), found.low.tolist(), strict=True)}
    return [
        r
        | {
            "made_exact": round(of[r["sequence"]][0], 6),
            "made_low": round(of[r["sequence"]][1], 6),
            "makings": found.makings,  # simulated for each; 0: exact
        }
        for r in rows
    ]
