"""What an enabled model's `generate()` returns, and how the per-token outputs are gathered from tree forwards."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.utils import ModelOutput

from .compat import self_attention_cache
from .logits_processor import SpecStateLogitsProcessor
from .row_cache import RowCache
from .states import SpecStates


@dataclass
class SpecDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """
    [`~generation.GenerateDecoderOnlyOutput`] with the speculative states.

    Args:
        spec_states ([`SpecStates`], *optional*, returned when `return_spec_states=True`):
            What was drafted and accepted, by row and round.
        num_target_forwards, num_drafted_tokens, num_accepted_tokens (`torch.LongTensor` of shape `(batch_size,)`,
        *optional*, returned when `return_spec_states=True`):
            Their sums, in a form that pipelines pass on. The prefill counts as a forward.
    """

    spec_states: SpecStates | None = None
    num_target_forwards: torch.Tensor | None = None
    num_drafted_tokens: torch.Tensor | None = None
    num_accepted_tokens: torch.Tensor | None = None


@dataclass
class SpecEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """
    [`~generation.GenerateEncoderDecoderOutput`] with the speculative states.

    Args:
        spec_states ([`SpecStates`], *optional*, returned when `return_spec_states=True`):
            What was drafted and accepted, by row and round.
        num_target_forwards, num_drafted_tokens, num_accepted_tokens (`torch.LongTensor` of shape `(batch_size,)`,
        *optional*, returned when `return_spec_states=True`):
            Their sums, in a form that pipelines pass on. The prefill counts as a forward.
    """

    spec_states: SpecStates | None = None
    num_target_forwards: torch.Tensor | None = None
    num_drafted_tokens: torch.Tensor | None = None
    num_accepted_tokens: torch.Tensor | None = None


def with_sums(spec_states: SpecStates, device: torch.device) -> dict[str, Any]:
    """The fields that the speculative outputs have beside those of plain `generate()`."""
    sums = {
        "num_target_forwards": [sequence.num_forwards for sequence in spec_states],
        "num_drafted_tokens": [sequence.num_drafted for sequence in spec_states],
        "num_accepted_tokens": [sequence.num_accepted for sequence in spec_states],
    }
    tensors = {name: torch.tensor(values, dtype=torch.long, device=device) for name, values in sums.items()}
    return {"spec_states": spec_states, **tensors}


class OutputCollector:
    """
    Gathers `scores`, `logits`, `hidden_states` and `attentions` of the committed tokens, laid out as plain
    `generate()` returns them: one entry a step, `batch_size` rows in each. A row that has ended has zeros.

    Args:
        generation_config (`GenerationConfig`): Says which of them are wanted.
        is_encoder_decoder (`bool`): Names the attention outputs and the returned class.
        capture ([`SpecStateLogitsProcessor`]): Holds the processed scores of the tokens being committed.
        batch_size (`int`): Rows.
        together (`bool`): Rows advance together, so that stopping criteria can be given the scores so far.
    """

    def __init__(
        self,
        generation_config: GenerationConfig,
        is_encoder_decoder: bool,
        capture: SpecStateLogitsProcessor,
        batch_size: int,
        together: bool,
    ):
        wanted = generation_config.return_dict_in_generate
        prefix = "decoder_" if is_encoder_decoder else ""
        self._is_encoder_decoder = is_encoder_decoder
        self._capture = capture
        self._together = together
        # row -> step -> (vocab_size,)
        self._scores: list[list[torch.Tensor]] | None = None
        self._logits: list[list[torch.Tensor]] | None = None
        self.step_scores: tuple[torch.Tensor, ...] | None = None  # as stopping criteria get them
        if wanted and generation_config.output_scores:
            self._scores = [[] for _ in range(batch_size)]
            self.step_scores = ()
        if wanted and generation_config.output_logits:
            self._logits = [[] for _ in range(batch_size)]
        layered = []
        if wanted and generation_config.output_hidden_states:
            layered.append(prefix + "hidden_states")
        if wanted and generation_config.output_attentions:
            layered += [prefix + "attentions"] + (["cross_attentions"] if is_encoder_decoder else [])
        # name -> row -> step -> one tensor a layer, of shape (1, ...)
        self._layered: dict[str, list[list[tuple]]] = {name: [[] for _ in range(batch_size)] for name in layered}
        self._first: dict[str, tuple] = {}

    @property
    def wants_scores(self) -> bool:
        return self._scores is not None

    def prefill(self, outputs: ModelOutput) -> None:
        """Step 0 has the hidden states and attentions of the whole prompt."""
        self._first = {name: outputs[name] for name in self._layered if outputs.get(name) is not None}

    def commit(self, row: int, logits: torch.Tensor, length: int) -> None:
        """
        A token of `row`, which had `length` tokens before it, was chosen from `logits` of shape `(vocab_size,)`.
        """
        if self._scores is not None:
            scores = self._capture.scores_at(length, row)
            # rows at different lengths come out of a batch each; the rest of it need not stay alive
            self._scores[row].append(scores if self._together else scores.clone())
        if self._logits is not None:
            self._logits[row].append(logits.clone())

    def end_step(self) -> None:
        """Every row of the step has been committed."""
        if self._together and self.step_scores is not None:
            self.step_scores += tuple(self._capture.captured.values())
        self._capture.captured.clear()

    def keep(self, outputs: ModelOutput, paths: list[list[int]], rows: RowCache) -> None:
        """Takes the hidden states and attentions along every row's kept slots; called before the cache keeps them."""
        for name, by_row in self._layered.items():
            layers = outputs.get(name) or ()
            if None in layers[:1]:  # some models never return attentions
                layers = ()
            for row, path in enumerate(paths):
                for depth, slot in enumerate(path):
                    if name.endswith("hidden_states"):
                        step = tuple(layer[row : row + 1, slot : slot + 1].clone() for layer in layers)
                    elif name == "cross_attentions":
                        step = tuple(layer[row : row + 1, :, slot : slot + 1].clone() for layer in layers)
                    else:
                        step = _attentions_of(layers, rows, row, path[: depth + 1])
                    by_row[row].append(step)

    def build(self, outputs: dict[str, Any], spec_states: SpecStates | None) -> ModelOutput:
        """The dataclass that `generate()` returns, from the fields known outside and what was gathered here."""
        fields = dict(outputs)
        fields["scores"] = None if self._scores is None else self._stack(self._scores)
        fields["logits"] = None if self._logits is None else self._stack(self._logits)
        for name, by_row in self._layered.items():
            first = (self._first[name],) if name in self._first else ()
            fields[name] = first + self._stack_layers(by_row)
        if spec_states is not None:
            kind = SpecEncoderDecoderOutput if self._is_encoder_decoder else SpecDecoderOnlyOutput
            return kind(**fields, **with_sums(spec_states, fields["sequences"].device))
        return (GenerateEncoderDecoderOutput if self._is_encoder_decoder else GenerateDecoderOnlyOutput)(**fields)

    @staticmethod
    def _stack(by_row: list[list[torch.Tensor]]) -> tuple:
        steps = []
        for step in range(max(len(row) for row in by_row)):
            example = next(row[step] for row in by_row if step < len(row))
            rows = [row[step] if step < len(row) else torch.zeros_like(example) for row in by_row]
            steps.append(torch.stack(rows))
        return tuple(steps)

    @staticmethod
    def _stack_layers(by_row: list[list[tuple]]) -> tuple:
        steps = []
        for step in range(max(len(row) for row in by_row)):
            example = next(row[step] for row in by_row if step < len(row))
            rows = [row[step] if step < len(row) else tuple(map(torch.zeros_like, example)) for row in by_row]
            steps.append(tuple(torch.cat(layer) for layer in zip(*rows, strict=True)))
        return tuple(steps)


def _attentions_of(layers: tuple, rows: RowCache, row: int, path: list[int]) -> tuple:
    """The last token of `path` attending to its row, tokens in order: `(1, heads, 1, length so far)` for each layer."""
    order = rows.index[row].argsort(stable=True)[rows.slots - rows.lengths[row] :]
    columns = torch.cat([order, torch.tensor([rows.slots + slot for slot in path], device=order.device)])
    written = rows.slots + rows.pending
    picked = []
    for layer, cached in zip(layers, self_attention_cache(rows.cache).layers, strict=False):
        held = layer.shape[-1]
        seen = columns[-cached.get_max_length() :] if getattr(cached, "is_sliding", False) else columns
        piece = layer[row : row + 1, :, path[-1] : path[-1] + 1, seen - max(written - held, 0)]
        if held > written:  # a static layer shows its empty slots too
            piece = torch.nn.functional.pad(piece, (0, held - piece.shape[-1]))
        picked.append(piece.clone())
    return tuple(picked)
