"""The measuring harness, on a tiny random model: what it loads, counts, judges, writes and continues."""

import copy
import importlib.util
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import datasets
import pytest
import torch

import eval.run
from eval.config import RunConfig, read_config, without_folders
from eval.conversation import Conversation, Decoding
from eval.cost_curve import cost_curve
from eval.data import SOURCES, Question, load_questions, select
from eval.measure import Cost, Meter
from eval.methods import METHODS, Method, MethodResult
from eval.methods.plain import Plain
from eval.models import load_models
from eval.plan import MethodPlan, batches, order, plan_methods
from eval.prompts import encode, left_padded, new_tokens
from eval.random_model import byte_tokenizer
from eval.reference import Referee, Text
from eval.results import ResultFile

QUESTIONS = [
    {"question_id": 1, "category": "chat", "turns": ["Say hello.", "Again."]},
    {"question_id": 2, "category": "echo", "turns": ["abcabcabcabc"]},
    {"question_id": 3, "category": "echo", "turns": ["one two one two one"]},
]
OURS = "specstate_prompt_lookup_chain"


@pytest.fixture
def questions_file(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return path


@pytest.fixture
def run(tmp_path: Path, questions_file: Path):
    """Runs `eval.run` with more arguments; the exit status and the lines of the file by type."""

    def run(*arguments: str, output: str = "run.jsonl") -> tuple[int, dict[str, list[dict]]]:
        path = tmp_path / output
        common = ["--model", "tiny-random", "--data", str(questions_file), "--output", str(path), "--no-cost-curve"]
        status = eval.run.main([*common, "--new-tokens", "12", *arguments])
        return status, read(path)

    return run


def read(path: Path) -> dict[str, list[dict]]:
    lines: dict[str, list[dict]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(line)
        lines.setdefault(record["type"], []).append(record)
    return lines


def keys(lines: dict[str, list[dict]]) -> list[tuple]:
    return [(m["question_id"], m["method"], m["repeat"], m["batch_size"]) for m in lines.get("measurement", [])]


@pytest.fixture(scope="module")
def loaded():
    return load_models(RunConfig(model="tiny-random", assistant="noisy-copy"))


@dataclass
class Lossy(Plain):
    """Plain decoding that gets its last token wrong."""

    name: str = "lossy"

    def generate(self, inputs, max_new_tokens, do_sample, seed):
        sequences = super().generate(inputs, max_new_tokens, do_sample, seed).sequences.clone()
        sequences[:, -1] = (sequences[:, -1] + 1) % 200 + 50
        return MethodResult(sequences)


@dataclass
class Broken(Plain):
    """Cannot generate, at all or from the second call on."""

    name: str = "broken"
    error: BaseException | None = None
    calls_before: int = 0

    def generate(self, inputs, max_new_tokens, do_sample, seed):
        self.calls_before -= 1
        if self.calls_before < 0:
            raise self.error or RuntimeError("it broke")
        return super().generate(inputs, max_new_tokens, do_sample, seed)


class BrokenPeer(Broken):
    is_peer = True


# ---------------------------------------------------------------------- data


def test_the_sample_covers_six_categories():
    questions = load_questions("sample")
    names = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
    assert Counter(question.category for question in questions) == dict.fromkeys(names, 2)
    assert all(len(question.turns) == (2 if question.category == "mt_bench" else 1) for question in questions)
    documents = [question for question in questions if question.category in ("summarization", "rag")]
    assert all(200 < len(question.turns[0].split()) < 500 for question in documents)


ROWS = {
    "spec_bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
        Question("81", "mt_bench", ["Write.", "Rewrite."]),
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "pass", "entry_point": "f"},
        Question("HumanEval/0", "humaneval", ["Complete this Python function:\n\ndef f():\n"]),
    ),
    "gsm8k": ({"question": "1 + 1?", "answer": "2"}, Question("0", "gsm8k", ["1 + 1?"])),
    "mt_bench": (
        {"prompt_id": 123, "category": "math", "prompt": ["A?", "B?"], "reference": []},
        Question("123", "math", ["A?", "B?"]),
    ),
    "cnn_dailymail": (
        {"id": "4a7d", "article": "News.", "highlights": "N."},
        Question("4a7d", "cnn_dailymail", ["Summarize: News."]),
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sets_of_the_hub_become_questions(name, monkeypatch):
    row, expected = ROWS[name]
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **_: datasets.Dataset.from_list([row]))
    assert load_questions(name) == [expected]


def test_without_network_one_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match=r"^The data set gsm8k could not be fetched .* path instead\.$"):
        load_questions("gsm8k")


