"""Faults planted in environments, channels and oracles are each found, and named with their place and remedy."""

from __future__ import annotations

import math

import pytest
import torch

from stochflow.errors import UserError
from stochflow.learn.rollout import rollout
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known
from stochflow.ops import NEG
from stochflow.scores.rewards import Linear, Power
from stochflow.types import Task
from stochflow.worlds.channels import Confusion, Exact, Neighbour, Slip
from stochflow.worlds.check import check_env
from stochflow.worlds.check_task import check_channel, check_oracle
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.env import Channel, Env
from stochflow.worlds.grid import Corners, Grid
from stochflow.worlds.strings import Strings


class NoList(Env):
    """A small grid that cannot be enumerated: what a user writes first, and all that random walks can see."""

    state_dim, num_moves, horizon, stop = 2, 3, 6, 2

    def __init__(self):
        self.grid = Grid(2, 4)

    def initial(self, batch, row=None):
        return self.grid.initial(batch)

    def moves(self, state):
        return self.grid.moves(state)

    def step(self, state, move):
        return self.grid.step(state, move)

    def parents(self, state):
        return self.grid.parents(state)

    def unstep(self, state, move):
        return self.grid.unstep(state, move)

    def features(self, state):
        return self.grid.features(state)


SOUND = [
    Grid(1, 2),
    Grid(2, 8),
    Grid(3, 4),
    Strings("AB", 3),
    Strings("ACGT", 4),
    Strings("ABC", 3, 0),
    Strings("AB", 4, 2),
    NoList(),
]


def named(thing) -> str:
    """A name that two test processes agree on: the default repr holds an address."""
    return repr(thing) if " at 0x" not in repr(thing) else type(thing).__name__


@pytest.mark.parametrize("env", SOUND, ids=named)
def test_sound_environments_pass(env):
    found = check_env(env)
    assert found.enumerated == (not isinstance(env, NoList))
    assert found.edges >= found.states - 1


def test_large_spaces_are_walked_not_listed():
    assert not check_env(Strings("ACGT", 50)).enumerated
    assert not check_env(Grid(8, 20), samples=8).enumerated


def test_looking_leaves_the_random_stream_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check_env(Grid(2, 4))
    assert torch.equal(before, torch.get_rng_state())


# the faults, each a grid or strings with one method wrong ---------------------------------------------------------


class MaskTooWide(Grid):
    def moves(self, state):
        return torch.ones(*state.shape[:-1], self.num_moves, dtype=torch.bool)


class MaskTooNarrow(Grid):
    def moves(self, state):
        mask = super().moves(state).clone()
        mask[..., 0] &= state[..., 1] != 1
        return mask


class StepWrong(Grid):
    def step(self, state, move):  # the last column jumps two cells
        return (super().step(state, move) + self._axis(state, move) * (move == 1).unsqueeze(-1)).clamp(
            max=self.side - 1
        )


class StepRandom(Grid):
    def step(self, state, move):
        slipped = torch.where(torch.rand(move.shape) < 0.3, 1 - move, move)
        return super().step(state, torch.where(move == self.stop, move, slipped.clamp(min=0)))


class UnstepWrong(Grid):
    def unstep(self, state, move):
        return super().unstep(state, (move + 1) % self.ndim)


class ParentsMissing(Grid):
    def parents(self, state):
        return super().parents(state) & (torch.arange(self.num_moves) != 1)


class ParentsTooMany(Strings):
    def parents(self, state):
        size = self.lengths(state).unsqueeze(-1)
        return (size > 0).expand(*state.shape[:-1], self.num_moves).clone()


class ParentsStop(Grid):
    def parents(self, state):
        return super().parents(state) | (
            (torch.arange(self.num_moves) == self.stop) & (state > 0).any(-1, keepdim=True)
        )


class BeforeTheBeginning(Grid):
    def parents(self, state):
        return torch.ones_like(super().parents(state))


class StopMoves(Grid):
    def step(self, state, move):
        return torch.where((move == self.stop).unsqueeze(-1), self.side - 1, super().step(state, move))


class ListIncomplete(Grid):
    def all_states(self, row=None):
        return super().all_states()[:-1]


class ListTwice(Grid):
    def all_states(self, row=None):
        states = super().all_states()
        return torch.cat([states, states[-1:]])


