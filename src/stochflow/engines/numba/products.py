"""Products of small matrices, row after row, in an order of additions that depends on neither other rows nor threads.

Half of the activations behind a ReLU are zero, so a row's product is the sum over its nonzero terms, listed beforehand.
"""

from __future__ import annotations

import numpy as np

from stochflow.engines.numba.jit import compiled, part

ROWS, TERMS = 16, 64  # of a block, whose weights stay in the cache


@part
def _add_eight(x, k, i, w, out):
    """out += the terms i to i + 7 of a row: x their activations, k their rows of w."""
    x0, x1, x2, x3, x4, x5, x6, x7 = x[i], x[i + 1], x[i + 2], x[i + 3], x[i + 4], x[i + 5], x[i + 6], x[i + 7]
    a, b, c, d, e, f, g, h = k[i], k[i + 1], k[i + 2], k[i + 3], k[i + 4], k[i + 5], k[i + 6], k[i + 7]
    w0, w1, w2, w3, w4, w5, w6, w7 = w[a], w[b], w[c], w[d], w[e], w[f], w[g], w[h]
    for j in range(len(out)):
        total = (((out[j] + x0 * w0[j]) + x1 * w1[j]) + x2 * w2[j]) + x3 * w3[j]
        out[j] = (((total + x4 * w4[j]) + x5 * w5[j]) + x6 * w6[j]) + x7 * w7[j]


@part
def product(x, w, out, first, last, low):
    """out[first:last] += x w. `low` = 0 applies a ReLU to x, -inf takes it as it is."""
    terms, values = np.empty(TERMS + 8, dtype=np.int64), np.empty(TERMS + 8, dtype=np.float32)
    for top in range(first, last, ROWS):
        for begin in range(0, w.shape[0], TERMS):
            end = min(begin + TERMS, w.shape[0])
            for r in range(top, min(top + ROWS, last)):
                count = 0
                for k in range(begin, end):
                    terms[count], values[count] = k, x[r, k]
                    count += (not x[r, k] <= 0) if low == 0 else (x[r, k] != 0)  # a NaN counts
                for i in range(count, count + 7):  # zero terms change no digit of a finite sum
                    terms[i], values[i] = begin, 0
                for i in range(0, count, 8):
                    _add_eight(values, terms, i, w, out[r])


@compiled(False, "reassoc")  # in which order these are added up, the compiler may choose
def dots(x, w, out, first, last, low):
    """out[first:last] += relu(x) w', for few rows of w."""
    for r in range(first, last):
        for i in range(w.shape[0]):
            total = np.float32(0)
            for k in range(w.shape[1]):
                total += max(x[r, k], low) * w[i, k]
            out[r, i] += total


@part
def outer(x, y, out, count, first, last, low):
    """out[first:last] += x' relu(y) over the first rows, for few columns of x."""
    for r in range(count):
        for i in range(first, last):
            one = x[r, i]
            for j in range(out.shape[1]):
                out[i, j] += one * max(y[r, j], low)


@part
def transpose(x, count, first, last):
    """[last - first, count]: the columns of the first rows."""
    out, whole = np.empty((last - first, count), dtype=x.dtype), count // 4 * 4
    for r in range(0, whole, 4):
        for j in range(last - first):
            out[j, r], out[j, r + 1] = x[r, first + j], x[r + 1, first + j]
            out[j, r + 2], out[j, r + 3] = x[r + 2, first + j], x[r + 3, first + j]
    for r in range(whole, count):
        for j in range(last - first):
            out[j, r] = x[r, first + j]
    return out


@part
def column_sums(x, count, out, first, last):
    """out[first:last] = the sums over the first rows of x."""
    into = out[first:last]
    for j in range(len(into)):
        into[j] = 0
    for r in range(count):
        row = x[r, first:last]
        for j in range(len(into)):
            into[j] += row[j]


@part
def add(x, out):
    """out += x. (As part of a longer loop it would not be vectorised.)"""
    for j in range(len(out)):
        out[j] += x[j]
