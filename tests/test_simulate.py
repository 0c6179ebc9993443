"""The simulator: its replay equals a real run round by round, and its prices are those of the cost curve."""

import json

import pytest
import torch
from families import tiny

import hf_specstate
from eval.cost_models import GpuFlat, Measured, Steep
from eval.replay import RecordedText, Setting, replay, tokens_per_forward, walk
from eval.run_files import CostPoint
from eval.simulate import in_batches, main, make_settings, speedup
from hf_specstate import DRAFTERS, Drafter, TokenTree

NEW_TOKENS = 48


def real_run(max_nodes: int, width: int, eos_token_id: int | None = None, seed: int = 0):
    """A speculative generation of a tiny model on a repetitive prompt, and its text."""
    ids = torch.randint(4, 64, (1, 6), generator=torch.Generator().manual_seed(seed)).repeat(1, 3)
    model = hf_specstate.enable(tiny("llama"))
    config = {"drafters": ["prompt_lookup"], "max_nodes": max_nodes, "tree_width": width, "strict": True}
    out = model.generate(
        ids, spec_config=config, return_spec_states=True, max_new_tokens=NEW_TOKENS, do_sample=False,
        eos_token_id=eos_token_id,
    )  # fmt: skip
    outputs = out.sequences[0, ids.shape[1] :].tolist()
    return RecordedText("qa", ids[0].tolist(), outputs, NEW_TOKENS), out.spec_states[0]


@pytest.mark.parametrize(("max_nodes", "width"), [(0, 1), (1, 1), (8, 1), (15, 1), (8, 2), (15, 3)])
@pytest.mark.parametrize("ends_early", [False, True])
def test_replay_equals_a_real_run_round_by_round(max_nodes, width, ends_early):
    accepted = 0
    for seed in range(4):
        eos = None
        if ends_early:  # at a token in the middle of the text, drafted or not
            text, _ = real_run(max_nodes, width, seed=seed)
            eos = text.output_ids[20 + seed]
        text, rounds = real_run(max_nodes, width, eos, seed)
        played = replay(text, Setting("prompt_lookup", max_nodes, width).config())
        assert [drafted_and_taken(r) for r in played.sequence] == [drafted_and_taken(r) for r in rounds]
        assert tokens_per_forward([played]) == pytest.approx(rounds.mean_tokens_per_forward, nan_ok=True)
        accepted += rounds.num_accepted
    assert accepted > 0 or max_nodes == 0


def drafted_and_taken(r):
    return (r.index, r.start, r.token_ids, r.parents, r.sources, r.accepted, r.added_token_id)


def test_a_walk_ends_with_the_text():
    tree = TokenTree.from_paths([[1, 2, 3], [1, 4]], "made up")
    assert walk(tree, [1, 2, 3, 9]) == [0, 1, 2]
    assert walk(tree, [1, 2, 3]) == [0, 1, 2]
    assert walk(tree, [1, 4, 9]) == [0, 3]
    assert walk(tree, [5]) == walk(TokenTree(), [1, 2]) == []


def test_a_drafter_that_learns_from_answers_is_told_what_a_text_tells():
    class Listener(Drafter):
        name, wants_answers, heard = "listener", True, []

        def propose(self, request):
            return TokenTree.from_paths([[request.token_ids[-1] + 1, 0], [4]], self.name, request.max_nodes)

        def observe(self, outcomes):
            self.heard += outcomes

    config = hf_specstate.SpecStateConfig([Listener()], max_nodes=4, tree_width=2, strict=True)
    replay(RecordedText("qa", [1], [2, 3, 5]), config)
    prefill, first = Listener.heard
    assert (prefill.token_ids, prefill.answers, len(prefill.tree)) == ([2], [2], 0)
    assert (first.tree.token_ids, first.accepted, first.answers) == ([3], [0], [3, 5])


def test_drafters_that_need_a_model_are_refused():
    with pytest.raises(ValueError, match="assistant_model"):
        replay(RecordedText("qa", [1, 2], [3, 4]), Setting("assistant", 4).config())
    with pytest.raises(ValueError, match="recycling"):
        replay(RecordedText("qa", [1, 2], [3, 4]), Setting("recycling", 4).config())
    with pytest.raises(ValueError, match="no_such"):
        Setting("no_such", 4).config()


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in ("assistant", "recycling")])
def test_every_drafter_without_a_model_can_be_simulated(name):
    text, _ = real_run(8, 1)
    played = replay(text, Setting(name, 8).config())
    assert [token for r in played.sequence for token in r.committed_token_ids] == text.output_ids