class ListBackwards(Grid):
    def all_states(self, row=None):
        states = super().all_states()
        return torch.cat([states[:1], states[1:].flip(0)])

    def index(self, state):
        place = super().index(state)
        return torch.where(place == 0, 0, self.side**self.ndim - place)


class ListUnreachable(Grid):
    def moves(self, state):  # the far corner cannot be entered
        mask = super().moves(state).clone()
        left = (self.side - 1 - state).sum(-1, keepdim=True)
        mask[..., : self.ndim] &= left > 1
        return mask

    def parents(self, state):
        return super().parents(state) & ((self.side - 1 - state).sum(-1, keepdim=True) > 0)


class NotFirst(Grid):
    def all_states(self, row=None):
        return super().all_states().roll(1, 0)


class IndexOff(Grid):
    def index(self, state):
        return super().index(state) + 1


class IndexTransposed(Grid):
    def index(self, state):
        return super().index(state.flip(-1))


class HorizonShort(Grid):
    def __init__(self, *args):
        super().__init__(*args)
        self.horizon -= 1


class HorizonLong(Grid):
    def __init__(self, *args):
        super().__init__(*args)
        self.horizon += 1


class NotATree(Grid):
    tree = True


class FeaturesInfinite(Grid):
    def features(self, state):
        return super().features(state) / state.sum(-1, keepdim=True)


class FeaturesWhole(Grid):
    def features(self, state):
        return state


class FloatStates(Grid):
    def initial(self, batch, row=None):
        return torch.zeros(*batch, self.ndim)


class MixesTheBatch(Grid):
    def features(self, state):
        return super().features(state) - super().features(state).mean(0)


class MaskNumbers(Grid):
    def moves(self, state):
        return super().moves(state).long()


class StopOutside(Grid):
    def __init__(self, *args):
        super().__init__(*args)
        self.stop = 7


class OneBatchDimension(Grid):
    def moves(self, state):
        return torch.stack(
            [*(state[:, d] < self.side - 1 for d in range(self.ndim)), torch.ones(len(state), dtype=torch.bool)], 1
        )


FAULTS = [
    (MaskTooWide(2, 4), "moves() allows move 1 at state [0, 3]", "leaves the state"),
    (MaskTooNarrow(2, 4), "moves() forbids it", "parents()"),
    (StepWrong(2, 5), "move 1", "unstep()"),
    (StepRandom(2, 4), "chance", "Channel"),
    (UnstepWrong(2, 4), "unstep() does not lead back", "inverse"),
    (ParentsMissing(2, 4), "move 1", "add the move to parents()"),
    (ParentsTooMany("AB", 3), "parents()", "step() leads elsewhere"),
    (ParentsStop(2, 4), "STOP (move 2)", "leave it out"),
    (BeforeTheBeginning(2, 4), "initial state [0, 0]", "nothing may come before"),
    (StopMoves(2, 4), "STOP (move 2) turns state [0, 0]", "as it is"),
    (ListIncomplete(2, 4), "[3, 3]", "list it"),
    (ListTwice(2, 4), "[3, 3] more than once", "each state once"),
    (ListBackwards(2, 4), "before", "parents before children"),
    (ListUnreachable(2, 4), "[3, 3]", "no legal move leads to it"),
    (NotFirst(2, 4), "begins with state [3, 3]", "comes first"),
    (IndexOff(2, 4), "index() puts state [0, 0] at 1", "agree"),
    (IndexTransposed(2, 4), "index() puts state [0, 1] at 4", "lists it at 1"),
    (HorizonShort(2, 4), "after 5 moves", "horizon"),
    (HorizonLong(2, 4), "horizon", "set it to 6"),
    (NotATree(2, 4), "2 parents", "tree = False"),
    (FeaturesInfinite(2, 4), "features()", "not finite"),
    (FeaturesWhole(2, 4), "features()", "floats"),
    (FloatStates(2, 4), "initial()", "torch.int64"),
    (MixesTheBatch(2, 4), "features()", "batch"),
    (MaskNumbers(2, 4), "moves()", "torch.bool"),
    (StopOutside(2, 4), "stop", "0 to 2"),
    (OneBatchDimension(2, 4), "moves()", "leading dimensions"),
]


