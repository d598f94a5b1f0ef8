"""The values behind the words of the command line, in one place; Python may give the values themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from stochflow.errors import UserError
from stochflow.learn import objectives
from stochflow.learn.entropy import EntropyAverage
from stochflow.learn.objectives import (
    SGFNKL,
    DetailedBalance,
    FlowKL,
    LogVariance,
    Objective,
    SubTrajectoryBalance,
    TrajectoryBalance,
    TrajectoryKL,
)
from stochflow.nets.layers import Net
from stochflow.nets.lookup import Lookup
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.nets.recurrent import Recurrent
from stochflow.nets.transformer import Transformer
from stochflow.noise.dynamics import Dynamics, Known, Neural, Tabular
from stochflow.noise.thought_state import Augmented, ThoughtState
from stochflow.noise.thoughts import ThoughtDynamics
from stochflow.runs.config import PUBLISHED, Train
from stochflow.training.sources import Source
from stochflow.types import Task
from stochflow.worlds.env import Env

MakeDynamics = Callable[[Env, Sequence[int]], Dynamics]
MakeSource = Callable[[Task, Policy], Source]


class Values(NamedTuple):
    """What was given as an object instead of a word; None: the word of the configuration holds."""

    objective: Objective | None = None
    net: Net | None = None
    dynamics: Dynamics | MakeDynamics | None = None  # a model, or a function of environment and seeds, as `Tabular` is
    source: Source | MakeSource | None = None  # a source, or a function of task and policy

    def described(self) -> dict[str, str]:
        """What config.json says of them: enough to name them and to notice others."""
        return {name: _describe(value) for name, value in self._asdict().items() if value is not None}

    def check(self, said: dict[str, str], where: str) -> None:
        """Refuse to go on with other objects than the run was trained with."""
        own = self.described()
        for name in sorted({*said, *own}):
            if said.get(name) != own.get(name):
                was = (
                    f"was trained with {name}={said[name]}" if name in said else f"was trained with the word for {name}"
                )
                now = f"{name}={own[name]} was given" if name in own else "none was given"
                again = ", ".join(f"{k}=..." for k in said)
                remedy = f"give the same objects in Python, as in resume(path, {again})" if said else "leave it out"
                raise UserError(f"{where} {was}, but {now}: {remedy}")


def _describe(value: Any) -> str:
    """A frozen value by its repr; anything else by its class or name, which stay the same from run to run."""
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return value.__qualname__
    text = repr(value)
    return type(value).__qualname__ if "\n" in text or " at 0x" in text else text


def taken_out(settings: dict[str, Any]) -> Values:
    """Remove the objects from settings that otherwise hold words."""
    objects = {
        k: settings[k] for k in Values._fields if k in settings and not isinstance(settings[k], (str, type(None)))
    }
    for name in objects:
        del settings[name]
    kinds = {"objective": Objective, "net": None, "dynamics": Dynamics, "source": Source}
    for name, value in objects.items():
        kind = kinds[name]
        fits = (
            hasattr(value, "build")
            if name == "net"
            else isinstance(value, kind)
            if kind is Objective
            else (
                isinstance(value, kind) or callable(value)  # type: ignore[arg-type]
            )
        )
        if not fits:
            raise UserError(f"{name}={value!r} is neither a word nor a value of stochflow: see help(stochflow.train)")
    return Values(**objects)


def make_objective(settings: Train) -> Objective:
    word: str = settings.objective
    if word == "flow-kl":
        return FlowKL()
    if word == "kl":
        return TrajectoryKL()
    if word.startswith("sgfn-kl"):
        base = word.removesuffix(PUBLISHED)
        gammas = (settings.gamma,) if base == "sgfn-kl" else (0.25, 0.5, 0.75)
        decay = settings.entropy_average or (0.99 if settings.explore_entropy else 0.0)
        memory = EntropyAverage(settings.seeds, decay=decay) if decay > 0 else None
        form = objectives.JOINT if base == word else objectives.PUBLISHED
        return SGFNKL(gammas, settings.kl_weight, form, memory=memory)
    form, base = objectives.MARGINAL, word
    for prefix, meant in (("naive-", objectives.REALISED), ("intended-", objectives.INTENDED)):
        if word.startswith(prefix):
            form, base = meant, word.removeprefix(prefix)
    joint, _, kind = word.partition("-")
    if joint in ("stb", "sdb", "ssubtb"):
        form = {"": objectives.JOINT, "head": objectives.HEAD, "published": objectives.PUBLISHED}[kind]
        base = joint[1:]
    if base == "subtb":
        return SubTrajectoryBalance(settings.subtb_lambda, form)
    kinds: dict[str, Callable[[objectives.Form], Objective]] = {
        "tb": TrajectoryBalance,
        "db": DetailedBalance,
        "logvar": LogVariance,
    }
    return kinds[base](form)


def make_net(settings: Train) -> Net:
    if settings.net == "transformer":
        return Transformer(settings.hidden, settings.heads, settings.layers)
    if settings.net in ("gru", "lstm"):
        return Recurrent(settings.hidden, settings.layers, settings.net)
    return {"mlp": MLP, "lookup": Lookup}[settings.net](settings.hidden, settings.layers)


def make_dynamics(
    value: Dynamics | MakeDynamics | None, word: str, task: Task, inner: Env, seeds: list[int]
) -> Dynamics:
    """A model of the task's noise; `inner` is the environment whose moves the noise speaks of."""
    if isinstance(value, Dynamics):
        return value
    if value is None and (word == "known" or task.channel.exact):
        return Known(task.env, task.channel)
    models: dict[str, MakeDynamics] = {"tabular": Tabular, "neural": Neural, "thought": ThoughtDynamics}
    made = (models[word] if value is None else value)(inner, seeds)
    return (
        Augmented(task.env, made) if isinstance(task.env, ThoughtState) else made
    )  # it reads their history off the state
