"""The speculative states of a generation: what was drafted, what was accepted, what the target added."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from .token_tree import TokenTree


@dataclass
class SpecRound:
    """
    One row's part in one forward of the target.

    Args:
        index (`int`): Number of the round in the generation. Round 0 is the prefill, which verifies nothing.
        start (`int`): Place of the round's first committed token among the row's new tokens.
        token_ids (`list[int]` of length `nodes`): The drafted tokens, as verified.
        parents (`list[int]` of length `nodes`): Index of each node's parent; -1 for the last token committed before.
        sources (`list[str]` of length `nodes`): Name of the drafter of each node.
        accepted (`list[int]`): The accepted nodes, from the root down.
        added_token_id (`int`): The token that the target added after them.
    """

    index: int
    start: int
    token_ids: list[int]
    parents: list[int]
    sources: list[str]
    accepted: list[int]
    added_token_id: int

    @property
    def committed_token_ids(self) -> list[int]:
        """What the round gave to the row: the accepted tokens and the added one."""
        return [self.token_ids[node] for node in self.accepted] + [self.added_token_id]

    @property
    def num_accepted(self) -> int:
        return len(self.accepted)


@dataclass
class SpecSequence:
    """The rounds of one row, in order; iterable and indexable."""

    rounds: list[SpecRound] = field(default_factory=list)

    def __iter__(self) -> Iterator[SpecRound]:
        return iter(self.rounds)

    def __len__(self) -> int:
        return len(self.rounds)

    def __getitem__(self, index):
        return self.rounds[index]

    def cpu(self) -> "SpecSequence":
        """Itself. Whisper moves whatever `generate()` returns for a row to the CPU."""
        return self

    @property
    def num_drafted(self) -> int:
        return sum(len(spec_round.token_ids) for spec_round in self.rounds)

    @property
    def num_accepted(self) -> int:
        return sum(spec_round.num_accepted for spec_round in self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; NaN if none was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else float("nan")

    @property
    def mean_tokens_per_forward(self) -> float:
        """Tokens a target forward gave the row, the added one included and the prefill left out; NaN without any."""
        verified = [spec_round for spec_round in self.rounds if spec_round.index > 0]
        return sum(len(r.committed_token_ids) for r in verified) / len(verified) if verified else float("nan")


class SpecStates:
    """
    The speculative states of a `generate()` call: one [`SpecSequence`] a row, one [`SpecRound`] in it for every target
    forward that the row took part in. Iterable and indexable by row. (Deliberately not a tuple: pipelines stack those.)
    """

    def __init__(self, batch_size: int):
        self.sequences = [SpecSequence() for _ in range(batch_size)]

    def record(self, row: int, index: int, start: int, tree: TokenTree, accepted: list[int], added: int) -> None:
        spec_round = SpecRound(index, start, tree.token_ids, tree.parents, tree.sources, accepted, added)
        self.sequences[row].rounds.append(spec_round)

    def __iter__(self) -> Iterator[SpecSequence]:
        return iter(self.sequences)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, row):
        return self.sequences[row]

    def __repr__(self) -> str:
        drafted = sum(sequence.num_drafted for sequence in self)
        accepted = sum(sequence.num_accepted for sequence in self)
        rounds = max((len(sequence) for sequence in self), default=0)
        return (
            f"SpecStates({len(self)} sequences, up to {rounds} rounds, {accepted} of {drafted} drafted tokens accepted)"
        )
