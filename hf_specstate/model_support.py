"""What a model can do for speculation, found out by trying it on a small random copy of its architecture."""

import copy
import inspect
import logging
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
)
from transformers.modeling_outputs import BaseModelOutput

from .compat import CACHE_NAME
from .row_cache import can_gather
from .token_tree import TokenTree, TreeBatch
from .verification import CachedModel

logger = logging.getLogger(__name__)

TINY_SIZES = {
    # sizes under the names that transformers' configs use; large enough to keep every mechanism of the architecture
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("embed_dim", "out_hidden_size", "projection_dim", "mm_hidden_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok",), 2),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("global_head_dim", "query_pre_attn_scalar", "sliding_window", "attention_chunk_size"), 8),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_hidden_layers", "num_decoder_layers", "depth", "n_group", "topk_group"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"), 128),
    "original_max_position_embeddings": 128,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 97),
    **dict.fromkeys(("initializer_range", "init_std"), 0.3),
    "initializer_factor": 2.0,
    "rotary_dim": 4,
    "max_source_positions": 20,
    "num_mel_bins": 8,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
}
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
DROPPED_FIELDS = ("quantization_config", "transformers_version", "architectures")
LARGEST_COPY = 5e7  # parameters; a copy that has more did not shrink

EXACT = 1e-3  # largest difference of logits, as a fraction of their spread, that rounding explains in fp32
PROMPT, CHUNK = 12, 4  # tokens; the prompt is longer than the tiny sliding window
KEPT = ((4, 1), (2, 4), (1, 3))  # tokens kept by the two rows in each round of the trial
TREE = TokenTree([5, 6, 7, 8, 9, 11], [-1, -1, 0, 0, 1, 3], [0.0] * 6, ["probe"] * 6)

_results: dict[tuple, "ModelSupport"] = {}
_lock = Lock()


@dataclass(frozen=True)
class ModelSupport:
    """
    The highest rung of speculation on which a model gives exactly its usual logits.

    Args:
        tree (`bool`): Token trees can be verified in one forward.
        rows (`str`):
            Layout of rows that accept different numbers of tokens: `"holes"`, `"aligned"` (see `row_cache`),
            `"lockstep"` (rows must advance together) or `"none"` (rejected tokens cannot be taken back).
        mask (`str`): Which masks a tree needs: `"full"`, `"sliding"`, or `"by_type"` (one per layer type).
        reason (`str`): Why it is not a higher rung, in words.
    """

    tree: bool = False
    rows: str = "none"
    mask: str = "full"
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.rung} ({self.reason})" if self.reason else self.rung

    @property
    def rung(self) -> str:
        """`"tree"`, `"ragged chain"`, `"lockstep chain"` or `"refused"`."""
        if self.rows == "none":
            return "refused"
        return "tree" if self.tree else "lockstep chain" if self.rows == "lockstep" else "ragged chain"


def probe(model: PreTrainedModel, static: bool = False) -> ModelSupport:
    """
    Finds the highest rung on which `model` can speculate without changing its output, by comparing, on a tiny random
    float32 copy of the architecture (or on the model itself, if its config cannot be shrunk), every logit of a few
    speculative rounds with a fresh forward over each row's tokens. The outcome is remembered for the architecture. (The
    copy's weights are drawn from the global random generator of the CPU, which is put back. If other threads sample on
    the CPU meanwhile and must repeat a seed, call this before they begin.)

    Args:
        model (`PreTrainedModel`): Left as it is; the global random state too.
        static (`bool`, *optional*, defaults to `False`): Try a static cache, on which rows advance together.

    Returns:
        [`ModelSupport`]
    """
    attention = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    quantization = getattr(model.config, "quantization_config", None)
    kind = (type(model).__module__, type(model).__qualname__, model.config.to_json_string())
    key = (*kind, attention, str(model.dtype), str(quantization), static)
    with _lock:
        if key not in _results:
            # on the CPU, whatever the default device is; models draw their weights from the global generator
            with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.default_generator.manual_seed(0)
                _results[key] = _probe(model, attention, static)
    return _results[key]


