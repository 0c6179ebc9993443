"""What the schedule has learned, kept for the next run."""

import json
import logging

import pytest
import torch
from families import prompt, tiny

import hf_specstate
from hf_specstate import SpecProfile
from hf_specstate.scheduling import place_of

pytestmark = pytest.mark.goodput


@pytest.fixture
def model():
    return hf_specstate.enable(tiny("llama"))


def run(model, profile, rows: int = 1, **kwargs) -> torch.Tensor:
    ids = prompt().repeat(rows, 1)
    return model.generate(ids, max_new_tokens=40, spec_profile=profile, return_spec_states=True, **kwargs)


@pytest.fixture
def profile(model) -> SpecProfile:
    filled = SpecProfile()
    run(model, filled)
    return filled


def begin(profile: SpecProfile, model):
    return profile.begin(model, None, place_of(model, 1, few_rows=True, fixed_slots=False))


def test_an_empty_one_is_filled(model):
    profile = SpecProfile()
    assert repr(profile) == "SpecProfile(empty)"
    out = run(model, profile)
    assert out.sequences.tolist() == tiny("llama").generate(prompt(), max_new_tokens=40).tolist()
    acceptance, cost = begin(profile, model)
    assert acceptance.pooled and acceptance.vectors and cost.measured
    assert "LlamaForCausalLM" in repr(profile)


def test_the_next_call_begins_with_it(model, profile, monkeypatch):
    begun = []
    original = SpecProfile.begin
    monkeypatch.setattr(SpecProfile, "begin", lambda *args: begun.append(original(*args)) or begun[-1])
    before = {kind: tally.seen for kind, tally in begin(profile, model)[0].pooled.items()}
    run(model, profile)
    tallies = begin(profile, model)[0].pooled
    assert before.keys() <= tallies.keys()
    assert max(tallies[kind].seen - seen for kind, seen in before.items()) > 0, "it goes on from there"
    assert begun[-1][1].curve(4)[1:] != [0.0] * 4


def test_save_and_load(model, profile, tmp_path):
    path = tmp_path / "profile.json"
    profile.save(path)
    loaded = SpecProfile.load(path)
    acceptance, cost = begin(profile, model)
    again, cost_again = begin(loaded, model)
    tallies = [{kind: vars(tally) for kind, tally in known.pooled.items()} for known in (acceptance, again)]
    assert tallies[0] == tallies[1] and acceptance.vectors == again.vectors
    assert cost.measured == cost_again.measured and cost.overhead == cost_again.overhead
    run(model, loaded)


def test_it_holds_no_text(profile, tmp_path):
    profile.save(tmp_path / "profile.json")
    content = json.loads((tmp_path / "profile.json").read_text())
    assert set(content) == {"format", "version", "fits", "forward_seconds", "overhead_seconds", "acceptance", "vectors"}
    assert all(isinstance(row[0], str) and len(row) == 7 for row in content["acceptance"])


@pytest.mark.parametrize("other", ["model", "batch", "dtype", "assistant", "products"])
def test_another_kind_is_ignored_with_a_notice(profile, other, tmp_path, caplog):
    profile.save(tmp_path / "before.json")
    model = hf_specstate.enable(tiny("mistral" if other == "model" else "llama"))
    if other == "dtype":
        model = model.to(torch.bfloat16)
    options = {"assistant_model": tiny("llama")} if other == "assistant" else {}
    options |= {"spec_config": {"few_rows": False}} if other == "products" else {}
    with caplog.at_level(logging.WARNING, logger="hf_specstate"):
        run(model, profile, rows=3 if other == "batch" else 1, **options)
    word = {"batch": "rows", "dtype": "device", "products": "device"}.get(other, other)
    assert "`spec_profile` is not used" in caplog.text and word in caplog.text
    profile.save(tmp_path / "after.json")
    assert (tmp_path / "after.json").read_bytes() == (tmp_path / "before.json").read_bytes(), "left alone"


def test_other_schedules_leave_it_alone(model):
    profile = SpecProfile()
    run(model, profile, num_assistant_tokens_schedule="constant")
    assert repr(profile) == "SpecProfile(empty)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(format="other"), "holds no profile"),
        (lambda content: content.pop("version"), "holds no profile"),
        (lambda content: content.update(version=2), "newer version"),
        (lambda content: content.pop("acceptance"), "damaged"),
        (lambda content: content.update(acceptance=[["a", 1]]), "damaged"),
        (lambda content: content.update(acceptance=[["a", 1, 1, 10, 1, 5, 1]]), "damaged"),
        (lambda content: content.update(acceptance=[["a", 1, 1, "x", 1, 5, 1]]), "damaged"),
        (lambda content: content.update(forward_seconds={"1": -1}), "damaged"),
        (lambda content: content.update(forward_seconds={"zero": 1}), "damaged"),
        (lambda content: content.update(forward_seconds=[1]), "damaged"),
        (lambda content: content.update(overhead_seconds=float("nan")), "damaged"),
        (lambda content: content.update(overhead_seconds=float("inf")), "damaged"),
        (lambda content: content.update(vectors=[["a", 1, 2, 1]]), "damaged"),
        (lambda content: content.update(fits=3), "damaged"),
    ],
)
def test_damage_is_refused_by_name(profile, tmp_path, change, message):
    path = tmp_path / "profile.json"
    profile.save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as error:
        SpecProfile.load(path)
    assert "profile.json" in str(error.value)


def test_no_json_at_all(tmp_path):
    (tmp_path / "profile.json").write_bytes(b"\xff\x00")
    with pytest.raises(ValueError, match="holds no profile"):
        SpecProfile.load(tmp_path / "profile.json")


def test_something_else_is_refused(model):
    with pytest.raises(ValueError, match="`spec_profile` takes a SpecProfile"):
        model.generate(prompt(), max_new_tokens=4, spec_profile={"forward_seconds": {}})
