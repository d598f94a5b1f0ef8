"""Orders: what is expected of their making, exactly on tables and simulated elsewhere, and the law over them."""

from __future__ import annotations

import csv
import itertools

import pytest
import torch

from stochflow import Exact, Grid, Linear, Policy, Power, Slip, Task, Trainer, exact_law, floor, train
from stochflow.cli.commands import main
from stochflow.cli.parsing import parse_task
from stochflow.errors import UserError
from stochflow.law.exact import Graph, target_law
from stochflow.runs.config import Config, GridTask, TFBind8Task, configure
from stochflow.runs.tasks import grid_task, peptide_task, tfbind8_task
from stochflow.scores.oracles import Cached, Host, Patient, Table
from stochflow.scores.orders import look_ahead, open_loop_of, orders, prospects
from stochflow.worlds.channels import Confusion
from stochflow.worlds.rules import Homopolymer, Rules
from stochflow.worlds.strings import Strings
from stochflow.worlds.synthesis import Synthesis

ENV = Strings("ABC", 3)
TEXTS = ["".join(t) for t in itertools.product("ABC", repeat=3)]
ROUGH = [[0.9, 0.06, 0.04], [0.1, 0.8, 0.1], [0.05, 0.25, 0.7]]


SQUARE = Power(beta=2.0)


def small(reward=SQUARE, channel=None) -> Task:
    dice = torch.Generator().manual_seed(0)
    return Task(ENV, channel or Confusion(ROUGH), Table(ENV, 0.05 + torch.rand(27, generator=dice)), reward)


def as_texts(task: Task) -> Task:
    """The same scores from a function of texts."""
    return task._replace(oracle=Host(lambda texts: task.oracle(ENV.encode(texts)).tolist(), ENV))


def expected(task: Task, synthesis: Synthesis, power: float = 1.0) -> list[float]:
    score = task.oracle(ENV.encode(TEXTS)).double()
    return [
        float((synthesis.log_probs([x] * 27, TEXTS).exp() * score**power).sum() ** (1 / power)) for x in TEXTS
    ]  # what has another length scores 0


@pytest.mark.parametrize(("insertion", "deletion"), [(0.0, 0.0), (0.05, 0.1)])
def test_the_score_of_an_order_is_what_is_expected(insertion, deletion):
    task, made_by = small(), Synthesis("ABC", ROUGH, insertion, deletion)
    found = orders(task, made_by)
    assert isinstance(found.channel, Exact)
    assert found.oracle(ENV.encode(TEXTS)).tolist() == pytest.approx(expected(task, made_by), abs=1e-6)
    inside = orders(task, made_by, inside=True)
    assert inside.oracle(ENV.encode(TEXTS)).tolist() == pytest.approx(
        [max(v, 0) for v in expected(task, made_by, 2.0)], abs=2e-3 if deletion else 1e-6
    )  # what cannot be scored counts as the floor there


def test_expected_reward_and_reward_of_the_expected_differ():
    task = small()
    made_by = Synthesis("ABC", ROUGH)
    one, other = orders(task, made_by), orders(task, made_by, inside=True)
    states = ENV.encode(TEXTS)
    assert bool((other.oracle(states) > one.oracle(states)).all())  # Jensen, for beta above 1
    score = task.oracle(states).double()
    law = torch.stack([made_by.log_probs([x] * 27, TEXTS).exp() for x in TEXTS])
    reward = other.reward(other.oracle(states), states, None).double().exp()
    assert reward.tolist() == pytest.approx((law @ score**2).tolist(), abs=1e-5)


def test_without_a_synthesis_the_channel_makes_each_letter():
    found = orders(small(channel=Slip(0.3)))
    assert open_loop_of(found.oracle).synthesis.table.tolist()[0] == pytest.approx([0.8, 0.1, 0.1])


@pytest.mark.parametrize("kind", ["texts", "tensors"])
@pytest.mark.parametrize(("insertion", "deletion"), [(0.0, 0.0), (0.05, 0.1)])
def test_simulated_makings_estimate_the_same(kind, insertion, deletion):
    task, made_by = small(), Synthesis("ABC", ROUGH, insertion, deletion)
    exact = orders(task, made_by)
    plain = as_texts(task) if kind == "texts" else task._replace(oracle=lambda s: task.oracle(s))
    found = orders(plain, made_by, makings=4000, seed=2)
    states = ENV.encode(TEXTS)
    gap = found.oracle(states) - exact.oracle(states)
    assert float(gap.abs().max()) < 0.03  # scores spread by about .3, so five standard errors are .024
    assert torch.equal(found.oracle(states[5:6]), found.oracle(states)[5:6])  # a function of the order alone
    other = orders(plain, made_by, makings=400, seed=3, inside=True).oracle(states)
    assert float((other - orders(task, made_by, inside=True).oracle(states)).abs().max()) < 0.1


