"""The economy of a slow oracle in a run: budgets, what was asked, known starts, and a reward found while training."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch

import stochflow
from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.law.verdict import remarks
from stochflow.look.health import diagnose
from stochflow.look.report.curves import score
from stochflow.look.report.files import RunFiles
from stochflow.look.report.pages import page as page_of
from stochflow.runs import defaults
from stochflow.runs.asked import best_of_many
from stochflow.runs.config import Train
from stochflow.runs.experiment import open_run, resume
from stochflow.scores.oracles import Cached, Host, Spent
from stochflow.scores.rewards import Default, Linear, Sharpening
from stochflow.worlds.rules import EditBudget, Rules
from stochflow.worlds.strings import Strings


class Counting:
    """The share of A, and every text it was asked about."""

    def __init__(self):
        self.asked: list[str] = []

    def __call__(self, texts):
        self.asked += texts
        return [t.count("A") / len(t) for t in texts]


def small(**more):
    return {"hidden": 16, "layers": 1, "log_every": 5, "save_every": 10, "device": "cpu"} | more


def test_a_budget_is_never_exceeded_and_everything_asked_is_kept(tmp_path):
    oracle = Counting()
    done = stochflow.train(
        stochflow.strings_task(oracle, "ACGT", 20), out=tmp_path / "run", oracle_calls=333, **small()
    )
    assert len(oracle.asked) == len(set(oracle.asked)) == 333 - (333 - done.summary["oracle_calls"])
    assert 300 < done.summary["oracle_calls"] <= 333
    kept = [json.loads(line) for line in (tmp_path / "run" / "oracle.jsonl").read_text().splitlines()]
    assert [k["text"] for k in kept] == oracle.asked
    before = len(oracle.asked)
    open_run(tmp_path / "run", task=stochflow.strings_task(oracle, "ACGT", 20)).measure(final=True)
    assert len(oracle.asked) == before  # the final look again asks about what is known
    opened = open_run(tmp_path / "run", task=stochflow.strings_task(oracle, "ACGT", 20))
    first = list(opened.sample(30))  # drawing is not training: it may ask, and what it asked is kept
    more = len(oracle.asked)
    assert list(open_run(tmp_path / "run", task=stochflow.strings_task(oracle, "ACGT", 20)).sample(30)) == first
    assert before <= more == len(oracle.asked)
    longer = resume(tmp_path / "run", steps=1100, task=stochflow.strings_task(oracle, "ACGT", 20))
    assert longer.summary["oracle_calls"] <= 333


def test_a_spent_run_ends_again_where_others_have_asked_more_since(tmp_path):
    """The answers of others would take it further, to objects that the look of a later step could not ask about."""
    oracle = Counting()
    task = stochflow.strings_task(oracle, "AC", 10)
    how = small(oracle_cache=str(tmp_path / "shared.jsonl"), search="none", replay=0.0, net="mlp", objective="tb")
    first = stochflow.train(task, out=tmp_path / "run", batch=2, oracle_calls=200, look=40, **how)
    stochflow.train(task, out=tmp_path / "other", batch=16, steps=120, seed=7, explore=1.0, look=1, **how)
    asked = len(oracle.asked)
    again = resume(tmp_path / "run", steps=1000, task=task)
    assert len(oracle.asked) == asked
    for key in ("step", "oracle_calls", "elbo"):
        assert again.summary[key] == first.summary[key]


def test_what_the_budget_still_allows_is_asked_and_stored_before_it_ends(tmp_path):
    oracle = Counting()
    cached = Cached(Host(oracle, Strings("ACGT", 3)), tmp_path / "answers.jsonl")
    cached.budget = 3
    assert cached.raw(["AAA", "CCC", "AAA"]) == [1.0, 0.0, 1.0]
    with pytest.raises(Spent, match="budget of 3"):
        cached.raw(["AAC", "GGG"])
    assert oracle.asked == ["AAA", "CCC", "AAC"]
    again = Cached(Host(oracle, Strings("ACGT", 3)), tmp_path / "answers.jsonl")
    assert again.known == {"AAA": 1.0, "CCC": 0.0, "AAC": 2 / 3}
    assert again.paid == 3


def test_the_best_asked_stand_beside_the_draws(tmp_path):
    oracle = Counting()
    done = stochflow.train(
        stochflow.strings_task(oracle, "ACGT", 20), out=tmp_path / "run", oracle_calls=600, **small()
    )
    with (tmp_path / "run" / "samples.csv").open() as file:
        rows = list(csv.DictReader(file))
    asked = [r for r in rows if r["origin"] == "asked"]
    best = sorted({t: t.count("A") / 20 for t in oracle.asked}.items(), key=lambda x: (-x[1], x[0]))[:100]
    assert [(r["sequence"], float(r["score"])) for r in asked] == [(t, pytest.approx(s)) for t, s in best]
    assert {r["origin"] for r in rows} == {"asked", "draw"}
    assert done.summary["top_asked"] == pytest.approx(sum(s for _, s in best) / 100)
    assert done.summary["best_asked"] == pytest.approx(best[0][1])
    assert done.summary["apart_count"] <= 100
    assert "--search population" in done.summary["chosen"]


def test_known_sequences_are_asked_first(tmp_path):
    oracle = Counting()
    known = tmp_path / "known.txt"
    known.write_text("A" * 20 + "\n" + "AC" * 10 + "\n")
    stochflow.train(
        stochflow.strings_task(oracle, "ACGT", 20), out=tmp_path / "run", oracle_calls=150, start=str(known), **small()
    )
    assert {"A" * 20, "AC" * 10} <= set(oracle.asked[:130])
    (tmp_path / "bad.txt").write_text("AXA\n")
    with pytest.raises(UserError, match=r"--start .*bad.txt"):
        stochflow.train(
            stochflow.strings_task(oracle, "ACGT", 20), out=tmp_path / "no", start=str(tmp_path / "bad.txt"), **small()
        )


def test_a_setting_that_was_given_is_left_alone_and_short_strings_are_listed(tmp_path):
    task = stochflow.strings_task(Counting(), "ACGT", 20)
    done = stochflow.train(task, out=tmp_path / "a", steps=4, search="none", objective="tb", **small())
    train = done.experiment.config.train
    assert (train.search, train.objective, train.steps) == ("none", "tb", 4)
    short = stochflow.train(stochflow.strings_task(Counting(), "ACGT", 4), out=tmp_path / "b", steps=4, **small())
    assert "chosen" not in short.summary
    assert type(short.experiment.task.reward) is Default
    own = stochflow.train(
        stochflow.strings_task(Counting(), "ACGT", 20, reward=Linear(3.0)), out=tmp_path / "c", steps=4, **small()
    )
    assert own.experiment.task.reward == Linear(3.0)


def test_a_run_with_a_found_reward_resumes_bit_for_bit(tmp_path):
    def task():
        return stochflow.strings_task(Counting(), "ACGT", 16)

    more = small(batch=32, children=12, ask_every=2, seeds=2, look=20)
    whole = stochflow.train(task(), out=tmp_path / "whole", steps=24, **more)
    stochflow.train(task(), out=tmp_path / "part", steps=11, **more)
    part = resume(tmp_path / "part", steps=24, task=task())
    one, other = whole.experiment.trainer.state_dict(), part.experiment.trainer.state_dict()
    assert one.keys() == other.keys()
    for name in one:
        if name != "oracle_calls":
            assert torch.equal(one[name].nan_to_num(), other[name].nan_to_num()), name
    assert any(name.startswith("reward.") for name in one)
    assert whole.summary["law"] == part.summary["law"]


def feed(reward: Sharpening, scores: list[float], first: int) -> None:
    reward.observe(torch.tensor(scores), torch.arange(first, first + len(scores)))


def test_a_found_reward_is_as_sharp_as_it_says_and_freezes_by_what_was_seen():
    reward = Sharpening(nats=50.0, sharpness=2.0, best=10, first=100)
    feed(reward, [0.1] * 60 + [0.2] * 40, 0)
    assert float(reward.base) == pytest.approx(0.1)
    assert float(reward.beta) == pytest.approx(2 * 50 / 0.1)
    feed(reward, [0.6] * 60, 100)  # the best moved: sharpened anew, not frozen
    assert float(reward.beta) == pytest.approx(2 * 50 / 0.5)
    assert not bool(reward.frozen)
    feed(reward, [0.3] * 90, 200)  # asked half as many again and the best stayed
    assert bool(reward.frozen)
    before = float(reward.beta)
    feed(reward, [0.9] * 500, 400)
    assert float(reward.beta) == before
    assert "fixed after 250" in reward.describe()
    score = torch.tensor([0.05, 0.1, 0.6])
    assert torch.allclose(reward(score, score), before * torch.tensor([0.1, 0.1, 0.6]))


def test_a_found_reward_is_less_sharp_where_few_would_take_all_the_mass():
    """Its most where the best are alike; half of that where one stands out."""
    betas = []
    for best in ([0.9] * 20, [0.9] + [0.5] * 19):
        reward = Sharpening(nats=50.0, sharpness=2.0, best=20, first=100)
        feed(reward, [0.1] * 80 + best, 0)
        betas.append(float(reward.beta) * float(reward.top - reward.base) / 50)
    assert betas == pytest.approx([2.0, 1.0])


def test_a_found_reward_counts_an_object_once_and_ignores_what_has_no_score():
    reward = Sharpening(nats=10.0, best=5, first=5)
    reward.observe(torch.tensor([1.0, 1.0, 1.0, 0.0, torch.nan]), torch.tensor([7, 7, 7, 8, 9]))
    assert reward.scores[:2].tolist() == [1.0, 0.0]
    assert int(reward.asked) == 2
    with pytest.raises(UserError, match="describe no sharpening"):
        Sharpening(nats=0.0)


def test_beta_auto_is_refused_where_the_space_is_listed(tmp_path):
    task = stochflow.strings_task(Counting(), "ACGT", 3, reward=Sharpening(4.0))
    with pytest.raises(UserError, match="too large to list"):
        stochflow.train(task, out=tmp_path / "run", steps=2, **small())


def test_a_shared_cache_is_read_and_written_and_not_paid_for(tmp_path):
    file, first, second = tmp_path / "shared.jsonl", Counting(), Counting()
    kept = Cached(Host(first, Strings("ACGT", 3)), tmp_path / "one.jsonl")
    kept.share(file)
    assert kept.raw(["AAA", "CCC"]) == [1.0, 0.0]
    other = Cached(Host(second, Strings("ACGT", 3)), tmp_path / "two.jsonl")
    other.share(file)
    other.budget = 1
    assert other.raw(["AAA", "GGG", "CCC"]) == [1.0, 0.0, 0.0]
    assert second.asked == ["GGG"]
    assert (other.paid, len(other.known)) == (1, 3)
    again = Cached(Host(second, Strings("ACGT", 3)), tmp_path / "two.jsonl")
    assert (again.paid, again.known) == (1, other.known)
    assert {json.loads(line)["text"] for line in file.read_text().splitlines()} == {"AAA", "CCC", "GGG"}


def no_score(texts):
    return [None if t.startswith("G") else t.count("A") / len(t) for t in texts]


def test_objects_without_a_score_stop_a_run_or_are_left_out_or_get_the_lowest(tmp_path):
    def go(name, **more):
        return stochflow.train(
            stochflow.strings_task(no_score, "ACGT", 20), out=tmp_path / name, oracle_calls=200, **small(**more)
        )

    with pytest.raises(UserError, match="no score"):
        go("stop")
    for word in ("skip", "floor"):
        done = go(word, on_nan=word)
        kept = [json.loads(line) for line in (tmp_path / word / "oracle.jsonl").read_text().splitlines()]
        blank = [k for k in kept if k.get("nan")]
        assert len(kept) == done.summary["oracle_calls"] <= 200
        assert done.summary["without_score"] == len(blank) > 0
        assert all(k["text"].startswith("G") for k in blank)
        assert {k["score"] for k in blank} == {None if word == "skip" else 0.0} or word == "floor"
        with (tmp_path / word / "samples.csv").open() as file:
            asked = [r for r in csv.DictReader(file) if r["origin"] == "asked"]
        assert word == "floor" or not any(r["sequence"].startswith("G") for r in asked)


def test_rivals_beside_a_run_ask_as_often_and_keep_their_answers(tmp_path):
    done = stochflow.train(
        stochflow.strings_task(Counting(), "ACGT", 20),
        out=tmp_path / "run",
        oracle_calls=300,
        beside="ga,random",
        **small(),
    )
    found = done.summary["beside"]
    assert found.keys() == {"ga", "random"}
    assert found["ga"]["calls"] == found["random"]["calls"] == done.summary["oracle_calls"]
    assert found["ga"]["top_asked"] > found["random"]["top_asked"]
    assert (tmp_path / "run" / "oracle.ga.jsonl").exists()
    with pytest.raises(UserError, match="no such rival"):
        stochflow.train(stochflow.strings_task(Counting(), "ACGT", 20), out=tmp_path / "no", beside="gaa", **small())


def test_few_mutants_of_a_wild_type_are_listed_and_many_are_counted(tmp_path):
    """151 strings at one change, though their beginnings are more than the budget: all of them are asked, once."""
    wild, oracle = "ACGTTGCAAC" * 5, Counting()
    near = stochflow.strings_task(oracle, "ACGT", 50, rules=Rules(EditBudget(wild, 1)))
    done = stochflow.train(near, out=tmp_path / "one", steps=4, oracle_calls=160, **small(net="mlp"))
    assert done.summary["tv"] is not None
    assert done.summary["oracle_calls"] == len(oracle.asked) == 151
    free = stochflow.train(near, out=tmp_path / "free", steps=4, **small(net="mlp"))  # without a budget too
    assert "chosen" not in free.summary
    far = stochflow.strings_task(Counting(), "ACGT", 50, rules=Rules(EditBudget(wild, 4)))
    nats = defaults.log_size(far, Train())
    assert nats == pytest.approx(math.log(sum(math.comb(50, k) * 3**k for k in range(5))))


def test_the_door_writes_each_answer_in_its_kind_so_that_a_run_goes_on(tmp_path):
    """Of the objects asked before the folder is made, some have no score and some come from a shared file."""
    task = stochflow.strings_task(no_score, "ACGT", 20)
    for word in ("skip", "floor"):
        for name in ("first", "again"):
            run, shared = tmp_path / f"{name}-{word}", str(tmp_path / f"{word}.jsonl")
            done = stochflow.train(task, out=run, oracle_calls=150, oracle_cache=shared, on_nan=word, **small())
            longer = resume(run, task=task)
            for key in ("oracle_calls", "without_score", "from_cache"):
                assert longer.summary[key] == done.summary[key]
            kept = [json.loads(line) for line in (run / "oracle.jsonl").read_text().splitlines()]
            assert sum(not k.get("cached", False) for k in kept) == done.summary["oracle_calls"] <= 150
            assert sum(k.get("nan", False) for k in kept) == done.summary["without_score"] > 0
            assert sum(k.get("cached", False) for k in kept) == done.summary["from_cache"]
            assert (done.summary["from_cache"] > 10) == (name == "again")


def test_a_shared_file_with_a_line_cut_short_is_read_and_written(tmp_path):
    file = tmp_path / "shared.jsonl"
    file.write_text('{"text": "AAA", "score": 1.0}\n{"text": "CC')
    for text in ("GGG", "TTT"):
        cached = Cached(Host(Counting(), Strings("ACGT", 3)))
        cached.share(file)
        assert cached.raw(["AAA", text]) == [1.0, 0.0]
        assert cached.paid == 1
    assert [json.loads(line)["text"] for line in file.read_text().splitlines() if line.endswith("}")] == [
        "AAA",
        "GGG",
        "TTT",
    ]


def test_a_shared_file_that_cannot_be_written_is_said_before_anything_is_asked(tmp_path):
    oracle = Counting()
    with pytest.raises(UserError, match="cannot be kept in"):
        stochflow.train(
            stochflow.strings_task(oracle, "ACGT", 20),
            out=tmp_path / "run",
            oracle_cache=str(tmp_path / "missing" / "file.jsonl"),
            **small(),
        )
    assert oracle.asked == []


@pytest.mark.parametrize("word", ["skip", "floor"])
def test_rivals_meet_objects_without_a_score_as_the_run_does(tmp_path, word):
    done = stochflow.train(
        stochflow.strings_task(no_score, "ACGT", 20),
        out=tmp_path / "run",
        oracle_calls=200,
        on_nan=word,
        beside="ga,random,mcmc",
        **small(),
    )
    for row in done.summary["beside"].values():
        assert row["calls"] == done.summary["oracle_calls"]
        assert math.isfinite(row["top_asked"])


class Silent(Counting):
    """Has a score for the first so many objects alone."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def __call__(self, texts):
        known = len(self.asked)
        return [s if known + i < self.most else None for i, s in enumerate(super().__call__(texts))]


