"""Generating in the background, and looking at each round as it ends."""

from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from .enabling import is_enabled
from .host import from_host
from .states import SpecRound


@dataclass
class SpecEvent:
    """
    What a round gave to a row.

    Args:
        row (`int`): The row.
        text (`str`, *optional*): The text that became complete with it, maybe empty; None without a tokenizer.
        round ([`SpecRound`], *optional*): The round. None for text that was left over when an interrupted row ended.
    """

    row: int
    text: str | None
    round: SpecRound | None


def stream(
    model: PreTrainedModel,
    *args: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
    skip_special_tokens: bool = True,
    **kwargs: Any,
) -> "SpecStream":
    """
    Iterates over what `model.generate(*args, **kwargs)` does, while it does it in a thread of its own:

    ```python
    with hf_specstate.stream(model, tokenizer=tokenizer, **inputs, max_new_tokens=200) as events:
        for event in events:
            print(event.text, end="", flush=True)
    ```

    Args:
        model (`PreTrainedModel`): An enabled model.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Decodes the rows' texts. Also handed to `generate`.
        skip_special_tokens (`bool`, *optional*, defaults to `True`): In the texts.
        args, kwargs: Of `generate`. (What PyTorch keeps for each thread, such as autocast, does not apply.)

    Returns:
        [`SpecStream`]: An iterator of [`SpecEvent`]. An error of the generation is raised by it, after every round that
        came before; leaving it early ends the generation with the round that is under way.

    Raises:
        ValueError: `model` is not enabled.
    """
    if not is_enabled(model):
        raise ValueError("`stream` needs an enabled model: call `hf_specstate.enable(model)` first.")
    if tokenizer is not None:
        kwargs["tokenizer"] = tokenizer
    return SpecStream(model, args, kwargs, tokenizer, skip_special_tokens)


class SpecStream(Iterator[SpecEvent]):
    """
    The iterator that [`stream`] returns; a context manager. `output` is what `generate()` returned, once it has.
    """

    def __init__(self, model, args, kwargs, tokenizer: PreTrainedTokenizerBase | None, skip_special_tokens: bool):
        self.output: Any = None
        self._rounds = _RoundQueue()
        self._texts: dict[int, _RowText] = {}
        self._left_over: list[SpecEvent] | None = None
        self._make_text = lambda: _RowText(tokenizer, skip_special_tokens=skip_special_tokens)
        self._has_text = tokenizer is not None
        # the thread knows the queue, but not this object, which may thus be forgotten by its user
        self._thread = Thread(target=_generate, args=(model, args, kwargs, self._rounds), daemon=True)
        self._thread.start()

    def __next__(self) -> SpecEvent:
        if self._left_over is None:
            try:
                item = self._rounds.queue.get()
            except BaseException:  # Ctrl-C while waiting
                self.close()
                raise
            if item is not None:
                row, spec_round = item
                return SpecEvent(row, self._text_of(row, spec_round), spec_round)
            self._rounds.queue.put(None)  # another thread may be waiting, too
            self._thread.join()
            self.output = self._rounds.output
            rests = {row: text.take(is_last=True) for row, text in self._texts.items()}
            self._left_over = [SpecEvent(row, rest, None) for row, rest in rests.items() if rest]
        if self._left_over:
            return self._left_over.pop(0)
        error, self._rounds.error = self._rounds.error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Ends the generation with the round that is under way, and waits for that. The model is free again then."""
        self._rounds.is_closed.set()
        self._thread.join()
        self.output = self._rounds.output
        self._left_over = self._left_over or []
        self._rounds.error = None

    def __enter__(self) -> "SpecStream":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self):
        self._rounds.is_closed.set()

    def _text_of(self, row: int, spec_round: SpecRound) -> str | None:
        if not self._has_text:
            return None
        text = self._texts.setdefault(row, self._make_text())
        text.put(from_host(spec_round.committed_token_ids))
        return text.take(is_last=spec_round.stop_reason is not None)


class _RoundQueue:
    """The spec streamer between the thread that generates and the one that reads."""

    def __init__(self):
        self.queue: SimpleQueue[tuple[int, SpecRound] | None] = SimpleQueue()
        self.is_closed = Event()
        self.output: Any = None
        self.error: BaseException | None = None

    def put_round(self, row: int, spec_round: SpecRound) -> None:
        if self.is_closed.is_set():
            raise _Closed
        self.queue.put((row, spec_round))

    def end(self) -> None:
        """What `generate()` returns is still to come."""


class _Closed(Exception):
    """The reader has gone."""


class _RowText(TextStreamer):
    """Transformers' rules for when a text is complete enough to be shown; keeps what they give."""

    def __init__(self, tokenizer, **decode_kwargs):
        super().__init__(tokenizer, **decode_kwargs)
        self._ready = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._ready += text

    def take(self, is_last: bool) -> str:
        if is_last:
            self.end()
        ready, self._ready = self._ready, ""
        return ready


def _generate(model, args, kwargs, rounds: _RoundQueue) -> None:
    try:
        rounds.output = model.generate(*args, **kwargs, spec_streamer=rounds)
    except _Closed:
        pass
    except BaseException as error:
        rounds.error = error
    finally:
        rounds.queue.put(None)
