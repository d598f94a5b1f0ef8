"""Each diagnostic fires on the lines it is about and on nothing else; a healthy log has no finding at any moment."""

from __future__ import annotations

import math

import pytest

from stochflow.look import health
from stochflow.look.health import CHECKS, TITLES, by_seed, diagnose
from stochflow.runs.config import configure


@pytest.fixture
def config():
    return configure("tfbind8", stick=0.25, seeds=3, batch=64).to_dict()


@pytest.fixture
def rows(make_run):
    return make_run.rows()


def names(rows, config):
    return [f.name for f in diagnose(rows, config)]


def change(rows, **values):
    """The same lines with other values in those that have the key, for every seed."""
    out = []
    for row in rows:
        new = dict(row, seeds=dict(row.get("seeds", {})))
        for key, value in values.items():
            if key in row:
                new[key] = value
                new["seeds"].pop(key, None)
        out.append(new)
    return out


def test_a_healthy_log_has_no_finding_at_any_moment(rows, config):
    for count in range(len(rows) + 1):
        assert names(rows[:count], config) == []


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("log_z_lag", {"log_z_learned": 4.0}),
        ("policy_collapse", {"kl_target_model": 5.0}),
        ("policy_collapse", {"entropy": 0.01, "excess_tv": 0.5}),
        ("loss_at_floor", {"excess_tv": 0.2}),
        ("dynamics_not_learned", {"dynamics_nll": 0.8}),
        ("gradient_explosion", {"grad_norm": 50.0, "elbo": 5.0}),
        ("gradient_explosion", {"finite": 0.0}),
        ("reward_saturation", {"mean_log_reward": 3 * math.log(1e-3) + 0.01}),
        ("reward_saturation", {"sample_score": 0.9, "top_score": 0.9}),
        ("exploration_too_low", {"log_z_estimate": 8.0}),
    ],
)
def test_each_fires_on_what_it_is_about(rows, config, name, values):
    found = diagnose(change(rows, **values), config)
    assert name in [f.name for f in found]
    finding = next(f for f in found if f.name == name)
    assert finding.step == 1000
    assert finding.means.endswith(".")
    assert str(finding).startswith(TITLES[name])
    assert finding.to_json()["remedy"] == finding.remedy


def test_stale_replay_is_known_from_the_ring_and_its_rate(rows, config):
    config["train"] |= {"batch": 64, "replay": 0.9, "replay_size": 10_000}  # 6 fresh a step: 1667 steps to turn over
    assert names(rows, config) == []  # after 1000 steps they are 500 old on average, at the limit
    rows[-1]["step"] = 1200
    assert names(rows, config) == ["replay_staleness"]
    config["train"]["replay_size"] = 3_000  # the remedy
    assert names(rows, config) == []


def test_one_bad_seed_of_three_is_found_though_the_median_is_well(rows, config):
    rows[-1]["seeds"]["log_z_learned"] = [9.0, 9.0, 2.0]
    assert names(rows, config) == ["log_z_lag"]
    rows[-1]["seeds"]["log_z_learned"] = [9.0, 9.0, 9.0]
    rows[-1]["seeds"]["dynamics_nll"] = [0.69, 0.69, 0.80]
    assert names(rows, config) == ["dynamics_not_learned"]


def test_a_seed_of_the_noise_model_is_held_against_its_own_sample(rows, config):
    """Samples differ by more than the threshold; what counts is the gap within a seed."""
    rows[-1]["seeds"] |= {"dynamics_nll": [0.60, 0.65, 0.70], "dynamics_nll_true": [0.595, 0.645, 0.695]}
    assert names(rows, config) == []


def test_a_seed_of_log_z_is_held_against_its_own_sample(rows, config):
    """Estimates differ by more than the threshold where the seeds visit different parts; what counts is the gap within a seed."""
    rows[-1]["seeds"] |= {"log_z_estimate": [9.1, 9.1, 7.9], "log_z_learned": [9.1, 9.1, 7.8], "elbo": [9.0, 9.0, 7.7]}
    assert names(rows, config) == ["exploration_too_low"]  # log Z is 9.16
    rows[-1]["seeds"] |= {"log_z_estimate": [9.1, 9.1, 9.1], "log_z_learned": [9.1, 9.1, 7.5], "elbo": [9.0, 9.0, 9.0]}
    (finding,) = diagnose(rows, config)
    assert (
        finding.saw == "learned log Z is 7.50, and the samples put it between 9.00 and 9.10 (seed 2; in 1 of 3 seeds)"
    )


