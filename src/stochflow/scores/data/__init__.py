"""Landscapes that ship with the package; their origins are in README.md beside this file."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

import numpy as np

from stochflow.errors import UserError, did_you_mean, need_kind
from stochflow.files.arrays import unpack_npz
from stochflow.files.reading import Unreadable, read_bytes, shown

COUNT = 4**8  # all DNA 8-mers; entry i belongs to the 8-mer that is i in base 4 with A, C, G, T = 0, 1, 2, 3
SIMPLIFIED = "simplified"


def tables() -> list[str]:
    """Names of the TFBind8 landscapes that need no file."""
    shipped = [f.name for f in files(__name__).iterdir() if f.name.startswith("tfbind8_")]
    return [*sorted(name.removeprefix("tfbind8_").removesuffix(".npz") for name in shipped), SIMPLIFIED]


def tfbind8(table: str = "SIX6_REF_R1") -> np.ndarray:
    """Scores y in [0, 1] of all 65,536 DNA 8-mers, float64: (E - min) / (max - min).

    `table` is a name from `tables()` or the path of a file made by scripts/build_tfbind8.py.
    """
    need_kind("table", table, str, "the name of a table, or the path of a file")
    if table == SIMPLIFIED:
        return simplified()
    fetched = Path(os.environ.get("STOCHFLOW_DATA", "")) / f"tfbind8_{table}.npz"
    if table in tables():
        content = files(__name__).joinpath(f"tfbind8_{table}.npz").read_bytes()
    elif (
        "STOCHFLOW_DATA" in os.environ and fetched.exists()
    ):  # where the tables do not ship: see README.md beside this file
        content = read_bytes(fetched)
    elif os.path.exists(table):
        content = read_bytes(table)
    else:
        raise UserError(
            f"there is no TFBind8 table {table!r}{did_you_mean(table, tables())}: "
            f"take one of {', '.join(tables())} or the path of a file made by scripts/build_tfbind8.py "
            "(files that it made are also found by name in the folder STOCHFLOW_DATA)"
        )
    try:
        raw = unpack_npz(content, shown(table))["scores"]
        whole = raw.dtype.kind in "iuf" and bool(np.isfinite(raw).all())
    except (Unreadable, KeyError):
        whole = False
    if not whole:
        raise UserError(
            f"{shown(table)} is not a table made by scripts/build_tfbind8.py: build it again with that script"
        )
    if raw.shape != (COUNT,) or raw.min() == raw.max():
        raise UserError(
            f"{table} must hold {COUNT} scores that are not all equal: build it again with scripts/build_tfbind8.py"
        )
    e = raw.astype(np.float64)
    return (e - e.min()) / (e.max() - e.min())


def digits() -> np.ndarray:
    """[65536, 8] tokens of all DNA 8-mers, in the order of the tables."""
    return np.arange(COUNT)[:, None] // 4 ** np.arange(7, -1, -1) % 4


def simplified() -> np.ndarray:
    """A made-up landscape in closed form, [65536], float64.

    Every AT counts .5, CG .7, GC .6, TA .4, a repeated letter .1, and A...T .3; the score is the sum over 3, at most 1.
    Counted in tenths, so that rounding does not decide which sequences reach the top: 380 score exactly 1. (Adding the
    decimals in floating point leaves 46 of them one rounding error below 1, hence the 334 that are sometimes quoted.)
    """
    x = digits()
    here, then = x[:, :-1], x[:, 1:]
    a, c, g, t = range(4)
    tenths = (here == then).astype(np.int64)
    for first, second, weight in ((a, t, 5), (c, g, 7), (g, c, 6), (t, a, 4)):
        tenths += weight * ((here == first) & (then == second))
    total = tenths.sum(1) + 3 * ((x[:, 0] == a) & (x[:, -1] == t))
    return np.minimum(total, 30) / 30