def test_rivals_ask_about_nothing_twice_and_stop_nothing(tmp_path):
    """Two that begin with the same random objects share the answers; the end of a run is written though an object has no score."""
    oracle = Silent(260)
    done = stochflow.train(
        stochflow.strings_task(oracle, "ACGT", 20),
        out=tmp_path / "run",
        oracle_calls=200,
        beside="ga,random,mcmc",
        **small(net="mlp"),
    )
    answered = oracle.asked[: oracle.most]
    assert len(oracle.asked) > len(answered) == len(set(answered))
    assert not set(answered) & set(oracle.asked[oracle.most :])
    assert {row["calls"] for row in done.summary["beside"].values()} == {done.summary["oracle_calls"]}


def test_a_final_look_without_any_score_ends_the_run_and_is_told(tmp_path):
    oracle = Silent(150)
    done = stochflow.train(
        stochflow.strings_task(oracle, "ACGT", 20),
        out=tmp_path / "run",
        oracle_calls=160,
        on_nan="skip",
        look=10,
        **small(net="mlp"),
    )
    assert done.summary["unscored"] is True
    assert done.summary["without_score"] >= 10
    assert "elbo" not in done.summary
    with (tmp_path / "run" / "samples.csv").open() as file:
        assert {row["origin"] for row in csv.DictReader(file)} == {"asked"}
    run = RunFiles.read(tmp_path / "run")
    assert run.done
    found = diagnose(run.rows, run.config.to_dict())
    assert [f.name for f in found] == ["far_below_the_best"]
    assert "no object that was drawn at the end has a score" in page_of([run]).lower()


