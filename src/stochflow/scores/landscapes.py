"""Landscapes over longer strings: bit sequences with known modes, conditional GC content, antimicrobial peptides, RNA.

Each is an oracle: states [..., D] -> score [...], float32, part of a captured iteration (`on_device`). `RNAFold` is the
exception: a Python function for `Host`, as slow as folding is.
"""

from __future__ import annotations

import io
from contextlib import nullcontext
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.ops import PerDevice, one_thread
from stochflow.scores.oracles import count_calls
from stochflow.worlds.conditioned import Conditioned, Contexts
from stochflow.worlds.env import Env
from stochflow.worlds.strings import Strings

# bit sequences ------------------------------------------------------------------------------------------------------

SMALL = 1 << 18  # bits of a batch below which one thread compares them
WORDS = ("00000000", "11111111", "11110000", "00001111", "00111100")  # the bytes of the modes


def bit_alphabet(bits: int) -> str:
    """2^bits letters: digits and Latin letters up to 6 bits, other characters beyond."""
    plain = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz+/"
    return plain[: 2**bits] if bits <= 6 else "".join(chr(0x100 + i) for i in range(2**bits))


class BitModes:
    """Closeness to the nearest of a set of modes: 1 - (smallest Hamming distance) / length, on sequences of bits.

    A token is `bits` bits, the highest first. Modes are random rows of the five bytes of Malkin et al. 2022
    (arXiv 2201.13259).
    """

    on_device = True

    def __init__(self, env: Strings, bits: int, modes: int = 60, seed: int = 0):
        size = env.length * bits
        if size % 8:
            raise UserError(
                f"modes are made of whole bytes, but {env.length} tokens of {bits} bits are {size} bits: "
                "give a multiple of 8"
            )
        possible = len(WORDS) ** (size // 8)
        gen = torch.Generator().manual_seed(seed)
        rows: dict[tuple[int, ...], None] = {}
        while len(rows) < min(modes, possible):
            rows[tuple(torch.randint(len(WORDS), (size // 8,), generator=gen).tolist())] = None
        words = torch.tensor([[int(c) for c in w] for w in WORDS])
        self.mode_bits = words[torch.tensor(list(rows))].flatten(1)  # [modes, size]
        self.env, self.bits, self.size, self.calls = env, bits, size, 0
        self._constants = PerDevice(self.mode_bits.float(), torch.arange(bits - 1, -1, -1))

    def unpack(self, state: Tensor) -> Tensor:
        """The bits of tokens [..., L] as [..., L * bits]."""
        _, shift = self._constants(state.device)
        return ((state.unsqueeze(-1) >> shift) & 1).flatten(-2)

    def distances(self, state: Tensor) -> Tensor:
        """Hamming distance to every mode, [..., modes] float32 (whole numbers, exact)."""
        modes, _ = self._constants(state.device)
        x = self.unpack(state).float()
        small = x.numel() < SMALL and x.device.type == "cpu" and not torch.compiler.is_compiling()
        with one_thread() if small else nullcontext():
            return x.sum(-1, keepdim=True) + modes.sum(-1) - 2 * (x @ modes.T)

    def __call__(self, state: Tensor) -> Tensor:
        count_calls(self, state)
        return 1 - self.distances(state).amin(-1) / self.size

    def modes(self, state: Tensor) -> Tensor:
        """[...] True on the modes themselves; an unfinished string is not a mode."""
        return (self.distances(state).amin(-1) == 0) & (state != self.env.pad).all(-1)

    def found(self, state: Tensor, radius: int) -> int:
        """The number of modes that have one of these sequences within `radius` bits."""
        near = self.distances(state.reshape(-1, state.shape[-1])) <= radius
        return int(near.any(0).sum())


# a condition --------------------------------------------------------------------------------------------------------


class GCContent:
    """Closeness of the share of G and C to the context's target: 1 - |GC - target|; contexts are [target, beta]."""

    on_device = True

    def __init__(self, env: Conditioned):
        if env.contexts.shape[1] != 2:
            raise UserError(
                f"a context of GC content is a row [target, beta], but these are {env.contexts.shape[1]} wide: "
                "give two columns"
            )
        strings = env.inner
        assert isinstance(strings, Strings)
        strong = torch.tensor([letter in "GC" for letter in strings.alphabet] + [False])  # padding is neither
        self.env, self.pad, self.calls = env, strings.pad, 0
        self._strong, self._contexts = PerDevice(strong), Contexts(env)

    def share(self, state: Tensor) -> Tensor:
        """The share of G and C among the letters so far, [...]."""
        text = state[..., 1:]
        return self._strong(state.device)[0][text].sum(-1) / (text != self.pad).sum(-1).clamp(min=1)

    def __call__(self, state: Tensor) -> Tensor:
        count_calls(self, state)
        target = self._contexts(state.device)[:, 0][state[..., 0]]
        return 1 - (self.share(state) - target).abs()


class Tempered:
    """log R = beta * score with the context's beta: one policy for every temperature."""

    def __init__(self, env: Conditioned, column: int = 1):
        self.column, self._contexts = column, Contexts(env)

    def __call__(self, score: Tensor, state: Tensor, step: Any = None) -> Tensor:
        beta = self._contexts(state.device)[:, self.column][state[..., 0]]
        return beta.to(score) * score


# peptides -----------------------------------------------------------------------------------------------------------


def peptide_features(state: Tensor, letters: int) -> Tensor:
    """[..., L] residues, padded at the end -> [..., letters + letters^2 + 1]: shares of residues, of pairs; length."""
    here = (state.unsqueeze(-1) == torch.arange(letters, device=state.device)).float()
    size = here.sum((-2, -1)).unsqueeze(-1)
    single = here.sum(-2) / size.clamp(min=1)
    pairs = (here[..., :-1, :].mT @ here[..., 1:, :]).flatten(-2) / (size - 1).clamp(min=1)
    return torch.cat([4 * single, 20 * pairs, size / state.shape[-1]], -1)  # of order one each


class PeptideProxy:
    """Probability that a peptide is antimicrobial, by a small network.

    It was trained to tell measured peptides from random protein fragments, so it is silent about safety and about
    sequences unlike both. Its quality is in data/README.md.
    """

    on_device = True

    def __init__(self, env: Env):
        content = files("stochflow.scores.data").joinpath("peptide_proxy.npz").read_bytes()
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            weights = {k: torch.tensor(stored[k].astype(np.float32)) for k in ("w1", "b1", "w2", "b2")}
        self.env, self.calls, self.letters = env, 0, getattr(env, "tokens", 20)
        if weights["w1"].shape[1] != self.letters**2 + self.letters + 1 or getattr(env, "length", 0) != 50:
            raise UserError(
                f"the peptide proxy reads up to 50 residues of 20 kinds, but {env!r} differs: "
                "build it with peptide_task"
            )
        self._weights = PerDevice(*weights.values())

    def __call__(self, state: Tensor) -> Tensor:
        count_calls(self, state)
        w1, b1, w2, b2 = self._weights(state.device)
        hidden = torch.relu(peptide_features(state, self.letters) @ w1.T + b1)
        return torch.sigmoid(hidden @ w2.T + b2).squeeze(-1)


def peptides() -> tuple[list[str], np.ndarray]:
    """The shipped peptides of 8 to 50 residues, and a bool array: whether each is antimicrobial."""
    content = files("stochflow.scores.data").joinpath("peptides.npz").read_bytes()
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        return stored["sequences"].tobytes().decode("ascii").split("\n"), stored["active"]


# RNA ----------------------------------------------------------------------------------------------------------------


class RNAFold:
    """1 - (ensemble defect) of folding into a structure: the expected share of correctly paired bases, by ViennaRNA.

    `structure` in dot-bracket notation. A function `list[str] -> scores`, some hundreds per second: use
    `Cached(Host(...))`.
    """

    def __init__(self, structure: str):
        depth = 0
        for place, mark in enumerate(structure):
            depth += {"(": 1, ")": -1, ".": 0}.get(mark, -(10**9))
            if depth < 0:
                raise UserError(
                    f"the structure {structure!r} goes wrong at position {place} ({mark!r}): "
                    "write dots and matching brackets"
                )
        if depth or not structure:
            raise UserError(
                f"the structure {structure!r} has {depth} brackets that are not closed: "
                "write dots and matching brackets"
            )
        try:
            import RNA
        except ImportError:
            raise UserError(
                "folding RNA needs ViennaRNA, which is not installed: pip install 'stochflow[rna]'"
            ) from None
        self.structure, self.rna = structure, RNA

    def __call__(self, texts: list[str]) -> list[float]:
        scores = []
        for text in texts:
            if len(text) != len(self.structure):
                raise UserError(
                    f"{text!r} has {len(text)} bases, but the structure has {len(self.structure)}: "
                    "give sequences of that length"
                )
            fold = self.rna.fold_compound(text)
            fold.pf()
            scores.append(1.0 - float(fold.ensemble_defect(self.structure)))
        return scores
