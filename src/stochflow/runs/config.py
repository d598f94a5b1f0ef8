"""The settings of commands and tasks, as frozen dataclasses: the CLI's flags, the Python API and `config.json` alike.

No torch here: `stochflow --help` reads this module and answers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from stochflow import __version__
from stochflow.errors import UserError, as_word, did_you_mean
from stochflow.runs import ranges
from stochflow.runs.ranges import check_numbers

FORMAT = 2  # of config.json; a reader refuses a newer one. 2: joint words mean the exact posterior
PUBLISHED = "-published"  # ends the words of the published joint form, which those words without it meant in format 1

OBJECTIVES = {
    "tb": "trajectory balance, marginal over actions",
    "db": "detailed balance, marginal over actions",
    "subtb": "sub-trajectory balance, marginal over actions",
    "logvar": "variance of the trajectory residual: no log Z to learn",
    "stb": "stochastic trajectory balance, joint over actions with the policy's exact posterior: equals tb",
    "sdb": "stochastic detailed balance, joint over actions with the policy's exact posterior: equals db",
    "ssubtb": "stochastic sub-trajectory balance, joint over actions with the exact posterior: equals subtb",
    "stb-head": "stb with a posterior learned by likelihood: for more actions than can be listed; slower",
    "sdb-head": "sdb with a posterior learned by likelihood: for more actions than can be listed; slower",
    "ssubtb-head": "ssubtb with a posterior learned by likelihood: for more actions than can be listed; slower",
    "stb-published": "stb with a posterior learned through the residual, as published; unsound, for comparison",
    "sdb-published": "sdb with a posterior learned through the residual, as published; unsound, for comparison",
    "ssubtb-published": "ssubtb with a posterior learned through the residual; unsound, for comparison",
    "flow-kl": "detached state-level flow KL: reaches the forward-KL optimum where the target is out of reach",
    "sgfn-kl": "stochastic detailed balance + kl_weight x entropy ratio x flow KL",
    "sgfn-kl-gamma": "the same with the entropy ratio averaged over gamma = 1/4, 1/2, 3/4",
    "sgfn-kl-published": "sgfn-kl over sdb-published; unsound, for comparison",
    "sgfn-kl-gamma-published": "sgfn-kl-gamma over sdb-published; unsound, for comparison",
    "kl": "reverse KL of whole trajectories by score function: on-policy only, so without exploration",
    "naive-tb": "baseline: trajectory balance that takes the realised move for its own choice",
    "naive-db": "baseline: detailed balance that takes the realised move for its own choice",
    "intended-tb": "baseline: trajectory balance that takes its action for what happened",
    "intended-db": "baseline: detailed balance that takes its action for what happened",
}
Objective = Literal[
    "tb", "db", "subtb", "logvar", "stb", "sdb", "ssubtb", "stb-head", "sdb-head", "ssubtb-head", "stb-published", "sdb-published", "ssubtb-published",
    "flow-kl", "sgfn-kl", "sgfn-kl-gamma", "sgfn-kl-published", "sgfn-kl-gamma-published", "kl", "naive-tb", "naive-db", "intended-tb", "intended-db"
]  # fmt: skip
Noise = Literal["slip", "neighbour", "confusion"]


ALIASES = {  # what the literature and other libraries call an objective
    "sgfn-db": "sdb",
    "sgfn-tb": "stb",
    "sgfn": "sdb",
    "detailed-balance": "db",
    "trajectory-balance": "tb",
    "sub-trajectory-balance": "subtb",
    "vargrad": "logvar",
    "log-variance": "logvar",
}


@dataclass(frozen=True)
class Train:
    """How to train; the same for every task."""

    steps: int = 2000
    """total number of training iterations"""
    batch: int = 64
    """trajectories per iteration"""
    lr: float = 2e-3
    """learning rate of policy and flow"""
    objective: Objective = "db"
    """what is minimised; `stochflow tasks` lists them, and those that end in -published are unsound, for comparison"""
    seed: int = 0
    """the run's seed; row i of --seeds starts from seed + i"""
    seeds: int = 1
    """how many independent runs to train at once"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one"""
    net: Literal["mlp", "lookup", "transformer", "gru", "lstm"] = "mlp"
    """the policy's trunk; lookup embeds whole prefixes, for short strings; transformer, gru and lstm read strings of any length"""
    hidden: int = 128
    """width of the trunk"""
    layers: int = 2
    """hidden layers of the trunk"""
    heads: int = 4
    """attention heads of --net transformer; they share --hidden"""
    backward: Literal["learned", "uniform"] = "learned"
    """backward policy; strings need none"""
    explore: float = 0.1
    """probability of a uniform action at the start; falls as explore / (1 + step / explore_tau)"""
    explore_tau: float = 100.0
    """steps after which exploration has halved"""
    explore_entropy: bool = False
    """while training, draw from the policy flattened by the entropy ratio, pi^(1/r), with --objective sgfn-kl"""
    clip: float = 10.0
    """largest gradient norm of policy and flow, for each seed"""
    subtb_lambda: float = 0.9
    """geometric weight of longer sub-trajectories"""
    gamma: float = 0.5
    """mixing weight of the entropy ratio r = high / (gamma high + (1 - gamma) low), for --objective sgfn-kl; 1 makes r = 1"""
    kl_weight: float = 1.0
    """weight of the KL term of --objective sgfn-kl and sgfn-kl-gamma"""
    entropy_average: float = 0.0
    """decay of the moving average of the entropy band, for small batches; 0: each batch by itself"""
    replay: float = 0.0
    """fraction of each batch that comes from the replay buffer"""
    replay_size: int = 10_000
    """trajectories the replay buffer keeps"""
    replay_priority: bool = False
    """draw half of the replayed trajectories from the best tenth by score"""
    replay_rank: bool = False
    """keep the best different objects for ever instead of the latest, and draw the better ones more often"""
    search: Literal["none", "population", "local", "both"] = "none"
    """objects beside the policy's own draws: a genetic population of strings, or local search by going back and forth"""
    children: int = 48
    """how many of each batch come from the search"""
    ask_every: int = 1
    """ask the oracle in one iteration of so many; the others learn from the replay alone (with --replay-rank)"""
    start: str = ""
    """FASTA file of known sequences: they are asked about first, and the search begins from them"""
    dynamics: Literal["neural", "tabular", "known", "thought"] = "neural"
    """how the noise is modelled; ignored where there is none; thought reads all earlier actions and moves"""
    thought_state: bool = False
    """put the intended actions into the state of policy, flow and backward policy (short strings of fixed length); use --objective tb"""
    dynamics_lr: float = 2e-3
    """learning rate of the neural dynamics"""
    dynamics_clip: float = 10.0
    """largest gradient norm of the neural dynamics, for each seed"""
    dynamics_off_pol: bool = False
    """train the dynamics from a replay buffer instead of the current batch"""
    dynamics_off_pol_rounds: int = 1
    """dynamics updates per iteration, with --dynamics-off-pol"""
    dynamics_sample_size: int = 16
    """trajectories per dynamics update, with --dynamics-off-pol"""
    log_every: int = 100
    """iterations between two lines of metrics.jsonl"""
    eval_every: int = 500
    """iterations between two exact evaluations"""
    save_every: int = 500
    """iterations between two checkpoints"""
    oracle_timeout: float = 0.0
    """seconds to wait for an oracle in Python to answer about one --batch of each seed; 0: for ever"""
    oracle_retries: int = 2
    """how often an oracle in Python that raises, or is late, is tried again before the run stops"""
    oracle_workers: str = ""
    """ask an oracle in Python by several at once: N processes, ray or ray:N (RAY_ADDRESS or a local cluster, which takes 15 s and 0.8 GB to start: from about 10 s of oracle time per batch on)"""
    lag: int = 0
    """batches that an oracle in Python may have in flight while training goes on with earlier ones; 0: it is waited for"""
    oracle_calls: int = 0
    """how many different objects an oracle in Python may be asked about in all, looks included; training ends there; 0: no limit"""
    look: int = 0
    """objects per seed that the final look draws; 0: 2000, or within --oracle-calls a twentieth of them, at most 100"""
    oracle_cache: str = ""
    """file of an oracle's answers that runs share: what it holds is not asked again and does not count"""
    beside: str = ""
    """rivals that get as many oracle calls of their own after the run: random, ga, mcmc, with commas between"""
    on_nan: Literal["stop", "skip", "floor"] = "stop"
    """an object without a score: stop the run, leave it out of what is learned, or give it the lowest score seen"""
    compile: bool = False
    """compile the loss and, where no kernel walks, a rollout's step (torch.compile; needs a C compiler, about half a minute at the start, and resumes alike but not bit for bit)"""
    threads: int = 1
    """CPU threads; 0 leaves torch's own choice. Several seeds share them"""
    ranks: Literal["together", "apart"] = "together"
    """several processes started by torchrun: together average their gradients, each with a --batch of its own; apart share out the seeds, a folder for each"""
    engine: Literal["auto", "eager", "numba", "cuda"] = "auto"
    """how an iteration is computed: auto takes the fastest engine that covers it; `stochflow doctor TASK` says which and why"""

    def check(self) -> None:
        """Refuse what cannot be trained with; `Config` calls it, and so nothing else needs to."""
        for name, hint in get_type_hints(Train).items():
            _check_type("--" + name.replace("_", "-"), getattr(self, name), hint)
        at_least_one = "steps ask_every batch seeds hidden layers heads replay_size dynamics_off_pol_rounds dynamics_sample_size log_every eval_every save_every"
        for name in at_least_one.split():
            self._need(name, getattr(self, name) >= 1, "a whole number of at least 1")
        for name in ("lr", "explore_tau", "clip", "subtb_lambda", "dynamics_lr", "dynamics_clip"):
            self._need(name, getattr(self, name) > 0, "a number above 0")
        self._need("gamma", 0 < self.gamma <= 1, "above 0 and at most 1 (1 makes the entropy ratio 1)")
        self._need(
            "explore_entropy",
            not self.explore_entropy or self.objective.startswith("sgfn-kl"),
            "left out unless --objective is sgfn-kl",
        )
        self._need("kl_weight", self.kl_weight >= 0, "0 or more")
        self._need("entropy_average", 0 <= self.entropy_average < 1, "at least 0 and below 1")
        self._need("explore", 0 <= self.explore <= 1, "a probability between 0 and 1")
        self._need("replay", 0 <= self.replay < 1, "a fraction of at least 0 and below 1")
        for name in ("oracle_timeout", "oracle_retries", "oracle_calls", "look", "threads", "lag"):
            self._need(name, getattr(self, name) >= 0, "0 or more")
        self._need(
            "batch",
            self.objective != "logvar" or self.batch >= 2,
            "at least 2 with --objective logvar, whose log Z is the batch's mean",
        )
        self._need("children", self.search == "none" or self.children >= 2, "at least 2 with --search")
        self._need("seed", 0 <= self.seed < 2**31, "a whole number from 0 to 2147483647")
        check_numbers(dataclasses.asdict(self), ranges.TRAIN)

    def _need(self, name: str, good: bool, want: str) -> None:
        value = getattr(self, name)
        if not good or (isinstance(value, float) and not math.isfinite(value)):
            finite = " and finite" if isinstance(value, float) and math.isinf(value) else ""
            raise UserError(f"--{name.replace('_', '-')} is {value}, but it must be {want}{finite}")


