"""States outside of the process: files, dictionaries, data sets, data frames, dense tensors."""

import json
import math

import pytest
import torch
from families import noisy_copy, prompt, tiny

import hf_specstate
from hf_specstate import SpecStates
from hf_specstate.state_files import from_bytes, to_bytes

LEVELS = ("ids", "topk", "full")


def recorded(record: str = "topk", rows: int = 3, **options) -> SpecStates:
    """Trees with accepted and rejected nodes, ragged rows, one of which ends early."""
    model = tiny("llama")
    input_ids = torch.cat([prompt(seed=seed) for seed in range(3, 3 + rows)])
    mask = torch.ones_like(input_ids)
    mask[0, :2] = 0
    config = {"schedule": "constant", "max_nodes": 5, "tree_width": 2, "record": record, "strict": True}
    draft, options = noisy_copy(model), {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0} | options
    plain = model.generate(input_ids, attention_mask=mask, **options)
    ends = int(plain[1, prompt().shape[1] + 9])
    out = hf_specstate.enable(model).generate(
        input_ids, attention_mask=mask, assistant_model=draft, spec_config=config, return_spec_states=True,
        eos_token_id=ends, output_hidden_states=record == "full", **options,
    )  # fmt: skip
    states = out.spec_states
    assert 0 < states.num_accepted < states.num_drafted
    assert {sequence.stop_reason for sequence in states} >= {"eos"}
    return states


@pytest.fixture(scope="module")
def states() -> SpecStates:
    torch.set_num_threads(1)
    return recorded()


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("record", LEVELS)
def test_a_file_gives_back_exactly_what_was_saved(record, tmp_path):
    states = recorded(record)
    states.num_left_out, states.token_texts = 2, {5: "five", 7: "<b>\N{SNOWMAN}"}
    states[0].text_pieces = ["a"] * states[0].num_tokens
    states.save(tmp_path / "states.safetensors")
    loaded = SpecStates.load(tmp_path / "states.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["states.safetensors"]
    assert (loaded.num_left_out, loaded.token_texts) == (2, states.token_texts)
    assert len(loaded) == len(states)
    for ours, theirs in zip(states, loaded, strict=True):
        assert (ours.prompt_token_ids, ours.text_pieces) == (theirs.prompt_token_ids, theirs.text_pieces)
        assert len(ours) == len(theirs)
        for left, right in zip(ours, theirs, strict=True):
            for name, value in vars(left).items():
                assert_same(value, getattr(right, name), name)
    assert (states[0][1].logits is not None) == (states[0][1].hidden_states is not None) == (record == "full")
    assert (states[0][1].top_logprobs is not None) == (record != "ids")


def assert_same(left, right, name: str) -> None:
    assert type(left) is type(right), name
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right), name
    elif isinstance(left, list) and left and isinstance(left[0], float):
        assert all(a == b or math.isnan(a) and math.isnan(b) for a, b in zip(left, right, strict=True)), name
    else:
        assert left == right, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_and_different_widths_in_one_file(dtype, states):
    first, second = (from_bytes(to_bytes(states)) for _ in range(2))
    for spec_round in first[0]:
        spec_round.logits = torch.randn(1 + len(spec_round.token_ids), 6).to(dtype)
    for spec_round in second[0]:
        spec_round.logits = torch.randn(1 + len(spec_round.token_ids), 9)
    both = SpecStates.concatenate([first, second])
    loaded = from_bytes(to_bytes(both))
    for place in (0, len(first)):
        for left, right in zip(both[place], loaded[place], strict=True):
            assert_same(left.logits, right.logits, "logits")


def test_nothing_recorded_makes_a_file_too():
    assert len(from_bytes(to_bytes(SpecStates()))) == 0
    assert [len(sequence) for sequence in from_bytes(to_bytes(SpecStates([hf_specstate.SpecSequence([1, 2])])))] == [0]


def test_a_damaged_file_is_refused_by_name(states, tmp_path):
    data, path = to_bytes(states), tmp_path / "mine.safetensors"
    step = max(1, len(data) // 150)
    for place in range(0, len(data), step):
        flipped = bytearray(data)
        flipped[place] ^= 0x10
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match="mine.safetensors"):
            SpecStates.load(path)
        path.write_bytes(data[:place])
        with pytest.raises(ValueError, match="mine.safetensors"):
            SpecStates.load(path)


