"""Search adds data and leaves the target alone; it resumes exactly; its parts do what they say."""

from __future__ import annotations

import math

import pytest
import torch

from stochflow.errors import UserError
from stochflow.law.exact import Graph, exact_law, target_law
from stochflow.law.measure import Yardstick
from stochflow.law.metrics import l1
from stochflow.learn.evaluate import evaluate
from stochflow.learn.objectives import DetailedBalance, LogVariance, TrajectoryBalance
from stochflow.learn.rollout import rollout
from stochflow.nets.lookup import Lookup
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known
from stochflow.scores.oracles import Host, Table
from stochflow.scores.rewards import Linear, Power, Sharpening
from stochflow.training.ahead import Ahead
from stochflow.training.search.local import LocalSearch
from stochflow.training.search.paths import code, legal_letters, random_strings, ways_to
from stochflow.training.search.pool import Pairs, Pool, apart
from stochflow.training.search.population import Population, default_distance
from stochflow.training.search.replay import RankBuffer, RankReplay
from stochflow.training.search.start import Start
from stochflow.training.search.variation import KINDS, Letters, cross, uniform, vary
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Trainer
from stochflow.types import Task
from stochflow.worlds.channels import Exact, Slip
from stochflow.worlds.check import check_env
from stochflow.worlds.grid import Corners, Grid
from stochflow.worlds.rules import EditBudget, Rules
from stochflow.worlds.strings import Strings


def strings(min_length=None, channel=None) -> Task:
    env = Strings("ACG", 4, min_length)
    scores = torch.rand(env.count(), generator=torch.Generator().manual_seed(3)) ** 4 + 0.01
    return Task(env, channel or Exact(), Table(env, scores), Power(2.0))


def grid() -> Task:
    return Task(Grid(2, 5), Exact(), Corners(5, 0.05), Power(floor=0.05))


def searching(kind: str, task: Task, policy: Policy):
    plain = OnPolicy(task, policy, 16, 0.1)
    if kind == "population":
        return Population(plain, task, policy, children=16)
    if kind == "local":
        return LocalSearch(plain, task, policy, tries=16)
    if kind == "rank":
        return RankReplay(plain, RankBuffer(task.env, 40, policy.num_seeds), 16, every=2)
    if kind == "start":
        return Start(plain, task, policy, task.env.encode(["ACGA", "GGGG"]))
    inner = Population(Start(plain, task, policy, task.env.encode(["ACGA"])), task, policy, children=16)
    return RankReplay(
        LocalSearch(inner, task, policy, tries=8), RankBuffer(task.env, 40, policy.num_seeds), 16, every=2
    )


def distance(task: Task, trainer: Trainer) -> torch.Tensor:
    graph = Graph(task.env)
    with trainer.averaged():
        return l1(exact_law(graph, task.channel, trainer.policy), target_law(graph, task).target) / 2


def made(kind: str, task: Task, objective=None, seeds=(0,), net=None) -> Trainer:
    torch.manual_seed(1)
    policy = Policy(task.env, net or Lookup(32, 1), seeds=seeds)
    return Trainer(
        task,
        policy,
        Known(task.env, task.channel),
        objective or TrajectoryBalance(),
        searching(kind, task, policy),
        lr=3e-3 if kind == "rank" else 1e-2,
    )


@pytest.mark.parametrize(
    ("kind", "steps"), [("population", 300), ("local", 300), ("rank", 900), ("start", 700), ("all", 300)]
)
def test_the_target_law_is_what_it_is_without_search(kind, steps):
    """Off-policy data alone: the exact law comes as near to the target as it does on policy (TV .01 at this length)."""
    task = strings()
    trainer = made(kind, task)
    trainer.train(steps)
    assert float(distance(task, trainer)) < 0.02


@pytest.mark.parametrize(
    ("kind", "task", "objective"),
    [
        ("population", strings(min_length=1), LogVariance()),
        pytest.param("all", strings(channel=Slip(0.3)), DetailedBalance(), marks=pytest.mark.slow),
        pytest.param("local", grid(), TrajectoryBalance(), marks=pytest.mark.slow),
        ("rank", grid(), DetailedBalance()),
    ],
)
def test_so_it_is_with_stop_noise_and_many_parents(kind, task, objective):
    trainer = made(kind, task, objective, net=MLP(64, 2) if isinstance(task.env, Grid) else None)
    trainer.train(400)
    # Slip(0.3) keeps the best law itself away from the target: compare with the same training without search
    limit = 0.03
    if not task.channel.exact:
        plain = Trainer(
            task,
            (p := Policy(task.env, Lookup(32, 1))),
            Known(task.env, task.channel),
            objective,
            OnPolicy(task, p, 32, 0.1),
            lr=1e-2,
        )
        plain.train(400)
        limit = float(distance(task, plain)) + 0.03
    assert float(distance(task, trainer)) < limit


