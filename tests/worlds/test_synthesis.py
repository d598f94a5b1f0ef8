"""From an order to what is made of it: exact laws against enumeration, expectations by position, common random numbers."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from stochflow.errors import UserError
from stochflow.worlds.channels import Confusion, Exact, Neighbour, Slip
from stochflow.worlds.memory import Regime
from stochflow.worlds.strings import Strings
from stochflow.worlds.synthesis import Synthesis

ROUGH = [[0.9, 0.06, 0.04], [0.1, 0.8, 0.1], [0.0, 0.3, 0.7]]
RATES = [(0.0, 0.0), (0.1, 0.0), (0.0, 0.15), (0.1, 0.2)]


def strings(most: int) -> list[str]:
    return ["".join(t) for n in range(most + 1) for t in itertools.product("ABC", repeat=n)]


def by_hand(order: str, insertion: float, deletion: float) -> dict[str, float]:
    """The law of what is made, cycle by cycle, as the definition says it."""
    law = {"": 1.0}
    for x in order:
        one = {"": deletion} | {c: (1 - deletion) * ROUGH["ABC".index(x)][i] for i, c in enumerate("ABC")}
        after: Counter[str] = Counter()
        for made, p in law.items():
            for c, q in one.items():
                after[made + c] += p * q * (1 - insertion)
                for extra in "ABC":
                    after[made + c + extra] += p * q * insertion / 3
        law = dict(after)
    return law


@pytest.mark.parametrize(("insertion", "deletion"), RATES)
@pytest.mark.parametrize("order", ["", "B", "CA", "CCB"])
def test_the_law_is_that_of_the_cycles(order, insertion, deletion):
    made = Synthesis("ABC", ROUGH, insertion, deletion)
    law = by_hand(order, insertion, deletion)
    texts = strings(2 * len(order))
    found = made.log_probs([order] * len(texts), texts).exp()
    assert found.tolist() == pytest.approx([law.get(t, 0.0) for t in texts], abs=1e-12)
    assert float(found.sum()) == pytest.approx(1)
    assert float(made.chance_exact([order])) == pytest.approx(law[order])
    assert made.log_prob(order, "A" * (2 * len(order) + 1)) == -math.inf


@pytest.mark.parametrize(("insertion", "deletion"), RATES)
def test_expectations_by_position_are_those_of_the_law(insertion, deletion):
    made = Synthesis("ABC", ROUGH, insertion, deletion)
    dice = torch.Generator().manual_seed(3)
    values = {j: torch.rand(3**j, generator=dice, dtype=torch.float64) for j in (2, 3, 4)}
    value = {"".join(t): float(values[j][i]) for j in values for i, t in enumerate(itertools.product("ABC", repeat=j))}
    for n in (1, 3):
        orders = ["".join(t) for t in itertools.product("ABC", repeat=n)]
        wanted = [sum(p * value.get(t, -2.0) for t, p in by_hand(x, insertion, deletion).items()) for x in orders]
        assert made.expect(values, n, -2.0).tolist() == pytest.approx(wanted, abs=1e-12)


def test_expectations_that_would_need_too_large_tables_are_not_begun():
    assert Synthesis("ACGT", Slip(0.1)).expect({20: torch.zeros(1)}, 20, 0.0) is None


@pytest.mark.parametrize(("insertion", "deletion"), [(0.0, 0.0), (0.1, 0.2)])
def test_makings_follow_the_law(insertion, deletion):
    made = Synthesis("ABC", ROUGH, insertion, deletion)
    law = by_hand("CAB", insertion, deletion)
    n = 20_000
    found = Counter(made.make(["CAB"], n, seed=1)[0])
    likely = [t for t, p in law.items() if p * n >= 5]
    counts = [found[t] for t in likely] + [n - sum(found[t] for t in likely)]
    chances = [law[t] for t in likely] + [max(1 - sum(law[t] for t in likely), 1e-12)]
    if chances[-1] * n < 1:
        assert counts[-1] <= 8
        counts, chances = counts[:-1], chances[:-1]
    assert chisquare(counts, [c / sum(chances) * sum(counts) for c in chances]).pvalue > 1e-4


def test_common_random_numbers_err_in_the_same_cycles():
    made = Synthesis("ACGT", Slip(0.3), 0.05, 0.05)
    orders = ["AAAAAAAA", "ACGTACGT", "TTTT"]
    one = made.make(orders, 200, seed=4)
    assert one == made.make(orders, 200, seed=4)
    assert one != made.make(orders, 200, seed=5)
    assert [
        made.make([x], 200, seed=4)[0] for x in orders
    ] == one  # an order's makings are its own, whatever is asked beside it
    right = [[made == x for made in each] for each, x in zip(one[:2], orders[:2], strict=True)]
    same = sum(a == b for a, b in zip(*right, strict=True)) / 200
    assert same > 0.97  # independent draws would agree in about 80 of 100


@pytest.mark.parametrize("channel", [Slip(0.25), Neighbour(0.3), Exact(), Confusion(ROUGH)], ids=repr)
def test_a_channel_is_asked_letter_by_letter(channel):
    env = Strings("ABC", 2)
    state = env.initial((3,))
    wanted = channel.log_probs(state, torch.ones(3, 3, dtype=torch.bool), torch.arange(3)).exp()
    assert Synthesis("ABC", channel).table.tolist() == [pytest.approx(row, abs=1e-6) for row in wanted.tolist()]
    assert Synthesis("ABC", channel).exact == channel.exact


def test_what_makes_no_sense_is_refused():
    for make, words in [
        (lambda: Synthesis("AB", ROUGH), "3 letters, but the alphabet 'AB' has 2"),
        (lambda: Synthesis("ABC", ROUGH, insertion=1.0), "rate of insertions is 1.0"),
        (lambda: Synthesis("ABC", ROUGH, deletion=-0.1), "rate of deletions"),
        (lambda: Synthesis("AB", [[1, 0], [0.5, 0.4]]), "row 2 of 2 .* sums to 0.9"),
        (
            lambda: Synthesis("AB", Regime(Strings("AB", 2), [Slip(0.1), Slip(0.5)], stay=0.9)),
            "remembers earlier letters",
        ),
        (lambda: Synthesis("ABC", ROUGH).make(["AX"], 3), "'X' at position 2"),
        (lambda: Synthesis("ABC", ROUGH).make(["A"], 0), "0 makings"),
    ]:
        with pytest.raises(UserError, match=words):
            make()
