"""
What only a GPU can show, in a few minutes and without a network. Run it through `eval/gpu_check.sh`; on a machine
without a GPU it runs small on the CPU, so that it is known to work before it is needed.

    python -m eval.gpu_check [--out FOLDER] [--seconds 230] [--device cuda|cpu]

FOLDER gets `checks.jsonl` with one line for every check, and `embedded.jsonl` and `large.jsonl` with measurements and
cost curves for `eval.report` and `eval.simulate`. The exit status is 1 if a check found a fault or failed.
"""

import argparse
import platform
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, PreTrainedModel

from .bounded_checks import BoundedChecks, FaultError
from .embedded_model import layer_skipping_draft
from .gpu_equality import CASES, STATIC_CASES, compare
from .gpu_models import EMBEDDED_SHAPE, Scale, cast, embedded_or_random, first_layers, large_pair, random_llama
from .gpu_speed import cost_lines, describe_costs, describe_speeds, faults, speed_lines
from .prompts import encode, left_padded

QUESTIONS = (
    "Write the numbers from one to twelve as words, then write them again in the same order.",
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "Why is the sky blue?",
    "Name five rivers and say for each in which country it ends.",
)
LOOKUP_METHODS = ("plain", "stock_prompt_lookup", "specstate_prompt_lookup_chain", "specstate_prompt_lookup_tree")
ASSISTANT_METHODS = ("plain", "stock_assisted_constant", "specstate_assistant_chain", "specstate_assistant_tree")
BATCH_METHODS = ("plain", "specstate_assistant_chain", "specstate_assistant_tree")
FILES = ("checks.jsonl", "embedded.jsonl", "large.jsonl")
LARGE_PROMPT = 64  # tokens

