"""Many iterations in one compiled call: the loops of `cpu_loops`, one after the other, each as it was compiled for itself.

Between two loops Python takes as long as the shorter ones, and to wake a thread takes longer; in here neither is needed. A loop is called by its address, with
the arguments with which Python would call it, so nothing is compiled twice, and what is written here knows of no array what it means.

Seeds never touch, so each goes through all its iterations alone, with its weights in the cache. Of one seed, helpers take parts: a thread that is in here looks
for work until the last iteration is over. Whoever finds a part takes it, so nobody waits for a helper that has not come yet. Each number is
summed by one of them, in one order: no number of threads changes a digit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numba
from llvmlite import ir
from llvmlite.binding import get_process_triple
from numba import types
from numba.core import cgutils

from stochflow.engines.numba.loops import _intrinsic, _loop, _part

WALK, JUDGE, BACK, TEACH, SPREAD, UPDATE, PONDER, BLAME = range(8)  # loops, in the order of their addresses
ASK, SUM, STEP = 8, 9, 10  # what helpers may do beside BACK and TEACH: asking, and the two halves of an update
TICKET, DONE, WHAT, FAILED = (
    0,
    8,
    16,
    24,
)  # places on the board, far enough apart for those who write and those who wait
LINES, END = 32, -(1 << 62)
ALWAYS = 1 << 62
PATIENCE = 4000  # looks at the board, some hundred microseconds at most, before somebody else may have this core
NOTHING, STEPS = types.none, types.int64  # what loops answer


def address(loop: Any, given: Sequence[Any], answer: Any = NOTHING) -> int:
    """Of a loop as it was compiled for these arguments; it is compiled if it was not."""
    kinds = tuple(numba.typeof(x) for x in given)
    loop.compile(kinds)
    found = loop.overloads[kinds]
    assert found.signature.return_type == answer
    return found.library.get_pointer_to_function(found.fndesc.llvm_func_name)


def _calls(result: Any) -> Any:
    @_intrinsic
    def call(_, where, which, given):
        """What the loop at an address answers when it is given first `which`, then the rest (one that answers nothing: 0); -1 if it failed."""

        def build(context, builder, signature, arguments):
            where, *tuples = arguments
            kinds = [types.unliteral(kind) for part in signature.args[1:] for kind in part]
            values = [
                x
                for part, of in zip(tuples, signature.args[1:], strict=True)
                for x in cgutils.unpack_tuple(builder, part, len(of))
            ]
            loop = builder.inttoptr(where, context.call_conv.get_function_type(result, kinds).as_pointer())
            status, answer = context.call_conv.call_function(builder, loop, result, kinds, values)
            nothing = ir.Constant(ir.IntType(64), 0)
            return builder.select(
                status.is_error, ir.Constant(nothing.type, -1), nothing if result is NOTHING else answer
            )

        return types.int64(types.int64, which, given), build

    return call


_call, _go = _calls(NOTHING), _calls(STEPS)


def _line(context, builder, signature, board, where):
    array = context.make_array(signature.args[0])(context, builder, board)
    return cgutils.get_item_pointer(context, builder, signature.args[0], array, (where,), wraparound=False)


@_intrinsic
def _look(_, board, where):
    """What stands on the board, and with it everything that was written before it."""

    def build(context, builder, signature, given):
        return builder.load_atomic(_line(context, builder, signature, *given), "acquire", 8)

    return types.int64(board, types.int64), build


@_intrinsic
def _put(_, board, where, what):
    def build(context, builder, signature, given):
        builder.store_atomic(given[2], _line(context, builder, signature, *given[:2]), "release", 8)
        return context.get_dummy_value()

    return types.void(board, types.int64, types.int64), build


@_intrinsic
def _add(_, board, where, what):
    """What stood there before this was added."""

    def build(context, builder, signature, given):
        return builder.atomic_rmw("add", _line(context, builder, signature, *given[:2]), given[2], "acq_rel")

    return types.int64(board, types.int64, types.int64), build


@_intrinsic
def _wait(_, looks):
    """Between two looks; after many, let others have the core."""

    def build(context, builder, signature, given):
        if get_process_triple().startswith(("x86_64", "i686")):
            pause = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), ()), "llvm.x86.sse2.pause"
            )
            builder.call(pause, ())
        if os.name == "posix":
            with builder.if_then(
                builder.icmp_signed(">", given[0], ir.Constant(given[0].type, PATIENCE)), likely=False
            ):
                give_way = cgutils.get_or_insert_function(
                    builder.module, ir.FunctionType(ir.IntType(32), ()), "sched_yield"
                )
                builder.call(give_way, ())
        return context.get_dummy_value()

    return types.void(types.int64), build


@_part
def _do(what, seed, part, parts, t, k, where, walk, back, teach, update):
    """One of so many parts of what is to be done."""
    if what == ASK:
        asks = 100 * part // parts, 100 * (part + 1) // parts
        return min(_go(where[WALK], (seed, seed + 1, t, t + 1, asks, False, False, ALWAYS, k), walk), 0)
    if what == BACK:
        return _call(where[BACK], (seed, seed + 1, part, parts), back)
    if what == TEACH:
        return _call(where[TEACH], (seed, seed + 1, part, parts), teach)
    return _call(where[UPDATE], (seed, seed + 1, part, parts, what == SUM, what == STEP, k), update)


@_part
def _together(what, seed, parts, t, k, board, where, walk, back, teach, update):
    """All parts, of which helpers take what they find."""
    board[WHAT], board[WHAT + 1], board[WHAT + 2], board[WHAT + 3] = what, seed, t, k
    _put(board, DONE, 0)
    _put(board, TICKET, parts << 16)
    part = 0
    while part < parts:
        part = _add(board, TICKET, 1) & 0xFFFF
        if part < parts:
            if _do(what, seed, part, parts, t, k, where, walk, back, teach, update) < 0:
                _put(board, FAILED, 1)
            _add(board, DONE, 1)
    looks = 0
    while _look(board, DONE) < parts:
        looks += 1
        _wait(looks)


@_part
def _help(board, where, walk, back, teach, update):
    """Take parts until there are no more to come."""
    looks = 0
    while True:
        ticket = _look(board, TICKET)
        if ticket < 0:
            return
        if ticket & 0xFFFF < ticket >> 16:
            ticket = _add(board, TICKET, 1)  # which may be of what came next: then it is a part of that
            part, parts = ticket & 0xFFFF, ticket >> 16
            if part < parts:
                seed, t, k = board[WHAT + 1], board[WHAT + 2], board[WHAT + 3]
                if _do(board[WHAT], seed, part, parts, t, k, where, walk, back, teach, update) < 0:
                    _put(board, FAILED, 1)
                _add(board, DONE, 1)
                looks = 0
                continue
        looks += 1
        _wait(looks)


@_part
def _heads(seed, few, turned, head, bias, own, table, own_bias):
    """A head [S, H + W, O] and its bias in the forms that loops have of them or, `turned` back, from there."""
    wide = own.shape[2] if few else own.shape[1]
    for i in range(head.shape[1]):
        for o in range(head.shape[2]):
            part, line = (own, i) if i < wide else (table, i - wide)
            a, b = (o, line) if few else (line, o)
            if turned:
                head[seed, i, o] = part[seed, a, b]
            else:
                part[seed, a, b] = head[seed, i, o]
    for o in range(head.shape[2]):
        if turned:
            bias[seed, 0, o] = own_bias[seed, 0, o]
        else:
            own_bias[seed, 0, o] = bias[seed, 0, o]


@_loop
def rounds(
    helps, s, e, many, crew, worth, size, board, finished, where, asked, begin, count, few,
    heads, to_heads, walk, judge, back, teach, spread, update, noise,
):  # fmt: skip
    """So many iterations of the seeds s to e, which are counted in `finished`, or, if it `helps`, parts of those of the only one, as long as they last. Up
    to `crew` threads share what is `worth` it: products of rows and weights, of which there are `size`. A loop that fails ends it."""
    if helps:
        _help(board, where, walk, back, teach, update)
        return
    for seed in range(s, e):
        for k in range(many):
            _heads(seed, few, False, *heads)
            t, shared, most = 0, False, worth // size if crew > 1 else ALWAYS
            while 0 <= t < asked:
                if shared:
                    parts = min(crew, -(-(begin[seed, t + 1] - begin[seed, t]) * size // worth))
                    _together(ASK, seed, parts, t, k, board, where, walk, back, teach, update)
                end, asks = (t + 1, 0) if shared else (asked, 100)
                t = _go(where[WALK], (seed, seed + 1, t, end, (0, asks), True, True, most, k), walk)
                shared = not shared
            count[seed], failed = begin[seed, asked], min(t, 0)
            if noise is not None:
                failed += _call(where[PONDER], (seed, seed + 1), noise[0])
            failed += _call(where[JUDGE], (seed, seed + 1), judge)
            parts = min(crew, -(-count[seed] * size // worth))
            for what in (BACK, TEACH, SPREAD, SUM, STEP):
                if failed < 0 or _look(board, FAILED) > 0:  # nobody learns from what is not right
                    _put(board, TICKET, END)
                    return
                if what == SPREAD:
                    failed += _call(where[SPREAD], (seed, seed + 1), spread)
                    _heads(seed, few, True, *to_heads)
                elif parts > 1:
                    _together(what, seed, parts, 0, k, board, where, walk, back, teach, update)
                else:
                    failed += _do(what, seed, 0, 1, 0, k, where, walk, back, teach, update)
            if noise is not None:
                failed += _call(where[PONDER], (seed, seed + 1), noise[1])
                failed += _call(where[BLAME], (seed, seed + 1), noise[2])
                if failed == 0:
                    failed += _call(where[UPDATE], (seed, seed + 1, 0, 1, True, True, k), noise[3])
            if failed < 0 or _look(board, FAILED) > 0:
                _put(board, TICKET, END)
                return
            finished[seed] += 1
    _put(board, TICKET, END)
