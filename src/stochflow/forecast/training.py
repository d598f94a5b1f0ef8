"""Three ways to train a forecaster on the windows of a `Series`: by error as reward, by likelihood, by both.

mse, mae  trajectory balance on the policy's own forecasts: P(x | c) ∝ exp E_y log R(x, y), a bump around the mean (median)
nll       -log p(true bins | c), p the law of moves through the channel: the conditional law itself
mix       (1 - w) * the first + w * the second; its fixed point is in docs/forecasting.md
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stochflow.forecast.config import Forecast
from stochflow.learn import objectives
from stochflow.learn.buffer import join
from stochflow.learn.evaluate import evaluate
from stochflow.learn.objectives import Form, Objective, TrajectoryBalance
from stochflow.learn.rollout import rollout
from stochflow.nets.encoders import EncoderNet
from stochflow.nets.layers import Net
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.nets.windows import PathPolicy, WindowMLP, WindowTransformer, attach
from stochflow.noise.dynamics import Dynamics, Known, trainable_steps
from stochflow.ops import NEG, masked_mean
from stochflow.scores.rewards import Linear
from stochflow.training.sources import OnPolicy, Source
from stochflow.training.trainer import Iteration, Trainer
from stochflow.types import Task, Trajectories
from stochflow.worlds.channels import Exact, Neighbour, Slip
from stochflow.worlds.env import Channel
from stochflow.worlds.series import Nearness, Series

CHECK_EVERY = 25  # iterations between two looks at the validation windows
PATIENCE = 4  # looks without improvement after which training ends
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the network's logits beside the prior's, tried on the validation windows
WORTH = 0.005  # nats a step by which a network must be better than the prior on the validation windows
TEMPERATURES = (0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)  # tried on the validation windows
LEAST_WINDOWS = 150  # below which a network is not tried
FEW = 1000  # training windows below which the validation windows are too precious not to be trained on


# objectives ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Likelihood(Objective):
    """Minus the log-likelihood of the true bins: of the moves through the channel, or, with REALISED, as if there were none.

    Only trajectories copied from the data count (`real` is False): what the policy did itself says nothing about the series.
    """

    form: Form = objectives.MARGINAL

    @property
    def needs(self):
        return self.form.needs

    def residual(self, t):
        return -self.form.step(t).sum(0)

    def loss(self, t, world):
        return masked_mean(self.residual(t), ~world.trajectories.real, (1,))


@dataclass(frozen=True)
class Mixture(Objective):
    """(1 - weight) * trajectory balance on what the policy did + weight * likelihood of what the data did."""

    weight: float = 0.5
    form: Form = objectives.MARGINAL

    @property
    def needs(self):
        return TrajectoryBalance(self.form).needs | Likelihood(self.form).needs

    def residual(self, t):
        return TrajectoryBalance(self.form).residual(t)

    def loss(self, t, world):
        balance = masked_mean(self.residual(t).square(), world.trajectories.real, (1,))
        return (1 - self.weight) * balance + self.weight * Likelihood(self.form).loss(t, world)


# dynamics -----------------------------------------------------------------------------------------------------------


class Counted(Dynamics):
    """Smoothed counts of (ordered bin, executed bin). Every bin is legal at every step, so one matrix product is the marginal."""

    PRIOR = 0.1

    def __init__(self, env: Series, seeds: int):
        torch.nn.Module.__init__(self)
        self.env = env
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros(seeds, env.num_moves, env.num_moves, dtype=torch.float64))

    def _table(self) -> Tensor:
        """P(executed | ordered), [S, K, K]."""
        counts = self.counts + self.PRIOR
        return (counts / counts.sum(-1, keepdim=True)).float()

    def log_probs(self, state, legal, action, memory=None):
        seed = torch.arange(len(self.counts), device=action.device).unsqueeze(-1)
        return torch.where(legal, self._table()[seed, action].log(), NEG)

    def marginal(self, state, legal, log_pi, memory=None):
        pi = torch.where(legal, log_pi, NEG).exp()
        return torch.where(legal, (pi @ self._table()).clamp(min=1e-30).log(), NEG)  # [..., S, B, K] @ [S, K, K]

    def observe(self, traj):
        steps = trainable_steps(self.env, traj)
        size = self.env.num_moves
        seed = torch.arange(len(self.counts), device=steps.device).unsqueeze(-1)
        place = (seed * size + traj.actions.clamp(min=0)) * size + traj.moves
        self.counts.view(-1).index_add_(0, place.flatten(), steps.flatten().to(self.counts))

    def loss(self, traj):
        with torch.no_grad():
            return super().loss(traj)


# sources ------------------------------------------------------------------------------------------------------------


def follow(env: Series, row: Tensor) -> Trajectories:
    """The true futures of windows [S, B] as trajectories: nobody chose them, so they carry no actions and are not real."""
    bins = env.truth(row)  # [S, B, L]
    time = torch.arange(env.horizon + 1, device=row.device)[:, None, None, None]
    place = torch.arange(env.horizon, device=row.device)
    so_far = torch.where(place < time, bins, env.num_moves)  # [L+1, S, B, L], padded
    states = torch.cat([row.expand(env.horizon + 1, *row.shape).unsqueeze(-1), so_far], -1)
    moves = bins.movedim(-1, 0)
    no = torch.zeros_like(row, dtype=torch.bool)
    return Trajectories(
        states,
        torch.full_like(moves, -1),
        moves,
        torch.ones_like(moves, dtype=torch.bool),
        torch.zeros_like(row).float(),
        no,
    )


class Targets(Source):
    """The true futures of random windows."""

    scored = True  # the likelihood asks no oracle

    def __init__(self, env: Series, rows: Tensor, seeds: int, batch: int):
        super().__init__()
        self.env, self.allowed, self.seeds, self.batch = env, rows, seeds, batch

    def act(self, step):
        chosen = torch.randint(len(self.allowed), (self.seeds, self.batch), device=self.allowed.device)
        return follow(self.env, self.allowed[chosen])


class Forecasts(OnPolicy):
    """The policy's own forecasts of random windows."""

    def __init__(self, task: Task, policy: Policy, rows: Tensor, batch: int, explore: float = 0.05):
        super().__init__(task, policy, batch, explore)
        self.allowed = rows

    def rows(self, policy):
        chosen = torch.randint(len(self.allowed), (policy.num_seeds, self.batch), device=self.allowed.device)
        return self.allowed[chosen]


