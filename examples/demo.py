"""
Generates from a real prompt with drafts, checks the text against plain `generate()`, and shows what happened.

    python -m examples.demo                                   # the embedded model, model-free drafts
    python -m examples.demo --assistant                       # its 29-layer draft: shows states, not speed
    python -m examples.demo --model NAME --assistant NAME     # a pair of your own, from the hub or a folder
"""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils.logging import disable_progress_bar

import hf_specstate
from eval.embedded_model import layer_skipping_draft, load_embedded_model
from eval.equality import first_difference

PROMPT = "List the days of the week from Monday to Sunday. Then list them again in the same order, three times in all."
console = Console(highlight=False)


def main() -> int:
    args = parse_arguments()
    disable_progress_bar()
    model, assistant, tokenizer = load(args)
    chat = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(model.device)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    spec_config = {} if args.tree_width is None else {"tree_width": args.tree_width}
    if assistant is not None and not args.model:  # it could not pay, and would be left alone
        spec_config |= {"schedule": "constant", "max_nodes": 8}
    model.generate(**inputs, max_new_tokens=2, do_sample=False)  # warm up

    start = time.perf_counter()
    plain = model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
    plain_seconds = time.perf_counter() - start

    console.rule("text, streamed while it is generated")
    hf_specstate.enable(model)
    speculative = options | {"assistant_model": assistant, "spec_config": spec_config, "return_spec_states": True}
    model.generate(**inputs, **speculative | {"max_new_tokens": 16})  # warm up
    start = time.perf_counter()
    out = model.generate(
        **inputs, **speculative, streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    )
    seconds = time.perf_counter() - start

    console.rule("the same text by who wrote it")
    out.spec_states.show(tokenizer)
    console.rule("check")
    prompt_length = inputs["input_ids"].shape[1]
    expected, got = (result.sequences[0, prompt_length:].tolist() for result in (plain, out))
    difference = first_difference(expected, got, [step[0] for step in plain.logits], model.dtype)
    console.print(f"text equal to plain generate(): [bold]{difference or 'yes'}[/bold]")
    console.print(
        f"plain {plain_seconds:.2f} s, speculative {seconds:.2f} s: {plain_seconds / seconds:.2f} times the speed "
        "(one run of each on this machine, prefills included)"
    )
    args.html.parent.mkdir(parents=True, exist_ok=True)
    args.html.write_text(out.spec_states.to_html(), encoding="utf-8")
    console.print(f"every round, in a browser: [bold]{args.html}[/bold]")
    return 0 if difference is None or difference.is_near_tie else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub or local name of the target; the embedded SmolLM2-135M-Instruct if absent")
    parser.add_argument(
        "--assistant",
        nargs="?",
        const="",
        help="hub or local name of an assistant; without a name, the embedded model's 29-layer draft",
    )
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--tree-width", type=int, help="most alternatives drafted for one position")
    parser.add_argument(
        "--html", type=Path, default=Path("build/demo.html"), metavar="PATH", help="where to write a page that shows it"
    )
    args = parser.parse_args()
    if args.model and args.assistant == "":
        parser.error("--assistant needs a name when --model is given")
    return args


def load(args: argparse.Namespace):
    """The target, the assistant (or None) and the tokenizer."""
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    else:
        model, tokenizer = load_embedded_model()
    if args.assistant is None:
        return model, None, tokenizer
    if args.assistant:
        return model, AutoModelForCausalLM.from_pretrained(args.assistant), tokenizer
    console.print("[dim]The assistant is the model without its layer 15: it shows states, not speed.[/dim]")
    return model, layer_skipping_draft(model), tokenizer


if __name__ == "__main__":
    sys.exit(main())