@pytest.mark.parametrize("kind", ["population", "local"])
def test_where_the_policy_is_right_searched_trajectories_have_no_residual(kind):
    """Zero on its own trajectories is zero on every trajectory: search finds nothing that is wrong."""
    task = strings()
    trainer = made(kind, task)
    trainer.train(500)
    with trainer.averaged(), torch.no_grad():
        source = searching(kind, task, trainer.policy)
        for _ in range(3):
            batch = source.act(torch.zeros(()))
            batch = batch._replace(score=task.oracle(batch.states[-1]))
            source.mix(batch)
        t = evaluate(task, trainer.policy, trainer.dynamics, batch)
        residual = TrajectoryBalance().residual(t)
    assert batch.score.shape[1] == 32
    assert not bool(batch.real[:, 16:].any())
    own, found = residual[:, :16].abs().max(), residual[:, 16:].abs().max()
    assert float(found) < max(3 * float(own), 0.2)


@pytest.mark.parametrize("kind", ["population", "local", "rank", "start", "all"])
def test_a_resumed_search_goes_on_bit_for_bit(kind):
    task = strings(min_length=2) if kind != "start" else strings()
    task = task._replace(env=strings().env) if kind == "all" else task
    whole, first, second = (made(kind, task, seeds=(0, 1)) for _ in range(3))
    torch.manual_seed(5)
    whole.train(23)
    torch.manual_seed(5)
    first.train(13)
    kept = first.state_dict()
    torch.manual_seed(99)
    second.load_state_dict(kept)
    second.train(23)
    one, other = whole.state_dict(), second.state_dict()
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_children_are_strings_of_the_world_and_nobody_asked_about_them():
    task = strings(min_length=2)
    policy = Policy(task.env, MLP(8, 1), seeds=(0, 1))
    source = Population(OnPolicy(task, policy, 4), task, policy, children=6)
    seen: set[int] = set()
    for _ in range(12):
        batch = source.act(torch.zeros(()))
        last = batch.states[-1]
        size = task.env.lengths(last)
        assert int(size.min()) >= 2
        assert torch.equal(
            task.env.moves(batch.states[:-1]).gather(-1, batch.moves.unsqueeze(-1)).squeeze(-1) | ~batch.alive,
            torch.ones_like(batch.alive),
        )
        children = code(last[0, 4:]).tolist()
        if len(seen) < 60:
            assert not seen.intersection(children)
            assert len(set(children)) == 6
        seen.update(code(last[0]).tolist())
        source.mix(batch._replace(score=task.oracle(last)))


def test_a_world_that_forbids_letters_is_respected():
    class NoDoubles(Strings):
        def moves(self, state):
            mask = super().moves(state).clone()
            size = self.lengths(state)
            last = state.gather(-1, (size - 1).clamp(min=0).unsqueeze(-1)).clamp(max=self.tokens - 1)
            again = torch.arange(self.num_moves) == last
            return mask & ~(again & (size > 0).unsqueeze(-1))

    env = NoDoubles("ACGT", 8)
    wanted = torch.randint(4, (200, 8))
    found = legal_letters(env, wanted)
    assert bool((found[:, 1:] != found[:, :-1]).all())
    legal = (wanted[:, 1:] != wanted[:, :-1]).all(1)
    assert torch.equal(found[legal], wanted[legal])


def test_every_kind_of_change_makes_another_string_of_the_same_world():
    torch.manual_seed(0)
    for least in (12, 3):
        letters = Letters(4, 12, least)
        first, second = uniform(letters, 400), uniform(letters, 400)
        for kind in range(len(KINDS)):
            child = vary(letters, first, second, torch.full((400,), kind))
            size = (child < 4).sum(1)
            assert int(size.min()) >= least
            assert bool(((child < 4) == (torch.arange(12) < size.unsqueeze(1))).all())  # padded at the end alone
            assert float((child == first).all(1).float().mean()) < 0.02
        assert bool((cross(letters, first, first) == first).float().mean() > 0.6)


