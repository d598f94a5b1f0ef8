"""The model of the noise that a log teaches: a network, counts or a transformer over the thoughts, zero where the log has shown nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stochflow.errors import UserError
from stochflow.generators.args import GeneratorArgs
from stochflow.noise.dynamics import Dynamics, Neural, Tabular, trainable_steps
from stochflow.noise.thoughts import Attention, ThoughtDynamics
from stochflow.ops import NEG, masked_log_softmax, pick
from stochflow.types import Trajectories


class LogDynamics(Dynamics):
    """P(letter | prefix, thought), zero where the log has never seen that thought become that letter.

    A softmax alone is never zero, and the backward law of the thought may put no mass on what cannot happen: in a world
    without noise the loss would then vanish at a wrong law (docs/source-documents.md, 2). A thought that nobody has had
    yet becomes itself.
    """

    def __init__(self, env: Any, args: GeneratorArgs):
        nn.Module.__init__(self)
        self.env = env
        seeds, hidden = [args.seed], args.dynamics_num_hidden
        if args.dynamics_model == "tabular":
            self.net: Any = Tabular(env, seeds)
        elif args.dynamics_model == "thought":
            reader = Attention(layers=args.dynamics_num_layers, positions=args.gen_positions)  # type: ignore[arg-type]
            self.net = ThoughtDynamics(env, seeds, reader, hidden)
        else:
            self.net = Neural(env, seeds, hidden, args.dynamics_num_layers)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(env.num_moves, env.num_moves, dtype=torch.bool))

    # the past, where the model reads it ---------------------------------------------------------------------------

    def begin(self, state):
        return self.net.begin(state)

    def remember(self, memory, state, action, move):
        return self.net.remember(memory, state, action, move)

    # the next letter ----------------------------------------------------------------------------------------------

    def observe(self, traj: Trajectories) -> None:
        self.net.observe(traj)
        met = trainable_steps(self.env, traj)
        pair = (traj.actions.clamp(min=0) * self.env.num_moves + traj.moves)[met]
        self.seen.view(-1)[pair] = True

    def _possible(self, legal: Tensor) -> Tensor:
        """[..., M thoughts, M letters]."""
        itself = torch.eye(self.env.num_moves, dtype=torch.bool, device=legal.device)
        known = torch.where(self.seen.any(1, keepdim=True), self.seen, itself)
        return known & legal.unsqueeze(-2)

    def table(self, state: Tensor, legal: Tensor, memory: Tensor | None = None) -> Tensor:
        """log P(letter | thought) for all thoughts, [..., M thoughts, M letters]."""
        if isinstance(self.net, Neural):
            raw = self.net.logits(state)
        elif isinstance(self.net, ThoughtDynamics):
            raw = self.net.table(state, legal, self.begin(state) if memory is None else memory)
        else:
            every = [torch.full_like(state[..., 0], a) for a in range(self.env.num_moves)]
            raw = torch.stack([self.net.log_probs(state, legal, action) for action in every], -2)
        return masked_log_softmax(raw, self._possible(legal))

    def log_probs(self, state, legal, action, memory=None):
        row = action[..., None, None].expand(*action.shape, 1, legal.shape[-1])
        return self.table(state, legal, memory).gather(-2, row).squeeze(-2)

    def arrivals(self, state, legal, move, memory=None):
        table = self.table(state, legal, memory)
        return pick(table, move.unsqueeze(-1).expand(table.shape[:-1]))

    def marginal(self, state, legal, log_pi, memory=None):
        with torch.no_grad():
            table = self.table(state, legal, memory)
        joint = torch.where(legal.unsqueeze(-1), log_pi.unsqueeze(-1) + table, NEG)
        return torch.where(legal, joint.logsumexp(-2).clamp(min=NEG), NEG)

    # by the documents' name -----------------------------------------------------------------------------------------

    def forward_dynamics_model(
        self, x: Tensor, x_thought: Tensor | None, mask: None = None, return_all: bool = False, lens: Any = None
    ) -> Tensor:
        """Log-probabilities of the next letter [steps, B, K] after each prefix of x, given the thought at that step.

        `x` [B, L, K] or [B, L * K] holds the one-hot letters. `x_thought` [B, L, K], or flat as well, holds one thought a letter:
        entry i of the result is about letter i, and a last entry, which nobody asked a thought for, is zero, as the documents
        cut it off. With [B, L - 1, K], the thoughts of `thought[:, 1:]`, it begins at the second letter as theirs does.
        `return_all=False`: the last letter alone, [B, K]. `lens` are lengths; what lies beyond is zero.
        """
        letters, steps = self.env.num_moves - (self.env.stop is not None), self.env.horizon
        if mask is not None or x_thought is None:
            raise UserError(
                "forward_dynamics_model(x, x_thought, None, return_all, lens) needs the thoughts and takes no mask: "
                "give lens for strings of several lengths"
            )
        shapes = [(len(x), n * letters) for n in (steps, steps - 1)]
        if x[0].numel() != steps * letters or (len(x_thought), x_thought[0].numel()) not in shapes:
            raise UserError(
                f"x has shape {tuple(x.shape)} and x_thought {tuple(x_thought.shape)}, but [B, {steps}, {letters}] and "
                f"[B, {steps} or {steps - 1}, {letters}] are needed"
            )
        x, x_thought = (given.reshape(len(x), -1, letters) for given in (x, x_thought))
        first = steps - x_thought.shape[1]  # the letter that the first thought is about
        known = x.any(-1)  # [B, L] of padding, one-hot vectors are zero
        tokens = torch.where(known, x.argmax(-1), letters)
        thoughts = torch.cat(
            [tokens[:, :first], x_thought.argmax(-1)], 1
        )  # what was meant before is not known: as it happened
        length = known.sum(1) if lens is None else torch.as_tensor(lens, device=x.device)
        place = torch.arange(steps, device=x.device)
        found = []
        state = self.env.initial((1, len(x)), torch.zeros(1, len(x), dtype=torch.long, device=x.device))
        memory = self.begin(state)
        for t in range(steps):
            legal = self.env.real_moves(self.env.moves(state))
            action = thoughts[:, t].clamp(max=letters - 1).unsqueeze(0)
            law = self.log_probs(state, legal, action, memory)[0, :, :letters]
            found.append(torch.where((t < length).unsqueeze(1), law, 0.0))
            letter = tokens[:, t].unsqueeze(0)
            memory = self.remember(memory, state, action, letter.clamp(max=letters - 1)) if memory is not None else None
            state = state.clone()
            state[..., state.shape[-1] - steps :] = torch.where(place <= t, tokens, letters)
        if return_all:
            return torch.stack([*found[first:], torch.zeros_like(found[0])])
        last = (length - 1).clamp(min=0).view(1, -1, 1).expand(1, -1, letters)
        return torch.stack(found).gather(0, last)[0]