def test_an_oracle_that_answers_at_once_is_held_against_random_strings_too(tmp_path):
    """The shipped peptides: a policy that hardly moves is no better than these, and the report says what random search finds."""
    quick = small(net="mlp", steps=8, look=200, lr=1e-9, batch=24, replay=0.5, children=6, oracle_calls=0)
    done = stochflow.train("peptide", out=tmp_path / "run", search="population", **quick)
    assert done.summary["random_count"] == 500
    assert done.summary["random_error"] < 0.05
    assert [s for s in remarks(done.summary) if "as estimated from 500 random objects" in s]
    run = RunFiles.read(tmp_path / "run")
    assert "no_better_than_uniform" in {f.name for f in diagnose(run.rows, run.config.to_dict())}


class Breaks:
    """Answers so many texts, one call after the other, and then is interrupted."""

    def __init__(self, most: int):
        self.most, self.asked = most, list[str]()

    def __call__(self, texts):
        if len(self.asked) + len(texts) > self.most:
            raise KeyboardInterrupt
        self.asked += texts
        return [t.count("A") / len(t) for t in texts]


def test_a_final_look_that_is_broken_off_keeps_what_was_answered(tmp_path):
    """2,000 draws without a budget, asked in parts of a batch: all parts before the break are on the disk."""
    oracle = Breaks(1000)
    with pytest.raises(KeyboardInterrupt):
        stochflow.train(
            stochflow.strings_task(oracle, "ACGT", 20), out=tmp_path / "run", steps=5, **small(net="mlp", batch=112)
        )
    kept = [json.loads(line)["text"] for line in (tmp_path / "run" / "oracle.jsonl").read_text().splitlines()]
    assert kept == oracle.asked
    assert len(kept) > 1000 - 112
    other = Counting()
    resume(tmp_path / "run", task=stochflow.strings_task(other, "ACGT", 20))
    assert not set(other.asked) & set(kept)


