"""What all generators share: networks, a trainer of the engine, learning from logs, looking, sampling, keeping.

Layouts of the documents, with T for their T-1 because the root transition is included: see `info`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stochflow.engines.base import Request, Walk
from stochflow.engines.choose import walk
from stochflow.errors import UserError
from stochflow.generators.args import GeneratorArgs, Tokenizer
from stochflow.generators.interface import Interface, Step
from stochflow.generators.log import LogBook, ReplayBuffer, entries, read_rewards, trajectories
from stochflow.generators.space import OfText, Space
from stochflow.learn import objectives
from stochflow.learn.entropy import entropy_band, mean_entropy_ratio
from stochflow.learn.evaluate import evaluate
from stochflow.learn.objectives import Form, Objective
from stochflow.learn.posterior import exact_law_of_action, head_law
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import remembered
from stochflow.ops import NEG, masked_log_softmax, pick
from stochflow.runs import folder as runs
from stochflow.scores.rewards import Power
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Iteration, NoiseTraining, Trainer
from stochflow.types import Explore, Task, Terms, Trajectories, World
from stochflow.worlds.channels import Exact, Slip
from stochflow.worlds.env import Channel

Self = TypeVar("Self", bound="GeneratorBase")
NAMED = frozenset({"log_pf", "log_k", "log_pa", "log_pb", "log_flow", "entropy", "log_move"})  # what `info` reads
FORMS = {
    "joint": objectives.JOINT,
    "marginal": objectives.MARGINAL,
    "head": objectives.HEAD,
    "published": objectives.PUBLISHED,
}


class Batch(dict[str, Any]):
    """`bulk_trajs` and `visited` of a worker, and with them the walk that they were read from and the exponent of the rewards."""

    walk: Walk
    exponent: float
    texts: list[tuple[Any, Any]]  # the strings and thoughts as they were drawn

    def untouched(self) -> bool:
        """Whether its strings are still those of the walk; its rewards may have been changed."""
        return [entry[:2] for entry in self["bulk_trajs"]] == self.texts


class GeneratorBase(Interface):
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
        self.space = Space(a, tokenizer)
        self.env = self.space.env
        self.objective = self.make_objective(a)
        model = Policy(self.env, self.space.net(), seeds=[a.seed], back_action=self.objective.form.back_action)
        with torch.no_grad():
            model.log_z_unit.fill_((a.gen_partition_init or 0.0) / Policy.LOG_Z_SCALE)
        self.model = model.to(a.device)
        self.forward_dynamics = self.space.dynamics().to(a.device)
        self.book = LogBook(self.space.strings, a.reward_exp_min, a.device)
        self.dynamics_buffer = (
            ReplayBuffer(a.max_len, tokenizer, a.dynamics_buffer_size, a.min_len, a.device)
            if a.dynamics_off_pol
            else None
        )
        if self.dynamics_buffer is not None and (a.context_width or a.thought_state):
            raise UserError("dynamics_off_pol replays plain strings: leave out context_width and thought_state")
        self.assigned = False  # whether the model is one that was given, and not made from the args
        self._last: Trajectories | None = None  # the batch that `get_dynamics_loss` speaks of
        self._build()

    def _build(self) -> None:
        """The trainer of the networks there are; optimisers and averages start anew."""
        a, buffer = self.args, self.dynamics_buffer
        self.noise = self.space.model_of(self.forward_dynamics)
        # without a world of its own, what happens is what the learned dynamics says
        self.task = Task(self.env, self.noise, OfText(self.space, self.book), Power(1.0, a.reward_exp_min))
        self.trainer = Trainer(
            self.task,
            self.model,
            self.noise,
            self.objective,
            OnPolicy(self.task, self.model, a.gen_episodes_per_step),
            lr=a.gen_learning_rate,
            noise=NoiseTraining(
                a.dynamics_lr,
                a.dynamics_clip,
                None if buffer is None else buffer.buffer,
                a.dynamics_off_pol_rounds,
                a.dynamics_sample_size,
            ),
            iteration=Iteration(clip=a.gen_clip, capture=False, engine=a.engine),  # type: ignore[arg-type]
        )
        self._interface()

    @abstractmethod
    def make_objective(self, args: GeneratorArgs) -> Objective:
        """What this generator minimises."""

    def form(self, args: GeneratorArgs) -> Form:
        """Where the backward law of the thought comes from, as `gen_form` says."""
        return FORMS[args.gen_form]

    @property
    def gammas(self) -> tuple[float, ...]:
        """Those that r_gamma is averaged over."""
        return (self.args.gamma,)

    # learning -----------------------------------------------------------------------------------------------------

    def _read(self, batch: Mapping[str, Any]) -> Walk:
        if not isinstance(batch, Mapping) or "bulk_trajs" not in batch:
            series = isinstance(batch, Mapping) and "time_series" in batch
            way = ": time series are what stochflow.generators.SeriesGenerator learns from" if series else ""
            raise UserError(
                f'a batch is {{"bulk_trajs": [(string, thought string, reward), ...]}}, but this one has no "bulk_trajs"{way}'
            )
        found = self._walked(batch)
        if found is None:
            letters = trajectories(self.space.strings, self.tokenizer, batch["bulk_trajs"], self.args.device)
            found = Walk(self.space.lift(letters, batch.get("contexts")))
        self._last = found.trajectories
        if self.training:  # in evaluation mode a held-out batch is looked at and not learned from
            traj = found.trajectories
            exponent = batch.exponent if isinstance(batch, Batch) else 1.0
            if not self.args.context_width:  # of conditions the same string has many rewards
                self.book.add(self.space.text(traj.states[-1]), traj.score, exponent)
            self.noise.observe(traj)
        return found

    def _walked(self, batch: Mapping[str, Any]) -> Walk | None:
        """The walk of a worker's batch, whose trace saves the forward pass while the weights are those of the walk."""
        if not isinstance(batch, Batch) or not batch.untouched():
            return None
        score = read_rewards([entry[2] for entry in batch["bulk_trajs"]]).to(self.args.device).unsqueeze(0)
        traj, trace = batch.walk.trajectories._replace(score=score), batch.walk.trace
        if traj.states.shape[-1] != self.env.state_dim or self.args.context_width:
            return None
        fresh = trace is not None and trace.holds and trace.weights is self.trainer.policy_flat
        return Walk(traj, trace if fresh else None)

    def get_loss(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The flow loss of a batch, with its gradient, and the documents' named tensors (see `info`)."""
        traj = self._read(batch).trajectories
        terms = evaluate(self.task, self.model, self.noise, traj, None, self.objective.needs | NAMED)
        world = World(self.task, self.model, self.noise, traj, None, self._ask)
        loss, stats = self.objective.loss_and_stats(terms, world)
        return loss[0], self.info(terms, traj) | {name: value[0] for name, value in stats.items()}

    def train_step(self, batch: Mapping[str, Any]) -> Step:
        """One step of the policy, then of the dynamics; what the trainer logs, as a dict that unpacks into two losses."""
        if not self.training:
            raise UserError("this generator was put into evaluation mode: call .train() before train_step")
        found = self._read(batch)
        if self.trainer.steps_done == 0 and self.args.gen_partition_init is None:
            self._start_log_z(found.trajectories)
        self.trainer.learn(found)
        self.trainer.steps_done += 1
        return Step({name: float(value[0]) for name, value in self.trainer.stats.items()})

    @torch.no_grad()
    def _start_log_z(self, traj: Trajectories) -> None:
        """From log R - sum of (log p - log P_B): a log Z that is far off distorts the policy until it has converged."""
        t = evaluate(self.task, self.model, self.noise, traj, None, frozenset({"log_move", "log_pb"}))
        self.model.start_log_z((t.log_reward - (t.log_move - t.log_pb).sum(0)).mean(1))

    def get_dynamics_loss(self) -> Tensor:
        """Cross-entropy of the realised letters given prefix and thought: of replayed entries with `dynamics_off_pol`, else of the last batch."""
        if self.dynamics_buffer is not None:
            if not len(self.dynamics_buffer):
                raise UserError("the dynamics buffer is empty: run train_step on a batch first")
            return self.noise.loss(self.dynamics_buffer.buffer.sample(self.args.dynamics_sample_size))[0]
        if self._last is None:
            raise UserError(
                "no batch has been seen yet, so there is no dynamics loss: run get_loss or train_step first"
            )
        return self.noise.loss(self._last)[0]

    def _ask(self, states: Tensor, where: Tensor) -> Tensor:
        return self.task.reward(self.task.oracle(states), states, None)

    # acting -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def draw(
        self,
        n: int,
        channel: Channel,
        explore: Explore = None,
        temper: Tensor | float | None = None,
        contexts: Any = None,
    ) -> Walk:
        """A walk of n strings of the policy as it is through a channel of letters, traced where that saves work."""
        row = self.space.rows(contexts, n) if self.args.context_width else None
        task = self.task._replace(channel=self.space.channel(channel))
        traces = self.trainer.source.traces
        request = Request(task, self.model, n, explore, temper, row)
        if traces is None or traces.keyed or temper is not None or n != self.args.gen_episodes_per_step:
            return walk(request, self.args.engine)  # type: ignore[arg-type]
        return self.trainer.engines.walk.walk(request._replace(traces=traces))

    def sample(self, n: int, contexts: Any = None) -> list[str]:
        """`n` strings from the averaged policy, realised through the learned model of the noise."""
        return [string for string, _ in self.sample_thoughts(n, contexts=contexts)]

    def sample_thoughts(self, n: int, channel: Channel | None = None, contexts: Any = None) -> list[tuple[str, str]]:
        """`n` (string, thought string) pairs; `channel` = the world's own noise where it is known, such as Slip(0.25)."""
        with self.trainer.averaged(), torch.no_grad():
            traj = self.draw(n, self.forward_dynamics if channel is None else channel, contexts=contexts).trajectories
        return [(s, t) for s, t, _ in entries(self.space.strings, self.tokenizer, self.space.lower(traj))]

    def world(self) -> Channel:
        """The channel that `stick` describes."""
        return Slip(self.args.stick) if self.args.stick > 0 else Exact()

    # looking ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def info(self, terms: Terms, traj: Trajectories) -> dict[str, Any]:
        """The documents' tensors; M = letters, and STOP as one more where lengths vary.

        [B, T, M] pol_logits, pol_back_logits: log-probabilities of the thought letter, before and given the realised one;
        [B, T+1] log_flows of the network; [B, T] mask, forward_model_logits (the dynamics at what happened);
        [T, B] end_log_flow (the reward from the end on), real_actions, ll_diff; scalars r_gamma, forward_dynamics_loss.
        With `thought_state` T and M are those of the states that hold thoughts.
        """
        out = self.model.along(traj, self.model.context(traj.states[0]))
        log_pi = masked_log_softmax(out.forward[: len(traj.moves)], self.env.moves(traj.states[:-1]))

        def rows(x: Tensor) -> Tensor:  # [T, 1, B, ...] -> [B, T, ...]
            return x[:, 0].transpose(0, 1)

        band = entropy_band(terms.entropy, terms.choices, traj.alive)
        with torch.enable_grad():
            fit = None if self.dynamics_buffer is not None else self.noise.loss(traj)[0]
        return {
            "pol_logits": rows(log_pi),
            "pol_back_logits": rows(self._back_logits(traj, log_pi, out.back_action)),
            "log_flows": rows(out.log_flow),
            "mask": rows(traj.alive.float()),
            "forward_model_logits": rows(terms.log_k),
            "end_log_flow": terms.log_flow[1:, 0].detach(),
            "real_actions": traj.moves[:, 0],
            "ll_diff": self.residual(terms)[:, 0].detach(),
            "r_gamma": mean_entropy_ratio(band.high, band.low, self.gammas)[0],
            "forward_dynamics_loss": fit,
        }

    def residual(self, terms: Terms) -> Tensor:
        """[T, 1, B] residual of each step: log F(s) + log pi + log P - log F(s') - log pi_B."""
        return self.objective.residual(terms)

    def _back_logits(self, traj: Trajectories, log_pi: Tensor, head: Tensor | None) -> Tensor:
        """[T, 1, B, M]: the backward law of the action given the realised move; STOP was meant where it happened."""
        here = traj.states[:-1]
        legal = self.env.real_moves(self.env.moves(here))
        memory = remembered(self.noise, traj)
        if head is None:
            law = exact_law_of_action(self.noise, here, legal, traj.moves, log_pi, memory)
        else:
            law = head_law(self.noise, here, legal, head[1:], traj.actions, traj.moves, memory)
        if self.env.stop is None:
            return law
        is_stop = torch.arange(self.env.num_moves, device=law.device) == self.env.stop
        return torch.where((traj.moves == self.env.stop).unsqueeze(-1), torch.where(is_stop, 0.0, NEG), law)

    def forward(
        self, x: Tensor | Sequence[Any], lens: Sequence[int] | Tensor | None = None, contexts: Any = None
    ) -> Tensor:
        """[B, 2M + 1] at the prefixes x[:lens]: action logits, backward log-probabilities of the action, log-flow.

        `x` is texts, lists of tokens, or a padded tensor [B, L]; `lens` the letters of each that count (all, by default).
        The backward part is the posterior of the thought behind the last letter; of the empty prefix it is zero. With a
        head of its own (`gen_form`) it is that head's raw output.
        """
        state = self._states(x, lens, contexts)
        env, strings, state = self.env, self.space.strings, state.unsqueeze(0)
        letters = self.space.text(state)[0]
        out = self.model(state)
        last = (
            pick(letters, strings.lengths(letters) - 1).clamp(max=strings.tokens - 1).unsqueeze(0)
        )  # the letter that led here
        if out.back_action is not None:
            row = last[..., None, None].expand(1, last.shape[1], 1, env.num_moves)
            back = out.back_action.gather(2, row)[0, :, 0]
        else:
            before = env.unstep(state, last)
            mask = env.moves(before)
            log_pi = masked_log_softmax(self.model(before).forward, mask)
            law = exact_law_of_action(self.noise, before, env.real_moves(mask), last, log_pi, self.noise.begin(before))
            back = torch.where((strings.lengths(letters) > 0).unsqueeze(1), law[0], 0.0)
        return torch.cat([out.forward[0], back, out.log_flow[0].unsqueeze(-1)], -1)

    def _states(self, x: Tensor | Sequence[Any], lens: Any, contexts: Any) -> Tensor:
        """[B, D] states of `env` at prefixes."""
        letters = self._prefixes(x, lens)
        if self.args.thought_state:
            raise UserError("with thought_state a prefix alone is no state: use get_loss, which reads thoughts too")
        if not self.args.context_width:
            return letters
        return torch.cat([self.space.rows(contexts, len(letters)).T, letters], -1)

    def _prefixes(self, x: Tensor | Sequence[Any], lens: Any) -> Tensor:
        """[B, L] padded states of letters."""
        device, strings = self.args.device, self.space.strings
        tokens = (x if isinstance(x, Tensor) else self.tokenizer.process(x)).to(device)
        if tokens.dim() != 2 or tokens.shape[1] > strings.length:
            raise UserError(
                f"x has shape {tuple(tokens.shape)}, but it must be [batch, at most {strings.length} letters]"
            )
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) <= strings.pad:
            raise UserError(
                f"x holds tokens from {int(tokens.min())} to {int(tokens.max())}, but they must lie between 0 and {strings.pad} (padding)"
            )
        if lens is not None and not all(0 <= int(n) <= tokens.shape[1] for n in torch.as_tensor(lens).flatten()):
            raise UserError(f"lens is {lens}, but each must lie between 0 and the {tokens.shape[1]} letters of x")
        state = torch.full((len(tokens), strings.length), strings.pad, dtype=torch.long, device=device)
        state[:, : tokens.shape[1]] = tokens
        if lens is None:
            return state
        keep = torch.arange(strings.length, device=device) < torch.as_tensor(lens, device=device).view(-1, 1)
        return torch.where(keep, state, strings.pad)

    # keeping ------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Everything, so that training goes on from it, in one safetensors file."""
        tensors = {f"trainer.{k}": v for k, v in self.trainer.state_dict().items()}
        tensors |= {f"book.{k}": v for k, v in self.book.state_dict().items()}
        tensors["seen"] = self.forward_dynamics.seen
        kept = {
            "step": self.trainer.steps_done,
            "generator": type(self).__name__,
            "args": dataclasses.asdict(self.args),
            "alphabet": self.tokenizer.alphabet,
            "assigned": self.assigned,
        }
        file = Path(path)
        part = file.with_name(file.name + ".part")
        part.write_bytes(runs.pack(tensors, kept))
        os.replace(part, file)  # whole or not at all
        return file

    @classmethod
    def load(cls: type[Self], path: str | os.PathLike[str], model: nn.Module | None = None) -> Self:
        """The generator that `save` wrote; the random stream goes on as if nothing had been loaded.

        `model`: where one was assigned, another of its sizes, whose weights are replaced by those in the file.
        """
        found = runs.load_checkpoint(path)
        kind = found.scalars.get("generator")
        if kind != cls.__name__:
            raise UserError(
                f"{path} holds a {kind or 'run'}, not a {cls.__name__}: load it with the class that saved it"
            )
        args = found.scalars["args"]
        if "gen_form" not in args:  # written before there was a choice
            args = {**args, "gen_form": "published", "gen_net": "mlp"}
        made = cls(GeneratorArgs.of(args), Tokenizer(found.scalars["alphabet"]))
        if found.scalars.get("assigned", False) and model is None:
            raise UserError(
                f"{path} holds a model that was assigned and is not made from the args: load(path, model=...) with one of its sizes"
            )
        if model is not None:
            made.model = model  # type: ignore[assignment]

        def part(name: str) -> dict[str, Tensor]:
            return {k.removeprefix(name + "."): v for k, v in found.tensors.items() if k.startswith(name + ".")}

        devices = [made.model.device] if made.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            try:
                made.trainer.load_state_dict(part("trainer"))
            except (KeyError, RuntimeError) as error:
                raise UserError(
                    f"{path} holds networks of another shape ({error}): give the model that was saved"
                ) from None
        made.book.load_state_dict(part("book"))
        made.forward_dynamics.seen.copy_(found.tensors["seen"])
        return made
