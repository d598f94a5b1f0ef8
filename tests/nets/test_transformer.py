"""The causal transformer: nobody sees the future, and what it cannot read it names."""

from __future__ import annotations

import pytest
import torch

from stochflow.errors import UserError
from stochflow.learn.rollout import rollout
from stochflow.nets.policy import Policy
from stochflow.nets.transformer import Transformer, parameter_count
from stochflow.scores.rewards import Linear
from stochflow.types import Task, Trajectories
from stochflow.worlds.channels import Slip
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.strings import Strings

ENV = Strings("ACGT", 7)


def reading(policy: Policy, final: torch.Tensor) -> torch.Tensor:
    """Hidden vectors of all prefixes [T+1, S, B, H], by one pass."""
    empty = torch.zeros(ENV.horizon, *final.shape[:2], dtype=torch.long)
    states = final.expand(ENV.horizon + 1, -1, -1, -1)  # only the last is read
    return policy.trunk.along(Trajectories(states, empty, empty, empty.bool(), final[..., 0], final[..., 0]), None)


@torch.no_grad()
@pytest.mark.parametrize("place", range(7))
def test_the_output_at_t_is_blind_to_later_tokens(place):
    policy = Policy(ENV, Transformer(16, 2, 2), seeds=(0, 1))
    text = torch.randint(4, (2, 20, 7))
    other = text.clone()
    other[..., place] = (other[..., place] + 1) % 4
    before, after = reading(policy, text), reading(policy, other)
    torch.testing.assert_close(
        before[: place + 1], after[: place + 1], atol=0, rtol=0
    )  # prefixes without the changed letter
    assert float((before[place + 1 :] - after[place + 1 :]).abs().amax((1, 2, 3)).min()) > 1e-3  # all with it do see it


def test_the_gradient_of_the_output_at_t_reaches_no_later_position():
    policy = Policy(ENV, Transformer(16, 2, 2))
    seen = []
    policy.trunk.embed.register_forward_hook(lambda module, given, out: seen.append(out) or out.retain_grad())
    reading(policy, torch.randint(4, (1, 5, 7)))[3].sum().backward()
    reach = seen[0].grad.abs().sum((0, 1, 3))  # [P]
    assert (reach[:4] > 0).all()
    assert (reach[4:] == 0).all()


@torch.no_grad()
def test_rollouts_with_the_cache_follow_the_law_of_full_evaluation():
    """Moves drawn while decoding have the frequencies that `forward` gives for the states they were drawn at."""
    env = Strings("AC", 3, min_length=1)
    policy = Policy(env, Transformer(16, 2, 1))
    policy.head.weight.mul_(20)
    from scipy.stats import chisquare

    from stochflow.law.exact import Graph, exact_law

    graph = Graph(env)
    task = Task(env, Slip(0.2), lambda s: s, Linear())
    law = exact_law(graph, task.channel, policy)[0]
    drawn = torch.bincount(env.index(rollout(task, policy, 20_000).states[-1][0]), minlength=len(graph))
    ends = law > 0
    assert chisquare(drawn[ends].numpy(), (law[ends] * 20_000).numpy()).pvalue > 1e-4
    assert int(drawn[~ends].sum()) == 0


@torch.no_grad()
def test_the_context_speaks_to_every_position():
    env = Conditioned(Strings("ACGT", 5), torch.tensor([[0.0], [1.0]]))
    policy = Policy(env, Transformer(16, 2, 2))
    state = torch.cat([torch.zeros(1, 6, 1, dtype=torch.long), torch.randint(4, (1, 6, 5))], -1)
    for size in range(6):
        prefix = state.clone()
        prefix[..., 1 + size :] = 4
        there = prefix.clone()
        there[..., 0] = 1
        assert float((policy(prefix).forward - policy(there).forward).abs().min()) > 1e-6


def test_parameters_are_counted_a_seed():
    one, three = Policy(ENV, Transformer(16, 2, 2)), Policy(ENV, Transformer(16, 2, 2), seeds=(0, 1, 2))
    width, positions, blocks = 16, 8, 2
    block = 2 * 2 * width + width * 3 * width + 3 * width + width * width + width + 8 * width * width + 5 * width
    assert parameter_count(one.trunk) == (6 + positions) * width + blocks * block + 2 * width
    assert parameter_count(three) == parameter_count(one)


# errors ----------------------------------------------------------------------------------------------------------------


def ways(policy: Policy, state: torch.Tensor, context: torch.Tensor | None = None):
    """Every door of the trunk: any states, the beginning of a rollout, a whole batch."""
    empty = torch.zeros(policy.env.horizon, *state.shape[:2], dtype=torch.long)
    traj = Trajectories(
        state.expand(policy.env.horizon + 1, -1, -1, -1), empty, empty, empty.bool(), state[..., 0], state[..., 0]
    )
    return {
        "forward": lambda: policy(state, context),
        "begin": lambda: policy.begin(state, context),
        "along": lambda: policy.along(traj, context),
    }


DOORS = ("forward", "begin", "along")


@pytest.mark.parametrize("door", DOORS)
def test_a_longer_sequence_is_named(door):
    policy = Policy(ENV, Transformer(16, 2, 1))
    with pytest.raises(UserError, match=r"9 columns.*at most 7 letters.*of the length you need"):
        ways(policy, torch.zeros(1, 2, 9, dtype=torch.long))[door]()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("token", [5, -1])
def test_an_unknown_token_is_named(token, door):
    policy = Policy(ENV, Transformer(16, 2, 1))
    state = torch.zeros(1, 2, 7, dtype=torch.long)
    state[0, 1, 3] = token
    with pytest.raises(UserError, match=rf"the token {token}, but letters are 0 to 3.*env.encode"):
        ways(policy, state)[door]()


def test_an_unknown_letter_is_named_where_text_becomes_tokens():
    with pytest.raises(UserError, match=r"'X' at position 2.*not in the alphabet"):
        ENV.encode(["ACXTACG"])


@pytest.mark.parametrize("door", DOORS)
def test_a_context_of_the_wrong_width_is_named(door):
    env = Conditioned(Strings("ACGT", 5), torch.zeros(2, 3))
    policy = Policy(env, Transformer(16, 2, 1))
    with pytest.raises(
        UserError, match=r"context is 3 wide, but this transformer was built for a width of 64.*policy\.context"
    ):
        ways(policy, torch.zeros(1, 2, 6, dtype=torch.long), torch.zeros(1, 2, 3))[door]()


def test_heads_must_share_the_width():
    with pytest.raises(UserError, match="width of 10 cannot be shared by 4 heads"):
        Transformer(10, 4, 2)
    with pytest.raises(UserError, match="layers of a transformer is 0"):
        Transformer(8, 4, 0)
