"""Sequences as numbers: tokens, and from these one-hot letters and counts of short words.

N sequences, L = longest length, K letters, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stochflow.errors import UserError

MOST_WORDS = 500  # counts of words of a length are features where there are at most so many words


class Features:
    """Texts of at most `length` letters to features [N, F], float32.

    One-hot letters by position, for strings of unequal length from both ends; counts of letters, pairs and, for small
    alphabets, triples, each of order one; the length where it varies.
    """

    def __init__(self, alphabet: str, length: int, same_length: bool):
        self.alphabet, self.length, self.same_length = alphabet, length, same_length
        self.letters = len(alphabet)
        self.code = np.full(0x110000 if max(map(ord, alphabet)) > 255 else 256, self.letters, dtype=np.int64)
        for i, letter in enumerate(alphabet):
            self.code[ord(letter)] = i
        self.words = [k for k in (1, 2, 3) if self.letters**k <= MOST_WORDS and k <= length]

    @property
    def count(self) -> int:
        ends = 1 if self.same_length else 2
        return ends * self.length * self.letters + sum(self.letters**k for k in self.words) + (not self.same_length)

    def tokens(self, texts: Sequence[str]) -> Tensor:
        """[N, L] int64, padded at the end with K."""
        out = np.full((len(texts), self.length), self.letters, dtype=np.int64)
        if len(texts) and all(len(t) == self.length for t in texts):
            flat = np.frombuffer("".join(texts).encode("utf-32-le"), dtype="<u4")
            out[:] = self.code[np.minimum(flat, len(self.code) - 1)].reshape(len(texts), -1)
            return torch.from_numpy(out)
        for i, text in enumerate(texts):
            if len(text) > self.length:
                raise UserError(f"{text[:40]!r} has {len(text)} letters, but at most {self.length} are known here")
            out[i, : len(text)] = [self.code[min(ord(c), len(self.code) - 1)] for c in text]
        return torch.from_numpy(out)

    def __call__(self, tokens: Tensor) -> Tensor:
        """[N, L] tokens -> [N, F]."""
        here = tokens.unsqueeze(-1) == torch.arange(self.letters)  # [N, L, K]
        parts = [here.flatten(1).float()]
        size = (tokens != self.letters).sum(1)
        if not self.same_length:
            place = (torch.arange(self.length) - self.length + size.unsqueeze(1)) % self.length
            parts.append(here.gather(1, place.unsqueeze(-1).expand_as(here)).flatten(1).float())
        for k in self.words:
            parts.append(self._words(tokens, size, k))
        if not self.same_length:
            parts.append((size / self.length).unsqueeze(1).float())
        return torch.cat(parts, 1)

    def _words(self, tokens: Tensor, size: Tensor, k: int) -> Tensor:
        """How often each word of k letters occurs, over the square root of how many words there are, [N, K^k]."""
        places = tokens.shape[1] - k + 1
        word = torch.zeros(len(tokens), places, dtype=torch.long)
        for j in range(k):
            word = word * self.letters + tokens[:, j : j + places].clamp(max=self.letters - 1)
        there = torch.arange(places) < (size - k + 1).unsqueeze(1)
        out = torch.zeros(len(tokens), self.letters**k)
        out.scatter_add_(1, word, there.float())
        return out / there.sum(1, keepdim=True).clamp(min=1).sqrt()


def distances(a: Sequence[str], b: Sequence[str], aligned: bool = False) -> np.ndarray:
    """[A, B] letters in which strings differ where all have one length, else (or `aligned`) edit distances; int32."""
    if not len(a) or not len(b):
        return np.zeros((len(a), len(b)), dtype=np.int32)
    if not aligned and len({len(t) for t in a} | {len(t) for t in b}) == 1:
        x, y = _codes(a), _codes(b)
        out = np.zeros((len(a), len(b)), dtype=np.uint16)
        for i in range(x.shape[1]):
            out += x[:, i, None] != y[None, :, i]
        return out.astype(np.int32)
    try:
        from rapidfuzz.distance import Levenshtein
        from rapidfuzz.process import cdist
    except ImportError:
        return np.stack([_edits(text, b) for text in a])
    return cdist(list(a), list(b), scorer=Levenshtein.distance, dtype=np.int32)


def nearest(
    texts: Sequence[str], known: Sequence[str], block: int = 512, aligned: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """[N] position of the nearest known string of each text, and its distance."""
    at, far = [], []
    for i in range(0, len(texts), block):
        gap = distances(texts[i : i + block], known, aligned)
        at.append(gap.argmin(1))
        far.append(gap.min(1))
    if not at:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    return np.concatenate(at), np.concatenate(far)


def _codes(texts: Sequence[str]) -> np.ndarray:
    flat = np.frombuffer("".join(texts).encode("utf-32-le"), dtype="<u4")
    small = flat.astype(np.uint8) if flat.size == 0 or flat.max() < 256 else flat
    return small.reshape(len(texts), -1)


def _edits(text: str, others: Sequence[str]) -> np.ndarray:
    """Edit distances of one string to many, a row of the table for all of them at once."""
    width = max((len(o) for o in others), default=0)
    letters = np.zeros((len(others), width), dtype=np.uint32)
    for i, other in enumerate(others):
        letters[i, : len(other)] = [ord(c) for c in other]
    steps = np.arange(width + 1)
    row = np.broadcast_to(steps, (len(others), width + 1)).copy()
    for i, letter in enumerate(text, 1):
        best = np.minimum(row[:, 1:] + 1, row[:, :-1] + (letters != ord(letter)))
        best = np.concatenate([np.full((len(others), 1), i), best], 1)
        row = np.minimum.accumulate(best - steps, 1) + steps  # a deletion carries a smaller figure to the right
    return row[np.arange(len(others)), [len(o) for o in others]].astype(np.int32)
