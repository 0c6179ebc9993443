"""Quantised weights, and several processes."""

import copy
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_specstate import DraftHistory, SpecStates, enable, gather_spec_states, synchronize_draft_history
from tests.families import noisy_copy, prompt, tiny

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
GREEDY = dict(max_new_tokens=24, do_sample=False)
SHAPES = pytest.mark.parametrize("tree_width", [1, 2], ids=["chain", "tree"])


# ---------------------------------------------------------------------- bitsandbytes

QUANTIZATIONS = {
    "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
    "int8": dict(load_in_8bit=True, llm_int8_threshold=0.0),
}


@SHAPES
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_bitsandbytes(quantization, rows, tree_width, tmp_path):
    pytest.importorskip("bitsandbytes")
    full = tiny("llama", hidden_size=64, intermediate_size=128)
    full.save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(**QUANTIZATIONS[quantization])
    reference, model = (
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=settings, device_map="cpu", dtype=torch.float32
        )
        for _ in range(2)
    )
    assert type(model.model.layers[0].mlp.up_proj) is not torch.nn.Linear
    ids = torch.cat([prompt(seed=seed) for seed in range(rows)])
    options = dict(assistant_model=full, spec_config=dict(strict=True, tree_width=tree_width))
    out = enable(model).generate(ids, return_spec_states=True, **options, **GREEDY)
    assert torch.equal(out.sequences, reference.generate(ids, **GREEDY))
    accepted = sum(sequence.num_accepted for sequence in out.spec_states)
    assert 0 < accepted < sum(sequence.num_drafted for sequence in out.spec_states)
    again = model.generate(ids, assistant_early_exit=1, spec_config=dict(strict=True), **GREEDY)
    assert torch.equal(again, out.sequences)


# ---------------------------------------------------------------------- accelerate launch


