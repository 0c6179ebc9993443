"""Loads the target, its tokenizer and the assistant that a run names."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from .config import RunConfig
from .embedded_model import embedded_model_path, layer_skipping_draft
from .random_model import byte_tokenizer, noisy_copy, random_model

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase, PreTrainedModel | None]


def load_models(config: RunConfig) -> Loaded:
    """
    Returns:
        `tuple`: Target, tokenizer and assistant (or None), in evaluation mode. The target decodes by its argmax or
        samples at the run's temperature and nothing else: penalties and filters that came with it are put aside, as not
        every method knows them.

    Raises:
        ValueError: an assistant that cannot be made from this target.
    """
    disable_progress_bar()
    if config.model == "tiny-random":
        tokenizer = byte_tokenizer()
        dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
        model: PreTrainedModel = random_model(tokenizer).to(device=config.device_map or "cpu", dtype=dtype)
    else:
        name = str(embedded_model_path()) if config.model == "embedded" else config.model
        model = _load(name, config, config.quantization)
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.generation_config = _generation_config(model, tokenizer, config)
    return model, tokenizer, _assistant(model, config)


def _load(name: str, config: RunConfig, quantization: str | None) -> PreTrainedModel:
    options: dict[str, Any] = {"dtype": config.dtype, "device_map": config.device_map}
    if quantization == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    elif quantization == "int8":
        # with its usual threshold a row's result depends on the others in the forward: nothing would be comparable
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return AutoModelForCausalLM.from_pretrained(name, **options).eval()


def _generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: RunConfig):
    eos = model.generation_config.eos_token_id
    sampling = {"temperature": config.temperature, "top_k": 0, "top_p": 1.0} if config.sample else {}
    return GenerationConfig(
        eos_token_id=tokenizer.eos_token_id if eos is None else eos, pad_token_id=tokenizer.pad_token_id, **sampling
    )


def _assistant(model: PreTrainedModel, config: RunConfig) -> PreTrainedModel | None:
    if config.assistant is None:
        return None
    if config.assistant not in ("layer-skip", "noisy-copy"):
        return _load(config.assistant, config, None)
    if config.quantization is not None:
        raise ValueError(f"The assistant {config.assistant} cannot be made from a quantized model; name one instead.")
    if config.assistant == "noisy-copy":
        return noisy_copy(model)
    if model.config.model_type != "llama" or model.config.num_hidden_layers < 17:
        raise ValueError("The assistant layer-skip needs a Llama of at least 17 layers, as the embedded model is.")
    return layer_skipping_draft(model)


def device_of(model: PreTrainedModel) -> torch.device:
    """Where prompts belong."""
    return model.get_input_embeddings().weight.device