def test_files_are_checked(tmp_path, questions_file):
    with pytest.raises(ValueError, match="neither a JSONL file nor one of sample, spec_bench"):
        load_questions("no_such_set")
    incomplete = tmp_path / "incomplete.jsonl"
    incomplete.write_text('{"question_id": 1, "turns": ["?"]}\n')
    with pytest.raises(ValueError, match="no category"):
        load_questions(incomplete)
    twice = tmp_path / "twice.jsonl"
    twice.write_text(questions_file.read_text() * 2)
    with pytest.raises(ValueError, match="Two questions have the id 1"):
        load_questions(twice)


def test_the_first_questions_of_each_category_are_kept(questions_file):
    assert [question.question_id for question in load_questions(questions_file, 1)] == ["1", "2"]
    assert select([], 1) == []


def test_prompts_follow_the_chat_template_or_the_bare_texts():
    tokenizer = byte_tokenizer()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages.append({"role": "user", "content": "c"})
    assert tokenizer.decode(encode(tokenizer, messages)) == "<user>a<end><assistant>b<end><user>c<end><assistant>"
    tokenizer.chat_template = None
    assert tokenizer.decode(encode(tokenizer, messages)) == "a\n\nb\n\nc\n\n"


def test_rows_are_padded_on_the_left_and_cut_behind_their_end():
    inputs = left_padded([[5], [6, 7]], 0, torch.device("cpu"))
    assert inputs["input_ids"].tolist() == [[0, 5], [6, 7]]
    assert inputs["attention_mask"].tolist() == [[0, 1], [1, 1]]
    sequences = torch.tensor([[0, 5, 8, 1, 0], [6, 7, 8, 8, 8]])
    assert new_tokens(sequences, 2, {1}) == [[8, 1], [8, 8, 8]]


# ---------------------------------------------------------------------- what is measured when


def test_methods_are_planned_by_pattern_and_plain_is_always_there():
    known = dict.fromkeys(["plain", "stock_a", "ours_a", "ours_b"])
    assert plan_methods(["ours_*:1@2", "ours_b:3"], known) == [
        MethodPlan("plain", 3),
        MethodPlan("ours_a", 1, 2),
        MethodPlan("ours_b", 3),
    ]
    with pytest.raises(ValueError, match="no method 'theirs'"):
        plan_methods(["theirs"], known)
    with pytest.raises(ValueError, match="NAME:REPEATS"):
        plan_methods(["ours_a:often"], known)


def test_the_order_is_rotated_and_smaller_plans_end_earlier():
    plans = [MethodPlan("plain", 2), MethodPlan("a", 2), MethodPlan("b", 1, per_category=1)]
    todo = batches([Question(str(i), "qa", ["?"]) for i in range(3)], 1)
    names = {
        (batch.index, repeat): "".join(plan.name[0] for plan in order(plans, batch, repeat))
        for batch in todo
        for repeat in range(2)
    }
    assert names == {(0, 0): "pab", (0, 1): "ap", (1, 0): "ap", (1, 1): "pa", (2, 0): "pa", (2, 1): "ap"}


