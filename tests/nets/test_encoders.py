"""Encoders of the past: masks, time, seeds, and exchanging the windows."""

from __future__ import annotations

import pytest
import torch

from stochflow.errors import UserError
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.nets.windows import WindowMLP, WindowTransformer, remembering
from stochflow.worlds.series import Bins, Series, Windows
from stochflow.worlds.strings import Strings


def windows(rows=6, steps=10, **changes) -> Windows:
    draw = torch.Generator().manual_seed(1)
    made = {
        "values": torch.randn(rows, steps, 3, generator=draw),
        "seen": torch.ones(rows, steps, 3, dtype=torch.bool),
        "categories": torch.randint(4, (rows, steps, 2), generator=draw),
        "age": torch.arange(steps - 1, -1, -1.0).expand(rows, steps).clone(),
        "phase": torch.randn(rows, steps, 2, generator=draw),
        "static": torch.randn(rows, 3, generator=draw),
        "static_categories": torch.randint(3, (rows, 1), generator=draw),
        "target": torch.zeros(rows, 3),
        "known": torch.ones(rows, dtype=torch.bool),
        "location": torch.zeros(rows, 3, dtype=torch.float64),
        "scale": torch.ones(rows, dtype=torch.float64),
        "series": torch.zeros(rows, dtype=torch.long),
        "origin": torch.arange(rows),
    }
    return Windows(**{**made, **changes})


def env(**changes) -> Series:
    return Series(windows(**changes), Bins(8, 3.0), sizes=(4, 4), static_sizes=(3,))


def encoder(spec, world=None, seeds=(0, 1)):
    return spec.build(world or env(), [torch.Generator().manual_seed(s) for s in seeds])


SPECS = [WindowMLP(16), WindowTransformer(16, 2, 2)]
ROW = torch.arange(6).expand(2, 6)


@pytest.mark.parametrize("spec", SPECS, ids=["mlp", "transformer"])
def test_each_seed_is_what_it_would_be_alone(spec):
    both = encoder(spec)(ROW)
    assert both.shape == (2, 6, 16)
    assert not torch.allclose(both[0], both[1])
    for i in range(2):
        assert torch.allclose(both[i : i + 1], encoder(spec, seeds=(i,))(ROW[:1]), atol=1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=["mlp", "transformer"])
@pytest.mark.parametrize("field", ["values", "categories", "age", "static", "static_categories", "phase"])
def test_everything_a_window_holds_is_read(spec, field):
    base = windows()
    changed = getattr(base, field).clone()
    changed[0] = (changed[0] + 1) % 3 if "categories" in field else changed[0] * 1.5 + 0.3
    one, two = encoder(spec)(ROW), encoder(spec, env(**{field: changed}))(ROW)
    assert not torch.allclose(one[:, 0], two[:, 0], atol=1e-4)
    assert torch.allclose(one[:, 1:], two[:, 1:], atol=1e-6)  # and only the window it belongs to changes


def test_a_step_where_nothing_was_seen_is_invisible_to_the_transformer():
    seen = torch.ones(6, 10, 3, dtype=torch.bool)
    seen[:, 4] = False
    values = windows().values
    wild = values.clone()
    wild[:, 4] = 99.0
    one, two = (encoder(WindowTransformer(16, 2, 2), env(values=v, seen=seen))(ROW) for v in (values, wild))
    assert torch.allclose(one, two, atol=1e-6)


def test_the_transformer_tells_irregular_stamps_apart():
    """The same values at other times are another window; shifting order and ages together is the same one."""
    base = windows()
    order = torch.randperm(10)
    moved = {name: getattr(base, name)[:, order] for name in ("values", "seen", "categories", "age", "phase")}
    one, same = encoder(WindowTransformer(16, 2, 2))(ROW), encoder(WindowTransformer(16, 2, 2), env(**moved))(ROW)
    assert torch.allclose(one, same, atol=1e-5)
    late = base.age.clone()
    late[:, :5] += 0.5
    assert not torch.allclose(one, encoder(WindowTransformer(16, 2, 2), env(age=late))(ROW), atol=1e-3)


@pytest.mark.parametrize("spec", SPECS, ids=["mlp", "transformer"])
def test_gradients_reach_every_parameter_and_stay_finite(spec):
    made = encoder(spec)
    made(ROW).square().sum().backward()
    for name, p in made.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
        assert p.grad.abs().sum() > 0 or "key_value.bias" in name, name  # a shift of all keys changes no attention


@pytest.mark.parametrize("spec", SPECS, ids=["mlp", "transformer"])
def test_windows_can_be_exchanged(spec):
    made, other = encoder(spec), env(values=windows().values.flip(0))
    before = made(ROW)
    made.attach(other)
    assert torch.allclose(made(ROW), encoder(spec, other)(ROW), atol=1e-6)
    made.attach(env())
    assert torch.equal(made(ROW), before)


def test_remembered_contexts_are_the_encoded_ones():
    world = env()
    policy = Policy(world, MLP(16, 1), seeds=(0, 1), encoder=WindowTransformer(16, 2, 2))
    state = world.initial((2, 5), torch.tensor([[3, 3, 0, 5, 1], [2, 2, 2, 4, 0]]))
    wanted = policy.context(state)
    with remembering(policy, 6):
        assert torch.allclose(policy.context(state), wanted, atol=1e-6)
    assert policy.context(state).requires_grad


def test_what_cannot_be_built_is_refused():
    with pytest.raises(UserError, match="heads"):
        encoder(WindowTransformer(16, 1, 3))
    with pytest.raises(UserError, match="MLPEncoder"):
        encoder(WindowMLP(), Strings("ACGT", 3))
