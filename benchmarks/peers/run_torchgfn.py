"""torchgfn, answering the questions of compare.py through its public classes, checks and debug flags off.

Trajectories are sampled with their log-probabilities, which the on-policy loss then takes (`recalculate_all_logprobs=False`): one
pass of the forward policy a step instead of two. Forward and backward policy share a trunk, as in its own hypergrid example.
It has no TFBind8; its append-only sequence environment with words of two bits is the same graph, and its reward is looked up in
the same table.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import standin
import torch
import torch._dynamo  # any optimiser imports it when it is made: before the fork, it counts as import and not as memory of training

STANDINS = standin.install(("tensordict", "torch_geometric", "linear_attention_transformer"))

from gfn.estimators import DiscretePolicyEstimator  # noqa: E402
from gfn.gflownet import TBGFlowNet  # noqa: E402
from gfn.gym import BitSequence, HyperGrid  # noqa: E402
from gfn.preprocessors import KHotPreprocessor, Preprocessor  # noqa: E402
from gfn.utils.modules import MLP  # noqa: E402
from torch.nn.functional import one_hot  # noqa: E402
from work import HIDDEN, LAYERS, LOG_Z_LR, LR, TASKS, resident, serve  # noqa: E402


class Letters(Preprocessor):
    """One-hot letters side by side, zeros where there is none yet: the input that the other two see."""

    def __init__(self, letters: int, length: int):
        super().__init__(output_dim=letters * length)
        self.letters = letters

    def preprocess(self, states: Any) -> torch.Tensor:
        return one_hot(states.tensor + 1, self.letters + 1)[..., 1:].flatten(-2).to(torch.float32)


class Table(BitSequence):
    """Sequences that are paid by a table instead of by their distance to modes."""

    def __init__(self, table: torch.Tensor, letters: int, length: int, device: str):
        word = letters.bit_length() - 1
        super().__init__(
            word_size=word, seq_size=word * length, n_modes=1, H=torch.zeros(1, word * length).long(), device_str=device
        )
        self.table = table.to(device)
        self.place = letters ** torch.arange(length - 1, -1, -1, device=device)

    def log_reward(self, final_states: Any) -> torch.Tensor:
        return self.table[(final_states.tensor * self.place).sum(-1)]


class Run:
    def __init__(self, tables: dict[str, Any], spec: dict[str, Any]):
        task, device = TASKS[spec["task"]], spec["device"]
        torch.set_num_threads(spec["threads"])
        self.device, self.batch, self.grid = device, spec["batch"], task["kind"] == "grid"
        self.task, self.tables = task, tables
        self.restart(0)
        self.notes: dict[str, Any] = {"standins": STANDINS}
        if device == "cuda":
            try:
                self.net.sample_trajectories(self.env, n=2, save_logprobs=True)
            except (
                RuntimeError
            ) as problem:  # a constant on the wrong device: a default device helps, at a small cost for each operator
                self.notes["default_device"] = str(problem)[:200]
                torch.set_default_device(device)

    def restart(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.steps = 0
        with torch.device(self.device):  # its sequences make some of their constants on the default device
            self._build(self.task, self.tables)

    def _build(self, task: dict[str, Any], tables: dict[str, Any]) -> None:
        device = self.device
        if self.grid:
            rewards = {"R0": 1e-3, "R1": 0.5, "R2": 2.0}
            self.env = HyperGrid(
                task["ndim"], task["side"], reward_fn_kwargs=rewards, device=device, validate_modes=False
            )
            reader: Preprocessor = KHotPreprocessor(task["side"], task["ndim"])
        else:
            reader = Letters(task["letters"], task["length"])
            if task["kind"] == "bits":
                self.env = BitSequence(task["word"], task["word"] * task["length"], task["modes"], device_str=device)
                self.env.modes = torch.from_numpy(tables["modes"]).long().to(device)
            else:
                table = torch.from_numpy(
                    tables["log_rewards"]
                ).float()  # finished strings are listed in the order of their digits
                self.env = Table(table, task["letters"], task["length"], device)
        actions = self.env.n_actions
        forward = MLP(reader.output_dim, actions, hidden_dim=HIDDEN, n_hidden_layers=LAYERS)
        pf = DiscretePolicyEstimator(forward, actions, reader)
        pb = None
        if self.grid:  # sequences are trees: there is one way back
            backward = MLP(
                reader.output_dim, actions - 1, hidden_dim=HIDDEN, n_hidden_layers=LAYERS, trunk=forward.trunk
            )
            pb = DiscretePolicyEstimator(backward, actions, reader, is_backward=True)
        self.net = TBGFlowNet(pf, pb, init_logZ=0.0, constant_pb=pb is None).to(device)
        log_z = list(self.net.logz_parameters())
        rest = [p for p in self.net.parameters() if all(p is not z for z in log_z)]
        self.adam = torch.optim.Adam([{"params": rest, "lr": LR}, {"params": log_z, "lr": LOG_Z_LR}])
        self.parameters = sum(p.numel() for p in self.net.parameters())

    def train(self, steps: int) -> list[float]:
        for _ in range(steps):
            paths = self.net.sample_trajectories(self.env, n=self.batch, save_logprobs=True)
            self.adam.zero_grad()
            loss = self.net.loss(self.env, paths, recalculate_all_logprobs=False)
            loss.backward()
            self.adam.step()
        self.steps += steps
        self.last = paths
        return [float(loss.detach())]  # reading it waits for the device

    @torch.no_grad()
    def logits(self, states: np.ndarray) -> np.ndarray:
        found = []
        for part in torch.from_numpy(states).to(self.device).split(1 << 15):
            if not self.grid:
                letters = self.env.n_actions - 1
                part = torch.where(
                    part == letters, -1, part
                )  # its empty place is -1, ours is the number after the last letter
            found.append(self.net.pf(self.env.States(part)))
        out = torch.cat(found)
        return (out if self.grid else out[:, :-1]).cpu().numpy()  # STOP of a sequence is forced and so no move

    def log_rewards(self, states: np.ndarray) -> np.ndarray:
        return self.env.log_reward(self.env.States(torch.from_numpy(states).to(self.device))).cpu().numpy()

    def length(self) -> float:
        return float(self.last.terminating_idx.float().mean()) - (
            0 if self.grid else 1
        )  # leaving a finished sequence is no decision

    def memory(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else resident()


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"torchgfn": version("torchgfn"), "torch": torch.__version__, "python": sys.version.split()[0]}


if __name__ == "__main__":
    serve(Run, versions)
