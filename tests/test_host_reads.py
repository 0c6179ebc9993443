"""How often a generation waits for the device, and how many tokens it runs through its models."""

import sys

import pytest
import torch
from families import noisy_copy, prompt, tiny

import hf_specstate
import hf_specstate.host

NEW_TOKENS = 30
# every way in which a tensor's values reach Python
READS = "item tolist numpy cpu nonzero __bool__ __int__ __float__ __index__ __array__".split()


class Log(list):
    """Forwards (the model's name and the width) and reads, in order."""

    def watch(self, model, name: str):
        def note(_, args, kwargs):
            input_ids = args[0] if args else kwargs["input_ids"]
            self.append((name, input_ids.shape[1]))

        model.register_forward_pre_hook(note, with_kwargs=True)
        return model

    def after_each(self, name: str) -> list[list[str]]:
        """What was read between each forward of `name` and the next forward of any model; without the first one's."""
        spans: list[list[str]] = []
        for event in self:
            if isinstance(event, tuple):
                spans.append([event[0]])
            elif spans:
                spans[-1].append(event)
        return [span[1:] for span in spans if span[0] == name][1:]


@pytest.fixture
def log(monkeypatch) -> Log:
    """Counts calls of `to_host`, under every name, and other reads made by the package's own lines."""
    log, to_host = Log(), hf_specstate.host.to_host

    def counted(tensor):
        log.append("to_host")
        return to_host(tensor)

    for name, module in list(sys.modules.items()):
        if name.startswith("hf_specstate") and getattr(module, "to_host", None) is to_host:
            monkeypatch.setattr(module, "to_host", counted)

    def watched(name, read):
        def reading(self, *args, **kwargs):
            caller = sys._getframe(1).f_globals["__name__"]
            if caller.startswith("hf_specstate") and caller != "hf_specstate.host":
                log.append(name)
            return read(self, *args, **kwargs)

        return reading

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
    return log


def batch_of_three() -> dict[str, torch.Tensor]:
    input_ids = torch.cat([prompt(seed=seed) for seed in (3, 4, 5)])
    mask = torch.ones_like(input_ids)
    input_ids[1, :2], mask[1, :2] = 0, 0
    return {"inputs": input_ids, "attention_mask": mask}


INPUTS = {"one row": lambda: {"inputs": prompt()}, "ragged rows": batch_of_three}
FINAL_READS = 3  # at most: what was recorded on the device is fetched when the generation is over


def assert_reads(rounds: list[list[str]], each: int = 1) -> None:
    """Also while everything is recorded; the last round is followed by the final reads instead of a proposal."""
    *rounds, last = rounds
    assert all(span == ["to_host"] * len(span) and 1 <= len(span) <= each for span in rounds)
    assert 1 <= len(last) <= 1 + FINAL_READS
    assert last == ["to_host"] * len(last)


@pytest.mark.parametrize("eos_token_id", [None, 2])
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize(
    ("drafters", "reads"), [(["history", "previous_drafts"], 1), (["prompt_lookup"], 1), (None, 2)]
)
def test_reads_a_round_without_an_assistant(log, inputs, eos_token_id, drafters, reads):
    """One for the target's answers; the default's successor tables, which lie on the device, are read once too."""
    model = log.watch(hf_specstate.enable(tiny("llama", eos_token_id=eos_token_id)), "target")
    config = {"drafters": drafters, "strict": True}
    out = model.generate(**inputs(), return_spec_states=True, spec_config=config, max_new_tokens=NEW_TOKENS)
    rounds = log.after_each("target")
    assert len(rounds) == max(spec_round.index for row in out.spec_states for spec_round in row)
    assert sum(row.num_accepted for row in out.spec_states) > 0
    assert_reads(rounds, reads)


@pytest.mark.goodput
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_deciding_reads_nothing(log, inputs):
    """The default schedule: what it goes by is known on the host, or is the time of events that lie behind."""
    model = log.watch(hf_specstate.enable(tiny("llama")), "target")
    model.generate(**inputs(), return_spec_states=True, max_new_tokens=NEW_TOKENS)
    assert_reads(log.after_each("target"), each=2)


@pytest.mark.parametrize("tree_width", [1, 2])
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_one_read_a_step_of_an_assistant(log, inputs, tree_width):
    target, draft = tiny("llama"), noisy_copy(tiny("llama"))
    log.watch(hf_specstate.enable(target), "target"), log.watch(draft, "assistant")
    out = target.generate(
        **inputs(),
        assistant_model=draft,
        return_spec_states=True,
        spec_config={"max_nodes": 4, "tree_width": tree_width},
        max_new_tokens=NEW_TOKENS,
    )
    assert sum(row.num_accepted for row in out.spec_states) > 0
    rounds, steps = log.after_each("target"), log.after_each("assistant")
    assert_reads(rounds)
    assert steps == [["to_host"]] * len(steps)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["assistant", "prompt_lookup"])
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_recording_reads_nothing_on_the_way(log, inputs, drafter, do_sample):
    target, draft = tiny("llama"), noisy_copy(tiny("llama"))
    log.watch(hf_specstate.enable(target), "target"), log.watch(draft, "assistant")

    def events(**recording) -> list:
        log.clear()
        torch.manual_seed(0)
        target.generate(
            **inputs(),
            assistant_model=draft,
            spec_config={"drafters": [drafter], "max_nodes": 4},
            do_sample=do_sample,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            **recording,
        )
        return list(log)

    events()  # finds out, once, what the models can do
    silent, recorded = events(), events(return_spec_states=True)
    assert [event for event in recorded if event[0] == "target"] == [event for event in silent if event[0] == "target"]
    assert len(log.after_each("target")) > FINAL_READS  # so that a read a round would be seen
    assert 0 <= len(recorded) - len(silent) <= FINAL_READS
    assert {read for span in log.after_each("target") for read in span} == {"to_host"}


@pytest.mark.parametrize("read", ["bool(x)", "int(x)", "x.item()", "x.tolist()", "[0, 1][x]", "x.cpu()"])
def test_the_watch_sees_reads(log, read):
    eval(read, {"__name__": "hf_specstate.decoding", "x": torch.ones((), dtype=torch.long)})
    assert len(log) == 1


def test_models_run_every_token_once(log):
    """No token twice through the target, nor through an assistant that is always right."""
    target = tiny("llama")
    log.watch(hf_specstate.enable(target), "target")
    draft = log.watch(tiny("llama"), "assistant")
    target.generate(prompt(), assistant_model=draft, num_assistant_tokens=4, max_new_tokens=1 + 3 * 5)
    forwards = [event for event in log if isinstance(event, tuple)]
    drafting = [("assistant", 1)] * 3
    assert forwards == [
        ("target", 8), ("assistant", 8), ("assistant", 1), *drafting,
        ("target", 5), ("assistant", 2), *drafting,
        ("target", 5), ("assistant", 2), *drafting,
        ("target", 5),
    ]  # fmt: skip