def _probe(model: PreTrainedModel, attention: str | None, static: bool) -> ModelSupport:
    takes_tree = attention in ("sdpa", "eager")  # FlashAttention takes no 4D mask, flex attention only its own
    try:
        # a static cache can only be cropped while it lies within the sliding window
        sizes = TINY_SIZES | {"sliding_window": 4 * PROMPT} if static else TINY_SIZES
        trial = _tiny_copy(model, sizes, attention if takes_tree else "sdpa")
        _Trial(trial, ModelSupport(rows="lockstep"), static=False).fresh(0, [3])  # it runs
    except Exception as error:
        logger.debug("cannot shrink %s: %s", type(model).__name__, error)
        trial = model
    support = ModelSupport(reason="rejected tokens cannot be taken out of its state")
    layouts = ("lockstep",) if static else ("lockstep", "aligned", "holes")
    errors: list[str] = []
    for rows in layouts:
        candidate = ModelSupport(rows=rows, reason="" if takes_tree else f"{attention} attention takes no tree mask")
        if _works(trial, candidate, static, errors):
            support = candidate
    if len(errors) == len(layouts) and not model._is_stateful:
        return replace(support, reason=f"it could not be tried out: {errors[0]}")
    if support.rows == "lockstep" and not static:
        return replace(support, reason="rows that accept different numbers of tokens change each other")
    if support.rows == "none" or not takes_tree:
        return support
    for mask in _mask_kinds(trial.config):
        candidate = replace(support, tree=True, mask=mask)
        if _works(trial, candidate, static, errors):
            return candidate
    return replace(support, reason="its attention cannot be given a tree mask")


def _mask_kinds(config: PreTrainedConfig) -> list[str]:
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
    if "sliding_attention" in layer_types:
        return ["by_type", "sliding"]
    return ["sliding", "full"] if getattr(config.get_text_config(decoder=True), "sliding_window", None) else ["full"]


def _works(model: PreTrainedModel, support: ModelSupport, static: bool, errors: list[str]) -> bool:
    """Whether the rung gives the usual logits. What the model raises goes to `errors` and means no."""
    try:
        return _compare(model, support, static)
    except Exception as error:
        logger.debug("%s on %s: %s: %s", support.rung, type(model).__name__, type(error).__name__, error)
        errors.append(f"{type(error).__name__}: {error}")
        return False


def _tiny_copy(model: PreTrainedModel, sizes: dict[str, Any], attention: str | None) -> PreTrainedModel:
    config = type(model.config).from_dict(_shrink(model.config.to_dict(), sizes))
    base = getattr(type(model), "_hf_specstate_base", type(model))
    with torch.device("meta"):  # counts before it allocates
        outline = base._from_config(copy.deepcopy(config), attn_implementation=attention)
    if sum(parameter.numel() for parameter in outline.parameters()) > LARGEST_COPY:
        raise ValueError("the config did not shrink")
    tiny = base._from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    for parameter in tiny.parameters():  # weights that start as 0 or 1 would hide mistakes
        if parameter.ndim == 1:
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return tiny


