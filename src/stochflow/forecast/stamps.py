"""Stamps of a series: dates or whole numbers read from a column, their frequency, the seasons that follow from it, and time in steps of it.

pandas is handed in. A message names the line of the file (or the row of the frame) and the column.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from stochflow.errors import UserError

STAMP = "ds"
MONTHS = r"(?:19|20)\d\d(?:0[1-9]|1[0-2])"  # 202001: a month, and no counter
DIGITS = MONTHS + r"(?:0[1-9]|[12]\d|3[01])"  # 20200131: a day
OFFSET = r"\s*(?:Z|[+-]\d{2}:?\d{2})\s*$"
TURNED = r"\s*(\d{1,2})([/.-])(\d{1,2})\2(\d{4})(.*)"  # 31/01/2020 or 01/31/2020, and what follows


def are_numbers(pandas: Any, column: Any) -> bool:
    """Short whole numbers (years, counters) are stamps by themselves; six digits can be a month, eight are a date."""
    text = column.dropna().astype(str)
    if not len(text) or text.str.fullmatch(MONTHS).all():
        return False
    return bool(text.str.fullmatch(r"-?\d{1,6}").all())


def without_zone(pandas: Any, stamp: Any, zone: tuple[str, str] | None) -> Any:
    """A stamp without its time zone, as `_stamps` keeps the column's."""
    made = pandas.Timestamp(stamp)
    if made.tzinfo is None:
        return made
    if zone is None or zone[1] == "utc":
        return made.tz_convert("UTC").tz_localize(None)
    return made.tz_convert(zone[0]).tz_localize(None)


def read_stamps(
    pandas: Any, column: Any, where: Callable[[Any], str], numbered: bool, freq: str = ""
) -> tuple[Any, tuple[str, str] | None]:
    """(stamps without a time zone, the zone): days and longer are kept as wall time, because days are not equally long; shorter as UTC."""
    if column.isna().any():
        raise UserError(
            f"{where(column.index[column.isna()][0])}, column {STAMP}: the time stamp is missing: fill it or drop the row"
        )
    if numbered:
        made = pandas.to_numeric(column, errors="coerce")
        wrong = made.isna() | (made % 1 != 0)
        if wrong.any():
            first = column.index[wrong][0]
            raise UserError(
                f"{where(first)}, column {STAMP}: {column[first]!r} is not a whole number, as the other stamps are: mend it"
            )
        return made.astype("int64"), None
    if pandas.api.types.is_integer_dtype(column) and column.astype(str).str.fullmatch(f"{MONTHS}|{DIGITS}").all():
        column = column.astype(str)
    if pandas.api.types.is_numeric_dtype(column):
        raise UserError(
            f"the column {STAMP} holds numbers, but --freq is not one: give --freq 1 for integer stamps, or dates in {STAMP}"
        )
    if column.dtype == "datetime64[ns]":
        return column, None
    if isinstance(column.dtype, pandas.PeriodDtype):
        return column.dt.to_timestamp(), None
    zone = getattr(column.dtype, "tz", None)
    text = zone is None
    if text:
        column = _dates_as_text(pandas, column, freq)
    made = pandas.to_datetime(column, errors="coerce", utc=True, format="ISO8601")
    if made.isna().any():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that stamps are read one by one
            made = pandas.to_datetime(column, errors="coerce", utc=True)
    if made.isna().any():
        first = column.index[made.isna()][0]
        raise UserError(
            f"{where(first)}, column {STAMP}: {column[first]!r} is not a date: write dates as 2020-01-31 or 2020-01-31 13:00"
        )
    if text and len(column):  # the offset of the newest stamp, because forecasts follow it
        last = pandas.to_datetime(column.iloc[int(made.to_numpy().argmax())], errors="coerce")
        zone = getattr(last, "tzinfo", None)
    if zone is None:
        return made.dt.tz_localize(None), None
    wall = made.dt.tz_convert(zone).dt.tz_localize(None)
    if text:  # the offset of a midnight changes with summer time
        bare = column.astype(str).str.replace(OFFSET, "", regex=True)
        here = pandas.to_datetime(bare, errors="coerce", utc=True, format="ISO8601").dt.tz_localize(None)
        wall = here if here.notna().all() else wall
    if (wall == wall.dt.normalize()).all():
        return wall, (str(zone), "wall")
    return made.dt.tz_localize(None), (str(zone), "utc")


