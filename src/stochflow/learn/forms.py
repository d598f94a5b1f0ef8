"""The forms of a balance: what counts as the forward log-probability of a step, the one place where the treatments of noise differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from stochflow.learn.posterior import head_likelihood
from stochflow.types import Terms, World


@dataclass(frozen=True)
class Form:
    """The forward log-probability of a step, and how the backward law of the action given the move is had."""

    name: str
    needs: frozenset[str]
    step: Callable[[Terms], Tensor]  # [T, S, B]
    back_action: bool = False  # the policy needs a head for the action given the move
    likelihood: bool = False  # that head is trained by likelihood, beside the balance

    def __repr__(self) -> str:
        return self.name.upper()

    def complete(self, loss: Tensor, world: World) -> Tensor:
        """The loss [S] with the gradient of the head's likelihood, where there is one; its value is left alone."""
        if not (self.likelihood and world.policy.back_action):  # without a head the posterior is exact already
            return loss
        nll = head_likelihood(world)
        return loss + (nll - nll.detach())


MARGINAL = Form("marginal", frozenset({"log_move"}), lambda t: t.log_move)
# log pi + log P - log pi_B with the policy's own posterior pi_B = pi P / p(m | s), gradient included, is log p(m | s):
# taken as such it is free of cancellation and holds where the action is not known
JOINT = Form("joint", frozenset({"log_move"}), lambda t: t.log_move)
HEAD = Form(
    "head",
    frozenset({"log_pf", "log_k", "log_pa"}),
    lambda t: t.log_pf + t.log_k - t.log_pa.detach(),
    back_action=True,
    likelihood=True,
)
PUBLISHED = Form(
    "published", frozenset({"log_pf", "log_k", "log_pa"}), lambda t: t.log_pf + t.log_k - t.log_pa, back_action=True
)
REALISED = Form("realised", frozenset({"log_pf_move"}), lambda t: t.log_pf_move)
INTENDED = Form("intended", frozenset({"log_pf", "log_pa"}), lambda t: t.log_pf - t.log_pa, back_action=True)