Inputs = dict[str, torch.Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--seconds", type=float, default=230)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    torch.backends.cuda.matmul.allow_tf32 = False  # its ten bits of mantissa would make every comparison a near tie
    torch.backends.cudnn.allow_tf32 = False
    for file in FILES:
        (options.out / file).unlink(missing_ok=True)
    checks = BoundedChecks(options.out, options.seconds)
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # this is no measurement, and whoever shares the machine goes on
    environment = describe_environment(device)
    checks.run("environment", 10, lambda: ", ".join(f"{name} {value}" for name, value in environment.items()))
    scale = Scale.of(device)
    header = {"type": "header", "command": "eval/gpu_check.sh", "config": {"new_tokens": scale.timed_tokens}}
    for file in FILES[1:]:
        checks.write(file, header | {"environment": environment})
    check_embedded_model(checks, scale, device)
    check_large_model(checks, scale, device)
    check_static_cache(checks, scale, device)
    return 1 if checks.has_failed else 0


def check_embedded_model(checks: BoundedChecks, scale: Scale, device: torch.device) -> None:
    """Equality in both precisions, the cost curve, and the methods without an assistant that pays."""
    loaded: list = []
    checks.run("load the embedded model", 60, lambda: _load(loaded, device))
    if not loaded:
        return
    model, tokenizer = loaded
    prompts = [encode(tokenizer, [{"role": "user", "content": text}]) for text in QUESTIONS] if tokenizer else None
    prompts = prompts or random_prompts(model.config.vocab_size)
    check_equality(checks, model, prompts, scale)
    cast(model, scale.dtype)
    check_speed(checks, "embedded", scale, model, None, {LOOKUP_METHODS: singly(prompts[: scale.prompts], device)})
    cast(model, torch.bfloat16)
    check_equality(checks, model, prompts, scale)


def check_equality(checks: BoundedChecks, model: PreTrainedModel, prompts: Sequence[list[int]], scale: Scale) -> None:
    """All cases in the model's precision, with a draft of all its layers but one."""
    draft = layer_skipping_draft(model)
    precision = str(model.dtype).removeprefix("torch.")
    for case in CASES:
        if case.sampled and model.dtype != torch.float32:
            continue
        one_by_one = singly(prompts[: scale.prompts], model.device)
        inputs = [left_padded(prompts, 0, model.device)] if case.batched else one_by_one
        check = partial(compare, case, model, draft, inputs, scale.new_tokens)
        checks.run(f"{case.name}, {precision}", 30, check)


def check_large_model(checks: BoundedChecks, scale: Scale, device: torch.device) -> None:
    """The cost curve, and the methods with an assistant that agrees by construction, alone and in a batch."""
    made: list = []

    def make() -> str:
        made.extend(large_pair(scale, device))
        sizes = [sum(parameter.numel() for parameter in model.parameters()) / 1e6 for model in made]
        return f"{sizes[0]:,.0f} M parameters, its draft {sizes[1]:,.0f} M, {made[0].dtype}"

    checks.run("make the large model", 30, make)
    if not made:
        return
    target, draft = made
    prompts = [
        torch.randint(4, scale.vocab_size, (LARGE_PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()
        for seed in range(4)
    ]
    inputs = {
        ASSISTANT_METHODS: singly(prompts[: scale.prompts], device),
        BATCH_METHODS: [left_padded([prompt[row:] for row, prompt in enumerate(prompts)], 0, device)],
    }
    check_speed(checks, "large", scale, target, draft, inputs)


def check_speed(
    checks: BoundedChecks,
    name: str,
    scale: Scale,
    model: PreTrainedModel,
    assistant: PreTrainedModel | None,
    inputs: dict[tuple[str, ...], list[Inputs]],
) -> None:
    """The cost curve of `model`, and each group of methods on its batches of prompts; all lines go to one file."""

    def costs() -> str:
        lines = cost_lines(model, scale.rows, scale.tokens)
        checks.write(f"{name}.jsonl", *lines)
        return describe_costs(lines)

    def speeds(methods: tuple[str, ...], batches: list[Inputs]) -> str:
        lines = speed_lines(methods, model, assistant, batches, scale.timed_tokens)
        checks.write(f"{name}.jsonl", *lines)
        if found := faults(lines):
            raise FaultError("; ".join(found))
        return describe_speeds(lines)

    checks.run(f"cost of forwards, {name} model", 30, costs)
    for methods, batches in inputs.items():
        rows = batches[0]["input_ids"].shape[0]
        checks.run(f"speed, {name} model, batch size {rows}", 60, partial(speeds, methods, batches))


def check_static_cache(checks: BoundedChecks, scale: Scale, device: torch.device) -> None:
    """Compiled forwards, one compilation for each width; few layers, as compiling takes time for each of them."""
    config = LlamaConfig(**EMBEDDED_SHAPE | {"num_hidden_layers": 4})
    model = random_llama(config, device, torch.float32)
    draft = first_layers(model, 3)
    inputs = singly(random_prompts(config.vocab_size)[:1], device)
    for case in STATIC_CASES:
        checks.run(case.name, 45, partial(compare, case, model, draft, inputs, scale.new_tokens))


# ---------------------------------------------------------------------- the parts


def describe_environment(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": f"{device.type} ({name})", "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "threads": torch.get_num_threads(),
    }  # fmt: skip


def singly(prompts: Sequence[list[int]], device: torch.device) -> list[Inputs]:
    """Each prompt as a batch of its own."""
    return [left_padded([prompt], 0, device) for prompt in prompts]


def random_prompts(vocab_size: int) -> list[list[int]]:
    """Prompts of different lengths that repeat themselves."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, vocab_size, (8 + row,), generator=generator).repeat(3).tolist() for row in range(4)]


def _load(loaded: list, device: torch.device) -> str:
    model, tokenizer = embedded_or_random(device)
    loaded += [model, tokenizer]
    if tokenizer is None:
        return "its weights are not here: a model of the same shape with random weights stands in for it"
    return "SmolLM2-135M-Instruct"


if __name__ == "__main__":
    sys.exit(main())