def _dates_as_text(pandas: Any, column: Any, freq: str) -> Any:
    """Months as 202001, and dates as 31/01/2020 or 01/31/2020, in the order of ISO 8601; everything else as it is."""
    text = column.astype(str).str.strip()
    if text.str.fullmatch(MONTHS).all():
        return text.str[:4] + "-" + text.str[4:]
    parts = text.str.extract(f"^{TURNED}$")
    if parts.isna().any(axis=None):
        return column
    one, two = (parts[i].str.zfill(2) for i in (0, 2))
    able, steps = [], []
    for month, day in ((one, two), (two, one)):
        made = parts[3] + "-" + month + "-" + day + parts[4]
        read = pandas.to_datetime(made, errors="coerce", utc=True, format="ISO8601")
        if read.notna().all():
            able.append(made)
            steps.append(np.diff(np.unique(read.to_numpy())).astype("timedelta64[s]").astype(np.float64))
    if len(able) < 2 or (one == two).all():
        return able[0] if able else column
    if min(map(len, steps)) == 0:
        return able[0]
    if freq and not freq.isdigit():  # the order in which stamps are so far apart
        start = pandas.Timestamp("2001-01-01")
        try:
            due = (start + 8 * pandas.tseries.frequencies.to_offset(freq) - start).total_seconds() / 8
        except ValueError:
            due = 1.0  # `frequency` says what is wrong with it
        off = [abs(float(np.log(np.median(s) / due))) for s in steps]
        if min(off) < 0.5 * max(off):
            return able[int(np.argmin(off))]
    uneven = [float(s.max() / np.median(s)) for s in steps]  # read in the wrong order, stamps leap
    if min(uneven) < 0.5 * max(uneven):
        return able[int(np.argmin(uneven))]
    raise UserError(
        f"the dates in {STAMP} can be read with the day or with the month first ({text.iloc[0]!r}): write them as 2020-01-31, or say with --freq how far apart they are"
    )


def frequency(pandas: Any, groups: dict[str, Any], freq: str) -> Any:
    if freq.isdigit():
        if int(freq) < 1:
            raise UserError(f"--freq is {freq}, but integer stamps are at least 1 apart")
        return int(freq)
    if freq:
        try:
            return pandas.tseries.frequencies.to_offset(freq)
        except ValueError:
            raise UserError(
                f"--freq {freq!r} is no frequency that pandas knows: MS, W, D, h, 30min and the like, or a whole number"
            ) from None
    found: dict[str, tuple[str, Any]] = {}
    for name, group in groups.items():
        guess = _guess(pandas, group[STAMP])
        if guess is None:
            raise UserError(
                f"the frequency of series {name!r} cannot be told from its {len(group)} stamps: say it with --freq"
            )
        found.setdefault(str(guess), (name, guess))
    if len(found) > 1:
        (one, (a, _)), (two, (b, _)) = list(found.items())[:2]
        raise UserError(
            f"the series have mixed frequencies ({a!r} has {one}, {b!r} has {two}): forecast them one frequency at a time"
        )
    return next(iter(found.values()))[1]


def _guess(pandas: Any, stamps: Any) -> Any:
    """The frequency of the first few stamps that have one."""
    if pandas.api.types.is_integer_dtype(stamps):
        return int(np.diff(stamps.to_numpy()).min()) if len(stamps) > 1 else None
    values = pandas.DatetimeIndex(stamps)
    for length in (len(values), 6, 4):
        for start in range(max(1, min(len(values) - length + 1, 50))):
            part = values[start : start + length]
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # pandas announces that a later version answers with an offset: both will do
                word = pandas.infer_freq(part) if len(part) >= 3 else None
            if word is not None:
                return pandas.tseries.frequencies.to_offset(word)
    return None


