"""What the files of a run folder must look like: what is whole of one is used, what is not is named and left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stochflow.files.reading import Unreadable
from stochflow.files.schema import (
    anything,
    either,
    flag,
    integer,
    list_of,
    mapping,
    number,
    optional,
    text,
    whole_part,
)

if TYPE_CHECKING:
    import numpy as np

_number = optional(either(flag, number()))
_word = optional(text())
# figures that are reckoned with; others may be anything, because they are only shown
NUMBERS = """time seconds oracle_calls loss dynamics_loss grad_norm dynamics_grad_norm log_z_learned mean_score mean_log_reward
    mean_length entropy finite samples modes modes_all expected_modes floor_tv floor_tv_reverse_kl naive_tv limit_tv log_z elbo eubo
    log_z_estimate log_z_error ess sample_score top_score diversity distinct commonest drawn random_score random_error
    top_asked best_asked band_high band_low entropy_ratio dynamics_nll
    dynamics_nll_true dynamics_tv dynamics_bound tv l1 mean_l1 kl_target_model kl_model_target jsd spearman excess_tv""".split()
FIGURES = (
    {name + end: _number for name in NUMBERS for end in ("", "_low", "_high")}
    | dict.fromkeys(("floor_kind", "floor_reason", "objective", "net", "engine"), _word)
    | {"conditions": optional(list_of(mapping({"condition": text(), "tv": optional(number(0, 1.01))}, more=anything)))}
    | {"step": integer(0), "seeds": mapping({}, more=list_of(optional(number())))}
)
ENVIRONMENT = {
    "versions": optional(mapping({}, more=text())),
    "threads": optional(integer(1, 4096)),
    "cores": optional(integer(1)),
    "listed": optional(flag),
    "task": optional(mapping({}, more=text())),
    "argv": optional(list_of(text())),
    "engine": _word,
    "choice": _word,
    "operations": optional(mapping({}, more=text())),
    "reasons": optional(mapping({}, more=list_of(text()))),
} | dict.fromkeys(("stochflow", "commit", "python", "platform", "device"), _word)


def figures(value: Any, where: str) -> tuple[dict[str, Any], list[str]]:
    """A line of metrics.jsonl, or summary.json; Unreadable where it does not say its step."""
    found, gaps = whole_part(value, where, FIGURES, anything)
    if "step" not in found:
        raise Unreadable(gaps[0] if gaps else f'{where} lacks "step": restore or remove it')
    return found, gaps


def of_environment(value: Any, where: str) -> tuple[dict[str, Any], list[str]]:
    """environment.json."""
    return whole_part(value, where, ENVIRONMENT, anything)


SHAPES: dict[str, Callable[[Any, str], tuple[dict[str, Any], list[str]]]] = {
    "summary.json": figures,
    "metrics.jsonl": figures,
    "environment.json": of_environment,
}


def designs(rows: list[dict[str, str]], where: str) -> tuple[list[dict[str, str]], list[str]]:
    """The rows of samples.csv whose figures are numbers."""
    kept, gaps = [], []
    for line, row in enumerate(rows, 2):
        bad = next((k for k in ("score", "log_reward", "log_pf") if k in row and not _is_number(row[k])), None)
        if bad is None and "score" in row and ("sequence" in row or "state" in row):
            kept.append(row)
        else:
            gaps.append(f"{where}, line {line}, has no {bad or 'score'}")
    return kept, gaps


def _is_number(word: Any) -> bool:
    try:
        return math.isfinite(float(word))
    except (TypeError, ValueError):
        return False


# name: its dimensions by name; arrays that share one must agree about it
LAW: dict[str, tuple[str, ...]] = {
    "score_edges": ("edges",),
    "score_law": ("seeds", "bins"),
    "score_target": ("bins",),
    "log_reward": ("points",),
    "log_prob": ("seeds", "points"),
    "log_z": (),
    "grid_law": ("seeds", "first", "second"),
    "grid_target": ("first", "second"),
    "noise_true": ("classes", "actions", "actions"),
    "noise_learned": ("seeds", "classes", "actions", "actions"),
    "noise_class": ("classes",),
}
# what no run writes more of, and a page would take minutes or gigabytes to draw
MOST = {"edges": 1001, "bins": 1000, "points": 200_000, "first": 1024, "second": 1024, "classes": 256, "actions": 256}


def _least(dim: str, sizes: Mapping[str, int]) -> int:
    """One row may stand for all seeds: what was drawn by any of them, where the space is not listed."""
    return 1 if dim == "seeds" else sizes[dim]


def law(arrays: Mapping[str, np.ndarray], where: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays of law.npz that are finite, and of shapes that go together."""
    import numpy as np

    sizes: dict[str, int] = {}
    for name, dims in LAW.items():
        if name in arrays and arrays[name].ndim == len(dims):
            for dim, size in zip(dims, arrays[name].shape, strict=True):
                sizes[dim] = max(size, sizes.get(dim, 0)) if dim == "seeds" else sizes.setdefault(dim, size)
    if "edges" in sizes and sizes.get("bins", sizes["edges"] - 1) != sizes["edges"] - 1:
        sizes["edges"] = -1
    found, gaps = {}, []
    for name, array in arrays.items():
        fits = name in LAW and array.dtype.kind in "fiu" and array.ndim == len(LAW[name])
        named = list(zip(LAW[name], array.shape, strict=True)) if fits else []
        fits = fits and all(n in (sizes[dim], _least(dim, sizes)) and 0 < n <= MOST.get(dim, n) for dim, n in named)
        impossible = array == -np.inf if name.startswith("log_") else False  # what has no chance has this logarithm
        if fits and bool((np.isfinite(array) | impossible).all()):
            found[name] = array
        else:
            gaps.append(f"{where}: the array {name!r} is not what it should be")
    for group in (
        ("score_edges", "score_law"),
        ("log_reward", "log_prob"),
        ("grid_law", "grid_target"),
        ("noise_true", "noise_learned", "noise_class"),
    ):
        if not all(name in found for name in group):  # one is not drawn without the other
            there = [name for name in group if name in found]
            lost = [name for name in group if name not in arrays]
            gaps += [f"{where} has the array {there[0]!r} without {lost[0]!r}"] if there and lost else []
            for name in there:
                found.pop(name)
    return found, gaps
