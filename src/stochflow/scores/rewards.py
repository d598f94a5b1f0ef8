"""From an oracle's score to a log-reward, always in log space, so that rewards never underflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stochflow.errors import UserError, need_number

STILL, LATE = 1, 2  # why a sharpening has ended


@dataclass(frozen=True)
class Power:
    """R = max(score, floor)^beta. While training, the exponent ramps from 1 to beta as in the sources' `l2r`:

    beta(step) = 1 + (beta - 1)(1 - 1/(1 + step/ramp)); ramp = 0 is constant beta. Evaluation uses the final beta.
    """

    beta: float = 1.0
    floor: float = 1e-3
    ramp: float = 0.0

    def __post_init__(self) -> None:
        for name in ("beta", "floor", "ramp"):
            need_number(f"{name} of the reward", getattr(self, name))
        if not self.beta > 0:
            raise UserError(f"beta = {self.beta} must be above 0: it is the exponent of the reward")
        if not self.floor > 0:
            raise UserError(f"the reward floor is {self.floor}, but it must be above 0, because the log of it is taken")

    def exponent(self, step: Tensor | float | None) -> Tensor | float:
        """beta at this training step; None = the final beta."""
        if step is None or self.ramp <= 0:
            return self.beta
        return 1 + (self.beta - 1) * (1 - 1 / (1 + step / self.ramp))

    def __call__(self, score: Tensor, state: Tensor, step: Tensor | float | None = None) -> Tensor:
        exponent, log = self.exponent(step), torch.log(score.clamp(min=self.floor))
        return log if isinstance(exponent, float | int) and exponent == 1 else exponent * log


@dataclass(frozen=True)
class Default(Power):
    """The reward of a task for which nobody named one: the score, or `Sharpening` where the space is too large to list."""


@dataclass(frozen=True)
class Linear:
    """log R = beta * score, for scores that are already logarithms (energies, log-likelihoods, minus errors)."""

    beta: float = 1.0

    def __post_init__(self) -> None:
        need_number("beta of the reward", self.beta)

    def __call__(self, score: Tensor, state: Tensor, step: Tensor | float | None = None) -> Tensor:
        return self.beta * score


class Sharpening(nn.Module):
    """log R = beta * max(score, base), with a beta that is found from the scores themselves and then stays (`beta auto`).

    base is the median of the first scores. beta puts `sharpness` * log |X| nats between it and the mean of the `best`
    best different objects: enough for the few good ones to outweigh all the others (`nats` = log |X|, the number of
    objects); down to half of that where the mass would otherwise lie on fewer than a quarter of these best. It is set anew whenever the number of answers has grown by half, and frozen for ever once the best have
    moved by less than `still` of their distance from the base in between, at the latest after `latest` answers, those
    without a score included (0: no such limit): from then on the target is one fixed law. All seeds share it. Ask for `describe()` to have it in words.
    """

    def __init__(
        self,
        nats: float,
        sharpness: float = 2.0,
        best: int = 100,
        first: int = 500,
        still: float = 0.02,
        latest: int = 0,
    ):
        super().__init__()
        if not nats > 0 or not sharpness > 0 or best < 1 or first < best or not 0 < still < 1 or latest < 0:
            raise UserError(
                f"nats = {nats}, sharpness = {sharpness}, best = {best}, first = {first}, still = {still} and latest = {latest} "
                "describe no sharpening: give positive numbers, first >= best and still below 1"
            )
        self.nats, self.sharpness, self.size, self.first, self.still = nats, sharpness, best, first, still
        self.latest = latest
        for name, start in (("beta", 0.0), ("base", torch.nan), ("top", torch.nan), ("mark_top", torch.nan)):
            self.register_buffer(name, torch.tensor(start, dtype=torch.float64))
        for name in ("asked", "blank", "mark", "frozen"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))
        self.register_buffer("scores", torch.full((best,), -torch.inf, dtype=torch.float64))
        self.register_buffer("numbers", torch.zeros(best, dtype=torch.long))

    beta: Tensor
    base: Tensor
    top: Tensor
    mark_top: Tensor
    asked: Tensor
    blank: Tensor  # answers without a score
    mark: Tensor
    frozen: Tensor
    scores: Tensor
    numbers: Tensor

    def __call__(self, score: Tensor, state: Tensor, step: Tensor | float | None = None) -> Tensor:
        beta = float(self.beta)
        return score * 0 if beta == 0 else beta * score.clamp(min=float(self.base))

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        state.setdefault(prefix + "blank", torch.zeros_like(self.blank))  # an earlier version did not count these
        super()._load_from_state_dict(state, prefix, *rest)

    @torch.no_grad()
    def observe(self, score: Tensor, number: Tensor) -> bool:
        """Take in the scores of objects that were asked about, with a number for each (equal objects have equal ones).

        True where beta has changed.
        """
        if bool(self.frozen):
            return False
        score, number = score.flatten().double().cpu(), number.flatten().cpu()
        good = score.isfinite()
        self.blank += len(number[~good].unique())
        score, number = score[good], number[good]
        if not len(score):
            return False
        if bool(self.base.isnan()):
            self.base.copy_(score.median())
        both, names = torch.cat([self.scores, score]), torch.cat([self.numbers, number])
        order = both.argsort(descending=True, stable=True)
        seen: dict[int, int] = {}
        for place in order.tolist():
            if both[place] == -torch.inf or len(seen) == self.size:
                break
            seen.setdefault(int(names[place]), place)
        places = list(seen.values())
        self.scores[: len(places)], self.numbers[: len(places)] = both[places], names[places]
        self.asked += len(number.unique())
        few = max(1, min(len(places), int(self.asked) // 5))  # of few objects the hundred best are all
        self.top.copy_(self.scores[:few].mean())
        return self._schedule()

    def _schedule(self) -> bool:
        asked, mark = int(self.asked), int(self.mark)
        gap = float(self.top - self.base)
        late = 0 < self.latest <= asked + int(self.blank) and gap > 0
        if mark > 0 and not late and asked < max(self.first, 1.5 * mark):
            return False
        if mark >= self.first and gap > 0 and float(self.top - self.mark_top) < self.still * gap:
            self.frozen.fill_(STILL)
        elif late:
            self.frozen.fill_(LATE)
        self.mark.fill_(asked)
        self.mark_top.copy_(self.top)
        before = float(self.beta)
        self.beta.fill_(self._sharpest(self.sharpness * self.nats / gap) if gap > 0 else 0.0)
        return float(self.beta) != before

    def _sharpest(self, most: float) -> float:
        """The largest beta from `most` down to half of it under which a quarter of the best still counts."""
        best = self.scores[self.scores > -torch.inf]
        best = best[: max(1, min(len(best), int(self.asked) // 5))]
        for beta in torch.linspace(most, most / 2, 11, dtype=torch.float64).tolist():
            if float(1 / (beta * best).softmax(0).square().sum()) >= len(best) / 4:
                return beta
        return most / 2

    def describe(self) -> str:
        """The law, in one sentence."""
        law = f"R = exp({float(self.beta):.6g} * max(score, {float(self.base):.6g}))"
        if bool(self.frozen):
            why = (
                "the best no longer moved"
                if int(self.frozen) == STILL
                else "at the latest then, for the policy to learn it"
            )
            return f"{law}, fixed after {int(self.mark)} answers: {why}"
        return f"{law}, as set after {int(self.mark)} answers; it was still being sharpened when the run ended"