def check_regular(pandas: Any, name: str, stamps: Any, freq: Any, where: Callable[[Any], str]) -> None:
    """Every stamp follows the one before by one step."""
    values = list(stamps)
    if not isinstance(freq, int) and not freq.is_on_offset(values[0]):
        raise UserError(
            f"series {name!r} begins at {values[0]} ({where(stamps.index[0])}), which is not on the frequency {freq.freqstr}: "
            "correct --freq, or take irregular stamps with --gaps allow"
        )
    for i in range(1, len(values)):
        due = values[i - 1] + freq
        if values[i] == due:
            continue
        here = where(stamps.index[i])
        if values[i] > due and (isinstance(freq, int) or _on_grid(pandas, values[i - 1], values[i], freq)):
            raise UserError(
                f"series {name!r} has no stamp {due}: after {values[i - 1]} comes {values[i]} ({here}); fill the gap, or mask it with --gaps allow"
            )
        shown = freq if isinstance(freq, int) else freq.freqstr
        raise UserError(
            f"series {name!r} has mixed frequencies: after {values[i - 1]} comes {values[i]} ({here}), which is not a step of {shown}; "
            "correct --freq, or take irregular stamps with --gaps allow"
        )


def _on_grid(pandas: Any, start: Any, stamp: Any, freq: Any) -> bool:
    return bool(stamp in pandas.date_range(start, stamp, freq=freq))


def grid_start(pandas: Any, first: Any, freq: Any) -> Any:
    return first if freq.is_on_offset(first) else freq.rollback(first)


def in_steps(pandas: Any, stamps: Any, freq: Any, anchor: Any) -> np.ndarray:
    """Stamps in steps of the frequency since the anchor; between two steps by interpolation."""
    if isinstance(freq, int):
        return (stamps.to_numpy() - anchor) / freq
    seconds = stamps.to_numpy().astype("datetime64[s]").astype(np.float64)
    first = np.datetime64(anchor, "s").astype(np.float64)
    step = _tick_seconds(pandas, freq)
    if step is not None:
        return (seconds - first) / step
    grid = pandas.date_range(min(anchor, freq.rollback(stamps.min())), stamps.max() + freq, freq=freq)
    place = grid.to_numpy().astype("datetime64[s]").astype(np.float64)
    origin = float(np.interp(first, place, np.arange(len(place))))
    return np.interp(seconds, place, np.arange(len(place))) - origin


def _tick_seconds(pandas: Any, freq: Any) -> float | None:
    """The length of a step, where all steps are equally long."""
    try:
        return float(pandas.Timedelta(freq).total_seconds())
    except ValueError:
        return None


def seasons(pandas: Any, freq: Any) -> tuple[int, tuple[float, ...]]:
    """The season to lean on, and the periods to show, by the frequency."""
    if isinstance(freq, int):
        return 1, ()
    step = _tick_seconds(pandas, freq)
    if step is not None:
        day = 86400 / step
        if day > 1.5 and abs(day - round(day)) < 1e-6:
            return round(day), (float(round(day)), 7.0 * round(day))
        return (7, (7.0, 365.25)) if abs(day - 1) < 1e-6 else (1, (365.25 * day,))
    code = freq.freqstr.split("-")[0].lstrip("0123456789")
    base = {
        "M": 12,
        "ME": 12,
        "MS": 12,
        "BME": 12,
        "BMS": 12,
        "Q": 4,
        "QE": 4,
        "QS": 4,
        "BQE": 4,
        "BQS": 4,
        "B": 5,
        "W": 52,
    }.get(code, 1)
    season = max(1, base // freq.n)
    return season, ((365.25 / 7 / freq.n if code == "W" else float(season)),) if season > 1 else ()
