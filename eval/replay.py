"""
Plays recorded texts to drafters: what would they have drafted, and what of it would have been accepted? Under `"match"`
acceptance the text does not depend on the drafts, so the answer is exact without the model. (A drafter that learns
from the target's answers to rejected tokens cannot know them from a text; it learns from the accepted ones only.)
"""

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from hf_specstate import DRAFTERS, SpecStateConfig, TokenTree
from hf_specstate.candidate_generator import SpecStateCandidateGenerator
from hf_specstate.drafting import DraftContext, DraftOutcome
from hf_specstate.scheduling import Acceptance, ConstantLength
from hf_specstate.sequences import Sequences
from hf_specstate.states import SpecRound, SpecSequence


@dataclass
class RecordedText:
    """
    Args:
        category (`str`): Of the question.
        prompt_ids, output_ids (`list[int]`): The prompt, without padding, and the new tokens.
        max_new_tokens (`int`, *optional*): What the run allowed; drafts end there. Defaults to the length of the text.
    """

    category: str
    prompt_ids: list[int]
    output_ids: list[int]
    max_new_tokens: int | None = None


@dataclass
class Setting:
    """
    How to speculate.

    Args:
        drafters (`str`): Names from `hf_specstate.DRAFTERS`; several are joined by `+`.
        max_nodes (`int`), tree_width (`int`): As in `SpecStateConfig`.
    """

    drafters: str
    max_nodes: int
    tree_width: int = 1

    def config(self) -> SpecStateConfig:
        """
        Raises:
            ValueError: a name that no drafter has.
        """
        names = self.drafters.split("+")
        SpecStateConfig(drafters=list(names))  # checks them
        drafters = [DRAFTERS[name]() for name in names]
        return SpecStateConfig(drafters, max_nodes=self.max_nodes, tree_width=self.tree_width, strict=True)


@dataclass
class Replay:
    """
    Args:
        category (`str`): Of the text.
        sequence ([`SpecSequence`]): The rounds, as a generation would have recorded them.
        drafting_seconds (`float`): Time spent in the drafters, on this machine.
    """

    category: str
    sequence: SpecSequence
    drafting_seconds: float

    @property
    def num_tokens(self) -> int:
        """New tokens without the prefill's."""
        return sum(len(played.committed_token_ids) for played in self.sequence.rounds[1:])

    @property
    def widths(self) -> list[int]:
        """Tokens that each forward after the prefill ran over: the last committed one and the draft."""
        return [1 + len(played.token_ids) for played in self.sequence.rounds[1:]]


def replay(text: RecordedText, config: SpecStateConfig) -> Replay:
    """
    Runs the drafters of `config` over `text` with the package's own candidate generator: the loop of
    `hf_specstate.decoding` at batch size 1, with the recorded text in the target's place.

    Args:
        text ([`RecordedText`]): What the target said.
        config ([`SpecStateConfig`]): With drafters as objects, under the constant schedule.

    Raises:
        ValueError: a drafter that needs a model.
    """
    context = _context(text, config)
    drafters = [copy.copy(drafter) for drafter in config.drafters or []]
    for drafter in drafters:
        drafter.needs_lockstep(context)  # the chance to refuse
        if drafter.wants_logits:
            raise ValueError(f"The `{drafter.name}` drafter learns from the target's scores, which no text holds.")
    candidates = SpecStateCandidateGenerator(
        context, drafters, ConstantLength(config.max_nodes or 0), config.tree_width
    )
    sequence = SpecSequence(text.prompt_ids)
    seconds, position = 0.0, 0
    while position < len(text.output_ids):
        start = time.perf_counter()
        tree = candidates.propose([0])[0] if position else TokenTree()
        seconds += time.perf_counter() - start
        accepted = walk(tree, text.output_ids[position:])
        tokens = text.output_ids[position : position + len(accepted) + 1]
        for token in tokens:
            context.sequences.commit(0, token)
        outcome = _known_outcome(tree, accepted, tokens) if candidates.wants_answers else None
        start = time.perf_counter()
        candidates.observe([outcome or DraftOutcome(0, tree, accepted, tokens)])
        seconds += time.perf_counter() - start
        added = tokens[-1] if len(accepted) < len(tokens) else None
        lists = (tree.token_ids, tree.parents, tree.sources, tree.log_probs, accepted, added)
        sequence.rounds.append(SpecRound(len(sequence), position, *lists))
        position += len(tokens)
    return Replay(text.category, sequence, seconds)


def walk(tree: TokenTree, text: Sequence[int]) -> list[int]:
    """The nodes that are accepted when the target goes on with `text`."""
    accepted: list[int] = []
    for token in text:
        node = tree.child(accepted[-1] if accepted else -1, token)
        if node is None:
            break
        accepted.append(node)
    return accepted


def _known_outcome(tree: TokenTree, accepted: Sequence[int], tokens: list[int]) -> DraftOutcome:
    """What a text tells about a round: the target's answers along the accepted path, and nothing beside it."""
    known = TokenTree()
    for node in accepted:
        known.add(tree.token_ids[node], len(known) - 1, tree.sources[node], tree.log_probs[node])
    return DraftOutcome(0, known, list(range(len(known))), tokens, list(tokens))


def _context(text: RecordedText, config: SpecStateConfig) -> DraftContext:
    """The generation that a drafter is told about. In the model's place stands what drafters ask of it: its config."""
    vocab_size = 1 + max(*text.prompt_ids, *text.output_ids)
    text_config = SimpleNamespace(vocab_size=vocab_size)
    model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: text_config))
    input_ids = torch.tensor([text.prompt_ids])
    room = text.max_new_tokens or len(text.output_ids)
    return DraftContext(
        model=model,
        sequences=Sequences(input_ids, None, pad_token_id=0),
        config=config,
        generation_config=GenerationConfig(max_length=len(text.prompt_ids) + room),
        logits_processor=LogitsProcessorList(),
        input_ids=input_ids,
        model_kwargs={},
        acceptance=Acceptance(),
    )


def tokens_per_forward(replays: Sequence[Replay]) -> float:
    """The mean over all forwards after the prefill; NaN without any."""
    forwards = sum(len(played.widths) for played in replays)
    return sum(played.num_tokens for played in replays) / forwards if forwards else math.nan