class Both(Source):
    """The policy's own forecasts, which alone may train the dynamics, and beside them the true futures of other windows."""

    def __init__(self, own: Forecasts, targets: Targets):
        super().__init__()
        self.own, self.targets = own, targets

    def act(self, step):
        return self.own.act(step)

    def mix(self, traj):
        return join(traj, self.targets.act(torch.zeros(())))


# fitting ------------------------------------------------------------------------------------------------------------


class Fitted(NamedTuple):
    """A trained forecaster and how it came about."""

    task: Task
    policy: Policy
    dynamics: Dynamics
    steps: int  # iterations of the weights that were kept
    temperature: (
        float  # the logits were divided by it, because the validation windows were likeliest then (without a prior)
    )
    validation: list[
        list[float]
    ]  # a row a look, the first before training: the criterion of each seed (lower is better)
    share: float = 1.0  # of the network's logits beside the prior's; 0: the prior alone


class Look(NamedTuple):
    """How far training is."""

    stage: str  # what is being done, in words
    step: int  # iterations done; 0 when a stage begins, `steps` when it ends
    steps: int  # of this stage: the most there will be, until it ends
    loss: float | None  # of the last iteration, mean over the seeds
    validation: float | None  # the criterion on windows that were held out, where there are any


Watch = Callable[[Look], None]


def make_channel(settings: Forecast) -> Channel:
    return {"none": Exact(), "slip": Slip(settings.stick), "neighbour": Neighbour(settings.stick)}[settings.noise]


def make_task(env: Series, settings: Forecast, rows: Tensor) -> Task:
    """Reward: log R = -beta * mean_h(|v(x_h) - y_h|^p / sigma_h^p), sigma_h the spread of the training targets at step h."""
    power = 1 if settings.mode == "mae" else 2
    known = env.windows.target[rows]
    sigma = known.square().mean(0).sqrt() if power == 2 else known.abs().mean(0)
    beta = settings.beta or env.horizon / 2
    return Task(env, make_channel(settings), Nearness(env, power, sigma.clamp(min=env.bins.width)), Linear(beta))


def make_policy(
    env: Series,
    settings: Forecast,
    rows: Tensor,
    net: Net | None = None,
    encoder: EncoderNet | None = None,
    back_action: bool = False,
) -> Policy:
    """A policy that starts from the law of the environment's paths; without one, from the marginal law of the bins."""
    encoder = encoder or (WindowMLP() if settings.encoder == "mlp" else WindowTransformer())
    seeds = [settings.seed + i for i in range(settings.seeds)]
    if env.paths is not None and settings.mode in ("nll", "mix"):
        return PathPolicy(env, net or MLP(settings.hidden, 2), seeds=seeds, encoder=encoder)
    policy = Policy(env, net or MLP(settings.hidden, 2), seeds=seeds, encoder=encoder, back_action=back_action)
    if settings.mode in ("nll", "mix"):
        count = torch.bincount(env.truth(rows).flatten(), minlength=env.num_moves).float()
        with torch.no_grad():
            policy.head.bias[..., : env.num_moves] = ((count + 0.5) / (count + 0.5).sum()).log()
    return policy