def test_a_slow_oracle_is_asked_once_about_each_made_string():
    asked: list[str] = []

    def score(texts):
        asked.extend(texts)
        return [t.count("A") / 3 for t in texts]

    found = orders(Task(ENV, Slip(0.3), Host(score, ENV), Power()), makings=200)
    for _ in range(2):
        found.oracle(ENV.encode(TEXTS))
    assert len(asked) == len(set(asked)) <= 27
    wrapped = Cached(Patient(found.oracle))
    assert open_loop_of(wrapped).makings == 200
    look_ahead(open_loop_of(wrapped), TEXTS)
    assert len(asked) <= 27


def test_the_law_over_orders_has_no_floor_and_is_learned():
    """Against enumeration: the target over orders is E[y]^beta, and nothing stands in its way."""
    task = orders(small())
    graph = Graph(ENV)
    wanted = torch.tensor(expected(small(), Synthesis("ABC", ROUGH)), dtype=torch.float64) ** 2
    target = target_law(graph, task)
    at = ENV.index(ENV.encode(TEXTS))
    assert target.target[at].tolist() == pytest.approx((wanted / wanted.sum()).tolist(), abs=1e-6)
    assert floor(task).floor_tv == pytest.approx(0, abs=1e-9)


def test_tfbind8_against_enumeration():
    """One letter after the other, for a few of the 65,536 orders: a sum over all that may be made of it."""
    closed = tfbind8_task(stick=0.25)
    opened = tfbind8_task(stick=0.25, open_loop=True)
    env = closed.env
    texts = ["AGGTATCA", "ATATATAT", "CCCCCCCC", "ACGTACGT"]
    every = env.all_states()[-(4**8) :]
    score = closed.oracle(every).double()
    for text, found in zip(texts, opened.oracle(env.encode(texts)).tolist(), strict=True):
        law = torch.where(every == env.encode([text]), 0.75 + 0.25 / 4, 0.25 / 4).double().prod(1)
        assert float(law.sum()) == pytest.approx(1)
        assert found == pytest.approx(float(law @ score), abs=1e-6)
    assert opened.oracle.modes(every) is None  # a mode of the scores is none of what is expected of orders
    assert floor(opened).floor_tv == pytest.approx(0, abs=1e-9)
    assert floor(closed).floor_tv > 1e-4


def test_prospects_are_those_of_the_exact_law():
    task, made_by = small(), Synthesis("ABC", ROUGH)
    found = prospects(task.oracle, ENV, made_by, TEXTS)
    assert found.makings == 0
    score = task.oracle(ENV.encode(TEXTS)).double()
    for i, x in enumerate(TEXTS):
        law = made_by.log_probs([x] * 27, TEXTS).exp()
        assert float(found.expected[i]) == pytest.approx(float(law @ score))
        assert (
            float(law[score < found.low[i] - 1e-9].sum()) < 0.1 <= float(law[score <= found.low[i] + 1e-7].sum()) + 1e-9
        )
        assert float(found.exact[i]) == pytest.approx(float(law[i]))
    drawn = prospects(as_texts(task).oracle, ENV, made_by, TEXTS, makings=4000)
    assert drawn.makings == 4000
    assert torch.equal(drawn.exact, found.exact)
    assert float((drawn.expected - found.expected).abs().max()) < 0.03


def test_peptides_are_simulated_on_the_device_oracle():
    task = peptide_task(stick=0.1, open_loop=True)
    texts = ["KKLLKKLLKKLL", "ACDEFGHIKLMNPQ"]
    found = task.oracle(task.env.encode(texts))
    seen = look_ahead(open_loop_of(task.oracle), texts)
    assert seen.expected.tolist() == pytest.approx(found.tolist(), abs=1e-5)
    assert seen.makings == 64
    assert seen.exact.tolist() == pytest.approx([(0.9 + 0.1 / 20) ** 12, (0.9 + 0.1 / 20) ** 14])


def test_orders_under_rules_are_bound_and_what_is_made_is_not():
    compiled = Rules(Homopolymer(1)).compile("ABC", 3)
    task = small()._replace(env=compiled.env())
    found = orders(task, Synthesis("ABC", ROUGH))
    allowed = [t for t in TEXTS if compiled.accepts(t)]
    wanted = dict(zip(TEXTS, expected(small(), Synthesis("ABC", ROUGH)), strict=True))
    assert found.oracle(ENV.encode(allowed)).tolist() == pytest.approx([wanted[t] for t in allowed], abs=1e-6)
    assert floor(found).floor_tv == pytest.approx(0, abs=1e-9)
    ruled = Table(compiled.env(), torch.ones(12))
    with pytest.raises(UserError, match="need not meet the rules"):
        orders(task._replace(oracle=ruled))


