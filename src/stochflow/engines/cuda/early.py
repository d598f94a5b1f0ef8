"""The states that trajectories can meet in their first steps: where they are far fewer than the trajectories, each goes through
the network once, before anyone walks."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from stochflow.nets.policy import Policy
from stochflow.worlds.env import numbers

MOST_SHARED = 4  # early states per trajectory at most: one that has ended costs no further forward passes
LEAST_SAVED = 4096  # rows of a forward pass: looking states up costs a launch
MOST_KEPT = 1 << 22  # features that are kept


class Early(NamedTuple):
    """All states of the first steps, in the order of the environment's numbers."""

    steps: int
    states: Tensor  # [n, D]
    features: Tensor | None  # [n, F]; None: too many to keep


_known: WeakKeyDictionary[Policy, dict[tuple[int, int, torch.device], Early | None]] = WeakKeyDictionary()


def early(policy: Policy, steps: int, batch: int) -> Early | None:
    """Of a world that `lower` knows: for the number of first steps, of so many, that saves most rows; None where it does not pay."""
    known, key = _known.setdefault(policy, {}), (steps, batch, policy.device)
    if key not in known:
        known[key] = _worth_sharing(policy, steps, batch) if numbers(policy.env) else None
    return known[key]


def _worth_sharing(policy: Policy, steps: int, batch: int) -> Early | None:
    env: Any = policy.env
    saved = {}
    for t in range(1, steps + 1):
        if env.early_count(t) > batch * min(steps, MOST_SHARED):
            break
        saved[t] = t * batch - env.early_count(t)
    best = max(saved, key=lambda t: saved[t], default=0)
    if not saved or saved[best] < max(LEAST_SAVED, steps * batch // 4):
        return None
    states = env.early_states(best).to(policy.device)
    features = env.features(states)
    return Early(best, states, features if features.numel() <= MOST_KEPT else None)