def make_trainer(
    task: Task,
    policy: Policy,
    settings: Forecast,
    rows: Tensor,
    form: Form = objectives.MARGINAL,
    explore: float = 0.05,
    clip: float = 10.0,
    objective: Objective | None = None,
) -> Trainer:
    """`form` = REALISED trains as if what is ordered always happened; `objective` takes the place of trajectory balance in modes mse and mae."""
    env = task.env
    assert isinstance(env, Series)
    noisy = settings.noise != "none"
    dynamics: Dynamics = (
        Known(env, task.channel) if settings.dynamics == "known" or not noisy else Counted(env, settings.seeds)
    )
    dynamics.to(policy.device)
    own = Forecasts(task, policy, rows, settings.batch, explore)
    targets = Targets(env, rows, settings.seeds, settings.batch)
    source: Source
    if settings.mode == "nll":
        objective = Likelihood(form)
        source = Both(own, targets) if isinstance(dynamics, Counted) else targets
    elif settings.mode == "mix":
        objective, source = Mixture(settings.mix, form), Both(own, targets)
    else:
        objective, source = objective or TrajectoryBalance(form), own
    return Trainer(task, policy, dynamics, objective, source, lr=settings.lr, iteration=Iteration(clip))


@torch.no_grad()
def criterion(trainer: Trainer, rows: Tensor, settings: Forecast, form: Form) -> Tensor:
    """[S], lower is better, on windows that were not trained on: minus the log-likelihood of their truth, or the error of forecasts."""
    seeds = trainer.policy.num_seeds
    every = rows.expand(seeds, len(rows))
    if settings.mode in ("nll", "mix"):
        env: Any = trainer.task.env
        found = []
        for part in every.split(100, 1):  # a few at a time: the law over paths is held for every step of each
            terms = evaluate(trainer.task, trainer.policy, trainer.dynamics, follow(env, part), None, form.needs)
            found.append(-form.step(terms).sum(0))
        return torch.cat(found, 1).mean(1)
    devices = [every.device] if every.is_cuda else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)  # the same luck at every look
        drawn = rollout(trainer.task, trainer.policy, 4 * len(rows), row=every.repeat(1, 4))
    return -trainer.task.oracle(drawn.states[-1]).mean(1)


class Stage(NamedTuple):
    """An environment and the windows to train on there."""

    env: Series
    train: Tensor
    valid: Tensor  # windows that are held out; may be empty


