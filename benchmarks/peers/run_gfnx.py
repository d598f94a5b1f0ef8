"""gfnx, answering the questions of compare.py: the whole training loop compiled, many iterations a call, buffers donated.

The loop is trajectory balance from gfnx's environments and rollout, with an Equinox MLP and Optax, as a user of gfnx writes it.
Its TFBind8 reward wants a file that the wheel does not hold: its parameters are given the same table directly. Its own
bit-sequence environment fills places in any order; here its append-only one carries the same reward, the graph that all three have.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any

os.environ.setdefault(
    "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
)  # else peak memory is what was taken, not what was needed

import numpy as np
import standin

STANDINS = standin.install(("matplotlib", "flashbax", "networkx", "jax_tqdm", "omegaconf"))

import equinox as eqx  # noqa: E402
import gfnx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from gfnx.environment.sequence import EnvParams, EnvState, FixedAutoregressiveSequenceEnvironment  # noqa: E402
from work import HIDDEN, LAYERS, LOG_Z_LR, LR, TASKS, resident, serve  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")  # float32 products, no TF32


class BitWords(FixedAutoregressiveSequenceEnvironment):
    """Words of bits, appended one after the other."""

    @property
    def name(self) -> str:
        return "bit words"


def world(task: dict[str, Any], tables: dict[str, Any]) -> tuple[Any, Any]:
    """Environment and its parameters, with the shared rewards in them."""
    if task["kind"] == "grid":
        grid = gfnx.HypergridEnvironment(gfnx.EasyHypergridRewardModule(), dim=task["ndim"], side=task["side"])
        return grid, grid.init(jax.random.PRNGKey(0))
    letters, length = task["letters"], task["length"]
    if task["kind"] == "bits":
        size = task["word"] * length
        paid = gfnx.BitseqRewardModule(size, task["word"], task["modes"], reward_exponent=float(size))
        env: Any = BitWords(
            paid, length, letters, letters + 3, bos_token=letters + 1, eos_token=letters + 2, pad_token=letters
        )
        rewards = {"mode_set": jnp.asarray(tables["modes"], dtype=bool)}
    else:
        env = gfnx.TFBind8Environment(gfnx.TFBind8RewardModule())
        rewards = {"rewards": jnp.exp(jnp.asarray(tables["log_rewards"], dtype=jnp.float32))}
    special = {"bos_token": env.bos_token, "eos_token": env.eos_token, "pad_token": env.pad_token}
    return env, EnvParams(reward_params=rewards, max_length=length, nchar=env.nchar, ntoken=env.ntoken, **special)


class Run:
    def __init__(self, tables: dict[str, Any], spec: dict[str, Any]):
        task = TASKS[spec["task"]]
        self.grid, self.task = task["kind"] == "grid", task
        self.env, self.params = world(task, tables)
        self.moves, back = self.env.action_space.n, self.env.backward_action_space.n if self.grid else 0
        inputs = task["ndim"] * task["side"] if self.grid else task["letters"] * task["length"]
        self.net = partial(eqx.nn.MLP, inputs, self.moves + back, width_size=HIDDEN, depth=LAYERS)
        labels = {
            "net": jax.tree.map(lambda _: "net", eqx.filter(self.net(key=jax.random.PRNGKey(0)), eqx.is_array)),
            "log_z": "log_z",
        }
        self.adam = optax.multi_transform({"net": optax.adam(LR), "log_z": optax.adam(LOG_Z_LR)}, labels)
        self.restart(0)
        self.parameters = sum(x.size for x in jax.tree.leaves(self.state[0]))
        self.batch, self.chunk = spec["batch"], spec.get("chunk", 20)
        begun = time.perf_counter()
        self.many = jax.jit(self._many, donate_argnums=0).lower(self.state, self.params).compile()
        self.notes = {"compile_s": round(time.perf_counter() - begun, 3), "standins": STANDINS}

    def restart(self, seed: int) -> None:
        make, draw = jax.random.split(jax.random.PRNGKey(seed))
        weights, self.shape = eqx.partition(self.net(key=make), eqx.is_array)
        values = {"net": weights, "log_z": jnp.zeros(())}
        self.state, self.steps = (values, self.adam.init(values), draw), 0

    def _read(self, net: Any, obs: Any) -> Any:
        """One observation to logits of forward moves and, on grids, of backward ones."""
        x = (
            obs if self.grid else jax.nn.one_hot(obs[1:], self.task["letters"]).reshape(-1)
        )  # the first token says that it begins
        return net(x)

    def _loss(self, values: Any, paths: Any, params: Any) -> Any:
        """Mean of (log Z + log P_F - log P_B - log R)^2 over the batch; paths are [B, T + 1]."""
        net = eqx.combine(values["net"], self.shape)
        out = jax.vmap(jax.vmap(partial(self._read, net)))(paths.obs)
        over_time = {"in_axes": (1, None), "out_axes": 1}
        closed = jax.vmap(self.env.get_invalid_mask, **over_time)(paths.state, params)
        forward = jax.nn.log_softmax(gfnx.utils.mask_logits(out[..., : self.moves], closed), axis=-1)
        taken = jnp.take_along_axis(forward, paths.action[..., None], axis=-1)[..., 0]
        balance = (
            values["log_z"]
            + jnp.where(paths.pad, 0.0, taken).sum(1)
            - jnp.where(paths.pad, 0.0, paths.log_gfn_reward).sum(1)
        )
        if self.grid:  # sequences are trees: there is one way back
            there = jax.tree.map(lambda x: x[:, 1:], paths.state)
            here = jax.tree.map(lambda x: x[:, :-1], paths.state)
            shut = jax.vmap(self.env.get_invalid_backward_mask, **over_time)(there, params)
            backward = jax.nn.log_softmax(gfnx.utils.mask_logits(out[:, 1:, self.moves :], shut), axis=-1)
            undo = jax.vmap(self.env.get_backward_action, in_axes=(1, 1, 1, None), out_axes=1)(
                here, paths.action[:, :-1], there, params
            )
            balance -= jnp.where(
                paths.pad[:, :-1], 0.0, jnp.take_along_axis(backward, undo[..., None], axis=-1)[..., 0]
            ).sum(1)
        return jnp.square(balance).mean()

    def _many(self, state: Any, params: Any) -> Any:
        def act(key: Any, obs: Any, weights: Any) -> Any:
            net = eqx.combine(weights, self.shape)
            return jax.vmap(partial(self._read, net))(obs)[..., : self.moves], {}

        def once(state: Any, _: None) -> Any:
            values, adam, key = state
            key, draw = jax.random.split(key)
            paths, _ = gfnx.utils.forward_rollout(draw, self.batch, act, values["net"], self.env, params)
            loss, slope = jax.value_and_grad(self._loss)(values, paths, params)
            change, adam = self.adam.update(slope, adam, values)
            return (optax.apply_updates(values, change), adam, key), (loss, (~paths.pad).sum(1).mean())

        return jax.lax.scan(once, state, None, length=self.chunk)

    def train(self, steps: int) -> list[float]:
        for _ in range(-(-steps // self.chunk)):
            self.state, (losses, self.lengths) = self.many(self.state, self.params)
            self.steps += self.chunk
        return [float(x) for x in np.asarray(losses)]  # reading them waits for the device

    def _states(self, states: np.ndarray) -> Any:
        no = jnp.zeros(len(states), dtype=bool)
        tokens = jnp.asarray(states, dtype=jnp.int32)
        if self.grid:
            return gfnx.HypergridEnvState(state=tokens, is_terminal=no, is_initial=no, is_pad=no)
        return EnvState(
            tokens=jnp.where(tokens == self.task["letters"], self.env.pad_token, tokens),
            is_terminal=no,
            is_initial=no,
            is_pad=no,
        )

    def logits(self, states: np.ndarray) -> np.ndarray:
        if not hasattr(self, "_logits"):  # compiled once, for a fixed number of states a call
            self._logits = jax.jit(
                lambda weights, obs: jax.vmap(partial(self._read, eqx.combine(weights, self.shape)))(obs)
            )
        found = []
        for part in np.array_split(states, max(1, len(states) >> 15)):
            found.append(
                np.asarray(self._logits(self.state[0]["net"], self.env.get_obs(self._states(part), self.params)))
            )
        return np.concatenate(found)[:, : self.moves]

    def log_rewards(self, states: np.ndarray) -> np.ndarray:
        return np.asarray(self.env.reward_module.log_reward(self._states(states), self.params))

    def length(self) -> float:
        return float(self.lengths[-1])

    def memory(self) -> int:
        return jax.devices()[0].memory_stats()["peak_bytes_in_use"] if jax.default_backend() == "gpu" else resident()


def versions() -> dict[str, str]:
    from importlib.metadata import version

    found = {name: version(name) for name in ("gfnx", "jax", "equinox", "optax")}
    return found | {"python": sys.version.split()[0]}


if __name__ == "__main__":
    serve(Run, versions)
