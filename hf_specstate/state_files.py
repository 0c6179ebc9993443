"""States as bytes: columns as tensors, and the rest as JSON, in a [checked file](checked_file.py)."""

import math
import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from .checked_file import pack, unpack, write
from .host import from_host
from .states import SpecRound, SpecSequence, SpecStates

FORMAT = "hf_specstate.spec_states"
VERSION = 2
# one number a round
INTEGERS = ("index", "start", "added_token_id", "num_planned", "considered_nodes", "num_rows", "width")
OPTIONAL_FLOATS = ("expected_tokens", "expected_seconds", "considered_tokens", "considered_cost")
FLOATS = (*OPTIONAL_FLOATS, "draft_seconds", "verify_seconds", "other_seconds")
# several numbers a round
INTEGER_LISTS = ("token_ids", "parents", "accepted", "target_token_ids")
FLOAT_LISTS = ("draft_logprobs", "target_logprobs")
# a tensor a round, or none
TENSORS = ("top_token_ids", "top_logprobs", "logits", "hidden_states")
NONE = -1  # stands for None among integers that are never negative


def save(states: SpecStates, path: str | os.PathLike) -> None:
    """See [`SpecStates.save`]."""
    write(path, to_bytes(states))


def load(path: str | os.PathLike) -> SpecStates:
    """See [`SpecStates.load`]."""
    return from_bytes(Path(path).read_bytes(), str(path))


def to_bytes(states: SpecStates) -> bytes:
    """What [`from_bytes`] reads."""
    rounds = list(chain.from_iterable(states))
    sources = sorted({source for spec_round in rounds for source in spec_round.sources})
    place = {source: index for index, source in enumerate(sources)}
    reasons = sorted({spec_round.stop_reason for spec_round in rounds if spec_round.stop_reason is not None})
    decisions = sorted({spec_round.decision for spec_round in rounds if spec_round.decision is not None})
    tensors = {
        "rounds": _integers(len(sequence) for sequence in states),
        "stop_reason": _integers(NONE if r.stop_reason is None else reasons.index(r.stop_reason) for r in rounds),
        "decision": _integers(NONE if r.decision is None else decisions.index(r.decision) for r in rounds),
    }
    tensors |= _ragged("prompt_token_ids", [sequence.prompt_token_ids for sequence in states], torch.long)
    tensors |= _ragged("sources", [[place[source] for source in r.sources] for r in rounds], torch.long)
    for name in INTEGERS:
        values = (getattr(spec_round, name) for spec_round in rounds)
        tensors[name] = _integers(NONE if value is None else value for value in values)
    for name in FLOATS:
        values = (getattr(spec_round, name) for spec_round in rounds)
        numbers = [math.nan if value is None else value for value in values]
        tensors[name] = from_host(numbers, dtype=torch.float64)
    for names, dtype in ((INTEGER_LISTS, torch.long), (FLOAT_LISTS, torch.float64)):
        for name in names:
            tensors |= _ragged(name, [getattr(spec_round, name) for spec_round in rounds], dtype)
    for name in TENSORS:
        tensors |= _grouped(name, [getattr(spec_round, name) for spec_round in rounds])
    header = {
        "sources": sources,
        "stop_reasons": reasons,
        "decisions": decisions,
        "num_left_out": states.num_left_out,
        "token_texts": None if states.token_texts is None else list(states.token_texts.items()),
        "text_pieces": [sequence.text_pieces for sequence in states],
    }
    return pack(FORMAT, VERSION, header, tensors)


def from_bytes(data: bytes, name: str = "these bytes") -> SpecStates:
    """
    Args:
        data (`bytes`): Made by [`to_bytes`].
        name (`str`): What to call it in errors.

    Raises:
        ValueError: it is damaged, cut short, of a newer version, or none of ours.
    """
    header, tensors = unpack(data, FORMAT, VERSION, "speculative states", name)
    if "decisions" not in header:
        raise ValueError(f"{name} was written by an older version of this package (format 1).")
    try:
        return _build(header, tensors)
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name} is damaged: {error}.") from error


def _build(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> SpecStates:
    columns: dict[str, list] = {name: tensors[name].tolist() for name in (*INTEGERS, *FLOATS)}
    for name in ("added_token_id", "considered_nodes"):
        columns[name] = [None if value == NONE else value for value in columns[name]]
    for name in OPTIONAL_FLOATS:
        columns[name] = [None if math.isnan(value) else value for value in columns[name]]
    for name, known in (("stop_reason", header["stop_reasons"]), ("decision", header["decisions"])):
        columns[name] = [None if place == NONE else known[place] for place in tensors[name].tolist()]
    sources = header["sources"]
    columns["sources"] = [[sources[place] for place in places] for places in _lists("sources", tensors)]
    for name in (*INTEGER_LISTS, *FLOAT_LISTS):
        columns[name] = _lists(name, tensors)
    for name in TENSORS:
        columns[name] = _ungrouped(name, tensors)
    names = list(columns)
    rounds = [SpecRound(**dict(zip(names, values, strict=True))) for values in zip(*columns.values(), strict=True)]
    sequences, start = [], 0
    prompts, pieces = _lists("prompt_token_ids", tensors), header["text_pieces"]
    for prompt, count, texts in zip(prompts, tensors["rounds"].tolist(), pieces, strict=True):
        sequences.append(SpecSequence(prompt, rounds[start : start + count], texts))
        start += count
    texts = header["token_texts"]
    return SpecStates(sequences, header["num_left_out"], None if texts is None else dict(map(tuple, texts)))


def _integers(values: Iterable[int]) -> torch.Tensor:
    return from_host(list(values), dtype=torch.long)


def _ragged(name: str, lists: list[list], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Lists of different lengths, one behind the other."""
    return {
        name: from_host(list(chain.from_iterable(lists)), dtype=dtype),
        f"{name}.lengths": _integers(map(len, lists)),
    }


def _lists(name: str, tensors: dict[str, torch.Tensor]) -> list[list]:
    values, lists, start = tensors[name].tolist(), [], 0
    for length in tensors[f"{name}.lengths"].tolist():
        lists.append(values[start : start + length])
        start += length
    return lists


def _grouped(name: str, values: list[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Tensors of different lengths, one behind the other; those of another width or dtype in a group of their own."""
    groups: dict[tuple, list[torch.Tensor]] = {}
    places, lengths = [], []
    for value in values:
        lengths.append(0 if value is None else value.shape[0])
        if value is not None:
            groups.setdefault((value.shape[1], value.dtype), []).append(value)
        places.append(NONE if value is None else list(groups).index((value.shape[1], value.dtype)))
    columns = {f"{name}.{place}": torch.cat(members) for place, members in enumerate(groups.values())}
    return columns | {f"{name}.group": _integers(places), f"{name}.lengths": _integers(lengths)}


def _ungrouped(name: str, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
    starts: dict[int, int] = {}
    values: list[torch.Tensor | None] = []
    for place, length in zip(tensors[f"{name}.group"].tolist(), tensors[f"{name}.lengths"].tolist(), strict=True):
        if place == NONE:
            values.append(None)
            continue
        start = starts.get(place, 0)
        values.append(tensors[f"{name}.{place}"][start : start + length])
        starts[place] = start + length
    return values
