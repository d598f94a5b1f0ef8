"""What each figure is called and what it means: the one table that terminal, comparison, report and docs read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Label(NamedTuple):
    words: str
    better: int  # -1: lower, +1: higher, 0: neither, so that runs are not compared by it
    meaning: str


LABELS = {  # in the order in which they are shown
    "tv": Label("TV to the target", -1, "total variation between the law of the learned policy and the target"),
    "floor_tv": Label("best achievable TV", 0, "the same of the best law that any policy has in this world"),
    "excess_tv": Label("excess over the best", -1, "`tv - floor_tv`, never clamped"),
    "naive_tv": Label("TV of a perfect sampler that ignores the noise", 0, "what training without the noise would give"),
    "limit_tv": Label("TV this objective converges to", 0, "where that is not the best achievable"),
    "floor_tv_reverse_kl": Label("TV of the reverse-KL optimum", 0, "the law of least KL(law || target)"),
    "kl_target_model": Label("KL(target || learned)", -1, "in nats; infinite where the law misses an object"),
    "kl_model_target": Label("KL(learned || target)", -1, "in nats"),
    "log_z_error": Label("error of log Z", -1, "estimate from samples minus the exact value, absolute, in nats"),
    "elbo": Label("ELBO (lower bound of log Z)", +1, "mean log-weight of the policy's own samples"),
    "eubo": Label("EUBO (upper bound of log Z)", 0, "mean log-weight of samples of the target"),
    "spearman": Label("rank correlation of probability and reward", +1, "over all objects"),
    "dynamics_tv": Label("error of the learned noise (TV)", -1, "mean over the steps of a sample; needs a simulated channel"),
    "modes": Label("modes found", +1, "different modes in the sample"),
    "expected_modes": Label("modes expected", +1, "in a sample of that size, from the exact law"),
    "sample_score": Label("mean score", +1, "of the sample"),
    "top_score": Label("mean of the 100 best scores", +1, "of the sample"),
    "diversity": Label("diversity", +1, "mean distance between two objects of the sample"),
    "best_asked": Label("best score asked", +1, "of all different objects that the oracle was asked about"),
    "top_asked": Label("mean of the 100 best asked", +1, "different objects"),
    "apart_asked": Label("mean of the 100 best asked, apart", +1, "each a fifth of the length from all better ones"),
    "beta": Label("sharpness of the reward", 0, "where it is found while training; figures compare at equal beta alone"),
    "oracle_calls": Label("oracle calls", 0, "objects that the oracle was asked about, all seeds together"),
}  # fmt: skip
TERMINAL = tuple(key for key in LABELS if key not in ("diversity", "oracle_calls", "beta"))
COMPARED = tuple(key for key, label in LABELS.items() if label.better)
TILES = ("tv", "floor_tv", "excess_tv", "log_z_error", "elbo", "modes", "top_asked", "top_score", "oracle_calls")


def tiles(found: Mapping[str, Any]) -> list[str]:
    """The figures that stand large at the head of a page: of those that are known, and one of the 100 best alone."""
    known = [key for key in TILES if found.get(key) is not None]
    few = "top_asked" in known and found.get("tv") is None  # of a small look the 100 best are all that was drawn
    return [key for key in known if key != ("top_score" if few else "top_asked")]


def cell(text: str) -> str:
    """The text as it stands in a cell of a Markdown table, where a bare bar would begin the next cell."""
    return text.replace("|", "\\|")


def markdown() -> str:
    """The table of docs/report.md."""
    better = {-1: "lower", 0: "", +1: "higher"}
    rows = [f"| `{key}` | {cell(x.words)} | {cell(x.meaning)} | {better[x.better]} |" for key, x in LABELS.items()]
    return "\n".join(["| key | figure | what it is | better |", "| --- | --- | --- | --- |", *rows])
