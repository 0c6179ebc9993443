"""What can be counted over the rounds of a generation."""

import math
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

from .token_tree import names_of

if TYPE_CHECKING:
    from .states import SpecRound


class DraftStatistics:
    """Numbers of one row, or of several together."""

    def _rounds(self) -> "Iterable[SpecRound]":
        raise NotImplementedError

    @property
    def num_tokens(self) -> int:
        """Committed tokens: the new tokens of the sequence, without padding."""
        return sum(len(spec_round.committed_token_ids) for spec_round in self._rounds())

    @property
    def num_forwards(self) -> int:
        """Target forwards that the row took part in, the prefill included; summed over rows."""
        return sum(1 for _ in self._rounds())

    @property
    def num_drafted(self) -> int:
        """Drafted tokens that were verified."""
        return sum(len(spec_round.token_ids) for spec_round in self._rounds())

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that were committed."""
        return sum(spec_round.num_accepted for spec_round in self._rounds())

    @property
    def num_wasted(self) -> int:
        """Drafted tokens that were verified for nothing: drafted - accepted."""
        return self.num_drafted - self.num_accepted

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; NaN if none was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else math.nan

    @property
    def mean_tokens_per_forward(self) -> float:
        """Tokens a target forward gave a row, the added one included and the prefill left out; NaN without any."""
        sizes = [len(spec_round.committed_token_ids) for spec_round in self._rounds() if spec_round.index > 0]
        return sum(sizes) / len(sizes) if sizes else math.nan

    @property
    def acceptance_by_depth(self) -> dict[int, float]:
        """
        Depth (1: the token right after the last committed one) -> of the rounds that drafted something so deep, the
        share that accepted a node there.
        """
        drafted: Counter[int] = Counter()
        accepted: Counter[int] = Counter()
        for spec_round in self._rounds():
            drafted.update(set(spec_round.depths))
            accepted.update(range(1, 1 + spec_round.num_accepted))
        return {depth: accepted[depth] / drafted[depth] for depth in sorted(drafted)}

    @property
    def drafted_by_source(self) -> dict[str, int]:
        """Source -> how many of its tokens were verified. A token that several sources proposed counts for each."""
        drafted = (source for spec_round in self._rounds() for source in spec_round.sources)
        return dict(Counter(chain.from_iterable(map(names_of, drafted))))

    @property
    def accepted_by_source(self) -> dict[str, int]:
        """Source -> how many of its tokens were committed."""
        accepted = (spec_round.sources[node] for spec_round in self._rounds() for node in spec_round.accepted)
        taken = Counter(chain.from_iterable(map(names_of, accepted)))
        return {source: taken[source] for source in self.drafted_by_source}

    @property
    def acceptance_by_source(self) -> dict[str, float]:
        """Source -> accepted / drafted tokens of it."""
        accepted = self.accepted_by_source
        return {source: accepted[source] / drafted for source, drafted in self.drafted_by_source.items()}