@dataclass(frozen=True)
class GridTask:
    """Hypergrid with bright corners: coordinates grow one step at a time, STOP anywhere."""

    ndim: int = 2
    """dimensions"""
    side: int = 8
    """cells along each dimension"""
    base: float = 1e-3
    """reward away from the corners"""
    stick: float = 0.0
    """probability that the world ignores the intended action"""
    noise: Noise = "slip"
    """what happens then: a uniform legal move or a neighbouring one; or confusion: a table is the whole law, without --stick"""
    confusion: str = ""
    """CSV of an action x move table, for --noise confusion"""

    name: ClassVar[str] = "grid"
    # in trials of one seed each (2-D and 4-D, stick 0, .25, .5) trajectory balance was ahead of detailed balance here
    train: ClassVar[dict[str, Any]] = {"objective": "tb", "lr": 5e-3}


@dataclass(frozen=True)
class TFBind8Task:
    """DNA 8-mers that bind a transcription factor: 65,536 measured sequences."""

    stick: float = 0.25
    """probability that the synthesiser appends a uniform base instead of the intended one"""
    beta: float = 3.0
    """reward exponent: R = max(score, floor)^beta"""
    floor: float = 1e-3
    """smallest score"""
    ramp: float = 0.0
    """steps over which the exponent grows from 1 to beta (the sources' l2r); 0: at once"""
    table: str = "SIX6_REF_R1"
    """which table: one that ships, or the path of one made by scripts/build_tfbind8.py"""
    noise: Noise = "slip"
    """what the noise does: a uniform letter, a neighbouring one, or a draw from --confusion"""
    confusion: str = ""
    """CSV of an action x move table, for --noise confusion"""
    open_loop: bool = False
    """sample whole orders: the noise comes after, so an order's score is what is expected of the string that is made; --feedback is the opposite, and what is done unless told"""

    name: ClassVar[str] = "tfbind8"
    train: ClassVar[dict[str, Any]] = {"net": "lookup", "batch": 1024, "lr": 5e-3, "hidden": 64, "steps": 2000}