def test_batches_hold_one_category_and_one_number_of_turns():
    turns = {"a": ["?"], "b": ["?", "?"]}
    questions = [Question(str(i), category, turns[category]) for i, category in enumerate("abaab")]
    made = [("".join(q.question_id for q in batch.questions), batch.place) for batch in batches(questions, 2)]
    assert made == [("02", 0), ("3", 2), ("14", 0)]


# ---------------------------------------------------------------------- counts and times


def cost(target_forwards: int, prefill_tokens: int = 1) -> Cost:
    return Cost({}, target_forwards, 0, 0, prefill_tokens, 0)


def test_tokens_per_forward_leave_out_the_prefill_and_its_tokens():
    assert cost(10).tokens_per_forward(10) == 1.0  # plain decoding
    assert cost(4).tokens_per_forward(10) == 3.0
    assert cost(4, prefill_tokens=4).tokens_per_forward(10) == 2.0  # a draft of three was accepted in the prefill
    assert cost(4, prefill_tokens=0).tokens_per_forward(9) == 3.0  # the first round repeats the last prompt token
    assert cost(1).tokens_per_forward(1) is None


@pytest.mark.parametrize("name", ["plain", "stock_prompt_lookup", OURS, "specstate_assistant_tree"])
def test_a_generation_is_counted_and_its_model_is_left_alone(loaded, name):
    model, tokenizer, assistant = loaded
    method = copy.copy(METHODS[name])
    method.prepare(model, tokenizer, assistant)
    conversation = Conversation(model, tokenizer, Decoding(24, False, 0))
    classes, attributes = type(model), set(vars(model))
    turn = conversation.hold(method, [Question("1", "echo", ["abcabcabcabcabc"])])[0][0]
    assert type(model) is classes and set(vars(model)) == attributes
    seconds = dict(turn.cost.seconds)
    assert seconds.pop("total") == pytest.approx(sum(seconds.values()))
    assert (turn.cost.assistant_forwards > 0) == ("assistant" in name)
    measured = turn.cost.tokens_per_forward(len(turn.output_ids))
    if name == "plain":
        assert (turn.cost.target_forwards, turn.cost.verified_nodes, measured) == (24, 0, 1.0)
    elif turn.rounds is not None:
        assert measured == pytest.approx(turn.rounds.mean_tokens_per_forward)
        assert turn.cost.verified_nodes == turn.rounds.num_drafted > 0
        assert turn.cost.target_forwards == len(turn.rounds)


def test_calls_are_unwrapped_when_a_generation_is_stopped(loaded):
    model, tokenizer, _ = loaded
    method = Broken(error=KeyboardInterrupt())
    method.prepare(model, tokenizer, None)
    before = set(vars(model))
    with pytest.raises(KeyboardInterrupt), Meter(model.device, 1).watching(method.calls()):
        method.generate({}, 1, False, 0)
    assert set(vars(model)) == before


def test_the_cost_curve_is_written_where_it_is_missing(loaded):
    records = list(cost_curve(loaded[0], {(1, 1), (4, 1)}, repeats=1, tokens=range(1, 4)))
    assert [(record["rows"], record["tokens"]) for record in records] == [(1, 2), (1, 3), (4, 2), (4, 3)]
    assert all(record["type"] == "cost_curve" and record["seconds"] > 0 for record in records)


# ---------------------------------------------------------------------- equality


def test_a_difference_is_a_near_tie_only_where_the_scores_are_close(loaded):
    model, tokenizer, _ = loaded
    model = copy.deepcopy(model)
    plain = Plain()
    plain.prepare(model, tokenizer, None)
    prompt = encode(tokenizer, [{"role": "user", "content": "tie"}])
    conversation = Conversation(model, tokenizer, Decoding(6, False, 0))
    expected = conversation.answer(plain, [prompt])[0].output_ids
    twin = next(token for token in range(250, 4, -1) if token not in expected)
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[expected[3]] * (1 - 1e-7)  # now the two always tie
    other = [*expected[:3], twin, *expected[4:]]
    wrong = [*expected[:3], (twin + 1) % 250, *expected[4:]]
    referee = Referee(model, tokenizer.pad_token_id, Decoding(6, False, 0))

    def judged(output_ids):
        return referee.judge([[Text(prompt, expected)]], [[Text(prompt, output_ids)]])[0][0].equality

    assert [judged(expected), judged(other), judged(wrong), judged(expected[:4])] == [
        "equal",
        "near_tie",
        "fault",
        "fault",
    ]


