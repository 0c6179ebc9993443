"""What cannot be done, said in one sentence before the prefill."""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, QuantizedLayer, StaticLayer

from .compat import CACHE_NAME, self_attention_cache
from .config import SpecStateConfig
from .model_support import ModelSupport
from .scheduling.profile import SpecProfile

# Rows of an embedding matrix that models of one tokenizer may differ by: matrices are padded to multiples of up to 512.
LARGEST_VOCAB_PADDING = 512
CHANGING_FREQUENCIES = ("dynamic", "longrope")  # kinds of rotary embeddings that depend on the length of the text


def check_generation(model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: the target, its cache or an option of the call cannot be combined with speculation.
    """
    if generation_config.assistant_ensemble_weight is not None:
        raise ValueError(
            "`assistant_ensemble_weight` trades the target's distribution for speed, and this package never does; "
            "leave it out, or call `hf_specstate.disable(model)` first."
        )
    if not model_kwargs.get("use_cache", True):
        raise ValueError("Speculative decoding needs a cache; pass `use_cache=True`.")
    quantization = getattr(model.config, "quantization_config", None)
    if (
        quantization is not None
        and _get(quantization, "load_in_8bit")
        and _get(quantization, "llm_int8_threshold", 6.0)
    ):
        raise ValueError(
            "bitsandbytes int8 with an outlier threshold gives other logits for several tokens than for one, so the "
            "text would change; load the model with `BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0)`."
        )
    cache = model_kwargs.get(CACHE_NAME)
    if cache is None:
        raise ValueError(f"{type(model).__name__} keeps no transformers `Cache`, so drafts cannot be taken back.")
    check_cache(cache)


def check_positions(model: PreTrainedModel, generation_config: GenerationConfig, prompt_length: int) -> None:
    """
    Raises:
        ValueError: the text may grow into positions at which the model changes the rotary frequencies of all tokens, so
            that a forward over several tokens differs from one over each.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = settings.get("rope_type")
        if kind not in CHANGING_FREQUENCIES:
            continue
        original = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
        limit = settings.get("original_max_position_embeddings") or original
        is_past = kind == "longrope" and prompt_length > limit  # which changes them once
        if generation_config.max_length > limit and not is_past:
            raise ValueError(
                f"{type(model).__name__} changes its rotary frequencies ({kind}) past {limit} tokens and the text may "
                f"grow to {generation_config.max_length}; lower `max_new_tokens`, or call `generate()` without drafts."
            )


def check_cache(cache) -> None:
    """
    Raises:
        ValueError: rejected tokens could not be taken out of `cache`.
    """
    kind = type(cache).__name__
    cache = self_attention_cache(cache)
    if getattr(cache, "offloading", False):
        raise ValueError(
            "`cache_implementation='offloaded'` moves the cache away while it is read; use a dynamic or a static cache."
        )
    for layer in cache.layers:
        if isinstance(layer, StaticLayer) and getattr(layer, "is_sliding", False) and not layer.is_croppable:
            raise ValueError(
                "A static cache overwrites what leaves a sliding window, so drafts cannot be taken back; use the "
                "dynamic cache (leave out `cache_implementation`)."
            )
        attends = hasattr(layer, "keys") and not hasattr(layer, "conv_states")
        known = isinstance(layer, StaticLayer) or type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
        # older releases take quantised layers for croppable
        croppable = layer.is_croppable and not isinstance(layer, QuantizedLayer)
        if attends and not known and not croppable:
            raise ValueError(
                f"A {kind} cannot be cropped, so drafts cannot be taken back; use a dynamic or a static cache (leave "
                "out `cache_implementation`)."
            )


def check_support(model: PreTrainedModel, support: ModelSupport, role: str) -> None:
    """
    Raises:
        ValueError: `model`, the "model" or the "assistant_model", cannot take back rejected tokens.
    """
    if support.rows == "none":
        way_out = (
            "call `hf_specstate.disable(model)` first, or leave out `assistant_model` and this package's arguments"
            if role == "model"
            else "use another assistant, or none"
        )
        raise ValueError(f"The {role} {type(model).__name__} cannot speculate exactly ({support.reason}); {way_out}.")


def check_assistant(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_tokenizer: PreTrainedTokenizerBase | None,
    synced_gpus: bool,
) -> None:
    """
    Raises:
        ValueError: the assistant speaks another vocabulary and the tokenizers were not given, or it is sharded.
    """
    if assistant_model is None:
        return
    from transformers.integrations.fsdp import is_fsdp_managed_module

    # FSDP marks modules, DeepSpeed's ZeRO-3 parameters
    if synced_gpus and (
        is_fsdp_managed_module(assistant_model) or any(hasattr(p, "ds_id") for p in assistant_model.parameters())
    ):
        raise ValueError(
            "`assistant_model` is sharded over the ranks, which draft different numbers of steps; give every rank a "
            "whole assistant, or leave it out."
        )
    ours, theirs = (m.config.get_text_config(decoder=True).vocab_size for m in (model, assistant_model))
    if abs(ours - theirs) > LARGEST_VOCAB_PADDING and (tokenizer is None or assistant_tokenizer is None):
        raise ValueError(
            f"`assistant_model` has a vocabulary of {theirs} tokens and the model one of {ours}; pass `tokenizer=` and "
            "`assistant_tokenizer=` to draft across tokenizers."
        )


def check_encoder_inputs(assistant_model: PreTrainedModel, inputs_tensor: torch.Tensor | None) -> None:
    """
    Raises:
        ValueError: the assistant has an encoder of its own, and the call holds nothing that it could read.
    """
    if not assistant_model.config.is_encoder_decoder:
        return
    reads_ids = assistant_model.main_input_name == "input_ids"
    # `generate()` stands -100 in for the input ids when it is handed `encoder_outputs`
    has_ids = inputs_tensor is not None and not inputs_tensor.is_floating_point() and bool((inputs_tensor >= 0).all())
    if inputs_tensor is None or (reads_ids and not has_ids):
        raise ValueError(
            "`assistant_model` has an encoder of its own and cannot read `inputs_embeds` or `encoder_outputs`; pass "
            "the model's inputs instead, or use an assistant without an encoder."
        )


def speak_alike(tokenizer: PreTrainedTokenizerBase | None, assistant_tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether a token id means the same to both models (a padded vocabulary is no difference)."""
    if tokenizer is None or assistant_tokenizer is None or tokenizer is assistant_tokenizer:
        return True
    return tokenizer.get_vocab() == assistant_tokenizer.get_vocab()


def check_spec_profile(spec_profile) -> None:
    """
    Raises:
        ValueError: `spec_profile` is something else.
    """
    if spec_profile is not None and not isinstance(spec_profile, SpecProfile):
        kind = type(spec_profile).__name__
        raise ValueError(f"`spec_profile` takes a SpecProfile (`SpecProfile.load(path)` reads one), got {kind}.")


def check_history_of_segments(model: PreTrainedModel, draft_history) -> None:
    """
    Raises:
        ValueError: there is one for each prompt, and the model writes segment by segment, in batches that shrink.
    """
    writes_segments = hasattr(getattr(model, "_hf_specstate_base", type(model)), "_stack_split_outputs")  # Whisper
    if isinstance(draft_history, list | tuple) and writes_segments:
        raise ValueError(f"{type(model).__name__} takes one `draft_history` for all recordings.")


def check_spec_streamer(spec_streamer) -> None:
    """
    Raises:
        ValueError: `spec_streamer` cannot be given rounds.
    """
    if spec_streamer is None:
        return
    for name in ("put_round", "end"):
        if not callable(getattr(spec_streamer, name, None)):
            raise ValueError(
                f"`spec_streamer` needs the methods `put_round(row, spec_round)` and `end()`; a "
                f"{type(spec_streamer).__name__} has no `{name}`."
            )


def check_config(config: SpecStateConfig) -> None:
    """
    Raises:
        ValueError: two fields of `spec_config` exclude each other.
    """
    if config.acceptance == "rejection" and (config.tree_width or 1) > 1:
        raise ValueError(
            "`spec_config.acceptance='rejection'` verifies chains only; leave `tree_width` at 1, or use `'match'`."
        )


def _get(settings, name: str, default=None):
    """Quantisation configs are objects on loaded models and dicts on others."""
    return settings.get(name, default) if isinstance(settings, dict) else getattr(settings, name, default)