def test_a_pool_keeps_the_best_and_the_best_at_a_distance():
    torch.manual_seed(0)
    objects = torch.randint(4, (500, 10)).unique(dim=0)
    scores = torch.rand(len(objects))
    pool = Pool(10, 4, distance=6, niches=20, best=30)
    for part in torch.arange(len(objects)).split(50):
        pool.note(objects[part], scores[part])
    best = scores.argsort(descending=True)[:30]
    assert torch.equal(pool.scores[:30], scores[best])
    order = scores.argsort(descending=True)
    by_hand: list[int] = []
    for i in order.tolist():
        if len(by_hand) < 20 and all(int((objects[i] != objects[j]).sum()) >= 6 for j in by_hand):
            by_hand.append(i)
    assert apart(objects[order], 6, 20).nonzero().flatten().tolist() == [order.tolist().index(i) for i in by_hand]
    assert bool(pool.known(objects).all())
    assert not bool(pool.known(objects + 4).any())


def test_of_equal_scores_the_newest_stay_so_that_a_plateau_is_crossed():
    torch.manual_seed(0)
    objects = torch.randint(4, (120, 10)).unique(dim=0)
    objects = objects[torch.randperm(len(objects))]
    pool = Pool(10, 4, distance=6, niches=5, best=30)
    pool.note(torch.full((1, 10), 3), torch.zeros(1))
    for part in objects.split(10):
        pool.note(part, torch.ones(len(part)))
    latest = {tuple(row) for row in objects[-30:].tolist()}
    assert sum(tuple(row) in latest for row in pool.objects.long().tolist()) == 30
    pool.note(torch.full((1, 10), 1), torch.full((1,), 2.0))
    assert float(pool.scores[0]) == 2.0  # a better one stays before all of them


def test_while_nothing_scores_above_the_lowest_the_search_stays_where_it_began():
    """A known sequence that scores 0, as its neighbours do, is still the best place to begin from."""
    torch.manual_seed(0)
    pool = Pool(10, 4, distance=6, niches=5, best=30)
    objects = torch.randint(4, (120, 10)).unique(dim=0)[torch.randperm(100)]
    for part in objects.split(10):
        pool.note(part, torch.zeros(len(part)))
    assert pool.flat
    assert not pool.pairs.matter  # nothing tells which pairs are to blame
    assert torch.equal(pool.objects[0].long(), objects[0])


def test_a_search_at_rest_begins_anew_and_the_two_are_joined():
    torch.manual_seed(0)
    pool = Pool(8, 4, distance=2, niches=5, best=30)
    pool.patience = 100
    objects = torch.randint(4, (20_000, 8)).unique(dim=0)
    objects = objects[torch.randperm(len(objects))]
    pool.note(objects[:1], torch.zeros(1))
    turns = []
    for part in objects[1:].split(20):
        before = len(pool.aside.scores)
        pool.note(part, torch.ones(len(part)))
        turns.append((before > 0, len(pool.aside.scores) > 0, len(pool.scores)))
        if len(turns) > 16:
            break
    anew = turns.index((False, True, 0))
    assert anew * 20 >= 100
    joined = turns.index(next(t for t in turns if t[:2] == (True, False)))
    assert joined > anew + 4
    assert turns[joined][2] >= 30  # the parents of both
    pool.note(torch.full((1, 8), 1), torch.full((1,), 2.0))
    assert float(pool.mark) > 1.0  # a better one counts as movement


def test_what_others_find_does_not_enter_a_search_that_began_anew():
    pool = Pool(4, 4, distance=2)
    pool.note(torch.tensor([[0, 0, 0, 0]]), torch.tensor([0.0]))
    pool.aside.admit(torch.tensor([[1, 1, 1, 1]]), torch.tensor([1.0]), 0.0)
    found = torch.tensor([[2, 2, 2, 2], [3, 3, 3, 3], [3, 3, 3, 3]])
    pool.note(found, torch.tensor([0.5, 0.7, 0.7]), torch.tensor([True, False, False]))
    assert pool.scores.tolist() == pytest.approx([0.5, 0.0])
    assert pool.aside.scores.tolist() == pytest.approx([1.0, 0.7])


