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
            "What training notes in every line of `metrics.jsonl` besides: `loss`, `dynamics_loss`, `grad_norm` and `dynamics_grad_norm` (before clipping),",
            "`log_z_learned`, `mean_score`, `mean_log_reward`, `mean_length`, `entropy` of the policy per step in nats, `finite` (1 where loss and gradient are),",
            "`oracle_calls`, `step`, `time` in seconds.",
            "",
        ]
    )


PAGES = {"commands.md": commands, "metrics.md": metrics}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (DOCS / page).write_text(make())
        print(DOCS / page)
    sys.exit(0)
