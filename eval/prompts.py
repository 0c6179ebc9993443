"""From a conversation to the model inputs of its next turn."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase


def encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> list[int]:
    """
    The prompt for the assistant's next message: through the chat template where the tokenizer has one, else the texts
    one after the other.

    Args:
        messages (`list[dict]`): With `role` and `content`, the user's question last.
    """
    if tokenizer.chat_template is None:
        return tokenizer("\n\n".join(message["content"] for message in messages) + "\n\n")["input_ids"]
    return tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)["input_ids"]


def left_padded(prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device) -> dict[str, torch.Tensor]:
    """
    Returns:
        `dict`: `input_ids` and `attention_mask` of shape `(batch_size, longest_prompt)`.
    """
    width = max(len(prompt) for prompt in prompts)
    padding = [width - len(prompt) for prompt in prompts]
    ids = [[pad_token_id] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in padding]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def new_tokens(sequences: torch.Tensor, prompt_width: int, eos_token_ids: set[int]) -> list[list[int]]:
    """What was generated for each row: everything behind the prompt, up to the first EOS token and with it."""
    rows = []
    for row in sequences[:, prompt_width:].tolist():
        end = next((place for place, token in enumerate(row) if token in eos_token_ids), len(row) - 1)
        rows.append(row[: end + 1])
    return rows
