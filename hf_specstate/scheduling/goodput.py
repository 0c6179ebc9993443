"""Our schedule: length, shape, source and "off" by expected tokens per second."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..drafting.base import Drafter
from ..drafting.mixture import likeliest
from ..drafting.prior import values
from ..row_cache import forward_width
from ..token_tree import TokenTree
from .acceptance import Acceptance
from .agreement import Agree
from .cost import STALE, RoundCost
from .schedule import Ask, Choice, RoundTimes, Schedule

# of forwards, beside the whole of what was proposed: few, so that the cost of each is known. Some are looked up anew
WIDTHS, EXPLORED_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64), (1, 2, 4, 8, 16, 32, 64)
# Exploring may lose so much: three forwards' time the first time, and a share of the time that went by
EXPLORING_FORWARDS, EXPLORING_SHARE = 3.0, 0.01
PROPOSING_SHARE = 0.03  # most of a forward's time for proposals that are only scored
FIRST_DRAFT, PROBE_DRAFT = 4, 3  # tokens from a model of which nothing is known, and from one that was off
FIRST_WAIT, LONGEST_WAIT = 16, 1024  # rounds between two probes of a drafting model; each one in vain doubles them
PROMISING = 0.05  # more of the acceptance vector's first entry
STEP_RATE, SAVING_RATE = 0.3, 0.1


@dataclass
class ModelPrice:
    """
    What a drafting model costs, and whether it is in use.

    Args:
        begin_seconds, step_seconds (`float`, *optional*): Of catching up with the text, and of one step.
        tokens_a_step (`float`): That it drafts for a row.
        wait (`int`): Rounds to let go by before it is probed.
        idle_rounds (`int`): Rounds since it was last asked.
        probed_at (`float`): How likely its first token was thought to be right at its last probe.
        in_vain (`bool`): Nothing of its last draft was verified.
    """

    begin_seconds: float | None = None
    step_seconds: float | None = None
    tokens_a_step: float = 1.0
    wait: int = FIRST_WAIT
    idle_rounds: int = 0
    probed_at: float = 1.0
    in_vain: bool = False

    def of(self, depth: int) -> float:
        """Seconds for a draft that is so deep, the first step of which comes with the catching up."""
        begin = self.begin_seconds or 0.0
        return begin + (depth - 1) * (begin if self.step_seconds is None else self.step_seconds)


@dataclass
class ProposalPrice:
    """
    What a drafter without a model costs.

    Args:
        seconds (`float`, *optional*): Of its proposals and of learning how they fared, in a round.
        asked_for (`float`, *optional*): Of its proposals in this round, if it was asked.
        quiet_rounds (`int`): Rounds since it was last asked.
        times (`int`): How often it was asked. The first time, much is done that is done once; one other may be slow.
    """

    seconds: float | None = None
    asked_for: float | None = None
    quiet_rounds: int = 0
    times: int = 0


@dataclass
class Best:
    """The best width among some, what it is expected to give in all rows, and in how many seconds of a round."""

    num_nodes: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    rate: float = 0.0  # tokens per second


class GoodputSchedule(Schedule):
    """
    `"goodput"` (after https://huggingface.co/papers/2406.14066, with the acceptance of every node in the place of one
    rate): every round takes the number of nodes N, one for all rows, which maximises the tokens that are expected,
    summed over the rows, per second that the round takes: `sum_b E_b(N) / (T(N + 1) + overhead)`, where
    `E_b(N) = 1 + sum of the chances of the row's N best nodes`. N = 0 is off: an ordinary forward. Chances come from
    [`Acceptance`], seconds from [`RoundCost`]; load enters through the measured cost alone.

    A model that drafts is asked while the tokens that it is expected to add are worth its time, and stops at the step
    that is not. While it is off it is probed, ever more rarely. Drafters without a model go on proposing, which costs
    next to nothing, to be scored; one whose proposals take more time than all of them save is asked in some of the
    rounds only.

    Args:
        max_nodes (`int`): Most nodes of a row.
        together (`bool`): Rows advance by the same number of tokens: what counts is what all have in common.
        fixed_slots (`bool`): The cache is static, and widths are rounded.
        cuts (`bool`): Trees may be cut after they were drafted (not under `"rejection"`: the length of a drawn chain
            must not depend on what was drawn).
        acceptance ([`Acceptance`]), cost ([`RoundCost`]): What is known; learned on.
        agree (`Callable`, *optional*): Gives all ranks the first one's numbers, see [`agreement`].
    """

    wants_times = True

    def __init__(
        self,
        max_nodes: int,
        together: bool,
        fixed_slots: bool,
        cuts: bool,
        acceptance: Acceptance,
        cost: RoundCost,
        agree: Agree | None = None,
    ):
        self.cost = cost
        self.choice: Choice | None = None
        self._acceptance = acceptance
        self._max_nodes = max_nodes
        self._together = together
        self._fixed_slots = fixed_slots
        self._cuts = cuts
        self._agree = agree or list
        self._prices: defaultdict[int, ModelPrice] = defaultdict(ModelPrice)  # by drafter
        self._proposals: defaultdict[int, ProposalPrice] = defaultdict(ProposalPrice)
        self._saved_seconds = 0.0  # by what was proposed in a round, smoothed
        self._round_drafting = 0.0  # seconds of drafting models in this round
        self._asked: list[ModelPrice] = []  # those models
        self._elapsed = self._explored = 0.0
        self._worth = math.inf  # seconds that this round may take, if it explores, without losing anything
        self._free_forwards = 0.0 if cost.measured else EXPLORING_FORWARDS

    # ------------------------------------------------------------------ before drafting

    def max_nodes(self, row: int) -> int:
        return self._max_nodes

    def ask(self, drafter: Drafter, rows: Sequence[int], known: Mapping[int, TokenTree]) -> Ask:
        if not self._cuts and self.cost.measured and 1 not in self.cost.measured:
            return Ask(0)  # nothing can be cut: the forward that all are compared with has to come from elsewhere
        if drafter.runs is None:
            return Ask(self._max_nodes if self._may_propose(self._proposals[id(drafter)]) else 0)
        price = self._prices[id(drafter)]
        ask = self._ask_model(drafter, price, rows, known)
        if ask.max_nodes:
            self._asked.append(price)
        return ask

    def _ask_model(
        self, drafter: Drafter, price: ModelPrice, rows: Sequence[int], known: Mapping[int, TokenTree]
    ) -> Ask:
        if price.begin_seconds is None:
            return Ask(min(FIRST_DRAFT, self._max_nodes))
        without = self._best(self._totals(rows, known))
        draft = self._best_draft(drafter.name, len(rows), price)
        if draft.rate > without.rate and not price.in_vain:
            price.wait, price.idle_rounds, price.probed_at = FIRST_WAIT, 0, 1.0
            if self._cuts and drafter.stops:
                return Ask(self._max_nodes, draft.rate * (price.step_seconds or price.begin_seconds), self._together)
            return Ask(draft.num_nodes)
        price.idle_rounds += 1
        first = self._acceptance.vector(drafter.name, 1)[0]
        was_right = first > price.probed_at + PROMISING  # at its last probe: then it is soon asked again
        is_due = was_right or price.idle_rounds >= price.wait
        if not is_due or not self._can_pay(price, len(rows), without.rate):
            return Ask(0)
        price.wait = FIRST_WAIT if was_right else min(2 * price.wait, LONGEST_WAIT)
        price.idle_rounds, price.probed_at = 0, first
        return Ask(min(PROBE_DRAFT, self._max_nodes))

    def _may_propose(self, price: ProposalPrice) -> bool:
        """Whether a drafter without a model is worth asking: proposals save more than it costs, or it costs little."""
        price.quiet_rounds += 1
        own = 0.0 if price.seconds is None or price.times < 3 else price.seconds
        # the cheaper drafters come first: what all save has to pay for them too
        together = sum(other.seconds for other in self._proposals.values() if other.seconds and other.seconds <= own)
        affordable = PROPOSING_SHARE * self._round_seconds(0) * price.quiet_rounds
        if together > self._saved_seconds and own > affordable:
            return False
        price.quiet_rounds = 0
        return True

    def _best_draft(self, name: str, num_rows: int, price: ModelPrice) -> Best:
        """
        The best size of a model's draft, by its acceptance vector. What verifying it costs is hoped for as long as it
        was not seen.
        """
        best, chance, tokens = Best(), 1.0, 1.0
        depths = max(1, int(self._max_nodes / price.tokens_a_step))
        for depth, accepted in enumerate(self._acceptance.vector(name, depths), start=1):
            chance *= accepted
            tokens += chance**num_rows if self._together else chance
            num_nodes = min(round(depth * price.tokens_a_step), self._max_nodes)
            seconds = self._round_seconds(num_nodes, hope=1.0) + price.of(depth)
            rate = num_rows * tokens / seconds if seconds else 0.0
            if rate > best.rate:
                best = Best(num_nodes, num_rows * tokens, seconds, rate)
        return best

    def _can_pay(self, price: ModelPrice, num_rows: int, rate: float) -> bool:
        """Whether a model could beat `rate` at all, if it were always right and verifying cost nothing."""
        plain, deepest = self._round_seconds(0), max(1, int(self._max_nodes / price.tokens_a_step))
        return any(num_rows * (1 + depth) > rate * (plain + price.of(depth)) for depth in (1, deepest))

    # ------------------------------------------------------------------ after drafting

    def choose(self, rows: Sequence[int], trees: Mapping[int, TokenTree]) -> dict[int, TokenTree]:
        if not rows:  # a rank that keeps its peers company
            return {}
        totals = self._totals(rows, trees)
        best, drafting = self._best(totals), self._best(totals, least=1)
        self._save(rows, trees, best)
        num_nodes, why = best.num_nodes, "best" if best.num_nodes else "off"
        self._worth = math.inf
        if not self._cuts and any(tree.draft_probs is not None for tree in trees.values()):
            num_nodes, why = len(totals) - 1, "fixed"
        elif (explored := self._explore(totals, best)) is not None:
            num_nodes, why = explored, "explore"
            self._worth = totals[explored] / best.rate
        for price in self._asked:
            price.in_vain = why == "off"
        self._asked.clear()
        chosen = {row: likeliest(tree, num_nodes) for row, tree in trees.items()}
        plain = self._round_seconds(0)
        self.choice = Choice(
            num_nodes=num_nodes,
            why=why,
            expected_tokens=self._expected_tokens(rows, chosen, totals[num_nodes]),
            expected_seconds=self._round_seconds(num_nodes) - self.cost.overhead,
            considered_nodes=drafting.num_nodes,
            considered_tokens=drafting.tokens / len(rows) if drafting.num_nodes else 1.0,
            considered_cost=drafting.seconds / plain if plain and drafting.num_nodes else 1.0,
        )
        return chosen

    def _save(self, rows: Sequence[int], trees: Mapping[int, TokenTree], best: Best) -> None:
        """Keeps count of the time that drafts without a model save."""
        if not trees or self._round_drafting:
            return
        saved = self._round_seconds(0) * best.tokens / len(rows) - best.seconds
        self._saved_seconds += SAVING_RATE * (saved - self._saved_seconds)

    def _totals(self, rows: Sequence[int], trees: Mapping[int, TokenTree]) -> list[float]:
        """The tokens that are expected, in all rows, of the best 0, 1, 2 ... nodes of each."""
        return list(itertools.accumulate(self._gains(rows, trees), initial=float(len(rows))))

    def _best(self, totals: Sequence[float], least: int = 0) -> Best:
        """The best number of nodes, at least `least`, when so many tokens are expected."""
        best = Best()
        for num_nodes in _sizes(least, len(totals) - 1):
            seconds = self._round_seconds(num_nodes)
            rate = totals[num_nodes] / seconds if seconds else totals[num_nodes]
            if rate > best.rate:
                best = Best(num_nodes, totals[num_nodes], seconds, rate)
        return best

    def _explore(self, totals: Sequence[float], best: Best) -> int | None:
        """
        A number of nodes whose cost has not been seen for long, if finding out is cheap enough. An ordinary forward is
        looked at first; from there, wider ones are thought to cost something between nothing more and in proportion.
        """
        if 1 not in self.cost.measured:
            return 0
        losses = {
            width - 1: self._round_seconds(width - 1, hope=0.5) - totals[width - 1] / best.rate
            for width in EXPLORED_WIDTHS
            if width <= len(totals) and width - 1 != best.num_nodes and self.cost.age(width) > STALE
        }
        if not losses:
            return None
        num_nodes = min(losses, key=lambda nodes: losses[nodes])
        allowed = self._free_forwards * self._round_seconds(0) + EXPLORING_SHARE * self._elapsed
        return num_nodes if self._explored + losses[num_nodes] <= allowed else None

    def _gains(self, rows: Sequence[int], trees: Mapping[int, TokenTree]) -> list[float]:
        """The tokens that every further node of each row is expected to give, in all rows."""
        ranked = {row: ranked_nodes(tree) for row, tree in trees.items()}
        gains = [0.0] * max(map(len, ranked.values()), default=0)
        if not self._together:
            for nodes in ranked.values():
                for place, (chance, _) in enumerate(nodes):
                    gains[place] += chance
            return gains
        if len(ranked) < len(rows):
            return gains  # a row without a draft holds back the others
        # row -> depth -> chance to get so deep; what is taken at a depth must be taken in all rows
        reached: list[dict[int, float]] = [{} for _ in ranked]
        before: dict[int, float] = {}
        for place in range(len(gains)):
            depths = set()
            for nodes, chances in zip(ranked.values(), reached, strict=True):
                if place < len(nodes):
                    chance, depth = nodes[place]
                    chances[depth] = chances.get(depth, 0.0) + chance
                    depths.add(depth)
            common = {depth: math.prod(chances.get(depth, 0.0) for chances in reached) for depth in depths}
            gains[place] = len(rows) * (sum(common.values()) - sum(before.get(depth, 0.0) for depth in depths))
            before |= common
        return gains

    def _round_seconds(self, num_nodes: int, hope: float = 0.0) -> float:
        """
        Of a round with so many nodes a row, without the time of drafting models. Wider forwards than any that was seen
        cost in proportion; with `hope` 1 no more than the widest.
        """
        width, curve = forward_width(1 + num_nodes, self._fixed_slots), self.cost.curve(1 + 2 * self._max_nodes)
        widest = max(self.cost.measured, default=width) if hope else width
        return (1 - hope) * curve[width] + hope * curve[min(width, widest)] + self.cost.overhead

    def _expected_tokens(self, rows: Sequence[int], chosen: Mapping[int, TokenTree], total: float) -> dict[int, float]:
        if self._together:
            return dict.fromkeys(rows, total / len(rows))
        return {row: 1.0 + sum(values(chosen[row])) if row in chosen else 1.0 for row in rows}

    # ------------------------------------------------------------------ learning

    def asked(self, drafter: Drafter, seconds: float) -> None:
        runs = drafter.runs
        if runs is None:
            self._proposals[id(drafter)].asked_for = seconds
            return
        seconds, begin, steps = self._agree([seconds, runs.begin_seconds, runs.step_seconds])
        self._round_drafting += seconds
        model = self._prices[id(drafter)]
        if not begin + steps:
            return  # it did not run its model, or for the first time
        if runs.num_steps:
            model.step_seconds = _towards(model.step_seconds, steps / runs.num_steps)
        model.tokens_a_step = max(1.0, runs.num_nodes / (1 + runs.num_steps))
        if not runs.is_late:
            model.begin_seconds = _towards(model.begin_seconds, begin)
        elif model.begin_seconds is None:  # a step is what comes nearest to it
            model.begin_seconds = begin if model.step_seconds is None else model.step_seconds

    def taught(self, drafter: Drafter, seconds: float) -> None:
        price = self._proposals.get(id(drafter))
        if price is None or price.asked_for is None:
            return
        [seconds] = self._agree([price.asked_for + seconds])
        price.times += 1
        if price.times == 3:
            price.seconds = min(seconds, price.seconds or seconds)
        elif price.times > 1:
            price.seconds = _towards(price.seconds, seconds)
        price.asked_for = None

    def dropped(self, drafter: Drafter) -> None:
        self._proposals.pop(id(drafter), None)
        self._prices.pop(id(drafter), None)

    def observe_times(self, times: RoundTimes) -> None:
        forward, other = self._agree([times.forward_seconds, times.other_seconds])
        if self.cost.measured:  # the very first forward has nothing to be compared with
            self._explored += max(forward + self.cost.overhead - self._worth, 0.0)
        self.cost.observe(times.width, forward, max(other - self._round_drafting, 0.0))
        self._elapsed += forward + other
        self._round_drafting = 0.0


def _sizes(least: int, most: int) -> list[int]:
    """The numbers of nodes that are considered."""
    return [*(width - 1 for width in WIDTHS if least < width <= most), most] if most >= least else []


def ranked_nodes(tree: TokenTree) -> list[tuple[float, int]]:
    """`(chance that the walk takes it, depth)` of every node, most likely first."""
    return sorted(zip(values(tree), tree.depths, strict=True), key=lambda node: -node[0])


def _towards(known: float | None, seen: float) -> float:
    """Follows what is seen; what takes many times as long as usual counts for a leap, not for itself."""
    return seen if known is None else known + STEP_RATE * (min(seen, 3 * known) - known)
