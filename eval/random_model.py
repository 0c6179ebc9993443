"""A tiny model with random weights and a tokenizer of bytes: every method runs on it in milliseconds, anywhere."""

import copy

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<end>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for every byte, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def random_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    """A two-layer Llama whose logits are far apart, so that it repeats itself as small models do."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            initializer_range=0.3,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        return LlamaForCausalLM(config).eval()


def noisy_copy(model: PreTrainedModel, noise: float = 0.1, seed: int = 1) -> PreTrainedModel:
    """A draft model that agrees with `model` often, but not always."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            spread = parameter.float().std().item() if parameter.numel() > 1 else 0.0
            disturbance = noise * spread * torch.randn(parameter.shape, generator=generator)
            parameter.add_(disturbance.to(parameter))
    return draft
