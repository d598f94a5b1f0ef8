"""Models of a measured value that say how sure they are: one protocol, four kinds.

N sequences, F features, K draws. `ensemble` (small networks, stacked and trained together) and `ridge` (Bayesian linear
regression) need torch and numpy alone; `gp` and `forest` come from scikit-learn (extra `[design]`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from stochflow.errors import UserError, did_you_mean
from stochflow.nets.layers import Linear

DRAWS = 16  # functions drawn from a model that has a law of functions
BLOCK = 4096  # rows predicted together
WAVES = 1024  # random Fourier features of a Gaussian process's prior


class Prediction(NamedTuple):
    """What a model says of N sequences, float64."""

    mean: np.ndarray  # [N]
    sd: np.ndarray  # [N] of the model, without the noise of a measurement
    draws: np.ndarray  # [K, N] values under functions that the model holds possible, one function a row


class Fitted(Protocol):
    def predict(self, x: Tensor) -> Prediction:
        """Of features [N, F]."""


class Surrogate(Protocol):
    name: str

    def fit(self, x: Tensor, y: np.ndarray, groups: np.ndarray, seed: int) -> Fitted:
        """Learn values y [N] of features x [N, F]; rows of one group are near-identical and are held out together."""


# ridge ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ridge:
    """Linear regression with a normal prior on its weights; the ridge maximises the evidence, so nothing is held out."""

    name: str = "ridge"

    def fit(self, x: Tensor, y: np.ndarray, groups: np.ndarray, seed: int) -> Fitted:
        centre, level = x.double().mean(0), float(y.mean())
        wide = x.double() - centre
        target = torch.from_numpy(y - level)
        if len(wide) <= wide.shape[1]:  # the smaller of the two Gram matrices
            square, left = torch.linalg.eigh(wide @ wide.T)
            kept = square > 1e-9 * square[-1].clamp(min=1e-30)
            root = square[kept].sqrt()
            axes = wide.T @ left[:, kept] / root
        else:
            square, right = torch.linalg.eigh(wide.T @ wide)
            kept = square > 1e-9 * square[-1].clamp(min=1e-30)
            root, axes = square[kept].sqrt(), right[:, kept]
        along = (wide @ axes / root).T @ target  # the target in the directions that the features span
        total, n = float(target @ target), len(y)

        def evidence(ridge: float) -> tuple[float, float]:
            shrunk = root**2 / (root**2 + ridge)
            variance = max(total - float((along**2 * shrunk).sum()), 1e-12 * max(total, 1e-30)) / n
            return -0.5 * (n * math.log(variance) + float(torch.log1p(root**2 / ridge).sum())), variance

        ridge = max(np.logspace(-4, 5, 46), key=lambda r: evidence(float(r))[0])
        return _Ridge(centre, level, axes, root, along, float(ridge), evidence(float(ridge))[1], seed)


class _Ridge:
    def __init__(self, centre, level, axes, root, along, ridge, variance, seed):
        self.centre, self.level, self.axes = centre, level, axes
        self.weights = along * root / (root**2 + ridge)
        self.scale, self.ridge, self.noise = variance / (root**2 + ridge), ridge, math.sqrt(variance)
        gen = torch.Generator().manual_seed(seed)
        inside = torch.randn(len(root), DRAWS, generator=gen, dtype=torch.float64)
        outside = torch.randn(len(centre), DRAWS, generator=gen, dtype=torch.float64)
        outside = outside - axes @ (axes.T @ outside)
        self.beyond = variance / ridge  # the prior's variance, where nothing was measured
        self.moves = axes @ (self.weights.unsqueeze(1) + self.scale.sqrt().unsqueeze(1) * inside)
        self.moves = self.moves + math.sqrt(self.beyond) * outside

    def predict(self, x: Tensor) -> Prediction:
        wide = x.double() - self.centre
        inside = wide @ self.axes
        rest = (wide.square().sum(1) - inside.square().sum(1)).clamp(min=0)
        variance = inside.square() @ self.scale + self.beyond * rest
        mean, draws = inside @ self.weights, (wide @ self.moves).T
        return Prediction((mean + self.level).numpy(), variance.sqrt().numpy(), (draws + self.level).numpy())


# ensemble -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ensemble:
    """Small networks, trained as one stack: each leaves out a fifth of the groups and stops where it predicts these best."""

    members: int = 6
    hidden: int = 0  # 0: 64, or 32 where there are more than 500 features
    steps: int = 600
    batch: int = 128
    name: str = "ensemble"

    def fit(self, x: Tensor, y: np.ndarray, groups: np.ndarray, seed: int) -> Fitted:
        level, size = float(y.mean()), float(y.std()) or 1.0
        target = torch.from_numpy((y - level) / size).float()
        gen = torch.Generator().manual_seed(seed)
        learn, check = zip(*[_split(groups, gen) for _ in range(self.members)], strict=True)
        net = _Stack(
            x.shape[1],
            self.hidden or (64 if x.shape[1] <= 500 else 32),
            [torch.Generator().manual_seed(seed * 1009 + m) for m in range(self.members)],
        )
        optimiser = _AdamW(list(net.parameters()))
        batch = min(self.batch, len(y))
        most = max(1, max(len(c) for c in check))
        held = torch.stack([c[torch.arange(min(most, 512)) % len(c)] for c in check])
        best: list[Any] = [torch.full((self.members,), math.inf), [p.detach().clone() for p in net.parameters()], 0]
        for step in range(1, self.steps + 1):
            at = torch.stack([i[torch.randint(len(i), (batch,), generator=gen)] for i in learn])
            loss = (net(x[at]) - target[at]).square().mean(1).sum()
            optimiser.step(torch.autograd.grad(loss, optimiser.parameters))
            if step % 25 == 0:
                _keep_best(net, x[held], target[held], best, step)
                if step - best[2] >= 200:
                    break
        with torch.no_grad():
            for p, kept in zip(net.parameters(), best[1], strict=True):
                p.copy_(kept)
        return _Ensemble(net, level, size)


class _AdamW:
    """Adam with decoupled weight decay. `torch.optim` imports the compiler, which takes longer than a fit."""

    def __init__(self, parameters: list[nn.Parameter], lr: float = 3e-3, decay: float = 1e-2):
        self.parameters, self.lr, self.decay, self.steps = parameters, lr, decay, 0
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        self.steps += 1
        short, long = 1 - 0.9**self.steps, 1 - 0.999**self.steps
        for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
            m.lerp_(g, 0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            p.mul_(1 - self.lr * self.decay)
            p.addcdiv_(m, (v / long).sqrt_().add_(1e-8), value=-self.lr / short)


@torch.no_grad()
def _keep_best(net: _Stack, x: Tensor, y: Tensor, best: list[Any], step: int) -> None:
    """Per member, the weights with the smallest error on what it does not learn from; `best` is changed."""
    error = (net(x) - y).square().mean(1)
    better = error < best[0]
    if bool((error < best[0] * 0.995).any()):
        best[2] = step
    best[0] = torch.where(better, error, best[0])
    for kept, p in zip(best[1], net.parameters(), strict=True):
        kept[better] = p.detach()[better]


def _split(groups: np.ndarray, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows to learn from and rows to stop by: a random fifth of the groups is left out."""
    names, at = np.unique(groups, return_inverse=True)
    if len(names) < 5:  # too few groups to leave one out: rows instead
        names, at = np.arange(len(groups)), np.arange(len(groups))
    out = torch.zeros(len(names), dtype=torch.bool)
    out[torch.randperm(len(names), generator=gen)[: max(1, len(names) // 5)]] = True
    row = out[torch.from_numpy(at)]
    return (~row).nonzero().squeeze(1), row.nonzero().squeeze(1)


class _Stack(nn.Module):
    """[M, B, F] -> [M, B]: M networks of two hidden layers."""

    def __init__(self, inputs: int, hidden: int, gens: list[torch.Generator]):
        super().__init__()
        root2 = math.sqrt(2.0)
        self.layers = nn.ModuleList(
            [Linear(inputs, hidden, gens, root2), Linear(hidden, hidden, gens, root2), Linear(hidden, 1, gens, 0.5)]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.layers[0](x))
        x = torch.relu(self.layers[1](x))
        return self.layers[2](x).squeeze(-1)


class _Ensemble:
    def __init__(self, net: _Stack, level: float, size: float):
        self.net, self.level, self.size = net, level, size
        self.members = next(iter(net.parameters())).shape[0]

    @torch.no_grad()
    def predict(self, x: Tensor) -> Prediction:
        found = [self.net(part.unsqueeze(0).expand(self.members, -1, -1)) for part in x.split(BLOCK)]
        draws = (
            torch.cat(found, 1) if found else torch.zeros(self.members, 0)
        ).double().numpy() * self.size + self.level
        return Prediction(draws.mean(0), draws.std(0, ddof=1), draws)


# scikit-learn ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forest:
    """Random forest of scikit-learn; its trees are its draws."""

    trees: int = 100
    name: str = "forest"

    def fit(self, x: Tensor, y: np.ndarray, groups: np.ndarray, seed: int) -> Fitted:
        from sklearn.ensemble import RandomForestRegressor

        level, size = (
            float(y.mean()),
            float(y.std()) or 1.0,
        )  # a tree stops where the variance is below 1e-16, in any unit
        made = RandomForestRegressor(self.trees, max_features=0.33, min_samples_leaf=2, random_state=seed, n_jobs=1)
        return _Forest(made.fit(x.numpy(), (y - level) / size), level, size)


class _Forest:
    def __init__(self, made: Any, level: float, size: float):
        self.made, self.level, self.size = made, level, size

    def predict(self, x: Tensor) -> Prediction:
        found = np.stack([tree.predict(x.numpy()) for tree in self.made.estimators_])
        draws = found.astype(np.float64) * self.size + self.level
        return Prediction(draws.mean(0), draws.std(0, ddof=1), draws)


@dataclass(frozen=True)
class GaussianProcess:
    """Exact Gaussian process of scikit-learn, squared-exponential on the features, on at most `most` rows.

    scikit-learn, because the forest needs it anyway and a plate's data fit an exact process; gpytorch pays from tens of
    thousands of rows on, where the ensemble is as good.
    """

    most: int = 1000
    name: str = "gp"

    def fit(self, x: Tensor, y: np.ndarray, groups: np.ndarray, seed: int) -> Fitted:
        import warnings

        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

        at = np.arange(len(y))
        if len(y) > self.most:  # the best, where precision matters, and a random rest
            ranked = np.argsort(-y, kind="stable")
            rest = np.random.default_rng(seed).permutation(ranked[self.most // 4 :])
            at = np.concatenate([ranked[: self.most // 4], rest[: self.most - self.most // 4]])
        level, size = float(y[at].mean()), float(y[at].std()) or 1.0
        rows = x[torch.from_numpy(at)].double().numpy()
        gap = float(np.median(np.linalg.norm(rows[: len(rows) // 2] - rows[-(len(rows) // 2) :], axis=1))) or 1.0
        kernel = ConstantKernel(1.0, (1e-2, 1e2)) * RBF(gap, (gap / 30, gap * 30)) + WhiteKernel(0.1, (1e-5, 2.0))
        made = GaussianProcessRegressor(kernel, random_state=seed)
        with warnings.catch_warnings():  # a hyperparameter at its bound is an answer
            warnings.simplefilter("ignore")
            made.fit(rows, (y[at] - level) / size)
        return _GaussianProcess(made, level, size, seed)


class _GaussianProcess:
    """Its draws are functions of the posterior (Matheron's rule): a draw of the prior by random Fourier features, moved by what
    the data say of it.
    """

    def __init__(self, made: Any, level: float, size: float, seed: int):
        from scipy.linalg import cho_solve

        self.made, self.level, self.size = made, level, size
        scaled, white = made.kernel_.k1, made.kernel_.k2
        self.covariance, self.noise = scaled, math.sqrt(float(white.noise_level))
        rng = np.random.default_rng(seed)
        rows = made.X_train_
        self.waves = rng.standard_normal((rows.shape[1], WAVES)) / float(scaled.k2.length_scale)
        self.phase = rng.uniform(0, 2 * np.pi, WAVES)
        size_of = math.sqrt(2 * float(scaled.k1.constant_value) / WAVES)
        self.weights = size_of * rng.standard_normal((WAVES, DRAWS))
        error = self.noise * rng.standard_normal((len(rows), DRAWS))
        self.moves = cho_solve((made.L_, True), made.y_train_[:, None] - self._prior(rows) - error)

    def _prior(self, x: np.ndarray) -> np.ndarray:
        """[N, F] -> [N, K]"""
        found: np.ndarray = np.cos(x @ self.waves + self.phase) @ self.weights
        return found

    def predict(self, x: Tensor) -> Prediction:
        means, sds, drawn = [np.zeros(0)], [np.zeros(0)], [np.zeros((0, DRAWS))]
        for part in x.double().split(BLOCK) if len(x) else ():
            rows = part.numpy()
            mean, sd = self.made.predict(rows, return_std=True)
            means.append(mean)
            sds.append(np.sqrt(np.clip(sd**2 - self.noise**2, 0, None)))
            drawn.append(self._prior(rows) + self.covariance(rows, self.made.X_train_) @ self.moves)
        mean, sd, draws = np.concatenate(means), np.concatenate(sds), np.concatenate(drawn).T
        return Prediction(mean * self.size + self.level, sd * self.size, draws * self.size + self.level)


# by name --------------------------------------------------------------------------------------------------------

KINDS: dict[str, Any] = {"ensemble": Ensemble, "ridge": Ridge, "gp": GaussianProcess, "forest": Forest}
EXTRA = ("gp", "forest")


def surrogate(name: str) -> Surrogate:
    """The surrogate of this name with its default settings."""
    if name not in KINDS:
        raise UserError(
            f"there is no model {name!r}{did_you_mean(name, KINDS)}: take auto or one of {', '.join(KINDS)}"
        )
    if name in EXTRA and not _has_sklearn():
        raise UserError(f"the model {name} needs scikit-learn, which is not installed: pip install 'stochflow[design]'")
    return KINDS[name]()


def available() -> list[str]:
    """Names of the surrogates that can be fitted here."""
    return [name for name in KINDS if name not in EXTRA or _has_sklearn()]


def _has_sklearn() -> bool:
    return importlib.util.find_spec("sklearn") is not None
