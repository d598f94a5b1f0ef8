"""The values behind the words of the command line, in one place; Python may give the values themselves."""

from __future__ import annotations

import inspect
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


MAY_BE = {
    "objective": "a word or an Objective, such as SubTrajectoryBalance()",
    "net": "a word or the description of a network, such as MLP(32, 3)",
    "dynamics": "a word, a Dynamics, or a function of environment and seeds that makes one, such as Tabular",
    "source": "a Source, or a function of task and policy that makes one",
}


def taken_out(settings: dict[str, Any]) -> Values:
    """Remove the objects from settings that otherwise hold words; UserError for one that cannot be used."""
    objects = {}
    for name, what in MAY_BE.items():
        value = settings.get(name)
        if value is None or (isinstance(value, str) and name != "source"):
            continue
        if not _usable(name, value):
            raise UserError(f"{name} is {value!r}, but it must be {what}")
        objects[name] = settings.pop(name)
    return Values(**objects)


def _usable(name: str, value: Any) -> bool:
    if name == "objective":
        return isinstance(value, Objective)
    if name == "net":
        return not isinstance(value, type) and callable(getattr(value, "build", None))
    if isinstance(value, Dynamics if name == "dynamics" else Source):
        return True
    try:
        inspect.signature(value).bind(None, None)
    except (TypeError, ValueError):  # not a function, or one of other arguments
        return False
    return True


def _made(name: str, kind: type, function: Callable[..., Any], *given: Any) -> Any:
    """What a function that was given as a value makes."""
    made = function(*given)
    if not isinstance(made, kind):
        raise UserError(f"{name}={_describe(function)} makes {made!r}, but it must make a {kind.__name__}")
    return made


def make_source(value: Source | MakeSource, task: Task, policy: Policy) -> Source:
    """The source that was given, or that the function makes; UserError where it draws from another environment."""
    source = value if isinstance(value, Source) else _made("source", Source, value, task, policy)
    own = getattr(source, "task", None)
    if isinstance(own, Task):
        _same_env("source", own.env, task.env)
    return source


def _same_env(name: str, own: Env, env: Env) -> None:
    if any(getattr(own, x) != getattr(env, x) for x in ("state_dim", "num_moves", "horizon")):
        raise UserError(f"{name} is of the environment {own!r}, but the task has {env!r}: build it from that one")


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
        _same_env("dynamics", value.env, value.env if isinstance(task.env, ThoughtState) else inner)
        if isinstance(value, Tabular) and len(value.counts) != len(seeds):
            raise UserError(f"dynamics is of {len(value.counts)} of the run's {len(seeds)} seeds: build it for as many")
        return value
    if value is Known or (value is None and (word == "known" or task.channel.exact)):
        return Known(task.env, task.channel)
    models: dict[str, MakeDynamics] = {"tabular": Tabular, "neural": Neural, "thought": ThoughtDynamics}
    chosen = models[word] if value is None else value
    made = _made("dynamics", Dynamics, chosen, inner, seeds)  # type: ignore[type-abstract]
    # of states that hold the thoughts, the model reads their history off the state
    return Augmented(task.env, made) if isinstance(task.env, ThoughtState) else made
