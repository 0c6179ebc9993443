"""One forward of a model over the rows' token trees, on top of its cached rows."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerationConfig
from transformers.pytorch_utils import move_to_device
from transformers.utils import ModelOutput

from .compat import CACHE_NAME
from .few_rows import FewRowsView, few_rows_view
from .row_cache import CacheMarks, RowCache
from .token_tree import TreeBatch

if TYPE_CHECKING:
    from .model_support import ModelSupport

# per-token inputs that plain decoding extends: with their last value, or with zeros ("text")
REPEATED_INPUTS = ("token_type_ids",)
ZEROED_INPUTS = ("mm_token_type_ids", "moe_mm_token_type_ids")


class CachedModel:
    """
    A model, the arguments of its forwards and its [`RowCache`]: the target of a generation, or an assistant.

    Args:
        model (`PreTrainedModel`): Called through its own `prepare_inputs_for_generation`.
        model_kwargs (`dict`): The model inputs as `generate()` prepared them, a cache included.
        generation_config (`GenerationConfig`): For `prefill_chunk_size` and the compilation options.
        support (`ModelSupport`): What the model can do, see [`probe`].
        few_rows (`bool`, *optional*, defaults to `False`): Use faster products for few rows, see [`FewRowsView`].
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        generation_config: GenerationConfig,
        support: "ModelSupport",
        few_rows: bool = False,
    ):
        self.model = model
        self.kwargs = model_kwargs
        self.generation_config = generation_config
        self.support = support
        self._few_rows = few_rows
        self._view: FewRowsView | None = None
        is_encoder_decoder = model.config.is_encoder_decoder
        self._ids_name = "decoder_input_ids" if is_encoder_decoder else "input_ids"
        self._mask_name = "decoder_attention_mask" if is_encoder_decoder else "attention_mask"
        self._position_name = "decoder_position_ids" if is_encoder_decoder else "position_ids"
        self._call: Callable = model.__call__
        self.rows: RowCache

    def prefill(self, input_ids: torch.Tensor) -> ModelOutput:
        """
        The forward over the prompt, exactly as plain `generate()` makes it (a filled cache, chunks and `inputs_embeds`
        included), after which [`~CachedModel.forward`] may be called.
        """
        model = self.model
        marks = CacheMarks(self.kwargs[CACHE_NAME])
        try:
            outputs = model._prefill(input_ids, self.generation_config, self.kwargs, is_first_iteration=True)
        except BaseException:
            marks.restore()
            raise
        self.kwargs = model._update_model_kwargs_for_generation(
            outputs, self.kwargs, is_encoder_decoder=model.config.is_encoder_decoder
        )
        cache = self.kwargs.pop(CACHE_NAME)
        slots = int(cache.get_seq_length())
        mask = self.kwargs.pop(self._mask_name, None)
        if mask is None:
            mask = torch.ones((input_ids.shape[0], slots), device=input_ids.device)
        self.rows = RowCache(cache, mask[:, :slots] != 0, aligned=self.support.rows == "aligned")
        positions = self.kwargs.pop(self._position_name, None)
        # [..., batch or 1, 1]: where the token after the prefill stands; later ones count on from there
        self._next_position = None if positions is None else positions[..., -1:]
        self._prefilled = slots
        if model._valid_auto_compile_criteria({**self.kwargs, CACHE_NAME: cache}, self.generation_config):
            self._call = model.get_compiled_call(self.generation_config.compile_config)
        elif self._few_rows:
            self._view = few_rows_view(model)
            self._call = self._view or self._call
        return outputs

    def prepare(self, batch: TreeBatch) -> None:
        """What need be done once before forwards like that over `batch`."""
        if self._view is not None:
            self._view.prepare(len(batch.token_ids) * batch.width)

    def missing_tokens(self, row: int, num_new: int) -> int:
        """How many of the row's `num_new` tokens after the prompt the cache lacks."""
        return self._prefilled + num_new - self.rows.lengths[row]

    def forward(self, batch: TreeBatch, context: torch.Tensor | None = None) -> ModelOutput:
        """
        Runs the model over `batch`, whose slots stay pending in the cache until [`RowCache.keep`] judges them.

        Args:
            batch (`TreeBatch`): Tokens, parents and depths of `width` slots a row.
            context (`torch.BoolTensor` of shape `(batch_size, width, pending + width)`, *optional*):
                Which of the pending and new slots each new slot follows. Defaults to the batch's own tree on an empty
                pending part, and to everything pending for a chain.

        Returns:
            `ModelOutput`: With `logits` of shape `(batch_size, width, vocab_size)`.
        """
        device = self.rows.index.device
        token_ids = torch.tensor(batch.token_ids, device=device)  # [batch, width]
        depths = torch.tensor(batch.depths, device=device)  # [batch, width]
        if context is None and (not batch.is_chain or self._may_run_eager and self.support.tree):
            context = batch.ancestors()
        kwargs = {**self.kwargs, CACHE_NAME: self.rows.cache, self._mask_name: None}
        if context is None and not self.rows.is_dense:
            new = self.rows.visible.new_ones((len(batch.token_ids), self.rows.pending + batch.width))
            kwargs[self._mask_name] = torch.cat([self.rows.visible, new], dim=1).long()
        place = torch.tensor(self.rows.lengths, device=device)[:, None] + depths  # [batch, width], in the row
        if self._next_position is not None:
            kwargs[self._position_name] = self._next_position.to(device) + (place - self._prefilled)
        for name in REPEATED_INPUTS + ZEROED_INPUTS:
            if kwargs.get(name) is not None:
                repeated = kwargs[name][:, -1:].expand(-1, batch.width)
                kwargs[name] = repeated if name in REPEATED_INPUTS else torch.zeros_like(repeated)
        inputs = self.model.prepare_inputs_for_generation(
            token_ids, next_sequence_length=batch.width, is_first_iteration=False, **kwargs
        )
        if context is not None:
            mask = self._tree_mask(context.to(device), place)
            inputs[self._mask_name] = move_to_device(mask, inputs[self._ids_name].device)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = batch.width
        self.rows.begin()
        try:
            outputs = self._call(**inputs, return_dict=True)
        except BaseException:
            self.rows.rollback()
            raise
        self.rows.end(place)
        return outputs

    def _tree_mask(self, context: torch.Tensor, place: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """
        The 4D attention mask under which every new slot sees its own path only, one per layer type where layers
        differ: bool for sdpa, additive for eager (which silently misreads a bool mask).
        """
        rows, width = self.rows, place.shape[1]
        seen = torch.cat([rows.visible[:, None].expand(-1, width, -1), context], dim=2)[
            :, None
        ]  # [batch, 1, width, all]
        if rows.room is not None:  # a static layer attends over its whole length
            seen = torch.nn.functional.pad(seen, (0, rows.room - width))
        if self.support.mask == "full":
            return self._as_attention_expects(seen)
        key_place = torch.cat([rows.index, rows.pending_place, place], dim=1)
        distance = place[:, None, :, None] - key_place[:, None, None]  # [batch, 1, width, all]
        text_config = self.model.config.get_text_config(decoder=True)
        near = seen & (distance < text_config.sliding_window)
        if rows.sliding_layer is not None:
            held, skipped = rows.sliding_layer.get_mask_sizes(width)
            near = near[..., skipped : skipped + held]
        near = self._as_attention_expects(near)
        if self.support.mask == "sliding":
            return near
        layer_types = set(text_config.layer_types)
        full = self._as_attention_expects(seen)
        return {name: near if name == "sliding_attention" else full for name in layer_types}

    @property
    def _may_run_eager(self) -> bool:
        """
        Whether the forward may leave sdpa for eager code, because attentions are returned. That code reads additive
        masks only, and some models (Falcon) hand it the empty mask that stands for "causal" under sdpa.
        """
        return bool(self.kwargs.get("output_attentions"))

    def _as_attention_expects(self, mask: torch.Tensor) -> torch.Tensor:
        attention = self.model.config.get_text_config(decoder=True)._attn_implementation
        if attention == "sdpa" and not self._may_run_eager:
            return mask
        dtype = self.model.dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
