"""Campaigns of rounds on landscapes that are known, with a synthesiser that errs or none: which way of choosing a plate is best?

    python benchmarks/campaigns.py run tf-10x128 --out benchmarks/results/campaigns --processes 2
    python benchmarks/campaigns.py table benchmarks/results/campaigns/tfbind8.json
    python benchmarks/campaigns.py plot benchmarks/results/campaigns/*.json

Every arm has the same first data, the same surrogate (an ensemble, refitted each round), the same number of wells and the same
random seeds; arms differ in how they choose. What is measured is the value of the sequence that was made, which is known (the
wells are sequenced). An order of the same sequence is never repeated.

Arms: `random`; `ga` (a genetic algorithm on the surrogate, the best predictions ordered); `adalead` (Sinai et al. 2020: rollouts
of mutants on the surrogate from the best measured); `greedy` (the best predictions of the whole listed space); `gfn-no-noise`
(stochflow without a model of the noise); `ours` (stochflow). Under noise also `greedy-known` and `ours-known`, which choose by
the true values instead of a surrogate: what a model of the noise could bring at most.

Figures of a cell: `made` (mean of the 128 best different sequences made in the campaign), `orders` (mean of the 128 best orders by
their exact expected value), `distance` (mean pairwise distance of the 128 best orders), `best`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

TOP = 128
SHOWN = {
    "tf-10x128": "TFBind8, no noise",
    "tf-slip10-10x128": "TFBind8, slip .1",
    "tf-slip25-10x128": "TFBind8, slip .25",
    "ehrlich-40x128": "Ehrlich (20, 32, 2, 4)",
}
ARMS = ("random", "ga", "adalead", "greedy", "gfn-no-noise", "ours", "greedy-known", "ours-known")
PUBLISHED = {"CbAS": 0.927, "BO-qEI": 0.798, "CMA-ES": 0.953, "Grad-Mean": 0.986}  # one shot of 128, 100th percentile


@dataclass(frozen=True)
class Study:
    """One table: a landscape, a noise rate, and how many rounds of how many wells."""

    name: str
    landscape: str  # tf | ehrlich | rna
    noise: float
    rounds: int
    batch: int


STUDIES = {
    s.name: s
    for s in [
        *[
            Study(f"tf{mark}-{r}x{b}", "tf", noise, r, b)
            for r, b in ((10, 128), (4, 96))
            for mark, noise in (("", 0.0), ("-slip10", 0.1), ("-slip25", 0.25))
        ],
        Study("ehrlich-40x128", "ehrlich", 0.0, 40, 128),
        Study("rna14-10x128", "rna", 0.0, 10, 128),
    ]
}


# landscapes -----------------------------------------------------------------------------------------------------


@dataclass
class Landscape:
    """An alphabet, a length, scores, and what is measured before the first round."""

    alphabet: str
    length: int
    score: Callable[[list[str]], np.ndarray]
    first: Callable[[int], list[str]]
    accepts: Callable[[str], bool] = lambda text: True
    table: np.ndarray | None = None  # of all strings in lexicographic order, where they are listed
    texts: list[str] = field(default_factory=list)
    env: Any = None  # of the strings that are allowed, where a rule is known
    random: Callable[[int], str] | None = None  # one of them, by a number


def tfbind() -> Landscape:
    """SIX6_REF_R1 from the lower half of the table: 32,768 strings, the best of them .439."""
    from stochflow.design.generate import all_texts
    from stochflow.scores.data import tfbind8
    from stochflow.worlds.strings import Strings

    y = tfbind8()
    texts = all_texts(Strings("ACGT", 8))
    at = {t: i for i, t in enumerate(texts)}
    lower = np.argsort(y, kind="stable")[: len(y) // 2]
    return Landscape(
        "ACGT",
        8,
        lambda asked: y[[at[t] for t in asked]],
        lambda seed: [texts[i] for i in lower],
        table=y,
        texts=texts,
    )


def ehrlich(states: int = 20, length: int = 32, motifs: int = 2, size: int = 4, seed: int = 0) -> Landscape:
    """An Ehrlich function (Stanton et al. 2024) whose banned pairs are known, so that no arm orders one. The first data are 128 feasible random walks."""
    from stochflow.scores.ehrlich import Ehrlich
    from stochflow.worlds.strings import Strings

    made = Ehrlich.random(states, length, motifs, size, seed)

    def score(texts: list[str]) -> np.ndarray:
        return np.array(made(texts)) if texts else np.zeros(0)

    def accepts(text: str) -> bool:
        return bool(made.feasible(Strings(made.alphabet, length).encode([text])).item())

    def first(campaign: int) -> list[str]:
        return [made.start(1000 * campaign + i) for i in range(128)]

    return Landscape(made.alphabet, length, score, first, accepts, env=made.env(), random=made.start)


def rna14() -> Landscape:
    """RNA of 14 bases that folds into a hairpin, by ViennaRNA; the first data are 128 random strings."""
    from stochflow.scores.landscapes import RNAFold

    fold = RNAFold("((((......))))")

    def first(campaign: int) -> list[str]:
        rng = np.random.default_rng(1000 + campaign)
        return ["".join(rng.choice(list("ACGU"), 14)) for _ in range(128)]

    return Landscape("ACGU", 14, lambda texts: np.array(fold(texts)), first)


LANDSCAPES = {"tf": tfbind, "ehrlich": ehrlich, "rna": rna14}


# arms -----------------------------------------------------------------------------------------------------------


@dataclass
class State:
    """What an arm sees in a round."""

    world: Landscape
    env: Any
    known: dict[str, float]  # measured sequences
    asked: set[str]  # orders so far
    model: Any  # texts -> Prediction
    channel: np.ndarray  # [K, K] chance of a letter made for a letter ordered
    batch: int
    seed: int

    def open(self, texts: list[str], value: np.ndarray) -> list[str]:
        """The best by value that were never ordered nor measured."""
        out = [
            t
            for t in (texts[i] for i in np.argsort(-value, kind="stable"))
            if t not in self.asked and t not in self.known
        ]
        return list(dict.fromkeys(out))[: self.batch]


def arm_random(s: State) -> list[str]:
    rng = np.random.default_rng(s.seed)
    out: dict[str, None] = {}
    while len(out) < s.batch:
        letters = list(s.world.alphabet)
        draw = s.world.random
        text = "".join(rng.choice(letters, s.world.length)) if draw is None else draw(int(rng.integers(1 << 31)))
        if s.world.accepts(text) and text not in s.asked and text not in s.known:
            out[text] = None
    return list(out)


def arm_ga(s: State) -> list[str]:
    from stochflow.design.generate import Effort, search

    start = sorted(s.known, key=lambda t: -s.known[t])[:256]
    found = search(s.env, s.world.accepts, lambda texts: s.model(texts).mean, start, Effort(), s.seed)
    return s.open(found.texts, found.value)


def arm_adalead(s: State) -> list[str]:
    """Parents within 5 % of the best; recombination at rate .2, mutations at rate 1 / L; rollouts go on while the prediction grows."""
    rng = np.random.default_rng(s.seed)
    best = max(s.known.values())
    ranked = sorted(s.known, key=lambda t: -s.known[t])
    parents = [t for t in ranked if s.known[t] >= best - 0.05 * abs(best)]
    parents = parents if len(parents) > 1 else ranked[:20]
    letters, length = list(s.world.alphabet), s.world.length
    found: dict[str, float] = {}
    calls = 0
    while calls < 20 * s.batch:
        roots = [parents[i] for i in rng.integers(0, len(parents), 64)]
        for i in range(0, len(roots) - 1, 2):  # recombine
            a, b = list(roots[i]), list(roots[i + 1])
            cross = False
            for p in range(length):
                cross ^= rng.random() < 0.2
                if cross:
                    a[p], b[p] = b[p], a[p]
            roots[i], roots[i + 1] = "".join(a), "".join(b)
        value = s.model(roots).mean
        nodes = list(zip(roots, value, strict=True))
        calls += len(roots)
        while nodes and calls < 20 * s.batch:
            children = []
            for root, v in nodes:
                x = list(root)
                for p in np.flatnonzero(rng.random(length) < 1 / length):
                    x[p] = letters[int(rng.integers(len(letters)))]
                child = "".join(x)
                if child != root and s.world.accepts(child):
                    children.append((child, v))
            if not children:
                break
            value = s.model([c for c, _ in children]).mean
            calls += len(children)
            for (child, _), v in zip(children, value, strict=True):
                found[child] = float(v)
            nodes = [(c, v) for (c, before), v in zip(children, value, strict=True) if v >= before]
    out = s.open(list(found), np.array(list(found.values())))
    return out + arm_random(s)[: s.batch - len(out)]


def arm_greedy(s: State) -> list[str]:
    return s.open(s.world.texts, s.model(s.world.texts).mean)


def _ours(s: State, channel: np.ndarray | None) -> list[str]:
    """Strings drawn in proportion to the sharpened expected gain in the mean of the best `TOP`, the best of them ordered.

    With a `channel` an order is worth the gain expected of what is made of it, which is none where that is known already.
    """
    from stochflow.design.acquisition import ExpectedImprovement, log_target, on_its_scale
    from stochflow.design.batch import spread
    from stochflow.design.generate import Effort
    from stochflow.design.model import through
    from stochflow.design.offers import candidates
    from stochflow.design.surrogates import Prediction

    ranked = sorted(s.known.values(), reverse=True)
    kind, bar = ExpectedImprovement(), ranked[min(TOP, max(len(ranked) // 4, 1)) - 1]

    def believed(texts: Any) -> Prediction:
        p = s.model(texts)
        return Prediction(p.mean, STRETCH * p.sd + 1e-3, p.draws)

    if channel is not None and s.world.texts:
        value = kind(believed(s.world.texts), bar)
        at = {t: i for i, t in enumerate(s.world.texts)}
        value[[at[t] for t in s.known]] = 0
        value = through(channel, value[None], s.world.length)[0]

        def score(texts: Any) -> np.ndarray:
            return log_target(value[[at[t] for t in texts]], kind)
    else:

        def score(texts: Any) -> np.ndarray:
            return on_its_scale(kind, believed(texts), bar)

    start = sorted(s.known, key=lambda t: -s.known[t])[:256]
    found = candidates(s.env, s.world.accepts, score, start, s.batch, Effort(steps=100), s.seed)
    excluded = s.asked | set(s.known)
    chosen = spread(found.texts, found.value, s.batch, None, excluded)
    out = [found.texts[i] for i in chosen.chosen]
    return out + arm_random(s)[: s.batch - len(out)]


STRETCH = 2.0  # an ensemble's spread understates its error where it proposes
CHOICES: dict[str, Callable[[State], list[str]]] = {
    "random": arm_random,
    "ga": arm_ga,
    "adalead": arm_adalead,
    "greedy": arm_greedy,
    "gfn-no-noise": lambda s: _ours(s, None),
    "ours": lambda s: _ours(s, s.channel if not np.array_equal(s.channel, np.eye(len(s.channel))) else None),
}
CHOICES |= {f"{name}-known": CHOICES[name] for name in ("greedy", "ours")}


# a campaign -----------------------------------------------------------------------------------------------------


def slip(rate: float, letters: int) -> np.ndarray:
    return (1 - rate) * np.eye(letters) + rate / letters


def make(texts: list[str], channel: np.ndarray, alphabet: str, rng: np.random.Generator) -> list[str]:
    """What the synthesiser makes of each order."""
    code = {c: i for i, c in enumerate(alphabet)}
    cumulative = channel.cumsum(1)
    return [
        "".join(alphabet[min(int((rng.random() > cumulative[code[c]]).sum()), len(alphabet) - 1)] for c in t)
        for t in texts
    ]


def learned(world: Landscape, known: dict[str, float], features: Any, listed: Any, seed: int) -> Any:
    """An ensemble fitted to what was measured; `listed` = features of all strings, whose predictions are made once."""
    from stochflow.design.surrogates import Ensemble

    texts = list(known)
    x, y = features(features.tokens(texts)), np.array([known[t] for t in texts])
    fitted = Ensemble(members=5, steps=600 if world.texts else 300).fit(x, y, np.arange(len(y)), seed)
    whole = fitted.predict(listed) if listed is not None else None
    return lambda asked: whole if asked is world.texts else fitted.predict(features(features.tokens(asked)))


def truth(world: Landscape) -> Any:
    """The landscape itself in the place of a model."""
    from stochflow.design.surrogates import Prediction

    def exact(asked: list[str]) -> Any:
        value = world.score(asked)
        return Prediction(value, np.zeros(len(value)), np.stack([value, value]))

    return exact


def campaign(study: Study, arm: str, seed: int, rounds: int | None = None) -> dict[str, Any]:
    """One cell of a table."""
    import torch

    from stochflow.design.features import Features, distances
    from stochflow.design.model import through
    from stochflow.worlds.strings import Strings

    torch.set_num_threads(1)
    begun = time.process_time()
    world = LANDSCAPES[study.landscape]()
    env = world.env or Strings(world.alphabet, world.length)
    channel = slip(study.noise, len(world.alphabet))
    features = Features(world.alphabet, world.length, True)
    noise = np.random.default_rng(77_000 + seed)
    first = world.first(seed)
    known = dict(zip(first, world.score(first).tolist(), strict=True))
    asked: set[str] = set()
    orders: list[str] = []
    made_all: dict[str, float] = {}
    listed = features(features.tokens(world.texts)) if world.texts else None
    curve = []
    for r in range(rounds or study.rounds):
        model: Any = None
        if arm.endswith("-known"):
            model = truth(world)
        elif arm != "random":
            model = learned(world, known, features, listed, seed * 1009 + r)
        state = State(world, env, known, asked, model, channel, study.batch, seed * 1_000_003 + r)
        batch = CHOICES[arm](state)
        made = make(batch, channel, world.alphabet, noise)
        values = world.score(made)
        asked |= set(batch)
        orders += batch
        for t, v in zip(made, values.tolist(), strict=True):
            known[t] = v
            made_all[t] = v
        curve.append(float(np.mean(sorted(made_all.values())[-TOP:])))
    worth = world.score(orders)
    if study.noise:
        assert world.table is not None
        expected = through(channel, world.table[None], world.length)[0]
        at = {t: i for i, t in enumerate(world.texts)}
        worth = expected[[at[t] for t in orders]]
    top = np.argsort(-worth, kind="stable")[:TOP]
    best_made = sorted(made_all, key=lambda t: -made_all[t])[:TOP]

    def spread_of(texts: list[str]) -> float:
        gap = distances(texts, texts)
        return float(gap.sum() / max(len(texts) * (len(texts) - 1), 1))

    return {
        "study": study.name,
        "arm": arm,
        "seed": seed,
        "made": float(np.mean([made_all[t] for t in best_made])),
        "orders": float(worth[top].mean()),
        "distance": spread_of([orders[i] for i in top]),
        "distance_made": spread_of(best_made),
        "best": max(made_all.values()),
        "curve": curve,
        "wells": len(orders),
        "cpu_s": time.process_time() - begun,
    }


def cell(job: tuple[str, str, int, int | None, str]) -> str:
    """One cell, written when it is done; a cell that is there is not made again."""
    name, arm, seed, rounds, out = job
    file = Path(out) / f"{name}_{arm}_{seed}.json"
    if not file.exists():
        found = campaign(STUDIES[name], arm, seed, rounds)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(found))
        os.replace(temporary, file)
    return file.name


def run(asked: argparse.Namespace) -> None:
    out = Path(asked.out)
    cells = out / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    jobs = []
    for seed in range(asked.seeds):
        for name in asked.studies:
            arms = [a for a in asked.arms or ARMS if possible(a, name)]
            jobs += [(name, arm, seed, asked.rounds, str(cells)) for arm in arms]
    done = 0
    with get_context("spawn").Pool(asked.processes, maxtasksperchild=4) as pool:
        waiting = [pool.apply_async(cell, (job,)) for job in jobs]
        for result in waiting:
            left = asked.time_limit - (time.monotonic() - begun)
            try:
                print(f"{result.get(timeout=max(left, 0.1))}  {time.monotonic() - begun:.0f} s", flush=True)
                done += 1
            except Exception as error:
                if left <= 0:
                    print("the time is up", flush=True)
                    break
                print(f"failed: {type(error).__name__}: {error}", flush=True)
        pool.terminate()
    gather(cells, out / f"{asked.name}.json", time.monotonic() - begun)
    print(f"{done} of {len(jobs)} cells")


def possible(arm: str, name: str) -> bool:
    """Exhaustive greedy needs a list; without noise there is nothing to ignore or to know."""
    study = STUDIES[name]
    noisy = ("gfn-no-noise", "greedy-known", "ours-known")
    return not (arm == "greedy" and study.landscape != "tf") and not (arm in noisy and study.noise == 0)


def gather(cells: Path, file: Path, seconds: float) -> None:
    import torch

    rows = [json.loads(p.read_text()) for p in sorted(cells.glob("*.json"))]
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cores": os.cpu_count(),
    }
    file.write_text(json.dumps({"machine": machine, "wall_s": round(seconds, 1), "cells": rows}, indent=0))


# the table ------------------------------------------------------------------------------------------------------


def interval(values: list[float]) -> str:
    """Mean and half-width of Student's 95 % interval over the seeds."""
    from scipy.stats import t

    n = len(values)
    if n < 2:
        return f"{np.mean(values):.3f}"
    half = float(t.ppf(0.975, n - 1)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return f"{np.mean(values):.3f} ± {half:.3f}"


def ahead(here: list[dict[str, Any]], arm: str) -> str:
    """Differences of a study's seeds between ours, which knows the landscape where the arm does, and this arm."""
    made = {(r["arm"], r["seed"]): r["made"] for r in here}
    ours = "ours-known" if arm.endswith("-known") else "ours"
    both = [made[ours, seed] - value for (name, seed), value in made.items() if name == arm and (ours, seed) in made]
    return interval(both) if both and arm != ours else ""


def table(files: list[Path]) -> str:
    """Markdown, a table a study."""
    rows = [c for f in files for c in json.loads(f.read_text())["cells"]]
    out = []
    for name in STUDIES:
        here = [r for r in rows if r["study"] == name]
        if not here:
            continue
        out += [
            f"\n**{name}**\n",
            "| arm | mean of the 128 best made | `ours` less this | expected value of the 128 best orders | their distance | best |",
            "|---|---|---|---|---|---|",
        ]
        for arm in ARMS:
            mine = [r for r in here if r["arm"] == arm]
            if mine:
                made, *rest = (interval([r[k] for r in mine]) for k in ("made", "orders", "distance", "best"))
                out.append(f"| {arm} | {made} | {ahead(here, arm)} | {' | '.join(rest)} |")
    return "\n".join(out) + "\n"


def draw(files: list[Path], out: Path) -> None:
    """The mean of the 128 best made after each round, the mean over seeds and Student's interval; the arms that know the landscape dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from scipy.stats import t

    rows = [c for f in files for c in json.loads(f.read_text())["cells"]]
    figure, axes = plt.subplots(1, len(SHOWN), figsize=(13, 3.4), layout="constrained")
    for ax in axes[1:3]:
        ax.sharey(axes[0])
    for ax, (name, title) in zip(axes, SHOWN.items(), strict=True):
        for i, arm in enumerate(ARMS):
            curves = np.array([r["curve"] for r in rows if r["study"] == name and r["arm"] == arm])
            if not len(curves):
                continue
            mean, rounds = curves.mean(0), range(1, curves.shape[1] + 1)
            half = t.ppf(0.975, len(curves) - 1) * curves.std(0, ddof=1) / math.sqrt(len(curves))
            style = "--" if arm.endswith("-known") else "-"
            ax.plot(rounds, mean, style, label=arm, color=f"C{i}", linewidth=1.4)
            ax.fill_between(rounds, mean - half, np.minimum(mean + half, 1), color=f"C{i}", alpha=0.2, linewidth=0)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("round")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("mean of the 128 best made")
    once = {name: line for ax in axes for line, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=8, fontsize=9, frameon=False)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="command", required=True)
    one = sub.add_parser("run")
    one.add_argument("studies", nargs="+", choices=sorted(STUDIES))
    one.add_argument("--out", default="benchmarks/results/campaigns")
    one.add_argument("--name", default="cells")
    one.add_argument("--arms", nargs="*", choices=ARMS)
    one.add_argument("--seeds", type=int, default=5)
    one.add_argument("--rounds", type=int)
    one.add_argument("--processes", type=int, default=2)
    one.add_argument("--time-limit", type=float, default=86400.0)
    two = sub.add_parser("table")
    two.add_argument("files", nargs="+", type=Path)
    three = sub.add_parser("plot")
    three.add_argument("files", nargs="+", type=Path)
    three.add_argument("--out", type=Path, default=Path("docs/img/campaigns.png"))
    asked = parser.parse_args()
    if asked.command == "run":
        run(asked)
    elif asked.command == "plot":
        draw(asked.files, asked.out)
    else:
        sys.stdout.write(table(asked.files))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
