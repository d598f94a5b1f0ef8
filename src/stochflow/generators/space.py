"""What a generator's networks see of a string: its letters, and as asked the thoughts or a context beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.generators.args import GeneratorArgs, Tokenizer
from stochflow.generators.dynamics import LogDynamics
from stochflow.generators.log import LogBook
from stochflow.nets.layers import Net
from stochflow.nets.lookup import Lookup
from stochflow.nets.mlp import MLP
from stochflow.nets.recurrent import Recurrent
from stochflow.nets.transformer import Transformer
from stochflow.noise.dynamics import Dynamics
from stochflow.noise.thought_state import Augmented, ThoughtState
from stochflow.types import Trajectories
from stochflow.worlds.channels import Exact
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.env import Channel
from stochflow.worlds.strings import Strings

LISTED = 200_000  # prefixes up to which a look-up table is the default trunk


class Space:
    """`strings` is the world of letters; `env` what policy and flows are functions of."""

    def __init__(self, args: GeneratorArgs, tokenizer: Tokenizer):
        self.args = args
        self.strings = Strings(tokenizer.alphabet, args.max_len, args.min_len)
        if args.thought_state and args.context_width:
            raise UserError("thought_state and context_width cannot be combined: leave one of them out")
        self.env: Any = ThoughtState(self.strings) if args.thought_state else self.strings
        if args.context_width:
            self.env = Conditioned(self.strings, torch.zeros(1, args.context_width, device=args.device))

    def net(self) -> Net:
        """The trunk that `gen_net` names."""
        a, word = self.args, self.args.gen_net
        if word == "auto":
            few = self.strings.count() <= LISTED and not a.thought_state and not a.context_width
            word = "lookup" if few else "transformer" if a.thought_state else "mlp"
        if a.gen_positions != "learned" and word != "transformer" and a.dynamics_model != "thought":
            raise UserError(
                f"gen_positions is {a.gen_positions}, but there is no transformer here that would read it: set gen_net or "
                "dynamics_model, or leave it out"
            )
        if word == "transformer":
            return Transformer(a.gen_num_hidden, a.gen_num_heads, a.gen_num_layers, positions=a.gen_positions)  # type: ignore[arg-type]
        if word in ("gru", "lstm"):
            return Recurrent(a.gen_num_hidden, a.gen_num_layers, word)  # type: ignore[arg-type]
        return (Lookup if word == "lookup" else MLP)(a.gen_num_hidden, a.gen_num_layers)

    def dynamics(self) -> LogDynamics:
        """The model of the noise, in the world of letters."""
        return LogDynamics(self.env if self.args.context_width else self.strings, self.args)

    def model_of(self, dynamics: LogDynamics) -> Dynamics:
        """The same on the states of `env`."""
        return Augmented(self.env, dynamics) if self.args.thought_state else dynamics

    def channel(self, channel: Channel) -> Channel:
        """A channel of letters on the states of `env`."""
        return Augmented(self.env, channel) if self.args.thought_state else channel

    def text(self, state: Tensor) -> Tensor:
        """The letters [..., L] of states of `env`."""
        if self.args.thought_state:
            return self.env.text(state)
        return state[..., 1:] if self.args.context_width else state

    def lift(self, traj: Trajectories, contexts: Any = None) -> Trajectories:
        """Trajectories of letters as those of `env`; `contexts` [B, C] is the context of each."""
        if self.args.context_width:
            return self._with_contexts(traj, contexts)
        if contexts is not None:
            raise UserError(
                "this batch has contexts, but the generator was made without context_width: set it in the args"
            )
        return self._with_thoughts(traj) if self.args.thought_state else traj

    def rows(self, contexts: Any, count: int) -> Tensor:
        """[1, count] row numbers of contexts [count, C], or of one context [C] for all, which become the table of `env`.

        Equal contexts are one row: what is a mean over a condition must find all its strings.
        """
        width, device = self.args.context_width, self.args.device
        if contexts is None:
            raise UserError(
                f"context_width is {width}, but no contexts were given: give one vector of that width per string"
            )
        try:
            table = torch.as_tensor(contexts, dtype=torch.float32, device=device)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"contexts cannot be read as numbers ({error}): give one vector of {width} per string"
            ) from None
        table = table.unsqueeze(0) if table.dim() == 1 else table
        if table.shape[1:] != (width,) or len(table) not in (1, count):
            raise UserError(
                f"contexts have shape {tuple(table.shape)}, but {count} strings with context_width = {width} need [{count}, {width}]"
            )
        if not bool(table.isfinite().all()):
            raise UserError("contexts hold a NaN or infinite value: fill missing values before")
        different, row = table.unique(dim=0, return_inverse=True)
        self.env.contexts, self.env.rows = different, len(different)  # the encoder reads the table that is there
        return row.expand(count).unsqueeze(0)

    def _with_contexts(self, traj: Trajectories, contexts: Any) -> Trajectories:
        row = self.rows(contexts, traj.score.shape[1])
        column = row.view(1, 1, -1, 1).expand(*traj.states.shape[:3], 1)
        return traj._replace(states=torch.cat([column, traj.states], -1))

    def _with_thoughts(self, traj: Trajectories) -> Trajectories:
        """Letters and thoughts come in pairs; then the finished string forgets its thoughts, the last one first."""
        env, letters = self.env, self.env.letters
        thoughts = traj.actions
        forget = env.pairs + thoughts.flip(0)
        moves = torch.cat([thoughts * letters + traj.moves, forget])
        state = env.initial(tuple(traj.score.shape), torch.zeros_like(traj.score, dtype=torch.long))
        states = [state]
        for move in moves:
            state = env.step(state, move)
            states.append(state)
        alive = torch.ones_like(moves, dtype=torch.bool)
        actions = torch.cat([thoughts * letters + thoughts, forget])
        return Trajectories(torch.stack(states), actions, moves, alive, traj.score, traj.real)

    def lower(self, traj: Trajectories) -> Trajectories:
        """Trajectories of `env` as those of letters."""
        if self.args.thought_state:
            return Augmented(self.env, Exact()).strings_only(traj)
        return traj._replace(states=self.text(traj.states))


class OfText:
    """The log's rewards of finished strings, at states that may hold thoughts or a context beside them."""

    on_device = True

    def __init__(self, space: Space, book: LogBook):
        self.space, self.book = space, book

    def __call__(self, state: Tensor) -> Tensor:
        return self.book(self.space.text(state))


def one_hot_contexts(values: Sequence[int], kinds: int) -> Tensor:
    """Discrete contexts, numbers from 0 to kinds - 1, as vectors [B, kinds] for `context_width=kinds`."""
    found = torch.as_tensor(list(values), dtype=torch.long)
    if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < kinds:
        raise UserError(
            f"contexts run from {int(found.min())} to {int(found.max())}, but there are {kinds} kinds: number them from 0"
        )
    return torch.nn.functional.one_hot(found, kinds).float()