def test_headers_that_no_one_writes_are_refused_by_name(states, tmp_path):
    data, path = to_bytes(states), tmp_path / "mine.safetensors"
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    for raw in (b"[" * 200_000, header.replace(b'"version":"1"', b'"version":Infinity'), b"{}", b"[]", b"7"):
        path.write_bytes(len(raw).to_bytes(8, "little") + raw)
        with pytest.raises(ValueError, match="mine.safetensors"):
            SpecStates.load(path)


def test_where_files_go(states, tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    states.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and len(SpecStates.load(tmp_path / "real")) == len(states)
    states.save(tmp_path / ("n" * 250))
    with pytest.raises(FileNotFoundError, match="no folder .*absent"):
        states.save(tmp_path / "absent" / "states")


def test_newer_and_foreign_files_are_refused_by_name(states, tmp_path):
    path = tmp_path / "mine.safetensors"
    path.write_bytes(to_bytes(states).replace(b'"version":"2"', b'"version":"3"'))
    with pytest.raises(ValueError, match="mine.safetensors was written by a newer version"):
        SpecStates.load(path)
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="mine.safetensors holds no speculative states"):
        SpecStates.load(path)
    save_file({"a": torch.ones(2)}, path, {"format": "pt", "version": "1"})
    with pytest.raises(ValueError, match="mine.safetensors holds no speculative states but 'pt'"):
        SpecStates.load(path)
    with pytest.raises(FileNotFoundError):
        SpecStates.load(tmp_path / "absent")