def test_a_search_that_began_anew_and_rests_its_policy_is_resumed_exactly():
    env = Strings("ACGT", 8)
    task = Task(env, Exact(), Host(lambda texts: [float("AC" in t) for t in texts], env), Power(2.0))
    policy = Policy(env, MLP(8, 1))

    def population():
        source = Population(OnPolicy(task, policy, 4), task, policy, children=20)
        source.each[0].pool.patience = 60
        return source

    def go(source, batches):
        for _ in range(batches):
            batch = source.act(torch.zeros(()))
            source.mix(batch._replace(score=task.oracle(batch.states[-1])))

    torch.manual_seed(0)
    whole = population()
    anew = 0
    while anew < 2:  # in the middle of the second search
        go(whole, 1)
        anew = anew + 1 if len(whole.each[0].pool.aside.scores) else 0
    whole.rest.fill_(2)
    kept, dice = {k: v.clone() for k, v in whole.state_dict().items()}, torch.get_rng_state()
    go(whole, 30)
    other = population()
    other.load_state_dict(kept)
    torch.set_rng_state(dice)
    go(other, 30)
    assert not torch.equal(kept["breeders.0.pool.scores"], whole.each[0].pool.scores)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_a_renewal_keeps_what_both_parents_have_and_pairs_that_are_known():
    torch.manual_seed(0)
    letters = Letters(4, 12, 12)
    first = uniform(letters, 500)
    second = torch.where(torch.rand(500, 12) < 0.5, first, uniform(letters, 500))
    pairs = Pairs(4)
    seen = torch.randint(4, (3000, 6))
    bad = ((seen[:, :-1] == 1) & (seen[:, 1:] == 2)).any(1)
    pairs.note(seen, torch.where(bad, 0.0, 1.0))
    child = vary(letters, first, second, torch.full((500,), KINDS.index("renewal")), pairs.fill)
    assert int((child != first).sum(1).max()) > 4
    broken = ((child != first) & (first == second)).any(1)
    assert float(broken.double().mean()) < 0.2  # a letter, where nothing came of it
    free = uniform(letters, 500)
    filled = pairs.fill(free, torch.ones_like(free, dtype=torch.bool))
    assert not bool(((filled[:, :-1] == 1) & (filled[:, 1:] == 2)).any())
    kept = torch.arange(12) % 3 == 0
    assert torch.equal(pairs.fill(free, ~kept.expand(500, -1))[:, kept], free[:, kept])


@pytest.mark.parametrize("moving", [True, False])
def test_a_policy_has_one_turn_in_four_until_the_law_is_fixed(moving):
    """More children take the place of its draws: every batch asks about as many objects."""
    env = Strings("ACGT", 12)
    reward = Sharpening(12 * math.log(4)) if moving else Power(2.0)
    task = Task(env, Exact(), Host(lambda texts: [t.count("A") / 12 for t in texts], env), reward)
    policy = Policy(task.env, MLP(8, 1))
    turns = 0

    class Counted(OnPolicy):
        def act(self, step):
            nonlocal turns
            turns += 1
            return super().act(step)

    source = Population(Counted(task, policy, 4), task, policy, children=20)
    for _ in range(60):
        batch = source.act(torch.zeros(()))
        assert batch.score.shape[1] == 24
        source.mix(batch._replace(score=task.oracle(batch.states[-1])))
    assert turns == (15 if moving else 60)


def test_a_population_saved_before_it_had_all_its_tensors_is_loaded():
    """Runs of earlier versions open: what they did not save begins anew, and what they did is kept."""
    env = Strings("ACGT", 12)
    task = Task(env, Exact(), Host(lambda texts: [t.count("A") / 12 for t in texts], env), Power(2.0))
    policy = Policy(task.env, MLP(8, 1))
    torch.manual_seed(0)
    saved = Population(OnPolicy(task, policy, 4), task, policy, children=20)
    for _ in range(10):
        batch = saved.act(torch.zeros(()))
        saved.mix(batch._replace(score=task.oracle(batch.states[-1])))
    later = ("rest", "width", "clock", "mark", "aside.objects", "aside.scores")
    old = {k: v for k, v in saved.state_dict().items() if not k.endswith(later)}
    old = {k: v[:-1] if k.endswith("credit") else v for k, v in old.items()}
    opened = Population(OnPolicy(task, policy, 4), task, policy, children=20)
    opened.load_state_dict(old)
    assert torch.equal(opened.each[0].pool.objects, saved.each[0].pool.objects)
    assert int(opened.each[0].pool.clock.sum()) == 0
    assert torch.equal(opened.each[0].credit, torch.ones_like(saved.each[0].credit))
    assert opened.act(torch.zeros(())).score.shape[1] == 24


