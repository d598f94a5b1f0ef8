"""Bins, windows without look-ahead, and forecasts as states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stochflow.errors import UserError
from stochflow.forecast.config import Forecast
from stochflow.forecast.training import follow, make_policy, split
from stochflow.learn.rollout import rollout
from stochflow.types import Task
from stochflow.worlds.channels import Neighbour, Slip
from stochflow.worlds.check import check_env
from stochflow.worlds.check_task import check_channel
from stochflow.worlds.series import LOCATIONS, Bins, Cut, Nearness, Series, Track


def track(y, time=None, real=None, name="a") -> Track:
    y = np.asarray(y, dtype=float)
    time = np.arange(len(y), dtype=float) if time is None else np.asarray(time, dtype=float)
    real = np.zeros((len(y), 0)) if real is None else real
    return Track(name, time, y, real, np.zeros((len(y), 0), dtype=np.int64), np.zeros(0), np.zeros(0, dtype=np.int64))


def wave(count=60):
    t = np.arange(count)
    return 10 + 0.1 * t + 3 * np.sin(2 * np.pi * t / 6) + np.random.default_rng(0).normal(0, 0.2, count)


def series(bins=8, horizon=3, rows=4) -> Series:
    cut = Cut(12, horizon, 6.0, "seasonal", (6.0,))
    one = track(wave())
    return Series(cut([one], [cut.origins(one)[-rows:]]), Bins(bins, 3.0))


# bins ---------------------------------------------------------------------------------------------------------------


@given(st.integers(4, 256), st.floats(0.01, 100), st.floats(-1, 1))
def test_a_value_inside_comes_back_within_half_a_bin(count, limit, share):
    bins = Bins(count, limit)
    value = torch.tensor(share * limit, dtype=torch.float64)
    there = bins.index(value)
    assert 0 <= int(there) < count
    assert abs(float(bins.centre(there.double()) - value)) <= bins.width / 2 * (1 + 1e-6)


@given(st.integers(4, 256), st.floats(0.01, 100))
def test_every_bin_is_the_bin_of_its_centre_and_of_what_is_drawn_from_it(count, limit):
    bins = Bins(count, limit)
    every = torch.arange(count)
    assert (bins.index(bins.centre(every.double())) == every).all()
    inner = (every > 0) & (every < count - 1)
    off = (bins.draw(every.double()) - bins.centre(every.double())).abs()
    assert (off <= bins.width / 2 * (1 + 1e-6)).all()
    assert (bins.centre(every.double()).abs() <= limit)[inner].all()


def test_what_lies_beyond_the_ends_goes_to_the_open_bins():
    bins = Bins(6, 2.0)
    assert bins.width == 1.0
    assert bins.index(torch.tensor([-9.0, -2.01, -1.99, 0.0, 1.99, 2.01, 9.0])).tolist() == [0, 0, 1, 3, 4, 5, 5]
    assert bins.centre(torch.tensor([0, 1, 5])).tolist() == [-2.5, -1.5, 2.5]


@pytest.mark.parametrize(("count", "limit"), [(3, 1.0), (300, 1.0), (8, 0.0), (8, float("nan"))])
def test_impossible_bins_are_refused(count, limit):
    with pytest.raises(UserError, match="bins"):
        Bins(count, limit)


# windows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("location", LOCATIONS)
def test_nothing_after_the_origin_changes_a_window(location):
    """Bit for bit: values, scale, location and statics of a window are the same whatever follows."""
    y, other = wave(), np.random.default_rng(1).normal(size=(60, 2))
    wild_y, wild_other = y.copy(), other.copy()
    wild_y[40:], wild_other[40:] = 1e6, np.nan
    cut = Cut(18, 4, 6.0, location, (6.0,))
    before, after = (cut([track(a, real=b)], [np.array([40])]) for a, b in ((y, other), (wild_y, wild_other)))
    for name in before._fields:
        if name not in ("target", "known"):
            assert torch.equal(getattr(before, name), getattr(after, name)), name
    assert not torch.equal(before.target, after.target)


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_flat_window_has_a_tenth_of_the_spread_of_all_earlier_changes(location):
    y = np.concatenate([wave(30), np.full(12, 7.0), [1e6] * 4])
    made = Cut(12, 4, 6.0, location)([track(y)], [np.array([42])])
    assert float(made.scale) == pytest.approx(0.1 * np.std(y[6:42] - y[:36]))
    gaps = np.where(np.arange(46) == 3, np.nan, y)
    masked = Cut(12, 4, 6.0, location)([track(gaps)], [np.array([42])])
    assert float(masked.scale) == pytest.approx(0.1 * np.nanstd(gaps[6:42] - gaps[:36]))


def test_locations_by_hand():
    y = np.array([1.0, 2, 3, 2, 3, 4])  # a season of 3 that rises by 1
    ahead = {"mean": [2.5, 2.5, 2.5, 2.5], "last": [4, 4, 4, 4], "seasonal": [3, 4, 5, 4], "shifted": [3, 4, 5, 4]}
    for kind, wanted in ahead.items():
        made = Cut(6, 4, 3.0, kind)([track(y)], [np.array([6])])
        assert made.location[0].tolist() == pytest.approx(wanted)
        assert not bool(made.known[0])  # nothing follows


@pytest.mark.parametrize("location", LOCATIONS)
def test_scaled_targets_come_back_in_the_series_own_units(location):
    y = wave()
    cut = Cut(18, 4, 6.0, location)
    made = cut([track(y)], [np.array([30, 50])])
    back = made.unscale(made.target, torch.arange(2))
    assert torch.allclose(back, torch.tensor(np.stack([y[30:34], y[50:54]])), atol=1e-4)


def test_missing_values_are_masked_and_windows_without_a_whole_target_are_marked():
    y = wave()
    y[[20, 25, 47]] = np.nan
    cut = Cut(12, 4, 6.0, "seasonal")
    made = cut([track(y)], [np.array([30, 45])])
    assert made.seen[0, :, 0].tolist() == [i not in (20, 25) for i in range(18, 30)]
    assert (made.values[0, :, 0][~made.seen[0, :, 0]] == 0).all()
    assert made.known.tolist() == [True, False]
    assert bool(torch.isfinite(made.values).all())
    assert bool(torch.isfinite(made.target).all())


def test_ages_and_steps_ahead_are_those_of_irregular_stamps():
    time = np.array([0, 1, 2.5, 3, 7, 8, 9.5, 10])
    made = Cut(5, 2, 1.0, "last")([track(np.arange(8.0), time)], [np.array([5])])
    assert made.age[0].tolist() == [7.0, 6.0, 4.5, 4.0, 0.0]
    assert made.static[0, -2:].tolist() == [0.0, 0.5]  # one step ahead as expected, the second half a step late


def test_origins_keep_a_whole_horizon_and_the_stride_counts_from_the_end():
    cut = Cut(10, 5)
    assert cut.origins(track(np.zeros(30)))[[0, -1]].tolist() == [10, 25]
    assert cut.origins(track(np.zeros(30)), stride=5).tolist() == [10, 15, 20, 25]
    assert len(cut.origins(track(np.zeros(14)))) == 0


def test_the_split_is_by_time_and_no_training_target_reaches_into_validation():
    ends = list(range(40, 140))
    train, valid = split(ends, 0.15, 12, 1)
    assert len(valid) == 15
    assert max(ends[i] for i in train) + 12 <= min(ends[i] for i in valid)
    assert train == list(range(len(train)))
    assert split(ends[:12], 0.15, 12, 1) == (list(range(12)), [])  # too few to hold any out


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"horizon": 0}, "horizon of 0"), ({"window": 1}, "window of 1"), ({"location": "x"}, "location")],
)
def test_impossible_cuts_are_refused(changes, word):
    with pytest.raises(UserError, match=word):
        Cut(**{"window": 10, "horizon": 3, **changes})


# environment --------------------------------------------------------------------------------------------------------


def test_the_environment_holds_together_and_so_do_its_channels():
    env = series()
    assert check_env(env).enumerated
    for channel in (Slip(0.3), Neighbour(0.3)):
        check_channel(channel, env)


def test_the_oracle_finds_its_target_by_the_row():
    env = series()
    sigma = torch.tensor([1.0, 2.0, 0.5])
    state = torch.cat([torch.arange(4).unsqueeze(1), torch.randint(8, (4, 3))], 1)
    off = (env.bins.centre(state[:, 1:].float()) - env.windows.target) / sigma
    assert torch.allclose(Nearness(env, 2, sigma)(state), -off.square().mean(1))
    assert torch.allclose(Nearness(env, 1, sigma)(state), -off.abs().mean(1))
    assert torch.allclose(
        Nearness(env, 2, sigma)(state.expand(3, 2, 4, 4)), Nearness(env, 2, sigma)(state).expand(3, 2, 4)
    )


def test_following_the_truth_is_a_trajectory_of_the_environment():
    env = series()
    row = torch.tensor([[0, 3], [1, 2]])
    traj = follow(env, row)
    state = env.initial((2, 2), row)
    for t in range(env.horizon):
        assert torch.equal(traj.states[t], state)
        state = env.step(state, traj.moves[t])
    assert torch.equal(traj.states[-1], state)
    assert torch.equal(state[..., 1:], env.truth(row))
    assert not traj.real.any()


def test_neighbour_noise_moves_a_bin_by_at_most_one():
    env = series(rows=1)
    settings = Forecast(horizon=3, encoder="mlp", seeds=2)
    policy = make_policy(env, settings, torch.arange(1))
    traj = rollout(Task(env, Neighbour(0.5), Nearness(env), None), policy, 500)
    off = traj.moves - traj.actions
    assert off.abs().max() == 1
    missed = (off != 0).float().mean()
    assert 0.35 < float(missed) < 0.55  # half of the orders, less those at the ends


def test_data_that_ships_reads_and_is_what_the_readme_says():
    pytest.importorskip("pandas")
    import hashlib
    from importlib.resources import files

    from stochflow.forecast.frame import SHIPPED, read, shipped

    folder = files("stochflow.scores.data") / "series"
    readme = (folder / "README.md").read_text()
    for name in SHIPPED:
        assert hashlib.sha256((folder / f"{name}.csv").read_bytes()).hexdigest() in readme
        _, tracks, _ = read(shipped(name), gaps="allow" if name == "co2_weekly" else "error")
        assert len(tracks) == 1
        assert np.isfinite(tracks[0].y).mean() > 0.95  # a week in which nothing was read is a row without a value
