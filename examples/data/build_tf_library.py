"""Make tf_library.csv: a laboratory's first library, drawn from the shipped table of measured TF-DNA binding.

    python examples/data/build_tf_library.py

SIX6_REF_R1 (Barrera et al. 2016, universal protein binding microarrays; see src/stochflow/scores/data). 200 DNA 8-mers are
drawn from the lower half of the table, 20 of them measured twice with noise of standard deviation 0.02 added to every
measurement, which is what the file's repeats show.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from stochflow.scores.data import digits, tfbind8

HERE = Path(__file__).parent


def rows() -> list[dict[str, str]]:
    """The lines of the file."""
    rng = np.random.default_rng(8)
    scores = tfbind8()
    lower = np.argsort(scores, kind="stable")[: len(scores) // 2]
    chosen = rng.choice(lower, 200, replace=False)
    wells = [*chosen, *chosen[:20]]
    texts = ["".join("ACGT"[t] for t in digits()[i]) for i in wells]
    values = [scores[i] + 0.02 * rng.standard_normal() for i in wells]
    return [
        {"id": f"lib-{n:03d}", "sequence": t, "binding": f"{v:.4f}"}
        for n, (t, v) in enumerate(zip(texts, values, strict=True), 1)
    ]


if __name__ == "__main__":
    with (HERE / "tf_library.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "sequence", "binding"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows())