def test_pairs_seen_only_in_worthless_objects_are_avoided():
    """A forbidden pair is found out from scores alone."""
    torch.manual_seed(0)
    objects = torch.randint(4, (3000, 6))
    bad = ((objects[:, :-1] == 1) & (objects[:, 1:] == 2)).any(1)
    pairs = Pairs(4)
    pairs.note(objects, torch.where(bad, 0.0, torch.rand(3000)))
    fresh = torch.randint(4, (500, 6))
    breaks = ((fresh[:, :-1] == 1) & (fresh[:, 1:] == 2)).any(1)
    chance = pairs.log_chance(fresh)
    assert bool((chance[~breaks] == 0).all())
    assert bool((chance[breaks] < -10).all())


def test_the_best_are_kept_for_ever_and_drawn_by_rank():
    task = strings()
    policy = Policy(task.env, MLP(8, 1))
    buffer = RankBuffer(task.env, 10, flat=0.1)
    met: dict[int, float] = {}
    for _ in range(30):
        traj = rollout(task, policy, 8)
        traj = traj._replace(score=task.oracle(traj.states[-1]))
        buffer.add(traj)
        met |= dict(zip(code(traj.states[-1])[0].tolist(), traj.score[0].tolist(), strict=True))
    assert buffer.score[0].tolist() == sorted(met.values(), reverse=True)[:10]
    drawn = buffer.sample(40_000)
    assert torch.allclose(drawn.score, task.oracle(drawn.states[-1]))
    weight = 1 / (0.1 * 10 + torch.arange(10) + 1)
    share = (drawn.score[0].unsqueeze(1) == buffer.score[0]).float().mean(0)
    assert torch.allclose(share, weight / weight.sum(), atol=0.01)


def test_on_a_tree_a_way_back_needs_no_network():
    task = strings(min_length=1)
    states = task.env.all_states()[1:]
    way = ways_to(task, None, states.unsqueeze(0))
    assert torch.equal(way.states[-1, 0], states)
    assert bool((way.states[0] == task.env.pad).all())
    assert not bool(way.real.any())


def test_what_cannot_be_searched_is_refused():
    task = grid()
    policy = Policy(task.env, MLP(8, 1))
    plain = OnPolicy(task, policy, 4)
    with pytest.raises(UserError, match="varies strings"):
        Population(plain, task, policy, 8)
    with pytest.raises(UserError, match="at least one try"):
        LocalSearch(plain, task, policy, 0)
    with pytest.raises(UserError, match="at least 1"):
        RankReplay(plain, RankBuffer(task.env, 4), 0)
    assert default_distance(50) == 10