def test_tries_that_were_repeated_are_counted(tmp_path, monkeypatch):
    class Busy(Counting):
        def __call__(self, texts):
            if len(self.asked) > 30 and len(self.asked) % 3 == 0:
                self.asked.append("")  # as if it had been asked
                raise ConnectionError("busy")
            return super().__call__(texts)

    monkeypatch.setattr("stochflow.scores.oracles.time.sleep", lambda s: None)
    oracle = Busy()
    done = stochflow.train(
        stochflow.strings_task(oracle, "ACGT", 20), out=tmp_path / "run", oracle_calls=200, **small()
    )
    assert done.summary["retried"] == oracle.asked.count("") > 0


def test_a_lag_counts_and_sharpens_and_is_not_for_search(tmp_path):
    task = stochflow.strings_task(Counting(), "ACGT", 20)
    done = stochflow.train(task, out=tmp_path / "run", oracle_calls=300, lag=1, **small(net="mlp"))
    assert done.summary["beta"] > 0
    assert done.summary["oracle_calls"] <= 300
    assert "--search" not in done.summary["chosen"]
    with pytest.raises(UserError, match="leave one out"):
        stochflow.train(task, out=tmp_path / "no", lag=1, search="population", **small())


def test_a_found_reward_is_fixed_at_the_latest_after_three_quarters_of_the_budget(tmp_path):
    reward = Sharpening(nats=50.0, best=10, first=100, latest=150)
    feed(reward, [0.1] * 60 + [0.2] * 40, 0)
    feed(reward, [0.6] * 60, 100)  # the best moved, and yet
    assert bool(reward.frozen)
    assert "fixed after 160 answers" in reward.describe()
    done = stochflow.train(
        stochflow.strings_task(Counting(), "ACGT", 30), out=tmp_path / "run", oracle_calls=300, **small(net="mlp")
    )
    assert done.summary["beta_frozen"]


