"""Tokens as text: spaces, and characters that take several tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specstate.reporting.token_text import text_pieces
from tests.made_states import byte_level_tokenizer, metaspace_tokenizer, states_of_tokens

TOKENIZERS = {"byte_level": byte_level_tokenizer(), "metaspace": metaspace_tokenizer()}


def decoder_of(tokenizer):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def metaspace_ids(*words: str) -> list[int]:
    """Words by name, anything else in bytes."""
    vocabulary = TOKENIZERS["metaspace"].get_vocab()
    ids = []
    for word in words:
        byte_words = [f"<0x{byte:02X}>" for byte in word.encode()]
        ids += [vocabulary[name] for name in ([word] if word in vocabulary else byte_words)]
    return ids


SPOILED = metaspace_ids("letter by letter", "🙂")[:-1]  # ends within a character


def decoded(kind: str, tokens: list[int], prompt: list[int]):
    states = states_of_tokens(tokens, prompt).decode(TOKENIZERS[kind])
    return states[0].text_pieces, states.token_texts


def test_the_token_that_completes_a_character_gets_all_of_it():
    tokenizer = TOKENIZERS["byte_level"]
    prompt, tokens = tokenizer.encode("hello"), tokenizer.encode(" world 你🙂!")
    pieces, texts = decoded("byte_level", tokens, prompt)
    assert pieces == [" world", " ", "", "", "你", "", "", "", "🙂", "!"]
    assert texts[tokens[0]] == " world"
    assert texts[tokens[2]] == "\\xe4"


def test_what_is_unfinished_goes_to_the_last_token():
    tokenizer = TOKENIZERS["byte_level"]
    tokens = tokenizer.encode("!🙂")[:-1]
    assert decoded("byte_level", tokens, [])[0] == ["!", "", "", "\ufffd"]


def test_special_tokens_are_shown():
    tokenizer = TOKENIZERS["byte_level"]
    tokens = [*tokenizer.encode("hello"), tokenizer.eos_token_id]
    assert decoded("byte_level", tokens, [])[0] == ["hello", "<|end|>"]


def test_spaces_before_words():
    tokens = metaspace_ids("▁Hello", "▁world", "!", "▁", "▁", "▁Hello", "ing", "🙂", "你")
    rest = [" world", "!", " ", " ", " Hello", "ing", "", "", "", "🙂", "", "", "你"]
    after_a_prompt, texts = decoded("metaspace", tokens, metaspace_ids("<s>", "▁Hello"))
    assert after_a_prompt == [" Hello", *rest]
    assert decoded("metaspace", tokens, [])[0] == ["Hello", *rest]  # a text of its own begins without a space
    assert [texts[token] for token in tokens[:3]] == [" Hello", " world", "!"]
    assert texts[metaspace_ids("🙂")[0]] == "\\xf0"


def test_all_tokens_of_a_round_get_a_text():
    states = states_of_tokens(metaspace_ids("▁Hello"), [])
    first = states[0][0]
    first.token_ids, first.parents, first.sources = metaspace_ids("▁world"), [-1], ["assistant"]
    first.target_token_ids = metaspace_ids("▁Hello", "!")
    states.decode(TOKENIZERS["metaspace"])
    assert sorted(states.token_texts.values()) == [" Hello", " world", "!"]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_joined_pieces_are_the_text(kind, data):
    """Whatever the tokens: bytes that make no character, special tokens, runs of spaces."""
    text_of = decoder_of(TOKENIZERS[kind])
    size = len(TOKENIZERS[kind])
    # mostly bytes with the high bit set, which are the hard ones
    tokens = st.lists(st.integers(0, size - 1) | st.integers(size // 2, size - 1), max_size=40)
    prompt, new = data.draw(tokens), data.draw(tokens)
    pieces = text_pieces(new, prompt, text_of)
    assert len(pieces) == len(new)
    before, whole = text_of(prompt), text_of(prompt + new)
    assert "".join(pieces) == (whole[len(before) :] if whole.startswith(before) else text_of(new))


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("byte_level", TOKENIZERS["byte_level"].encode(" world 你🙂!") * 1_000),
        ("byte_level", TOKENIZERS["byte_level"].encode("🙂")[1:2] * 10_000),
        ("metaspace", metaspace_ids("▁world", "你") * 2_500),
        ("metaspace", metaspace_ids("🙂")[1:2] * 10_000),
        ("metaspace", metaspace_ids("x" * 10_000) + SPOILED),
    ],
)
def test_time_grows_with_the_number_of_tokens(kind, tokens):
    text_of = decoder_of(TOKENIZERS[kind])
    decoded_tokens = 0

    def counting(ids: list[int]) -> str:
        nonlocal decoded_tokens
        decoded_tokens += len(ids)
        return text_of(ids)

    assert "".join(text_pieces(tokens, [], counting)) == text_of(tokens)
    assert decoded_tokens < 60 * len(tokens)


def test_the_place_is_found_again_after_tokens_that_decode_otherwise_alone():
    """A byte that makes no character spoils the characters beside it, which a look at a few tokens cannot see."""
    tokens = SPOILED + metaspace_ids(*["▁world", "!"] * 40)
    pieces = text_pieces(tokens, metaspace_ids("▁Hello"), decoder_of(TOKENIZERS["metaspace"]))
    assert "".join(pieces) == "\ufffd" * len(SPOILED) + " world!" * 40
    assert pieces[-20:] == [" world", "!"] * 10
