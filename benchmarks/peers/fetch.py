"""Fetch the peers from PyPI: an environment for each, and a folder of their pure-Python wheels for machines without an index.

    python benchmarks/peers/fetch.py /tmp/peers                          # /tmp/peers/gfnx-venv, /tmp/peers/torchgfn-venv
    python benchmarks/peers/fetch.py /tmp/peers --carried .peers         # besides, .peers/gfnx and .peers/torchgfn (about 15 MB)

gfnx pins numpy 1.26, which no current JAX accepts, so it is installed without its dependencies and those of the training loop are
named here. What a peer imports but the measured code never calls (plotting, replay, graph networks) is left out of the folder: see standin.py.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

JAX = "jax==0.11.2"  # needs Python 3.12
LOOP = ("equinox==0.13.8", "optax==0.2.8", "chex==0.1.92", "jaxtyping==0.3.11")
GFNX = "gfnx==0.0.1"
TORCHGFN = "torchgfn==2.4.1"
TORCH = "torch==2.13.0"
# pure-Python wheels that travel: what the loops import beyond jax, numpy, scipy and torch
CARRIED = {
    "gfnx": (GFNX, *LOOP, "absl-py", "toolz", "wadler-lindig", "typing-extensions"),
    "torchgfn": (TORCHGFN, "einops", "dill", "tqdm"),
}
LEFT_OUT = ("gfn/gym/helpers/chip_design/plc_wrapper_main",)  # an 11 MB program for another task


def pip(python: str | Path, *words: str) -> None:
    subprocess.run([str(python), "-m", "pip", *words, "--quiet", "--disable-pip-version-check"], check=True)


def environments(folder: Path, gfnx_python: str, torchgfn_python: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, python in (("gfnx", gfnx_python), ("torchgfn", torchgfn_python)):
        made = folder / f"{name}-venv"
        if not made.exists():
            subprocess.run([python, "-m", "venv", str(made)], check=True)
        inside = made / "bin" / "python"
        if name == "gfnx":
            pip(inside, "install", JAX, *LOOP)
            pip(inside, "install", "--no-deps", GFNX)
        else:
            pip(inside, "install", TORCH)
            pip(inside, "install", TORCHGFN)


def carry(folder: Path, python: str) -> None:
    """Unpack the wheels, each peer's into its own folder."""
    for name, wheels in CARRIED.items():
        shutil.rmtree(folder / name, ignore_errors=True)
        with tempfile.TemporaryDirectory() as downloads:
            pip(python, "download", "--no-deps", "--only-binary", ":all:", "--dest", downloads, *wheels)
            for wheel in sorted(Path(downloads).glob("*.whl")):
                if not wheel.name.endswith("-none-any.whl"):
                    raise SystemExit(
                        f"{wheel.name} is built for one platform: choose a version with a pure-Python wheel"
                    )
                shutil.unpack_archive(wheel, folder / name, "zip")
        for useless in LEFT_OUT:
            (folder / name / useless).unlink(missing_ok=True)


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("folder", type=Path, help="where the two environments go")
    a.add_argument("--gfnx-python", default="python3.12", help="JAX 0.11 needs Python 3.12 or later")
    a.add_argument("--torchgfn-python", default=sys.executable)
    a.add_argument("--carried", type=Path, help="where the wheels go, unpacked")
    a.add_argument("--only-carried", action="store_true")
    given = a.parse_args()
    if not given.only_carried:
        environments(given.folder, given.gfnx_python, given.torchgfn_python)
    if given.carried:
        carry(given.carried, given.gfnx_python)


if __name__ == "__main__":
    main()
