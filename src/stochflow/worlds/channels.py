"""Worlds' noise: from the intended action to the realised move. The mathematics is in docs/method.md."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from stochflow.errors import UserError, need_kind
from stochflow.files.reading import shown
from stochflow.ops import NEG, arange, keep, pick
from stochflow.worlds.confusion import read_table
from stochflow.worlds.env import Channel


def _check_alpha(alpha: float) -> float:
    if not (isinstance(alpha, (int, float)) and 0.0 <= alpha <= 1.0):
        raise UserError(f"alpha (stick) is {alpha!r}, but it is a probability: give a number between 0 and 1")
    return float(alpha)


def _log(p: Tensor) -> Tensor:
    return keep(p > 0, keep(p > 0, p, 1).log(), NEG)


def _chosen(action: Tensor, legal: Tensor) -> Tensor:
    """One-hot of the action, [..., M] bool."""
    return arange(legal.shape[-1], legal.device) == action.unsqueeze(-1)


class Exact(Channel):
    """No noise: the move is the action."""

    exact = True

    def log_probs(self, state, legal, action, memory=None):
        return torch.where(_chosen(action, legal), 0.0, NEG)

    def marginal(self, state, legal, log_pi, memory=None):
        return keep(legal, log_pi, NEG)

    def sample(self, state, legal, action, memory=None):
        return action

    def __repr__(self) -> str:
        return "Exact()"


class Slip(Channel):
    """With probability alpha the action is replaced by a uniform draw from the legal moves (the sources' `stick`)."""

    def __init__(self, alpha: float):
        self.alpha = _check_alpha(alpha)

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.alpha == 0

    def log_probs(self, state, legal, action, memory=None):
        slip = self.alpha / legal.sum(-1, keepdim=True).clamp(min=1)
        p = (1 - self.alpha) * _chosen(action, legal) + slip
        return keep(legal, _log(p), NEG)

    def marginal(self, state, legal, log_pi, memory=None):
        if self.exact:
            return keep(legal, log_pi, NEG)
        kept = keep(legal, log_pi, NEG)
        slip = math.log(self.alpha) - legal.sum(-1, keepdim=True).clamp(min=1).to(log_pi).log()
        slip = slip + kept.logsumexp(-1, keepdim=True)  # only the mass that did not choose STOP can slip
        if self.alpha == 1:
            return keep(legal, slip, NEG)
        return keep(legal, torch.logaddexp(math.log1p(-self.alpha) + kept, slip), NEG)

    def arrivals(self, state, legal, move, memory=None):
        slip = self.alpha / legal.sum(-1, keepdim=True).clamp(min=1)
        return keep(pick(legal, move).unsqueeze(-1), _log((1 - self.alpha) * _chosen(move, legal) + slip), NEG)

    def sample(self, state, legal, action, memory=None):
        if self.exact:
            return action
        uniform = torch.where(legal, torch.rand(legal.shape, device=legal.device), -1.0).argmax(-1)
        return torch.where(torch.rand(action.shape, device=legal.device) < self.alpha, uniform, action)

    def __repr__(self) -> str:
        return f"Slip({self.alpha})"


class Neighbour(Channel):
    """Ordered moves: with probability alpha the move is one of the two neighbours of the action, half each.

    Mass that would leave the range or land on an illegal move stays on the action.
    """

    def __init__(self, alpha: float):
        self.alpha = _check_alpha(alpha)

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.alpha == 0

    def log_probs(self, state, legal, action, memory=None):
        here = _chosen(action, legal)
        half = self.alpha / 2
        p = half * ((_chosen(action - 1, legal) | _chosen(action + 1, legal)) & legal)
        p = p + here * (1 - p.sum(-1, keepdim=True))
        return keep(legal, _log(p), NEG)

    def marginal(self, state, legal, log_pi, memory=None):
        pi = keep(legal, log_pi, NEG).exp()
        half = self.alpha / 2
        edge = torch.zeros_like(pi[..., :1])
        none = torch.zeros_like(legal[..., :1])
        right = torch.cat([legal[..., 1:], none], -1)  # is my right neighbour legal?
        left = torch.cat([none, legal[..., :-1]], -1)
        stay = 1 - half * (right.to(pi) + left.to(pi))
        arrive = half * (torch.cat([pi[..., 1:], edge], -1) + torch.cat([edge, pi[..., :-1]], -1))
        return keep(legal, _log(stay * pi + arrive), NEG)

    def __repr__(self) -> str:
        return f"Neighbour({self.alpha})"


class Confusion(Channel):
    """Any action x move table, restricted to the legal moves and renormalised; an empty row keeps the action.

    `table` is row-stochastic [M, M], without STOP: an array, nested lists, or the path of a CSV file. The file may name its
    columns and rows by the letters of `alphabet`, in any order.
    """

    def __init__(self, table: Tensor | Sequence[Sequence[float]] | str, alphabet: str | None = None):
        names: tuple[str, ...] = ()
        need_kind("alphabet", alphabet, (str, type(None)), "a text of letters, or None")
        if isinstance(table, (str, os.PathLike)):
            path = os.fspath(table)
            table, names = read_table(path, alphabet)
            letters = "".join(names)
            if alphabet is None and len(letters) == len(names) and letters != "".join(sorted(letters)):
                raise UserError(
                    f"the confusion table {path} has the letters {letters} in an order that may not be the alphabet's: "
                    "say which it is, as in Confusion(path, alphabet='ACGT')"
                )
        try:
            t = torch.as_tensor(table, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError, OverflowError) as problem:
            raise UserError(
                f"a confusion table is an array, nested lists of numbers or the path of a CSV file, not {shown(table, 80)}"
            ) from problem
        if t.ndim != 2 or t.shape[0] != t.shape[1]:
            raise UserError(f"a confusion table is square (actions x moves), but this one has shape {tuple(t.shape)}")

        def row_of(bad: Tensor) -> str:
            row = int(bad.to(torch.uint8).argmax())
            named = f" ({names[row]})" if names else ""
            return f"row {row + 1} of {len(t)}{named} in the confusion table"

        wrong = (~torch.isfinite(t) | (t < 0)).any(1)
        if bool(wrong.any()):
            raise UserError(f"{row_of(wrong)} holds a negative or non-finite entry: probabilities are >= 0")
        total = t.sum(1)
        off = (total - 1).abs()
        if bool((off > 1e-6).any()):
            worst = float(total[int(off.argmax())])
            raise UserError(
                f"{row_of(off == off.max())} sums to {worst:.6g}, off by {worst - 1:+.3g}: every row must sum to 1"
            )
        self.table = t / total.unsqueeze(1)
        self._wide: dict[tuple[int, torch.device], Tensor] = {}

    def _table(self, legal: Tensor) -> Tensor:
        """The table as wide as the environment's moves (STOP's row and column are empty)."""
        wide = legal.shape[-1]
        k = self.table.shape[0]
        if k not in (wide, wide - 1):
            raise UserError(
                f"the confusion table has {k} rows, but the environment has {wide} moves (STOP included): "
                "give one row per move"
            )
        key = (wide, legal.device)
        if key not in self._wide:  # made once: a CUDA graph cannot record a copy from the host
            t = torch.zeros(wide, wide, dtype=torch.float32, device=legal.device)
            t[:k, :k] = self.table.to(t)
            self._wide[key] = t
        return self._wide[key]

    def log_probs(self, state, legal, action, memory=None):
        p = self._table(legal)[action] * legal
        total = p.sum(-1, keepdim=True)
        p = torch.where(total > 0, p / total.clamp(min=1e-30), _chosen(action, legal).to(p))
        return keep(legal, _log(p), NEG)

    def __repr__(self) -> str:
        return f"Confusion({self.table.shape[0]}x{self.table.shape[0]})"