def test_a_later_prompt_that_holds_a_differing_answer_gets_its_verdict(loaded):
    referee = Referee(loaded[0], 0, Decoding(2, False, 0))
    turns = [[Text([1], [2, 3]), Text([1, 2, 3], [4])]]
    verdicts = referee.judge(turns, [[Text([1], [2]), Text([1, 2], [4])]])[0]
    assert [verdict.equality for verdict in verdicts] == ["fault", "fault"]
    assert "its prompt is another one" in verdicts[1].difference


def test_a_sampled_difference_is_judged_with_the_noise_of_its_draw(loaded):
    model, tokenizer, _ = loaded
    decoding = Decoding(8, True, 5)
    plain = Plain()
    plain.prepare(model, tokenizer, None)
    prompt = encode(tokenizer, [{"role": "user", "content": "dice"}])
    expected = Conversation(model, tokenizer, decoding).answer(plain, [prompt])[0].output_ids
    referee = Referee(model, tokenizer.pad_token_id, decoding)
    got = [*expected[:4], (expected[4] + 1) % 250, *expected[5:]]
    verdict = referee.judge([[Text(prompt, expected)]], [[Text(prompt, got)]])[0][0]
    assert verdict.equality == "fault" and "relative gap" in verdict.difference


# ---------------------------------------------------------------------- whole runs


def test_every_method_gives_the_plain_text(run):
    status, lines = run("--assistant", "noisy-copy")
    assert status == 0
    measured = {line["method"] for line in lines["measurement"]}
    unavailable = {line["method"]: line["reason"] for line in lines.get("unavailable", [])}
    assert measured | set(unavailable) == set(METHODS)
    assert {name for name in METHODS if not METHODS[name].is_peer} <= measured
    for package in ("dejavuu", "economize"):
        if importlib.util.find_spec(package) is None:
            reasons = [reason for name, reason in unavailable.items() if name.startswith(package)]
            assert reasons and all("make eval-peers" in reason for reason in reasons)
    for line in lines["measurement"]:
        verdicts = {turn["equality"] for turn in line["turns"]}
        assert verdicts == {"reference" if line["method"] == "plain" else "equal"}
        assert line["error"] is None and line["peak_memory_bytes"] > 0
    texts = {
        (m["question_id"], place, turn["text_sha256"]) for m in lines["measurement"] for place, turn in turns_of(m)
    }
    assert len(texts) == 4  # questions 2 and 3, and both turns of question 1
    assert len(lines["rounds"]) == 4 * (1 + sum(name.startswith("specstate") for name in METHODS))


def turns_of(measurement: dict):
    return enumerate(measurement["turns"])


def test_the_second_prompt_holds_the_first_answer(run):
    _, lines = run("--methods", OURS)
    first, second = [line for line in lines["rounds"] if line["method"] == OURS and line["question_id"] == "1"]
    said = byte_tokenizer().decode(first["output_ids"], skip_special_tokens=True)
    assert said in byte_tokenizer().decode(second["prompt_ids"])
    for line in (first, second):
        told = [
            token
            for r in line["rounds"]
            for token in [*(r["token_ids"][node] for node in r["accepted"]), r["added_token_id"]]
            if token is not None
        ]
        assert told == line["output_ids"]


