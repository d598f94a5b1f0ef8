"""Many iterations on the CPU at once, by `cpu_rounds`: what a recording is on a GPU. They do what as many iterations of the trainer do, to the last digit,
with the same random numbers; so nothing depends on how many go together, nor on whether they do.

It knows what `cpu_walk`, `cpu_balance` and `cpu_noise` know, where nobody has to be asked on the way: rewards are looked up by number, and the channel's
random numbers are drawn beforehand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stochflow import cpu_balance, cpu_noise, cpu_walk
from stochflow.cpu_compiled import Beside, in_parts, loops, one_by_one
from stochflow.dynamics import Dynamics
from stochflow.types import Fading

MOST, NUMBERS = 64, 1 << 19  # iterations at once, and random numbers
WORTH = 1 << 19  # products of one seed's rows and weights that are worth a helper, who is awake
BEFORE = 50  # iterations: whoever makes fewer does not wait until this is read from the disk


def fits(trainer: Any, worth: Any, noise: Any) -> bool:
    """Whether all that an iteration of this trainer consists of is here; `worth` = that of all states, `noise` = who learns the noise without autograd."""
    dynamics, source = trainer.dynamics, trainer.source
    learned = trainer.dynamics_flat is not None and noise is cpu_noise and trainer.dynamics_buffer is None
    return (
        trainer.policy.device.type == "cpu"
        and worth is not None
        and source.kernel
        and source.temper is None
        and source.task is trainer.task
        and cpu_walk.known_ahead(trainer.task.channel)
        and (learned or dynamics.exact)
        and type(dynamics).observe is Dynamics.observe
    )


class Recording:
    """Of a trainer that `fits`, in the room of a walk; `paid` = the log-rewards of all states."""

    def __init__(self, trainer: Any, room: Any, paid: Tensor):
        self.trainer, self.room, policy, env = trainer, room, trainer.policy, trainer.task.env
        self.way = cpu_walk.new_way(env, *room.shape)
        made = np.empty((*self.way.moves.shape, env.num_moves), dtype=np.float32) if trainer.dynamics_flat is not None else None
        self.balance = cpu_balance.for_loops(policy, trainer.objective, room, self.way, paid.numpy(), True, made, trainer.policy_flat)
        self.noise = None if made is None else cpu_noise.for_loops(trainer.dynamics, self.way, trainer.dynamics_flat, made)
        self.kept, head = room.kept, [x.detach().numpy() for x in (policy.head.weight, policy.head.bias)]
        self.heads = (*head, *room.net.stages[-2:], room.net.biases[-1])
        self.to_heads = (*self.kept.to_head, *self.kept.to_stages[-2:], self.kept.to_biases[-1])
        self.most = max(1, min(MOST, NUMBERS // (room.none.numel() * env.horizon * (2 * env.num_moves + 2))))
        self.where = np.zeros(8, dtype=np.int64)
        self._find_loops()
        self.compiled = Beside(cpu_rounds().rounds, (False, 0, 1, *self._given(0, 1, cpu_rounds().board())))

    def serves(self, room: Any) -> bool:
        """Whether it is of this room, as it is."""
        return self.room is room and room.kept is self.kept and self.kept.flat is self.trainer.policy_flat

    def run(self, most: int) -> int:
        """Up to so many iterations; how many it was: none before they are compiled."""
        if not self.compiled.look():
            return 0
        many, seeds, rounds = min(most, self.most), self.room.shape[0], cpu_rounds().rounds
        crew = min(torch.get_num_threads(), -(-int(self.kept.count[0]) * self.room.size // WORTH)) if seeds == 1 else 1
        board, went = cpu_rounds().board(), list[bool]()
        given = self._given(many, crew, board)

        def one(i: int) -> None:
            helps = i + 1 < crew  # the last is this thread
            try:
                went.append(rounds(helps, 0, 1, *given))
            finally:
                if not helps:  # whatever happens, nobody goes on looking for work
                    board[cpu_rounds().TICKET] = cpu_rounds().END

        if crew > 1:
            one_by_one(one, crew)
        else:
            in_parts(lambda s, e: went.append(rounds(False, s, e, *given)), seeds)
        self.trainer.source.moved_on(cpu_walk.Trace(self.room, self.way, torch.from_numpy(self.way.final)))
        if not all(went):
            raise MemoryError
        return many

    def _given(self, many: int, crew: int, board: np.ndarray) -> tuple[Any, ...]:
        """What `rounds` works on, beside the seeds."""
        room, trainer, source, done = self.room, self.trainer, self.trainer.source, self.trainer.steps_done
        fades = Fading(source.explore, source.tau, trainer.step)
        explore = [fades.at(float(done + k)) for k in range(many)] if source.explore > 0 else None
        chance, after = cpu_walk.draw(trainer.task, room, explore, many)
        if after is not None:
            torch.default_generator.manual_seed(after)
        walk, update = (room.world, room.net, room.rows, self.way, chance), trainer.policy_flat.for_loops(done, many)
        noise = None if self.noise is None else (*self.noise, trainer.dynamics_flat.for_loops(done, many))
        return (
            *(many, crew, WORTH, room.size, board, self.where, room.world.asked, room.rows.begin, room.kept.count, room.world.few),
            *(self.heads, self.to_heads, walk, *self.balance, update, noise),
        )

    def _find_loops(self) -> None:
        """Their addresses, in the order of `cpu_rounds`."""
        compiled, address, none = loops(), cpu_rounds().address, (0, 1)
        *_, walk, judge, back, teach, spread, update, noise = self._given(0, 1, cpu_rounds().board())
        self.where[:6] = [
            address(compiled.walk, (*none, 0, 1, none, True, True, 1, 0, *walk)),
            address(compiled.judge, (*none, *judge)),
            address(compiled.back, (*none, 0, 1, *back)),
            address(compiled.teach, (*none, 0, 1, *teach)),
            address(compiled.spread, (*none, *spread)),
            address(compiled.update, (*none, 0, 1, True, True, 0, *update)),
        ]
        if noise is not None:
            self.where[6:] = address(compiled.ponder, (*none, *noise[0])), address(compiled.blame, (*none, *noise[2]))


def cpu_rounds() -> Any:
    """The module, which is not imported where there is no numba."""
    from stochflow import cpu_rounds as module

    return module