def _shrink(config: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    kinds = list(dict.fromkeys(config.get("layer_types") or []))
    layers = max(2, len(kinds))
    tiny: dict[str, Any] = {}
    for name, value in config.items():
        if name in DROPPED_FIELDS:
            continue
        if name == "layer_types" and value:
            tiny[name] = (kinds * 2)[:layers]
        elif name == "num_key_value_heads" and value:  # keep the kind: multi-head, grouped or multi-query
            tiny[name] = 4 if value == config.get("num_attention_heads") else min(value, 2)
        elif name in ("rope_parameters", "rope_scaling") and value:
            tiny[name] = _shrink_rope(value)
        elif isinstance(value, dict) and name.endswith("config"):
            tiny[name] = _shrink(value, sizes)
        elif isinstance(value, int | float) and not isinstance(value, bool) and name in sizes:
            tiny[name] = layers if name == "num_hidden_layers" else sizes[name]
        elif name in SPECIAL_TOKENS and value is not None:
            tiny[name] = SPECIAL_TOKENS[name]
        elif isinstance(value, list) and len(value) == config.get("num_hidden_layers"):
            tiny[name] = value[:layers]
        else:
            tiny[name] = value
    return tiny


def _shrink_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Factors for the tiny head size, and a limit, beyond which some kinds change their frequencies, past the trial."""
    tiny = {name: _shrink_rope(value) if isinstance(value, dict) else value for name, value in rope.items()}
    pairs = int(TINY_SIZES["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
    tiny |= {name: value[:pairs] for name, value in tiny.items() if isinstance(value, list)}
    if "mrope_section" in tiny:  # pairs for time, height and width
        tiny["mrope_section"] = [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]
    if "original_max_position_embeddings" in tiny:
        tiny["original_max_position_embeddings"] = TINY_SIZES["max_position_embeddings"]
    return tiny


class _Trial:
    """Two rows of random tokens under a model: the first forwards, and the fresh forward that they must equal."""

    def __init__(self, model: PreTrainedModel, support: ModelSupport, static: bool):
        self.model = model
        self.device = model.get_input_embeddings().weight.device
        self.device = torch.device("cpu") if self.device.type == "meta" else self.device
        self.vocabulary = min(model.config.get_text_config(decoder=True).vocab_size, 90)
        self.generator = torch.Generator().manual_seed(7)
        self.is_encoder_decoder = model.config.is_encoder_decoder
        self.prompt = ids = self.tokens(2, PROMPT)
        mask = torch.ones_like(ids)
        if support.rows in ("aligned", "holes") and not self.is_encoder_decoder:
            ids[1, :3], mask[1, :3] = 0, 0
        self.rows = [row[seen.bool()] for row, seen in zip(ids, mask, strict=True)]
        kwargs: dict[str, Any] = {"use_cache": True, **self._encoder_inputs(slice(None))}
        config = model.config.get_text_config(decoder=True)
        cache = StaticCache(config=config, max_cache_len=4 * PROMPT) if static else DynamicCache(config=config)
        if self.is_encoder_decoder:
            cache = EncoderDecoderCache(cache, DynamicCache(config=config))
        else:
            kwargs["attention_mask"] = mask
            if "position_ids" in inspect.signature(model.forward).parameters:
                kwargs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        self.cached = CachedModel(model, {**kwargs, CACHE_NAME: cache}, GenerationConfig(), support)

    def tokens(self, *shape: int) -> torch.Tensor:
        return torch.randint(3, self.vocabulary, shape, generator=self.generator).to(self.device)

    def _encoder_inputs(self, rows: slice) -> dict[str, Any]:
        if not self.is_encoder_decoder:
            return {}
        if not hasattr(self, "_encoded"):  # whatever an encoder reads, the decoder sees states of its size
            size = self.model.get_encoder().config.hidden_size
            encoded = torch.randn((2, 7, size), generator=self.generator)
            self._encoded = encoded.to(self.device, self.model.dtype)
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=self._encoded[rows])}

    def fresh(self, row: int, tokens: list[int] | torch.Tensor) -> torch.Tensor:
        """`(positions, vocab_size)`: logits of one row's tokens followed by `tokens`, without padding or cache."""
        ids = torch.cat([self.rows[row], torch.as_tensor(tokens, device=self.device)])[None]
        name = "decoder_input_ids" if self.is_encoder_decoder else "input_ids"
        inputs = {name: ids, **self._encoder_inputs(slice(row, row + 1))}
        return self.model(**inputs, use_cache=False).logits[0].float()


def _compare(model: PreTrainedModel, support: ModelSupport, static: bool) -> bool:
    """Whether a few speculative rounds give the logits of fresh forwards. Raises what the model raises."""
    trial = _Trial(model, support, static)
    trial.cached.prefill(trial.prompt)
    if support.rows != "lockstep" and not can_gather(trial.cached.rows.cache):
        return False
    tolerance = EXACT if model.dtype == torch.float32 else 0.05
    for kept in KEPT:
        if support.rows == "lockstep":
            kept = (kept[0], kept[0])
        drafts = trial.tokens(2, CHUNK).tolist()
        trees = [TokenTree.from_paths([draft[1:]], "probe") for draft in drafts]
        batch = TreeBatch.pack([draft[0] for draft in drafts], trees, 0, CHUNK)
        if support.tree:
            batch = TreeBatch.pack([draft[0] for draft in drafts], [TREE, TREE], 0, len(TREE) + 1)
        logits = trial.cached.forward(batch).logits.float()
        paths = []
        for row in range(2):
            for slot in range(batch.width):
                path = _slots_to(batch.parents[row], slot)
                want = trial.fresh(row, [batch.token_ids[row][s] for s in path])[-1]
                if not (logits[row, slot] - want).abs().max() <= tolerance * (want.max() - want.min()):
                    return False
            deepest = batch.depths[row].index(max(batch.depths[row]))
            paths.append(_slots_to(batch.parents[row], deepest)[: kept[row]])
            tokens = torch.tensor([batch.token_ids[row][slot] for slot in paths[row]], device=trial.device)
            trial.rows[row] = torch.cat([trial.rows[row], tokens])
        trial.cached.rows.keep(paths)
    return True


def _slots_to(parents: list[int], slot: int) -> list[int]:
    path = []
    while slot >= 0:
        path.append(slot)
        slot = parents[slot]
    return path[::-1]
