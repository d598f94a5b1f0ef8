"""The GFlowNet of a campaign draws in proportion to the sharpened acquisition: its exact law against the target's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from stochflow.design.generate import Candidates, Effort, all_texts, random_texts
from stochflow.design.offers import candidates
from stochflow.design.sampler import DEEP, Acquisitions, Goal, learned, trained
from stochflow.law.exact import Graph, exact_law
from stochflow.worlds.strings import Strings

ENV = Strings("ACGT", 4)
TEXTS = all_texts(ENV)


def gc(texts):
    return np.array([t.count("G") + t.count("C") + 2.0 * ("AT" in t) for t in texts])


def at(texts):
    return np.array([t.count("A") + t.count("T") - 1.0 * t.startswith("G") for t in texts])


def law_of(trainer, row=None):
    """[256] over finished strings, in the order of `TEXTS`."""
    env = trainer.task.env
    with trainer.averaged():
        found = exact_law(Graph(env, row), trainer.task.channel, trainer.policy)
    return np.asarray(found.squeeze(0))[-len(TEXTS) :]


@pytest.mark.slow
@pytest.mark.parametrize("contexts", [None, np.array([[1.0, 0.0], [0.0, 1.0]])], ids=["alone", "two preferences"])
def test_the_law_is_the_sharpened_acquisition(contexts):
    torch.manual_seed(0)
    scores = [gc] if contexts is None else [gc, at]
    goals = [Goal(s, Candidates(TEXTS[::3], s(TEXTS[::3]), ["search"] * 86), 8) for s in scores]
    trainer = learned(ENV, lambda t: True, goals, contexts, Effort(steps=1500), 0)
    for row, score in enumerate(scores):
        target = np.exp(trainer.task.oracle.beta[row] * score(TEXTS))
        target /= target.sum()
        law = law_of(trainer, None if contexts is None else row)
        assert 0.5 * np.abs(law - target).sum() < 0.08


@pytest.mark.slow
def test_what_breaks_a_rule_is_hardly_drawn_though_masks_know_nothing_of_it():
    """The best strings begin with G, which a rule forbids: among the others the law is still the sharpened acquisition."""

    def accepts(text):
        return not text.startswith("G")

    found = [t for t in TEXTS[::3] if accepts(t)]
    goals = [Goal(gc, Candidates(found, gc(found), ["search"] * len(found)), 8)]
    trainer = learned(ENV, accepts, goals, None, Effort(steps=1500), 0)
    law, fine = law_of(trainer), np.array([accepts(t) for t in TEXTS])
    assert law[~fine].sum() < 0.02
    target = np.exp(trainer.task.oracle.beta[0] * gc(TEXTS)) * fine
    assert 0.5 * np.abs(law - target / target.sum()).sum() < 0.08


def proteins():
    """A sure model's log expected improvement: it falls with the square of the gap, down to -10^10."""
    env = Strings("ACDEFGHIKLMNPQRSTVWY", 12, 9)

    def sure(texts):
        gap = np.array([sum(c not in "KRIL" for c in t) + 0.1 * t.count("K") for t in texts])
        return -3.0 * gap - np.where(gap > 3, 1e8 * gap**2, 0.0)

    best = random_texts(Strings("RIL", 12, 9), 300, 0)
    return env, sure, Goal(sure, Candidates(best, sure(best), ["search"] * len(best)), 8)


def test_a_sure_models_deep_acquisition_is_lifted_in_its_order_to_numbers_that_a_network_can_learn():
    env, sure, goal = proteins()
    oracle = Acquisitions(env, lambda t: True, [goal], False)
    texts = sorted({*random_texts(env, 500, 1), *goal.found.texts}, key=lambda t: float(sure([t])[0]))
    exact = oracle.beta[0] * (sure(texts) - goal.found.value.max())
    given = oracle(env.encode(texts)).double().numpy()
    assert exact.min() < -1e9
    assert given.min() > -1000
    assert (np.diff(given) >= 0).all()
    near = exact > -DEEP
    assert near.sum() > 100
    assert np.allclose(given[near], exact[near], atol=1e-4)


def test_a_policy_that_has_not_learned_is_said_to_need_more_steps():
    env, _, goal = proteins()
    early = trained(env, lambda t: True, [goal], None, Effort(steps=2), 0)[0]
    late = trained(env, lambda t: True, [goal], None, Effort(steps=300), 0)[0]
    assert "give more --steps" in early.notes[0]
    assert "give more --steps" not in late.notes[0]


def test_listed_candidates_are_drawn_in_proportion():
    """Without replacement, by Gumbel's trick: the first of many independent draws follows the target itself."""
    first = [candidates(ENV, lambda t: True, gc, [], 1, Effort(), seed) for seed in range(1500)]
    beta = first[0].beta
    target = np.exp(beta * gc(TEXTS))
    target /= target.sum()
    drawn = np.array([TEXTS.index(c.texts[0]) for c in first])
    groups = np.clip(gc(TEXTS)[drawn], 2, 4)  # few draws have less than 2 or more than 4
    mass = [target[np.clip(gc(TEXTS), 2, 4) == g].sum() for g in (2, 3, 4)]
    counts = [int((groups == g).sum()) for g in (2, 3, 4)]
    assert min(mass) * 1500 > 5
    assert chisquare(counts, np.array(mass) * 1500).pvalue > 1e-4
