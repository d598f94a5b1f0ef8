"""The generators of the source documents: each is an objective of the engine, fed from a log.

Layouts of the documents, with T for their T-1 because the root transition is included: see `info`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stochflow.errors import UserError
from stochflow.generators.args import GeneratorArgs, Tokenizer
from stochflow.generators.dynamics import LogDynamics
from stochflow.generators.log import LogBook, ReplayBuffer, entries, trajectories
from stochflow.learn.entropy import EntropyAverage, entropy_band, mean_entropy_ratio
from stochflow.learn.evaluate import evaluate
from stochflow.learn.objectives import (
    INTENDED,
    PUBLISHED,
    SGFNKL,
    DetailedBalance,
    LogVariance,
    Objective,
    TrajectoryBalance,
)
from stochflow.learn.posterior import head_law
from stochflow.learn.rollout import rollout
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.ops import NEG, masked_log_softmax, pick
from stochflow.runs import folder as runs
from stochflow.scores.rewards import Power
from stochflow.training.sources import Source
from stochflow.training.trainer import Iteration, NoiseTraining, Trainer
from stochflow.types import Task, Terms, Trajectories, World
from stochflow.worlds.env import Channel
from stochflow.worlds.strings import Strings

Self = TypeVar("Self", bound="GFlowNetGenerator")
Batch = Mapping[str, Sequence[Any]]


class GFlowNetGenerator(nn.Module, ABC):
    """A policy and a model of the noise, trained from (string, thought string, reward) alone.

    The last entry is the reward R itself; the exponent is the `RolloutWorker`'s business. Weights are those of the last
    step in `get_loss` and `forward`, and their running average in `sample`.
    """

    def __init__(self, args: GeneratorArgs | argparse.Namespace | Mapping[str, Any] | None, tokenizer: Tokenizer):
        super().__init__()
        self.args = a = GeneratorArgs.of(args)
        self.tokenizer = tokenizer
        if a.vocab_size is not None and a.vocab_size != len(tokenizer):
            raise UserError(
                f"vocab_size is {a.vocab_size}, but the tokenizer has {len(tokenizer)} letters: give the same number, or none"
            )
        if a.device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"device {a.device} was asked for, but torch sees no CUDA device: use cpu")
        self.env = env = Strings(tokenizer.alphabet, a.max_len, a.min_len)
        self.objective = self.make_objective(a)
        net = MLP(a.gen_num_hidden, a.gen_num_layers)
        self.model = Policy(env, net, seeds=[a.seed], back_action=self.objective.form.back_action)
        with torch.no_grad():
            self.model.log_z_unit.fill_(a.gen_partition_init / Policy.LOG_Z_SCALE)
        self.model.to(a.device)
        self.forward_dynamics = LogDynamics(env, a.seed, a.dynamics_num_hidden, a.dynamics_num_layers).to(a.device)
        self.book = LogBook(a.reward_exp_min)
        # without a world of its own, what happens is what the learned dynamics says
        self.task = Task(env, self.forward_dynamics, self.book, Power(1.0, a.reward_exp_min))
        replay = (
            ReplayBuffer(a.max_len, tokenizer, a.dynamics_buffer_size, a.min_len, a.device)
            if a.dynamics_off_pol
            else None
        )
        self.dynamics_buffer = replay
        self.trainer = Trainer(
            self.task,
            self.model,
            self.forward_dynamics,
            self.objective,
            Source(),
            lr=a.gen_learning_rate,
            noise=NoiseTraining(
                a.dynamics_lr,
                a.dynamics_clip,
                None if replay is None else replay.buffer,
                a.dynamics_off_pol_rounds,
                a.dynamics_sample_size,
            ),
            iteration=Iteration(a.gen_clip, capture=False),
        )
        self._last: Trajectories | None = None  # the batch that `get_dynamics_loss` speaks of

    @abstractmethod
    def make_objective(self, args: GeneratorArgs) -> Objective:
        """What this generator minimises."""

    @property
    def gammas(self) -> tuple[float, ...]:
        """Those that r_gamma is averaged over."""
        return (self.args.gamma,)

    # learning -----------------------------------------------------------------------------------------------------

    def _read(self, batch: Batch) -> Trajectories:
        if not isinstance(batch, Mapping) or "bulk_trajs" not in batch:
            raise UserError(
                'a batch is {"bulk_trajs": [(string, thought string, reward), ...]}, but this one has no "bulk_trajs"'
            )
        self._last = trajectories(self.env, self.tokenizer, batch["bulk_trajs"], self.args.device)
        if self.training:  # in evaluation mode a held-out batch is looked at and not learned from
            self.book.add(self._last)
            self.forward_dynamics.observe(self._last)
        return self._last

    def get_loss(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        """The flow loss of a batch, with its gradient, and the documents' named tensors (see `info`)."""
        traj = self._read(batch)
        terms = evaluate(self.task, self.model, self.forward_dynamics, traj, None, self.objective.needs | NAMED)
        world = World(self.task, self.model, self.forward_dynamics, traj, None, self._ask)
        loss, stats = self.objective.loss_and_stats(terms, world)
        return loss[0], self.info(terms, traj) | {name: value[0] for name, value in stats.items()}

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One step of the policy, then of the dynamics; what the trainer logs, as plain numbers."""
        if not self.training:
            raise UserError("this generator was put into evaluation mode: call .train() before train_step")
        traj = self._read(batch)
        self.trainer.learn(traj)
        self.trainer.steps_done += 1
        return {name: float(value[0]) for name, value in self.trainer.stats.items()}

    def get_dynamics_loss(self) -> Tensor:
        """Cross-entropy of the realised letters given prefix and thought: of replayed entries with `dynamics_off_pol`, else of the last batch."""
        if self.dynamics_buffer is not None:
            if not len(self.dynamics_buffer):
                raise UserError("the dynamics buffer is empty: run train_step on a batch first")
            return self.forward_dynamics.loss(self.dynamics_buffer.buffer.sample(self.args.dynamics_sample_size))[0]
        if self._last is None:
            raise UserError(
                "no batch has been seen yet, so there is no dynamics loss: run get_loss or train_step first"
            )
        return self.forward_dynamics.loss(self._last)[0]

    def _ask(self, states: Tensor, where: Tensor) -> Tensor:
        return self.task.reward(self.task.oracle(states), states, None)

    # looking ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def info(self, terms: Terms, traj: Trajectories) -> dict[str, Any]:
        """The documents' tensors; M = letters, and STOP as one more where lengths vary.

        [B, T, M] pol_logits, pol_back_logits: log-probabilities of the thought letter, before and given the realised one;
        [B, T+1] log_flows of the network; [B, T] mask, forward_model_logits (the dynamics at what happened);
        [T, B] end_log_flow (the reward from the end on), real_actions, ll_diff; scalars r_gamma, forward_dynamics_loss.
        """
        out = self.model.along(traj)

        def rows(x: Tensor) -> Tensor:  # [T, 1, B, ...] -> [B, T, ...]
            return x[:, 0].transpose(0, 1)

        band = entropy_band(terms.entropy, terms.choices, traj.alive)
        with torch.enable_grad():
            fit = None if self.dynamics_buffer is not None else self.forward_dynamics.loss(traj)[0]
        return {
            "pol_logits": rows(masked_log_softmax(out.forward[:-1], self.env.moves(traj.states[:-1]))),
            "pol_back_logits": rows(self._back_logits(traj)),
            "log_flows": rows(out.log_flow),
            "mask": rows(traj.alive.float()),
            "forward_model_logits": rows(terms.log_k),
            "end_log_flow": terms.log_flow[1:, 0].detach(),
            "real_actions": traj.moves[:, 0],
            "ll_diff": self.ll_diff(terms)[:, 0].detach(),
            "r_gamma": mean_entropy_ratio(band.high, band.low, self.gammas)[0],
            "forward_dynamics_loss": fit,
        }

    def ll_diff(self, terms: Terms) -> Tensor:
        """[T, 1, B] residual of each step: log F(s) + log pi + log P - log F(s') - log pi_B."""
        return self.objective.residual(terms)

    def _back_logits(self, traj: Trajectories) -> Tensor:
        """[T, 1, B, M]: the backward law of the action given the realised move; STOP was meant where it happened."""
        here, head = traj.states[:-1], self.model.along(traj).back_action
        assert head is not None
        legal = self.env.real_moves(self.env.moves(here))
        law = head_law(self.forward_dynamics, here, legal, head[1:], traj.actions, traj.moves, None)
        if self.env.stop is None:
            return law
        is_stop = torch.arange(self.env.num_moves, device=law.device) == self.env.stop
        return torch.where((traj.moves == self.env.stop).unsqueeze(-1), torch.where(is_stop, 0.0, NEG), law)

    def forward(self, x: Tensor | Sequence[Any], lens: Sequence[int] | Tensor | None = None) -> Tensor:
        """[B, 2M + 1] raw network outputs at the prefixes x[:lens]: action logits, backward logits of the action, log-flow.

        `x` is texts, lists of tokens, or a padded tensor [B, L]; `lens` the letters of each that count (all, by default).
        """
        device = self.args.device
        tokens = (x if isinstance(x, Tensor) else self.tokenizer.process(x)).to(device)
        if tokens.dim() != 2 or tokens.shape[1] > self.env.length:
            raise UserError(
                f"x has shape {tuple(tokens.shape)}, but it must be [batch, at most {self.env.length} letters]"
            )
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) <= self.env.pad:
            raise UserError(
                f"x holds tokens from {int(tokens.min())} to {int(tokens.max())}, but they must lie between 0 and {self.env.pad} (padding)"
            )
        if lens is not None and not all(0 <= int(n) <= tokens.shape[1] for n in torch.as_tensor(lens).flatten()):
            raise UserError(f"lens is {lens}, but each must lie between 0 and the {tokens.shape[1]} letters of x")
        state = torch.full((len(tokens), self.env.length), self.env.pad, dtype=torch.long, device=device)
        state[:, : tokens.shape[1]] = tokens
        if lens is not None:
            keep = torch.arange(self.env.length, device=device) < torch.as_tensor(lens, device=device).view(-1, 1)
            state = torch.where(keep, state, self.env.pad)
        out = self.model(state.unsqueeze(0))
        assert out.back_action is not None
        last = pick(state, self.env.lengths(state) - 1).clamp(max=self.env.tokens - 1)  # the letter that led here
        row = last.view(1, -1, 1, 1).expand(1, -1, 1, self.env.num_moves)
        return torch.cat([out.forward[0], out.back_action.gather(2, row)[0, :, 0], out.log_flow[0].unsqueeze(-1)], -1)

    def sample(self, n: int) -> list[str]:
        """`n` strings from the averaged policy, realised through the learned model of the noise."""
        return [string for string, _ in self.sample_thoughts(n)]

    def sample_thoughts(self, n: int, channel: Channel | None = None) -> list[tuple[str, str]]:
        """`n` (string, thought string) pairs; `channel` = the world's own noise where it is known, such as Slip(0.25)."""
        task = self.task if channel is None else self.task._replace(channel=channel)
        with self.trainer.averaged(), torch.no_grad():
            traj = rollout(task, self.model, n)
        return [(s, t) for s, t, _ in entries(self.env, self.tokenizer, traj)]

    # keeping ------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Everything, so that training goes on from it, in one safetensors file."""
        tensors = {f"trainer.{k}": v for k, v in self.trainer.state_dict().items()}
        tensors |= {f"book.{k}": v for k, v in self.book.state_dict(self.env.length).items()}
        tensors["seen"] = self.forward_dynamics.seen
        kept = {
            "step": self.trainer.steps_done,
            "generator": type(self).__name__,
            "args": dataclasses.asdict(self.args),
            "alphabet": self.tokenizer.alphabet,
        }
        file = Path(path)
        part = file.with_name(file.name + ".part")
        part.write_bytes(runs.pack(tensors, kept))
        os.replace(part, file)  # whole or not at all
        return file

    @classmethod
    def load(cls: type[Self], path: str | os.PathLike[str]) -> Self:
        """The generator that `save` wrote; the random stream goes on as if nothing had been loaded."""
        found = runs.load_checkpoint(path)
        kind = found.scalars.get("generator")
        if kind != cls.__name__:
            raise UserError(
                f"{path} holds a {kind or 'run'}, not a {cls.__name__}: load it with the class that saved it"
            )
        made = cls(GeneratorArgs.of(found.scalars["args"]), Tokenizer(found.scalars["alphabet"]))

        def part(name: str) -> dict[str, Tensor]:
            return {k.removeprefix(name + "."): v for k, v in found.tensors.items() if k.startswith(name + ".")}

        devices = [made.model.device] if made.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            made.trainer.load_state_dict(part("trainer"))
        made.book.load_state_dict(part("book"))
        made.forward_dynamics.seen.copy_(found.tensors["seen"])
        return made


