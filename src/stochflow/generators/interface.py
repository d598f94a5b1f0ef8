"""The names that the documents' listings use on `self`, beside those of learning and looking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stochflow.engines.flat import FlatParameters
from stochflow.errors import UserError
from stochflow.generators.mlp import MLP
from stochflow.learn import entropy
from stochflow.nets.policy import Policy
from stochflow.ops import masked_log_softmax

OF_ARGS = (
    "gamma device dynamics_off_pol dynamics_off_pol_rounds dynamics_clip dynamics_sample_size max_len reward_exp_min stick"
).split()


class Step(dict[str, float]):
    """The figures of a training step by name; unpacked, it gives the documents' two: `loss, dynamics_loss = train_step(batch)`."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self["loss"], self["dynamics_loss"]))


class Optimiser:
    """`step` and `zero_grad` of the documents' two optimisers, over the engine's flat Adam."""

    def __init__(self, generator: Any, flat: FlatParameters | None, counts: bool):
        self._generator, self._flat, self._counts = generator, flat, counts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group, as of `torch.optim`."""
        flat = self._flat
        return [] if flat is None else [{"params": list(flat.named.values()), "lr": flat.lr}]

    def zero_grad(self) -> None:
        """Forget what `backward` has added up."""
        for p in {} if self._flat is None else self._flat.named.values():
            p.grad = None

    def step(self) -> None:
        """One Adam step by the gradients that `backward` left; of a model that counts there is none to make."""
        flat, trainer = self._flat, self._generator.trainer
        if flat is None:
            return
        flat.take([torch.zeros_like(p) if p.grad is None else p.grad for p in flat.named.values()])
        trainer.engines.update.update(flat, trainer.step, self._counts)
        trainer.steps_done += self._counts


class Interface(nn.Module):
    """Attributes and methods by the documents' names; what they would get wrong is put right (docs/source-documents.md)."""

    args: Any
    env: Any
    space: Any
    model: Any
    tokenizer: Any
    trainer: Any
    forward_dynamics: Any
    assigned: bool

    def _interface(self) -> None:
        """Once the trainer is there: what belongs to it."""
        a = self.args
        for name in OF_ARGS:
            self.__dict__[name] = getattr(a, name)
        self.__dict__ |= {
            "num_tokens": len(self.tokenizer),
            "pad_tok": self.tokenizer.pad,
            "out_coef": a.gen_output_coef,
        }
        self.ce_loss = nn.CrossEntropyLoss()
        self.__dict__["opt"] = Optimiser(self, self.trainer.policy_flat, True)
        self.__dict__["dynamics_opt"] = Optimiser(self, self.trainer.dynamics_flat, False)

    def __setattr__(self, name: str, value: Any) -> None:
        built = "trainer" in self.__dict__
        if built and name in ("model", "forward_dynamics"):
            self._exchange(name, value)
        elif built and name in (
            *OF_ARGS,
            "num_tokens",
            "pad_tok",
            "out_coef",
            "args",
            "opt",
            "dynamics_opt",
            "tokenizer",
            "objective",
            "dynamics_buffer",
        ):
            raise UserError(
                f"{name} is settled when a generator is made, and setting it would change nothing: give it in the args"
            )
        else:
            super().__setattr__(name, value)

    def _exchange(self, name: str, value: Any) -> None:
        """Train another network from here on; what cannot be trained is refused."""
        if name == "model" and isinstance(value, MLP):
            value = value.policy(self.env, self.args.seed, self.model.back_action)
        kind: Any = Policy if name == "model" else type(self.forward_dynamics)
        if not isinstance(value, kind) or repr(value.env) != repr(
            self.env if name == "model" else self.forward_dynamics.env
        ):
            raise UserError(
                f"{name} cannot be a {type(value).__name__} of another kind or world: give a {kind.__name__} made for {self.env!r}"
                + (", or generators.MLP" if name == "model" else "")
            )
        if name == "model" and (value.num_seeds != 1 or value.back_action != self.model.back_action):
            raise UserError(
                "model needs one seed, and a head for the action exactly where gen_form is head or published"
            )
        nn.Module.__setattr__(self, name, value.to(self.args.device))
        self.assigned = self.assigned or name == "model"
        self._build()

    def _build(self) -> None:
        raise TypeError(f"{type(self).__name__} must define _build()")

    # entropies and divergences --------------------------------------------------------------------------------------

    def compute_entropy(self, policy_probs: Tensor) -> Tensor:
        """H = -sum p log p, [..., M] -> [...]."""
        return entropy.compute_entropy(policy_probs)

    def entropies(self, state: Any, contexts: Any = None) -> Tensor:
        """[B] entropies of the policy at prefixes (texts, or tokens [B, L] as `forward` reads them), as fractions of the largest."""
        return self._entropies(self._states(state, None, contexts))

    def _entropies(self, states: Tensor) -> Tensor:
        mask = self.env.moves(states)
        log_pi = masked_log_softmax(self.model(states.unsqueeze(0)).forward[0], mask)
        return entropy.normalised_entropy(entropy.compute_entropy(log_pi.exp(), mask), mask.sum(-1))

    def _states(self, x: Any, lens: Any, contexts: Any) -> Tensor:
        raise TypeError(f"{type(self).__name__} must define _states(x, lens, contexts)")

    def entropy_high(self, state: Any, contexts: Any = None) -> Tensor:
        """The upper quantile of the entropies of the policy at these prefixes, a number.

        A string of `max_len` letters decides nothing any more: it stands for the prefixes on its way. So the strings of a
        batch, as `tokenizer.process` gives them, have the band that the `r_gamma` of that batch is made of.
        """
        return entropy.entropy_high(self._deciding(state, contexts))[0]

    def entropy_low(self, state: Any, contexts: Any = None) -> Tensor:
        """The lower quantile, never above `entropy_high`."""
        return entropy.entropy_low(self._deciding(state, contexts))[0]

    def _deciding(self, state: Any, contexts: Any) -> Tensor:
        """[1, 1, N] entropies at the prefixes that leave a choice, and at those on the way of the others."""
        states, length = self._states(state, None, contexts), self.space.strings.length
        if not len(states):
            raise UserError("there are no prefixes here, so there is no entropy: give at least one")
        decides = self.env.moves(states).sum(-1) > 1
        whole = states[~decides]
        place = torch.arange(length, device=states.device)
        keep = place < place.unsqueeze(1)  # [L prefixes, L letters]
        letters = torch.where(keep.unsqueeze(1), whole[:, -length:], self.space.strings.pad)  # [L, n, L]
        way = torch.cat([whole[:, :-length].expand(length, -1, -1), letters], -1).flatten(0, 1)
        return self._entropies(torch.cat([states[decides], way])).view(1, 1, -1)

    def entropy_ratio(self, H_high: Tensor | float, H_low: Tensor | float) -> Tensor:
        """r = H_high / (gamma H_high + (1 - gamma) H_low), between 1 and 1 / gamma."""
        high, low = torch.as_tensor(H_high), torch.as_tensor(H_low)
        if bool((low < 0).any()) or bool((high < low).any()):
            raise UserError("the entropy ratio needs H_high >= H_low >= 0: entropies are never negative")
        return entropy.entropy_ratio(high, low, self.args.gamma)

    def kl_divergence_loss(
        self, forward_policy: Tensor, backward_policy: Tensor, r_gamma: Tensor | float = 1.0
    ) -> Tensor:
        """Mean of KL(f || b / sum b) - log r over the states, of probabilities [..., M] over one and the same set.

        With r = 1 it is never negative, and zero only where the two agree; log r is a constant, as sum f = 1.
        """
        ratio = torch.as_tensor(r_gamma, dtype=forward_policy.dtype)
        if not bool((ratio > 0).all()):
            raise UserError(f"r_gamma is {r_gamma}, but an entropy ratio is at least 1: take that of entropy_ratio")
        if forward_policy.shape != backward_policy.shape:
            raise UserError(
                f"a KL compares laws over one set, but these have shapes {tuple(forward_policy.shape)} and {tuple(backward_policy.shape)}"
            )
        total = forward_policy.sum(-1)
        if (
            bool((total - 1).abs().max() > 1e-3)
            or bool((forward_policy < 0).any())
            or bool((backward_policy < 0).any())
        ):
            raise UserError(
                "the forward policy must be probabilities that sum to 1 over the last dimension: apply softmax(-1) first"
            )
        mask = (forward_policy > 0) | (backward_policy > 0)
        tiny = torch.finfo(forward_policy.dtype).tiny
        kl = entropy.state_kl(forward_policy.clamp(min=tiny).log(), backward_policy.clamp(min=tiny).log(), mask)
        return kl.mean() - ratio.log().mean()

    def dynamics_loss(self, policy: Tensor, mu_pi: Tensor | None, r_gamma: Tensor | float) -> Tensor:
        """The entropy balance of probabilities [N, M], weighted by visits `mu_pi` [N] (None: alike); not a loss of the dynamics.

        `r_gamma` is a number, or one for each state.
        """
        share = entropy.normalised_entropy(
            entropy.compute_entropy(policy), torch.full(policy.shape[:-1], policy.shape[-1], device=policy.device)
        )
        weight = torch.ones_like(share) if mu_pi is None else mu_pi.expand_as(share)
        if bool((weight < 0).any()) or float(weight.sum()) <= 0:
            raise UserError("mu_pi holds weights of visited states, which are not negative and not all zero")
        ratio = torch.as_tensor(r_gamma, dtype=share.dtype, device=share.device).expand_as(share).flatten()
        alone = share.flatten().view(1, -1, 1)  # every state is a row of its own
        each = entropy.entropy_balance_loss(alone, torch.ones_like(alone, dtype=torch.bool), ratio, self.args.gamma)
        return (each * weight.flatten()).sum() / weight.sum()

    def ll_diff(self, *_: Any, **__: Any) -> Tensor:
        """Not a method: the tensor of this name is in `info` and in the second value of `get_loss`."""
        raise UserError(
            'll_diff(state, next_state, action, reward) is ill-defined: read info["ll_diff"] of get_loss instead'
        )
