"""The documents' rollout: strings built through a noisy world, scored once a batch, their scores made rewards."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.generators.args import GeneratorArgs, Tokenizer
from stochflow.generators.log import entries
from stochflow.generators.models import GFlowNetGenerator
from stochflow.learn.entropy import EntropyAverage, entropy_band, entropy_ratio, temperature
from stochflow.learn.evaluate import evaluate
from stochflow.learn.rollout import rollout
from stochflow.scores.oracles import Host
from stochflow.scores.rewards import Power
from stochflow.types import Task, Trajectories
from stochflow.worlds.channels import Exact, Slip


class RolloutWorker:
    """Draws trajectories of a generator through a world that ignores each intended letter with probability `stick`.

    `oracle` is a function from a list of strings to their scores, called once a batch with the whole batch.
    """

    def __init__(
        self,
        args: GeneratorArgs | argparse.Namespace | Mapping[str, Any] | None,
        oracle: Callable[[list[str]], Any],
        tokenizer: Tokenizer,
    ):
        self.args = GeneratorArgs.of(args)
        self.oracle, self.tokenizer = oracle, tokenizer
        self.power = Power(self.args.reward_exp, self.args.reward_exp_min, self.args.exp_ramping_factor)
        self.band = EntropyAverage(1).to(self.args.device)

    def l2r(self, score: float, t: float = 0) -> float:
        """The reward of a score at iteration t: score^(1 + (reward_exp - 1)(1 - 1/(1 + t/exp_ramping_factor)))."""
        return max(float(score), 0.0) ** float(self.power.exponent(t))

    def rollout(self, generator: GFlowNetGenerator, episodes: int) -> list[tuple[str, str, float]]:
        """(string, thought string, score) of `episodes` new strings."""
        if generator.tokenizer.alphabet != self.tokenizer.alphabet:
            raise UserError(
                f"the generator writes {generator.tokenizer!r}, but the worker reads {self.tokenizer!r}: give both the same one"
            )
        env, a = generator.env, self.args
        channel = Slip(a.stick) if a.stick > 0 else Exact()
        task = Task(env, channel, Host(self.oracle, env), self.power)
        traj = rollout(task, generator.model, episodes, explore=a.random_action_prob or None, temper=self._temper())
        score = task.oracle(traj.states[-1])
        traj = Trajectories(traj.states, traj.actions, traj.moves, traj.alive, score, traj.real)
        if a.entropy_exploration:
            with torch.no_grad():
                terms = evaluate(task, generator.model, generator.forward_dynamics, traj, None, frozenset({"entropy"}))
            self.band(entropy_band(terms.entropy, terms.choices, terms.alive))
        return entries(env, self.tokenizer, traj)

    def _temper(self) -> Tensor | float | None:
        """What the logits are divided by; the entropy ratio is that of the rollouts so far."""
        a = self.args
        if not a.entropy_exploration:
            return None if a.temperature == 1 else a.temperature
        return a.temperature * temperature(entropy_ratio(*self.band.band, a.gamma))

    def execute_train_episode_batch(self, generator: GFlowNetGenerator, it: float = 0) -> dict[str, list[Any]]:
        """A batch for `train_step`: `bulk_trajs` with rewards l2r(score, it), and `visited` with the scores beside them."""
        drawn = self.rollout(generator, self.args.gen_episodes_per_step)
        bulk = [(string, thought, self.l2r(score, it)) for string, thought, score in drawn]
        visited = [
            (string, thought, reward, score)
            for (string, thought, reward), (_, _, score) in zip(bulk, drawn, strict=True)
        ]
        return {"bulk_trajs": bulk, "visited": visited}
