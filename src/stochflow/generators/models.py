"""The generators of the source documents: each is an objective of the engine, fed from a log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stochflow.engines.base import Walk
from stochflow.errors import UserError
from stochflow.generators.args import GeneratorArgs
from stochflow.generators.base import GeneratorBase
from stochflow.learn.entropy import EntropyAverage
from stochflow.learn.objectives import INTENDED, SGFNKL, DetailedBalance, LogVariance, Objective, TrajectoryBalance
from stochflow.types import Terms


class StochasticDBGFlowNetGenerator(GeneratorBase):
    """Stochastic detailed balance: F(s) pi(a|s) P(s'|s,a) = F(s') pi_B(a|s'), root and end included."""

    def make_objective(self, args: GeneratorArgs) -> Objective:
        return DetailedBalance(self.form(args))


class DeterministicDBGFlowNetGenerator(GeneratorBase):
    """Detailed balance that takes the thought for what happened: the baseline without log P, right only without noise."""

    def make_objective(self, args: GeneratorArgs) -> Objective:
        if args.gen_form != "joint":
            raise UserError(f"gen_form is {args.gen_form}, but this baseline has one form: leave it out")
        return DetailedBalance(INTENDED)


class TrajectoryBalanceGFlowNetGenerator(GeneratorBase):
    """Stochastic trajectory balance: Z prod pi P = R prod pi_B. Its `ll_diff` holds each step's log pi P / pi_B."""

    def make_objective(self, args: GeneratorArgs) -> Objective:
        return TrajectoryBalance(self.form(args))

    def residual(self, terms: Terms) -> Tensor:
        return self.objective.form.step(terms) - terms.log_pb


class StochasticKLGFlowNetGenerator(GeneratorBase):
    """Trajectory-level reverse KL, by its off-policy equal: the variance over the batch of log prod pi P / (R prod pi_B).

    On the policy's own trajectories the two have the same gradient; from a log only this one is sound. Under contexts the
    variance is that within each, so that a context needs several strings in a batch.
    """

    def make_objective(self, args: GeneratorArgs) -> Objective:
        return LogVariance(self.form(args))

    def _read(self, batch: Mapping[str, Any]) -> Walk:
        found = super()._read(batch)
        count = found.trajectories.score.shape[1]
        if self.args.context_width and count > 1 and self.env.rows == count:
            raise UserError(
                "every string of this batch has a context of its own, and a variance needs several of each: repeat contexts in "
                "a batch, or take TrajectoryBalanceGFlowNetGenerator, which learns log Z as a function of the context"
            )
        return found

    def residual(self, terms: Terms) -> Tensor:
        return self.objective.form.step(terms) - terms.log_pb


class StochasticKL2GFlowNetGenerator(GeneratorBase):
    """SGFN-KL: stochastic detailed balance + kl_weight * r_gamma * (flow KL + flow gap).

    The KL term is a mean over the states of the batch whose children's flows are all known: a finished child counts when
    its reward is in the log.
    """

    def make_objective(self, args: GeneratorArgs) -> Objective:
        return SGFNKL((args.gamma,), args.kl_weight, self.form(args), memory=_memory(args))


class StochasticKL3GFlowNetGenerator(GeneratorBase):
    """SGFN-KL whose r is the mean over `gammas`."""

    @property
    def gammas(self) -> tuple[float, ...]:
        return self.args.gammas

    def make_objective(self, args: GeneratorArgs) -> Objective:
        return SGFNKL(args.gammas, args.kl_weight, self.form(args), memory=_memory(args))


def _memory(args: GeneratorArgs) -> EntropyAverage | None:
    return EntropyAverage(1, decay=args.entropy_average).to(args.device) if args.entropy_average > 0 else None
