"""What a run will need in memory at least, from its settings alone: lower bounds, so that nothing is refused that would fit."""

from __future__ import annotations

from stochflow.files.memory import need
from stochflow.law.measure import SAMPLES
from stochflow.learn.objectives import SGFNKL, FlowKL, LogVariance, Objective, SubTrajectoryBalance
from stochflow.nets.lookup import MOST_ROWS
from stochflow.runs.config import Train
from stochflow.scores.landscapes import BitModes
from stochflow.types import Task
from stochflow.worlds.env import Enumerable, Env, numbers

FLOAT, INT, DOUBLE = 4, 8, 8
HELD, SAVED = (
    5,
    8,
)  # copies of the weights: with gradient, two moments and average; what a checkpoint makes of four of them
LEARNED = ("neural", "thought")  # models of the noise that give a table of moves for each action
HIDDEN = 64  # units of such a model
BLOCK = 64  # rows of a block of distinct states are a multiple of this, see `Policy`

Part = tuple[float, str]  # bytes, and what to lower


def check_memory(task: Task, train: Train, cuda: bool = False) -> None:
    """UserError where a run needs more memory than is free; what is on a GPU is the GPU's own to say."""
    if cuda:
        return
    env, seeds = task.env, train.seeds
    rows = seeds * train.batch
    look = seeds * (train.look or (0 if train.oracle_calls else SAMPLES))
    walked = {"a batch's trajectories": (trajectories(env, rows), "--batch, --seeds, or the size of the task")}
    _refuse({}, {"step": walked})  # first, because what follows looks at a state
    size = parameters(env, train) * FLOAT * seeds
    smaller = "--hidden, --layers, --seeds, or the size of the task"
    held = {
        "networks": (size * HELD, smaller),
        "replay": (replay(env, train.replay_size, seeds) if train.replay else 0.0, "--replay-size or --seeds"),
    }
    if not task.channel.exact:
        model = noise_model(env, train) * seeds
        held["the model of the noise"] = (model, "--seeds or the size of the task, or take --dynamics known")
        if train.dynamics_off_pol and train.dynamics in LEARNED:
            held["the noise's replay"] = (replay(env, train.replay_size, seeds), "--replay-size or --seeds")
            drawn = trajectories(env, seeds * float(train.dynamics_sample_size))
            walked["what the noise model learns from"] = (drawn, "--dynamics-sample-size or --seeds")
    step = walked | {
        "activations": (activations(env, train, rows), "--batch, --seeds, --hidden, or the size of the task"),
        "the oracle": (oracle(task, rows), "--batch, --seeds or --modes"),
    }
    end = {
        "the final look": (trajectories(env, look), "--look"),
        "the final look's scores": (oracle(task, look), "--look, --seeds or --modes"),
        "what the network reads in the final look": (
            read(env, train, look // seeds),
            "--look, --seeds, or the size of the task",
        ),
        "the final look at the noise": (noise_tables(task, train, look), "--look, or take --dynamics known"),
    }
    if _has_head(train):
        end["the final look at the head of the action"] = (
            head(env, look),
            "--look, or take an --objective without a head",
        )
    _refuse(held, {"step": step, "end": end, "saving": {"a checkpoint": (size * SAVED, smaller)}})


def check_law(env: Env, seeds: int) -> None:
    """The same of the exact law of so many seeds: the graph of all states, and each seed's law."""
    assert isinstance(env, Enumerable)
    count = float(env.count())
    graph = count * (env.state_dim * INT + env.num_moves * (1 + FLOAT + DOUBLE) + 2 * INT)
    parts = {
        "the graph of all states": (graph, "the size of the task"),
        "each seed's exact law": (3 * count * seeds * DOUBLE, "--seeds or the size of the task"),
    }
    _refuse({}, {"law": parts})


def check_step(task: Task, train: Train, objective: Objective, noise: bool) -> None:
    """The same of an iteration by autograd, which keeps what a compiled one need not; `noise`: of its model of the noise too."""
    env, rows = task.env, float(train.seeds * train.batch)
    steps = env.horizon * rows
    fewer = "--batch, --seeds, or the size of the task"
    parts = {
        "a batch's trajectories": (trajectories(env, rows), fewer),
        "what the network reads": (read(env, train, train.batch, train.layers), fewer),
    }
    if noise and not task.channel.exact:
        learned = 2 * noise_tables(task, train, rows) + histories(task, train, rows)
        parts["the model of the noise"] = (learned, f"{fewer}, or take --dynamics known")
    if isinstance(objective, SubTrajectoryBalance):
        parts["all pairs of states"] = (4 * FLOAT * (env.horizon + 1.0) ** 2 * rows, f"{fewer}, or take --objective tb")
    if isinstance(objective, FlowKL | SGFNKL):
        parts["all children of all states"] = (children(env, train, steps), f"{fewer}, or take --objective db")
    if isinstance(objective, LogVariance) and env.contexts is not None:
        parts["all pairs of trajectories"] = ((1 + FLOAT) * rows * train.batch, "--batch, or take --objective tb")
    if _has_head(train):
        parts["the head of the action"] = (2 * head(env, rows), fewer)
    _refuse({}, {"step": parts})


def check_sample(env: Env, count: int, unique: bool, simulated: bool) -> None:
    """The same of `count` objects drawn from a run: what is remembered of each so that none comes twice, and rows that must be sorted."""
    different = min(count, env.count()) if unique and isinstance(env, Enumerable) else count
    bytes_ = different * (70.0 * unique + 500.0 * simulated)
    need(
        bytes_,
        f"-n {count}{' --unique' if unique else ''}{' --simulate' if simulated else ''}",
        "draw fewer, or add --top",
    )


def _refuse(held: dict[str, Part], moments: dict[str, dict[str, Part]]) -> None:
    """UserError where what is held all the time, and what the worst moment adds to it, do not fit."""
    worst = max(moments.values(), key=lambda parts: sum(bytes_ for bytes_, _ in parts.values()))
    parts = held | worst
    largest = max(parts, key=lambda name: parts[name][0])
    need(sum(bytes_ for bytes_, _ in parts.values()), f"this run, {largest} above all,", f"lower {parts[largest][1]}")


# parts ----------------------------------------------------------------------------------------------------------


def trajectories(env: Env, rows: float) -> float:
    """Bytes of a batch's states, actions, moves and masks."""
    return rows * (env.horizon + 1.0) * (env.state_dim * INT + 2 * INT + env.num_moves)


def inputs(env: Env) -> int:
    """Numbers that a fully connected network reads of a state."""
    return int(env.features(env.initial((1,))).shape[-1])


def parameters(env: Env, train: Train) -> float:
    """Numbers of one seed's network."""
    out = env.num_moves * (1 + env.num_moves * _has_head(train))
    inner = train.hidden * train.hidden * max(train.layers - 1, 0) + train.hidden * out
    if train.net == "transformer":
        return float(12 * train.hidden * train.hidden * train.layers + train.hidden * out)
    if train.net not in ("mlp", "lookup"):
        return float(inner)
    table = 0
    if train.net == "lookup" and isinstance(env, Enumerable) and env.count() <= MOST_ROWS:
        table = HIDDEN * (env.count() // (env.num_moves + 1))  # the finished ones have no row
    return float(inner + train.hidden * inputs(env) + table)


def _has_head(train: Train) -> bool:
    """Whether the network tells the action of each move."""
    return train.objective.endswith(("-head", "-published"))


def head(env: Env, rows: float) -> float:
    """Bytes of what it says at every state of a batch: a logit for each pair of action and move."""
    return FLOAT * env.horizon * rows * float(env.num_moves) ** 2


def noise_model(env: Env, train: Train) -> float:
    """Bytes of one seed's model of the noise."""
    moves = float(env.num_moves)
    if train.dynamics == "tabular":
        return (moves + 1) * moves * moves * DOUBLE
    return HIDDEN * moves * moves * FLOAT * HELD if train.dynamics in LEARNED else 0.0


def activations(env: Env, train: Train, rows: float) -> float:
    """Bytes of what the gradient needs of one batch: a hidden layer a state, and the logits."""
    steps = env.horizon * rows
    if train.net == "transformer":  # and what each letter made of every other
        return FLOAT * steps * train.layers * (16.0 * train.hidden)
    if train.net in ("gru", "lstm"):  # three gates or four, and what they make
        return FLOAT * steps * train.layers * (4.0 * train.hidden)
    return FLOAT * steps * env.num_moves * 2.0


def replay(env: Env, size: float, seeds: int) -> float:
    """Bytes of a replay buffer: moves and actions in two bytes each."""
    return 4.0 * size * seeds * env.horizon


def oracle(task: Task, rows: float) -> float:
    """Bytes of what an oracle makes of a batch: the distances to all modes, where it measures them."""
    if not isinstance(task.oracle, BitModes):
        return 0.0
    return 2 * FLOAT * rows * len(task.oracle.mode_bits)


def noise_tables(task: Task, train: Train, rows: float) -> float:
    """Bytes of a learned model's moves for each action, at every state of a batch."""
    if task.channel.exact or train.dynamics not in LEARNED:
        return 0.0
    return FLOAT * task.env.horizon * rows * float(task.env.num_moves) ** 2


def histories(task: Task, train: Train, rows: float) -> float:
    """Bytes of what a learned model reads of a batch: the states, or the past before each step and what a transformer makes of it."""
    steps = task.env.horizon * rows
    if train.dynamics == "neural":
        return FLOAT * steps * (inputs(task.env) + HIDDEN)
    if train.dynamics != "thought":
        return 0.0
    long = 2.0 * task.env.horizon
    return steps * long * INT + rows * (long + 1) * 2 * 10 * 32 * FLOAT  # two layers of width 32, ten vectors each


def read(env: Env, train: Train, batch: float, layers: int = 1) -> float:
    """Bytes of the features of a batch's states and of the layers made of them that are kept."""
    if train.net not in ("mlp", "lookup"):
        return 0.0
    wide = inputs(env)
    if env.free and wide >= 4 * train.hidden:  # a running sum over the moves
        wide = 0
    states = (env.horizon + 1.0) * batch
    if numbers(env) and env.contexts is None:  # each distinct one is read once, and how many there are is not known
        states = BLOCK * -(-states // (16 * BLOCK)) if train.seeds > 1 else 1.0
    return FLOAT * states * train.seeds * (wide + train.hidden * layers)


def children(env: Env, train: Train, steps: float) -> float:
    """Bytes of all children of so many states, and of their features where they are not told apart by number."""
    each = 2.0 * env.state_dim * INT + env.num_moves * (1 if env.tree else 2 + 2 * FLOAT)
    if train.net in ("mlp", "lookup") and not numbers(env):
        each += inputs(env) * FLOAT
    return steps * env.num_moves * each
