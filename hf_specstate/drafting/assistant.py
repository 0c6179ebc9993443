"""Drafting with an assistant model: chains and trees, rows of a batch together, on a cache of its own."""

import hashlib
import inspect
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..compat import CACHE_NAME, tp_size
from ..host import from_host, to_host
from ..logits_processor import SpecStateLogitsProcessor
from ..model_support import probe
from ..selection import wants_whole_batch
from ..token_tree import IDLE_DEPTH, TokenTree, TreeBatch
from ..validation import check_encoder_inputs, check_support
from ..verification import CachedModel
from .base import DraftContext, Drafter, DraftOutcome, DraftRequest, ModelRuns
from .expectations import Expectation, Expectations
from .growth import Growth

MOST_AT_ONCE = 64  # tokens of each row that are caught up in one forward: every one of them makes logits


@dataclass
class AssistantDrafter(Drafter):
    """
    Drafts with the assistant model of the call (assisted generation, https://huggingface.co/blog/assisted-generation;
    trees as in SpecInfer, https://huggingface.co/papers/2305.09781). Each step runs the assistant on the most likely
    node of every row that has no children yet and gives it the `width` most likely ones, or, under `"rejection"`
    acceptance, one drawn from its distribution. Tokens that the assistant has not seen since it was last asked are
    caught up first, up to 64 in a forward. What other drafters of the call are sure of is extended, not drafted anew.

    Args:
        conditioning (`float`, *optional*, defaults to 0.05):
            Weight that earlier rounds have, to begin with, in what the assistant drafts; see [`Expectations`]. It is
            learned from then on. 0 leaves the assistant to itself.
        expect_from (`tuple[str]`, *optional*, defaults to `("answer_tail", "history")`): What is listened to.
    """

    name: ClassVar[str] = "assistant"
    default_width: ClassVar[int | None] = 1  # each alternative has to be run through the assistant
    extends: ClassVar[bool] = True
    stops: ClassVar[bool] = True
    conditioning: float = 0.05
    expect_from: tuple[str, ...] = ("answer_tail", "history")

    def needs_lockstep(self, context: DraftContext) -> bool:
        if context.assistant_model is None:
            raise ValueError("The `assistant` drafter needs `assistant_model=` (or `assistant_early_exit=`).")
        check_encoder_inputs(context.assistant_model, context.inputs_tensor)
        support = probe(context.assistant_model)
        check_support(context.assistant_model, support, "assistant_model")
        return support.rows == "lockstep"

    def start(self, context: DraftContext) -> None:
        self._context = context
        assert context.assistant_model is not None  # `needs_lockstep` has refused the call otherwise
        self._assistant = context.assistant_model
        self._support = probe(self._assistant)
        self._sequences = context.sequences
        self._is_prefilled = False
        self.runs = ModelRuns()
        self._cached: CachedModel
        self._conditioner = SpecStateLogitsProcessor(captures=False)
        self._processors = LogitsProcessorList([*context.logits_processor, self._conditioner])
        self._whole_batch = wants_whole_batch(context.logits_processor)
        sources = self.expect_from if self.conditioning else ()
        self.wants_answers = "answer_tail" in sources
        self._expectations = Expectations(context, self.conditioning, sources)
        self._generator = _private_generator(context.input_ids.device)
        self._threshold = context.config.confidence_threshold
        self._draws = context.config.acceptance == "rejection" and bool(context.generation_config.do_sample)
        text_config = self._assistant.config.get_text_config(decoder=True)
        self._vocab_size = text_config.vocab_size
        self._longest = getattr(text_config, "max_position_embeddings", None) or sys.maxsize
        # per row, of the last draft: the tree, and the pending cache slot of each node that was run
        batch_size = self._sequences.batch_size
        self._trees = [TokenTree() for _ in range(batch_size)]
        self._node_slots: list[dict[int, int]] = [{} for _ in range(batch_size)]
        self._seen = [0] * batch_size  # tokens of each row that the cache holds
        self._caught_up = 0  # tokens that it lacked at the last proposal

    def propose_rows(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        room: int = self._longest - max(len(request.token_ids) for request in requests)
        growing = {
            request.row: Growth(request, min(request.max_depth, room), self._threshold, self._support.tree)
            for request in requests
            if min(request.max_nodes, request.max_depth, room) > 0
        }
        was_prefilled, self._prepared = self._is_prefilled, 0.0
        began = time.perf_counter()
        if growing:
            logits = self._catch_up()
        self._trees = [TokenTree() for _ in range(self._sequences.batch_size)]
        if any(growth.known for growth in growing.values()):
            logits = self._follow(growing, logits)
        if not was_prefilled:
            began, self._prepared = time.perf_counter(), 0.0
        marks = [began]
        while growing:
            self._add_children(growing, logits)  # reads from the device: the step is done
            marks.append(time.perf_counter() - self._prepared)
            growing = {row: growth for row, growth in growing.items() if growth.choose(self._trees[row])}
            if growing and self._is_worthwhile(growing, requests[0]):
                logits = self._run(growing)
            else:
                growing = {}
        self.runs = ModelRuns(
            begin_seconds=marks[min(1, len(marks) - 1)] - began,
            step_seconds=marks[-1] - marks[min(1, len(marks) - 1)],
            num_steps=max(len(marks) - 2, 0),
            num_nodes=max(map(len, self._trees)),
            is_late=not was_prefilled or self._caught_up > 1 + max(request.max_nodes for request in requests),
        )
        return [self._trees[request.row] for request in requests]

    def _is_worthwhile(self, growing: dict[int, Growth], request: DraftRequest) -> bool:
        """Whether one more step promises enough accepted tokens in all rows."""
        if not request.least_gain:
            return True
        gains = []
        for row, growth in growing.items():
            path = self._trees[row].path_to(growth.node)
            chances = self._context.acceptance.estimate(row, self._trees[row])
            next_one = self._context.acceptance.vector(self.name, 1 + len(path))[-1]
            gains.append(math.prod(chances[node] for node in path) * next_one)
        return (len(gains) * math.prod(gains) if request.together else sum(gains)) >= request.least_gain

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        self._expectations.observe(outcomes)

    # ------------------------------------------------------------------ the assistant's cache

    def _catch_up(self) -> torch.Tensor:
        """Brings the cache up to the last committed token; the logits after it, `(batch_size, vocab_size)`."""
        if self._is_prefilled:
            self._keep_accepted()
        else:
            logits = self._prefill()
        sequences = self._sequences
        missing = [tokens[seen:] for tokens, seen in zip(sequences.tokens, self._seen, strict=True)]
        width = self._caught_up = max(len(tokens) for tokens in missing)
        if width == 0:
            return logits
        for start in range(0, width, MOST_AT_ONCE):
            pieces = [tokens[start : start + MOST_AT_ONCE] for tokens in missing]
            found = self._forward(self._chains(pieces))
            self._cached.rows.keep([list(range(len(piece))) for piece in pieces])
            last = torch.tensor([max(len(piece) - 1, 0) for piece in pieces], device=found.device)
            found = found[torch.arange(len(last), device=last.device), last]
            goes_on = torch.tensor([len(piece) > 0 for piece in pieces], device=found.device)
            logits = found if start == 0 else torch.where(goes_on[:, None], found, logits)
        self._seen = [len(tokens) for tokens in sequences.tokens]
        return logits

    def _prefill(self) -> torch.Tensor:
        context, assistant = self._context, self._assistant
        # an offloaded model has no device of its own, but hooks that move its inputs
        device = context.input_ids.device if assistant.device.type == "meta" else assistant.device
        input_ids = context.input_ids.to(device)
        kwargs = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in _assistant_inputs(context, assistant, device).items()
        }
        kwargs[CACHE_NAME] = _new_cache(assistant)
        config = GenerationConfig(prefill_chunk_size=context.generation_config.prefill_chunk_size, disable_compile=True)
        few_rows = context.config.few_rows and tp_size(context.model) < 2  # ranks must draft the same
        self._cached = CachedModel(assistant, kwargs, config, self._support, few_rows)
        if input_ids.shape[1] == 0:  # the target was prompted with embeddings: start from the first new token
            input_ids = torch.tensor([tokens[:1] for tokens in self._sequences.tokens], device=input_ids.device)
        outputs = self._cached.prefill(input_ids.clamp(max=self._vocab_size - 1))
        self._is_prefilled = True
        rows = enumerate(self._sequences.tokens)
        self._seen = [max(len(tokens) - self._sequences.num_new(row), 1) for row, tokens in rows]
        return outputs.logits[:, -1]

    def _keep_accepted(self) -> None:
        """Keeps the slots of the last draft's nodes that were committed, and drops the others."""
        paths = []
        for row, tokens in enumerate(self._sequences.tokens):
            node, path = -1, []
            # the last one is run anew, for the logits that the next draft starts from
            for token in tokens[self._seen[row] : -1]:
                child = self._trees[row].child(node, token)
                if child is None or child not in self._node_slots[row]:
                    break
                node = child
                path.append(self._node_slots[row][node])
            paths.append(path)
        if self._support.rows == "lockstep":
            paths = [path[: min(map(len, paths))] for path in paths]
        if self._cached.rows.pending:
            self._cached.rows.keep(paths)
        self._seen = [seen + len(path) for seen, path in zip(self._seen, paths, strict=True)]
        self._node_slots = [{} for _ in paths]

    def _follow(self, growing: dict[int, Growth], logits: torch.Tensor) -> torch.Tensor:
        """Runs what others are sure of in one forward, so that the rows' trees grow from its end."""
        paths = [growing[row].known if row in growing else [] for row in range(self._sequences.batch_size)]
        if not self._support.tree:  # without a mask for each row, all must be as long
            shortest = min(len(growth.known) for growth in growing.values())
            paths = [path[:shortest] for path in paths]
        width = max(map(len, paths))
        if width == 0:
            return logits
        batch = self._chains([[token for token, _ in path] for path in paths])
        followed, logits = self._forward(batch), logits.clone()
        for row, path in enumerate(paths):
            for slot, (token, chance) in enumerate(path):
                # named after no one: whoever proposed it has it already
                growing[row].node = self._trees[row].add(token, growing[row].node, "", math.log(chance), chance)
                self._node_slots[row][growing[row].node] = slot
            if path:
                logits[row] = followed[row, len(path) - 1]
        return logits

    def _run(self, growing: dict[int, Growth]) -> torch.Tensor:
        """One step: the chosen node of every row, `(batch_size, vocab_size)`; rows that are done run along unused."""
        batch_size, pending = self._sequences.batch_size, self._cached.rows.pending
        tokens, depths = [[self._sequences.pad_token_id]] * batch_size, [[IDLE_DEPTH]] * batch_size
        context = torch.ones((batch_size, 1, pending + 1), dtype=torch.bool, device="cpu")
        for row, growth in growing.items():
            tree, node = self._trees[row], growth.node
            tokens[row], depths[row] = [tree.token_ids[node]], [tree.depths[node] - 1]
            context[row, 0, :pending] = False
            for ancestor in tree.path_to(tree.parents[node]):
                context[row, 0, self._node_slots[row][ancestor]] = True
            self._node_slots[row][node] = pending
        batch = self._embeddable(TreeBatch(tokens, [[-1]] * batch_size, depths))
        # everything that is pending is seen, then: there may be neither siblings nor padding
        is_chain = all(self._trees[row].is_chain and len(self._node_slots[row]) == pending + 1 for row in growing)
        return self._forward(batch, None if is_chain else context)[:, -1]

    def _forward(self, batch: TreeBatch, context: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of a forward over `batch`, what it takes to prepare such forwards left out of the time."""
        began = time.perf_counter()
        self._cached.prepare(batch)
        self._prepared += time.perf_counter() - began
        return self._cached.forward(batch, context).logits

    def _chains(self, rows: list[list[int]]) -> TreeBatch:
        """Some tokens of every row, one after the other; rows without any run along."""
        trees = [TokenTree.from_paths([tokens[1:]], self.name) for tokens in rows]
        roots = [tokens[0] if tokens else None for tokens in rows]
        width = max(map(len, rows))
        return self._embeddable(TreeBatch.pack(roots, trees, self._sequences.pad_token_id, width))

    def _embeddable(self, batch: TreeBatch) -> TreeBatch:
        """Token ids beyond the assistant's (smaller, unpadded) vocabulary cannot be looked up; any id may stand in."""
        batch.token_ids = [[min(token, self._vocab_size - 1) for token in row] for row in batch.token_ids]
        return batch

    # ------------------------------------------------------------------ its choices

    def _add_children(self, growing: dict[int, Growth], logits: torch.Tensor) -> None:
        """Gives the node that each growing row stands at its children."""
        expected = self._expect(growing)
        probs = self._process(growing, logits).softmax(dim=-1)  # [growing, target vocab]
        if self._draws:
            chosen = torch.multinomial(probs, num_samples=1, generator=self._generator)  # [growing, 1]
        else:
            width = max(growth.width for growth in growing.values())
            chosen = probs.topk(min(width, probs.shape[1]), dim=-1).indices  # [growing, width]
        nothing = probs.new_zeros(())
        plain_probs = torch.stack([self._conditioner.plain_probs.get(row, nothing) for row in growing])
        # one read for all: ids below 2**24 are exact in float32
        answers = to_host(torch.cat([plain_probs[:, None], chosen.float(), probs.gather(1, chosen)], dim=1))
        for place, (row, growth) in enumerate(growing.items()):
            tree, (plain_prob, *answer) = self._trees[row], answers[place]
            if row in expected:
                self._expectations.note(row, *expected[row], plain_prob)
            pairs = list(zip(answer[: chosen.shape[1]], answer[chosen.shape[1] :], strict=True))
            for token, prob in pairs[: growth.width]:
                if len(tree) < growth.max_nodes and prob > 0:
                    growth.offer(tree.add(int(token), growth.node, self.name, math.log(prob)), tree)
            if self._draws:
                growth.distributions.append(probs[place])
                tree.draft_probs = torch.stack(growth.distributions)

    def _expect(self, growing: dict[int, Growth]) -> dict[int, tuple[list[int], Expectation]]:
        """What earlier rounds say about the children of the nodes that the rows stand at: `(path, expectation)`."""
        expected = {}
        self._conditioner.forget()
        for row, growth in growing.items():
            tree = self._trees[row]
            path = [tree.token_ids[node] for node in tree.path_to(growth.node)]
            if (expectation := self._expectations.next(row, path)) is not None:
                length = self._sequences.length(row) + len(path)
                self._conditioner.expect(row, length, expectation.token, expectation.weight)
                expected[row] = (path, expectation)
        return expected

    def _process(self, growing: dict[int, Growth], logits: torch.Tensor) -> torch.Tensor:
        """The assistant's scores over the target's vocabulary, under the processors, `(growing, vocab_size)`."""
        size = min(logits.shape[-1], self._context.vocab_size)
        device = self._context.input_ids.device
        scores = torch.full((logits.shape[0], self._context.vocab_size), -math.inf, device=device, dtype=torch.float32)
        scores[:, :size] = logits[:, :size].to(device=device, dtype=torch.float32)
        paths = {row: self._trees[row].path_to(growth.node) for row, growth in growing.items()}
        lengths = {row: self._sequences.length(row) + len(path) for row, path in paths.items()}
        processed = torch.empty_like(scores)
        for length in set(lengths.values()):
            rows = [row for row in growing if lengths[row] == length]
            shown = list(range(len(scores))) if self._whole_batch else rows
            places = rows if self._whole_batch else list(range(len(rows)))
            input_ids = self._sequences.ids(length)[shown]
            if len(self._processors) > 1:  # the conditioner does not read them
                for place, row in zip(places, rows, strict=True):
                    path = [self._trees[row].token_ids[node] for node in paths[row]]
                    input_ids[place, length - len(path) :] = from_host(path, dtype=torch.long)
            self._conditioner.rows = shown
            processed[rows] = self._processors(input_ids, scores[shown])[places]
        return processed[list(growing)]


def _private_generator(device: torch.device) -> torch.Generator:
    """
    Random numbers that leave the global random state alone, but are seeded by it: with a fixed seed every call would
    draw the same drafts, and speculative sampling gives the target's law only if the drafts are random too.
    """
    module = torch if device.type == "cpu" else torch.get_device_module(device)
    state = module.get_rng_state(*([] if device.type in ("cpu", "mps") else [device]))
    digest = hashlib.blake2b(state.cpu().numpy().tobytes(), digest_size=7).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest))


