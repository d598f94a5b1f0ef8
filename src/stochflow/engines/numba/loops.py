"""Loops over small arrays, compiled by numba: products, a walk, a balance, its gradient, an update and a model of the noise, one seed after the other.

Where a batch is small an operator costs more than its sum, so here are no operators, but loops as one would write them. Each distinct state that a seed
meets has a row of its own (`Rows`): a state has one depth, so those who meet, meet at the same step. No sum of one seed depends on another's, nor on
where its numbers stand in memory: among any others its figures are the same to the last bit. (Threads that share one seed share its results, each of which is
summed by one of them.)

But for products they go over single numbers, in few and long functions: an assignment to a slice, or a call that passes a dozen arrays, takes a second to compile.
Compiled once, they are kept on the disk. They stand in one file, because numba compiles again what has changed in a loop's own file alone: a product that
was mended elsewhere would go on as it was. And they import no torch, for the process that only compiles them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

FEW = 24  # a head of up to so many outputs is kept turned;
WIDE = 16  # a larger one has a multiple of so many, of which the last are nobody's
FAR = -1e9  # the logarithm of what is not allowed, as `ops.NEG`


def _compiled(called: bool, *more: str) -> Any:
    """A decorator for a loop that is called from Python, or is part of others alone; `more` is what the compiler may do to sums."""
    how: Any = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": {"contract", *more},
        "no_cfunc_wrapper": True,
        "no_cpython_wrapper": not called,
    }

    def decorate(f: Any) -> Any:
        try:
            return _forgiving(numba.njit(cache=called, **how)(f))
        except RuntimeError:  # there is nowhere to keep it
            return numba.njit(**how)(f)

    return decorate


def _forgiving(loop: Any) -> Any:
    """What was kept may be damaged, by a full disk for one: then it is compiled again, and put in its place."""
    kept: Any = getattr(loop, "_cache", None)
    load = getattr(kept, "load_overload", None)
    if load is None or not hasattr(kept, "flush"):
        return loop

    def careful(*given: Any) -> Any:
        try:
            return load(*given)
        except Exception:
            kept.flush()
            return None

    kept.load_overload = careful
    return loop


_loop, _part = _compiled(True), _compiled(False)


class World(NamedTuple):
    """A grid, or strings, in numbers."""

    string: bool
    side: int  # letters of the alphabet; places along an axis
    stop: int  # this move ends it; -1: none does
    least: int  # letters before that
    moves: int
    asked: int  # steps at which the network is asked; after the last of a tree's moves there is nothing to ask
    keeps: bool  # the rows of all steps, or of two
    back: bool  # whether it says how one came there
    flow: int  # the output that is a flow
    few: bool  # outputs
    blank: int  # what the first state has in every column


class Net(NamedTuple):
    """A policy's network: each array [S, ...]. A stage is what comes after the first layer: another layer, then the head's two parts, of which one reads
    the last layer and one the table."""

    first: np.ndarray  # [S, F, H]
    first_bias: np.ndarray  # [S, 1, H]
    stages: tuple[np.ndarray, ...]  # [S, inputs, outputs]; a head of few outputs is turned
    biases: tuple[np.ndarray, ...]  # [S, 1, outputs] of all stages but the table's
    table: np.ndarray  # [S, rows, W]


class Rows(NamedTuple):
    """Of each seed the states that it meets, in the order of their steps: [S, R, ...]."""

    begin: np.ndarray  # [S, T+2] where those of a step begin
    number: np.ndarray  # as the environment counts
    parent: np.ndarray  # the row from which it was reached first,
    feature: np.ndarray  # and the feature that this move has set
    place: np.ndarray  # [S, R, D] of a grid
    inputs: tuple[np.ndarray, ...]  # of each stage: the layers' sums, before their rectifiers, and rows of the table
    outs: np.ndarray  # [S, R, O...] of the head
    slots: np.ndarray  # [S, 2^n] to find a state among those of a step


class Way(NamedTuple):
    """Where trajectories go."""

    states: np.ndarray  # [T+1, S, B, D]
    actions: np.ndarray  # [T, S, B], as the two that follow
    moves: np.ndarray
    alive: np.ndarray
    row: np.ndarray  # [T+1, S, B] in which each state stands; -1: the trajectory has ended
    final: np.ndarray  # [S, B] the last states' numbers


class Chance(NamedTuple):
    """The random numbers of K walks."""

    drawn: np.ndarray  # [K, ...] of each, one after the other: [T, S, B, M] of noise,
    coins: int  # from here on [T, S, B]: where they fall below (-1: there are none)
    explore: np.ndarray  # [K] this, uniform chance chooses;
    slips: int  # from here on [T, S * B * (M + 1)], a draw for every move, and a coin: where it falls below (-1: there are none)
    slip: float  # this, the largest draw decides what happens
    temper: np.ndarray  # [S, B] what logits are divided by


# Products. Half of what comes out of a rectifier is nothing, so a row of the result is the sum over those terms alone that are something. A block of rows and
# a block of terms stay in the first cache, the sums of `TILE` vectors in registers: numba has no vectors, so these few functions say what LLVM should do.

config: Any = numba.config


def _compresses() -> bool:
    """Whether one instruction puts some numbers of a vector side by side. Whoever tells numba what to compile for goes without it."""
    told = config.CPU_NAME or config.CPU_FEATURES or not config.ENABLE_AVX
    try:
        return not told and bool(get_host_cpu_features().get("avx512f"))
    except RuntimeError:  # LLVM does not know this processor
        return False


_COMPRESSES = _compresses()
LANES = 16 if _COMPRESSES else 8  # numbers of a vector
TILE = 8  # vectors
ROWS, TERMS = 16, 32  # of a block
_FLOATS, _PLACES = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), ir.IntType(32)))
_intrinsic: Any = intrinsic  # its annotations do not know that numba gives the first argument itself


def _pointer(context, builder, kind, array, *where):
    """To an entry of an array."""
    return cgutils.get_item_pointer(
        context, builder, kind, context.make_array(kind)(context, builder, array), where, wraparound=False
    )


def _at(vector, context, builder, kind, array, *where):
    """To LANES entries of an array, from one on."""
    return builder.bitcast(_pointer(context, builder, kind, array, *where), vector.as_pointer())


def _each(builder, number, vector):
    """LANES times the same number."""
    none = ir.Constant(vector, ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(none, number, ir.Constant(ir.IntType(32), 0)), none, ir.Constant(_PLACES, None)
    )


@_intrinsic
def _listed(_, x, r, k, low, terms, many):
    """The places of those of LANES numbers, from x[r, k] on, which are above nothing or, where `low` is, below it: they are written to terms[many] and on.
    How many are listed then."""

    def build(context, builder, signature, given):
        (x, r, k, low, terms, many), kind = given, signature.args
        numbers, nothing = (
            builder.load(_at(_FLOATS, context, builder, kind[0], x, r, k), align=4),
            ir.Constant(_FLOATS, None),
        )
        below = builder.fcmp_ordered("<", low, ir.Constant(ir.FloatType(), 0.0))
        above, other = (
            builder.fcmp_unordered(how, numbers, nothing) for how in (">", "!=")
        )  # what is not a number is something
        chosen, first = builder.select(below, other, above), builder.trunc(k, ir.IntType(32))
        places = builder.add(_each(builder, first, _PLACES), ir.Constant(_PLACES, list(range(LANES))))
        if _COMPRESSES:
            how = ir.FunctionType(_PLACES, (_PLACES, _PLACES, chosen.type))
            compress = cgutils.get_or_insert_function(builder.module, how, f"llvm.x86.avx512.mask.compress.v{LANES}i32")
            listed = builder.call(compress, (places, ir.Constant(_PLACES, None), chosen))
            builder.store(listed, _at(_PLACES, context, builder, kind[4], terms, many), align=4)
            count = builder.ctpop(builder.bitcast(chosen, ir.IntType(LANES)))
            return builder.add(many, builder.zext(count, many.type))
        for lane in (ir.Constant(ir.IntType(32), i) for i in range(LANES)):
            builder.store(builder.extract_element(places, lane), _pointer(context, builder, kind[4], terms, many))
            many = builder.add(many, builder.zext(builder.extract_element(chosen, lane), many.type))
        return many

    return types.intp(x, types.intp, types.intp, types.float32, terms, types.intp), build


def _sums(count: int) -> Any:
    @_intrinsic
    def tile(_, x, r, terms, many, w, out, j):
        """out[r, j:] += the sum of x[r, k] w[k, j:] over the first `many` terms k, for `count` vectors."""

        def build(context, builder, signature, given):
            (x, r, terms, many, w, out, j), kind = given, signature.args

            def place(of: int, array: Any, row: Any, i: int) -> Any:
                return _at(
                    _FLOATS, context, builder, kind[of], array, row, builder.add(j, ir.Constant(j.type, i * LANES))
                )

            sums = [
                cgutils.alloca_once_value(builder, builder.load(place(5, out, r, i), align=4)) for i in range(count)
            ]
            with cgutils.for_range(builder, many) as loop:
                k = builder.sext(builder.load(_pointer(context, builder, kind[2], terms, loop.index)), j.type)
                each = _each(builder, builder.load(_pointer(context, builder, kind[0], x, r, k)), _FLOATS)
                for i in range(count):
                    term = builder.fmul(each, builder.load(place(4, w, k, i), align=4), flags=("contract",))
                    builder.store(builder.fadd(builder.load(sums[i]), term, flags=("contract",)), sums[i])
            for i in range(count):
                builder.store(builder.load(sums[i]), place(5, out, r, i), align=4)
            return context.get_dummy_value()

        return types.void(x, types.intp, terms, types.intp, w, out, types.intp), build

    return tile


_tile, _half, _one = _sums(TILE), _sums(TILE // 2), _sums(1)


@_part
def product(x, w, out, a, b, low):
    """out += x w, of the rows a to b. `low` = 0 reads x through a rectifier, `low` = -inf as it is. (For a literal zero it would be compiled once more:
    whoever means all rows begins at x - x.)"""
    most, wide, terms = w.shape[0], w.shape[1], np.empty(TERMS + LANES, dtype=np.int32)
    tile = TILE * LANES
    tiles, halves, ones = wide // tile * tile, wide // (tile // 2) * (tile // 2), wide // LANES * LANES
    for first in range(a, b, ROWS):
        for begin in range(0, most, TERMS):
            end = min(begin + TERMS, most)
            whole = begin + (end - begin) // LANES * LANES
            for r in range(first, min(first + ROWS, b)):
                many = 0
                for k in range(begin, whole, LANES):
                    many = _listed(x, r, k, low, terms, many)
                for k in range(whole, end):
                    terms[many] = k
                    many += max(x[r, k], low) != 0
                for j in range(0, tiles, tile):
                    _tile(x, r, terms, many, w, out, j)
                for j in range(tiles, halves, tile // 2):
                    _half(x, r, terms, many, w, out, j)
                for j in range(halves, ones, LANES):
                    _one(x, r, terms, many, w, out, j)
                for i in range(many if ones < wide else 0):
                    k = terms[i]
                    for j in range(ones, wide):
                        out[r, j] += x[r, k] * w[k, j]


@_compiled(False, "reassoc")  # in which order these are added up, the compiler may choose
def dots(x, w, out, a, b, low):
    """out += x w' of the rows a to b, for few rows of w."""
    for r in range(a, b):
        for i in range(w.shape[0]):
            total = np.float32(0)
            for k in range(w.shape[1]):
                total += max(x[r, k], low) * w[i, k]
            out[r, i] += total