def test_a_log_z_that_follows_a_policy_far_from_its_target_does_not_lag(rows, config):
    """Then mean log-weight and log mean weight are far apart, and a balance loss wants the first: so begins the default run of `bits`."""
    far = change(rows, elbo=5.0, log_z_learned=5.2)
    assert "log_z_lag" not in names(far, config)
    assert "log_z_lag" in names(change(far, log_z_learned=3.9), config)
    assert "log_z_lag" in names(change(far, log_z_learned=10.5), config)


def test_few_effective_samples_are_a_collapse_only_if_they_repeat_themselves(rows, config):
    """Before anything is learned the weights of a large space are those of a few samples, all different."""
    wrong = [r | {"ess": 0.001, "distinct": 1.0} if "elbo" in r else r for r in change(rows, excess_tv=0.5)]
    assert "policy_collapse" not in names(wrong, config)
    assert "policy_collapse" in names([r | {"distinct": 0.01} if "elbo" in r else r for r in wrong], config)


def test_a_seed_that_collapsed_is_found_though_the_others_are_right(rows, config):
    """Its own distance excuses a nearly deterministic policy, not the median's."""
    rows[-1]["seeds"] |= {"entropy": [1.2, 1.2, 0.01], "excess_tv": [0.01, 0.01, 0.5]}
    assert "policy_collapse" in names(rows, config)
    rows[-1]["seeds"]["excess_tv"] = [0.01, 0.01, 0.01]
    assert names(rows, config) == []


def test_one_seed_of_the_log_reads_as_if_it_had_been_alone(rows):
    first, second, third = by_seed(rows)
    assert [r["tv"] for r in second if "tv" in r] == [r["seeds"]["tv"][1] for r in rows if "tv" in r.get("seeds", {})]
    assert [r["step"] for r in third] == [r["step"] for r in rows]
    assert by_seed([{"step": 1, "loss": 2.0}]) == [[{"step": 1, "loss": 2.0, "seeds": {}}]]
    assert by_seed([]) == [[]]
    assert all(r["seeds"] == {} for r in first)


def test_a_gradient_that_is_clipped_while_the_law_comes_nearer_is_no_explosion(rows, config):
    """It only learns more slowly than it could; so do the default run of `gc` and that of peptides without a log Z."""
    clipped = change(rows, grad_norm=50.0, log_z_learned=5.0)
    assert names(change(clipped, elbo=9.0, log_z_learned=9.0), config) == []  # it is there
    looks = [i for i, r in enumerate(clipped) if "elbo" in r]
    for last, fired in ((5.5, False), (5.05, True), (4.0, True)):
        for i, elbo in zip(looks[-2:], (5.0, last), strict=True):
            clipped[i] = clipped[i] | {
                "elbo": elbo,
                "seeds": {k: v for k, v in clipped[i]["seeds"].items() if k != "elbo"},
            }
        assert ("gradient_explosion" in names(clipped, config)) is fired, last


def test_two_looks_at_targets_of_another_sharpness_are_not_held_against_each_other(rows, config):
    far = [{**r, "grad_norm": 99.0, "elbo": 0.0, "seeds": {}} | {"log_z": None} for r in rows]
    far = [{k: v for k, v in r.items() if k != "log_z"} | {"log_z_estimate": 0.1 * r["step"]} for r in far]
    assert "gradient_explosion" in names([r | {"beta": 5.0} for r in far], config)
    assert "gradient_explosion" not in names([r | {"beta": 0.01 * r["step"]} for r in far], config)


def test_a_lower_bound_that_rises_comes_nearer_whatever_one_draw_says_of_log_z(rows, config):
    """The default run of the peptides: its draws are nearly the best there are, and its ELBO rises by a nat from look to look."""
    far = [
        {k: v for k, v in r.items() if k not in ("log_z", "seeds")} | {"grad_norm": 80.0, "beta": 367.0} for r in rows
    ]
    noisy = [r | {"log_z_estimate": 480.0 + r["step"] / 50} for r in far]
    assert "gradient_explosion" not in names([r | {"elbo": 440.0 + r["step"] / 100} for r in noisy], config)
    assert "gradient_explosion" in names([r | {"elbo": 440.0} for r in noisy], config)


def test_draws_that_are_the_best_there_are_are_no_saturation_of_a_found_reward():
    saturated = {"sample_score": 0.9995, "top_score": 1.0, "top_asked": 1.0, "best_asked": 1.0}
    assert "reward_saturation" in names(of_designs(**saturated), LONG)
    assert names(of_designs(**saturated, beta=300.0), LONG) == []


