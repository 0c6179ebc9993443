"""The parts of the GPU check, on the CPU."""

import json
import time

import pytest
import torch
from families import noisy_copy, prompt, tiny

from eval.bounded_checks import BoundedChecks, FaultError
from eval.gpu_equality import CASES, STATIC_CASES, compare
from eval.gpu_models import Scale, large_pair
from eval.gpu_speed import describe_speeds, speed_lines
from eval.prompts import left_padded


def raising(error: BaseException):
    def check() -> str:
        raise error

    return check


def sleeping() -> str:
    try:
        time.sleep(30)
    except Exception:  # what a library may do on the way must not swallow the time limit
        return "slept"
    return "slept"


def test_checks_are_bounded_and_leave_a_line_each(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("eval.bounded_checks.LEAST_SECONDS", 0.01)
    checks = BoundedChecks(tmp_path / "out", seconds=60)
    checks.run("good", 5, lambda: "fine")
    checks.run("slow", 0.05, sleeping)
    assert not checks.has_failed
    checks.run("wrong", 5, raising(FaultError("token 3")))
    checks.run("broken", 5, raising(ValueError("no\nmore")))
    assert checks.has_failed
    late = BoundedChecks(tmp_path / "out", seconds=0)
    late.run("late", 5, lambda: "never")
    printed = capsys.readouterr().out.splitlines()
    records = [json.loads(line) for line in (tmp_path / "out" / "checks.jsonl").read_text().splitlines()]
    expected = ["ok", "unfinished", "fault", "failed", "skipped"]
    assert [line.split()[0] for line in printed] == expected == [record["status"] for record in records]
    assert records[3]["detail"] == "ValueError: no"


@pytest.mark.parametrize("case", [*CASES, STATIC_CASES[1]], ids=lambda case: case.name)
def test_every_equality_case_passes_on_a_tiny_model(case):
    model = tiny("llama")
    prompts = [prompt(4 + row, seed=row)[0].repeat(2).tolist() for row in range(3)]
    inputs = [left_padded(prompts, 0, model.device)] if case.batched else [left_padded(prompts[:1], 0, model.device)]
    said = compare(case, model, noisy_copy(model), inputs, 16)
    assert f"{len(prompts) if case.batched else 1} texts equal" in said


def test_an_equality_case_notices_a_fault(monkeypatch):
    model = tiny("llama")
    inputs = [left_padded([prompt()[0].tolist()], 0, model.device)]
    generate = type(model).generate

    def tampered(self, *args, **kwargs):
        out = generate(self, *args, **kwargs)
        if "spec_config" in kwargs:
            out.sequences[0, -1] = (out.sequences[0, -1] + 1) % 64
        return out

    monkeypatch.setattr(type(model), "generate", tampered)
    with pytest.raises(FaultError, match="a fault"):
        compare(CASES[0], model, noisy_copy(model), inputs, 8)


def test_the_large_pair_agrees_on_four_of_five_tokens():
    scale = Scale(64, 4, 1024, 1, 1, 8, 8, (1,), (1,), torch.float32)
    target, draft = large_pair(scale, torch.device("cpu"))
    ids = torch.randint(1024, (1, 512), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        answers, drafted = (model(ids).logits[0] for model in (target, draft))
    agreement = (answers.argmax(-1) == drafted.argmax(-1)).float().mean()
    assert 0.7 < agreement < 0.9
    best = answers.topk(2).values
    assert ((best[:, 0] - best[:, 1]) / best[:, 0]).min() > 0.2  # no rounding can change the text
    assert len(draft.model.layers) == 1 and len(target.model.layers) == 4


def test_speeds_are_lines_of_a_run():
    model = tiny("llama")
    batches = [left_padded([prompt(6, seed)[0].repeat(2).tolist() for seed in (0, 1)], 0, model.device)]
    lines = speed_lines(("plain", "specstate_assistant_chain"), model, noisy_copy(model), batches, 8)
    assert [line["question_id"] for line in lines] == ["0-0", "0-1"] * 2
    assert [line["turns"][0]["equality"] for line in lines] == ["reference"] * 2 + ["equal"] * 2
    assert describe_speeds(lines).startswith("plain ")
