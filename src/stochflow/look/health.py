"""Is a run well? A handful of named diagnostics over the lines of `metrics.jsonl` and the run's `config.json`.

Each is a pure function that looks at what was logged so far and answers with a `Finding` (what was seen, what it means,
what to try) or with None. Of a run of several seeds each seed is asked for itself: one that is ill is a finding, and a median
would hide it. Nothing here needs torch, so the report, the live view and the command line all ask the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard

from stochflow.look import health_designs

Row = dict[str, Any]
Level = Literal["warning", "serious"]

WARM_UP = 200  # steps before which only an explosion is looked for: every run begins far away
FAR_LOG_Z = 1.0  # nats between the learned log Z and the one the samples imply
MISSED = 1.0  # nats of KL(target || learned) from which the law has lost a part of the target
FEW = 3.0  # effective number of ways from which a policy counts as collapsed
REPEATING = 0.5  # share of different objects in a sample below which it repeats itself
EXCESS = 0.02  # TV above what the world allows that is worth a word
STALLED = 0.9  # the loss of the newer half over that of the older one: above it, it no longer falls
SMALL = 0.01  # a loss this fraction of the first one has done what it can, even if it still falls
NOISE_GAP = 0.02  # nats by which a model of the noise may exceed the entropy of the true channel
SPIKE = 100.0  # a gradient this many times its usual size
NEARER = 0.1  # nats by which a law must come nearer between two looks to count as learning
OLD = 500.0  # steps of age at which a replayed trajectory speaks of another policy
ALIKE = 3  # lines of the log in a row with the very same mean reward, of batches whose scores differ
FLAT = 0.05  # nats of log-reward above the floor from which a reward still tells objects apart
UNSEEN = 0.2  # nats of log Z that the policy's own samples miss: a fifth of the target's mass


@dataclass(frozen=True)
class Finding:
    """One diagnostic that fired."""

    name: str  # a key of CHECKS
    level: Level
    saw: str  # the figures
    means: str
    remedy: str
    step: int

    @property
    def title(self) -> str:
        return TITLES[self.name]

    def __str__(self) -> str:
        return f"{self.title} (step {self.step}): {self.saw}. {self.means} Try {self.remedy}."

    def to_json(self) -> dict[str, Any]:
        fields = ("name", "level", "saw", "means", "remedy", "step")
        return {"title": self.title, **{f: getattr(self, f) for f in fields}}


def diagnose(rows: Sequence[Row], config: dict[str, Any]) -> list[Finding]:
    """Everything that is wrong with a run as far as its log tells; `config` is what `config.json` holds."""
    logs = [_Log(of_one, config) for of_one in by_seed(rows)]
    found = []
    for check in CHECKS.values():
        answers = [(i, check(log)) for i, log in enumerate(logs) if log.rows]
        fired = [(i, f) for i, f in answers if f is not None]
        if fired:
            i, finding = max(fired, key=lambda x: x[1].level == "serious")  # the first of the most serious
            alike = len(fired) == len(logs) and all(f.saw == finding.saw for _, f in fired)
            found.append(
                finding
                if alike
                else replace(finding, saw=f"{finding.saw} ({_which(i, len(fired), len(logs), config)})")
            )
    return found


def by_seed(rows: Sequence[Row]) -> list[list[Row]]:
    """The log of each seed as if it had been alone: its own values in the place of the medians."""
    count = max((len(v) for r in rows for v in (r.get("seeds") or {}).values()), default=1)
    return [
        [{**r, **{k: v[i] for k, v in (r.get("seeds") or {}).items() if i < len(v)}, "seeds": {}} for r in rows]
        for i in range(count)
    ]


def _which(i: int, fired: int, count: int, config: dict[str, Any]) -> str:
    seed = int(config.get("train", {}).get("seed", 0)) + i
    where = (
        f"in {fired} of {count} seeds" if fired < count else "in both seeds" if count == 2 else f"in all {count} seeds"
    )
    return f"seed {seed}; {where}"


def verdict(findings: Sequence[Finding], step: int = WARM_UP) -> str:
    """One sentence over all diagnostics, as of this step."""
    if not findings and step < WARM_UP:
        return f"Too early to tell: the diagnostics begin at step {WARM_UP}."
    if not findings:
        return f"Healthy: none of the {len(CHECKS)} diagnostics fired."
    names = ", ".join(f.title for f in findings)
    return f"{len(findings)} of {len(CHECKS)} diagnostics fired: {names}."


class _Log:
    """The rows with the few questions that the diagnostics ask of them."""

    def __init__(self, rows: Sequence[Row], config: dict[str, Any]):
        self.rows = [r for r in rows if isinstance(r.get("step"), int)]
        self.train: dict[str, Any] = config.get("train", {})
        self.task: dict[str, Any] = config.get("task", {})
        self.looks = [
            r for r in self.rows if _number(r.get("elbo")) or _number(r.get("tv")) or r.get("unscored") is True
        ]

    @property
    def step(self) -> int:
        return self.rows[-1]["step"]

    @property
    def look(self) -> Row:
        """The last evaluation once the run has warmed up, else nothing."""
        return self.looks[-1] if self.looks and self.looks[-1]["step"] >= WARM_UP else {}

    @property
    def ended(self) -> Row:
        """The last evaluation once the run has warmed up or ended (only a final one names the objective), else nothing."""
        return self.look or (self.looks[-1] if self.looks and "objective" in self.looks[-1] else {})

    def last(self, key: str, count: int) -> list[float]:
        return [r[key] for r in self.rows if _number(r.get(key))][-count:]

    def find(self, name: str, level: Level, saw: str, means: str, remedy: str) -> Finding:
        return Finding(name, level, saw, means, remedy, self.step)


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# the diagnostics ------------------------------------------------------------------------------------------------


def log_z_lag(log: _Log) -> Finding | None:
    """The learned log Z against what the weights of the samples say it is.

    For the policy as it is, a balance loss is least where log Z is the mean log-weight (the ELBO); for a perfect one that is the log of
    the mean weight. Between the two log Z follows the policy, however far that still is from the target.
    """
    word = str(log.train.get("objective", "db")).removesuffix("-head")
    if word not in ("tb", "db", "subtb", "stb", "sdb", "ssubtb"):
        return None  # the others learn no log Z, or one that is biased by construction
    row = log.look
    high, learned = (
        row.get("log_z_estimate"),
        row.get("log_z_learned"),
    )  # of what the policy visits: what it does not is another finding
    if not _number(high) or not _number(learned):
        return None
    elbo = row.get("elbo")
    low = min(elbo, high) if _number(elbo) else high
    if low - FAR_LOG_Z <= learned <= high + FAR_LOG_Z:
        return None
    return log.find(
        "log_z_lag",
        "serious",
        f"learned log Z is {learned:.2f}, and the samples put it between {low:.2f} and {high:.2f}",
        "Until log Z has arrived, every residual pushes all probabilities the same way, and the law itself is hardly learned.",
        "a larger --lr, more --steps, or --objective logvar, which needs no log Z",
    )


def policy_collapse(log: _Log) -> Finding | None:
    """Almost no ways left, or a part of the target lost while the rest is matched."""
    row = log.look
    if not row:
        return None
    remedy = "more exploration (--explore 0.3 --explore-tau 1000), a smaller --lr, a smaller reward exponent, or --replay 0.5"
    lost, spread = row.get("kl_target_model"), row.get("kl_model_target")
    if _number(lost) and lost > MISSED and _number(spread) and spread < lost / 3:  # untrained, the two are of one size
        return log.find(
            "policy_collapse",
            "serious",
            f"KL(target || learned) is {lost:.2f} nats but KL(learned || target) only {spread:.2f}",
            "The policy draws from a part of the target and has given up the rest.",
            remedy,
        )
    excess = row.get("excess_tv") if _number(row.get("excess_tv")) else row.get("tv")
    if _number(excess) and excess < 0.1:
        return None  # a policy may be nearly deterministic because the target is
    entropy, length = row.get("entropy"), row.get("mean_length")
    share, samples, distinct = row.get("ess"), row.get("samples"), row.get("distinct")
    few = _number(samples) and samples < health_designs.FEW
    ways = math.exp(min(entropy * length, 50.0)) if _number(entropy) and _number(length) else math.inf
    if not few and _number(share) and _number(samples) and _number(distinct) and distinct < REPEATING:
        ways = min(
            ways, share * samples
        )  # few effective samples that are all different are far from the target, not collapsed
    if ways >= FEW:
        return None
    return log.find(
        "policy_collapse",
        "serious",
        f"the policy has about {max(ways, 1):.1f} effective ways left",
        "It repeats itself: a single object, or a handful, whatever the target asks for.",
        remedy,
    )


def loss_at_floor(log: _Log) -> Finding | None:
    """The loss has fallen as far as it will, and yet the law stays further away than the world allows."""
    row = log.look
    excess = row.get("excess_tv")
    losses, distances = log.last("loss", 12), [r["excess_tv"] for r in log.looks if _number(r.get("excess_tv"))][-2:]
    if not _number(excess) or excess <= EXCESS or len(losses) < 8 or len(distances) < 2:
        return None
    half = len(losses) // 2
    old, new = _median(losses[:half]), _median(losses[half:])
    first = next(r["loss"] for r in log.rows if _number(r.get("loss")))
    floored = (STALLED * old <= new < first) or new <= SMALL * first
    if not floored or distances[-1] < STALLED * distances[-2]:
        return None
    limit = row.get("limit_tv")
    word = str(log.train.get("objective", ""))
    biased = word.startswith(("naive-", "intended-")) or word.endswith("-published")
    at_limit = biased or (_number(limit) and _number(row.get("tv")) and row["tv"] - limit <= EXCESS)
    means = (
        "That is where this objective converges: it is not the optimiser that is stuck."
        if at_limit
        else "A loss at its floor says that the residuals are as small as this network and objective make them, not that the law is right."
    )
    remedy = (
        "another --objective (db, or flow-kl where the target is out of reach)"
        if at_limit
        else "a wider or different trunk (--hidden 256, --net lookup), a larger --batch, or a smaller --lr"
    )
    saw = f"the loss is down to {new:.2g} while the law is {excess:.3f} (TV) further from the target than it could be"
    return log.find("loss_at_floor", "warning", saw, means, remedy)


def dynamics_not_learned(log: _Log) -> Finding | None:
    """The cross-entropy of the noise model against the entropy of the true channel."""
    row = log.look
    have, best = row.get("dynamics_nll"), row.get("dynamics_nll_true")
    if not _number(have) or not _number(best) or have - best <= NOISE_GAP:
        return None
    return log.find(
        "dynamics_not_learned",
        "serious",
        f"the noise model's cross-entropy is {have:.3f} nats, and the channel's own entropy is {best:.3f}",
        "The objective corrects for a noise that is not the world's, so the law it converges to is wrong by as much.",
        "--dynamics tabular, a larger --dynamics-lr, or --dynamics-off-pol, which trains it on more data",
    )


def gradient_explosion(log: _Log) -> Finding | None:
    """Not finite; or, once log Z has had time to arrive, beyond the clip for most lines while the law is far away and comes no nearer, or far beyond the usual size."""
    means = "Steps of this size throw away what was learned; Adam's averages remember them for long."
    remedy = "a smaller --lr (a tenth), a smaller --clip, or a smaller reward exponent"
    broken = [r["step"] for r in log.rows[-5:] if "finite" in r and not (_number(r["finite"]) and r["finite"] >= 1.0)]
    if broken:
        return log.find(
            "gradient_explosion",
            "serious",
            f"the loss or its gradient is not finite at step {broken[-1]}",
            means,
            remedy,
        )
    clip = log.train.get("clip")
    norms = [r["grad_norm"] for r in log.rows if r["step"] > WARM_UP and _number(r.get("grad_norm"))]
    recent = norms[-5:]
    if len(recent) < 5 or not _number(clip):
        return None
    beyond = sum(n > clip for n in recent)
    if beyond > len(recent) / 2 and _far_and_no_nearer(log.looks):  # what is clipped and yet learns is only slowed down
        saw = f"the gradient's norm is above --clip {clip:g} in {beyond} of the last {len(recent)} lines (the largest is {max(recent):.3g})"
        return log.find("gradient_explosion", "serious", saw, means, remedy)
    usual = _median(norms)
    if len(norms) >= 6 and recent[-1] > max(SPIKE * usual, 1.0):
        saw = f"the gradient's norm jumped to {recent[-1]:.3g}, {recent[-1] / usual:.0f} times its usual size"
        return log.find("gradient_explosion", "serious", saw, means, remedy)
    return None


def _far_and_no_nearer(looks: Sequence[Row]) -> bool:
    """Whether log Z - ELBO, the KL of the policy's ways against the target's, is large and did not shrink since the look before.

    Of one target the ELBO alone says whether it shrank: an estimate of log Z may rest on a single draw. Where the reward was
    sharpened in between, the two looks are of different targets, and nothing is said.
    """
    if len(looks) < 2 or len({r.get("beta") if _number(r.get("beta")) else None for r in looks[-2:]}) > 1:
        return False
    before, now = (r.get("elbo") for r in looks[-2:])
    z = looks[-1]["log_z"] if _number(looks[-1].get("log_z")) else looks[-1].get("log_z_estimate")
    return _number(before) and _number(now) and _number(z) and z - now > FAR_LOG_Z and now - before < NEARER


def replay_staleness(log: _Log) -> Finding | None:
    """How old a replayed trajectory is on average, from the size of the ring and the rate at which it turns over."""
    batch, share, size = (log.train.get(k) for k in ("batch", "replay", "replay_size"))
    if log.train.get("replay_rank"):
        return None  # the best are kept for ever on purpose
    if not share or not _number(batch) or not _number(size):
        return None
    replayed = round(share * batch)
    if replayed < 1 or replayed >= batch:
        return None
    age = min(log.step, size / (batch - replayed)) / 2
    if age <= OLD:
        return None
    return log.find(
        "replay_staleness",
        "warning",
        f"{replayed} of {batch} trajectories of each batch are replayed, and they are {age:.0f} steps old on average",
        "Most of the batch was made by a policy that is long gone, and says little about where the present one goes wrong.",
        f"a smaller --replay-size (about {int(OLD * (batch - replayed))}), a smaller --replay, or a larger --batch",
    )


def reward_saturation(log: _Log) -> Finding | None:
    """Rewards that no longer tell objects apart: at the floor, or all at the same height."""
    row = log.look
    if not row:
        return None
    floor, beta = log.task.get("floor", log.task.get("base")), log.task.get("beta", 1.0)
    means = "Where rewards are equal the target is flat, and nothing is left to be learned from them."
    mean = row.get("mean_log_reward")
    # where beta is found while training it is no number here, and the reward has no logarithm of a floor
    if _number(floor) and floor > 0 and _number(mean) and _number(beta) and mean - beta * math.log(floor) < FLAT:
        saw = f"the mean log-reward is {mean:.3f}, and the floor's is {beta * math.log(floor):.3f}"
        remedy = "a lower reward floor, more exploration, or --replay 0.5 --replay-priority, which keeps the few good ones in sight"
        return log.find("reward_saturation", "warning", saw, means, remedy)
    noted = [
        (r["mean_score"], r["mean_log_reward"])
        for r in log.rows[-ALIKE:]
        if _number(r.get("mean_score")) and _number(r.get("mean_log_reward"))
    ]
    scores, rewards = [x for x, _ in noted], [y for _, y in noted]
    if len(noted) == ALIKE and max(rewards) - min(rewards) <= 1e-6 < max(scores) - min(scores):
        saw = f"the mean log-reward is {rewards[-1]:.3f} whatever the scores ({scores[-1]:.4g} on average)"
        remedy = "a reward that tells them apart: scores at or below its floor all count as the floor, so for those that may be negative give reward=Linear()"
        return log.find("reward_saturation", "warning", saw, means, remedy)
    mean_score, top, samples = row.get("sample_score"), row.get("top_score"), row.get("samples")
    many = not _number(samples) or samples >= 2 * health_designs.TOP  # of fewer the 100 best are nearly all
    sharp = (
        _number(row.get("beta")) and row["beta"] > 0
    )  # found while training, so that rewards differ: the draws are the best
    if (
        many
        and not sharp
        and _number(mean_score)
        and _number(top)
        and abs(top - mean_score) <= 1e-3 * max(abs(top), 1e-12)
    ):
        saw = f"the mean score ({mean_score:.4g}) is the mean of the 100 best ({top:.4g})"
        remedy = "a score with a wider range, a larger reward exponent, or a score that saturates later"
        return log.find("reward_saturation", "warning", saw, means, remedy)
    return None


def exploration_too_low(log: _Log) -> Finding | None:
    """The part of the target's mass that the policy's own samples never see."""
    row = log.look
    explore, tau = log.train.get("explore", 0.0), log.train.get("explore_tau", 100.0)
    now = explore / (1 + log.step / tau)
    remedy = "a larger --explore and --explore-tau (0.3 and 1000), --replay 0.5 --replay-priority, or another --seed"
    if _number(row.get("log_z")):
        seen = row.get("log_z_estimate")
        if not _number(seen) or row["log_z"] - seen <= UNSEEN:
            return None
        missing = 1 - math.exp(seen - row["log_z"])
        return log.find(
            "exploration_too_low",
            "serious",
            f"the policy's own samples miss {missing:.0%} of the target's mass, and {now:.1%} of its actions explore",
            "On-policy training cannot correct what it never visits.",
            remedy,
        )
    first, last = log.last("entropy", len(log.rows))[:1], log.last("entropy", 1)
    if row and now < 1e-3 and not log.train.get("replay") and first and last[0] < 0.1 * first[0]:
        return log.find(
            "exploration_too_low",
            "warning",
            f"the entropy fell from {first[0]:.2f} to {last[0]:.2f} nats a step, and {now:.1%} of the actions explore",
            "What the policy has not found by now it will not find.",
            remedy,
        )
    return None


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


CHECKS: dict[str, Callable[[_Log], Finding | None]] = {
    "log_z_lag": log_z_lag,
    "policy_collapse": policy_collapse,
    "loss_at_floor": loss_at_floor,
    "dynamics_not_learned": dynamics_not_learned,
    "gradient_explosion": gradient_explosion,
    "replay_staleness": replay_staleness,
    "reward_saturation": reward_saturation,
    "exploration_too_low": exploration_too_low,
    **health_designs.CHECKS,
}
TITLES = {
    "log_z_lag": "log Z lags behind",
    "policy_collapse": "policy collapse",
    "loss_at_floor": "loss at its floor while the law is not",
    "dynamics_not_learned": "dynamics not learned",
    "gradient_explosion": "gradient explosion",
    "replay_staleness": "stale replay",
    "reward_saturation": "reward saturation",
    "exploration_too_low": "exploration too low",
    **health_designs.TITLES,
}