def test_nothing_but_an_explosion_is_judged_before_it_has_warmed_up(rows, config):
    early = [
        dict(r, step=r["step"] // 10) for r in change(rows, log_z_learned=0.0, kl_target_model=9.0, dynamics_nll=2.0)
    ]
    assert names(early, config) == []
    assert names(change(early, finite=0.0), config) == ["gradient_explosion"]
    assert health.verdict([], 100).startswith("Too early")


def test_a_narrow_target_is_no_collapse(rows, config):
    """Where the law is right, a nearly deterministic policy is right as well."""
    assert names(change(rows, entropy=0.01), config) == []


def test_an_objective_without_log_z_is_not_asked_for_it(rows, config):
    config["train"]["objective"] = "logvar"
    assert names(change(rows, log_z_learned=0.0), config) == []


def test_a_biased_objective_is_told_to_change_the_objective(rows, config):
    config["train"]["objective"] = "naive-db"
    (finding,) = diagnose(change(rows, excess_tv=0.2), config)
    assert finding.name == "loss_at_floor"
    assert "--objective" in finding.remedy


@pytest.mark.parametrize(
    "rows", [[], [{"step": 5}], [{"step": 500, "tv": None, "loss": None, "elbo": None}], [{}]], ids=str
)
def test_lines_that_lack_everything_have_no_finding(rows, config):
    assert diagnose(rows, config) == []
    assert diagnose(rows, {}) == []


def test_every_check_has_a_title_and_the_verdict_counts_them(rows, config):
    assert TITLES.keys() == CHECKS.keys()
    assert len(CHECKS) == 12
    assert health.verdict([]) == "Healthy: none of the 12 diagnostics fired."
    found = diagnose(change(rows, log_z_learned=0.0, dynamics_nll=2.0), config)
    assert health.verdict(found) == "2 of 12 diagnostics fired: log Z lags behind, dynamics not learned."


def test_a_reward_that_does_not_see_the_scores_is_found_without_knowing_its_floor(rows, config):
    flat = change(rows, mean_log_reward=math.log(1e-3))
    for i, row in enumerate(flat):
        if "mean_score" in row:
            row["mean_score"] = -3.0 + 0.01 * i
            row["seeds"].pop("mean_score", None)
    own = {**config, "task": {"name": "mine:energy"}}
    assert "reward_saturation" in names(flat, own)
    assert "reward_saturation" not in names(rows, own)


# runs whose space is too large to list ------------------------------------------------------------------------------


def of_designs(**look):
    """The log of a healthy run without a listed law, its last look changed."""
    rows = [
        {"step": s, "loss": 10.0 / s, "mean_score": 0.2 + 0.002 * min(s, 300), "entropy": 1.0, "mean_length": 30.0}
        for s in range(50, 650, 50)
    ]
    good = {
        "elbo": 50.0, "log_z_estimate": 51.0, "ess": 0.2, "samples": 2000, "distinct": 0.98, "sample_score": 0.75,
        "top_score": 0.9, "top_asked": 0.93, "best_asked": 0.95, "objective": "logvar",
    }  # fmt: skip
    rows[-1] |= good | look
    return rows


LONG = {"task": {"name": "mine:oracle"}, "train": {"objective": "logvar"}}


def test_a_good_run_over_a_long_space_has_no_finding():
    assert names(of_designs(), LONG) == []


@pytest.mark.parametrize(
    ("look", "finding"),
    [
        ({"distinct": 0.05, "ess": 0.9}, "repeated_draws"),
        ({"top_score": 0.4, "sample_score": 0.35}, "far_below_the_best"),
        ({"sample_score": 0.3, "top_score": 0.7}, "no_better_than_uniform"),
        ({"log_z_estimate": 90.0, "ess": 0.0006}, "one_sided_log_z"),
    ],
)
def test_each_way_to_fail_over_a_long_space_is_named(look, finding):
    assert finding in names(of_designs(**look), LONG)
    assert finding not in names(of_designs(**look, tv=0.01, excess_tv=0.01), LONG)  # the exact law says it better


def test_a_collapse_onto_one_object_is_found_in_a_listed_space_too():
    """57 % of the probability on one of many objects: KL(target || learned) is below a nat, and the total variation is not."""
    one = {"distinct": 0.05, "commonest": 0.57}
    assert "repeated_draws" in names(of_designs(**one), LONG)
    collapsed = of_designs(**one, tv=0.56, excess_tv=0.56, kl_target_model=0.84, kl_model_target=4.9)
    assert names(collapsed, LONG) == ["repeated_draws"]
    assert names(of_designs(**one, tv=0.02, excess_tv=0.02), LONG) == []  # the target asks for it
    assert names(of_designs(distinct=0.03, commonest=0.05, tv=0.4, excess_tv=0.4), LONG) == []  # a small space
    unknown = of_designs(**one)
    del unknown[-1]["samples"]
    assert names(unknown, LONG) == ["repeated_draws"]


def test_the_best_kept_for_ever_are_not_stale():
    train = {"objective": "logvar", "replay": 0.5, "batch": 64, "replay_size": 100_000}
    rows = [{**r, "step": 20 * r["step"]} for r in of_designs()]
    assert "replay_staleness" in names(rows, {**LONG, "train": train})
    assert "replay_staleness" not in names(rows, {**LONG, "train": {**train, "replay_rank": True}})


def test_a_run_whose_scores_are_all_equal_is_not_green():
    flat = {"sample_score": 0.0, "top_score": 0.0, "top_asked": 0.0, "best_asked": 0.0, "samples": 40, "drawn": 500}
    found = diagnose(of_designs(**flat, random_score=0.0, random_error=0.0), LONG)
    assert [f.name for f in found] == ["no_better_than_uniform"]
    assert found[0].saw == "every object asked about scores 0"


def test_draws_below_random_objects_are_not_called_as_good_as_them():
    known = {"random_score": 0.5, "random_error": 0.01, "top_score": 0.6}
    for mean, words in ((0.505, "are what random objects would give"), (0.2, "are worse than random objects")):
        found = {f.name: f for f in diagnose(of_designs(**known, sample_score=mean), LONG)}
        assert words in found["no_better_than_uniform"].means


def test_a_log_z_of_a_small_look_that_rests_on_one_draw_is_a_bound_from_one_side():
    """With a budget of oracle calls a look is at most 100 draws."""
    small = {"samples": 100, "drawn": 500, "commonest": 0.01}
    assert names(of_designs(**small, log_z_estimate=90.0, ess=0.011), LONG) == ["one_sided_log_z"]
    assert names(of_designs(**small, log_z_estimate=53.0, ess=0.011), LONG) == []
    assert names(of_designs(**small, log_z_estimate=90.0, ess=0.2), LONG) == []
    sharp = {
        "beta": 400.0,
        "random_score": 0.2,
        "random_error": 0.01,
    }  # about 260 nats from random objects to the best asked
    assert names(of_designs(**small, **sharp, log_z_estimate=85.0, ess=0.011), LONG) == []
    assert names(of_designs(**small, **sharp, log_z_estimate=95.0, ess=0.011), LONG) == ["one_sided_log_z"]


def test_a_remedy_that_was_taken_is_not_named_again():
    taken = {
        "objective": "logvar",
        "search": "population",
        "replay": 0.5,
        "net": "transformer",
        "hidden": 64,
        "oracle_calls": 900,
    }
    known = {"random_score": 0.2, "random_error": 0.01, "sample_score": 0.21, "top_score": 0.4, "beta": 30.0}
    first = {f.name: f.remedy for f in diagnose(of_designs(**known), {**LONG, "train": taken})}
    assert first["no_better_than_uniform"] == "more --oracle-calls, or a wider net (--hidden 128)"
    assert "--net transformer" not in first["far_below_the_best"]
    plain = {f.name: f.remedy for f in diagnose(of_designs(**known | {"beta": None}), LONG)}
    for words in ("--beta auto", "--search population", "more --steps", "--net transformer"):
        assert words in plain["no_better_than_uniform"]


def test_a_run_that_has_hardly_begun_is_not_judged_by_its_draws():
    early = of_designs(sample_score=0.3, top_score=0.4)
    del early[-1]["objective"]
    assert names(early, LONG) == []
    late = [{**r, "step": 2 * r["step"]} for r in early]
    assert "no_better_than_uniform" in names(late, LONG)


def test_a_small_look_is_not_read_as_saturation_and_shows_a_collapse(rows, config):
    """With a budget at most 100 draws are scored, of which the 100 best are all; 500 are drawn to see whether they repeat."""
    small = {"samples": 40, "drawn": 500, "commonest": 0.01}
    assert names(of_designs(**small, sample_score=0.8, top_score=0.8), LONG) == []
    assert names(of_designs(**small | {"commonest": 0.57}, distinct=0.3), LONG) == ["repeated_draws"]
    assert names(of_designs(**small, distinct=0.05), LONG) == ["repeated_draws"]
    assert "reward_saturation" in names(of_designs(sample_score=0.9, top_score=0.9), LONG)


def test_draws_are_held_against_random_objects_and_not_against_a_batch_of_the_best():
    searched = {**LONG, "train": {"objective": "logvar", "replay": 0.5, "search": "population"}}
    good = of_designs()
    good[0]["mean_score"] = 0.8  # replayed ones and children, as good as the draws at the end
    assert names(good, searched) == []
    known = {"random_score": 0.2, "random_error": 0.01}
    assert names([*good[:-1], good[-1] | known], searched) == []
    uniform = good[-1] | known | {"sample_score": 0.215, "top_score": 0.4}
    assert "no_better_than_uniform" in names([*good[:-1], uniform], searched)
    assert "no_better_than_uniform" in names([uniform | {"step": 40}], searched)  # a short run that has ended