def test_the_report_says_what_was_asked_and_what_other_searches_find(tmp_path):
    done = stochflow.train(
        stochflow.strings_task(Counting(), "ACGT", 20),
        out=tmp_path / "run",
        oracle_calls=300,
        beside="ga",
        **small(net="mlp", eval_every=20),
    )
    said = remarks(done.summary)
    assert [s for s in said if s.startswith("Target: R = exp(")]
    assert [s for s in said if "random search with as many oracle calls" in s]
    assert [s for s in said if s.startswith("Beside it, ga with as many oracle calls: best")]
    run = RunFiles.read(tmp_path / "run")
    looks = [r for r in run.rows if "top_asked" in r]
    assert [r["step"] for r in looks[:-1]] == list(range(20, done.summary["step"], 20))  # as often as --eval-every says
    assert all("distinct" in r for r in looks)
    panel = score(run)
    assert panel is not None
    assert "mean of the 100 best asked" in panel.svg
    page = page_of([run])
    assert all(words.replace("'", "&#39;") in page for words in said)
    assert "<td>asked</td>" in page


def test_what_random_search_finds_is_estimated_from_few_random_objects():
    torch.manual_seed(0)
    scores = torch.randn(400, 48, dtype=torch.float64)
    for calls, tolerance in ((200, 0.1), (2000, 0.35)):
        found = torch.tensor([best_of_many(row, calls) for row in scores]).mean()
        truth = torch.randn(40, calls).topk(100).values.mean()
        assert float(found) == pytest.approx(float(truth), abs=tolerance)
    even = torch.rand(4000, dtype=torch.float64)  # of many the best are seen, and no tail is drawn beyond them
    assert 0.97 < best_of_many(even, 10_000) < 1