def test_cost_models():
    assert [GpuFlat().cost(*forward) for forward in [(1, 1), (4, 16), (64, 2)]] == [1, 1, 2]
    assert [Steep().cost(*forward) for forward in [(1, 1), (4, 16)]] == [1, 64]
    points = [(1, 1, 1.0), (1, 2, 9.0), (1, 2, 2.0), (1, 2, 1.5), (1, 4, 3.0), (4, 1, 4.0), (4, 4, 7.0)]
    measured = Measured([CostPoint(*point) for point in points], "run")
    assert measured.cost(1, 2) == 2  # the median
    assert measured.cost(1, 3) == pytest.approx(2.5)
    assert measured.cost(1, 6) == pytest.approx(4.0)
    assert measured.cost(4, 2) == pytest.approx(5.0)
    assert measured.cost(2, 1) == pytest.approx(2.0)
    assert measured.cost(16, 1) == pytest.approx(16.0)
    only_row = Measured([CostPoint(*point) for point in points[:-2]], "run")
    assert only_row.cost(4, 1) == only_row.cost(1, 4) == pytest.approx(3.0)
    with pytest.raises(ValueError, match="--curve measured"):
        Measured([], "")


def test_speedup_charges_the_widest_row_of_every_round():
    text = RecordedText("qa", [1, 2, 3, 1], [2, 3, 1, 2, 3, 1, 2])
    drafting = replay(text, Setting("prompt_lookup", 2).config())
    plain = replay(text, Setting("prompt_lookup", 0).config())
    assert (drafting.widths, plain.widths) == ([3, 3], [1] * 6)
    assert speedup([plain], Steep(), 1) == 1
    assert speedup([drafting], Steep(), 1) == pytest.approx(6 / 6)
    assert speedup([drafting], GpuFlat(), 1) == pytest.approx(6 / 2)
    assert speedup([drafting, plain], GpuFlat(), 2) == pytest.approx(6 / 6)
    assert speedup([drafting, plain], Steep(), 2) == pytest.approx(12 / (2 * (3 + 3 + 4)))
    assert [len(batch) for batch in in_batches([drafting] * 3, 4)] == [4]


def test_settings_that_differ():
    settings = make_settings(["a"], [0, 1, 2, 4], [1, 2])
    assert [(s.max_nodes, s.tree_width) for s in settings] == [(0, 1), (1, 1), (2, 1), (4, 1), (2, 2), (4, 2)]


@pytest.mark.parametrize("curve", ["measured", "gpu-flat", "steep"])
def test_the_command_says_that_it_simulates(tmp_path, capsys, curve):
    text, rounds = real_run(8, 1)
    lines = [{"type": "header", "config": {"new_tokens": NEW_TOKENS}}]
    for category in ("qa", "rag"):
        for method in ("one", "other"):  # the same text, recorded twice
            record = {"prompt_ids": text.prompt_ids, "output_ids": text.output_ids, "rounds": []}
            lines.append({"type": "rounds", "question_id": category, "category": category, "method": method, "turn": 0})
            lines[-1] |= record
    lines += [
        {"type": "cost_curve", "rows": rows, "tokens": tokens, "seconds": 0.1 * rows, "context": 300}
        for rows in (1, 4)
        for tokens in (1, 16)
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--curve", curve, "--batch", "1,16", "--nodes", "0,8", "--width", "1,2", "--out", str(tmp_path / "out")]
    main([str(path), *options])
    page = (tmp_path / "out" / f"simulated-{curve}.md").read_text()
    printed = capsys.readouterr().out
    assert printed.strip() in page
    assert "2 recorded texts" in page
    assert ("that of run.jsonl, measured up to 4 row(s)" in page) is (curve == "measured")
    assert all("imulated" in line for line in page.splitlines() if line.startswith(("#", "![")))
    assert (tmp_path / "out" / f"simulated-{curve}.png").read_bytes().startswith(b"\x89PNG")
    row = next(line for line in page.splitlines() if line.startswith("| `prompt_lookup` | 8     | 1 "))
    assert f"| {rounds.mean_tokens_per_forward:.2f} " in row
    assert ("extrapolated" in page) is (curve == "measured")


def test_a_run_without_texts_is_refused(tmp_path):
    (tmp_path / "run.jsonl").write_text('{"type": "header"}\n')
    with pytest.raises(SystemExit, match="rounds"):
        main([str(tmp_path / "run.jsonl")])
