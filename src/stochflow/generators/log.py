"""A laboratory's log, (string, thought string, reward), as the engine's trajectories; and what it knows of rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.generators.args import Tokenizer
from stochflow.learn.buffer import Buffer
from stochflow.types import Trajectories
from stochflow.worlds.strings import Strings

Entry = tuple[Any, Any, float]  # (string, thought string, reward); strings as text or as lists of tokens


def trajectories(
    env: Strings, tokenizer: Tokenizer, log: Sequence[Entry], device: str | torch.device = "cpu"
) -> Trajectories:
    """One seed's batch [T, 1, B]: the realised string makes the moves, the thought string the actions, the reward the score.

    A string shorter than the longest possible one ends by STOP, which is never noisy: meant and done at the same step.
    """
    if not log:
        raise UserError("bulk_trajs is empty: give at least one (string, thought string, reward)")
    for i, entry in enumerate(log):
        if not isinstance(entry, (tuple, list)) or len(entry) != 3:
            raise UserError(f"entry {i} of bulk_trajs is {entry!r}, but it must be (string, thought string, reward)")
    strings, thoughts, rewards = (list(column) for column in zip(*log, strict=True))
    letters, size = _letters(env, tokenizer, strings, "string")
    meant, thought_size = _letters(env, tokenizer, thoughts, "thought string")
    _check_lengths(env, size.tolist(), thought_size.tolist())
    score = read_rewards(rewards).to(device).unsqueeze(0)
    # what stands after the last letter: STOP, and then nothing that counts
    fill = 0 if env.stop is None else env.stop

    def timed(tokens: Tensor) -> Tensor:  # [T, 1, B]
        return torch.where(tokens == env.pad, fill, tokens).T.unsqueeze(1).contiguous().to(device)

    moves, actions = timed(letters), timed(meant)
    length = size.unsqueeze(0).to(device)  # [1, B]
    alive = torch.arange(env.length, device=device)[:, None, None] < length + (length < env.length).long()
    state = env.initial(tuple(length.shape), torch.zeros_like(length))
    states = [state]
    for t in range(env.length):
        state = torch.where(alive[t].unsqueeze(-1), env.step(state, moves[t]), state)
        states.append(state)
    return Trajectories(torch.stack(states), actions, moves, alive, score, torch.ones_like(length, dtype=torch.bool))


def _letters(env: Strings, tokenizer: Tokenizer, texts: list[Any], what: str) -> tuple[Tensor, Tensor]:
    """Tokens [B, L] padded with `pad`, and lengths [B]."""
    try:
        tokens = tokenizer.process(texts)
    except UserError:
        for i, text in enumerate(texts):
            tokenizer.encode(text, f"{what} {i}")  # says which one
        raise
    size = (tokens != tokenizer.pad).sum(1)
    wide = torch.full((len(tokens), max(env.length, tokens.shape[1])), tokenizer.pad)
    wide[:, : tokens.shape[1]] = tokens
    return wide[:, : env.length], size


def _check_lengths(env: Strings, size: list[int], thought_size: list[int]) -> None:
    for i, (letters, thoughts) in enumerate(zip(size, thought_size, strict=True)):
        if letters != thoughts:
            raise UserError(
                f"entry {i} of bulk_trajs has {letters} letters but {thoughts} thought letters: give one thought a letter"
            )
        if letters > env.length or (env.min_length is None and letters != env.length):
            want = (
                f"exactly {env.length} (set min_len for strings of several lengths)"
                if env.min_length is None
                else f"at most {env.length}"
            )
            raise UserError(f"string {i} has {letters} letters, but max_len allows {want}")
        if env.min_length is not None and letters < env.min_length:
            raise UserError(f"string {i} has {letters} letters, but min_len asks for at least {env.min_length}")


def read_rewards(rewards: list[Any]) -> Tensor:
    """[B], or an error that names the first that is no finite number."""
    found = []
    for i, given in enumerate(rewards):
        try:
            reward = float(given)
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            raise UserError(f"the reward of string {i} is {given!r}: leave the entry out or give a finite number")
        found.append(reward)
    return torch.tensor(found, dtype=torch.float32)


def entries(env: Strings, tokenizer: Tokenizer, traj: Trajectories) -> list[tuple[str, str, float]]:
    """The log that a batch of one seed makes."""
    letters = traj.alive[:, 0] if env.stop is None else traj.alive[:, 0] & (traj.moves[:, 0] != env.stop)

    def texts(tokens: Tensor) -> list[str]:
        return tokenizer.decode(torch.where(letters, tokens[:, 0], tokenizer.pad).T)

    return list(zip(texts(traj.moves), texts(traj.actions), traj.score[0].tolist(), strict=True))


class LogBook:
    """Every finished string that a log has shown, and its reward: an oracle that says NaN of what it has not seen.

    A string measured more than once has the geometric mean of its rewards, where the balance of log-flows ends, too.
    Rewards that were raised to an exponent which changes in training are kept without it and raised to that of today.
    """

    on_device = True  # no one waits for it: what it does not know it does not ask
    LISTED = 1 << 21  # states up to which all are in one table

    def __init__(self, env: Strings, floor: float, device: str | torch.device = "cpu"):
        self.env, self.floor, self.exponent = env, floor, 1.0
        self.listed = env.count() <= self.LISTED
        self.sums = torch.zeros(
            2, env.count() if self.listed else 0, dtype=torch.float64, device=device
        )  # log-rewards; how many
        self.texts: dict[bytes, tuple[float, int]] = {}  # the same of longer strings, by packed tokens

    def add(self, text: Tensor, reward: Tensor, exponent: float = 1.0) -> None:
        """Take in rewards [...] of finished strings [..., L] that are scores raised to `exponent`."""
        self.exponent = exponent
        logs = reward.double().clamp(min=self.floor).log() / exponent
        if self.listed:
            place = self.env.index(text).flatten()
            self.sums[0].index_add_(0, place, logs.flatten().to(self.sums))
            self.sums[1].index_add_(0, place, torch.ones_like(place, dtype=torch.float64))
            return
        for key, value in zip(self._keys(text), logs.flatten().tolist(), strict=True):
            total, count = self.texts.get(key, (0.0, 0))
            self.texts[key] = (total + value, count + 1)

    def __call__(self, text: Tensor) -> Tensor:
        """Rewards at today's exponent of strings [..., L], NaN where there is none."""
        if self.listed:
            total, count = self.sums[:, self.env.index(text)]
            mean = total / count  # 0 / 0 is NaN
        else:
            ends = self.env.complete(text) if self.env.stop is None else torch.ones_like(text[..., 0], dtype=torch.bool)
            mean = torch.full(text.shape[:-1], math.nan, dtype=torch.float64)
            found = [self.texts.get(key) for key in self._keys(text[ends])]
            mean[ends.cpu()] = torch.tensor(
                [math.nan if f is None else f[0] / f[1] for f in found], dtype=torch.float64
            )
        return (mean * self.exponent).exp().clamp(min=self.floor).float().to(text.device)

    @property
    def known(self) -> dict[str, float]:
        """The rewards at today's exponent, by text."""
        if self.listed:
            at = (self.sums[1] > 0).nonzero().squeeze(1)
            texts = self.env.all_states()[at.cpu()]
        else:
            texts = self.state_dict()["strings"].long()
        return dict(zip(self.env.decode(texts), self(texts.to(self.sums.device)).tolist(), strict=True))

    @staticmethod
    def _keys(text: Tensor) -> list[bytes]:
        return [row.tobytes() for row in text.reshape(-1, text.shape[-1]).to(torch.int16).cpu().numpy()]

    def state_dict(self) -> dict[str, Tensor]:
        """All of it as tensors, by string."""
        exponent = torch.tensor(self.exponent, dtype=torch.float64)
        if self.listed:
            at = (self.sums[1] > 0).nonzero().squeeze(1).cpu()
            total, count = self.sums[:, at].cpu()
            strings = self.env.all_states()[at].to(torch.int16)
            return {"strings": strings, "total": total, "count": count.long(), "exponent": exponent}
        rows = (
            torch.frombuffer(bytearray(b"".join(self.texts)), dtype=torch.int16)
            if self.texts
            else torch.zeros(0, dtype=torch.int16)
        )
        return {
            "strings": rows.view(-1, self.env.length),
            "total": torch.tensor([t for t, _ in self.texts.values()], dtype=torch.float64),
            "count": torch.tensor([c for _, c in self.texts.values()], dtype=torch.long),
            "exponent": exponent,
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.exponent = float(state["exponent"]) if "exponent" in state else 1.0
        if self.listed:
            self.sums.zero_()
            place = self.env.index(state["strings"].long())
            self.sums[0, place] = state["total"].to(self.sums)
            self.sums[1, place] = state["count"].to(self.sums)
            return
        pairs = zip(state["total"].tolist(), state["count"].tolist(), strict=True)
        self.texts = dict(zip(self._keys(state["strings"]), pairs, strict=True)) if len(state["strings"]) else {}


class ReplayBuffer:
    """The documents' buffer, (string, thought string, reward) in and out, kept by the engine's `Buffer`."""

    def __init__(
        self,
        max_len: int,
        tokenizer: Tokenizer,
        capacity: int = 100_000,
        min_len: int | None = None,
        device: str = "cpu",
    ):
        self.env, self.tokenizer, self.device = Strings(tokenizer.alphabet, max_len, min_len), tokenizer, device
        self.buffer = Buffer(self.env, capacity).to(device)

    def __len__(self) -> int:
        return int(self.buffer.written.clamp(max=self.buffer.capacity))

    def push(self, log: Sequence[Entry]) -> None:
        """Keep the entries of a log, (string, thought string, reward or score), the oldest making room."""
        self.buffer.add(trajectories(self.env, self.tokenizer, log, self.device))

    def sample(
        self, size: int, l2r: Callable[[float], float] | None = None
    ) -> tuple[list[str], list[str], list[float]]:
        """`size` entries with replacement: strings, thought strings, rewards.

        Where scores were pushed, `l2r` makes rewards of them: with `lambda score: worker.l2r(score, it)` at today's exponent.
        """
        if not len(self):
            raise UserError("the replay buffer is empty: push a log before sampling from it")
        rows = entries(self.env, self.tokenizer, self.buffer.sample(size))
        reward = (lambda score: score) if l2r is None else l2r
        return [r[0] for r in rows], [r[1] for r in rows], [reward(r[2]) for r in rows]
