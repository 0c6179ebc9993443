"""States made by hand and small tokenizers, for the tests of what is shown of them."""

import math

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_specstate import SpecRound, SpecSequence, SpecStates

# Texts that a terminal or a page could take for something else are among them.
TEXTS = {
    0: "The", 1: " sky", 2: " is", 3: " blue", 4: ".\n", 5: " [red]", 6: "</script><em>&lt;", 7: " [b]$title",
    8: " green", 9: "<|end|>",
}  # fmt: skip


def made_round(index, start, tokens=(), parents=None, sources="prompt_lookup", accepted=(), added=None, **more):
    """A round whose other fields fit: a chain of one drafter, a target that is undecided."""
    nodes = len(tokens)
    fields = {
        "draft_logprobs": [math.nan] * nodes,
        "target_logprobs": [math.log(0.5)] * nodes,
        "target_token_ids": [0] * (1 + nodes),
    }
    return SpecRound(
        index=index,
        start=start,
        token_ids=list(tokens),
        parents=list(range(-1, nodes - 1)) if parents is None else parents,
        sources=[sources] * nodes if isinstance(sources, str) else sources,
        accepted=list(accepted),
        added_token_id=added,
        **(fields | more),
    )


def made_states() -> SpecStates:
    """One row, with a chain, a tree of two drafters, and a round without a draft."""
    seconds = {"draft_seconds": 0.001, "verify_seconds": 0.02, "other_seconds": 0.0005}
    rounds = [
        made_round(0, 0, added=0, target_token_ids=[0], verify_seconds=1.5),
        made_round(
            1, 1, [1, 2, 8], sources="assistant", accepted=[0, 1], added=3, num_planned=5, width=4, num_rows=1,
            draft_logprobs=[math.log(0.9), math.log(0.8), math.log(0.25)], target_token_ids=[1, 2, 3, 4],
            target_logprobs=[math.log(0.95), -0.0, math.log(0.0004)],
            top_token_ids=torch.tensor([[1, 8], [2, 8], [3, 8], [4, 8]]),
            top_logprobs=torch.tensor([[0.7, 0.2], [0.8, 0.1], [0.61, 0.3], [0.5, 0.5]]).log(), **seconds,
        ),
        made_round(
            2, 4, [4, 8, 5, 6], parents=[-1, -1, 0, 1], accepted=[0, 2], added=6,
            sources=["prompt_lookup", "assistant", "prompt_lookup", "assistant"], target_token_ids=[4, 5, 1, 6, 9],
            **seconds,
        ),
        made_round(3, 7, added=7, **seconds),
        made_round(4, 8, [9], accepted=[0], stop_reason="eos", **seconds),
    ]  # fmt: skip
    sequence = SpecSequence([0], rounds, text_pieces=[TEXTS[token] for token in (0, 1, 2, 3, 4, 5, 6, 7, 9)])
    return SpecStates([sequence], token_texts=dict(TEXTS))


def shared_states() -> SpecStates:
    """One row whose tokens have one source, or two."""
    sources = ["history", "history+recycling", "recycling+history"]
    rounds = [made_round(0, 0, added=0), made_round(1, 1, [1, 2, 3], sources=sources, accepted=[0, 1, 2])]
    return SpecStates([SpecSequence([0], rounds, ["The", " sky", " is", " blue"])], token_texts=dict(TEXTS))


def long_states(num_tokens: int) -> SpecStates:
    """One row in which two of five drafted tokens are accepted each time."""
    rounds = [made_round(0, 0, added=0)]
    while rounds[-1].start + 3 < num_tokens:
        start = 1 + 3 * (len(rounds) - 1)
        rounds.append(made_round(len(rounds), start, [1, 2, 3, 4, 5], accepted=[0, 1], added=3))
    tokens = [token for made in rounds for token in made.committed_token_ids]
    return SpecStates([SpecSequence([0], rounds, [TEXTS[token] for token in tokens])], token_texts=dict(TEXTS))


def states_of_tokens(tokens: list[int], prompt: list[int]) -> SpecStates:
    """One row that wrote these tokens one by one."""
    rounds = [made_round(index, index, added=token, target_token_ids=[token]) for index, token in enumerate(tokens)]
    return SpecStates([SpecSequence(prompt, rounds)])


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Its tokens are bytes and a few English words, so that a character of another script takes several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["hello world, hello again"] * 4, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.add_special_tokens({"eos_token": "<|end|>"})
    return wrapped


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """As in SentencePiece: words with the space before them, and bytes for what it has no word for."""
    words = ["<unk>", "<s>", "▁Hello", "▁world", "▁", "!", "ing", *[f"<0x{byte:02X}>" for byte in range(256)]]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
