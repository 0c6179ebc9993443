"""The choice of length, shape and "off", in a world of known chances and costs."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from eval.cost_models import CpuLike, GpuFlat, Steep
from eval.schedule_world import OVERHEAD, chain, play
from hf_specstate import TokenTree
from hf_specstate.drafting import ModelRuns
from hf_specstate.scheduling import Acceptance, Ask, GoodputSchedule, RoundCost, RoundTimes
from hf_specstate.scheduling.goodput import WIDTHS

COSTS = [GpuFlat(), Steep(), CpuLike()]


def make(max_nodes=15, together=False, cuts=True, cost=None, acceptance=None, fixed=False) -> GoodputSchedule:
    return GoodputSchedule(max_nodes, together, fixed, cuts, acceptance or Acceptance(), cost or RoundCost())


def known_cost(curve) -> RoundCost:
    return RoundCost({width: float(curve(width)) for width in range(1, 65)}, 0.0)


def random_tree(luck: random.Random, nodes: int) -> TokenTree:
    tree = TokenTree()
    for token in range(nodes):
        tree.add(token, luck.randrange(-1, token) if token else -1, "any", confidence=luck.random() ** 2)
    return tree


def subtrees(tree: TokenTree, size: int):
    """All sets of nodes that hold their parents."""
    for nodes in itertools.combinations(range(len(tree)), size):
        if all(tree.parents[node] in (-1, *nodes) for node in nodes):
            yield nodes


def value(tree: TokenTree, node: int) -> float:
    return tree.confidences[node] * (1.0 if tree.parents[node] < 0 else value(tree, tree.parents[node]))


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_the_best_of_all(seed):
    """One or three rows of random trees: no other subtrees of a size that is considered promise more a second."""
    luck = random.Random(seed)
    rows = list(range(luck.choice((1, 3))))
    trees = {row: random_tree(luck, luck.randrange(1, 8)) for row in rows}
    costs = sorted(luck.uniform(1, 3) for _ in range(20))
    schedule = make(max_nodes=8, cost=known_cost(lambda width: costs[min(width, 19)]))
    chosen = schedule.choose(rows, trees)
    rates = {}
    most = max(map(len, trees.values()))
    for size in {width - 1 for width in WIDTHS if width <= most} | {most}:
        tokens = 0.0
        for tree in trees.values():
            fitting = subtrees(tree, min(size, len(tree)))
            tokens += 1 + max(sum(value(tree, node) for node in nodes) for nodes in fitting)
        rates[size] = tokens / costs[1 + size]
    best = max(rates.values())
    tokens = sum(1 + sum(value(tree, node) for node in range(len(tree))) for tree in chosen.values())
    taken = tokens / costs[1 + max(map(len, chosen.values()))]
    assert taken == pytest.approx(best)
    assert sum(schedule.choice.expected_tokens.values()) == pytest.approx(tokens)


@pytest.mark.parametrize("seed", range(10))
def test_rows_in_lockstep_count_what_they_have_in_common(seed):
    luck = random.Random(seed)
    chances = [[luck.uniform(0.5, 1) for _ in range(6)] for _ in range(2)]
    trees = {row: chain([1, 2, 3, 4, 5, 6], chances[row]) for row in range(2)}
    schedule = make(max_nodes=6, together=True, cost=known_cost(lambda width: 1 + 0.3 * width))
    schedule.choose([0, 1], trees)

    def rate(size: int) -> float:
        tokens, both = 1.0, 1.0
        for place in range(size):
            both *= chances[0][place] * chances[1][place]
            tokens += both
        return 2 * tokens / (1.3 + 0.3 * size)

    best = max((0, 1, 2, 3, 5, 6), key=rate)
    assert schedule.choice.num_nodes == best
    assert schedule.choice.expected_tokens[0] == pytest.approx(rate(best) * (1.3 + 0.3 * best) / 2)


def test_a_row_without_a_draft_holds_back_the_others_in_lockstep_only():
    trees = {0: chain([1, 2, 3], [0.99] * 3)}
    for together, expected in ((True, 0), (False, 3)):
        schedule = make(together=together, cost=known_cost(lambda width: 1 + 0.1 * width))
        schedule.choose([0, 1], trees)
        assert schedule.choice.num_nodes == expected


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost.name)
@pytest.mark.parametrize("batch_size", [1, 4, 16, 64])
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_comes_near_the_best_size(cost, batch_size, chance):
    """Without knowing costs or chances at first, exploring included."""
    rounds = play(cost, batch_size, [chance] * 150, confidence=0.5)
    late = rounds[16:]
    reached = sum(r.expected_rate * r.seconds for r in late) / sum(r.seconds for r in late)
    assert reached >= 0.93 * late[0].best_rate


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("low", "high"), [(0.1, 0.85), (0.2, 0.8), (0.05, 0.95)])
def test_reacts_when_the_text_changes(batch_size, low, high):
    """Prose, a copied list, prose: within 10 % of each stretch's best after 16 rounds."""
    rounds = play(CpuLike(), batch_size, [low] * 80 + [high] * 80 + [low] * 80, confidence=0.5)
    for start in (0, 80, 160):
        late = rounds[start + 16 : start + 80]
        reached = sum(r.expected_rate * r.seconds for r in late) / sum(r.seconds for r in late)
        assert reached >= 0.9 * late[0].best_rate


