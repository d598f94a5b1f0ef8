"""What a generator is told: the documents' `args` and `tokenizer`."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stochflow.errors import UserError, did_you_mean
from stochflow.learn.entropy import check_gamma

CHOICES = {
    "gen_net": ("auto", "mlp", "lookup", "transformer", "gru", "lstm"),
    "gen_form": ("joint", "marginal", "head", "published"),
    "gen_positions": ("learned", "sinusoidal"),
    "engine": ("auto", "eager", "numba", "cuda"),
    "dynamics_model": ("neural", "tabular", "thought"),
}


@dataclass(frozen=True)
class GeneratorArgs:
    """Settings by the documents' names. An `argparse.Namespace` with the same names does as well: see `of`."""

    max_len: int = 8  # letters of the longest string
    min_len: int | None = None  # letters of the shortest one; None: all have max_len letters and there is no STOP
    vocab_size: int | None = None  # number of letters; None: the tokenizer's
    device: str = "cpu"
    seed: int = 0

    gen_net: str = (
        "auto"  # the policy's trunk: mlp, lookup, transformer, gru, lstm; auto: lookup for short strings, else mlp
    )
    gen_form: str = (
        "joint"  # joint (the exact posterior of the thought), marginal (equal to it), head, published (unsound)
    )
    engine: str = "auto"  # how an iteration is computed: auto, eager, numba, cuda
    gen_learning_rate: float = 5e-3
    gen_clip: float = 10.0  # largest gradient norm
    gen_num_hidden: int = 64
    gen_num_layers: int = 2
    gen_num_heads: int = 4  # attention heads of a transformer; they share gen_num_hidden
    gen_positions: str = (
        "learned"  # position encodings of the transformers, policy's and dynamics': learned or sinusoidal
    )
    context_width: int = 0  # numbers that describe the condition of each string; 0: there is none
    gen_partition_init: float | None = None  # log Z at the start; None: as the first batch of train_step estimates it
    gen_output_coef: float = (
        1.0  # what logits are multiplied by; anything but 1 would train one policy and draw from another
    )
    gen_do_explicit_Z: bool = False
    reward_exp_min: float = 1e-3  # rewards below this count as this, because their logarithm is taken

    dynamics_model: str = "neural"  # of the noise: neural, tabular (counts), thought (reads all earlier thoughts)
    thought_state: bool = False  # policy, flow and backward law read all thoughts, too (short strings of fixed length)
    dynamics_lr: float = 2e-3
    dynamics_clip: float = 10.0
    dynamics_num_hidden: int = 64
    dynamics_num_layers: int = 1
    dynamics_off_pol: bool = False  # train the dynamics from a replay buffer instead of the batch at hand
    dynamics_off_pol_rounds: int = 1
    dynamics_sample_size: int = 16
    dynamics_buffer_size: int = 100_000

    gamma: float = 0.5  # of the entropy ratio, above 0 and at most 1
    gammas: tuple[float, ...] = (0.25, 0.5, 0.75)  # those that KL3 averages over
    kl_weight: float = 1.0
    entropy_average: float = 0.0  # decay of the moving average of the entropy band; 0: each batch by itself

    # RolloutWorker
    stick: float = 0.25  # probability that the world ignores the intended letter
    gen_episodes_per_step: int = 1024
    random_action_prob: float = 0.01
    temperature: float = 1.0  # what is drawn from is pi^(1/temperature); 1 is the policy itself
    entropy_exploration: bool = False  # temper by the entropy ratio, too: flatter where states differ in entropy
    reward_exp: float = 3.0
    exp_ramping_factor: float = 3.0  # 0: the full exponent from the start

    def __post_init__(self) -> None:
        whole = "max_len gen_num_hidden gen_num_layers dynamics_num_hidden dynamics_off_pol_rounds dynamics_sample_size"
        for name in [*whole.split(), "gen_num_heads", "dynamics_buffer_size", "gen_episodes_per_step"]:
            self._need(
                name, isinstance(getattr(self, name), int) and getattr(self, name) >= 1, "a whole number of at least 1"
            )
        for (
            name
        ) in "gen_learning_rate gen_clip reward_exp_min dynamics_lr dynamics_clip temperature reward_exp".split():
            value = getattr(self, name)
            self._need(
                name, isinstance(value, (int, float)) and math.isfinite(value) and value > 0, "a finite number above 0"
            )
        for name in ("stick", "random_action_prob"):
            self._need(name, 0 <= getattr(self, name) <= 1, "a probability between 0 and 1")
        for name in ("kl_weight", "exp_ramping_factor", "context_width"):
            self._need(name, getattr(self, name) >= 0, "0 or more")
        for name, words in CHOICES.items():
            self._need(name, getattr(self, name) in words, f"one of {', '.join(words)}")
        self._need(
            "gen_output_coef",
            self.gen_output_coef == 1,
            "1: with another one pi is trained and a power of it drawn from",
        )
        self._need(
            "gen_do_explicit_Z",
            not self.gen_do_explicit_Z,
            "False: the generators of trajectory balance learn log Z, and the others have no use for it",
        )
        self._need("entropy_average", 0 <= self.entropy_average < 1, "at least 0 and below 1")
        self._need(
            "min_len",
            self.min_len is None or 0 <= self.min_len <= self.max_len,
            f"None, or from 0 to max_len = {self.max_len}",
        )
        for gamma in (self.gamma, *self.gammas):
            check_gamma(gamma)

    def _need(self, name: str, good: bool, want: str) -> None:
        if not good:
            raise UserError(f"{name} is {getattr(self, name)!r}, but it must be {want}")

    @staticmethod
    def of(given: GeneratorArgs | argparse.Namespace | Mapping[str, Any] | None) -> GeneratorArgs:
        """From a Namespace or mapping: missing names take their defaults, unknown ones are refused."""
        if isinstance(given, GeneratorArgs):
            return given
        found = {} if given is None else dict(given) if isinstance(given, Mapping) else dict(vars(given))
        names = [f.name for f in dataclasses.fields(GeneratorArgs)]
        foreign = sorted(set(found) - set(names))
        if foreign:
            hint = did_you_mean(foreign[0], names)
            raise UserError(
                f"no generator uses {', '.join(foreign)}{hint}: leave out what is not a field of GeneratorArgs"
            )
        known = dict(found)
        if "gammas" in known:
            known["gammas"] = tuple(known["gammas"])
        if "device" in known:
            known["device"] = str(known["device"])
        return GeneratorArgs(**known)