@_part
def few_rows(x, y, out, many, a, b, low):
    """out += x' y of the first rows, for few columns of x, of which those from a to b; here y is read through the rectifier."""
    for r in range(many):
        for i in range(a, b):
            one = x[r, i]
            for j in range(out.shape[1]):
                out[i, j] += one * max(y[r, j], low)


@_intrinsic
def _turned(_, x, r, k, out, i, j):
    """LANES rows of x from r on, as columns of `out` from j on, for LANES columns from k on: shuffled like a pack of cards, as often as two goes into LANES."""

    def build(context, builder, signature, given):
        x, r, k, out, i, j = given

        def line(of: int, array: Any, row: Any, n: int, column: Any) -> Any:
            return _at(
                _FLOATS, context, builder, signature.args[of], array, builder.add(row, ir.Constant(row.type, n)), column
            )

        half = LANES // 2
        pairs = [
            ir.Constant(_PLACES, [at + side * LANES + n for n in range(half) for side in (0, 1)]) for at in (0, half)
        ]
        cards = [builder.load(line(0, x, r, n, k), align=4) for n in range(LANES)]
        for _ in range(LANES.bit_length() - 1):
            cards = [builder.shuffle_vector(cards[n], cards[n + half], pair) for n in range(half) for pair in pairs]
        for n, card in enumerate(cards):
            builder.store(card, line(3, out, i, n, j), align=4)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, out, types.intp, types.intp), build


