"""What may be given to the functions of this package: each wrong argument is one sentence that names it and what to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stochflow.errors import UserError, need_kind, need_whole, one_line
from stochflow.types import PolicyOut, Task
from stochflow.worlds.env import Channel


def need_task(task: Any) -> None:
    """UserError unless this is a task."""
    need_kind("task", task, Task, "a Task, as strings_task or grid_task make one")


def need_acting(channel: Any, policy: Any, seeds: Any) -> None:
    """UserError unless this is a channel, a policy or a function of states, and a number of seeds."""
    need_kind("channel", channel, Channel, "a channel, such as Slip(0.1)")
    if not callable(policy):
        raise UserError(f"policy is {one_line(repr(policy), 80)}, but it must be a Policy, or a function of states")
    if seeds is not None:
        need_whole("seeds", seeds, 1)


def answer(policy: Callable[[Tensor], Any], states: Tensor, moves: int) -> PolicyOut:
    """What a policy says of states; UserError where a function of the user's fails, or says something else."""
    try:
        found = policy(states)
    except UserError:
        raise
    except (TypeError, ValueError) as problem:
        if hasattr(policy, "num_seeds"):
            raise
        raise UserError(
            f"policy {one_line(repr(policy), 80)} fails on states of shape {tuple(states.shape)} ({type(problem).__name__}: "
            f"{one_line(str(problem), 120)}): give a Policy, or a function of states [S, n, D] that returns a PolicyOut"
        ) from problem
    logits = getattr(found, "forward", None)
    if not isinstance(logits, Tensor) or logits.shape[-1:] != (moves,):
        raise UserError(
            f"policy {one_line(repr(policy), 80)} gives {type(found).__name__} and no logits of {moves} moves: "
            "give a Policy, or a function of states [S, n, D] that returns a PolicyOut"
        )
    return found


def need_tensor(name: str, value: Any, dims: int = 1, whole: bool = False) -> None:
    """UserError unless this is a tensor of numbers of at least so many dimensions."""
    good = isinstance(value, Tensor) and value.dim() >= dims and not value.is_complex()
    if not good or (whole and value.is_floating_point()):
        got = f"a tensor of shape {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else one_line(repr(value), 80)  # fmt: skip
        kind = "whole numbers" if whole else "numbers"
        raise UserError(f"{name} is {got}, but it must be a tensor of {kind} with at least {dims} dimensions")


def need_two(first: str, p: Any, second: str, q: Any) -> None:
    """UserError unless these are tensors over the same objects."""
    for name, value in ((first, p), (second, q)):
        need_tensor(name, value)
    try:
        torch.broadcast_shapes(p.shape, q.shape)
    except RuntimeError as problem:
        raise UserError(
            f"{first} has shape {tuple(p.shape)} and {second} {tuple(q.shape)}: give two laws over the same objects"
        ) from problem