class Tokenizer:
    """Letters to numbers and back: letter i of the alphabet is token i, everywhere; the number after the last is padding."""

    def __init__(self, alphabet: str = "ACGT"):
        if len(alphabet) < 2 or len(set(alphabet)) != len(alphabet):
            raise UserError(
                f"an alphabet needs at least two different letters, each once, but this one is {alphabet!r}"
            )
        self.alphabet = alphabet
        self.pad = len(alphabet)
        self._code = {letter: i for i, letter in enumerate(alphabet)}
        self._token = np.full(max(map(ord, alphabet)) + 1, -1, dtype=np.int64)  # by code point; 0 is padding
        self._token[[ord(letter) for letter in alphabet]] = range(len(alphabet))
        self._token[0] = self.pad

    def __len__(self) -> int:
        return len(self.alphabet)

    def __repr__(self) -> str:
        return f"Tokenizer({self.alphabet!r})"

    def encode(self, sequence: str | Sequence[Any], where: str = "the sequence") -> list[int]:
        """The tokens of one text, or of a list that holds tokens already."""
        if not hasattr(sequence, "__iter__"):
            raise UserError(f"{where} is {sequence!r}, but it must be text or a list of tokens")
        tokens = []
        for place, letter in enumerate(sequence):
            if isinstance(letter, str):
                if letter not in self._code:
                    raise UserError(
                        f"{where} has the letter {letter!r} at position {place}, which is not in the alphabet {self.alphabet!r}"
                    )
                tokens.append(self._code[letter])
            else:
                if not 0 <= int(letter) < self.pad:
                    raise UserError(
                        f"{where} has the token {letter!r} at position {place}, but tokens run from 0 to {self.pad - 1}"
                    )
                tokens.append(int(letter))
        return tokens

    def process(self, sequences: Sequence[str | Sequence[int]]) -> Tensor:
        """[B, longest] int64, padded at the end with `pad`."""
        quick = self._by_code_points(sequences)
        if quick is not None:
            return quick
        rows = [self.encode(s, f"sequence {i}") for i, s in enumerate(sequences)]
        longest = max(map(len, rows), default=0)
        return torch.tensor([r + [self.pad] * (longest - len(r)) for r in rows], dtype=torch.long).reshape(
            len(rows), longest
        )

    def _by_code_points(self, sequences: Sequence[Any]) -> Tensor | None:
        """The same for texts alone, all at once; None: something needs a closer look."""
        if not len(sequences) or not all(type(s) is str for s in sequences):
            return None
        texts = np.array(sequences)  # shorter ones are padded with code point 0
        points = texts.view(np.uint32).reshape(len(texts), -1)
        if not points.size or points.max() >= len(self._token):
            return None
        found = self._token[points]
        padded = points == 0
        return None if (found < 0).any() or (padded[:, :-1] & ~padded[:, 1:]).any() else torch.from_numpy(found)

    def decode(self, tokens: Tensor | Sequence[Sequence[int]]) -> list[str]:
        """Texts of rows of tokens; padding is left out."""
        if isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.shape[1]:
            letters = np.array([*self.alphabet, ""])[tokens.cpu().numpy()]  # [B, L] of one letter each
            ends_only = bool(((tokens == self.pad)[:, :-1] <= (tokens == self.pad)[:, 1:]).all())
            if ends_only:
                return np.ascontiguousarray(letters).view(f"U{tokens.shape[1]}").ravel().tolist()
        rows = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        every = [*self.alphabet, ""]
        return ["".join(every[t] for t in row) for row in rows]
