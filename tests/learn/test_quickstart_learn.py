"""The small API learns: the guide and the example as written, and five seeds at the document's own settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import one_hot
from torch.optim import Adam

from stochflow.quickstart import BackwardPolicy, ForwardPolicy, GFlowNet, Grid, exact_tv, trajectory_balance_loss

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_one_learning_rate_reaches_the_target(seed):
    torch.manual_seed(seed)
    env = Grid(size=16)
    backward_policy = BackwardPolicy(env.state_dim, num_actions=3)
    forward_policy = ForwardPolicy(env.state_dim, hidden_dim=32, num_actions=3)
    model = GFlowNet(forward_policy, backward_policy, env)
    opt = Adam(model.parameters(), lr=5e-3)
    for _ in range(1000):
        s0 = one_hot(torch.zeros(256).long(), env.state_dim).float()
        _, log = model.sample_states(s0, return_log=True)
        loss = trajectory_balance_loss(log.total_flow, log.rewards, log.fwd_probs, log.back_probs)
        loss.backward()
        opt.step()
        opt.zero_grad()
    assert exact_tv(model) < 0.001
    assert model.total_flow.item() == pytest.approx(42.56, rel=1e-3)


@pytest.mark.slow
def test_the_guide_prints_what_it_says(tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / "quickstart.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.S)), {"__name__": "guide"})
    (promised,) = re.findall(r"```text\n(.*?)```", text, re.S)
    assert capsys.readouterr().out == promised


@pytest.mark.slow
def test_the_example_runs(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), "20", str(tmp_path / "picture.png")]
    path = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=path, check=True)
    assert "exact TV" in done.stdout
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