def fit(
    early: Stage,
    final: Stage,
    settings: Forecast,
    device: torch.device,
    form: Form = objectives.MARGINAL,
    watch: Watch = lambda look: None,
) -> Fitted:
    """Find out on `early`, whose prior knows nothing of the windows that validate, how long to train and how far to follow the network;
    then train that long on `final`. Where windows are many, the weights of the first stage are kept.

    `watch` is told how far it is. The random stream outside is left as it was.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        steps, temperature, share = settings.steps, 1.0, 1.0
        looks: list[list[float]] = []
        if len(early.valid):
            trainer, steps, looks = _validated(early, settings, device, form, watch)
            guarded = isinstance(trainer.policy, PathPolicy)
            if guarded and settings.mode == "nll" and settings.noise == "none" and settings.network == "auto":
                share = _best_share(trainer, settings, early.valid.to(device), form)
            elif not guarded and settings.mode in ("nll", "mix"):
                temperature = _best_temperature(trainer, settings, early.valid.to(device), form)
            if share == 0:
                return untrained(final.env, settings, device)._replace(validation=looks)
            if len(early.train) >= FEW:
                _finish(trainer.policy, temperature, share)
                return _moved(
                    trainer,
                    final.env,
                    Fitted(trainer.task, trainer.policy, trainer.dynamics, steps, temperature, looks, share),
                )
        trainer = _start(final.env, settings, final.train, device, form)
        stage = f"training on {len(final.train)} windows"
        watch(Look(stage, 0, steps, None, None))
        trainer.train(steps, CHECK_EVERY, lambda t: watch(Look(stage, t.steps_done, steps, _loss(t), None)))
        trainer.policy_flat.swap()  # the averaged weights stay in place: forecasts are made with them
        _finish(trainer.policy, temperature, share)
    return Fitted(trainer.task, trainer.policy, trainer.dynamics, steps, temperature, looks, share)


def untrained(env: Series, settings: Forecast, device: torch.device) -> Fitted:
    """The prior alone, as a policy of one seed."""
    one = dataclasses.replace(settings, seeds=1)
    task = Task(env, make_channel(settings), Nearness(env), Linear(1.0))
    policy = make_policy(env, one, torch.zeros(1, dtype=torch.long)).to(device)
    assert isinstance(policy, PathPolicy)
    policy.share.zero_()
    return Fitted(task, policy, Known(env, task.channel), 0, 1.0, [], 0.0)


def _moved(trainer: Trainer, env: Series, fitted: Fitted) -> Fitted:
    """The same weights over other windows."""
    attach(fitted.policy, env)
    return fitted._replace(task=fitted.task._replace(env=env))


@torch.no_grad()
def _finish(policy: Policy, temperature: float, share: float) -> None:
    temper(policy, temperature)
    if isinstance(policy, PathPolicy):
        policy.share.fill_(share)


@torch.no_grad()
def _best_share(trainer: Trainer, settings: Forecast, rows: Tensor, form: Form) -> float:
    """How far to follow the network on windows that it has not seen: not at all where it does not help."""
    policy = trainer.policy
    assert isinstance(policy, PathPolicy)
    found = {}
    for share in SHARES:
        policy.share.fill_(share)
        found[share] = float(criterion(trainer, rows, settings, form).mean())
    policy.share.fill_(1.0)
    best = min(found, key=lambda s: found[s])
    return best if found[best] < found[0.0] - WORTH * trainer.task.env.horizon else 0.0


def _start(env: Series, settings: Forecast, rows: Tensor, device: torch.device, form: Form) -> Trainer:
    torch.manual_seed(settings.seed)
    task = make_task(env, settings, rows)
    policy = make_policy(env, settings, rows).to(device)
    return make_trainer(task, policy, settings, rows.to(device), form)


def _loss(trainer: Trainer) -> float:
    return float(trainer.stats["loss"].mean())


def _validated(
    early: Stage, settings: Forecast, device: torch.device, form: Form, watch: Watch
) -> tuple[Trainer, int, list[list[float]]]:
    """Train until the validation criterion, averaged over the seeds, no longer falls; the best weights are left in place."""
    trainer = _start(early.env, settings, early.train, device, form)
    rows = early.valid.to(device)
    stage = f"finding out how long to train, on {len(early.train)} windows and {len(rows)} that validate"
    first = criterion(trainer, rows, settings, form)
    looks: list[list[float]] = [first.tolist()]
    best, at, weights = float(first.mean()), 0, trainer.policy_flat.average.clone()
    watch(Look(stage, 0, settings.steps, None, best))
    while trainer.steps_done < settings.steps and trainer.steps_done - at < PATIENCE * CHECK_EVERY:
        trainer.train(min(trainer.steps_done + CHECK_EVERY, settings.steps))
        with trainer.averaged():
            found = criterion(trainer, rows, settings, form)
        looks.append(found.tolist())
        if float(found.mean()) < best:
            best, at = float(found.mean()), trainer.steps_done
            weights.copy_(trainer.policy_flat.average)
        over = trainer.steps_done >= settings.steps or trainer.steps_done - at >= PATIENCE * CHECK_EVERY
        last = trainer.steps_done if over else settings.steps
        watch(Look(stage, trainer.steps_done, last, _loss(trainer), float(found.mean())))
    with torch.no_grad():
        trainer.policy_flat.values.copy_(weights)
        trainer.policy_flat.changed()
    return trainer, at, looks


@torch.no_grad()
def temper(policy: Policy, temperature: float) -> None:
    """Divide the logits of the actions, for good, by dividing the weights they come from."""
    moves = policy.env.num_moves
    policy.head.weight[..., :moves] /= temperature
    policy.head.bias[..., :moves] /= temperature


def _best_temperature(trainer: Trainer, settings: Forecast, rows: Tensor, form: Form) -> float:
    """Networks trained on few windows are too sure of themselves; how much so, the windows they have not seen tell."""
    found = {}
    for temperature in TEMPERATURES:
        temper(trainer.policy, temperature)
        found[temperature] = float(criterion(trainer, rows, settings, form).mean())
        temper(trainer.policy, 1 / temperature)
    return min(found, key=lambda t: found[t])


def split(
    ends: Sequence[int], fraction: float, horizon: int, stride: int, panel: bool = False
) -> tuple[list[int], list[int]]:
    """Positions of the training and of the validation windows of one series, in time: the last `fraction` validates, and
    windows whose targets reach into the first validation target are left out. In a `panel` one window of each series is enough."""
    count = len(ends)
    held = max(int(fraction * count), 1 if panel else 0)
    purge = max(0, -(-horizon // stride) - 1)
    if held < (1 if panel else 3) or count - held - purge < (4 if panel else 10):
        return list(range(count)), []
    return list(range(count - held - purge)), list(range(count - held, count))
