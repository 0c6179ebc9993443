"""What the states say about the schedule's decisions."""

import math

import pytest
import torch
from families import noisy_copy, prompt, tiny
from transformers import GenerationConfig

import hf_specstate
from hf_specstate import SpecRound, SpecStates
from hf_specstate.scheduling import GoodputSchedule

pytestmark = pytest.mark.goodput


@pytest.fixture
def model():
    return hf_specstate.enable(tiny("llama"))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("assisted", [False, True])
def test_every_round_says_why(model, rows, assisted):
    draft = noisy_copy(model) if assisted else None
    out = model.generate(
        prompt().repeat(rows, 1), assistant_model=draft, max_new_tokens=40, return_spec_states=True, spec_config={}
    )
    for sequence in out.spec_states:
        first, *rounds = sequence.rounds
        assert first.decision is None and first.expected_tokens is None, "nothing was decided about the prefill"
        for number, played in enumerate(rounds):
            assert played.decision in ("best", "off", "explore")
            assert 1 <= played.expected_tokens <= 1 + len(played.token_ids)
            assert played.considered_cost >= 1 and played.considered_tokens >= 1
            assert (played.expected_seconds is None) == (number == 0), "the first round had nothing to go by"
            assert (played.decision == "off") <= (len(played.token_ids) == 0)
            assert "\n" not in played.explain() and played.explain()


def test_prediction_is_about_what_is_measured(model):
    """Not how good it is, which depends on the machine; that it is about the same thing."""
    model.generate(prompt(), max_new_tokens=60, spec_config={})
    out = model.generate(prompt(), max_new_tokens=60, return_spec_states=True)
    rounds = out.spec_states[0].rounds[2:]
    ratios = [played.verify_seconds / played.expected_seconds for played in rounds]
    assert 0.1 < sorted(ratios)[len(ratios) // 2] < 10


def test_off_is_explained_in_the_words_of_the_choice():
    off = SpecRound(
        3,
        5,
        decision="off",
        expected_tokens=1.0,
        considered_nodes=7,
        considered_tokens=1.31,
        considered_cost=1.71,
        added_token_id=4,
    )
    assert off.explain() == "off: 1.31 expected tokens at 1.71x cost"
    nothing = SpecRound(3, 5, decision="off", considered_nodes=0, considered_tokens=1.0, considered_cost=1.0)
    assert nothing.explain() == "off: no drafter was asked, or none had anything to say"


def test_the_others_are_explained_too():
    common = dict(token_ids=[7, 8], parents=[-1, 0], sources=["a", "a"], accepted=[0], added_token_id=3, num_planned=8)
    choice = dict(expected_tokens=2.1, expected_seconds=0.04)
    choice |= dict(considered_nodes=2, considered_tokens=2.1, considered_cost=1.5)
    best = SpecRound(3, 5, **common, **choice, decision="best", verify_seconds=0.05)
    came = "2 tokens came of it in 50 ms (40 ms expected)"
    assert best.explain() == f"2 nodes, best: 2.10 expected tokens at 1.50x cost; {came}"
    best.considered_tokens = 2.4
    assert best.explain() == f"2 nodes, best: 2.40 expected tokens at 1.50x cost, 2.10 in this row; {came}"
    assert SpecRound(0, 0, added_token_id=3).explain() == "prefill: 1 token came of it"
    assert "to measure such a forward" in SpecRound(3, 5, **common, **choice, decision="explore").explain()
    assert SpecRound(3, 5, **common).explain() == "2 nodes of at most 8: 2 tokens came of it"


def test_decisions_travel(model, tmp_path):
    states = model.generate(prompt(), max_new_tokens=40, return_spec_states=True).spec_states
    states.save(tmp_path / "states")
    loaded = SpecStates.load(tmp_path / "states")
    names = (
        "decision",
        "expected_tokens",
        "expected_seconds",
        "considered_nodes",
        "considered_tokens",
        "considered_cost",
    )
    for ours, theirs in zip(states[0].rounds, loaded[0].rounds, strict=True):
        assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    frame = states.to_pandas()
    assert set(names) <= set(frame.columns) and set(frame["decision"].dropna()) <= {"best", "off", "explore"}
    assert states.to_dict()["sequences"][0]["rounds"][1]["decision"] == states[0].rounds[1].decision


def test_off_is_an_ordinary_forward_and_the_assistant_is_left_alone(model):
    """With a clock that says that drafting takes for ever."""
    draft, calls = noisy_copy(model), []
    forward = draft.forward
    draft.forward = lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)

    original = GoodputSchedule.asked

    def slow(self, drafter, seconds):
        drafter.runs.begin_seconds = drafter.runs.step_seconds = 1000.0
        original(self, drafter, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GoodputSchedule, "asked", slow)
        out = model.generate(prompt(), assistant_model=draft, max_new_tokens=60, return_spec_states=True)
    rounds = out.spec_states[0].rounds
    off = [played for played in rounds[1:] if played.decision == "off"]
    assert len(off) > 40 and all(played.width == 1 for played in off)
    assert len(calls) < 12
    assert out.sequences.tolist() == tiny("llama").generate(prompt(), max_new_tokens=60).tolist()