def test_what_would_only_fail_at_the_end_is_refused_at_the_door(tmp_path):
    with pytest.raises(UserError, match="the rivals vary strings"):
        stochflow.train("grid", out=tmp_path / "grid", steps=2, beside="ga")
    oracle = Counting()
    with pytest.raises(UserError, match="leaves nothing of --oracle-calls 100"):
        stochflow.train(
            stochflow.strings_task(oracle, "ACGT", 20), out=tmp_path / "run", oracle_calls=100, look=100, **small()
        )
    assert not (tmp_path / "run").exists()


def test_the_default_run_of_a_long_task_that_ships_is_looked_at_to_its_end(tmp_path, capsys):
    """Its beta is a word, `auto`: diagnostics and report read it as it is."""
    out = tmp_path / "run"
    words = f"train peptide --steps 12 --batch 24 --hidden 16 --layers 1 --net mlp --look 40 --eval-every 4 --out {out}"
    assert main(words.split()) == 0
    said = capsys.readouterr().out
    assert "chose " in said
    assert "Target: R = exp(" in said
    run = RunFiles.read(out)
    assert run.config.task.beta == "auto"
    for count in range(len(run.rows) + 1):
        diagnose(run.rows[:count], run.config.to_dict())
    assert (out / "report.html").exists()
