"""From the long frame people use (`unique_id`, `ds`, `y`, further columns) to `Track`s, and every way that can go wrong.

pandas is imported where it is used. A message names the line of the file (or the row of the frame) and the column.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stochflow.errors import UserError, did_you_mean
from stochflow.files.reading import MB, read_unpacked
from stochflow.forecast.stamps import (
    STAMP,
    are_numbers,
    check_regular,
    frequency,
    grid_start,
    in_steps,
    read_stamps,
    seasons,
    without_zone,
)
from stochflow.worlds.series import Track

if TYPE_CHECKING:
    import pandas as pd

ID, VALUE = "unique_id", "y"
MOST = 1024 * MB  # of a table that is read
SHIPPED = ("co2", "co2_weekly", "air_passengers", "sea_temperature", "seattle_weather")


@dataclass(frozen=True)
class Schema:
    """What was learned of the frame at `fit`; the frame of `predict` is read by it."""

    freq: Any  # a pandas offset, or an int for integer stamps
    anchor: Any  # the stamp that is time 0
    season: int
    periods: tuple[float, ...]  # seasons whose phase is shown to the network
    ids: tuple[str, ...]
    real: tuple[str, ...] = ()
    categories: dict[str, tuple[str, ...]] = field(default_factory=dict)
    static: dict[str, tuple[float, float]] = field(default_factory=dict)  # mean and spread over the series
    static_categories: dict[str, tuple[str, ...]] = field(default_factory=dict)
    future: tuple[str, ...] = ()  # columns known in advance
    zone: tuple[str, str] | None = None  # time zone of the stamps, and whether they are kept as "wall" time or as "utc"

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(v) + 1 for v in self.categories.values())

    @property
    def static_sizes(self) -> tuple[int, ...]:
        own = (len(self.ids) + 1,) if len(self.ids) > 1 else ()
        return own + tuple(len(v) + 1 for v in self.static_categories.values())

    def after(self, stamp: Any, steps: int) -> list[Any]:
        """The stamps that follow one, whole steps later: the first of the month after a first, the 15th or so after a 15th."""
        if isinstance(self.freq, int) or self.freq.is_on_offset(stamp):
            return [stamp + self.freq * k for k in range(1, steps + 1)]
        grid = [self.freq.rollback(stamp) + self.freq * k for k in range(steps + 2)]
        share = (stamp - grid[0]) / (grid[1] - grid[0])  # of a step: what `_time` interpolates
        return [(a + share * (b - a)).round("s") for a, b in pairwise(grid[1:])]

    def shown(self, stamps: list[Any]) -> list[Any]:
        """Stamps as the user wrote them, in his time zone."""
        if self.zone is None:
            return stamps
        name, kept = self.zone
        if kept == "utc":
            return [s.tz_localize("UTC").tz_convert(name) for s in stamps]
        return [s.tz_localize(name, ambiguous=True, nonexistent="shift_forward") for s in stamps]


def need_pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise UserError(
            "forecasting reads tables with pandas, which is not installed: pip install 'stochflow[forecast]'"
        ) from None
    return pandas


def shipped(name: str) -> pd.DataFrame:
    """A series that ships with the package, as a long frame; data/series/README.md says where each comes from."""
    if name not in SHIPPED:
        raise UserError(
            f"there is no series {name!r}{did_you_mean(name, SHIPPED)}: {', '.join(SHIPPED)} ship with the package"
        )
    from importlib.resources import as_file, files

    with as_file(files("stochflow.scores.data") / "series" / f"{name}.csv") as path:
        return read_csv(path)


def read_csv(path: str | Path) -> pd.DataFrame:
    """The file as text, so that what is not a number can be named."""
    pandas = need_pandas()
    if not os.path.isfile(path):
        raise UserError(
            f"there is no file {str(path)!r}{did_you_mean(os.path.basename(path), SHIPPED)}: give the path of a CSV file with the columns "
            f"{ID}, {STAMP} and {VALUE}, or the name of a series that ships with the package ({', '.join(SHIPPED)})"
        )
    try:
        content = read_unpacked(path, MOST)
        found = pandas.read_csv(io.BytesIO(content), dtype=str, skipinitialspace=True)
    except UserError:
        raise
    except (ValueError, UnicodeDecodeError, OSError) as problem:
        raise UserError(
            f"{path} cannot be read as a CSV file ({problem}): give one with the columns {ID}, {STAMP} and {VALUE}"
        ) from None
    found.attrs["lines"] = True  # rows are told as lines of the file
    return found


class Columns(NamedTuple):
    """What the columns of a frame are called, and which are known in advance."""

    series: str = ID
    stamp: str = STAMP
    value: str = VALUE
    future: tuple[str, ...] = ()


def read(
    frame: Any,
    freq: str = "",
    gaps: str = "error",
    season: int = 0,
    until: Any = None,
    schema: Schema | None = None,
    columns: Columns = Columns(),  # noqa: B008 - a frozen value
) -> tuple[Schema, list[Track], list[list[Any]]]:
    """(schema, tracks, stamps of each track) of a long frame; rows after the stamp `until` are dropped before anything is looked at (but for columns that are known in advance).

    A track has a row per step of the frequency: with gaps allowed, rows that are missing hold NaN.
    """
    pandas = need_pandas()
    if not isinstance(frame, pandas.DataFrame):
        raise UserError(
            f"a forecast is made from a pandas DataFrame with the columns {ID}, {STAMP}, {VALUE}, but was given {type(frame).__name__}"
        )
    lines = bool(frame.attrs.get("lines"))

    def where(i: Any) -> str:
        return f"line {int(i) + 2}" if lines else f"row {i}"

    for column in (columns.stamp, columns.value, *columns.future):
        if column not in frame.columns:
            raise UserError(
                f"the column {column!r} is missing{did_you_mean(column, map(str, frame.columns))}: a series needs "
                f"{columns.stamp} and {columns.value}" + (" and what --future names" if columns.future else "")
            )
    table = frame.rename(columns={columns.series: ID, columns.stamp: STAMP, columns.value: VALUE})
    if not table.index.is_unique:
        table = table.reset_index(drop=True)
    if ID not in table.columns:
        table[ID] = "series"
    table[ID] = table[ID].astype(str)
    numbered = (schema is not None and isinstance(schema.freq, int)) or freq.isdigit()
    table[STAMP], zone = read_stamps(
        pandas,
        table[STAMP],
        where,
        numbered or (not freq and schema is None and are_numbers(pandas, table[STAMP])),
        freq or ("" if schema is None else getattr(schema.freq, "freqstr", "")),
    )
    if until is not None:
        limit = until if pandas.api.types.is_integer_dtype(table[STAMP]) else without_zone(pandas, until, zone)
        past = table[STAMP] <= limit
        # what is known in advance is known after it, too
        table = table.assign(**{VALUE: table[VALUE].where(past)}) if columns.future and past.any() else table[past]
    if not len(table):
        raise UserError(
            "the table holds no rows to learn from"
            + ("" if until is None else f" up to {until}")
            + ": give at least one series"
        )
    table[VALUE] = _numbers(pandas, table[VALUE], VALUE, where)
    _no_infinity(table[VALUE], where)
    table = table.sort_values([ID, STAMP], kind="stable")
    double = table.duplicated([ID, STAMP], keep=False)
    if double.any():
        same = table[double].iloc[:2]
        raise UserError(
            f"series {same.iloc[0][ID]!r} has the stamp {same.iloc[0][STAMP]} twice ({where(same.index[0])} and {where(same.index[1])}): keep one"
        )
    ahead = table[:0]
    if columns.future:  # rows after a series' last value are the steps to forecast
        known = table[VALUE].notna()
        left = known[::-1].groupby(table[ID][::-1]).cummax()[::-1]
        table, ahead = table[left], table[~left]
        if not len(table):
            raise UserError(f"no row has a value in the column {columns.value!r}: give the past of the series")
    if gaps == "error" and table[VALUE].isna().any():
        first = table.index[table[VALUE].isna()][0]
        raise UserError(
            f"{where(first)}, column {VALUE}: the value is missing; fill it, or let it be masked with --gaps allow"
        )
    groups = dict(tuple(table.groupby(ID, sort=False)))
    if schema is None:
        schema = replace(_learn(pandas, table, groups, freq, season, where, columns.future), zone=zone)
    more = dict(tuple(ahead.groupby(ID, sort=False)))
    tracks, stamps = [], []
    for name, group in groups.items():
        if gaps == "error":
            check_regular(pandas, name, group[STAMP], schema.freq, where)
        track = _track(pandas, name, group, schema, where)
        when = list(group[STAMP])
        if gaps != "error":
            track, when = _on_the_grid(track, when, schema)
        tracks.append(_known(pandas, track, group, more.get(name), schema, where))
        stamps.append(when)
    return schema, tracks, stamps


def _on_the_grid(track: Track, stamps: list[Any], schema: Schema) -> tuple[Track, list[Any]]:
    """A row per step of the frequency; of several readings in one step the last counts, and steps without one hold NaN."""
    slot = np.round(track.time - track.time[0]).astype(np.int64)
    count = int(slot[-1]) + 1
    if count > 100 * len(slot) + 10_000:
        raise UserError(
            f"series {track.name!r} has {len(slot)} readings over {count} steps of the frequency: give a coarser --freq"
        )
    last = np.append(np.flatnonzero(np.diff(slot)), len(slot) - 1)
    place = slot[last]

    def put(x: np.ndarray, fill: Any) -> np.ndarray:
        made = np.full((count, *x.shape[1:]), fill, dtype=x.dtype)
        made[place] = x[last]
        return made

    time = track.time[0] + np.arange(count, dtype=np.float64)
    time[place] = track.time[last]
    when: list[Any] = [stamps[last[0]]]
    for i, j in pairwise(range(len(last))):
        between = int(place[j] - place[i]) - 1
        when += schema.after(stamps[last[i]], between) if between else []
        when.append(stamps[last[j]])
    time = np.maximum.accumulate(time)
    return track._replace(
        time=time, y=put(track.y, np.nan), real=put(track.real, np.nan), categories=put(track.categories, 0)
    ), when


def _known(pandas: Any, track: Track, group: Any, ahead: Any, schema: Schema, where: Callable[[Any], str]) -> Track:
    """The track with the columns that are known in advance, on its rows and on those after its last value."""
    if not schema.future:
        return track
    rows = group if ahead is None else pandas.concat([group, ahead])
    missing = [c for c in schema.future if c not in rows.columns]
    if missing:
        raise UserError(f"the column {missing[0]!r} was there at fit and is missing now: give the same columns")
    made = np.stack([_advance(pandas, rows[c], c, where) for c in schema.future], 1)
    later = () if ahead is None else tuple(ahead[STAMP])
    past, rest = made[: len(group)], made[len(group) :]
    if len(past) != len(track.y):  # readings were put on the grid
        slot = np.round(in_steps(pandas, group[STAMP], schema.freq, schema.anchor) - track.time[0]).astype(np.int64)
        full = np.full((len(track.y), made.shape[1]), np.nan)
        full[slot] = past
        past = full
    return track._replace(known=np.concatenate([past, rest]), later=later)


def _advance(pandas: Any, column: Any, name: str, where: Callable[[Any], str]) -> np.ndarray:
    """Numbers, or true and false, of a column that is known in advance: one in every row."""
    words = column.astype(str).str.strip().str.lower()
    if words.isin(("true", "false")).all():
        return (words == "true").to_numpy(dtype=np.float64)
    wrong = ~np.isfinite(pandas.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64))
    if wrong.any():
        first = column.index[wrong][0]
        what = "the value is missing" if pandas.isna(column[first]) else f"{column[first]!r} is not a finite number"
        raise UserError(
            f"{where(first)}, column {name}: {what}: a column that is known in advance has a number in every row, such as a price, or a holiday as 0 and 1"
        )
    return pandas.to_numeric(column).to_numpy(dtype=np.float64)


# columns ------------------------------------------------------------------------------------------------------------


def _numbers(pandas: Any, column: Any, name: str, where: Callable[[Any], str]) -> Any:
    made = pandas.to_numeric(column, errors="coerce")
    wrong = made.isna() & column.notna()
    if wrong.any():
        first = column.index[wrong][0]
        raise UserError(
            f"{where(first)}, column {name}: {column[first]!r} is not a number: mend it, or leave it empty if it is missing"
        )
    return made.astype("float64")


def _no_infinity(column: Any, where: Callable[[Any], str]) -> None:
    wrong = np.isinf(column.to_numpy())
    if wrong.any():
        raise UserError(
            f"{where(column.index[wrong][0])}, column {column.name}: the value is infinite: give finite numbers"
        )


def _is_number(pandas: Any, column: Any) -> bool:
    return not bool((pandas.to_numeric(column, errors="coerce").isna() & column.notna()).any())


def _learn(
    pandas: Any,
    table: Any,
    groups: dict[str, Any],
    freq: str,
    season: int,
    where: Callable[[Any], str],
    future: tuple[str, ...] = (),
) -> Schema:
    """Frequency, season, and what the further columns are: numbers, words, and those that never change within a series."""
    step = frequency(pandas, groups, freq)
    found, periods = seasons(pandas, step)
    real: list[str] = []
    static: dict[str, tuple[float, float]] = {}
    categories: dict[str, tuple[str, ...]] = {}
    static_categories: dict[str, tuple[str, ...]] = {}
    for name in table.columns:
        if name in (ID, STAMP, VALUE, *future):
            continue
        column = table[name]
        if not column.notna().any():
            raise UserError(f"the column {name!r} is empty: drop it")
        fixed = bool((table.groupby(ID)[name].nunique(dropna=False) <= 1).all())
        if fixed and len(groups) == 1:
            continue  # a constant tells nothing
        if _is_number(pandas, column) and fixed:
            each = _numbers(pandas, table.groupby(ID)[name].first(), name, where)
            static[name] = (float(each.mean()), float(each.std(ddof=0)) or 1.0)
        elif _is_number(pandas, column):
            real.append(name)
        else:
            (static_categories if fixed else categories)[name] = tuple(sorted(set(column.dropna().astype(str))))
    first = table[STAMP].min()
    anchor = int(first) if isinstance(step, int) else grid_start(pandas, first, step)
    ids = tuple(groups)
    every = (float(season), *periods[1:]) if season else periods
    return Schema(
        step, anchor, season or found, every, ids, tuple(real), categories, static, static_categories, future=future
    )


def _track(pandas: Any, name: str, group: Any, schema: Schema, where: Callable[[Any], str]) -> Track:
    missing = [
        c
        for c in (*schema.real, *schema.categories, *schema.static, *schema.static_categories)
        if c not in group.columns
    ]
    if missing:
        raise UserError(f"the column {missing[0]!r} was there at fit and is missing now: give the same columns")
    count = len(group)

    def numbers(columns: tuple[str, ...]) -> np.ndarray:
        for c in columns:
            _no_infinity(_numbers(pandas, group[c], c, where), where)
        made = [_numbers(pandas, group[c], c, where).to_numpy() for c in columns]
        return np.stack(made, 1) if made else np.zeros((count, 0))

    def words(columns: dict[str, tuple[str, ...]]) -> np.ndarray:
        made = []
        for c, known in columns.items():
            code = {word: i for i, word in enumerate(known, 1)}
            made.append(
                np.array([code.get(str(v), 0) if v is not None and v == v else 0 for v in group[c]], dtype=np.int64)
            )
        return np.stack(made, 1) if made else np.zeros((count, 0), dtype=np.int64)

    mean, spread = (np.array([pair[i] for pair in schema.static.values()]) for i in (0, 1))
    code = {word: i for i, word in enumerate(schema.ids, 1)}
    own = np.array([code.get(name, 0)] if len(schema.ids) > 1 else [], dtype=np.int64)
    return Track(
        name,
        in_steps(pandas, group[STAMP], schema.freq, schema.anchor),
        group[VALUE].to_numpy(),
        numbers(schema.real),
        words(schema.categories),
        np.nan_to_num((numbers(tuple(schema.static))[0] - mean) / spread),
        np.concatenate([own, words(schema.static_categories)[0]]),
    )