@pytest.mark.parametrize(
    ("env", "words", "remedy"), FAULTS, ids=lambda x: type(x).__name__ if isinstance(x, Env) else ""
)
def test_planted_faults_are_found_and_named(env, words, remedy):
    with pytest.raises(UserError) as caught:
        check_env(env)
    assert words in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("method", ["step", "unstep", "parents", "moves"])
def test_faults_are_found_without_enumeration(method):
    """The same geometry, but only random walks to look at it."""
    fault = {
        "step": lambda self, state, move: self.grid.step(state, move) - (state == 2).long() * (move == 0).unsqueeze(-1),
        "unstep": lambda self, state, move: state,
        "parents": lambda self, state: torch.zeros_like(self.grid.parents(state)),
        "moves": lambda self, state: torch.ones_like(self.grid.moves(state)),
    }[method]
    broken = type("Broken", (NoList,), {method: fault})()
    with pytest.raises(UserError, match="state"):
        check_env(broken)


# channels ---------------------------------------------------------------------------------------------------------

WORLDS = [Grid(2, 4), Strings("ACGT", 3), Strings("ABC", 3, 1)]


@pytest.mark.parametrize("env", WORLDS, ids=named)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_sound_channels_pass(env, alpha):
    real = env.num_moves - (env.stop is not None)
    check_channel(Exact(), env)
    check_channel(Slip(alpha), env)
    check_channel(Neighbour(alpha * 0.9), env)
    check_channel(Confusion((1 - alpha) * torch.eye(real) + alpha / real), env)


class Leaky(Slip):
    def log_probs(self, state, legal, action, memory=None):
        return super().log_probs(state, legal, action) + math.log(0.9)


class Trespasses(Slip):
    def log_probs(self, state, legal, action, memory=None):
        return super().log_probs(state, torch.ones_like(legal), action)


class MarginalWrong(Slip):
    def marginal(self, state, legal, log_pi, memory=None):
        return torch.where(legal, log_pi, NEG)


class ArrivalsForgotten(Slip):
    """Written as if `log_probs` were all there is."""

    def log_probs(self, state, legal, action, memory=None):
        return Slip(self.alpha / 2).log_probs(state, legal, action)

    marginal = Channel.marginal
    sample = Channel.sample


class ArrivalsShort(Slip):
    def arrivals(self, state, legal, move, memory=None):
        return super().arrivals(state, legal, move)[..., :-1]


class NotANumber(Slip):
    def log_probs(self, state, legal, action, memory=None):
        return super().log_probs(state, legal, action) * math.nan


class WrongShape(Slip):
    def log_probs(self, state, legal, action, memory=None):
        return super().log_probs(state, legal, action)[..., :-1]


class DrawsAnother(Exact):
    def sample(self, state, legal, action, memory=None):
        return (action + 1) % 4


BAD_CHANNELS = [
    (Leaky(0.2), "sum to 0.9", "normalise"),
    (Trespasses(0.2), "illegal", "restrict"),
    (MarginalWrong(0.2), "marginal()", "off by"),
    (ArrivalsForgotten(0.2), "arrivals()", "off by"),
    (ArrivalsShort(0.2), "arrivals()", "one entry per action"),
    (NotANumber(0.2), "not a number", "NEG"),
    (WrongShape(0.2), "shape", "one entry per move"),
    (DrawsAnother(), "sample()", "probability zero"),
    (
        Confusion([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]]),
        "no action brings about move 3",
        "positive probability",
    ),
]


@pytest.mark.parametrize(
    ("channel", "words", "remedy"), BAD_CHANNELS, ids=lambda x: type(x).__name__ if isinstance(x, Channel) else ""
)
def test_bad_channels_are_named(channel, words, remedy):
    env = Grid(2, 4) if isinstance(channel, Trespasses) else Strings("ACGT", 3)
    with pytest.raises(UserError) as caught:
        check_channel(channel, env)
    assert words in str(caught.value)
    assert remedy in str(caught.value)


# oracles ----------------------------------------------------------------------------------------------------------


def test_sound_oracles_pass():
    check_oracle(Task(Grid(2, 8), Exact(), Corners(8), Power()))
    check_oracle(Task(Strings("AB", 4, 0), Exact(), lambda s: s.sum(-1).float(), Linear()))


