"""What a user asks of tilted futures: samples, how they differ, and probabilities under the forecaster.

>>> tilted = forecaster.tilt(lambda paths: -paths.sum(axis=1), beta=0.01)
>>> forecaster.probability(lambda paths: paths.sum(axis=1), at_least=6000)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stochflow.errors import UserError, did_you_mean
from stochflow.forecast.support import within
from stochflow.forecast.tilt import Draws, Probability, Score, Tilting, estimate
from stochflow.nets.windows import attach, remembering
from stochflow.ops import one_thread

if TYPE_CHECKING:
    import pandas as pd

    from stochflow.forecast.forecaster import Forecaster

LEAST_DRAWS = 100


@dataclass
class Tilted:
    """Futures of one series in proportion to P(future) exp(beta score(future))."""

    series: str
    beta: float
    paths: np.ndarray  # [samples, horizon] equally likely
    own: np.ndarray  # [samples, horizon] the forecaster's own
    drawn: Draws
    stamps: list[Any]
    levels: tuple[int, ...]
    columns: tuple[str, str] = ("unique_id", "ds")  # of the series and of the stamps in `table`

    @property
    def _weight(self) -> np.ndarray:
        log = self.drawn.log_weight + self.beta * self.drawn.score
        made = np.exp(log - log.max())
        return made / made.sum()

    @property
    def effective(self) -> float:
        """Effective sample size of the draws under the tilted law."""
        return float(1 / np.square(self._weight).sum())

    @property
    def log_z(self) -> float:
        """log of the forecaster's mean of exp(beta score), importance-weighted."""
        log = self.drawn.log_weight + self.beta * self.drawn.score
        return float(np.logaddexp.reduce(log) - np.log(len(log)))

    def probability(self, event: Score) -> Probability:
        """P(event) under the forecaster, for an event as true or false (or a number) of each future [n, horizon]."""
        happened = np.asarray(event(self.drawn.paths), dtype=np.float64)
        if happened.shape != (len(self.drawn.paths),):
            raise UserError(
                f"the event must be true or false of each of {len(self.drawn.paths)} futures, but has shape {happened.shape}"
            )
        return estimate(self.drawn.log_weight, happened)

    def mean(self, score: Score) -> float:
        """Mean of a score under the tilted law."""
        return float(self._weight @ np.asarray(score(self.drawn.paths), dtype=np.float64))

    def table(self) -> pd.DataFrame:
        """A row per step: the tilted median and intervals beside the forecaster's."""
        import pandas

        made = pandas.DataFrame(dict(zip(self.columns, (self.series, self.stamps), strict=True)))
        for name, paths in (("tilted", self.paths), ("stochflow", self.own)):
            made[name] = np.median(paths, 0)
            for level in self.levels:
                made[f"{name}-lo-{level}"], made[f"{name}-hi-{level}"] = np.quantile(
                    paths, [0.5 - level / 200, 0.5 + level / 200], axis=0
                )
        return made


class Session:
    """One window of a fitted forecaster, ready to be tilted; its policy's windows are put back at the end."""

    def __init__(self, forecaster: Forecaster, score: Score, series: str | None, frame: Any = None, until: Any = None):
        fitted = forecaster._need()
        tracks, stamps = forecaster._past(frame, until)
        names = [t.name for t in tracks]
        if series is None and len(names) > 1:
            raise UserError(
                f"the forecaster knows {len(names)} series: say which one with --series (in Python series=), such as {names[0]!r}"
            )
        if series is not None and series not in names:
            raise UserError(f"there is no series {series!r}{did_you_mean(series, names)}: {', '.join(names[:5])}")
        if forecaster.settings.noise != "none":
            raise UserError("futures are tilted without actuator noise: leave --noise out")
        if fitted.share != 0 and forecaster.prior.paths is None:
            raise UserError("futures are tilted from a forecaster in mode nll")
        k = names.index(series) if series is not None else 0
        self.name, self.track = names[k], tracks[k]
        self.stamps = forecaster.ahead([tracks[k]], [stamps[k]])[0]
        prior = forecaster.prior
        ends = np.array([len(self.track.y)])
        changed = prior.transformed([self.track])
        env = forecaster._env(prior, prior.windows(changed, [ends]))
        limit = forecaster.limits.get(self.name, forecaster.limits[""])

        def values(states: torch.Tensor) -> np.ndarray:
            z = env.bins.draw(states[..., 1:].float())
            made = env.unscale(z, states[..., 0]).numpy()
            return within(prior.restored(self.track, ends, made[None]), limit)[0]

        self.levels, self.fitted, self.trained = forecaster.settings.levels, fitted, fitted.task.env
        self.seed, self.columns = forecaster.settings.seed, (forecaster.settings.id_col, forecaster.settings.time_col)
        self.env = env
        self.tilting = Tilting(env, fitted.policy, values, score, seed=self.seed)

    def __enter__(self) -> Tilting:
        self.fork = torch.random.fork_rng([])
        self.thread = one_thread()
        self.fork.__enter__()
        self.thread.__enter__()
        torch.manual_seed(self.seed + 2)
        attach(self.fitted.policy, self.env)
        self.cached = remembering(self.fitted.policy, 1)
        self.cached.__enter__()
        return self.tilting

    def __exit__(self, *problem: Any) -> None:
        self.cached.__exit__(*problem)
        attach(self.fitted.policy, self.trained)  # type: ignore[arg-type]
        self.thread.__exit__(*problem)
        self.fork.__exit__(*problem)


def _check(name: str, good: bool, value: float, wanted: str) -> None:
    if not good:
        raise UserError(f"{name} is {value}, but it must be {wanted}")


def tilt(session: Session, beta: float, samples: int, steps: int) -> Tilted:
    """See `Forecaster.tilt`."""
    _check("beta", math.isfinite(beta), beta, "a finite number")
    _check("samples", samples >= 1, samples, "at least 1")
    _check("steps", steps >= 0, steps, "0 or more")
    with session as tilting:
        tilting.to(beta, steps)
        drawn = tilting.draws(max(4 * samples, 4000))
        log = drawn.log_weight + beta * drawn.score
        w = torch.from_numpy(np.exp(log - log.max()))
        chosen = torch.multinomial(w / w.sum(), samples, replacement=True).numpy()
        own = drawn.paths[: drawn.made[0]]
    return Tilted(session.name, beta, drawn.paths[chosen], own, drawn, session.stamps, session.levels, session.columns)


def probability(session: Session, at_least: float, draws: int, steps: int) -> tuple[Probability, Tilted]:
    """See `Forecaster.probability`; and the futures in which the event happens."""
    _check("at_least", math.isfinite(at_least), at_least, "a finite number")
    _check("draws", draws >= LEAST_DRAWS, draws, f"at least {LEAST_DRAWS}, because an interval is read off them")
    _check("steps", steps >= 0, steps, "0 or more")
    with session as tilting:
        tilting.reach(at_least, steps)
        drawn = tilting.draws(draws)
        event = drawn.score >= at_least
        found = estimate(drawn.log_weight, event)
        w = torch.from_numpy(np.exp(drawn.log_weight - drawn.log_weight.max()) * event)
        chosen = (
            torch.multinomial(w / w.sum(), 1000, replacement=True).numpy()
            if event.any()
            else np.zeros(0, dtype=np.int64)
        )
        own = drawn.paths[: drawn.made[0]]
    return found, Tilted(
        session.name, 0.0, drawn.paths[chosen], own, drawn, session.stamps, session.levels, session.columns
    )