@dataclass(frozen=True)
class BitsTask:
    """Bit sequences drawn to known modes: R = exp(-beta * bits that differ from the nearest)."""

    length: int = 120
    """bits in a sequence"""
    bits: int = 4
    """bits in a token"""
    modes: int = 60
    """how many modes there are"""
    beta: float = 1.0
    """what a wrong bit costs"""
    mode_seed: int = 0
    """seed of the modes"""
    stick: float = 0.0
    """probability that a uniform token is appended instead of the intended one"""
    noise: Noise = "slip"
    """what the noise does: a uniform token, a neighbouring one, or a draw from --confusion"""
    confusion: str = ""
    """CSV of an action x move table, for --noise confusion"""

    name: ClassVar[str] = "bits"
    train: ClassVar[dict[str, Any]] = {"net": "transformer", "hidden": 64, "batch": 32, "lr": 1e-3, "objective": "tb"}


@dataclass(frozen=True)
class GCTask:
    """DNA with a GC content on demand, at a temperature on demand: one condition for every pair of the two."""

    length: int = 6
    """letters"""
    targets: str = "0.2,0.5,0.8"
    """GC contents that may be asked for"""
    betas: str = "4,12"
    """inverse temperatures that may be asked for"""
    stick: float = 0.1
    """probability that a uniform letter is appended instead of the intended one"""
    noise: Noise = "slip"
    """what the noise does: a uniform letter, a neighbouring one, or a draw from --confusion"""
    confusion: str = ""
    """CSV of an action x move table, for --noise confusion"""

    name: ClassVar[str] = "gc"
    train: ClassVar[dict[str, Any]] = {"batch": 256}


