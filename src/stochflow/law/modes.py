"""Modes of a landscape: high-scoring objects that are far from each other, counted the same way everywhere.

N sequences, L letters. The rule (Shen et al. 2023): scan by descending score, ties in lexicographic order, and accept a
sequence if it is at least `min_distance` from every accepted one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from stochflow.errors import UserError, did_you_mean, need_kind, one_line
from stochflow.law.numbers import numbers
from stochflow.scores.data import digits, tfbind8

TFBIND8_THRESHOLD, TFBIND8_DISTANCE = 0.889, 2  # Shen et al.: 328 modes of SIX6_REF_R1
_BLOCK = 512  # sequences compared at once: a block of distances stays in the processor's cache
Metric = Literal["hamming", "edit"]


def find_modes(
    sequences: Any,
    scores: Any,
    threshold: float = -np.inf,
    min_distance: int = 2,
    metric: Metric = "hamming",
    pad: int | None = None,
) -> np.ndarray:
    """Positions of the modes in `sequences`, best first.

    The sequences are scanned by descending score, equal scores in alphabetic (token) order, whatever the order in which they
    are given; each that is at least `min_distance` from all modes before it is a mode.

    `sequences` is a list of strings, or an array [N, L] of letters or whole numbers, or a tensor of these; `pad` is the token
    that fills up shorter rows.
    Only sequences with score >= threshold can be modes. Of equal sequences the best-scored one speaks.
    """
    _need_metric(metric)
    if not (isinstance(min_distance, (int, np.integer)) and min_distance >= 1):
        raise UserError(
            f"min_distance is {min_distance!r}, but modes are at least 1 apart: give a whole number of at least 1"
        )
    rows = _rows(sequences, pad)
    need_kind("threshold", threshold, (int, float, np.number), "a number")
    score = _vector(scores, len(rows))
    order = _order(rows, score)
    order = order[score[order] >= threshold]
    if len(order) == 0:
        return order
    near = _near_hamming if metric == "hamming" else _near_edit
    return order[_greedy(len(order), near([rows[i] for i in order], int(min_distance)))]


def num_modes(
    sequences: Any,
    scores: Any,
    threshold: float = -np.inf,
    min_distance: int = 2,
    metric: Metric = "hamming",
    pad: int | None = None,
) -> int:
    """How many modes there are; see `find_modes`."""
    return len(find_modes(sequences, scores, threshold, min_distance, metric, pad))


def calculate_num_modes(
    sequences: Any,
    distance_threshold: int = 2,
    scores: Any = None,
    threshold: float = -np.inf,
    metric: Metric = "hamming",
    pad: int | None = None,
) -> int:
    """The source documents' name and convention: sequences at distance <= distance_threshold are the same mode.

    Scanned as in `find_modes`, so without scores in alphabetic order, where the documents scan as given: their count depends on the
    order of the list, this one does not.
    """
    scores = np.zeros(len(sequences)) if scores is None else scores
    return num_modes(sequences, scores, threshold, distance_threshold + 1, metric, pad)


def local_maxima(sequences: Any, scores: Any, threshold: float = -np.inf) -> np.ndarray:
    """Positions, ascending, of sequences that score strictly more than every given one that differs in exactly one letter.

    Of equal sequences the best-scored one, and of those the first, stands for all.
    """
    rows = _rows(sequences, None)
    need_kind("threshold", threshold, (int, float, np.number), "a number")
    score = _vector(scores, len(rows))
    if len(rows) == 0:
        return np.zeros(0, dtype=np.int64)
    token = _letters(rows)
    order = _order(rows, score)
    best = np.zeros(len(rows), dtype=bool)
    best[order[np.unique(token[order], axis=0, return_index=True)[1]]] = True
    at = np.flatnonzero(best)
    token, value = token[at], score[at]
    top = np.ones(len(at), dtype=bool)
    for place in range(token.shape[1]):  # in each group that agrees but for this letter, only a single best one stays
        others = np.delete(token, place, axis=1)
        group = (
            np.unique(others, axis=0, return_inverse=True)[1].reshape(-1)
            if others.shape[1]
            else np.zeros(len(at), dtype=np.int64)
        )
        high = np.full(group.max() + 1, -np.inf)
        np.maximum.at(high, group, value)
        at_top = value == high[group]
        alone = np.bincount(group, weights=at_top)[group] == 1
        top &= at_top & alone
    return at[top & (value >= threshold)]


def nearest(sequences: Sequence[str], heads: Sequence[str], metric: Metric) -> np.ndarray:
    """[N] position of the nearest head of each sequence, the first of equally near ones."""
    need_kind("sequences", sequences, (list, tuple, np.ndarray), "a list of strings")
    need_kind("heads", heads, (list, tuple, np.ndarray), "a list of strings")
    if not len(heads):
        raise UserError("heads are none: give at least one string")
    blocks = range(0, len(sequences), _BLOCK)
    found = [distances(sequences[i : i + _BLOCK], heads, metric).argmin(1) for i in blocks]
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def distances(a: Sequence[str], b: Sequence[str], metric: Metric) -> np.ndarray:
    """[A, B] letters in which strings of one length differ, or edit distances."""
    _need_metric(metric)
    for name, given in (("a", a), ("b", b)):
        if not isinstance(given, (list, tuple, np.ndarray)) or not all(isinstance(s, str) for s in given):
            raise UserError(f"{name} is {one_line(repr(given), 80)}, but it must be a list of strings")
    if metric == "edit":
        try:
            from rapidfuzz.distance import Levenshtein
            from rapidfuzz.process import cdist
        except ImportError:  # the same figures, slowly; the extra has the package
            return np.array([[_edit(x, y) for y in b] for x in a])
        return cdist(a, b, scorer=Levenshtein.distance, dtype=np.int32)
    column = _letters([*a, *b]).T  # [L, A + B]
    found = np.zeros((len(a), len(b)), dtype=np.uint16 if len(column) < 65536 else np.uint32)
    for letters in column:
        found += letters[: len(a), None] != letters[None, len(a) :]
    return found


def _edit(a: str, b: str) -> int:
    before = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        now = [i]
        for j, y in enumerate(b, 1):
            now.append(min(before[j] + 1, now[-1] + 1, before[j - 1] + (x != y)))
        before = now
    return before[-1]


def families(sequences: Sequence[str], scores: Sequence[float]) -> tuple[list[int], np.ndarray]:
    """Modes among a run's best designs, a few hundred at most, and the distances [N, N] between these.

    Positions, best first: each differs in at least half of its letters from every better mode (`family_distance`). The report's
    logos and the `mode` of a sample go by it.
    """
    gap = distances(sequences, sequences, shared_metric(sequences))
    heads: list[int] = []
    for i in _order(list(sequences), _vector(scores, len(sequences))):
        if all(gap[i, h] >= family_distance(sequences) for h in heads):
            heads.append(int(i))
    return heads, gap


def family_distance(sequences: Sequence[str]) -> int:
    """Letters in which two modes among these designs differ at least."""
    return max(2, round(len(sequences[0]) / 2))


def shared_metric(sequences: Sequence[str]) -> Metric:
    """Hamming where all have one length."""
    return "hamming" if len({len(t) for t in sequences}) == 1 else "edit"


@lru_cache(maxsize=8)
def tfbind8_modes(table: str = "SIX6_REF_R1") -> np.ndarray:
    """The modes of a TFBind8 table as base-4 numbers of the 8-mers (A, C, G, T = 0, 1, 2, 3), best first: 328 for SIX6_REF_R1."""
    found = find_modes(digits(), tfbind8(table), TFBIND8_THRESHOLD, TFBIND8_DISTANCE)
    found.setflags(write=False)  # it is shared
    return found


# how it is done -------------------------------------------------------------------------------------------------


def _need_metric(metric: Any) -> None:
    if not isinstance(metric, str) or metric not in ("hamming", "edit"):
        raise UserError(
            f"there is no metric {metric!r}{did_you_mean(str(metric), ['hamming', 'edit'])}: take hamming or edit"
        )


def _rows(sequences: Any, pad: int | None) -> list[str]:
    """Everything as strings, so that one order and one notion of length hold for texts and tokens alike.

    Tokens become characters in their numeric order, from U+0000 on and past the surrogates, so comparisons agree with the tokens'.
    """
    if hasattr(sequences, "detach"):
        sequences = sequences.detach().cpu().numpy()
    if not isinstance(sequences, (np.ndarray, Sequence)):
        raise UserError(
            f"sequences are {one_line(repr(sequences), 80)}, but they must be a list of strings, or an array [N, L] of letters or whole numbers"
        )
    if (
        isinstance(sequences, Sequence)
        and not isinstance(sequences, str)
        and len(sequences)
        and isinstance(sequences[0], str)
    ):
        if not all(isinstance(s, str) for s in sequences):
            raise UserError("some sequences are strings and some are not: give a list of strings")
        return list(sequences)
    tokens = np.asarray(sequences)
    tokens = np.char.decode(tokens) if tokens.dtype.kind == "S" else tokens
    if tokens.dtype.kind == "U" and tokens.ndim == 1:
        return [str(s) for s in tokens]
    if tokens.size == 0:
        return [""] * len(tokens) if tokens.ndim == 2 else []
    if tokens.ndim != 2 or tokens.dtype.kind not in "iuU":
        raise UserError(
            f"sequences are a list of strings, or letters or whole numbers of shape [N, L], but these have shape {tokens.shape} and type {tokens.dtype}"
        )
    values, code = np.unique(tokens, return_inverse=True)
    if len(values) > 0xD800:
        raise UserError(f"the sequences use {len(values)} different tokens, but at most {0xD800} can be compared")
    code = code.reshape(tokens.shape).astype("<u4")
    texts = [row.tobytes().decode("utf-32-le") for row in code]
    if pad is None or values.dtype.kind == "U" or pad not in values:
        return texts
    return [t.replace(chr(int(np.searchsorted(values, pad))), "") for t in texts]


def _vector(scores: Any, count: int) -> np.ndarray:
    score = numbers("scores", scores)
    if len(score) != count:
        raise UserError(f"there are {count} sequences but {len(score)} scores: give one score a sequence")
    if np.isnan(score).any():
        raise UserError(f"the score of sequence {int(np.isnan(score).argmax())} is NaN: give a number")
    return score


def _order(rows: list[str], score: np.ndarray) -> np.ndarray:
    """Best first, ties lexicographic, then by position."""
    return np.array(sorted(range(len(rows)), key=lambda i: (-score[i], rows[i])), dtype=np.int64)


def _letters(rows: Sequence[str]) -> np.ndarray:
    """[N, L] small integers; strings of different lengths have no Hamming distance."""
    size = len(rows[0])
    for i, row in enumerate(rows):
        if len(row) != size:
            raise UserError(
                f"Hamming distance needs strings of one length, but among these are lengths {size} and {len(row)} (sequence {i}): use metric='edit'"
            )
    code = np.frombuffer("".join(rows).encode("utf-32-le"), dtype="<u4").reshape(len(rows), size)
    small = np.unique(code, return_inverse=True)[1].reshape(code.shape)
    return small.astype(np.uint8 if small.size == 0 or small.max() < 256 else np.uint16)


Near = Callable[
    [np.ndarray, np.ndarray], np.ndarray
]  # positions [a], positions [b] -> [a, b]: closer than min_distance?


def _near_hamming(rows: Sequence[str], min_distance: int) -> Near:
    column = np.ascontiguousarray(_letters(rows).T)  # [L, N]: one letter of many sequences lies together
    kind = np.uint8 if len(column) < 256 else np.uint16 if len(column) < 65536 else np.uint32

    def near(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        distance = np.zeros((len(a), len(b)), dtype=kind)
        for letters in column:
            distance += letters[a][:, None] != letters[b][None, :]
        return distance < min_distance

    return near


def _near_edit(rows: Sequence[str], min_distance: int) -> Near:
    try:
        from rapidfuzz.distance import Levenshtein
        from rapidfuzz.process import cdist
    except ImportError:
        raise UserError(
            "edit distance needs the package rapidfuzz: pip install 'stochflow[bio]', or use metric='hamming'"
        ) from None
    text = np.array(rows, dtype=object)

    def near(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # beyond the cutoff it answers min_distance and stops early
        return (
            cdist(text[a], text[b], scorer=Levenshtein.distance, score_cutoff=min_distance - 1, dtype=np.int32)
            < min_distance
        )

    return near


def _greedy(count: int, near: Near) -> np.ndarray:
    """Positions accepted from 0..count-1, in order; block by block against those accepted before, then within the block."""
    accepted: list[int] = []
    for start in range(0, count, _BLOCK):
        block = np.arange(start, min(start + _BLOCK, count))
        for first in range(0, len(accepted), _BLOCK):
            if len(block) == 0:
                break
            block = block[~near(block, np.array(accepted[first : first + _BLOCK])).any(1)]
        if len(block) == 0:
            continue
        close = near(block, block)
        free = np.ones(len(block), dtype=bool)
        for i in range(len(block)):
            if free[i]:
                accepted.append(int(block[i]))
                free &= ~close[i]  # itself included: it has been dealt with
    return np.array(accepted, dtype=np.int64)