def test_an_interrupted_save_leaves_the_old_file(states, tmp_path, monkeypatch):
    path = tmp_path / "states.safetensors"
    path.write_bytes(b"old")
    monkeypatch.setattr("hf_specstate.state_files.to_bytes", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        states.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["states.safetensors"] and path.read_bytes() == b"old"


# ---------------------------------------------------------------------- dictionaries, data sets, data frames


def test_a_dictionary_is_strict_json(states):
    told = json.loads(json.dumps(states.to_dict(), allow_nan=False))
    assert [row["token_ids"] for row in told["sequences"]] == [sequence.token_ids for sequence in states]
    for row, sequence in zip(told["sequences"], states, strict=True):
        assert row["prompt_token_ids"] == sequence.prompt_token_ids
        for told_round, spec_round in zip(row["rounds"], sequence, strict=True):
            assert told_round["accepted"] == spec_round.accepted
            assert told_round["top_token_ids"] == spec_round.top_token_ids.tolist()
            assert told_round["committed_token_ids"] == spec_round.committed_token_ids
    lookup = recorded_without_assistant().to_dict()
    logprobs = [value for row in lookup["sequences"] for r in row["rounds"] for value in r["draft_logprobs"]]
    assert logprobs and set(logprobs) == {None}


def recorded_without_assistant() -> SpecStates:
    ids = prompt(4).repeat(1, 4)
    return hf_specstate.enable(tiny("llama")).generate(ids, return_spec_states=True, max_new_tokens=8).spec_states


def test_a_data_set_holds_the_context_of_every_round(states, tmp_path):
    from datasets import Dataset, concatenate_datasets, load_from_disk

    data = states.to_dataset()
    assert len(data) == states.num_forwards
    data.save_to_disk(tmp_path / "disk")
    data.to_parquet(tmp_path / "rounds.parquet")
    for again in (load_from_disk(tmp_path / "disk"), Dataset.from_parquet(str(tmp_path / "rounds.parquet"))):
        rows = iter(again)
        for row, sequence in enumerate(states):
            text = sequence.prompt_token_ids + sequence.token_ids
            for spec_round, told in zip(sequence, rows, strict=False):
                seen = len(sequence.prompt_token_ids) + spec_round.start
                assert told["row"] == row and told["context_token_ids"] == text[:seen]
                assert text[seen:][: len(told["committed_token_ids"])] == told["committed_token_ids"]
                assert told["token_ids"] == spec_round.token_ids and told["sources"] == spec_round.sources
                assert told["top_token_ids"] == spec_round.top_token_ids.tolist()
                assert told["stop_reason"] == spec_round.stop_reason
                assert told["logits"] is None
    assert len(concatenate_datasets([data, recorded("ids").to_dataset()])) > len(data)  # the types are the same


def test_a_data_set_by_sequence(states):
    data = states.to_dataset(by="sequence")
    assert data["token_ids"][:] == [sequence.token_ids for sequence in states]
    assert data["stop_reason"][:] == [sequence.stop_reason for sequence in states]
    for told, sequence in zip(data, states, strict=True):
        assert told["token_sources"] == sequence.token_sources
        assert [r["target_token_ids"] for r in told["rounds"]] == [r.target_token_ids for r in sequence]
    with pytest.raises(ValueError, match="`by` must be"):
        states.to_dataset(by="token")


def test_a_data_frame_has_a_row_for_every_round(states):
    frame = states.to_pandas()
    assert len(frame) == states.num_forwards
    assert list(frame[frame["row"] == 1]["start"]) == [spec_round.start for spec_round in states[1]]
    assert len(SpecStates().to_pandas()) == len(SpecStates().to_dataset()) == 0


# ---------------------------------------------------------------------- dense views, concatenation


def test_dense_views_hold_every_round_where_it_belongs():
    states = recorded("full")
    proposals, scores = states.proposals, states.scores
    rounds, nodes = max(map(len, states)), max(len(r.token_ids) for sequence in states for r in sequence)
    assert proposals.proposal_token_ids.shape == scores.logprobs.shape == (len(states), rounds, nodes)
    assert scores.token_ids.shape == (len(states), rounds, 1 + nodes)
    assert scores.hidden_states.shape == (len(states), rounds, 1 + nodes, states[0][0].hidden_states.shape[1])
    filled = torch.zeros_like(scores.logprobs, dtype=torch.bool)
    for row, sequence in enumerate(states):
        assert proposals.proposal_lens[row].tolist() == [
            len(r.token_ids) for r in sequence
        ] + [0] * (rounds - len(sequence))  # fmt: skip
        for place, r in enumerate(sequence):
            n = len(r.token_ids)
            filled[row, place, :n] = True
            assert proposals.proposal_token_ids[row, place, :n].tolist() == r.token_ids
            assert proposals.proposal_parents[row, place, :n].tolist() == r.parents
            assert proposals.proposal_probs[row, place, :n].log().tolist() == pytest.approx(r.draft_logprobs, abs=1e-5)
            assert scores.probs[row, place, :n].log().tolist() == pytest.approx(r.target_logprobs, abs=1e-4)
            assert scores.token_ids[row, place, : 1 + n].tolist() == r.target_token_ids
            assert torch.equal(scores.hidden_states[row, place, : 1 + n], r.hidden_states)
            assert not scores.hidden_states[row, place, 1 + n :].any()
    assert (proposals.proposal_token_ids[~filled] == -1).all() and scores.logprobs[~filled].isnan().all()
    assert filled.any() and not filled.all()


def test_dense_views_of_nothing():
    assert SpecStates().proposals.proposal_token_ids.shape == (0, 0, 0)
    assert recorded("ids").scores.hidden_states is None


def test_hidden_states_of_different_models_have_no_dense_view():
    parts = [from_bytes(to_bytes(recorded("full"))) for _ in range(2)]
    for spec_round in parts[1][0]:
        spec_round.hidden_states = torch.zeros(1 + len(spec_round.token_ids), 3)
    assert SpecStates.concatenate(parts).scores.hidden_states is None


def test_concatenation_keeps_rows_in_order(states):
    other = recorded_without_assistant()
    other.num_left_out = 1
    both = SpecStates.concatenate([states, other, SpecStates()])
    assert [sequence.token_ids for sequence in both] == [s.token_ids for part in (states, other) for s in part]
    assert both.num_drafted == states.num_drafted + other.num_drafted and both.num_left_out == 1
    assert len(SpecStates.concatenate([])) == 0
