"""Strings and their texts: the round trip, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stochflow.errors import UserError
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import BYTES, DNA, PROTEIN, RNA, Strings


def test_acgt_is_0123():
    assert DNA == "ACGT"
    assert RNA == "ACGU"
    assert Strings("ACGT", 4).encode(["ACGT"]).tolist() == [[0, 1, 2, 3]]
    assert Strings("ACGT", 8).encode(["AGGTATCA"]).tolist() == [[0, 2, 2, 3, 0, 3, 1, 0]]


@pytest.mark.parametrize("alphabet", [DNA, RNA, PROTEIN, BYTES, "01"])
@given(draw=st.data())
def test_round_trip_of_fixed_length(alphabet, draw):
    env = Strings(alphabet, 5)
    texts = draw.draw(st.lists(st.text(alphabet, min_size=5, max_size=5), max_size=4))
    states = env.encode(texts)
    assert states.shape == (len(texts), 5)
    assert states.dtype == torch.long
    assert env.decode(states) == texts


@given(texts=st.lists(st.text(DNA, min_size=0, max_size=6), max_size=5))
def test_round_trip_of_variable_length(texts):
    env = Strings(DNA, 6, min_length=0)
    states = env.encode(texts)
    assert env.decode(states) == texts
    assert env.lengths(states).tolist() == [len(t) for t in texts]


def test_all_bytes():
    env = Strings(BYTES, 256)
    assert env.encode([BYTES]).tolist() == [list(range(256))]
    assert env.decode(torch.arange(256)[None]) == [BYTES]


def test_enumeration_decodes_to_every_string_once_in_order():
    env = Strings("ACGT", 3, min_length=0)
    texts = env.decode(env.all_states())
    assert texts[:6] == ["", "A", "C", "G", "T", "AA"]
    assert len(set(texts)) == len(texts) == 1 + 4 + 16 + 64
    assert torch.equal(env.index(env.encode(texts)), torch.arange(85))


@pytest.mark.parametrize("min_length", [None, 1])
def test_early_states_are_the_first_ones_and_all_that_few_moves_can_reach(min_length):
    env = Strings("ACG", 4, min_length)
    for steps in range(1, 6):
        early = env.early_states(steps)
        assert len(early) == env.early_count(steps) == sum(3**n for n in range(steps))
        assert torch.equal(early, env.all_states()[: len(early)])
        assert torch.equal(env.index(early), torch.arange(len(early)))
        assert int(env.lengths(env.all_states()[: len(early)]).max()) == steps - 1  # and the next one is longer
    assert env.early_count(5) == env.count()


def test_decode_flattens_any_leading_dimensions():
    env = Strings("ACGT", 2)
    states = env.encode(["AC", "GT", "TT", "CA"]).reshape(2, 2, 2)
    assert env.decode(states) == ["AC", "GT", "TT", "CA"]


@pytest.mark.parametrize(
    ("env", "texts", "words"),
    [
        (Strings("ACGT", 4), ["ACGT", "ACNT"], ["sequence 1", "'ACNT'", "'N'", "position 2", "'ACGT'"]),
        (Strings("ACGT", 4), ["acgt"], ["'a'", "position 0"]),
        (Strings("ACGU", 4), ["ACGT"], ["'T'", "position 3"]),
        (Strings("ACGT", 4), ["ACG"], ["sequence 0", "3 letters", "exactly 4"]),
        (Strings("ACGT", 4, min_length=1), ["ACGTA"], ["5 letters", "at most 4"]),
    ],
)
def test_a_foreign_letter_or_a_wrong_length_is_named(env, texts, words):
    with pytest.raises(UserError) as error:
        env.encode(texts)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("A", 3), ["two different letters", "'A'"]),
        (("ACCA", 3), ["each once", "'ACCA'"]),
        (("ACGT", 0), ["length 0"]),
        (("ACGT", 3, 4), ["min_length = 4", "length = 3"]),
    ],
)
def test_impossible_strings_are_refused(arguments, words):
    with pytest.raises(UserError) as error:
        Strings(*arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("min_length", [None, 1])
def test_a_condition_leaves_the_text_as_it_is(min_length):
    strings = Strings("ACGT", 4, min_length)
    env = Conditioned(strings, torch.tensor([[0.1], [0.9]]))
    texts = ["ACGT", "TTGA"] if min_length is None else ["A", "TTGA"]
    states = torch.cat([torch.tensor([[1], [0]]), strings.encode(texts)], 1)
    assert env.decode(states) == texts
    assert env.decode(states.view(2, 1, 5)) == texts


@pytest.mark.parametrize("inner", [Grid(2, 3), Strings(BYTES[:9], 3)], ids=["grid", "bins"])
def test_what_has_no_letters_has_no_text_under_a_condition(inner):
    env = Conditioned(inner, torch.tensor([[0.1], [0.9]]))
    assert not hasattr(env, "decode")
    with pytest.raises(AttributeError, match="has no text form"):
        env.decode(env.initial((2,)))
