"""The models of the GPU check: the embedded one, and a large one with a draft that agrees by construction."""

import copy
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from .embedded_model import load_embedded_model

EMBEDDED_SHAPE = dict(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, initializer_range=0.06,
)  # fmt: skip
HEAD_SCALE = 16.0  # the logit of the next token of the large model, roughly; all others are noise around 0


@dataclass
class Scale:
    """
    How large everything is.

    Args:
        hidden_size, layers, vocab_size (`int`): Of the large target.
        draft_layers (`int`): How many of them its draft has.
        prompts (`int`): How many are generated from one after the other.
        new_tokens (`int`): In equality checks.
        timed_tokens (`int`): In timings.
        rows (`tuple[int, ...]`), tokens (`tuple[int, ...]`): Points of the cost curve.
        dtype (`torch.dtype`): Of what is timed.
    """

    hidden_size: int
    layers: int
    vocab_size: int
    draft_layers: int
    prompts: int
    new_tokens: int
    timed_tokens: int
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, device: torch.device) -> "Scale":
        """2.4 B parameters on a GPU; on a CPU as much as shows that everything works."""
        if device.type == "cuda":
            return cls(2560, 32, 49152, 2, 3, 48, 96, (1, 4, 16), (1, 2, 4, 8, 16, 32, 64), torch.bfloat16)
        return cls(256, 12, 4096, 1, 1, 10, 12, (1, 4), (1, 2, 8), torch.float32)


def embedded_or_random(device: torch.device) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase | None]:
    """
    Returns:
        `tuple`: The embedded model in float32 and its tokenizer, or, where its weights could not be carried, a random
        model of the same shape and None.
    """
    try:
        model, tokenizer = load_embedded_model()
    except ModuleNotFoundError:
        return random_llama(LlamaConfig(**EMBEDDED_SHAPE), device, torch.float32), None
    return model.to(device), tokenizer


def cast(model: LlamaForCausalLM, dtype: torch.dtype) -> None:
    """Changes the precision in place, but for the rotary frequencies, which stay in float32 as when it is loaded so."""
    rotary = copy.deepcopy(model.model.rotary_emb)
    model.to(dtype)
    model.model.rotary_emb = rotary


def random_llama(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """The same random weights every time; a text never ends."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, dtype=dtype).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def large_pair(scale: Scale, device: torch.device) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """
    A target whose next token is a fixed permutation of the last one, far ahead of all others, and a draft that runs its
    first layers only. The target's other layers have output projections of zero: they cost time and change nothing.
    The draft's head mixes up a fifth of the vocabulary, so that four of five drafted tokens are accepted.
    """
    config = LlamaConfig(
        vocab_size=scale.vocab_size,
        hidden_size=scale.hidden_size,
        intermediate_size=scale.hidden_size * 8 // 3 // 64 * 64,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.hidden_size // 64,
        num_key_value_heads=max(1, scale.hidden_size // 64 // 4),
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    target = random_llama(config, device, scale.dtype)
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        embeddings = target.model.embed_tokens.weight.normal_(generator=generator)
        successor = torch.randperm(scale.vocab_size, generator=generator, device=device)
        target.lm_head.weight[successor] = embeddings * (HEAD_SCALE / scale.hidden_size)
        for layer in list(target.model.layers)[scale.draft_layers :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    draft = first_layers(target, scale.draft_layers)
    mixed = torch.randperm(scale.vocab_size, generator=generator, device=device)[: scale.vocab_size // 5]
    head = target.lm_head.weight.detach().clone()
    head[mixed] = head[mixed.roll(1)]
    draft.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    return target, draft


def first_layers(model: LlamaForCausalLM, count: int) -> LlamaForCausalLM:
    """A model of its own out of the first layers of `model`, whose weights it shares."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    layers = {f"model.layers.{number}." for number in range(count)}
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("model.layers.") or any(name.startswith(layer) for layer in layers)
    }
    with torch.device("meta"):
        part = LlamaForCausalLM._from_config(config, dtype=model.dtype)
    part.load_state_dict(state, assign=True)
    part.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # computed, so in no state dict
    part.generation_config = copy.deepcopy(model.generation_config)
    return part.eval()
