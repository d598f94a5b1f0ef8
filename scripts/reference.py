"""The reference pages that are made from the code: `python scripts/reference.py` writes docs/reference/commands.md and metrics.md.

A test makes them again and compares, so that a flag or a figure cannot be added without its page.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path

os.environ |= {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}

from stochflow.cli import commands as cli
from stochflow.cli import design
from stochflow.look.labels import LABELS, cell
from stochflow.runs.config import TASKS

DOCS = Path(__file__).parents[1] / "docs" / "reference"
MADE = "<!-- Made by scripts/reference.py; do not edit by hand. -->"
FORMULAS = {  # p: the law of what comes out; q = R / Z: the target; both over finished objects
    "tv": "½ Σ |p − q|",
    "floor_tv": "½ Σ |p* − q|, p* the best reachable law",
    "excess_tv": "tv − floor_tv",
    "naive_tv": "tv of the policy that would be perfect without noise, run through the noise",
    "limit_tv": "½ Σ |p∞ − q|, p∞ the law at which the objective ends on-policy",
    "floor_tv_reverse_kl": "½ Σ |p' − q|, p' the reachable law of least KL(p‖q)",
    "kl_target_model": "Σ q log(q / p)",
    "kl_model_target": "Σ p log(p / q)",
    "log_z_error": "|log mean w − log Z| over the sample, w = R P_B / p(trajectory)",
    "elbo": "mean of log w over trajectories of the policy; at most log Z",
    "eubo": "mean of log w over trajectories of the target, drawn backwards; at least log Z",
    "spearman": "Spearman's rank correlation of p and R",
    "dynamics_tv": "mean over steps of ½ Σ |K̂(·|s, a) − K(·|s, a)|",
    "modes": "distinct modes in the sample",
    "expected_modes": "Σ over modes of 1 − (1 − p(mode))ⁿ, n the sample's size",
    "sample_score": "mean score of the sample",
    "top_score": "mean score of the 100 best different objects of the sample",
    "diversity": "mean distance of two objects of the sample",
    "best_asked": "largest score of all different objects asked about",
    "top_asked": "mean score of the 100 best different objects asked about",
    "apart_asked": "the same of those that are ceil(length / 5) or more places from every better one, chosen greedily",
    "beta": "sharpness * log |X| / (mean of the best - median of the first scores), until it is frozen",
    "oracle_calls": "objects asked about; of an oracle in Python, different ones",
}

BESIDE = {  # shown with them, or only written: not compared between runs
    "step": "iterations done",
    "time": "seconds since training began; `seconds` in `summary.json`",
    "l1": "Σ |p − q|",
    "mean_l1": "l1 over the number of objects",
    "jsd": "½ KL(p‖m) + ½ KL(q‖m) with m = ½ (p + q)",
    "log_z": "log of the sum of R over all objects",
    "log_z_estimate": "log mean w over the sample",
    "log_z_learned": "the policy's own log Z",
    "ess": "(Σ w)² / (n Σ w²), the effective share of the sample",
    "distinct": "different objects in the sample over its size",
    "commonest": "how often the commonest object of the sample came, over its size",
    "drawn": "objects that were drawn for these two, without asking the oracle",
    "floor_kind": "which distance the floor is the least of: `forward-KL`, `min-TV`",
    "floor_reason": "why there is no floor, or no better one",
    "modes_all": "modes there are",
    "band_high": "upper quartile of the policy's entropies over log(number of legal actions), over the states of the sample",
    "band_low": "lower quartile of the same",
    "entropy_ratio": "r = band_high / (γ band_high + (1 − γ) band_low) with γ = ½",
    "dynamics_nll": "mean of −log K̂(move | state, action) over the steps of the sample",
    "dynamics_nll_true": "the same of the true channel",
    "dynamics_bound": "mean over objects of Σ over steps of ½ Σ |K̂ − K|: at most so much TV comes from the model of the noise",
    "ll_diff": "root mean square over steps of log F(s) + log π + log K̂ − log F(s') − log π_B − log P_B",
    "part_log_flow": "mean of log F(s)",
    "part_log_pf": "mean of log π(action | state)",
    "part_log_k": "mean of log K̂(move | state, action)",
    "part_end_log_flow": "mean of log F(s')",
    "part_log_pa": "mean of log π_B(action | move)",
    "part_log_pb": "mean of log P_B(state | next state)",
    "conditions": "of a conditional task: the figures of each condition by itself",
    "asked_kept": "how many objects `top_asked` is the mean of",
    "apart_count": "how many objects `apart_asked` is the mean of",
    "apart_distance": "places in which those differ at least",
    "diversity_asked": "mean distance of two of the 100 best objects asked about",
    "random_count": "how many of the first objects asked about were random ones",
    "random_score": "their mean score",
    "random_error": "standard error of that mean",
    "random_top": "what random draws would reach as `top_asked` with as many calls, estimated from these",
    "retried": "tries of the oracle that had to be repeated",
    "from_cache": "answers that were taken from a shared file and do not count as calls",
    "without_score": "objects to which the oracle gave no score (`--on-nan`)",
    "beta_frozen": "whether beta is fixed for good",
    "law": "the law that is drawn from, in words, where beta was found while training",
    "caution": "what the objective does not promise",
    "samples": "objects in the sample of each seed",
    "seeds": "figures of each seed, where there are several",
    "objective": "the objective",
    "net": "the trunk",
    "engine": "which engine ran which part, and why not a faster one",
    "chosen": "the settings that were chosen for the task, in words",
    "loss": "the objective's loss, as all that follows of the iteration of this line",
    "dynamics_loss": "the noise model's loss",
    "grad_norm": "norm of the gradient of policy and flow, before clipping",
    "dynamics_grad_norm": "norm of the gradient of the noise model, before clipping",
    "mean_score": "mean score of the batch",
    "mean_log_reward": "mean log R of the batch",
    "mean_length": "mean number of steps of the batch",
    "entropy": "mean entropy of the policy per step, in nats",
    "finite": "1 where loss and gradient are finite",
    "entropy_high": "upper quartile of the batch's normalised entropies (`sgfn-kl`)",
    "entropy_low": "lower quartile of the same",
    "r_gamma": "the entropy ratio, with `--gamma`",
    "kl": "mean over states of KL(f‖b), outflow against backward inflow ([the mathematics](../method.md))",
    "kl_adjusted": "kl − log r_gamma",
    "kl_part": "what the entropy-ratio term adds to the loss",
}


def said(words: list[str]) -> str:
    """What a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli._dispatch(words)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()]
    return "\n".join(lines).strip()