def test_acceptance_is_summed_by_depth_and_source(run):
    _, lines = run("--methods", OURS)
    turns = [turn for m in lines["measurement"] if m["method"] == OURS for turn in m["turns"]]
    for turn in turns:
        drafted = sum(turn["draft_sizes"])
        assert drafted == sum(entry[1] for entry in turn["accepted_by_depth"]) == turn["verified_nodes"]
        accepted = sum(entry[2] for entry in turn["accepted_by_depth"])
        assert turn["by_source"] == ({"prompt_lookup": [drafted, accepted]} if drafted else {})
        assert len(turn["draft_sizes"]) == turn["target_forwards"] - 1
    assert any(turn["draft_sizes"] for turn in turns)


def test_sampling_compares_what_keeps_the_sample(run):
    status, lines = run("--methods", OURS, "stock_prompt_lookup", "dejavuu_pld", "--sample", "--seed", "7")
    assert status == 0
    verdicts = {line["method"]: line["turns"][0]["equality"] for line in lines["measurement"]}
    assert verdicts == {"plain": "reference", OURS: "equal", "stock_prompt_lookup": None}
    assert [line["method"] for line in lines["unavailable"]] == ["dejavuu_pld"]


def test_batches_share_their_seconds_and_refuse_methods_of_one_row(run):
    status, lines = run("--methods", OURS, "stock_prompt_lookup", "--batch-sizes", "2")
    assert status == 0
    assert {m["method"] for m in lines["measurement"]} == {"plain", OURS}
    pair = [m for m in lines["measurement"] if m["method"] == OURS and m["category"] == "echo"]
    assert len(pair) == 2 and pair[0]["turns"][0]["seconds"] == pair[1]["turns"][0]["seconds"]
    assert lines["unavailable"][0]["reason"] == "it takes at most 1 row(s) at a time, not 2"


def test_a_lossy_method_fails_the_run_and_nothing_is_lost(run, monkeypatch, capsys):
    monkeypatch.setitem(METHODS, "lossy", Lossy())
    status, lines = run("--methods", "lossy", OURS)
    assert status == 1
    assert len(lines["measurement"]) == 9
    faults = [turn for m in lines["measurement"] if m["method"] == "lossy" for turn in m["turns"]]
    assert [turn["equality"] for turn in faults] == ["fault"] * 4
    assert "new token 11: expected" in faults[0]["difference"]
    assert "FAULT lossy, question 2" in capsys.readouterr().out
    assert run("--methods", OURS)[0] == 1  # the fault is still in the file


def test_a_stopped_run_goes_on_where_it_was(run, tmp_path, monkeypatch):
    _, whole = run("--methods", OURS, "plain:2", output="whole.jsonl")
    # stops in the second question, after the warm-up and both turns of the first one
    monkeypatch.setitem(METHODS, "plain", Broken("plain", KeyboardInterrupt(), calls_before=5))
    status, part = run("--methods", OURS, "plain:2")
    assert status == 130
    assert 0 < len(part["measurement"]) < len(whole["measurement"])
    monkeypatch.setitem(METHODS, "plain", Plain())
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write('{"type": "measure')  # a line that was cut off
    status, lines = run("--methods", OURS, "plain:2")
    assert status == 0
    assert sorted(keys(lines)) == sorted(keys(whole)) and len(set(keys(lines))) == len(keys(lines))
    assert len(lines["rounds"]) == len(whole["rounds"])
    assert len(lines["header"]) == 1
    size = (tmp_path / "run.jsonl").stat().st_size
    assert run("--methods", OURS, "plain:2")[0] == 0  # everything is there
    assert (tmp_path / "run.jsonl").stat().st_size == size


def test_methods_added_later_are_compared_with_the_texts_in_the_file(run, monkeypatch):
    run("--methods", "plain")
    monkeypatch.setitem(METHODS, "plain", Broken("plain", calls_before=1))  # the warm-up
    status, lines = run("--methods", OURS)
    assert status == 0
    assert len(lines["header"]) == 2
    verdicts = [turn["equality"] for m in lines["measurement"] if m["method"] == OURS for turn in m["turns"]]
    assert verdicts == ["equal"] * 4


