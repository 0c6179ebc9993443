"""The states as plain Python, as a `datasets.Dataset` and as a `pandas.DataFrame`."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from .states import SpecRound, SpecSequence, SpecStates

if TYPE_CHECKING:
    import datasets
    import pandas

# fields of a round: name -> how many lists deep it is, and the type of the values in them
ROUND_FIELDS = {
    "index": (0, "int32"),
    "start": (0, "int32"),
    "token_ids": (1, "int32"),
    "parents": (1, "int32"),
    "sources": (1, "string"),
    "draft_logprobs": (1, "float32"),
    "accepted": (1, "int32"),
    "added_token_id": (0, "int32"),
    "committed_token_ids": (1, "int32"),
    "num_planned": (0, "int32"),
    "decision": (0, "string"),
    "expected_tokens": (0, "float32"),
    "expected_seconds": (0, "float64"),
    "considered_nodes": (0, "int32"),
    "considered_tokens": (0, "float32"),
    "considered_cost": (0, "float32"),
    "stop_reason": (0, "string"),
    "target_token_ids": (1, "int32"),
    "target_logprobs": (1, "float32"),
    "top_token_ids": (2, "int32"),
    "top_logprobs": (2, "float32"),
    "logits": (2, "float32"),
    "hidden_states": (2, "float32"),
    "num_rows": (0, "int32"),
    "width": (0, "int32"),
    "draft_seconds": (0, "float64"),
    "verify_seconds": (0, "float64"),
    "other_seconds": (0, "float64"),
}


def to_dict(states: SpecStates) -> dict[str, Any]:
    """See [`SpecStates.to_dict`]."""
    return {
        "num_left_out": states.num_left_out,
        "sequences": [_finite(_sequence_values(sequence)) for sequence in states],
    }


def to_dataset(states: SpecStates, by: str) -> "datasets.Dataset":
    """See [`SpecStates.to_dataset`]."""
    try:
        from datasets import Dataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("`to_dataset()` needs the datasets package: `pip install datasets`.") from error

    if by not in ("round", "sequence"):
        raise ValueError(f"`by` must be 'round' or 'sequence', got {by!r}.")
    rows = list(_rounds_with_context(states) if by == "round" else _sequences(states))
    features = _features(by)
    # column by column: of no rows at all `from_list` makes no columns
    return Dataset.from_dict({name: [row[name] for row in rows] for name in features}, features=features)


def to_pandas(states: SpecStates) -> "pandas.DataFrame":
    """See [`SpecStates.to_pandas`]."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("`to_pandas()` needs the pandas package: `pip install pandas`.") from error

    rows = [{"row": row} | _round_values(spec_round) for row, sequence in enumerate(states) for spec_round in sequence]
    return pandas.DataFrame(rows, columns=["row", *ROUND_FIELDS])


def _round_values(spec_round: SpecRound) -> dict[str, Any]:
    values = {name: getattr(spec_round, name) for name in ROUND_FIELDS}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return values | {name: tensor.tolist() for name, tensor in tensors.items()}


def _rounds_with_context(states: SpecStates) -> Iterator[dict[str, Any]]:
    for row, sequence in enumerate(states):
        context = list(sequence.prompt_token_ids)
        for spec_round in sequence:
            yield {"row": row, "context_token_ids": list(context), **_round_values(spec_round)}
            context += spec_round.committed_token_ids


def _sequences(states: SpecStates) -> Iterator[dict[str, Any]]:
    for row, sequence in enumerate(states):
        yield {"row": row} | _sequence_values(sequence)


def _sequence_values(sequence: SpecSequence) -> dict[str, Any]:
    return {
        "prompt_token_ids": sequence.prompt_token_ids,
        "token_ids": sequence.token_ids,
        "token_sources": sequence.token_sources,
        "stop_reason": sequence.stop_reason,
        "rounds": [_round_values(spec_round) for spec_round in sequence],
    }


def _features(by: str) -> "datasets.Features":
    """Types that do not depend on what happens to be in the states, so that data sets can be put together."""
    from datasets import Features, List, Value

    def feature(depth: int, dtype: str):
        return List(feature(depth - 1, dtype)) if depth else Value(dtype)

    of_round = {name: feature(*kind) for name, kind in ROUND_FIELDS.items()}
    tokens, row = feature(1, "int32"), Value("int32")
    if by == "round":
        return Features({"row": row, "context_token_ids": tokens, **of_round})
    return Features(
        {
            "row": row,
            "prompt_token_ids": tokens,
            "token_ids": tokens,
            "token_sources": feature(1, "string"),
            "stop_reason": Value("string"),
            "rounds": List(of_round),
        }
    )


def _finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
