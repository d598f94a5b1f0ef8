"""Forecasts as objects: a state is the number of a window of the past and the bins chosen so far.

Windows, scales and targets stay in tables; the state holds a row number, and the oracle finds its target by it.
    R windows    W steps of a window    L horizon    F real features (the series first)    G categories    K bins
The scale of a window is computed from that window, and its lower bound from all that came before its end, so values
after its end cannot leak into it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from stochflow.errors import UserError
from stochflow.ops import PerDevice
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.strings import BYTES, Strings

FAR = 20.0  # scaled inputs are clipped here: an outlier must not dominate a network
FLAT = 0.1  # least scale of a window, in standard deviations of all changes before its end


# bins ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bins:
    """K bins in scaled units: K - 2 of equal width on [-limit, limit], and one beyond each end."""

    count: int = 64
    limit: float = 4.0

    def __post_init__(self) -> None:
        if not 4 <= self.count <= len(BYTES):
            raise UserError(f"{self.count} bins were asked for, but between 4 and {len(BYTES)} can be used")
        if not (math.isfinite(self.limit) and self.limit > 0):
            raise UserError(f"the bins end at {self.limit}, but they need a finite end above 0")

    @property
    def width(self) -> float:
        return 2 * self.limit / (self.count - 2)

    def index(self, value: Tensor) -> Tensor:
        """The bin of each scaled value, [...] int64."""
        return (((value + self.limit) / self.width).floor() + 1).clamp(0, self.count - 1).long()

    def centre(self, index: Tensor) -> Tensor:
        """The value a bin stands for; a bin beyond the end stands half a width beyond it."""
        return (index - 0.5) * self.width - self.limit

    def draw(self, index: Tensor) -> Tensor:
        """A value drawn uniformly from each bin, [...]."""
        return self.centre(index) + (torch.rand(index.shape, device=index.device) - 0.5) * self.width


# windows ------------------------------------------------------------------------------------------------------------


class Track(NamedTuple):
    """One series as numbers: `time` in steps of the frequency (real where stamps are irregular), NaN = missing."""

    name: str
    time: np.ndarray  # [n] float64, increasing
    y: np.ndarray  # [n]
    real: np.ndarray  # [n, F-1] further real features
    categories: np.ndarray  # [n, G] int64, 0 = unknown or missing
    static: np.ndarray  # [Q]
    static_categories: np.ndarray  # [H] int64


class Windows(NamedTuple):
    """R windows and the values that followed them, scaled."""

    values: Tensor  # [R, W, F] 0 where missing
    seen: Tensor  # [R, W, F] bool
    categories: Tensor  # [R, W, G]
    age: Tensor  # [R, W] steps before the origin, >= 0
    phase: Tensor  # [R, W, P] sines and cosines of the seasons
    static: Tensor  # [R, Q]
    static_categories: Tensor  # [R, H]
    target: Tensor  # [R, L] scaled; 0 where it is not known
    known: Tensor  # [R] bool: all of the target is there
    location: Tensor  # [R, L] float64, in the series' own units
    scale: Tensor  # [R] float64

    def take(self, rows: Tensor | slice) -> Windows:
        return Windows(*[x[rows] for x in self])

    def unscale(self, value: Tensor, row: Tensor) -> Tensor:
        """Scaled values [..., L] of windows [...] in the series' own units, float64."""
        where = row.to(self.scale.device)
        return self.location[where] + self.scale[where].unsqueeze(-1) * value.double()


LOCATIONS = ("mean", "last", "seasonal", "shifted")