def test_sizes_fall_with_the_batch_and_rise_with_acceptance():
    def usual(batch_size: int, chance: float) -> int:
        sizes = [r.num_nodes for r in play(GpuFlat(), batch_size, [chance] * 80)[16:]]
        return max(set(sizes), key=sizes.count)

    by_batch = [usual(batch_size, 0.8) for batch_size in (1, 4, 8, 16, 64)]
    assert by_batch == sorted(by_batch, reverse=True) and by_batch[0] == 15 and by_batch[-1] == 0
    by_chance = []
    for chance in (0.1, 0.6, 0.95):
        sizes = [r.num_nodes for r in play(CpuLike(), 1, [chance] * 80)[16:]]
        by_chance.append(max(set(sizes), key=sizes.count))
    assert by_chance == sorted(by_chance) and by_chance[0] == 0 < by_chance[1] < by_chance[2]


@pytest.mark.parametrize("batch_size", [1, 64])
def test_exploring_is_bounded(batch_size):
    """Where nothing pays, all that is lost was exploring: three forwards, and a hundredth of the time."""
    rounds = play(Steep(), batch_size, [0.0] * 400, confidence=0.01)
    plain = Steep().cost(batch_size, 1) * (1 + OVERHEAD)
    lost = sum(r.seconds for r in rounds) - plain * len(rounds)
    assert 0 < lost <= 3.1 * plain + 0.011 * sum(r.seconds for r in rounds)


def test_static_caches_are_priced_by_their_rounded_widths():
    """Nine nodes run as sixteen tokens: seven, in eight, are worth more."""
    costs = {width: 1.0 + 0.15 * width for width in range(65)}
    tree = {0: chain(list(range(1, 10)), [0.95] * 9)}
    sizes = []
    for fixed in (False, True):
        schedule = make(max_nodes=9, cost=known_cost(costs.__getitem__), fixed=fixed)
        schedule.choose([0], tree)
        sizes.append(schedule.choice.num_nodes)
    assert sizes == [9, 7]


# ---------------------------------------------------------------------- drafting models


class ModelDrafter:
    """Drafts with a model whose tokens are accepted with a chance of their own."""

    name, stops = "model", True

    def __init__(self, step_seconds: float, chance: float, seed: int = 0):
        self.runs = ModelRuns()
        self._step_seconds, self._chance, self._luck = step_seconds, chance, random.Random(seed)

    def draft(self, ask: Ask, acceptance: Acceptance) -> TokenTree:
        """Stops, as an assistant does, when the next step is not expected to give enough."""
        length, chance = 1, acceptance.vector(self.name, 1)[0]
        while length < ask.max_nodes and chance * acceptance.vector(self.name, length + 1)[-1] >= ask.least_gain:
            length += 1
            chance *= acceptance.vector(self.name, length)[-1]
        self.runs = ModelRuns(self._step_seconds, self._step_seconds * (length - 1), length - 1, length)
        tokens = [1 if self._luck.random() < self._chance else 0 for _ in range(length)]
        return TokenTree(tokens, list(range(-1, length - 1)), [0.0] * length, ["model"] * length, [0.7] * length)


def rounds_with(drafter: ModelDrafter, rounds: int, chance=None) -> tuple[list[int], float]:
    """How much the model was asked for in each round, and the time of all against plain decoding. Verifying is free."""
    acceptance = Acceptance()
    schedule = make(acceptance=acceptance)
    asked, seconds, given = [], 0.0, 0
    for number in range(rounds):
        drafter._chance = drafter._chance if chance is None else chance(number)
        ask = schedule.ask(drafter, [0], {})
        asked.append(ask.max_nodes)
        trees, drafting = {}, 0.0
        if ask.max_nodes:
            tree = drafter.draft(ask, acceptance)
            drafting = drafter.runs.begin_seconds + drafter.runs.step_seconds
            schedule.asked(drafter, drafting)
            acceptance.propose(0, tree)
            trees[0] = chain(tree.token_ids, acceptance.estimate(0, tree))
        chosen = schedule.choose([0], trees).get(0, TokenTree())
        accepted = ([*chosen.token_ids, 0]).index(0)
        acceptance.observe(0, [1] * (accepted + 1))
        schedule.observe_times(RoundTimes(1 + len(chosen), 1.0, drafting))
        seconds, given = seconds + 1.0 + drafting, given + accepted + 1
    return asked, seconds / given


def test_a_good_model_is_asked():
    asked, time = rounds_with(ModelDrafter(step_seconds=0.05, chance=0.9), rounds=60)
    assert all(asked) and max(asked) == 15 and time < 0.4


