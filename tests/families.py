"""Tiny random models of many families, which keep every mechanism and generate in milliseconds."""

import copy

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 64
COMMON = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    initializer_range=0.3,
)  # fmt: skip
GPT = dict(
    vocab_size=VOCAB, n_positions=256, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None,
    pad_token_id=0, initializer_range=0.3,
)  # fmt: skip
BART = dict(
    vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=256, init_std=0.3,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None, dropout=0.0,
)  # fmt: skip
T5 = dict(
    vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=2,
    decoder_start_token_id=0, relative_attention_num_buckets=8, dropout_rate=0.0, initializer_factor=2.0,
)  # fmt: skip

# name -> (model class, config class, config arguments)
FAMILIES: dict[str, tuple[str, str, dict]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", COMMON),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", COMMON),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", COMMON | {"head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", COMMON | {"sliding_window": None}),
    "mistral_sliding": ("MistralForCausalLM", "MistralConfig", COMMON | {"sliding_window": 8}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        COMMON | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "attn_implementation": "eager"},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        COMMON
        | {
            "head_dim": 8,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        dict(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4,
            max_position_embeddings=256, word_embed_proj_dim=32, bos_token_id=1, eos_token_id=None, pad_token_id=0,
            init_std=0.3, dropout=0.0,
        ),
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {k: v for k, v in COMMON.items() if "key_value" not in k}),
    "phi": ("PhiForCausalLM", "PhiConfig", COMMON),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        dict(
            vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None, pad_token_id=0,
            initializer_range=0.3,
        ),
    ),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        dict(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False, bos_token_id=1,
            eos_token_id=None, pad_token_id=0, initializer_range=0.3,
        ),
    ),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        dict(
            vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=256, initializer_range=0.3, use_cache=True
        ),
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART),
}  # fmt: skip


def tiny(family: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A float32 model of `family` in eval mode, without an EOS token, whose logits are far apart."""
    model_class, config_class, arguments = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = getattr(transformers, config_class)(**(arguments | overrides))
        model = getattr(transformers, model_class)._from_config(
            config, attn_implementation=getattr(config, "_attn_implementation", None) or None
        )
    model = model.eval()
    generation_config = model.generation_config
    generation_config.eos_token_id = overrides.get("eos_token_id")
    generation_config.forced_eos_token_id = None
    generation_config.pad_token_id = 0
    return model


def noisy_copy(model: PreTrainedModel, noise: float = 0.1, seed: int = 1) -> PreTrainedModel:
    """A draft model that agrees with `model` often, but not always."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            spread = parameter.std() if parameter.numel() > 1 else 0.0
            parameter.add_(noise * spread * torch.randn(parameter.shape, generator=generator))
    return draft


def prompt(length: int = 8, seed: int = 3) -> torch.Tensor:
    """`(1, length)` random token ids, none of them special."""
    return torch.randint(4, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))