@dataclass(frozen=True)
class Cut:
    """How windows are cut out of a series, and around which location their future is centred.

    `mean` of the window; its `last` value; the value one `seasonal` period earlier, plus the window's mean change per
    period; or that value `shifted` by the change since one period before the end. The scale is the window's standard
    deviation about its location, and at least a tenth of that of the changes per period over the whole past: a window
    that happens to be flat would make the scale too small for the next steps.
    """

    window: int
    horizon: int
    season: float = 1.0
    location: str = "seasonal"
    periods: tuple[float, ...] = ()  # seasons whose phase a network may see

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise UserError(f"a horizon of {self.horizon} steps forecasts nothing: give a horizon of at least 1")
        if self.window < 2:
            raise UserError(f"a window of {self.window} steps has no standard deviation: give a window of at least 2")
        if self.location not in LOCATIONS:
            raise UserError(f"there is no location {self.location!r}: take one of {', '.join(LOCATIONS)}")

    def origins(self, track: Track, stride: int = 1, first: int | None = None) -> np.ndarray:
        """Window ends (rows before the first forecast step) with a whole target behind them, the last one included."""
        last = len(track.y) - self.horizon
        start = self.window if first is None else max(first, self.window)
        return np.arange(last, start - 1, -stride)[::-1]

    def __call__(self, tracks: Sequence[Track], ends: Sequence[np.ndarray]) -> Windows:
        """The windows of each series that end at the given rows; targets are read where the series goes on."""
        parts = [self._one(track, int(end)) for track, at in zip(tracks, ends, strict=True) for end in at]
        if not parts:
            raise UserError(
                f"no series is long enough for a window of {self.window} steps: shorten --window or give more data"
            )
        stacked = [np.stack(column) for column in zip(*parts, strict=True)]
        values, seen, categories, age, phase, static, static_categories, target, known, location, scale = stacked

        def f32(x: np.ndarray) -> Tensor:
            return torch.from_numpy(x.astype(np.float32))

        return Windows(
            f32(values),
            torch.from_numpy(seen),
            torch.from_numpy(categories),
            f32(age),
            f32(phase),
            f32(static),
            torch.from_numpy(static_categories),
            f32(target),
            torch.from_numpy(known),
            torch.from_numpy(location),
            torch.from_numpy(scale),
        )

    def _one(self, track: Track, end: int) -> tuple[np.ndarray, ...]:
        """One row of `Windows`, field by field."""
        past = slice(end - self.window, end)
        time, y = track.time[past], track.y[past]
        have = np.isfinite(y)
        if not have.any():
            raise UserError(
                f"series {track.name!r} has no value at all in the {self.window} steps before row {end}: "
                "lengthen --window or fill it"
            )
        ahead = track.time[end : end + self.horizon] - time[-1]
        if len(ahead) < self.horizon:  # beyond the data: the next steps of the frequency
            ahead = np.concatenate([ahead, np.arange(len(ahead), self.horizon) + 1.0])
        truth = np.full(self.horizon, np.nan)
        truth[: len(track.y) - end] = track.y[end : end + self.horizon]

        level = _Level(time[have], y[have], self.season)
        location, scale = level.about(self.location, time[-1] + ahead, self.horizon)
        scale = max(scale, FLAT * self._ever(track.y[:end]))
        change = level.changes(time, y)  # [W], NaN where there is no earlier period
        last = level.y[-1]
        own = np.stack([(y - last) / scale, (change - level.drift) / scale], 1)
        other = track.real[past]
        values = np.concatenate([own, _standardised(other)], 1)
        seen = np.isfinite(values)
        values = np.where(seen, values, 0).clip(-FAR, FAR)
        target = (truth - location) / scale
        known = np.isfinite(target).all()
        static = np.concatenate(
            [
                self._phases(time[-1:])[0],
                ((location - last) / scale).clip(-FAR, FAR),
                ahead - np.arange(1, self.horizon + 1),  # 0 unless stamps are irregular
                track.static,
            ]
        )
        return (
            values,
            seen,
            track.categories[past],
            time[-1] - time,
            self._phases(time),
            static,
            track.static_categories,
            np.where(np.isfinite(target), target, 0),
            np.asarray(known),
            location,
            np.asarray(scale),
        )

    def _ever(self, past: np.ndarray) -> float:
        """Standard deviation of the changes per period, in rows, over all of the past."""
        lag = min(max(1, round(self.season)), len(past) - 1)
        change = past[lag:] - past[:-lag]
        change = change[np.isfinite(change)]
        return float(change.std()) if len(change) else 0.0

    def _phases(self, time: np.ndarray) -> np.ndarray:
        """[n, 2 per period]."""
        angles = [2 * np.pi * time / p for p in self.periods]
        return np.stack([f(a) for a in angles for f in (np.sin, np.cos)], 1) if angles else np.zeros((len(time), 0))