@dataclass(frozen=True)
class PeptideTask:
    """Peptides of up to 50 residues that look antimicrobial to a network trained on shipped data."""

    min_length: int = 10
    """shortest peptide"""
    beta: float | Literal["auto"] = "auto"
    """reward exponent: R = max(score, floor)^beta; auto: R = exp(beta * score) with a beta found while training"""
    floor: float = 1e-3
    """smallest score"""
    ramp: float = 0.0
    """steps over which the exponent grows from 1 to beta; 0: at once"""
    stick: float = 0.0
    """probability that a uniform residue is appended instead of the intended one"""
    noise: Noise = "slip"
    """what the noise does: a uniform residue, a neighbouring one, or a draw from --confusion"""
    confusion: str = ""
    """CSV of an action x move table, for --noise confusion"""
    open_loop: bool = False
    """sample whole orders: the noise comes after, so an order's score is what is expected of the string that is made; --feedback is the opposite, and what is done unless told"""

    name: ClassVar[str] = "peptide"
    train: ClassVar[dict[str, Any]] = {}  # chosen by `runs.defaults`


@dataclass(frozen=True)
class RNATask:
    """RNA that folds into a structure, by ViennaRNA (extra [rna])."""

    structure: str = "((((....))))..((((....))))"
    """the structure wanted, in dots and brackets"""
    beta: float | Literal["auto"] = "auto"
    """reward exponent: R = max(score, floor)^beta; auto: R = exp(beta * score) with a beta found while training"""
    floor: float = 1e-2
    """smallest score"""
    ramp: float = 0.0
    """steps over which the exponent grows from 1 to beta; 0: at once"""
    stick: float = 0.0
    """probability that a uniform letter is appended instead of the intended one"""
    noise: Noise = "slip"
    """what the noise does: a uniform letter, a neighbouring one, or a draw from --confusion"""
    confusion: str = ""
    """CSV of an action x move table, for --noise confusion"""
    open_loop: bool = False
    """sample whole orders: the noise comes after, so an order's score is what is expected of the string that is made; --feedback is the opposite, and what is done unless told"""

    name: ClassVar[str] = "rna"
    train: ClassVar[dict[str, Any]] = {}  # chosen by `runs.defaults`