NAMED = frozenset({"log_pf", "log_k", "log_pa", "log_pb", "log_flow", "entropy"})  # what `info` reads


class StochasticDBGFlowNetGenerator(GFlowNetGenerator):
    """Stochastic detailed balance: F(s) pi(a|s) P(s'|s,a) = F(s') pi_B(a|s'), root and end included."""

    def make_objective(self, args: GeneratorArgs) -> Objective:
        return DetailedBalance(PUBLISHED)


class DeterministicDBGFlowNetGenerator(GFlowNetGenerator):
    """Detailed balance that takes the thought for what happened: the baseline without log P, right only without noise."""

    def make_objective(self, args: GeneratorArgs) -> Objective:
        return DetailedBalance(INTENDED)


class TrajectoryBalanceGFlowNetGenerator(GFlowNetGenerator):
    """Stochastic trajectory balance: Z prod pi P = R prod pi_B. Its `ll_diff` holds each step's log pi P / pi_B."""

    def make_objective(self, args: GeneratorArgs) -> Objective:
        return TrajectoryBalance(PUBLISHED)

    def ll_diff(self, terms: Terms) -> Tensor:
        return self.objective.form.step(terms) - terms.log_pb


class StochasticKLGFlowNetGenerator(GFlowNetGenerator):
    """Trajectory-level reverse KL, by its off-policy equal: the variance over the batch of log prod pi P / (R prod pi_B).

    On the policy's own trajectories the two have the same gradient; from a log only this one is sound.
    """

    def make_objective(self, args: GeneratorArgs) -> Objective:
        return LogVariance(PUBLISHED)

    def ll_diff(self, terms: Terms) -> Tensor:
        return self.objective.form.step(terms) - terms.log_pb


class StochasticKL2GFlowNetGenerator(GFlowNetGenerator):
    """SGFN-KL: stochastic detailed balance + kl_weight * r_gamma * (flow KL + flow gap).

    The KL term is a mean over the states of the batch whose children's flows are all known: a finished child counts when
    its reward is in the log.
    """

    def make_objective(self, args: GeneratorArgs) -> Objective:
        return SGFNKL((args.gamma,), args.kl_weight, PUBLISHED, memory=_memory(args))


class StochasticKL3GFlowNetGenerator(GFlowNetGenerator):
    """SGFN-KL whose r is the mean over `gammas`."""

    @property
    def gammas(self) -> tuple[float, ...]:
        return self.args.gammas

    def make_objective(self, args: GeneratorArgs) -> Objective:
        return SGFNKL(args.gammas, args.kl_weight, PUBLISHED, memory=_memory(args))


def _memory(args: GeneratorArgs) -> EntropyAverage | None:
    return EntropyAverage(1, decay=args.entropy_average).to(args.device) if args.entropy_average > 0 else None
