"""Clipping, Adam and the average on the flat block of parameters."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.engines.flat import FlatParameters
from stochflow.engines.numba.jit import Share, call, compiled, each_part, in_parts, loop

PIECE = 1 << 11  # numbers, which stay in the first cache
THREAD_NUMBERS = 1 << 18  # worth a thread


class State(NamedTuple):
    """A block of parameters, in pieces that belong to one seed each."""

    first: np.ndarray  # [S + 1] each seed's first piece
    pieces: np.ndarray  # [P, 2] begin and end in the block
    squares: np.ndarray  # [P] sums of squares: added up by pieces, so that no number of threads changes a norm
    norms: np.ndarray  # [S] of the gradient before clipping
    clip: float
    gradient: np.ndarray
    values: np.ndarray
    means: np.ndarray
    roots: np.ndarray  # means of squares
    average: np.ndarray


@compiled(False, "reassoc")
def _square(g):
    """The sum of squares, in an order that is the compiler's to choose."""
    total = np.float32(0)
    for k in range(len(g)):
        total += g[k] * g[k]
    return total


@loop
def update(share, sums, steps, k, rates, state):
    """Of the pieces of some seeds: their sums of squares, if it `sums`, and, if it `steps`, Adam's step with the gradient scaled to
    a norm of at most `clip`, and the average. `rates[k]` = the rate over the first moment's correction, one over the root of the
    second's, and the average's weight."""
    rate, root, weight = np.float32(rates[k, 0]), np.float32(rates[k, 1]), np.float32(rates[k, 2])
    old, older = np.float32(0.9), np.float32(0.999)
    new, newer, tiny = np.float32(1 - 0.9), np.float32(1 - 0.999), np.float32(1e-8)
    faint, least = (
        np.float32(1e-30),
        np.float32(2.0**-126),
    )  # denormals change no weight, and some processors are slow at them
    for seed in range(share.first, share.last):
        begin, count, total = state.first[seed], state.first[seed + 1] - state.first[seed], 0.0
        here, end = begin + count * share.part // share.parts, begin + count * (share.part + 1) // share.parts
        for i in range(here, end if sums else here):
            state.squares[i] = _square(state.gradient[state.pieces[i, 0] : state.pieces[i, 1]])
        if not steps:
            continue
        for i in range(begin, begin + count):
            total += state.squares[i]
        norm = math.sqrt(total)
        state.norms[seed] = norm
        scale = np.float32(1 if norm <= state.clip else state.clip / norm)  # NaN is not below either
        for i in range(here, end):
            a, b = state.pieces[i, 0], state.pieces[i, 1]
            g, v, w = state.gradient[a:b], state.values[a:b], state.average[a:b]
            m, r = state.means[a:b], state.roots[a:b]
            for j in range(b - a):
                slope = g[j] * scale
                mean, square = old * m[j] + new * slope, older * r[j] + newer * slope * slope
                m[j] = np.float32(0) if abs(mean) < faint else mean
                r[j] = np.float32(0) if square < least else square
            for j in range(b - a):  # a loop over more arrays would not be vectorised
                value = v[j] - rate * m[j] / (np.sqrt(r[j]) * root + tiny)
                w[j] += weight * (value - w[j])
                v[j] = value


class Update:
    """The update of one block."""

    def __init__(self, flat: FlatParameters):
        spans = sorted(flat.seed_spans(), key=lambda span: span[2])
        pieces = np.array([(at, min(at + PIECE, end), s) for begin, end, s in spans for at in range(begin, end, PIECE)])
        self.seeds, self.threads = flat.num_seeds, 1 + len(flat.values) // THREAD_NUMBERS
        first = np.searchsorted(pieces[:, 2], np.arange(self.seeds + 1))
        squares = np.empty(len(pieces), dtype=np.float32)
        arrays = (flat.grad.numpy(), flat.values.detach().numpy(), *flat.moments.numpy(), flat.average.numpy())
        self.state = State(first, pieces[:, :2].copy(), squares, flat.norms.numpy(), float(flat.clip), *arrays)

    def step(self, flat: FlatParameters, done: float) -> Tensor:
        """One update after so many iterations; the norms before clipping [S], which the next one overwrites."""
        given = (0, rates(flat, done, 1), self.state)
        parts = min(self.threads, torch.get_num_threads()) if self.seeds == 1 else 1
        if parts == 1:
            in_parts(lambda s, e: call(update, Share(s, e), True, True, *given), self.seeds, self.threads)
        else:  # the norm is of all parts
            for sums in (True, False):
                each_part(lambda i: call(update, Share(0, 1, i, parts), sums, not sums, *given), parts)  # noqa: B023
        flat.adam_step += 1
        flat.changed()
        return flat.norms


def rates(flat: FlatParameters, done: float, count: int) -> np.ndarray:
    """[count, 3] what the loop has to know of each of so many updates, after so many iterations."""
    before, found = float(flat.adam_step), np.empty((count, 3))
    for k in range(count):
        rate, weight = flat.rates(done + k)
        at = before + k + 1
        found[k] = rate / (1 - 0.9**at), (1 - 0.999**at) ** -0.5, weight
    return found