TASKS: dict[str, type] = {t.name: t for t in (GridTask, TFBind8Task, BitsTask, GCTask, PeptideTask, RNATask)}


@dataclass(frozen=True)
class UserTask:
    """A task of the user's own: the function `module:function`, and the keyword arguments it is called with."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    # who named it: the caller, a file, a file whose task the user has named again, or one that is trusted (see `trust.agreed`)
    origin: Literal["caller", "file", "agreed", "trusted"] = field(default="caller", compare=False, repr=False)

    train: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        if "name" in self.settings:
            raise UserError(
                f'the parameter "name" of {self.name} stands for the task itself: rename it in the function'
            )

    def agreed(self, trusted: bool = False) -> UserTask:
        """The same, allowed to be imported and called; `trusted`: with shell commands among its settings, too."""
        return dataclasses.replace(self, origin="trusted" if trusted else "agreed")


@dataclass(frozen=True)
class Config:
    """A whole run: saved as `config.json` in the run folder and read back from it."""

    task: Any
    train: Train = field(default_factory=Train)
    command: str = "train"
    values: dict[str, str] = field(default_factory=dict)  # what Python gave as objects instead of words, described
    chosen: str = ""  # what was chosen for the task where nobody asked for anything, and why

    def __post_init__(self) -> None:
        self.train.check()
        if dataclasses.is_dataclass(self.task) and not isinstance(self.task, UserTask | type):
            for name, hint in get_type_hints(type(self.task)).items():
                if hasattr(self.task, name):
                    _check_type("--" + name.replace("_", "-"), getattr(self.task, name), hint)
            own = ranges.TASKS.get(getattr(self.task, "name", ""), {})
            check_numbers(dataclasses.asdict(self.task), ranges.OF_ALL_TASKS | own)

    def to_dict(self) -> dict[str, Any]:
        """What `config.json` holds."""
        return {
            "format": FORMAT,
            "version": __version__,
            "command": self.command,
            "task": {
                "name": self.task.name,
                **(kept(self.task.settings) if isinstance(self.task, UserTask) else dataclasses.asdict(self.task)),
            },
            "train": dataclasses.asdict(self.train),
            **({"values": self.values} if self.values else {}),
            **({"chosen": self.chosen} if self.chosen else {}),
        }

    @staticmethod
    def from_dict(data: Any, where: str = "the configuration") -> Config:
        """Read it back; what is unknown, mistyped or from a newer version is named."""
        if not isinstance(data, dict) or not isinstance(data.get("task"), dict) or "name" not in data["task"]:
            raise UserError(f'{where} is not a configuration: it needs {{"task": {{"name": ...}}, "train": {{...}}}}')
        if not isinstance(data.get("format", FORMAT), int) or data.get("format", FORMAT) > FORMAT:
            raise UserError(
                f"{where} has format {data['format']}, but stochflow {__version__} reads up to {FORMAT}: upgrade stochflow"
            )
        _refuse_unknown(data, ["format", "version", "command", "task", "train", "values", "chosen"], where)
        train = data.get("train", {})
        if not isinstance(train, dict):
            raise UserError(f'{where}: "train" must be an object of settings, not {train!r}')
        if data.get("format", FORMAT) < 2:
            train = _as_published(train)
        own = dict(data["task"])
        task = task_of(str(own.pop("name")), own, f"{where}, task")
        if isinstance(task, UserTask):
            task = dataclasses.replace(task, origin="file")
        values = data.get("values", {})
        if not isinstance(values, dict) or not all(isinstance(v, str) for v in values.values()):
            raise UserError(f'{where}: "values" must be an object of texts, not {values!r}')
        return Config(
            task,
            train_for(task, train, f"{where}, train"),
            str(data.get("command", "train")),
            values,
            str(data.get("chosen", "")),
        )


def _as_published(train: dict[str, Any]) -> dict[str, Any]:
    """Settings of format 1, where the joint words meant the published form."""
    word = train.get("objective")
    known = isinstance(word, str) and word + PUBLISHED in OBJECTIVES
    return {**train, "objective": f"{word}{PUBLISHED}"} if known else train


def kept(value: Any) -> Any:
    """A setting of a user's function as JSON keeps it; `tasks.as_meant` gives it back by the function's annotations."""
    if isinstance(value, dict):
        return {k: kept(v) for k, v in value.items()}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [kept(v) for v in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def configure(task: str | Any, /, **settings: Any) -> Config:
    """A configuration from a task's name (or its dataclass) and any of its and the training's settings, as the command takes them."""
    training = [f.name for f in dataclasses.fields(Train)]
    own = {k: v for k, v in settings.items() if k not in training}
    rest = {k: v for k, v in settings.items() if k in training}
    if not isinstance(task, str):
        _refuse_unknown(own, training, "train")
    elif task in TASKS:
        fields = [f.name for f in dataclasses.fields(TASKS[task])]
        _refuse_unknown(own, [*fields, *training], f"the settings of {task}")
    if not isinstance(task, (str, UserTask, *TASKS.values())):
        raise UserError(f"{task!r} is no task: give a task's name, its settings, or a Task")
    made = task_of(task, own) if isinstance(task, str) else task
    refuse_idle_stick(made, own)
    return Config(made, train_for(made, rest))


def refuse_idle_stick(task: Any, given: Iterable[str]) -> None:
    """A UserError where `stick` is among the settings given and a confusion table is the whole law.

    Run folders hold every setting, given or not, so what is read from one is not held to this.
    """
    if "stick" in given and not isinstance(task, UserTask) and getattr(task, "noise", "") == "confusion":
        raise UserError(
            "--stick and --noise confusion exclude one another: the table is the whole law of what happens, so leave --stick out"
        )


def task_of(name: str, settings: dict[str, Any], where: str = "task") -> Any:
    """The settings of a task: a dataclass of this module, or a `UserTask` for `module:function`."""
    if ":" in name:
        return UserTask(name, settings)
    return _from_keys(find_task(name), settings, where)


def train_for(task: Any, settings: dict[str, Any], where: str = "train") -> Train:
    """How to train this task: its own defaults, then these settings."""
    return _from_keys(Train, {**task.train, **settings}, where)


def find_task(name: str) -> Any:
    """The dataclass of a task that ships."""
    if name not in TASKS:
        hint = did_you_mean(name, TASKS)
        raise UserError(
            f'there is no task "{name}"{hint}: `stochflow tasks` lists them, and your own is given as my_module:my_function'
        )
    return TASKS[name]


def _from_keys(cls: Any, settings: dict[str, Any], where: str) -> Any:
    names = [f.name for f in dataclasses.fields(cls)]
    _refuse_unknown(settings, names, where)
    hints = get_type_hints(cls)
    for key, value in settings.items():
        _check_type(f'{where}: "{key}"', value, hints[key])
    return cls(**settings)


def _refuse_unknown(settings: dict[str, Any], known: list[str], where: str) -> None:
    for key in settings:
        if key not in known:
            raise UserError(f'{where}: "{key}" is not a setting{did_you_mean(key, known)}')


def _check_type(what: str, value: Any, hint: Any) -> None:
    """Refuse a value of the wrong kind; only plain kinds are checked."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            words = ", ".join(map(str, get_args(hint)))
            alias = ALIASES.get(as_word(str(value)), "")
            meant = did_you_mean(alias if alias in get_args(hint) else str(value), map(str, get_args(hint)))
            raise UserError(f"{what} is {value!r}{meant}, but it must be one of {words}")
        return
    if isinstance(hint, types.UnionType) or get_origin(hint) is Union:
        kinds = get_args(hint)
        for kind in kinds:
            with contextlib.suppress(UserError):
                _check_type(what, value, kind)
                return
        named = [repr(w) for kind in kinds if get_origin(kind) is Literal for w in get_args(kind)]
        raise UserError(f"{what} is {value!r}, but it must be a number or {' or '.join(named)}")
    if hint is float:
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
    elif hint is int:
        good = isinstance(value, int) and not isinstance(value, bool)
    elif hint in (str, bool):
        good = isinstance(value, hint)
    else:
        return
    if not good:
        raise UserError(f"{what} is {value!r}, but it must be of type {hint.__name__}")
