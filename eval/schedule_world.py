"""A world without a clock in which schedules can be judged: drafts of known worth, forwards of known cost."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hf_specstate import TokenTree
from hf_specstate.scheduling import Acceptance, GoodputSchedule, RoundCost, RoundTimes

from .cost_models import CostModel

OVERHEAD = 0.02  # of a round beside its forward, in forwards of one token


@dataclass
class PlayedRound:
    """
    Args:
        num_nodes (`int`): Drafted for each row.
        why (`str`): As in `Choice`.
        tokens (`int`): Committed up to its end, in all rows.
        seconds (`float`): That the round took.
        best_nodes (`int`), best_rate (`float`):
            The size that is best for the true chances, by trying all, and the tokens a second that it gives on average.
        expected_rate (`float`): What the chosen size gives on average.
    """

    num_nodes: int
    why: str
    tokens: int
    seconds: float
    best_nodes: int
    best_rate: float
    expected_rate: float


def play(
    cost: CostModel,
    batch_size: int,
    chances: Sequence[float],
    max_nodes: int = 15,
    confidence: float | None = None,
    seed: int = 0,
) -> list[PlayedRound]:
    """
    Lets the `"goodput"` schedule decide in a world where every drafted token is accepted with the same chance.

    Args:
        cost ([`CostModel`]): Of forwards.
        batch_size (`int`): Rows, each drafting a chain.
        chances (`list[float]`): The true chance in each round.
        max_nodes (`int`, *optional*, defaults to 15): Of a row.
        confidence (`float`, *optional*): What the drafter believes; defaults to the truth in the first round.
        seed (`int`, *optional*, defaults to 0): Of the luck.
    """
    luck = random.Random(seed)
    unit = cost.cost(batch_size, 1)
    acceptance = Acceptance()
    schedule = GoodputSchedule(max_nodes, False, False, True, acceptance, RoundCost())
    rows = list(range(batch_size))
    places = [0] * batch_size  # the text of every row is 1, 2, 3 ...
    played = []
    for truth in chances:
        belief = chances[0] if confidence is None else confidence
        trees, judged = {}, {}
        for row in rows:
            right = next((place for place in range(max_nodes) if luck.random() >= truth), max_nodes)
            tokens = [places[row] + place + 1 if place < right else 0 for place in range(max_nodes)]
            trees[row] = chain(tokens, [belief] * max_nodes)
            acceptance.propose(row, trees[row])
            judged[row] = chain(tokens, acceptance.estimate(row, trees[row]))
        chosen = schedule.choose(rows, judged)
        size = max(map(len, chosen.values()))
        for row in rows:
            count = 1 + (trees[row].token_ids[:size] + [0]).index(0)
            acceptance.observe(row, range(places[row] + 1, places[row] + count + 1))
            places[row] += count
        seconds = cost.cost(batch_size, size + 1)
        schedule.observe_times(RoundTimes(size + 1, seconds, OVERHEAD * unit))
        rates = expected_rates(cost, batch_size, truth, max_nodes)
        best = max(range(max_nodes + 1), key=lambda nodes: rates[nodes])
        assert schedule.choice is not None
        why = schedule.choice.why
        played.append(PlayedRound(size, why, sum(places), seconds + OVERHEAD * unit, best, rates[best], rates[size]))
    return played


def chain(tokens: list[int], confidences: list[float]) -> TokenTree:
    """A draft of one source."""
    return TokenTree(
        tokens, list(range(-1, len(tokens) - 1)), [math.nan] * len(tokens), ["draft"] * len(tokens), confidences
    )


def expected_rates(cost: CostModel, batch_size: int, chance: float, max_nodes: int) -> list[float]:
    """Tokens a second that 0, 1, 2 ... nodes a row give on average."""
    unit = cost.cost(batch_size, 1)
    rates, tokens = [], 0.0
    for nodes in range(max_nodes + 1):
        tokens += chance**nodes
        rates.append(batch_size * tokens / (cost.cost(batch_size, nodes + 1) + OVERHEAD * unit))
    return rates
