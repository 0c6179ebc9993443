"""How many tokens are drafted: transformers' schedules."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
from families import noisy_copy, prompt, tiny

import hf_specstate
from hf_specstate import TokenTree
from hf_specstate.drafting import DraftOutcome
from hf_specstate.scheduling import make_schedule

CHAIN = TokenTree.from_paths([[1, 2, 3]], "any")
TREE = TokenTree.from_paths([[1, 2, 3], [4, 5]], "any")


def schedule_of(name, start, model, batch_size):
    config = hf_specstate.SpecStateConfig(schedule=name, max_nodes=start)
    context = SimpleNamespace(config=config, model=model, sequences=SimpleNamespace(batch_size=batch_size))
    return make_schedule(context, together=False)


@pytest.fixture
def model():
    return tiny("llama")


def outcome(tree: TokenTree, accepted: list[int], row: int = 0) -> DraftOutcome:
    return DraftOutcome(row, tree, accepted, [])


NONE, PART, ALL = outcome(CHAIN, []), outcome(CHAIN, [0, 1]), outcome(CHAIN, [0, 1, 2])
EMPTY = outcome(TokenTree(), [])


def test_constant_never_changes(model):
    schedule = schedule_of("constant", 5, model, batch_size=2)
    for seen in (NONE, PART, ALL, EMPTY):
        schedule.observe([seen])
        assert [schedule.max_nodes(row) for row in range(2)] == [5, 5]


@pytest.mark.parametrize("name", ["heuristic", "heuristic_transient"])
@pytest.mark.parametrize(
    ("start", "outcomes", "end"),
    [
        (5, [ALL], 7),
        (5, [PART], 4),
        (5, [NONE], 4),
        (5, [EMPTY], 5),
        (2, [NONE, NONE, NONE], 1),
        (1, [PART, ALL], 3),
        (5, [outcome(TREE, [0, 1, 2])], 7),
        (5, [outcome(TREE, [3, 4])], 4),
    ],
    ids=["all", "part", "none", "no draft", "least", "up again", "tree", "tree, short branch"],
)
def test_heuristic_rule(model, name, start, outcomes, end):
    schedule = schedule_of(name, start, model, batch_size=1)
    for seen in outcomes:
        schedule.observe([seen])
    assert schedule.max_nodes(0) == end


def test_heuristic_rows_are_apart(model):
    schedule = schedule_of("heuristic", 5, model, batch_size=3)
    schedule.observe([outcome(CHAIN, [0, 1, 2], row=0), outcome(CHAIN, [0], row=2)])
    assert [schedule.max_nodes(row) for row in range(3)] == [7, 5, 4]


def test_heuristic_is_remembered_by_its_model_alone(model):
    schedule = schedule_of("heuristic", 5, model, batch_size=2)
    schedule.observe([outcome(CHAIN, [0, 1, 2], row=0)] * 3)  # 11, and 5 in the other row
    assert schedule_of("heuristic", 5, model, 1).max_nodes(0) == 5, "remembered when the call ends"
    schedule.close(model)
    assert schedule_of("heuristic", 5, model, 1).max_nodes(0) == 8
    assert schedule_of("heuristic", 5, tiny("llama"), 1).max_nodes(0) == 5
    assert schedule_of("heuristic_transient", 5, model, 1).max_nodes(0) == 5
    assert schedule_of("constant", 5, model, 1).max_nodes(0) == 5


def test_transient_and_constant_are_forgotten(model):
    for name in ("heuristic_transient", "constant"):
        schedule = schedule_of(name, 5, model, batch_size=1)
        schedule.observe([ALL])
        schedule.close(model)
        assert schedule_of("heuristic", 5, model, 1).max_nodes(0) == 5


def test_memory_does_not_keep_the_model():
    model = tiny("llama")
    schedule_of("heuristic", 5, model, batch_size=1).close(model)
    still_there = weakref.ref(model)
    del model
    gc.collect()
    assert still_there() is None


def drafted(model, draft, schedule: str, start: int, new_tokens: int = 40, **kwargs) -> list[int]:
    """
    What `schedule` allowed in each round of a call that begins with `start` tokens, and would allow next; checked
    against what was drafted.
    """
    out = model.generate(
        prompt(),
        assistant_model=draft,
        num_assistant_tokens_schedule=schedule,
        return_spec_states=True,
        max_new_tokens=new_tokens,
        **kwargs,
    )
    allowed = [start]
    for spec_round in out.spec_states[0].rounds[1:]:
        drafts = len(spec_round.token_ids)
        assert drafts == min(allowed[-1], new_tokens - spec_round.start - 1), "the target adds the last token"
        if schedule == "constant" or not drafts:
            allowed.append(allowed[-1])
        else:
            allowed.append(allowed[-1] + 2 if spec_round.num_accepted == drafts else max(1, allowed[-1] - 1))
    return allowed


@pytest.mark.parametrize("name", ["constant", "heuristic", "heuristic_transient"])
def test_schedules_in_a_generation(model, name):
    hf_specstate.enable(model)
    draft = noisy_copy(model)
    draft.generation_config.num_assistant_tokens = 17
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    settings = copy.deepcopy(draft.generation_config.to_dict())
    allowed = drafted(model, draft, name, start=5, num_assistant_tokens=5)
    if name != "constant":
        changes = {after - before for before, after in zip(allowed, allowed[1:], strict=False)}
        assert changes >= {2, -1}
        assert allowed[-1] != 5, "or the next call would not tell what was remembered"
    drafted(model, draft, name, start=allowed[-1] if name == "heuristic" else 5, num_assistant_tokens=5)
    assert draft.generation_config.to_dict() == settings


def test_the_assistants_own_settings_are_read_last(model):
    hf_specstate.enable(model)
    draft = noisy_copy(model)
    draft.generation_config.num_assistant_tokens = 3
    own = drafted(model, draft, "constant", start=3)
    configured = drafted(model, draft, "constant", start=6, spec_config={"max_nodes": 6})
    asked = drafted(model, draft, "constant", start=2, spec_config={"max_nodes": 6}, num_assistant_tokens=2)
    assert [set(sizes) for sizes in (own, configured, asked)] == [{3}, {6}, {2}]
