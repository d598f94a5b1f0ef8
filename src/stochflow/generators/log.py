"""A laboratory's log, (string, thought string, reward), as the engine's trajectories; and what it knows of rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    strings, thoughts, rewards = [], [], []
    for i, entry in enumerate(log):
        if not isinstance(entry, (tuple, list)) or len(entry) != 3:
            raise UserError(f"entry {i} of bulk_trajs is {entry!r}, but it must be (string, thought string, reward)")
        string, thought = tokenizer.encode(entry[0], f"string {i}"), tokenizer.encode(entry[1], f"thought string {i}")
        if len(string) != len(thought):
            raise UserError(
                f"entry {i} of bulk_trajs has {len(string)} letters but {len(thought)} thought letters: give one thought a letter"
            )
        if len(string) > env.length or (env.min_length is None and len(string) != env.length):
            want = (
                f"exactly {env.length} (set min_len for strings of several lengths)"
                if env.min_length is None
                else f"at most {env.length}"
            )
            raise UserError(f"string {i} has {len(string)} letters, but max_len allows {want}")
        if env.min_length is not None and len(string) < env.min_length:
            raise UserError(f"string {i} has {len(string)} letters, but min_len asks for at least {env.min_length}")
        try:
            reward = float(entry[2])
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            raise UserError(f"the reward of string {i} is {entry[2]!r}: leave the entry out or give a finite number")
        strings.append(string)
        thoughts.append(thought)
        rewards.append(reward)
    if not strings:
        raise UserError("bulk_trajs is empty: give at least one (string, thought string, reward)")
    fill = 0 if env.stop is None else env.stop  # what stands after the last letter: STOP, and then nothing that counts

    def timed(rows: list[list[int]]) -> Tensor:  # [T, 1, B]
        wide = [r + [fill] * (env.length - len(r)) for r in rows]
        return torch.tensor(wide, dtype=torch.long, device=device).T.unsqueeze(1).contiguous()

    moves, actions = timed(strings), timed(thoughts)
    length = torch.tensor([[len(s) for s in strings]], device=device)  # [1, B]
    alive = torch.arange(env.length, device=device)[:, None, None] < length + (length < env.length).long()
    state = env.initial(tuple(length.shape), torch.zeros_like(length))
    states = [state]
    for t in range(env.length):
        state = torch.where(alive[t].unsqueeze(-1), env.step(state, moves[t]), state)
        states.append(state)
    score = torch.tensor([rewards], dtype=torch.float32, device=device)
    return Trajectories(torch.stack(states), actions, moves, alive, score, torch.ones_like(length, dtype=torch.bool))


def entries(env: Strings, tokenizer: Tokenizer, traj: Trajectories) -> list[tuple[str, str, float]]:
    """The log that a batch of one seed makes."""
    letters = traj.alive[:, 0] if env.stop is None else traj.alive[:, 0] & (traj.moves[:, 0] != env.stop)

    def texts(tokens: Tensor) -> list[str]:
        return tokenizer.decode(torch.where(letters, tokens[:, 0], tokenizer.pad).T)

    return list(zip(texts(traj.moves), texts(traj.actions), traj.score[0].tolist(), strict=True))


class LogBook:
    """Every finished string that a log has shown, and its reward: an oracle that says NaN of what it has not seen.

    A string measured more than once has the geometric mean of its rewards, where the balance of log-flows ends, too.
    """

    on_device = True  # no one waits for it: what it does not know it does not ask

    def __init__(self, floor: float):
        self.floor = floor
        self.known: dict[bytes, tuple[float, int]] = {}  # packed tokens -> (sum of log-rewards, how many)

    def add(self, traj: Trajectories) -> None:
        """Take in the rewards of a batch."""
        for key, reward in zip(self._keys(traj.states[-1]), traj.score.flatten().tolist(), strict=True):
            total, count = self.known.get(key, (0.0, 0))
            self.known[key] = (total + math.log(max(reward, self.floor)), count + 1)

    def __call__(self, state: Tensor) -> Tensor:
        found = [self.known.get(key) for key in self._keys(state)]
        values = [math.nan if f is None else math.exp(f[0] / f[1]) for f in found]
        return torch.tensor(values, dtype=torch.float32, device=state.device).view(state.shape[:-1])

    @staticmethod
    def _keys(state: Tensor) -> list[bytes]:
        return [row.tobytes() for row in state.reshape(-1, state.shape[-1]).to(torch.int16).cpu().numpy()]

    def state_dict(self, width: int) -> dict[str, Tensor]:
        """All of it as tensors, for strings of `width` columns."""
        rows = (
            torch.frombuffer(bytearray(b"".join(self.known)), dtype=torch.int16)
            if self.known
            else torch.zeros(0, dtype=torch.int16)
        )
        return {
            "strings": rows.view(-1, width),
            "total": torch.tensor([t for t, _ in self.known.values()], dtype=torch.float64),
            "count": torch.tensor([c for _, c in self.known.values()], dtype=torch.long),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pairs = zip(state["total"].tolist(), state["count"].tolist(), strict=True)
        self.known = dict(zip(self._keys(state["strings"]), pairs, strict=True)) if len(state["strings"]) else {}


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
        """Keep the entries of a log, the oldest making room."""
        self.buffer.add(trajectories(self.env, self.tokenizer, log, self.device))

    def sample(self, size: int) -> tuple[list[str], list[str], list[float]]:
        """`size` entries with replacement: strings, thought strings, rewards."""
        if not len(self):
            raise UserError("the replay buffer is empty: push a log before sampling from it")
        rows = entries(self.env, self.tokenizer, self.buffer.sample(size))
        return [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows]