def _new_cache(model) -> DynamicCache | EncoderDecoderCache:
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    return DynamicCache(config=config)


def _assistant_inputs(context: DraftContext, assistant: PreTrainedModel, device: torch.device) -> dict[str, Any]:
    """The assistant's model inputs, made from the target's as transformers' `AssistedCandidateGenerator` makes them."""
    target = context.model
    kwargs: dict[str, Any] = {"use_cache": True}
    if assistant._supports_logits_to_keep():
        kwargs["logits_to_keep"] = 1
    if assistant.config.is_encoder_decoder:
        config = GenerationConfig(output_attentions=False, output_hidden_states=False)
        inputs = None if context.inputs_tensor is None else context.inputs_tensor.to(device)
        if inputs is not None:  # one a prompt, for maybe several rows
            inputs = inputs.repeat_interleave(context.sequences.batch_size // inputs.shape[0], dim=0)
        inputs, name, kwargs = assistant._prepare_model_inputs(inputs, None, kwargs)
        if context.model_kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = context.model_kwargs["attention_mask"].to(device)
        return assistant._maybe_prepare_encoder_kwargs_for_generation(inputs, kwargs, name, config)
    mask = context.model_kwargs.get("decoder_attention_mask" if target.config.is_encoder_decoder else "attention_mask")
    if mask is not None and mask.shape == context.input_ids.shape:
        kwargs["attention_mask"] = mask
    if target.config.is_encoder_decoder:  # a decoder-only assistant that reads the target's encoder (DistilWhisper)
        kwargs["encoder_outputs"] = context.model_kwargs["encoder_outputs"]
    elif context.input_ids.shape[1] > 0 and "position_ids" in inspect.signature(assistant.forward).parameters:
        kwargs["position_ids"] = assistant._prepare_position_ids_for_generation(context.input_ids, kwargs)
    return kwargs