def block(words: list[str]) -> str:
    return f"```text\n{said([*words, '--help'])}\n```"


def commands() -> str:
    """docs/reference/commands.md"""
    parts = [
        "# Commands and flags",
        MADE,
        "Every command answers `--help` in under a second. Exit codes: 0 done, 1 our fault (what was computed is saved), 2 yours (one "
        "sentence says what, where and what to do), 130 interrupted with everything saved.",
        "## stochflow",
        f"```text\n{said(['--help'])}\n```",
        "## train",
        "The flags of the task come first, then those of training, which are the same for every task.",
        block(["train", "grid"]),
        "## The tasks' own flags",
        "`floor TASK` takes them alone, `train`, `sweep` and `doctor` beside those of training.",
    ]
    for name in TASKS:
        parts += [f"### {name}", block(["floor", name])]
    for usage in cli.COMMANDS:
        name = usage.split()[0]
        if name in ("train", "floor"):
            continue
        parts += [f"## {name}"]
        if name == "sweep":
            parts += ["Besides the task's flags and those of training:", _only_own(said(["sweep", "grid", "--help"]))]
        else:
            parts.append(block([name]))
        if name == "design":
            for subcommand in re.findall(r"^  (\w+) [A-Z]+ ", design.USAGE, flags=re.M):
                parts += [f"### design {subcommand}", block(["design", subcommand])]
    return "\n\n".join(parts) + "\n"


def _only_own(text: str) -> str:
    """A command's own options, without those of the task and of training."""
    return f"```text\n{text.partition(chr(10) + ' task options')[0].strip()}\n```"


def metrics() -> str:
    """docs/reference/metrics.md"""
    better = {-1: "lower", 0: "", 1: "higher"}
    rows = [
        "| " + " | ".join(cell(text) for text in (f"`{key}`", x.words, FORMULAS[key], better[x.better])) + " |"
        for key, x in LABELS.items()
    ]
    return "\n".join(
        [
            "# Metrics",
            "",
            MADE,
            "",
            "The keys are those of `summary.json` and `metrics.jsonl`. p is the law of what comes out (policy and noise), q = R / Z the target, sums run over",
            "finished objects. With several seeds each key is a median, and `KEY_low`, `KEY_high` are its 95 % bootstrap interval. Where the space can be listed",
            "the figures of laws are exact; figures of samples come from the number of objects in `samples`.",
            "",
            "| key | figure | formula | better |",
            "|---|---|---|---|",
            *rows,
            "",
            "## Beside them",
            "",
            "What a run writes down besides, some of it only at the end or with the settings that it belongs to. w are the weights of the sample as above,",
            "K̂ the learned noise, F the learned flow.",
            "",
            "| key | formula |",
            "|---|---|",
            *(f"| `{key}` | {cell(words)} |" for key, words in BESIDE.items()),
            "",
        ]
    )


PAGES = {"commands.md": commands, "metrics.md": metrics}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (DOCS / page).write_text(make())
        print(DOCS / page)
    sys.exit(0)