BAD_ORACLES = [
    (lambda s: torch.where((s == 1).any(-1), math.nan, 1.0), Power(), "nan", "sample"),
    (lambda s: s.float(), Power(), "shape", "one number"),
    (lambda s: 1.0, Power(), "1.0", "one number"),
    (lambda s: s[..., 0].float() * 0, lambda y, s, t: y.log(), "-inf", "log-reward"),
    (lambda s: {}["CCCC"], Power(), "KeyError", "every object"),
]


@pytest.mark.parametrize(("oracle", "reward", "words", "remedy"), BAD_ORACLES)
def test_bad_oracles_are_named_with_sample_and_text(oracle, reward, words, remedy):
    with pytest.raises(UserError) as caught:
        check_oracle(Task(Strings("ACGT", 4), Exact(), oracle, reward))
    assert words in str(caught.value)
    assert remedy in str(caught.value)
    assert "('" in str(caught.value)  # the text of the state


# what `free`, `switched` and `exact` promise ----------------------------------------------------------------------------------


class NoRepeat(Strings):
    """No letter twice in a row."""

    def moves(self, state):
        size = self.lengths(state)
        last = state.gather(-1, (size - 1).clamp(min=0).unsqueeze(-1))
        return super().moves(state) & ((torch.arange(self.tokens) != last) | (size == 0).unsqueeze(-1))


class Counting(Strings):
    """Features of its own: one-hot letters and how often each occurs."""

    def features(self, state):
        flags = super().features(state)
        return torch.cat([flags, flags.unflatten(-1, (self.length, self.tokens)).sum(-2)], -1)


def test_strings_that_forbid_something_are_not_free():
    env = NoRepeat("ACG", 5)
    assert not env.free
    assert not Conditioned(env, torch.zeros(1, 1)).free
    policy = Policy(env, MLP(8, 2))
    made = rollout(Task(env, Exact(), lambda s: s[..., 0], Linear()), policy, 200).states[-1]
    assert not (made[..., 1:] == made[..., :-1]).any()


def test_features_of_ones_own_are_computed_not_added_up():
    env = Counting("ACG", 5)
    assert env.free
    assert env.switched(torch.zeros(1, dtype=torch.long), 0) is None
    check_env(env)
    policy = Policy(env, MLP(8, 2))
    traj = rollout(Task(env, Exact(), lambda s: s[..., 0], Linear()), policy, 20)
    logits, cache = policy.begin(traj.states[0])
    for t in range(5):
        torch.testing.assert_close(logits, policy(traj.states[t]).forward)
        logits, cache = policy.advance(cache, traj.states[t + 1], traj.moves[t], t)


def test_a_freedom_that_is_not_there_is_named():
    env = NoRepeat("ACG", 5)
    env.free = True
    with pytest.raises(UserError, match=r"free.*illegal.*free = False"):
        check_env(env)
    env = Counting("ACG", 5)
    env.switched = lambda move, t: move + t * 3
    with pytest.raises(UserError, match=r"switched.*None"):
        check_env(env)


def test_an_exactness_that_is_not_there_is_named():
    class Half(Exact):
        def log_probs(self, state, legal, action, memory=None):
            return Slip(0.5).log_probs(state, legal, action)

        marginal = Channel.marginal
        sample = Channel.sample

    with pytest.raises(UserError, match=r"exact.*exact = False"):
        check_channel(Half(), Strings("AC", 3))
    channel = Slip(0.0)
    assert channel.exact
    channel.alpha = 0.3
    assert not channel.exact
    assert not Known(Strings("AC", 3), channel).exact


class Blind(Strings):
    """Features that forget the order of the letters."""

    free = False

    def features(self, state):
        return super().features(state).unflatten(-1, (self.length, -1)).sum(-2)

    def switched(self, move, t):
        return None


def test_features_that_cannot_tell_states_apart_are_reported(caplog):
    check_env(Blind("AC", 4))
    assert "are the same for" in caplog.text
    first, second = ("('AC", "('CA")
    assert first in caplog.text or second in caplog.text
    caplog.clear()
    for env in (
        *SOUND,
        Conditioned(Strings("AC", 3), torch.arange(4.0).unsqueeze(1)),
        Conditioned(Grid(2, 3), torch.ones(2, 1)),
    ):
        check_env(env)
    assert "are the same for" not in caplog.text