def test_a_run_over_orders_says_what_to_expect_of_each(tmp_path):
    settings = {"steps": 3, "batch": 16, "hidden": 8, "out": str(tmp_path / "run")}
    done = train("tfbind8", stick=0.25, open_loop=True, **settings)
    assert done.summary["floor_tv"] == pytest.approx(0, abs=1e-9)
    rows = list(csv.DictReader((tmp_path / "run" / "samples.csv").open()))
    assert float(rows[0]["made_exact"]) == pytest.approx(0.8125**8, abs=1e-5)
    assert all(0 < float(r["made_low"]) < float(r["score"]) for r in rows)
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "chance of exact synthesis" in page
    assert "expected score" in page
    assert "All three are exact" in page
    assert main(["sample", str(tmp_path / "run"), "-n", "3", "--simulate", "50", "--out", str(tmp_path / "o.csv")]) == 0
    simulated = list(csv.DictReader((tmp_path / "o.csv").open()))
    assert all(float(r["made_score"]) == pytest.approx(float(r["score"]), abs=1e-5) for r in simulated)


def test_a_run_over_simulated_makings_says_how_many(tmp_path):
    out = str(tmp_path / "run")
    train(orders(as_texts(small()), makings=16), steps=1, batch=4, hidden=8, out=out)
    rows = list(csv.DictReader((tmp_path / "run" / "samples.csv").open()))
    assert {r["makings"] for r in rows} == {"16"}
    assert main(["report", out]) == 0
    assert "16 simulated makings" in (tmp_path / "run" / "report.html").read_text()


def test_folders_from_before_are_closed_loops():
    data = Config(TFBind8Task()).to_dict()
    del data["task"]["open_loop"]
    assert Config.from_dict(data).task == TFBind8Task()
    assert configure("tfbind8").task.open_loop is False


def test_feedback_is_the_closed_loop_in_its_own_words(capsys):
    def read(name, *words):
        return parse_task("floor", name, list(words), [], None).task

    assert read("tfbind8", "--feedback") == TFBind8Task(open_loop=False)
    assert read("grid", "--side", "4", "--feedback") == GridTask(side=4)
    with pytest.raises(UserError, match="exclude one another"):
        read("tfbind8", "--feedback", "--open-loop")
    assert main(["design", "propose", "plates", "--feedback"]) == 2
    assert "no letter of it can be corrected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: orders(grid_task()), "builds Grid"),
        (lambda: orders(small(), Synthesis("ACGT", Slip(0.1))), "written in 'ABC'"),
        (lambda: orders(small(), makings=0), "0 makings"),
        (lambda: orders(small(), unscored=float("nan")), "must be finite"),
        (lambda: orders(small(Power(2.0, ramp=100)), inside=True), "exponent stays the same"),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_a_linear_reward_inside_the_expectation():
    task, made_by = small(Linear(2.0)), Synthesis("ABC", ROUGH)
    found = orders(task, made_by, inside=True)
    states = ENV.encode(TEXTS)
    score = task.oracle(states).double()
    law = torch.stack([made_by.log_probs([x] * 27, TEXTS).exp() for x in TEXTS])
    assert (2 * found.oracle(states)).exp().tolist() == pytest.approx((law @ (2 * score).exp()).tolist(), rel=1e-5)


def test_the_open_loop_law_is_learned():
    from stochflow import DetailedBalance, Known
    from stochflow.nets.mlp import MLP
    from stochflow.training.sources import OnPolicy

    task = orders(small())
    policy = Policy(task.env, MLP(64, 2), seeds=[0])
    trainer = Trainer(task, policy, Known(task.env, task.channel), DetailedBalance(), OnPolicy(task, policy, 128))
    trainer.train(1500)
    graph = Graph(ENV)
    with trainer.averaged():
        law = exact_law(graph, task.channel, policy)
    assert float((law - target_law(graph, task).target).abs().sum()) / 2 < 0.02


def test_a_grid_has_no_open_loop():
    assert isinstance(grid_task().env, Grid)
    with pytest.raises(UserError, match="open_loop"):
        configure("grid", open_loop=True)


@pytest.mark.slow
def test_the_law_of_orders_is_learned_on_tfbind8(tmp_path):
    """Against the law that enumeration gives, exact TV."""
    done = train("tfbind8", stick=0.1, open_loop=True, steps=400, out=str(tmp_path / "run"))
    assert done.summary["floor_tv"] == pytest.approx(0, abs=1e-9)
    assert done.summary["tv"] < 0.06