def test_other_settings_are_refused(run, capsys):
    run("--methods", "plain")
    status, lines = run("--methods", "plain", "--seed", "1")
    assert status == 2 and len(lines["header"]) == 1
    assert "was measured with seed 0, not 1" in capsys.readouterr().err


def test_peers_that_cannot_run_are_reported(run, monkeypatch):
    monkeypatch.setitem(METHODS, "peer", BrokenPeer("peer"))
    status, lines = run("--methods", "peer")
    assert status == 0
    assert lines["unavailable"] == [{"type": "unavailable", "method": "peer", "reason": "RuntimeError: it broke"}]


@pytest.mark.parametrize("calls_before", [0, 1], ids=["in the warm-up", "later"])
def test_own_methods_that_fail_fail_the_run(run, monkeypatch, capsys, calls_before):
    monkeypatch.setitem(METHODS, "broken", Broken(calls_before=calls_before))
    status, lines = run("--methods", "broken", OURS)
    assert status == 1
    assert "RuntimeError: it broke" in capsys.readouterr().out
    assert sum(m["method"] == OURS for m in lines["measurement"]) == 3
    errors = [m["error"] for m in lines["measurement"] if m["method"] == "broken"]
    assert errors == (["RuntimeError: it broke"] * 3 if calls_before else [])


def test_without_plain_texts_nothing_is_called_equal(run, monkeypatch):
    monkeypatch.setitem(METHODS, "plain", Broken("plain", calls_before=1))
    status, lines = run("--methods", OURS)
    assert status == 1
    turns = [turn for m in lines["measurement"] if m["method"] == OURS for turn in m["turns"]]
    assert {turn["equality"] for turn in turns} == {None}


# ---------------------------------------------------------------------- configuration


def test_the_command_line_goes_before_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("new_tokens: 5\nbatch_sizes: [1, 4]\nmethods: [plain]\n")
    config = read_config(["--config", str(path), "--new-tokens", "7"])
    assert (config.new_tokens, config.batch_sizes, config.methods, config.seed) == (7, [1, 4], ["plain"], 0)
    path.write_text("new_token: 5\n")
    with pytest.raises(ValueError, match="no field 'new_token'"):
        read_config(["--config", str(path)])
    with pytest.raises(ValueError, match="quantization must be one of nf4, int8"):
        RunConfig(quantization="int2")


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "eval/configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_configurations_of_the_repository_are_valid(path):
    config = read_config(["--config", str(path)])
    assert plan_methods(config.methods, METHODS)


def test_headers_tell_no_folders(run, tmp_path):
    _, lines = run("--methods", "plain")
    header = lines["header"][0]
    assert str(tmp_path) not in json.dumps(header)
    assert "--data questions.jsonl" in header["command"]
    assert without_folders("--data=../elsewhere/a.jsonl") == "--data=a.jsonl"
    assert without_folders("eval/data/sample.jsonl") == "eval/data/sample.jsonl"


def test_results_know_what_a_file_holds(tmp_path):
    results = ResultFile.open(tmp_path / "new" / "run.jsonl")
    results.add_unavailable("peer", "no")
    results.add_unavailable("peer", "no")
    assert len(results.path.read_text().splitlines()) == 1


def test_methods_have_one_name_each():
    assert all(name == method.name for name, method in METHODS.items())
    assert all(isinstance(method, Method) for method in METHODS.values())


def test_a_run_keeps_to_its_number_of_threads(run, capsys):
    """Even if nobody named it: the environment may say something else the next time."""
    before = torch.get_num_threads()
    try:
        run("--methods", "plain")
        torch.set_num_threads(before + 1)
        status, lines = run("--methods", "plain", OURS)
        assert status == 2 and lines["header"][0]["environment"]["threads"] == before
        assert f"was measured with threads {before}, not {before + 1}" in capsys.readouterr().err
    finally:
        torch.set_num_threads(before)