def test_a_dead_end_is_found_before_training_and_refused_at_the_first_object():
    class Trap(Strings):
        """After C nothing may follow."""

        def moves(self, state):
            size = self.lengths(state)
            last = state.gather(-1, (size - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
            return super().moves(state) & ~((last == 1) & (size > 0)).unsqueeze(-1)

    env = Trap("ACG", 5)
    with pytest.raises(UserError, match="dead end: nothing may follow"):
        check_env(env)
    asked = []
    oracle = Host(lambda texts: asked.extend(texts) or [1.0] * len(texts), env)
    with pytest.raises(UserError, match=r"ended at 'AC', state \[0, 1, 3, 3, 3\]"):
        oracle(torch.tensor([[0, 0, 0, 0, 0], [0, 1, 3, 3, 3]]))
    assert asked == []


def test_a_dead_end_under_a_tensor_oracle_is_refused_at_the_first_look_that_meets_it():
    """Nothing is asked in Python there, and random walks at the door may miss it."""

    class Rare(Strings):
        """After CC at the beginning nothing may follow."""

        def moves(self, state):
            trapped = (self.lengths(state) == 2) & (state[..., :2] == 1).all(-1)
            return super().moves(state) & ~trapped.unsqueeze(-1)

    class Share:
        on_device, calls = True, 0

        def __call__(self, state):
            return (state == 1).float().mean(-1)

    env = Rare("ACGT", 30)
    task = Task(env, Exact(), Share(), Linear(1.0))
    policy = Policy(env, MLP(8, 1))
    look = Yardstick(task, torch.device("cpu"), samples=500)
    with pytest.raises(UserError, match=r"a way ended at 'CC', state \[1, 1, 4, .* is unfinished"):
        look.measure(policy, Known(env, task.channel), seed=0)


def test_random_strings_under_rules_are_uniform_among_those_that_meet_them():
    """One change anywhere in a wild type is as likely in front as at the end."""
    wild = "ACGTACGTAC"
    env = Rules(EditBudget(wild, 1)).compile("ACGT", 10).env()
    torch.manual_seed(0)
    found = random_strings(env, Letters(4, 10, 10), 6200)
    place = (found != env.encode([wild])).float().sum(0)
    assert float((found != env.encode([wild])).sum(1).max()) == 1
    assert torch.allclose(place, torch.full((10,), 600.0), atol=100)  # 31 strings, 200 times each


def test_replay_by_rank_passes_on_that_its_source_asks():
    """Batches in flight come with their scores: they are counted and sharpen the reward, replayed ones are not."""
    task = strings()._replace(oracle=Host(lambda texts: [t.count("A") / 4 for t in texts], strings().env))
    policy = Policy(task.env, MLP(8, 1))
    inner = Ahead(OnPolicy(task, policy, 6), task, 1, torch.device("cpu"))
    source = RankReplay(inner, RankBuffer(task.env, 20), 6, every=2)
    trainer = Trainer(task, policy, Known(task.env, task.channel), LogVariance(), source)
    trainer.train(6)
    inner.settle()
    assert trainer.oracle_calls == 3 * 6


def test_between_two_questions_the_latest_own_draws_are_replayed_beside_the_best():
    """Half as many as the best, none that a search found, with the scores they were given; none of it teaches a model of the noise."""
    task = strings()
    policy = Policy(task.env, MLP(8, 1), seeds=(0, 1))
    source = RankReplay(
        Population(OnPolicy(task, policy, 3), task, policy, children=5), RankBuffer(task.env, 20, 2), 8, every=2
    )
    drawn = []
    for step in range(6):
        batch = source.act(torch.tensor(float(step)))
        if step % 2 == 0:
            batch = batch._replace(score=task.oracle(batch.states[-1]))
            drawn += batch.states[-1][:, :3].unbind(1)
            assert source.mix(batch).score.shape[1] == 8 + 8
            continue
        assert not bool(batch.real.any())
        latest = {tuple(x.flatten().tolist()) for x in drawn[-4:]}
        assert {tuple(x.flatten().tolist()) for x in batch.states[-1][:, 8:].unbind(1)} == latest
        assert batch.score.shape[1] == 8 + len(drawn[-4:])
        assert torch.equal(batch.score, task.oracle(batch.states[-1]))


def test_from_the_answers_to_one_question_the_policy_learns_where_the_mass_belongs():
    """Nothing more is asked, and log-variance alone would only settle the best among themselves."""
    env = Strings("ACGT", 10)
    task = Task(env, Exact(), Host(lambda texts: [t.count("A") / 10 for t in texts], env), Power(10.0, floor=0.1))
    torch.manual_seed(0)
    policy = Policy(env, MLP(32, 2))
    source = RankReplay(OnPolicy(task, policy, 64), RankBuffer(env, 16), 64, every=1000)
    trainer = Trainer(task, policy, Known(env, Exact()), LogVariance(), source, lr=3e-3)
    trainer.train(100)
    assert trainer.oracle_calls == 64
    assert (
        float(task.oracle(rollout(task, policy, 500).states[-1]).mean()) > 0.55
    )  # random strings: .25; the best alone: .48


def test_a_replay_saved_before_it_kept_the_latest_draws_is_loaded():
    task = strings()
    saved, opened = made("rank", task), made("rank", task)
    saved.train(4)
    old = {k: v for k, v in saved.state_dict().items() if ".latest." not in k}
    opened.load_state_dict(old)
    assert int(opened.source.latest.written) == 0
    assert torch.equal(opened.source.buffer.score, saved.source.buffer.score)
    opened.train(8)