@_part
def turn(x, many, a, b):
    """Of the first rows the columns a to b, as rows, which begin where a vector may be read at once."""
    flat = np.empty((b - a) * many + LANES, dtype=x.dtype)
    skip = -(flat.ctypes.data // flat.itemsize) % LANES
    out = flat[skip : skip + (b - a) * many].reshape(b - a, many)
    rows, columns = many // LANES * LANES, (b - a) // LANES * LANES
    for i in range(0, rows, LANES):
        for j in range(0, columns, LANES):
            _turned(x, i, a + j, out, j, i)
    for j in range(b - a):
        for i in range(rows if j < columns else 0, many):
            out[j, i] = x[i, a + j]
    return out


# The walk.


@_loop
def walk(s, e, begin, end, asks, acts, goes, most, k, world, net, rows, way, chance):
    """The seeds s to e from step `begin` to step `end` of walk k: at each of them the network is asked, about the hundredths of its states from `asks[0]` to
    `asks[1]`; they decide, if they are to act, and move, if they are to go. After the last step there is nothing to decide. It ends before a step
    of more than `most` states, which threads may share, and says where that was."""
    side, stop, moves = world.side, world.stop, world.moves
    outs, number, place, slots, starts = rows.outs, rows.number, rows.place, rows.slots, rows.begin
    row, alive, last = way.row, way.alive, len(net.stages) - 2
    batch, axes, free, sums = row.shape[2], place.shape[2], np.int64(world.string), rows.inputs[0]
    drawn, all_seeds = chance.drawn[k], row.shape[1] * batch
    for seed in range(s, e):
        for one in range(batch if begin == 0 and acts else 0):
            row[0, seed, one] = way.final[seed, one] = 0
            for column in range(way.states.shape[3]):
                way.states[0, seed, one, column] = world.blank
        for j in range(
            sums.shape[2] if begin == 0 and acts else 0
        ):  # in the first state, the bias and, on a grid, one feature an axis
            sums[seed, 0, j] = net.first_bias[seed, 0, j]
            for axis in range(axes):
                sums[seed, 0, j] += net.first[seed, axis * side, j]
        for t in range(begin, end):
            if asks[0] < asks[1]:
                # What the network makes of this step's states, of which the first layer's sums are known.
                many = starts[seed, t + 1] - starts[seed, t]
                if many > most:
                    return t
                a, b = starts[seed, t] + many * asks[0] // 100, starts[seed, t] + many * asks[1] // 100
                known = rows.inputs[last + 1]
                for r in range(a, b if known.shape[2] > 0 else a):
                    line = min(number[seed, r], net.table.shape[1] - 1)
                    for j in range(known.shape[2]):
                        known[seed, r, j] = net.table[seed, line, j]
                for i in range(len(net.stages) if known.shape[2] > 0 else last + 1):
                    out, low = rows.inputs[i + 1] if i < last else outs, np.float32(-np.inf)
                    if i <= last:
                        low = np.float32(0)
                        for r in range(a, b):
                            for j in range(out.shape[2]):
                                out[seed, r, j] = net.biases[i][seed, 0, j]
                    if i >= last and world.few:
                        dots(rows.inputs[i][seed], net.stages[i][seed], out[seed], a, b, low)
                    else:
                        product(rows.inputs[i][seed], net.stages[i][seed], out[seed], a, b, low)
            for one in range(batch if acts and t < alive.shape[0] else 0):
                # What each trajectory that goes on means to do and, if that may slip, what happens.
                r, on = row[t, seed, one], free
                alive[t, seed, one], way.actions[t, seed, one], way.moves[t, seed, one] = (
                    False,
                    max(stop, 0),
                    max(stop, 0),
                )
                for axis in range(axes if r >= 0 else 0):
                    on += place[seed, r, axis] < side - 1
                if r < 0 or on == 0:  # at a grid's last state there is nothing to decide
                    continue
                alive[t, seed, one] = True
                here = t * all_seeds + seed * batch + one
                blind = chance.coins >= 0 and drawn[chance.coins + here] < chance.explore[k]
                lots = chance.slips + t * all_seeds * (moves + 1)
                slips = chance.slips >= 0 and drawn[lots + all_seeds * moves + seed * batch + one] < chance.slip
                lots += (seed * batch + one) * moves
                action, move, best, luck = -1, -1, np.float32(0), np.float32(-1)
                for m in range(moves):
                    if (t < world.least) if m == stop else (m < axes and place[seed, r, m] == side - 1):
                        continue  # not allowed
                    x = -drawn[here * moves + m]
                    if not blind:
                        x += outs[seed, r, m] / chance.temper[seed, one]
                    if action < 0 or x > best:
                        action, best = m, x
                    if slips and m != stop and drawn[lots + m] > luck:
                        move, luck = m, drawn[lots + m]
                way.actions[t, seed, one] = action
                way.moves[t, seed, one] = action if move < 0 or action == stop else move
            if goes and t < alive.shape[0]:
                # Each makes its move, and whoever comes where another has come shares its row.
                new = starts[seed, t + 1]
                if not world.keeps:  # in turn in one half of the rows and in the other
                    new = starts[seed, t + 1] = 0 if starts[seed, t] > 0 else number.shape[1] // 2
                for i in range(slots.shape[1]):
                    slots[seed, i] = -1
                for one in range(batch):
                    r, move = row[t, seed, one], way.moves[t, seed, one]
                    row[t + 1, seed, one] = -1
                    for column in range(way.states.shape[3]):
                        way.states[t + 1, seed, one, column] = way.states[t, seed, one, column]
                    if not alive[t, seed, one] or move == stop:
                        continue
                    if world.string:
                        way.states[t + 1, seed, one, t] = move
                        to, flag = number[seed, r] * side + 1 + move, t * side + move
                    else:
                        way.states[t + 1, seed, one, move] += 1
                        to, flag = number[seed, r] + side ** (axes - 1 - move), move * side + place[seed, r, move] + 1
                    way.final[seed, one] = to
                    if t + 1 == world.asked:
                        continue
                    at = np.int64(np.uint64(to) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) & (slots.shape[1] - 1)
                    found = slots[seed, at]
                    while found >= 0 and not (
                        number[seed, found] == to and (rows.parent[seed, found] == r or not world.string)
                    ):
                        at = (at + 1) & (slots.shape[1] - 1)
                        found = slots[seed, at]
                    if found < 0:
                        found = slots[seed, at] = new
                        number[seed, new], rows.parent[seed, new], rows.feature[seed, new] = to, r, flag
                        for axis in range(axes):
                            place[seed, new, axis] = place[seed, r, axis] + (axis == move)
                        for j in range(sums.shape[2]):
                            sums[seed, new, j] = sums[seed, r, j] + net.first[seed, flag, j]
                        for j in range(sums.shape[2] if axes > 0 else 0):
                            sums[seed, new, j] -= net.first[seed, flag - 1, j]  # which was on, until then
                        new += 1
                    row[t + 1, seed, one] = found
                starts[seed, t + 2] = new
    return end


# The balance.


@_part
def _exp(x):
    """Of what is not above zero, right to a digit in ten million: 2^n e^r, |r| < log 2 / 2. A call of the library's would not be vectorised."""
    n = np.floor(x * np.float32(1.442695041) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1)
    power = np.int32((np.int32(max(n, np.float32(-126))) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0) if x < np.float32(-87) else y * power


@_part
def _weigh(seed, count, world, begin, place, outs, x, law):
    """Above the largest allowed one, each row's logits of the moves and, where they are learned, of the ways back, and their exponentials; what is not
    allowed is far below."""
    far, moves, axes, t = np.float32(FAR), world.moves, place.shape[2], 0
    for r in range(count):
        while r >= begin[seed, t + 1]:
            t += 1
        line = x[r]
        for m in range(len(line)):
            line[m] = outs[seed, r, m]
        if world.stop >= 0 and t < world.least:
            line[world.stop] = far
        if world.back:
            line[moves + world.stop] = far
        for axis in range(axes):
            if place[seed, r, axis] == world.side - 1:
                line[axis] = far
            if world.back and place[seed, r, axis] == 0 and r > 0:
                line[moves + axis] = far
        for part in range(2 if world.back else 1):
            top = np.float32(-np.inf)
            for m in range(part * moves, (part + 1) * moves):
                top = max(top, line[m])
            for m in range(part * moves, (part + 1) * moves):
                line[m] -= top
        for m in range(len(line)):
            law[r, m] = _exp(line[m])


class Said(NamedTuple):
    """What a balance says."""

    x: np.ndarray  # [S, R, M (+ M)] logits as `_weigh` leaves them
    e: np.ndarray  # and their exponentials
    forth: np.ndarray  # [S, T] of a trajectory, log p(move), policy and noise together
    back: np.ndarray  # [S, T+1] log P_B of the move that led there
    led: np.ndarray  # [S, T, M] the law of the action, given the move
    gone: np.ndarray  # [S, R, 2] what is said to a row's log-probabilities, forth and back, all told
    slope: np.ndarray  # [S, R, O...] what the loss says to each output
    loss: np.ndarray  # [S, B]
    estimate: np.ndarray  # [S, B] of log Z
    entropy: np.ndarray  # [S, B] of the policy along the way


@_loop
def judge(s, e, detailed, by_number, scale, world, begin, place, outs, way, log_k, paid, said, log_z, to_log_z):
    """The residuals of the seeds s to e, and what the loss says to log Z and to the network's outputs; `log_k` without entries: what is meant happens."""
    row, moved, alive = way.row, way.moves, way.alive
    x, law, led, slope, gone = said.x, said.e, said.led, said.slope, said.gone
    steps, batch, moves, axes, stop, flow = (
        alive.shape[0],
        row.shape[2],
        world.moves,
        place.shape[2],
        world.stop,
        world.flow,
    )
    for seed in range(s, e):
        count, decided, to_z, z = begin[seed, world.asked], 0, 0.0, float(log_z[seed, 0] * np.float32(scale))
        _weigh(seed, count, world, begin, place, outs, x[seed], law[seed])
        for r in range(count):
            gone[seed, r, 0] = gone[seed, r, 1] = 0
            for m in range(slope.shape[2]):
                slope[seed, r, m] = 0
        for t in range(steps):
            for b in range(batch):
                decided += alive[t, seed, b]
        share = 2 / max(decided, 1) if detailed else 2 / batch
        for b in range(batch):
            # Along the way log p(move), log P_B of the state before it, what was meant, and the policy's entropy.
            worth = paid[way.final[seed, b] if by_number else seed * batch + b]
            left, entropy = float(worth), 0.0
            for t in range(world.asked):
                r = row[t, seed, b]
                if r < 0:
                    break
                if t > 0 and axes > 0:
                    total = 0.0
                    for axis in range(axes):
                        total += law[seed, r, moves + axis] if world.back else min(place[seed, r, axis], 1)
                    said.back[seed, t] = -math.log(total)
                    if world.back:
                        said.back[seed, t] += x[seed, r, moves + moved[t - 1, seed, b]]
                    left += said.back[seed, t]
                if t == steps or not alive[t, seed, b]:
                    break
                move, total, weighed, top = moved[t, seed, b], 0.0, 0.0, -np.inf
                for m in range(moves):
                    total += law[seed, r, m]
                    weighed += law[seed, r, m] * x[seed, r, m]
                entropy += math.log(total) - weighed / total
                said.forth[seed, t] = x[seed, r, move] - math.log(total)
                if (
                    log_k.size > 0 and move != stop
                ):  # STOP is exact: nothing else leads there, and it leads nowhere else
                    for m in range(moves):
                        if m != stop and x[seed, r, m] > FAR / 2:
                            top = max(top, float(x[seed, r, m] + log_k[t, seed, b, m]))
                    some = 0.0
                    for m in range(moves):
                        led[seed, t, m] = 0
                        if m != stop and x[seed, r, m] > FAR / 2:
                            led[seed, t, m] = math.exp(x[seed, r, m] + log_k[t, seed, b, m] - top)
                        some += led[seed, t, m]
                    for m in range(moves):
                        led[seed, t, m] /= some
                    said.forth[seed, t] = top + math.log(some) - math.log(total)
                left -= said.forth[seed, t]
            residual, loss = z - left, 0.0
            # What the loss says to each log p(move), and the contrary to log P_B of the state to which it led.
            for t in range(steps):
                if not alive[t, seed, b]:
                    break
                r, after, move = row[t, seed, b], row[t + 1, seed, b], moved[t, seed, b]
                if (
                    detailed
                ):  # flow + log p - log P_B - flow of the next, where at the end the reward stands in for the flow
                    on = t + 1 < steps and alive[t + 1, seed, b]
                    residual = z + outs[seed, r, flow] + said.forth[seed, t]
                    residual -= z + outs[seed, after, flow] if on else worth
                    if after >= 0 and axes > 0:
                        residual -= said.back[seed, t + 1]
                    loss += residual**2 * share * batch / 2
                    slope[seed, r, flow] += share * residual
                    if on:
                        slope[seed, after, flow] -= share * residual
                    else:
                        to_z += share * residual  # every flow stands on log Z; between two of them it cancels
                word = np.float32(share * residual)
                gone[seed, r, 0] += word
                if log_k.size == 0 or move == stop:
                    slope[seed, r, move] += word
                else:
                    for m in range(moves):
                        slope[seed, r, m] += word * led[seed, t, m]
                if world.back and after >= 0:
                    gone[seed, after, 1] -= word
                    slope[seed, after, moves + move] -= word
            if not detailed:
                loss = residual**2
                to_z += share * residual
            said.loss[seed, b], said.estimate[seed, b], said.entropy[seed, b] = loss, left, entropy
        to_log_z[seed, 0] = to_z * scale
        for r in range(count):  # what is said to the logarithm of a sum is said to its terms
            for part in range(2 if world.back else 1):
                whole = np.float32(0)
                for m in range(part * moves, (part + 1) * moves):
                    whole += law[seed, r, m]
                for m in range(part * moves, (part + 1) * moves):
                    slope[seed, r, m] -= gone[seed, r, part] * law[seed, r, m] / whole


@_loop
def back(s, e, part, parts, few, count, stages, inputs, slope, said):
    """What is said to the inputs of each stage (`said`) of the seeds s to e, from what is said to the head's outputs; of one of so many parts of the rows."""
    last, as_it_is = len(stages) - 2, np.float32(-np.inf)
    for seed in range(s, e):
        a, b = count[seed] * part // parts, count[seed] * (part + 1) // parts
        for i in range(last + 1 if inputs[last + 1].shape[2] > 0 else last, -1, -1):
            x, word, to, weights = (
                inputs[i][seed],
                slope[seed] if i >= last else said[i + 1][seed],
                said[i][seed],
                stages[i][seed],
            )
            for r in range(a, b):
                for j in range(to.shape[1]):
                    to[r, j] = 0
            turned = weights if i >= last and few else turn(weights, weights.shape[0], a - a, weights.shape[1])
            product(word, turned, to, a, b, as_it_is)
            for r in range(a, b if i <= last else a):
                for j in range(to.shape[1]):
                    to[r, j] = (
                        to[r, j] if x[r, j] > 0 else np.float32(0)
                    )  # nothing goes back to where nothing came from


@_loop
def teach(s, e, part, parts, few, count, inputs, slope, said, to_stages, to_biases):
    """And what that says to the weights of the stages, and to all biases, from the first layer's on: one of so many parts of their rows."""
    last, as_it_is = len(to_stages) - 2, np.float32(-np.inf)
    for seed in range(s, e):
        many = count[seed]
        for i in range(last + 2):
            into = to_biases[i][seed, 0]
            _columns(
                slope[seed] if i > last else said[i][seed],
                many,
                into,
                len(into) * part // parts,
                len(into) * (part + 1) // parts,
            )
        for i in range(last + 2 if inputs[last + 1].shape[2] > 0 else last + 1):
            x, word, out = inputs[i][seed], slope[seed] if i >= last else said[i + 1][seed], to_stages[i][seed]
            a, b, low = (
                len(out) * part // parts,
                len(out) * (part + 1) // parts,
                np.float32(0) if i <= last else as_it_is,
            )
            for k in range(a, b):
                for j in range(out.shape[1]):
                    out[k, j] = 0
            if i >= last and few:
                few_rows(word, x, out, many, a, b, low)
            else:
                product(turn(x, many, a, b), word[:many], out[a:b], a - a, b - a, low)


@_part
def _columns(x, many, out, a, b):
    """The sums of the first rows of x, from column a to b."""
    to = out[a:b]
    for j in range(len(to)):
        to[j] = 0
    for r in range(many):
        line = x[r, a:b]
        for j in range(len(to)):
            to[j] += line[j]


@_part
def _plus(x, out):
    """One row to another. (As part of a longer loop it would not be vectorised.)"""
    for j in range(len(out)):
        out[j] += x[j]


@_loop
def spread(s, e, side, count, number, parent, feature, place, to_first, to_table, first, table):
    """What is said to the first layer's sums and to the table goes to the features and rows of the seeds s to e. A string has the features of the row
    before it and one more, so that row is told what all that follow it were told."""
    for seed in range(s, e):
        words, out = to_first[seed], first[seed]
        for array in (first, table):
            for i in range(array.shape[1]):
                for j in range(array.shape[2]):
                    array[seed, i, j] = 0
        for r in range(count[seed] - 1, -1, -1):
            for axis in range(place.shape[2]):
                _plus(words[r], out[axis * side + place[seed, r, axis]])
            if place.shape[2] == 0 and r > 0:
                _plus(words[r], out[feature[seed, r]])
                _plus(words[r], words[parent[seed, r]])
            for j in range(table.shape[2]):
                table[seed, min(number[seed, r], table.shape[1] - 1), j] += to_table[seed, r, j]


# The update.


@_compiled(False, "reassoc")
def _square(g):
    """The sum of squares, in an order that is the compiler's to choose."""
    total = np.float32(0)
    for k in range(len(g)):
        total += g[k] * g[k]
    return total


@_loop
def update(
    s, e, part, parts, sums, steps, k, first, pieces, found, norms, clip, grad, values, means, roots, average, paces
):
    """Of the seeds s to e, of one of so many parts of each seed's pieces, which begin at first[seed]: the sums of squares, if it `sums`, and, if it
    `steps`, Adam's step of a gradient scaled to a norm of at most `clip`, and the average. `paces[k]` = the rate over the first moment's correction, one
    over the root of the second's, and the average's share."""
    rate, root, share = np.float32(paces[k, 0]), np.float32(paces[k, 1]), np.float32(paces[k, 2])
    old, older = np.float32(0.9), np.float32(0.999)
    new, newer, tiny = np.float32(1 - 0.9), np.float32(1 - 0.999), np.float32(1e-8)
    faint, least = (
        np.float32(1e-30),
        np.float32(2.0**-126),
    )  # below, nothing changes a weight, and some processors take a hundred times as long for it
    for seed in range(s, e):
        begin, many, total = first[seed], first[seed + 1] - first[seed], 0.0
        here, end = begin + many * part // parts, begin + many * (part + 1) // parts
        for i in range(here, end if sums else here):
            found[i] = _square(grad[pieces[i, 0] : pieces[i, 1]])
        if not steps:
            continue
        for i in range(begin, begin + many):
            total += found[i]
        norm = math.sqrt(total)
        norms[seed] = norm
        scale = np.float32(1 if norm <= clip else clip / norm)  # NaN is not below either
        for i in range(here, end):
            a, b = pieces[i, 0], pieces[i, 1]
            g, v, m, r, w = grad[a:b], values[a:b], means[a:b], roots[a:b], average[a:b]
            for j in range(b - a):
                slope = g[j] * scale
                mean, square = old * m[j] + new * slope, older * r[j] + newer * slope * slope
                m[j] = np.float32(0) if abs(mean) < faint else mean
                r[j] = np.float32(0) if square < least else square
            for j in range(b - a):  # a loop over more arrays would not be vectorised
                value = v[j] - rate * m[j] / (np.sqrt(r[j]) * root + tiny)
                w[j] += share * (value - w[j])
                v[j] = value


# The noise.


class Model(NamedTuple):
    """A classifier of moves with one hidden layer, of which the head says of every action what may come of it; each array [S, ...]."""

    first: np.ndarray  # [S, F, H]
    first_bias: np.ndarray  # [S, 1, H]
    head: np.ndarray  # [S, H, M * M]
    head_bias: np.ndarray  # [S, 1, M * M]


class Thought(NamedTuple):
    """What it makes of R distinct states, of each seed its own."""

    slots: np.ndarray  # [S, 2^n] to find them
    number: np.ndarray  # [S, R] as the environment counts
    row: np.ndarray  # [T, S, B] in which each step began; -1: nothing was done there, or it ended there
    met: np.ndarray  # [S, R, 2] the step and the trajectory that met it first
    hidden: np.ndarray  # [S, R, H] before its rectifier
    table: np.ndarray  # [S, R, M * M] log-probabilities of moves, action by action
    many: np.ndarray  # [S] rows


@_loop
def ponder(s, e, string, side, stop, moves, states, moved, alive, model, thought, out):
    """What the model of the seeds s to e says of the states in which a move was made and, unless `out` has no entries, of each move after every action."""
    steps, batch, wide, width = moved.shape[0], moved.shape[2], states.shape[3], model.head.shape[1]
    slots, number, row, table, hidden = thought.slots, thought.number, thought.row, thought.table, thought.hidden
    for seed in range(s, e):
        new = 0
        for i in range(slots.shape[1]):
            slots[seed, i] = -1
        for t in range(steps):
            for b in range(batch):
                row[t, seed, b] = -1
                if not alive[t, seed, b] or moved[t, seed, b] == stop:
                    continue
                name = t if string else 0  # a string is longer by a letter at every step
                for column in range(t if string else wide):
                    name = name * side + states[t, seed, b, column]
                at = np.int64(np.uint64(name) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) & (slots.shape[1] - 1)
                while slots[seed, at] >= 0 and number[seed, slots[seed, at]] != name:
                    at = (at + 1) & (slots.shape[1] - 1)
                if slots[seed, at] < 0:
                    slots[seed, at], number[seed, new], thought.met[seed, new, 0], thought.met[seed, new, 1] = (
                        new,
                        name,
                        t,
                        b,
                    )
                    new += 1
                row[t, seed, b] = slots[seed, at]
        thought.many[seed] = new
        for r in range(new):
            t, b = thought.met[seed, r, 0], thought.met[seed, r, 1]
            for m in range(table.shape[2]):
                table[seed, r, m] = model.head_bias[seed, 0, m]
            for j in range(width):
                hidden[seed, r, j] = model.first_bias[seed, 0, j]
            for column in range(t if string else wide):
                _plus(model.first[seed, column * side + states[t, seed, b, column]], hidden[seed, r])
        dots(
            hidden[seed],
            turn(model.head[seed], width, new - new, table.shape[2]),
            table[seed],
            new - new,
            new,
            np.float32(0),
        )
        for r in range(new):
            t, b, law = thought.met[seed, r, 0], thought.met[seed, r, 1], table[seed, r]
            for action in range(moves):
                top, total = np.float32(-np.inf), 0.0
                for m in range(moves):
                    if m != stop and (string or states[t, seed, b, m] < side - 1):
                        top = max(top, law[action * moves + m])
                    else:
                        law[action * moves + m] = FAR
                for m in range(moves):
                    total += math.exp(law[action * moves + m] - top)
                for m in range(moves):
                    law[action * moves + m] = max(
                        law[action * moves + m] - top - np.float32(math.log(total)), np.float32(FAR)
                    )
        for t in range(out.shape[0]):
            for b in range(batch):
                r = row[t, seed, b]
                for action in range(moves if r >= 0 else 0):
                    out[t, seed, b, action] = table[seed, r, action * moves + moved[t, seed, b]]


@_loop
def blame(s, e, string, side, moves, states, actions, moved, teaches, model, thought, into, losses):
    """The gradient of the mean of -log P(move | action) over the steps that teach, and that mean."""
    batch, width = moved.shape[2], model.head.shape[1]
    for seed in range(s, e):
        count, steps, loss = thought.many[seed], 0, 0.0
        said = np.zeros((count, moves * moves), dtype=np.float32)
        often = np.zeros((count, moves), dtype=np.float32)
        for i in range(into.first.shape[1]):
            for j in range(width):
                into.first[seed, i, j] = 0
        for t in range(moved.shape[0]):
            for b in range(batch):
                r, action, move = thought.row[t, seed, b], actions[t, seed, b], moved[t, seed, b]
                if teaches[t, seed, b] and r >= 0:
                    steps += 1
                    often[r, action] += 1
                    said[r, action * moves + move] -= 1
                    loss -= thought.table[seed, r, action * moves + move]
        share = np.float32(1 / max(steps, 1))
        losses[seed] = loss / max(steps, 1)
        for r in range(count):
            for action in range(moves):
                for m in range(moves if often[r, action] > 0 else 0):
                    likely = often[r, action] * math.exp(thought.table[seed, r, action * moves + m])
                    said[r, action * moves + m] = (said[r, action * moves + m] + likely) * share
        hidden, none = thought.hidden[seed], count - count
        turned = turn(model.head[seed], width, none, moves * moves)
        to_turned, to_hidden = np.zeros(turned.shape, dtype=np.float32), np.zeros((count, width), dtype=np.float32)
        few_rows(said, hidden, to_turned, count, none, moves * moves, np.float32(0))
        product(said, turned, to_hidden, none, count, np.float32(-np.inf))
        _columns(said, count, into.head_bias[seed, 0], none, moves * moves)
        for j in range(width):
            for m in range(moves * moves):
                into.head[seed, j, m] = to_turned[m, j]
        for r in range(count):
            t, b = thought.met[seed, r, 0], thought.met[seed, r, 1]
            for j in range(width):  # nothing goes back to where nothing came from
                to_hidden[r, j] = to_hidden[r, j] if hidden[r, j] > 0 else np.float32(0)
            for column in range(t if string else states.shape[3]):
                _plus(to_hidden[r], into.first[seed, column * side + states[t, seed, b, column]])
        _columns(to_hidden, count, into.first_bias[seed, 0], none, width)


BESIDE = "judge", "back", "teach", "blame"


def warm() -> None:
    """Compile these loops for a network of two layers and a model of the noise, as they come after a first walk: called for nothing, on arrays of nothing."""

    def no(dimensions: int, kind: type = np.float32) -> np.ndarray:
        return np.empty((0,) * dimensions, dtype=kind)

    world, three = World(False, 2, 1, 0, 2, 0, True, True, 0, True, 0), (no(3),) * 3
    count, lists, numbers = no(1, np.int64), no(2, np.int64), no(3, np.int64)
    way = Way(no(4, np.int64), numbers, numbers, no(3, bool), numbers, lists)
    said = Said(no(3), no(3), no(2, float), no(2, float), no(3), no(3), no(3), no(2), no(2), no(2))
    judge(0, 0, True, True, 1.0, world, lists, numbers, no(3), way, no(4), no(1), said, no(2), no(2))
    back(0, 0, 0, 1, True, count, three, three, no(3), three)
    teach(0, 0, 0, 1, True, count, three, no(3), three, three, three)
    model, thought = Model(no(3), no(3), no(3), no(3)), Thought(lists, lists, numbers, numbers, no(3), no(3), count)
    blame(0, 0, True, 2, 2, no(4, np.int64), numbers, numbers, no(3, bool), model, thought, model, no(1))
