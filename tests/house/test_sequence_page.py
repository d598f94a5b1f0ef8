"""The page on sequence models: its tables are what the committed results say, and its code runs."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stochflow.learn.rollout import rollout
from stochflow.nets.policy import Policy
from stochflow.nets.transformer import Transformer
from stochflow.scores.rewards import Linear
from stochflow.types import Task
from stochflow.worlds.channels import Exact
from stochflow.worlds.strings import Strings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "sequence-models.md"


def benchmark(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tables():
    return benchmark("sequence_tables")


def test_tables_are_what_the_results_say():
    page = PAGE.read_text()
    assert tables().render(page) == page
    named = re.findall(r"<!-- ([a-z-]+) -->", page)
    assert {"prediction", "law", "decoding", "memory"} <= set(named)


def test_every_table_of_the_thought_study_has_five_seeds():
    found = json.loads((ROOT / "benchmarks/results/thought_study.json").read_text())
    for world in found["worlds"].values():
        for rows in (world["prediction"], world["law"]):
            assert all(
                len(figure["seeds"]) == 5
                for row in rows.values()
                for figure in row.values()
                if isinstance(figure, dict)
            )


def test_the_code_of_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    assert len(blocks) >= 4
    scope: dict = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), scope)


@pytest.fixture
def benchmarks(monkeypatch):
    """Benchmarks find what they share beside them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield benchmark
    sys.modules.pop("common", None)


@pytest.fixture
def decode(benchmarks):
    return benchmarks("decode")


@torch.no_grad()
def test_the_operations_of_decoding_are_those_that_are_done(decode):
    """The formula against torch's own count of what a rollout multiplies, with a cache and without."""
    length, batch, net = 6, 3, Transformer(8, 2, 2)
    env = Strings("ACGT", length)
    task = Task(env, Exact(), lambda s: s[..., 0], Linear())
    policy = Policy(env, net)
    with FlopCounterMode(display=False) as counted:
        rollout(task, policy, batch)
    assert counted.get_total_flops() == batch * decode.operations(net, env.num_moves, length, cached=True)
    with (
        FlopCounterMode(display=False) as counted,
        sdpa_kernel(SDPBackend.MATH),
    ):  # the counter cannot look into the fused kernel
        rollout(task, decode.Repeat(policy), batch)
    unseen = sum(
        n * n - n * (n + 1) // 2 for n in range(1, length + 1)
    )  # plain products make the pairs that the mask leaves out, too
    wanted = decode.operations(net, env.num_moves, length, cached=False) + net.layers * 4 * net.width * unseen
    assert counted.get_total_flops() == batch * wanted


def test_a_case_of_the_decoding_benchmark_is_whole(decode):
    row = decode.case(Transformer(8, 2, 1), 4, 5, "cpu", 1)
    assert row["positions_ratio"] == 3.0
    assert row["operations_ratio"] == pytest.approx(
        decode.operations(Transformer(8, 2, 1), 4, 5, False) / decode.operations(Transformer(8, 2, 1), 4, 5, True),
        abs=0.01,
    )
    assert sum(row["shares"].values()) == pytest.approx(1, abs=0.01)
    assert 0 < row["shares"]["weights"] < 1
    assert 0 < row["shares"]["attention"] < 1


def test_the_trunk_study_keeps_what_was_measured_in_the_same_way_and_nothing_else(benchmarks, tmp_path):
    study = benchmarks("trunk_study")
    head = {"versions": {"torch": "2"}, "settings": {"rates": (0.1, 0.2)}, "nets": {}}
    file = tmp_path / "trunks.json"
    assert study.kept(file, head) == {}
    file.write_text(json.dumps(head | {"nets": {"mlp": {"lr": 0.1}}}))
    assert study.kept(file, head) == {"mlp": {"lr": 0.1}}
    with pytest.raises(SystemExit, match="other settings, versions or hardware"):
        study.kept(file, head | {"versions": {"torch": "3"}})


def test_memory_grows_by_the_same_amount_a_letter(benchmarks):
    """What the transformer keeps for the gradient is linear in the length: equal steps of length cost equal steps of memory."""
    measure = benchmarks("length_memory").measure
    short, middle, long = (measure(Transformer(16, 2, 1), n, 4, "cpu")["autograd_kb"] for n in (20, 40, 60))
    assert long - middle == pytest.approx(middle - short, rel=0.05)
    assert long < 3.1 * short


def test_the_table_of_trunks_names_the_closest_and_those_it_cannot_tell_apart():
    def tv(median, low, high):
        return {
            "tv": {"10": {"median": median, "low": low, "high": high}},
            "parameters": 1234,
            "lr": 0.1,
            "seconds": 3.2,
        }

    nets = {"mlp": tv(0.3, 0.25, 0.35), "lookup": tv(0.1, 0.05, 0.26), "transformer": tv(0.4, 0.39, 0.41)}
    found = {"nets": nets, "floor_tv": 0.005, "settings": {}, "versions": {}, "hardware": "a machine"}
    said = tables().trunks(found)
    assert "| lookup | 1,234 | 0.1 | 0.1000 (0.0500-0.2600) | 3 |" in said
    assert (
        "Closest: lookup (and, within the intervals, mlp) at 10 samples. The best achievable law (least forward KL) has 0.0050."
        in said
    )
