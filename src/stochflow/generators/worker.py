"""The documents' rollout: strings built through a noisy world, scored once per batch, their scores made rewards."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stochflow.engines.base import Walk
from stochflow.errors import UserError
from stochflow.generators.args import GeneratorArgs, Tokenizer
from stochflow.generators.base import Batch, GeneratorBase
from stochflow.generators.log import entries
from stochflow.learn.entropy import EntropyAverage, entropy_band, entropy_ratio, temperature
from stochflow.learn.evaluate import evaluate
from stochflow.scores.oracles import Host, check_scores
from stochflow.scores.rewards import Power
from stochflow.worlds.channels import Exact, Slip


class RolloutWorker:
    """Draws trajectories of a generator through a world that ignores each intended letter with probability `stick`.

    `oracle` is a function from a list of strings to their scores, called once per batch with the whole batch.
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
        self.reward_exp, self.exp_ramping_factor = self.args.reward_exp, self.args.exp_ramping_factor
        self.final_states: list[str] = []  # of the last batch
        self.band = EntropyAverage(1).to(self.args.device)

    def l2r(self, score: float, t: float = 0) -> float:
        """The reward of a score at iteration t: score^(1 + (reward_exp - 1)(1 - 1/(1 + t/exp_ramping_factor)))."""
        return max(float(score), 0.0) ** float(self.power.exponent(t))

    def rollout(self, generator: GeneratorBase, episodes: int, contexts: Any = None) -> list[tuple[str, str, float]]:
        """(string, thought string, score) of `episodes` new strings."""
        return self._rollout(generator, episodes, contexts)[0]

    def _rollout(
        self, generator: GeneratorBase, episodes: int, contexts: Any = None
    ) -> tuple[list[tuple[str, str, float]], Walk]:
        """The same, and the walk that they are."""
        if generator.tokenizer.alphabet != self.tokenizer.alphabet:
            raise UserError(
                f"the generator writes {generator.tokenizer!r}, but the worker reads {self.tokenizer!r}: give both the same one"
            )
        a, space = self.args, generator.space
        channel = Slip(a.stick) if a.stick > 0 else Exact()
        walk = generator.draw(episodes, channel, a.random_action_prob or None, self._temper(), contexts)
        letters = space.lower(walk.trajectories)
        texts = entries(space.strings, self.tokenizer, letters)
        strings = [string for string, _, _ in texts]
        scores = Host(self.oracle, space.strings).raw(strings)  # once per batch
        check_scores(strings, scores)
        if a.entropy_exploration:
            with torch.no_grad():
                needs = frozenset({"entropy"})
                terms = evaluate(generator.task, generator.model, generator.noise, walk.trajectories, None, needs)
            self.band(entropy_band(terms.entropy, terms.choices, terms.alive))
        drawn = [(string, thought, y) for (string, thought, _), y in zip(texts, scores, strict=True)]
        return drawn, walk

    def _temper(self) -> Tensor | float | None:
        """What the logits are divided by; the entropy ratio is that of the rollouts so far."""
        a = self.args
        if not a.entropy_exploration:
            return None if a.temperature == 1 else a.temperature
        return a.temperature * temperature(entropy_ratio(*self.band.band, a.gamma))

    def execute_train_episode_batch(
        self, generator: GeneratorBase, it: float = 0, contexts: Any = None
    ) -> dict[str, Any]:
        """A batch for `train_step`: `bulk_trajs` with rewards l2r(score, it), and `visited` with the scores beside them.

        `contexts` [episodes, C], or one of width C for all, where the generator has a `context_width`.
        """
        drawn, walk = self._rollout(generator, self.args.gen_episodes_per_step, contexts)
        exponent = float(self.power.exponent(it))
        rewards = [max(score, 0.0) ** exponent for _, _, score in drawn]
        bulk = [(string, thought, r) for (string, thought, _), r in zip(drawn, rewards, strict=True)]
        visited = [(s, t, r, score) for (s, t, score), r in zip(drawn, rewards, strict=True)]
        made = Batch({"bulk_trajs": bulk, "visited": visited})
        made.walk, made.exponent, made.texts = walk, exponent, [entry[:2] for entry in bulk]
        if contexts is not None:
            made["contexts"] = contexts
        self.final_states = [string for string, _, _ in drawn]
        return made
