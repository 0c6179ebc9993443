"""The differences between the transformers releases that this package supports (5.20 and newer)."""

import inspect

from transformers import Cache, GenerationMixin, PreTrainedModel

# 5.24 renamed the cache argument of `forward`, of `generate` and of the generate outputs.
CACHE_NAME = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


def self_attention_cache(cache: Cache) -> Cache:
    """The part of a cache that grows while decoding (an encoder-decoder cache has a second, fixed one)."""
    return getattr(cache, "self_attention_cache", cache)


def tp_size(model: PreTrainedModel) -> int:
    """Over how many processes tensor parallelism has sharded `model`."""
    return getattr(model, "tp_size", None) or 1
