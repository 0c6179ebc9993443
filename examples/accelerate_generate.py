"""
Spreads prompts over the processes of `accelerate launch`, generates speculatively in each, gathers the texts in order.

    accelerate launch --num_processes 2 examples/accelerate_generate.py --model NAME [--assistant NAME] --prompts A B C
    accelerate launch --cpu --num_processes 2 examples/accelerate_generate.py      # tiny random weights, no network
"""

import argparse
import string

import torch
from accelerate import Accelerator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_specstate

PROMPTS = ["so it goes, so it", "again", "a long day, a long", "no", "well well"]


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator()
    model, assistant, tokenizer = load(args)
    hf_specstate.enable(model.to(accelerator.device))  # every process has the whole model
    if assistant is not None:
        assistant.to(accelerator.device)

    states = hf_specstate.SpecStates()
    with accelerator.split_between_processes(args.prompts) as prompts:
        if prompts:  # there may be more processes than prompts
            inputs = tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
            inputs = inputs.to(accelerator.device)
            out = model.generate(
                **inputs, assistant_model=assistant, return_spec_states=True, do_sample=False,
                max_new_tokens=args.max_new_tokens,
            )  # fmt: skip
            states = out.spec_states
    states = hf_specstate.gather_spec_states(accelerator, states)  # by rank, which is the order of the prompts

    if accelerator.is_main_process:
        for prompt, sequence in zip(args.prompts, states, strict=True):
            text = tokenizer.decode(sequence.token_ids, skip_special_tokens=True)
            print(f"{prompt!r} -> {text!r}  ({sequence.mean_tokens_per_forward:.2f} tokens per forward)")
    accelerator.end_training()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub or local name of the model; tiny random weights if absent")
    parser.add_argument("--assistant", help="hub or local name of an assistant; drafts from the text itself if absent")
    parser.add_argument("--prompts", nargs="+", default=PROMPTS)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    return parser.parse_args()


def load(args: argparse.Namespace):
    """The model, the assistant (or None) and a tokenizer that pads on the left."""
    if args.model is None:
        model, tokenizer = tiny_model()
        return model, None, tokenizer
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    assistant = AutoModelForCausalLM.from_pretrained(args.assistant) if args.assistant else None
    return AutoModelForCausalLM.from_pretrained(args.model), assistant, tokenizer


def tiny_model():
    """Random weights, the same in every process, and a tokenizer for which every character is a token."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {token: number for number, token in enumerate(special + list(string.ascii_letters + " .,!?'"))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        padding_side="left",
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), tokenizer


if __name__ == "__main__":
    main()
