"""Many iterations on the CPU at once, by `cpu_rounds`: what a recording is on a GPU. They do what as many iterations of the trainer do, to the last digit,
with the same random numbers; so nothing depends on how many go together, nor on whether they do.

It knows what `cpu_walk`, `cpu_balance` and `cpu_noise` know, where nobody has to be asked on the way: rewards are looked up by number, and the channel's
random numbers are drawn beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.engines.numba import gradient as cpu_balance
from stochflow.engines.numba import noise as cpu_noise
from stochflow.engines.numba import walk as cpu_walk
from stochflow.engines.numba.compiled import Beside, helped, in_parts, loops
from stochflow.noise.dynamics import Dynamics
from stochflow.types import Fading

MOST, NUMBERS = 64, 1 << 19  # iterations at once, and random numbers
SECONDS = 0.05  # and how long nobody is heard who wants them to stop
WORTH = 1 << 19  # products of one seed's rows and weights that are worth a helper, who is awake
TRY = 16  # calls, of which one tries what was slower the last time
LONG = 0.002  # seconds: helpers, who have to wake up, come to calls that last so long
BEFORE = 100  # iterations: whoever makes fewer has nothing compiled for this, nor read from the disk


class Parts(NamedTuple):
    """What an iteration is made of; a recording is of these, and of no others."""

    task: Any
    policy: Any
    dynamics: Any
    objective: Any
    source: Any
    policy_flat: Any
    dynamics_flat: Any
    dynamics_buffer: Any
    noise: Any  # who learns it without autograd
    worth: Tensor | None  # scores and log-rewards of all states
    room: Any  # of the last walk
    kept: Any  # and of its gradient


def fits(parts: Parts) -> bool:
    """Whether all that an iteration consists of is here, and has been compiled by one of the plain kind."""
    source, dynamics, flat = parts.source, parts.dynamics, parts.dynamics_flat
    learned = flat is not None and parts.noise is cpu_noise and parts.dynamics_buffer is None
    return (
        parts.worth is not None
        and parts.kept is not None
        and parts.kept.flat is parts.policy_flat
        and parts.room.serves(parts.policy, source.batch)
        and source.kernel
        and source.temper is None
        and source.task is parts.task
        and cpu_walk.known_ahead(parts.task.channel)
        and (learned or (dynamics.exact and flat is None))
        and type(dynamics).observe is Dynamics.observe
        and all(
            hasattr(getattr(loops(), name), "overloads") for name in loops().BESIDE[: None if learned else -1]
        )  # and no stand-ins any more
    )


class Recording:
    """Of parts that `fits` knows."""

    def __init__(self, parts: Parts):
        from stochflow.engines.numba import rounds as cpu_rounds

        self.parts, self.rounds = parts, cpu_rounds
        room, kept, flat, env, head = parts.room, parts.kept, parts.dynamics_flat, parts.task.env, parts.policy.head
        self.way = cpu_walk.new_way(env, *room.shape)
        made = np.empty((*self.way.moves.shape, env.num_moves), dtype=np.float32) if flat is not None else None
        assert parts.worth is not None
        paid = parts.worth[1].numpy()
        self.balance = cpu_balance.for_loops(
            parts.policy, parts.objective, room, self.way, paid, True, made, parts.policy_flat
        )
        self.noise = None if made is None else cpu_noise.for_loops(parts.dynamics, self.way, flat, made)
        self.heads = (
            head.weight.detach().numpy(),
            head.bias.detach().numpy(),
            *room.net.stages[-2:],
            room.net.biases[-1],
        )
        self.to_heads = (*kept.to_head, *kept.to_stages[-2:], kept.to_biases[-1])
        self.most = max(1, min(MOST, NUMBERS // (room.none.numel() * env.horizon * (2 * env.num_moves + 2))))
        self.now, self.each, self.calls = (
            1,
            0.0,
            0,
        )  # iterations at once: the first one says how many seconds each takes
        self.took: dict[int, float] = {}  # seconds an iteration, by how many worked on it
        self.where = np.zeros(8, dtype=np.int64)
        self._find_loops()
        self.compiled = Beside(cpu_rounds.rounds, (False, 0, 1, *self._given(0.0, 0, 1, *self._board())))

    def serves(self, parts: Parts) -> bool:
        """Whether it is of these."""
        return all(one is other for one, other in zip(self.parts, parts, strict=True))

    def run(self, done: float, most: int, count: Callable[[int], object]) -> bool:
        """Some iterations, at most so many, after those that are done; they are counted even if somebody breaks in. False before they are compiled."""
        if not self.compiled.look():
            return False
        many, seeds, source, rounds = (
            min(most, self.now),
            self.parts.room.shape[0],
            self.parts.source,
            self.rounds.rounds,
        )
        crew = self._crew(many)
        board, finished = self._board()
        given, begun = self._given(done, many, crew, board, finished), time.perf_counter()
        try:
            if crew > 1:
                helped(lambda helps: rounds(helps, 0, 1, *given), crew - 1, board, self.rounds.TICKET, self.rounds.END)
            else:
                in_parts(lambda s, e: rounds(False, s, e, *given), seeds)
        finally:
            count(int(finished.min()))
            source.moved_on(cpu_walk.Trace(self.parts.room, self.way, torch.from_numpy(self.way.final)))
        if (finished < many).any():
            raise MemoryError("there was no memory for what a compiled loop writes down on its way")
        self.each = max(time.perf_counter() - begun, 1e-9) / many
        self.now = max(1, min(self.most, int(SECONDS / self.each)))
        self.took[crew] = (self.took.get(crew, self.each) + self.each) / 2
        return True

    def _crew(self, many: int) -> int:
        """How many work on the next iterations of one seed. Whether helpers help depends on the processor and on who else is at work, so they are tried, and
        now and then again what was slower; the digits are the same."""
        threads, states = torch.get_num_threads(), int(self.parts.kept.count[0])
        most = min(threads, -(-states * self.parts.room.size // WORTH)) if self.parts.room.shape[0] == 1 else 1
        if most <= 1 or many * self.each < LONG:
            return 1
        self.calls += 1
        faster, slower = sorted((most, 1), key=lambda crew: self.took.get(crew, 0.0))
        return slower if self.calls % TRY == 0 else faster

    def _board(self) -> tuple[np.ndarray, np.ndarray]:
        """On which those who share a seed say what there is to do, and how many iterations each seed has finished."""
        return np.zeros(self.rounds.LINES, dtype=np.int64), np.zeros(self.parts.room.shape[0], dtype=np.int64)

    def _given(self, done: float, many: int, crew: int, board: np.ndarray, finished: np.ndarray) -> tuple[Any, ...]:
        """What `rounds` works on, beside the seeds; the random numbers of so many iterations are drawn."""
        (room, source), world = (self.parts.room, self.parts.source), self.parts.room.world
        fades = Fading(source.explore, source.tau, torch.tensor(0.0))
        explore = [fades.at(done + k) for k in range(many)] if source.explore > 0 else None
        chance, after = cpu_walk.draw(self.parts.task, room, explore, many)
        if after is not None:
            torch.default_generator.manual_seed(after)
        walk, update = (world, room.net, room.rows, self.way, chance), self.parts.policy_flat.for_loops(done, many)
        noise = None if self.noise is None else (*self.noise, self.parts.dynamics_flat.for_loops(done, many))
        fixed = (
            crew,
            WORTH,
            room.size,
            board,
            finished,
            self.where,
            world.asked,
            room.rows.begin,
            self.parts.kept.count,
            world.few,
        )
        return (many, *fixed, self.heads, self.to_heads, walk, *self.balance, update, noise)

    def _find_loops(self) -> None:
        """Their addresses, in the order of `cpu_rounds`."""
        compiled, address, none, rounds = loops(), self.rounds.address, (0, 1), self.rounds
        *_, walk, judge, back, teach, spread, update, noise = self._given(0.0, 0, 1, *self._board())
        self.where[rounds.WALK] = address(compiled.walk, (*none, 0, 1, none, True, True, 1, 0, *walk), rounds.STEPS)
        self.where[rounds.JUDGE] = address(compiled.judge, (*none, *judge))
        self.where[rounds.BACK] = address(compiled.back, (*none, 0, 1, *back))
        self.where[rounds.TEACH] = address(compiled.teach, (*none, 0, 1, *teach))
        self.where[rounds.SPREAD] = address(compiled.spread, (*none, *spread))
        self.where[rounds.UPDATE] = address(compiled.update, (*none, 0, 1, True, True, 0, *update))
        if noise is not None:
            self.where[rounds.PONDER] = address(compiled.ponder, (*none, *noise[0]))
            self.where[rounds.BLAME] = address(compiled.blame, (*none, *noise[2]))
