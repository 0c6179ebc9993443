"""What forwards cost on this device, and how fast the methods are, in the lines that `eval.report` reads."""

import copy
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specstate.compat import CACHE_NAME

from .equality import first_difference
from .measure import Meter
from .methods import METHODS, Method

CONTEXT = 300  # tokens in the cache, as in `eval.cost_curve`
REPEATS = 5
CATEGORY = "gpu_check"


def cost_lines(model: PreTrainedModel, rows: Sequence[int], tokens: Sequence[int]) -> list[dict[str, Any]]:
    """A `cost_curve` line for every size: the median of a few forwards with logits for every token."""
    lines = []
    for batch_size in rows:
        ids = torch.randint(4, model.config.vocab_size, (batch_size, CONTEXT + max(tokens)), device=model.device)
        with torch.no_grad():
            cache = model(input_ids=ids[:, :CONTEXT], use_cache=True, logits_to_keep=1)[CACHE_NAME]
            for size in tokens:
                forward = {"input_ids": ids[:, CONTEXT : CONTEXT + size], "use_cache": True, CACHE_NAME: cache}
                seconds = []
                for _ in range(REPEATS + 1):  # the first one warms up
                    start = _now(model.device)
                    model(**forward)
                    seconds.append(_now(model.device) - start)
                    cache.crop(-size)
                point = {"rows": batch_size, "tokens": size, "context": CONTEXT}
                lines.append({"type": "cost_curve", **point, "seconds": round(statistics.median(seconds[1:]), 6)})
    return lines


def describe_costs(lines: Sequence[dict[str, Any]]) -> str:
    """The curve in one line, relative to its first point."""
    unit = lines[0]["seconds"]
    said = [f"{1e3 * unit:.2f} ms for 1 token in 1 row"]
    for rows in sorted({line["rows"] for line in lines}):
        points = [f"{line['tokens']}: {line['seconds'] / unit:.2f}" for line in lines if line["rows"] == rows]
        said.append(f"rows {rows}, tokens {' '.join(points)}")
    return "; ".join(said)


def speed_lines(
    names: Sequence[str],
    model: PreTrainedModel,
    assistant: PreTrainedModel | None,
    inputs: Sequence[dict[str, torch.Tensor]],
    new_tokens: int,
) -> list[dict[str, Any]]:
    """
    `measurement` lines of several methods, side by side on every batch of prompts and in turning order.

    Args:
        names (`list[str]`): Of methods in `eval.methods`; plain decoding first.
        model (`PreTrainedModel`), assistant (`PreTrainedModel`, *optional*): With what.
        inputs (`list[dict]`): Batches of prompts.
        new_tokens (`int`): How many to generate.
    """
    methods = [copy.copy(METHODS[name]) for name in names]
    for method in methods:
        method.prepare(model, None, assistant)  # type: ignore[arg-type]  # none of these asks for a tokenizer
        method.generate(inputs[0], 4, do_sample=False, seed=0)  # warms up
    lines = []
    for number, batch in enumerate(inputs):
        texts: dict[str, torch.Tensor] = {}
        measured = []
        first = number % len(methods)
        for position, method in enumerate(methods[first:] + methods[:first]):
            meter = Meter(model.device, batch["input_ids"].shape[1])
            with torch.no_grad(), meter.watching(method.calls()):
                texts[method.name] = method.generate(batch, new_tokens, do_sample=False, seed=0).sequences
            measured += _lines(method, meter, number, position, batch, texts[method.name])
        for line in measured:
            row = line.pop("row")
            line["turns"][0] |= _verdict(model, batch, row, texts["plain"], texts[line["method"]], line["method"])
        lines += measured
    return lines


def describe_speeds(lines: Sequence[dict[str, Any]]) -> str:
    """Speed-up and tokens per forward of every method in one line."""
    said = []
    plain = _rate(lines, "plain")
    for name in dict.fromkeys(line["method"] for line in lines):
        rate = _rate(lines, name)
        own = [line["turns"][0]["tokens_per_forward"] or 0.0 for line in lines if line["method"] == name]
        speed = f"{rate:.1f} tokens/s" if name == "plain" else f"{rate / plain:.2f}x"
        said.append(f"{name} {speed} ({statistics.mean(own):.2f} a forward)")
    return ", ".join(said)


def faults(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Differences from plain decoding that rounding does not explain."""
    return [
        f"{line['method']}: {turn['difference']}"
        for line in lines
        for turn in line["turns"]
        if turn["equality"] == "fault"
    ]


def _rate(lines: Sequence[dict[str, Any]], name: str) -> float:
    turns = [turn for line in lines if line["method"] == name for turn in line["turns"]]
    return sum(turn["new_tokens"] for turn in turns) / sum(turn["seconds"]["total"] for turn in turns)


def _lines(
    method: Method, meter: Meter, number: int, position: int, batch: dict[str, torch.Tensor], sequences: torch.Tensor
) -> list[dict[str, Any]]:
    """A line for every row, with its share of the batch's seconds; texts do not end early here."""
    cost = meter.cost()
    batch_size, prompt_length = batch["input_ids"].shape
    new = sequences.shape[1] - prompt_length
    turn = {
        "prompt_tokens": prompt_length,
        "new_tokens": new,
        "seconds": {part: round(seconds / batch_size, 6) for part, seconds in cost.seconds.items()},
        "target_forwards": cost.target_forwards,
        "assistant_forwards": cost.assistant_forwards,
        "verified_nodes": cost.verified_nodes,
        "tokens_per_forward": cost.tokens_per_forward(new),
    }
    return [
        {
            "type": "measurement", "question_id": f"{number}-{row}", "category": CATEGORY, "method": method.name,
            "repeat": 0, "position_in_order": position, "batch_size": batch_size, "turns": [dict(turn)], "row": row,
            "peak_memory_bytes": cost.peak_memory_bytes, "error": None,
        }
        for row in range(batch_size)
    ]  # fmt: skip


def _verdict(
    model: PreTrainedModel,
    batch: dict[str, torch.Tensor],
    row: int,
    plain: torch.Tensor,
    sequences: torch.Tensor,
    name: str,
) -> dict[str, Any]:
    """Whether a row is plain decoding's; its scores are computed again only if not."""
    if name == "plain":
        return {"equality": "reference", "difference": None}
    start = batch["input_ids"].shape[1]
    expected, got = plain[row, start:].tolist(), sequences[row, start:].tolist()
    if expected == got:
        return {"equality": "equal", "difference": None}
    options = {"max_new_tokens": len(expected), "return_dict_in_generate": True, "output_scores": True}
    scores = model.generate(**batch, **options, do_sample=False).scores
    difference = first_difference(expected, got, [step[row] for step in scores], model.dtype)
    assert difference is not None
    return {"equality": "near_tie" if difference.is_near_tie else "fault", "difference": str(difference)}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