class _Level:
    """The location and scale of a window's future before any training, from the values that were seen."""

    def __init__(self, time: np.ndarray, y: np.ndarray, season: float):
        self.time, self.y, self.season = time, y, season
        change = self.changes(time, y)
        self.change = change[np.isfinite(change)]
        self.drift = float(self.change.mean()) if len(self.change) else 0.0

    def at(self, time: np.ndarray) -> np.ndarray:
        """The series at any times, by linear interpolation."""
        return np.interp(time, self.time, self.y)

    def changes(self, time: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Each value minus the one a season earlier; NaN where the window does not reach that far back."""
        before = time - self.season
        return np.where(before >= self.time[0] - 1e-9, y - self.at(before), np.nan)

    def about(self, kind: str, ahead: np.ndarray, horizon: int) -> tuple[np.ndarray, float]:
        """Location [L] and scale of the times `ahead`."""
        if kind == "mean":
            location, scale = np.full(len(ahead), self.y.mean()), self.y.std()
        elif kind == "last" or len(self.change) < 2:
            location, scale = np.full(len(ahead), self.y[-1]), _lagged(self.y, horizon)
        else:
            periods = np.ceil((ahead - self.time[-1]) / self.season - 1e-9).clip(min=1)
            earlier = self.at(ahead - periods * self.season)
            if kind == "seasonal":
                location, scale = earlier + periods * self.drift, self.change.std()
            else:
                location, scale = earlier + periods * self.change[-1], _lagged(self.change, horizon)
        floor = 1e-6 * max(1.0, float(np.abs(self.y).max())) + 1e-2 * float(self.y.std())
        return location, max(float(scale), floor)


def _lagged(x: np.ndarray, horizon: int) -> float:
    """Root mean square change over about half the horizon, as far as the window reaches."""
    lag = max(1, min((horizon + 1) // 2, len(x) // 2))
    return float(np.sqrt(np.square(x[lag:] - x[:-lag]).mean())) if len(x) > lag else 0.0


def _standardised(x: np.ndarray) -> np.ndarray:
    """Each column [n, F-1] by the mean and standard deviation of its seen values in this window; NaN stays NaN."""
    seen = np.isfinite(x)
    count = seen.sum(0).clip(min=1)
    mean = np.where(seen, x, 0).sum(0) / count
    std = np.sqrt(np.where(seen, (x - mean) ** 2, 0).sum(0) / count)
    return (x - mean) / np.where(std > 1e-9, std, 1.0)


# environment --------------------------------------------------------------------------------------------------------


class Series(Conditioned):
    """States are [window row | bins so far]; a move appends a bin.

    `sizes` and `static_sizes` say how many values each category takes (0 = unknown included).
    """

    def __init__(self, windows: Windows, bins: Bins, sizes: Sequence[int] = (), static_sizes: Sequence[int] = ()):
        self.windows, self.bins = windows, bins
        self.sizes, self.static_sizes = tuple(sizes), tuple(static_sizes)
        super().__init__(Strings(BYTES[: bins.count], windows.target.shape[1]), self._dense())
        self._truth = PerDevice(bins.index(windows.target))

    def _dense(self) -> Tensor:
        """All fields of a window as one vector, [R, N], for encoders that use no structure."""
        w = self.windows
        rows = len(w.scale)
        parts = [w.values, w.seen.float(), w.age.unsqueeze(-1) / w.age.shape[1], w.phase]
        parts += [one_hot(w.categories[..., i], n).float() for i, n in enumerate(self.sizes)]
        flat = [torch.cat(parts, -1).flatten(1), w.static]
        flat += [one_hot(w.static_categories[..., i], n).float() for i, n in enumerate(self.static_sizes)]
        return torch.cat([x.reshape(rows, -1) for x in flat], 1)

    def features(self, state: Tensor) -> Tensor:
        """The step (one-hot), the scaled values so far, and the last bin (one-hot): [..., L + L + K]."""
        chosen = state[..., 1:]
        size, k = self.inner.lengths(chosen), self.num_moves  # type: ignore[attr-defined]
        values = torch.where(chosen < k, self.bins.centre(chosen.float()) / self.bins.limit, 0)
        last = chosen.gather(-1, (size - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)  # K, the padding, at the start
        return torch.cat(
            [one_hot(size, self.horizon + 1)[..., :-1], values, one_hot(last, k + 1)[..., :-1]], -1
        ).float()

    def truth(self, row: Tensor) -> Tensor:
        """The bins that really followed, [..., L]."""
        return self._truth(row.device)[0][row]

    def values(self, state: Tensor, draw: bool = False) -> Tensor:
        """The forecast of finished states in scaled units, [..., L]: bin centres, or values drawn from the bins."""
        chosen = state[..., 1:]
        return self.bins.draw(chosen) if draw else self.bins.centre(chosen.float())

    def __repr__(self) -> str:
        return f"Series({len(self.windows.scale)} windows, {self.bins.count} bins, horizon {self.horizon})"


class Nearness:
    """Oracle: minus the mean over the horizon of |v(x_h) - y_h|^power / sigma_h^power, with y the target of the row.

    power 2 is the mean squared error, power 1 the mean absolute one. With `Linear(beta)` this is log R.
    """

    on_device = True

    def __init__(self, env: Series, power: int = 2, sigma: Tensor | None = None):
        if power not in (1, 2):
            raise UserError(f"power = {power}, but forecasts are scored by absolute (1) or squared (2) errors")
        self.env, self.power = env, power
        self.sigma = torch.ones(env.horizon) if sigma is None else sigma.float()
        if not bool((self.sigma > 0).all()):
            raise UserError("every sigma_h must be above 0: errors are measured in units of it")
        self._constants = PerDevice(env.windows.target, self.sigma)

    def __call__(self, state: Tensor) -> Tensor:
        target, sigma = self._constants(state.device)
        off = (self.env.values(state) - target[state[..., 0]]) / sigma
        return -(off.abs() if self.power == 1 else off.square()).mean(-1)
