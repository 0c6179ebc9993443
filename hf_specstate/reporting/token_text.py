"""Token ids as text: each by itself, and each as what it adds to the text before it."""

import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..states import SpecStates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TextOf = Callable[[list[int]], str]

PROMPT_TOKENS = 16  # of the prompt's end: what it takes to know whether a text begins with a space
CONTEXT = 5  # ends of pieces that a token is decoded after
LONGEST_CHARACTER = 4  # bytes of a character in UTF-8, so tokens at most
PATIENCE = 8  # tokens without a piece before the whole text is decoded to find the place again
INCOMPLETE = "\ufffd"

_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def decode(states: SpecStates, tokenizer: "PreTrainedTokenizerBase") -> None:
    """
    Fills in `states.token_texts` for every token that occurs in a round, and the `text_pieces` of every sequence.

    Args:
        states ([`SpecStates`]): Changed in place.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
    """

    def text_of(token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        return tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    states.token_texts = token_texts(_tokens_of(states), tokenizer, text_of)
    for sequence in states:
        prompt = sequence.prompt_token_ids[-PROMPT_TOKENS:]
        sequence.text_pieces = text_pieces(sequence.token_ids, prompt, text_of)


def text_pieces(token_ids: list[int], prompt: list[int], text_of: TextOf) -> list[str]:
    """
    What each token adds to the text, in time that grows with their number. A token that leaves a character unfinished
    adds nothing, the one that completes it adds all of it; what is unfinished at the end goes to the last token.

    Args:
        token_ids (`list[int]`): The text.
        prompt (`list[int]`): What comes before it.
        text_of (`Callable`): Decodes tokens.

    Returns:
        `list[str]` of length `len(token_ids)`: Joined, they are the text as it goes on after the prompt. If the prompt
        ends within a character, they are what `text_of(token_ids)` gives.
    """
    before, whole = text_of(prompt), text_of(prompt + token_ids)
    if not whole.startswith(before):
        prompt, before, whole = [], "", text_of(token_ids)
    ids = prompt + token_ids
    pieces: list[str] = []
    given = len(before)  # characters of `whole` that the prompt and the pieces hold
    # A token is decoded together with a few pieces before it, and `whole` tells whether that gave the right text.
    ends = deque([0, len(prompt)], maxlen=CONTEXT)
    patience = PATIENCE
    for end in range(len(prompt) + 1, len(ids) + 1):
        piece = None
        pending = end - ends[-1]
        if pending < PATIENCE:
            known = text_of(ids[ends[0] : ends[-1]])
            piece = text_of(ids[ends[0] : end])[len(known) :]
            if not piece or (piece.endswith(INCOMPLETE) and pending < LONGEST_CHARACTER):
                piece = None
        elif pending == patience:
            piece = text_of(ids[:end])[given:]
            patience *= 2  # this is slow, and must not be done for every token
        if piece is not None and whole.startswith(piece, given):
            pieces.append(piece)
            given += len(piece)
            ends.append(end)
            patience = PATIENCE
        else:
            pieces.append("")
    if pieces:
        pieces[-1] += whole[given:]
    return pieces


def token_texts(tokens: Iterable[int], tokenizer: "PreTrainedTokenizerBase", text_of: TextOf) -> dict[int, str]:
    """Token -> its text in the middle of a text, with the space before it; bytes of half a character as `\\xf0`."""
    # Alone, a token may lose its space.
    anchor = tokenizer.encode("a", add_special_tokens=False)
    before = text_of(anchor)
    texts = {}
    for token in tokens:
        text = text_of([*anchor, token])
        text = text[len(before) :] if text.startswith(before) else text_of([token])
        texts[token] = _spelled(tokenizer.convert_ids_to_tokens(token), text) if INCOMPLETE in text else text
    return texts


def _spelled(token: str, text: str) -> str:
    """The bytes of a token of a byte-level vocabulary or of a byte fallback; of another, its text as it is."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return f"\\x{match[1].lower()}"
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token).decode("utf-8", errors="backslashreplace")
    return text


def _tokens_of(states: SpecStates) -> list[int]:
    tokens: set[int] = set()
    for sequence in states:
        for spec_round in sequence:
            tokens.update(spec_round.token_ids, spec_round.committed_token_ids, spec_round.target_token_ids)
            if spec_round.top_token_ids is not None:
                tokens.update(spec_round.top_token_ids.flatten().tolist())
    return sorted(tokens)
