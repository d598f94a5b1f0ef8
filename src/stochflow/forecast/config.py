"""What the `forecast` command can be told; no torch here, so that its help answers at once."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from stochflow.errors import UserError
from stochflow.runs import ranges
from stochflow.runs.ranges import check_numbers

RIVALS = ("naive", "ets", "theta", "arima", "mstl")
Mode = Literal["nll", "mse", "mae", "mix"]


@dataclass(frozen=True)
class Forecast:
    """Forecast series by sampling: bins of the next values are the moves, the past is the condition."""

    horizon: int = 12
    """steps to forecast"""
    freq: str = ""
    """frequency of the stamps, as pandas spells it (MS, D, h ...) or a whole number for integer stamps; empty: inferred"""
    window: int = 0
    """steps of the past a network sees; 0: two seasons and at most 12 steps of a third, or two horizons, whichever is longer; 8 at least"""
    season: int = 0
    """steps of a season; 0: by the frequency (12 for months, 24 for hours, 7 for days ...)"""
    mode: Mode = "nll"
    """nll: likelihood, calibrated; mse, mae: the error as reward, a bump around the conditional mean or median; mix: both"""
    mix: float = 0.5
    """weight of the likelihood in mode mix, between 0 and 1"""
    beta: float = 0.0
    """with --score: futures in proportion to P exp(BETA score), 1 by default, below 0 for low scores; in modes mse, mae, mix the sharpness of the error reward (0: half the
    horizon, which gives each step the spread of the training errors)"""
    encoder: Literal["transformer", "mlp"] = "transformer"
    """how the past is read"""
    location: Literal["auto", "mean", "last", "seasonal", "shifted"] = "auto"
    """what forecasts are centred on; auto: an ensemble of statistical forecasters, weighted by their errors in the past"""
    network: Literal["auto", "on", "off"] = "auto"
    """whether a network refines the statistical law; auto: where windows that were held out become likelier by it"""
    log: bool = False
    """forecast logarithms, for values above 0; otherwise logarithms, square roots or values are chosen for each series"""
    support: Literal["auto", "any", "nonnegative", "counts"] = "auto"
    """what values can be; auto: whole numbers, or not negative, where all of a series are"""
    future: tuple[str, ...] = ()
    """columns that are known in advance (prices, holidays as 0 and 1); rows with them and without a value are the steps to forecast"""
    id_col: str = "unique_id"
    """column that names the series"""
    time_col: str = "ds"
    """column of the stamps"""
    target_col: str = "y"
    """column of the values"""
    gaps: Literal["error", "allow"] = "error"
    """allow: missing values and irregular stamps are masked and told to the network instead of refused"""
    bins: int = 65
    """bins of a value, the two open ones included; an odd number puts the middle of a bin where forecasts are centred, so that ties fall inside"""
    noise: Literal["none", "slip", "neighbour"] = "none"
    """how an actuator misses: to any bin, or to the next one"""
    stick: float = 0.0
    """probability that it misses"""
    dynamics: Literal["counted", "known"] = "counted"
    """whether what it does is counted from what happened, or known"""
    stride: int = 1
    """steps between two training windows; the horizon makes their targets disjoint"""
    origins: int = 8
    """rolling origins of the back-test; 0: none"""
    refit: Literal["auto", "on", "off"] = "auto"
    """learn anew at every origin of the back-test, and not only before the first; auto: where series are too short for a network"""
    rivals: tuple[str, ...] = ("naive",)
    """what the back-test shows beside ours: naive, and from statsforecast ets, theta, arima, mstl"""
    levels: tuple[int, ...] = (80, 95)
    """prediction intervals, in percent"""
    samples: int = 1000
    """futures drawn a series"""
    steps: int = 500
    """most training iterations; fewer where the validation windows ask for it"""
    batch: int = 32
    """windows an iteration"""
    lr: float = 2e-3
    """learning rate"""
    hidden: int = 64
    """width of the policy's trunk"""
    seed: int = 0
    """the same seed gives the same forecasts"""
    seeds: int = 5
    """networks trained at once; the samples come from all of them in turn"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one"""

    def check(self) -> Forecast:
        """Refuse what cannot be done, in one sentence."""
        for name in ("horizon", "bins", "stride", "samples", "steps", "batch", "hidden", "seeds"):
            self._need(name, getattr(self, name) >= 1, "a whole number of at least 1")
        for name in ("window", "season", "origins", "beta"):
            self._need(name, getattr(self, name) >= 0, "0 (chosen for you) or more")
        self._need("lr", self.lr > 0, "a number above 0")
        self._need("mix", 0 < self.mix < 1, "a weight between 0 and 1")
        self._need("stick", 0 <= self.stick < 1, "a probability of at least 0 and below 1")
        self._need("bins", 4 <= self.bins <= 256, "between 4 and 256")
        check_numbers(dataclasses.asdict(self), ranges.FORECAST)
        for rival in self.rivals:
            self._need("rivals", rival in RIVALS, "names among " + ", ".join(RIVALS))
        for level in self.levels:
            self._need("levels", 0 < level < 100 and not math.isnan(level), "percentages between 0 and 100")
        for name, words in _CHOICES.items():
            self._need(name, getattr(self, name) in words, "one of " + ", ".join(words))
        if (self.stick > 0) != (self.noise != "none"):
            raise UserError(
                f"--noise {self.noise} with --stick {self.stick} contradict one another: give both or neither"
            )
        return self

    def _need(self, name: str, good: bool, wanted: str) -> None:
        if not good:
            raise UserError(f"--{name} is {getattr(self, name)}, but it must be {wanted}")


_CHOICES = {
    "mode": ("nll", "mse", "mae", "mix"),
    "encoder": ("transformer", "mlp"),
    "location": ("auto", "mean", "last", "seasonal", "shifted"),
    "network": ("auto", "on", "off"),
    "refit": ("auto", "on", "off"),
    "support": ("auto", "any", "nonnegative", "counts"),
    "gaps": ("error", "allow"),
    "noise": ("none", "slip", "neighbour"),
    "dynamics": ("counted", "known"),
    "device": ("auto", "cpu", "cuda"),
}
FLAGS = tuple(f.name for f in dataclasses.fields(Forecast))
