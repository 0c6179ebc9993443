"""
The states as padded tensors, under the names that serving engines use for a draft model's proposals and the target's
scores of them.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from .host import from_host
from .states import SpecRound, SpecStates

NO_TOKEN = -1  # in a place that nothing was drafted for


@dataclass
class Proposals:
    """
    What was drafted. `rounds` counts from the prefill, `nodes` up to the largest tree; what is shorter is padded.

    Args:
        proposal_token_ids (`torch.LongTensor` of shape `(rows, rounds, nodes)`): The drafted tokens, padded with -1.
        proposal_probs (`torch.FloatTensor` of shape `(rows, rounds, nodes)`):
            The drafter's probability of each of them given its parent; NaN for point masses and padding.
        proposal_parents (`torch.LongTensor` of shape `(rows, rounds, nodes)`):
            Index of each node's parent; -1 for the last token committed before, and for padding.
        proposal_lens (`torch.LongTensor` of shape `(rows, rounds)`): How many tokens were drafted.
    """

    proposal_token_ids: torch.Tensor
    proposal_probs: torch.Tensor
    proposal_parents: torch.Tensor
    proposal_lens: torch.Tensor


@dataclass
class Scores:
    """
    What the target answered, raw (before processors), padded like [`Proposals`].

    Args:
        probs (`torch.FloatTensor` of shape `(rows, rounds, nodes)`):
            The target's probability of each drafted token given its parent; NaN for padding.
        logprobs (`torch.FloatTensor` of shape `(rows, rounds, nodes)`): Their natural logs.
        token_ids (`torch.LongTensor` of shape `(rows, rounds, 1 + nodes)`):
            The target's own choice after the last committed token and after every node; -1 for padding.
        hidden_states (`torch.Tensor` of shape `(rows, rounds, 1 + nodes, hidden_size)`, *optional*):
            The last layer's, in the same places, if they were recorded (and by models of one size); zeros for padding
            and for what was left out.
    """

    probs: torch.Tensor
    logprobs: torch.Tensor
    token_ids: torch.Tensor
    hidden_states: torch.Tensor | None


def proposals(states: SpecStates) -> Proposals:
    rounds, nodes = _extent(states)
    lens = [[len(spec_round.token_ids) for spec_round in sequence] for sequence in states]
    padded_lens = [row + [0] * (rounds - len(row)) for row in lens]
    logprobs = _padded(states, "draft_logprobs", (rounds, nodes), torch.nan)
    return Proposals(
        proposal_token_ids=_padded(states, "token_ids", (rounds, nodes), NO_TOKEN),
        proposal_probs=logprobs.exp(),
        proposal_parents=_padded(states, "parents", (rounds, nodes), NO_TOKEN),
        proposal_lens=from_host(padded_lens, dtype=torch.long).reshape(len(states), rounds),
    )


def scores(states: SpecStates) -> Scores:
    rounds, nodes = _extent(states)
    logprobs = _padded(states, "target_logprobs", (rounds, nodes), torch.nan)
    return Scores(
        probs=logprobs.exp(),
        logprobs=logprobs,
        token_ids=_padded(states, "target_token_ids", (rounds, 1 + nodes), NO_TOKEN),
        hidden_states=_hidden_states(states, rounds, nodes),
    )


def _extent(states: SpecStates) -> tuple[int, int]:
    """Most rounds of a row, and most nodes of a round."""
    nodes = max((len(spec_round.token_ids) for sequence in states for spec_round in sequence), default=0)
    return max(map(len, states), default=0), nodes


def _padded(states: SpecStates, name: str, shape: tuple[int, int], filler: float) -> torch.Tensor:
    rounds, width = shape
    rows = []
    for sequence in states:
        values = [getattr(spec_round, name) for spec_round in sequence]
        values = [value + [filler] * (width - len(value)) for value in values]
        rows.append(values + [[filler] * width] * (rounds - len(values)))
    dtype = torch.long if filler == NO_TOKEN else torch.float32
    return from_host(rows, dtype=dtype).reshape(len(states), rounds, width)


def _hidden_states(states: SpecStates, rounds: int, nodes: int) -> torch.Tensor | None:
    recorded = [r.hidden_states for sequence in states for r in sequence if r.hidden_states is not None]
    if len({tensor.shape[1] for tensor in recorded}) != 1:
        return None
    nothing = recorded[0].new_zeros((0, recorded[0].shape[1]))

    def padded(spec_round: SpecRound) -> torch.Tensor:
        known = nothing if spec_round.hidden_states is None else spec_round.hidden_states
        return pad(known, (0, 0, 0, 1 + nodes - known.shape[0]))

    rows = []
    for sequence in states:
        places = [padded(spec_round) for spec_round in sequence]
        places += [pad(nothing, (0, 0, 0, 1 + nodes))] * (rounds - len(places))
        rows.append(torch.stack(places))
    return torch.stack(rows)