def test_goodput_is_the_default_and_the_user_bounds_it(model):
    def sizes(**kwargs) -> list[int]:
        out = model.generate(prompt(), max_new_tokens=40, return_spec_states=True, **kwargs)
        assert all(played.decision for played in out.spec_states[0].rounds[1:])
        return [played.num_planned for played in out.spec_states[0].rounds[1:]]

    assert max(sizes()) == 15
    goodput = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "goodput"}
    assert max(sizes(assistant_model=noisy_copy(model), **goodput)) == 3
    assert max(sizes(spec_config={"max_nodes": 6})) == 6


@pytest.mark.parametrize("where", ["call", "generation config", "assistant", "prompt lookup"])
def test_a_number_in_transformers_own_arguments_is_exact(model, where):
    """As there, where the default schedule is "constant"."""
    draft, kwargs = tiny("llama"), {"num_assistant_tokens": 3}
    if where == "generation config":
        kwargs = {"generation_config": GenerationConfig(num_assistant_tokens=3)}
    elif where == "assistant":
        draft.generation_config.num_assistant_tokens, kwargs = 3, {}
    elif where == "prompt lookup":
        draft, kwargs = None, {"prompt_lookup_num_tokens": 3}
    out = model.generate(prompt(), assistant_model=draft, max_new_tokens=24, return_spec_states=True, **kwargs)
    rounds = out.spec_states[0].rounds[1:]
    assert all(played.decision is None for played in rounds)
    assert {played.num_planned for played in rounds[:-1]} == {3}


def test_a_schedule_of_the_assistants_goes_before_a_bare_number(model):
    """The assistant's settings come last, but they are settings."""
    draft = tiny("llama")
    draft.generation_config.num_assistant_tokens_schedule = "heuristic_transient"
    options = {"max_new_tokens": 30, "return_spec_states": True, "num_assistant_tokens": 2}
    rounds = model.generate(prompt(), assistant_model=draft, **options).spec_states[0].rounds[1:]
    assert [played.num_planned for played in rounds[:3]] == [2, 4, 6]


def test_rejection_verifies_all_that_it_drew(model):
    torch.manual_seed(0)
    options = {"do_sample": True, "spec_config": {"acceptance": "rejection"}, "return_spec_states": True}
    out = model.generate(prompt(), assistant_model=noisy_copy(model), max_new_tokens=40, **options)
    drawn = [played for played in out.spec_states[0].rounds[1:] if played.token_ids]
    assert drawn and {played.decision for played in drawn} == {"fixed"}


def test_costs_are_remembered_by_the_model_alone(model):
    model.generate(prompt(), max_new_tokens=40, spec_config={})
    out = model.generate(prompt(), max_new_tokens=40, return_spec_states=True)
    assert out.spec_states[0].rounds[1].expected_seconds is not None, "known from the call before"
    other = hf_specstate.enable(tiny("llama"))
    out = other.generate(prompt(), max_new_tokens=40, return_spec_states=True)
    assert out.spec_states[0].rounds[1].expected_seconds is None
    assert not math.isnan(out.spec_states[0].rounds[2].expected_seconds)