def printed_texts(command: list[str]) -> list[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # how many forwards a text took depends on the clock, as the schedule goes by it
    return re.findall(r"^(.* -> .*)  \(.* tokens per forward\)$", done.stdout, flags=re.MULTILINE)


def test_the_accelerate_example_gives_every_text_once_and_in_order():
    example = ["examples/accelerate_generate.py", "--max-new-tokens", "16", "--prompts", "ab ab", "no", "so"]
    alone = printed_texts([sys.executable, *example])
    assert [line.split(" -> ")[0] for line in alone] == ["'ab ab'", "'no'", "'so'"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1"]
    assert printed_texts([*launch, "--num_processes", "2", *example]) == alone


# ---------------------------------------------------------------------- two ranks in step


def run_ranks(check, tmp_path) -> list[int]:
    """Runs `check(rank)` in two processes of one gloo group and raises their failures; the ranks that finished it."""
    mp.spawn(_rank, args=(check, str(tmp_path / "rendezvous")), nprocs=2)
    return [rank for rank in range(2) if (tmp_path / f"rendezvous-{rank}").exists()]


def _rank(rank: int, check, rendezvous: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # accelerate asks for them, and finds the group made
    torch.set_num_threads(1)
    # a rank that waits for a forward which the other never makes fails instead of hanging
    store = {"init_method": f"file://{rendezvous}", "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", rank=rank, world_size=2, **store)
    try:
        check(rank)
        dist.barrier()
        Path(f"{rendezvous}-{rank}").touch()
    finally:
        dist.destroy_process_group()


def assert_equal_on_all_ranks(value: int) -> None:
    everybody = [torch.zeros(1, dtype=torch.long) for _ in range(2)]
    dist.all_gather(everybody, torch.tensor([value]))
    assert everybody[0] == everybody[1], everybody


def generate_in_step(model, reference, rank: int, rows: int = 2, **options) -> None:
    """Ranks want texts of different lengths, and get them with the same number of target forwards."""
    forwards = []
    handle = model.register_forward_hook(lambda *_: forwards.append(1))
    ids = torch.cat([prompt(seed=10 * rank + row) for row in range(rows)])
    lengths = dict(max_new_tokens=5 + 25 * rank, do_sample=False)
    out = model.generate(ids, return_spec_states=True, **options, **lengths)
    handle.remove()
    assert torch.equal(out.sequences, reference.generate(ids, **lengths))
    if options["spec_config"]["schedule"] == "constant":
        assert sum(sequence.num_drafted for sequence in out.spec_states) > 0
    assert_equal_on_all_ranks(len(forwards))


def check_synced_ranks(rank: int) -> None:
    reference = tiny("llama")
    model, draft = enable(copy.deepcopy(reference)), noisy_copy(reference)
    always, goodput = dict(strict=True, schedule="constant"), dict(strict=True, schedule="goodput")
    for spec_config in (always, always | dict(tree_width=2), goodput, goodput | dict(lockstep=True)):
        for rows in (1, 2):
            options = dict(assistant_model=draft, spec_config=spec_config, synced_gpus=True)
            generate_in_step(model, reference, rank, rows, **options)


def check_sharded_model(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    reference = tiny("llama")
    mesh = init_device_mesh("cpu", (2,))
    for enabled_first in (True, False):
        model = copy.deepcopy(reference)
        model = enable(model) if enabled_first else model
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model = enable(model)
        options = dict(assistant_model=noisy_copy(reference), spec_config=dict(strict=True, schedule="constant"))
        generate_in_step(model, reference, rank, **options)  # transformers sees the shards and sets `synced_gpus`

    with pytest.raises(ValueError, match="`assistant_model` is sharded"):
        enable(copy.deepcopy(reference)).generate(prompt(), assistant_model=model, synced_gpus=True, **GREEDY)


def check_tensor_parallel_model(rank: int) -> None:
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)  # only the first rank writes files
        tiny("llama").save_pretrained(folders[0])
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(folders[0], tp_plan="auto")
        dist.barrier()
    assert model.tp_size == 2
    enable(model)
    draft = noisy_copy(tiny("llama"))
    draft.register_forward_hook(lambda *_: time.sleep(0.003 * rank))  # to the second rank, drafting looks expensive
    always, goodput = dict(strict=True, schedule="constant"), dict(strict=True, schedule="goodput")
    for spec_config in (always | dict(tree_width=2), goodput, goodput | dict(lockstep=True)):
        for rows, assistant in ((1, None), (1, draft), (3, None), (3, draft)):
            ids, forwards = torch.cat([prompt(seed=row) for row in range(rows)]), []
            handle = model.register_forward_hook(lambda *_, seen=forwards: seen.append(1))
            options = dict(assistant_model=assistant, spec_config=spec_config)
            out = model.generate(ids, return_spec_states=True, max_new_tokens=40, do_sample=False, **options)
            handle.remove()
            assert torch.equal(out.sequences, model.generate(ids, max_new_tokens=40, do_sample=False))
            assert_equal_on_all_ranks(len(forwards))


def check_gathering(rank: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model = enable(tiny("llama"))
    everybody = torch.cat([prompt(seed=seed) for seed in range(3)])
    mine = everybody[:2] if rank == 0 else everybody[2:]
    history = DraftHistory()
    options = dict(assistant_model=noisy_copy(tiny("llama")), return_spec_states=True, draft_history=history)
    out = model.generate(mine, **options, **GREEDY)
    gathered = gather_spec_states(accelerator, out.spec_states)
    want = model.generate(everybody, **options | dict(draft_history=None), **GREEDY)
    assert [s.prompt_token_ids + s.token_ids for s in gathered] == want.sequences.tolist()
    first = 2 * rank
    for ours, theirs in zip(out.spec_states, gathered[first : first + len(mine)], strict=True):
        names = ("index", "start", "token_ids", "sources", "accepted", "target_token_ids", "target_logprobs", "seconds")
        assert [[getattr(r, n) for n in names] for r in ours] == [[getattr(r, n) for n in names] for r in theirs]
    nobody = gather_spec_states(accelerator, out.spec_states if rank else SpecStates())
    assert [s.token_ids for s in nobody] == [s.token_ids for s in gathered[2:]]

    synchronize_draft_history(accelerator, history)
    assert history.texts() == [("", tokens) for tokens in want.sequences.tolist()]
    synchronize_draft_history(accelerator, history)
    assert len(history) == want.sequences.numel()


@pytest.mark.parametrize(
    "check", [check_synced_ranks, check_sharded_model, check_tensor_parallel_model, check_gathering]
)
def test_ranks_stay_in_step(check, tmp_path):
    assert run_ranks(check, tmp_path) == [0, 1]
