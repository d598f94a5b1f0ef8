"""Holds `stochflow.scores.ehrlich` to the functions of pytorch-holo, whose authors published them.

pytorch-holo needs an older numpy, so it is run in an environment of its own:

    python -m venv holo && holo/bin/pip install "numpy==1.26.*" torch pytorch-holo==0.0.5
    PYTHONPATH=src python scripts/check_ehrlich.py holo/bin/python

For the four sizes of docs/design-search.md it takes transitions, motifs and spacings of pytorch-holo's function, builds ours
from them, and compares scores of feasible strings, of mutants of the optimum and of random strings.
"""

from __future__ import annotations

import json
import subprocess
import sys

THERE = """
import json, sys, torch
from holo.test_functions.closed_form import Ehrlich
out = []
for letters, length, motifs, size in json.loads(sys.argv[1]):
    for seed in range(3):
        for parts in (size, 2):
            f = Ehrlich(num_states=letters, dim=length, num_motifs=motifs, motif_length=size, quantization=parts, random_seed=seed)
            torch.manual_seed(seed)
            best = f.optimal_solution().repeat(200, 1)
            change = torch.rand(best.shape) < 0.1
            x = torch.cat([f.initial_solution(100), torch.where(change, torch.randint(letters, best.shape), best), f.random_solution(100)])
            spacing = [torch.cat([torch.zeros(1, dtype=torch.long), s]).cumsum(0).tolist() for s in f.spacings]
            out.append({
                "allowed": (f.transition_matrix > 0).tolist(), "motifs": [m.tolist() for m in f.motifs], "offsets": spacing,
                "length": length, "quantization": parts, "x": x.tolist(), "y": f.evaluate_true(x).clamp(min=0).tolist(),
            })
print(json.dumps(out))
"""
SIZES = [(20, 15, 2, 4), (20, 32, 2, 4), (20, 64, 8, 4), (32, 32, 4, 4)]


def main() -> None:
    import torch

    from stochflow.scores.ehrlich import Ehrlich

    done = subprocess.run([sys.argv[1], "-c", THERE, json.dumps(SIZES)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pytorch-holo could not be run: {done.stderr.strip().splitlines()[-1]}")
    worst, compared, above = 0.0, 0, 0
    for each in json.loads(done.stdout.strip().splitlines()[-1]):
        made = Ehrlich(
            torch.tensor(each["allowed"]), torch.tensor(each["motifs"]), torch.tensor(each["offsets"]), each["length"], each["quantization"]
        )
        own, theirs = made.score(torch.tensor(each["x"])), torch.tensor(each["y"], dtype=torch.float64)
        worst = max(worst, float((own - theirs).abs().max()))
        compared += len(own)
        above += int((theirs > 0).sum())
    print(f"{compared} strings, {above} of them above 0: largest difference {worst:.1e}")
    if worst > 1e-6:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