@pytest.mark.parametrize(
    "drafter", [ModelDrafter(1.0, 0.9), ModelDrafter(0.2, 0.0)], ids=["as slow as the target", "never right"]
)
def test_a_model_that_does_not_pay_is_left_alone(drafter):
    asked, time = rounds_with(drafter, rounds=300)
    assert sum(map(bool, asked)) <= 12 and time < 1.05


def test_a_model_comes_back_when_it_is_right_again():
    asked, _ = rounds_with(ModelDrafter(0.1, 0.0), rounds=250, chance=lambda number: 0.0 if number < 40 else 0.98)
    assert sum(map(bool, asked[20:40])) <= 2 and all(asked[200:])


def test_the_length_is_fixed_before_a_draft_is_drawn():
    """Under `"rejection"`: what was drawn must not decide how much of it is verified."""
    schedule = make(cuts=False, cost=known_cost(lambda width: 1 + 0.1 * width))
    bad = chain([1, 2, 3], [0.001] * 3)
    assert len(schedule.choose([0], {0: bad})[0]) == 0, "a point mass may be cut: nothing was drawn"
    bad.draft_probs = torch.zeros((3, 8))
    assert len(schedule.choose([0], {0: bad})[0]) == 3
    assert schedule.choice.why == "fixed"
    drafter = ModelDrafter(0.05, 0.9)
    drafter.draft(schedule.ask(drafter, [0], {}), Acceptance())
    schedule.asked(drafter, 0.1)
    ask = schedule.ask(drafter, [0], {})
    assert ask.max_nodes and ask.least_gain == 0


def test_a_rank_without_rows_keeps_its_peers_company():
    for together in (False, True):
        assert make(together=together).choose([], {}) == {}


def test_a_first_forward_that_was_compiled_does_not_end_speculation():
    """It took a thousand times as long as the next ones of its width."""
    schedule, seen, sizes = make(), set(), []
    for _ in range(80):
        size = len(schedule.choose([0], {0: chain(list(range(15)), [0.9] * 15)})[0])
        schedule.observe_times(RoundTimes(1 + size, 1.0 if size in seen else 1000.0, 0.0))
        seen.add(size)
        sizes.append(size)
    assert min(sizes[-10:]) >= 7


def test_an_assistant_that_drafts_all_in_one_step_is_judged_too():
    drafter = ModelDrafter(1.0, 0.0)
    schedule, asked = make(max_nodes=1), []
    for _ in range(40):
        ask = schedule.ask(drafter, [0], {})
        asked.append(ask.max_nodes)
        if ask.max_nodes:
            drafter.draft(ask, Acceptance())
            assert drafter.runs.num_steps == 0
            schedule.asked(drafter, 1.0)
        schedule.choose([0], {})
        schedule.observe_times(RoundTimes(1, 1.0, 0.0))
    assert sum(asked) <= 3


@pytest.mark.parametrize("learning", [0.0, 0.9], ids=["proposing", "learning"])
def test_proposals_that_cost_more_than_they_save_are_asked_for_rarely(learning):
    drafter = SimpleNamespace(name="slow", runs=None)
    asked = []
    schedule = make(cost=known_cost(lambda width: 1.0 if width == 1 else 2.0))
    for _ in range(100):
        size = schedule.ask(drafter, [0], {}).max_nodes
        asked.append(size)
        if size:
            schedule.asked(drafter, 0.3 * (1 - learning))
        schedule.choose([0], {0: chain([1], [0.01])} if size else {})
        schedule.observe_times(RoundTimes(1, 1.0, 0.3 if size else 0.0))
        schedule.taught(drafter, 0.3 * learning)
    assert 5 <= sum(map(bool, asked)) <= 25, "a thirtieth of the time, and some to find out"


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_one_slow_time_among_the_first_is_not_believed(slow):
    """It made kernels, say; usually it costs next to nothing."""
    drafter, asked = SimpleNamespace(name="fast", runs=None), []
    schedule = make(cost=known_cost(lambda width: 1.0 if width == 1 else 2.0))
    for number in range(20):
        asked.append(bool(schedule.ask(drafter, [0], {}).max_nodes))
        if asked[-1]:
            schedule.asked(drafter, 10.0 if number == slow else 0.01)
        schedule.choose([0], {})
        schedule.observe_times(RoundTimes(1, 1.0, 0.01))
        schedule.taught(drafter, 0.0)
    assert all(asked)


def test_all_ranks_go_by_the_first_ones_clock():
    def run(slowness: float, agree) -> list[int]:
        schedule = GoodputSchedule(15, False, False, True, Acceptance(), RoundCost(), agree)
        sizes = []
        for number in range(40):
            chosen = schedule.choose([0], {0: chain(list(range(1, 16)), [0.8] * 15)})
            sizes.append(len(chosen[0]))
            luck = 1 + slowness * random.Random(number).random()
            schedule.observe_times(RoundTimes(1 + sizes[-1], luck * (1 + slowness * sizes[-1]), 0.1 * slowness))
        return sizes

    said: list[list[float]] = []
    first = run(0.1, lambda numbers: said.append(list(numbers)) or numbers)
    heard = iter(said)
    assert run(3.0, lambda numbers: next(heard)) == first
    assert run(3.0, None) != first
