"""The report on runs whose numbers are known."""

import json
import math
import random

import pytest

from eval.report import main, warnings
from eval.run_files import RunFile
from eval.statistics import (
    acceptance_by_depth,
    geometric_mean,
    noise,
    paired_speedups,
    speedups_by_category,
    tokens_per_forward,
)

# method -> how many times as fast as plain decoding, tokens per forward, source of its drafts
METHODS = {
    "plain": (1.0, 1.0, None),
    "stock_prompt_lookup": (0.8, 1.5, None),
    "prompt_lookup": (1.25, 1.6, "prompt_lookup"),
    "prompt_lookup_tree": (1.1, 1.7, "prompt_lookup"),
    "dejavuu_pld": (1.2, None, None),
}
TOKENS = 64


def turn(seconds: float, rate: float | None, source: str | None, equality: str) -> dict:
    drafted = None if source is None else [[1, 30, 15], [2, 28, 7], [3, 20, 2]]
    spent = {"prefill": seconds / 8, "draft": 0.0, "verify": seconds * 0.75, "other": seconds / 8}
    return {
        "prompt_tokens": 100, "new_tokens": TOKENS, "text_sha256": "0", "tokens_per_forward": rate,
        "seconds": {"total": seconds} | spent,
        "target_forwards": 40, "assistant_forwards": 0, "verified_nodes": 78, "equality": equality, "difference": None,
        "accepted_by_depth": drafted, "by_source": source and {source: [78, 24]},
        "draft_sizes": source and [index % 9 for index in range(30)],
    }  # fmt: skip


def synthetic_run(
    path,
    methods=METHODS,
    categories=("qa", "rag"),
    questions=4,
    repeats=3,
    batch_sizes=(1,),
    jitter=0.01,
    drift=0.0,
    seed=0,
):
    """Writes a run in which every method is as fast as `methods` says, on a machine that is noisy or not."""
    generator = random.Random(seed)
    records: list[dict] = [
        {
            "type": "header", "command": "python -m eval.run --made-up", "config": {"new_tokens": TOKENS},
            "environment": {"torch": "2", "cpu": "made up"},
        },
        {"type": "unavailable", "method": "economize_lookup", "reason": "not installed | here"},
    ]  # fmt: skip
    passes = [
        (batch_size, category, range(first, min(first + batch_size, questions)), repeat)
        for batch_size in batch_sizes
        for category in categories
        for first in range(0, questions, batch_size)
        for repeat in range(repeats)
    ]
    for done, (batch_size, category, numbers, repeat) in enumerate(passes):
        machine = 1 + drift * done / len(passes)
        for place, (method, (speed, rate, source)) in enumerate(methods.items()):
            seconds = 4.0 * machine * math.exp(generator.gauss(0, jitter)) / speed / len(numbers)
            equality = "reference" if method == "plain" and repeat == 0 else "equal"
            for number in numbers:
                records.append({
                    "type": "measurement", "question_id": f"{category}-{number}", "category": category,
                    "method": method, "repeat": repeat, "position_in_order": place, "batch_size": batch_size,
                    "turns": [turn(seconds, rate, source, equality)] * 2,
                    "peak_memory_bytes": 2**30, "error": None,
                })  # fmt: skip
    for rows in (1, 4):
        for tokens in (1, 2, 4, 8, 16):
            records.append({
                "type": "cost_curve", "rows": rows, "tokens": tokens, "seconds": 0.05 * rows**0.5 * (1 + tokens / 16),
                "context": 300,
            })  # fmt: skip
    write(path, records)
    return records


def write(path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def cells(page: str, method: str) -> list[str]:
    """What the first table of `page` says about `method`."""
    line = next(line for line in page.splitlines() if line.startswith(f"| `{method}` "))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_speedups_are_paired_and_have_intervals(tmp_path):
    synthetic_run(tmp_path / "run.jsonl", jitter=0.02)
    run = RunFile.read(tmp_path / "run.jsonl")
    found = speedups_by_category(run.usable(1))
    assert list(found) == ["qa", "rag", "all"]
    for by_method in found.values():
        assert set(by_method) == set(METHODS) - {"plain"}
        for method, estimate in by_method.items():
            assert estimate.value == pytest.approx(METHODS[method][0], rel=0.03)
            assert estimate.low < estimate.value < estimate.high
    assert found["qa"]["prompt_lookup"].questions == 4
    assert found["all"]["prompt_lookup"].questions == 8


def test_a_drift_of_the_machine_cancels_in_pairs(tmp_path):
    synthetic_run(tmp_path / "run.jsonl", jitter=0.0, drift=3.0)
    ratios = paired_speedups(RunFile.read(tmp_path / "run.jsonl").usable(1), "prompt_lookup")
    assert list(ratios.values()) == pytest.approx([1.25] * 8)
    estimate = geometric_mean(ratios.values())
    assert (estimate.low, estimate.high) == pytest.approx((1.25, 1.25))


def test_only_measurements_of_one_repeat_are_compared(tmp_path):
    records = synthetic_run(tmp_path / "run.jsonl", jitter=0.0, repeats=1)
    slow = [
        dict(r, repeat=1, turns=[turn(400.0, 1.0, None, "reference")]) for r in records if r.get("method") == "plain"
    ]
    write(tmp_path / "run.jsonl", records + [r for r in slow if r["type"] == "measurement"])
    ratios = paired_speedups(RunFile.read(tmp_path / "run.jsonl").usable(1), "prompt_lookup")
    assert list(ratios.values()) == pytest.approx([1.25] * 8)


def test_rows_of_a_batch_count_as_one(tmp_path):
    synthetic_run(tmp_path / "run.jsonl", questions=8, batch_sizes=(4,), jitter=0.02)
    measured = RunFile.read(tmp_path / "run.jsonl").usable(4)
    assert {len(m.turns) for m in measured} == {8} and measured[0].question.id == "qa-0+qa-1+qa-2+qa-3"
    estimate = speedups_by_category(measured)["all"]["prompt_lookup"]
    assert estimate.questions == 4 and estimate.value == pytest.approx(1.25, rel=0.03)
    assert measured[0].tokens_per_second == pytest.approx(4 * TOKENS / 4.0, rel=0.1)


def test_few_questions_have_no_interval():
    estimate = geometric_mean([1.0, 1.21])
    assert estimate.value == pytest.approx(1.1) and estimate.low is None and estimate.questions == 2
    assert geometric_mean([]) is None


@pytest.mark.parametrize(
    ("machine", "noisy"), [({}, False), ({"jitter": 0.2}, True), ({"drift": 0.5}, True), ({"repeats": 1}, False)]
)
def test_noise_of_the_machine(tmp_path, machine, noisy):
    synthetic_run(tmp_path / "run.jsonl", **({"questions": 8} | machine))
    seen = noise(RunFile.read(tmp_path / "run.jsonl").usable(1))
    assert seen.is_noisy is noisy
    if machine.get("repeats") == 1:
        assert seen.repeats is None
    assert any("Noisy machine" in line for line in warnings(RunFile.read(tmp_path / "run.jsonl"))) is noisy


def test_the_page_and_its_pictures(tmp_path, capsys):
    synthetic_run(tmp_path / "run.jsonl", batch_sizes=(1, 4))
    assert main([str(tmp_path / "run.jsonl")]) == 0
    folder = tmp_path / "run-report"
    assert capsys.readouterr().out.strip() == str(folder / "report.md")
    page = (folder / "report.md").read_text()
    assert "python -m eval.run --made-up" in page and "cpu made up" in page
    assert "`economize_lookup` | not installed \\| here" in page
    assert cells(page.split("### Equality")[1], "prompt_lookup") == ["96", "0", "0", "0", "0", "0"]
    shown = [line.split("](")[1][:-1] for line in page.splitlines() if line.startswith("![")]
    per_batch_size = ["speedup", "tokens-per-forward", "acceptance-by-depth", "acceptance-by-source", "draft-size"]
    assert sorted(shown) == sorted(
        [f"run-{name}-{size}.png" for name in per_batch_size for size in (1, 4)]
        + ["run-throughput.png", "run-cost-curve.png"]
    )
    for name in shown:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_faults_near_ties_and_errors_are_said(tmp_path):
    records = synthetic_run(tmp_path / "run.jsonl", repeats=1)
    ours = [r for r in records if r.get("method") == "prompt_lookup"]
    ours[0]["turns"][0] = ours[0]["turns"][0] | {"equality": "fault", "difference": "new token 3: expected 1, got 2"}
    ours[1]["turns"][1] = ours[1]["turns"][1] | {"equality": "near_tie", "difference": "new token 9: a near tie"}
    next(r for r in records if r.get("method") == "dejavuu_pld").update(error="RuntimeError: no", turns=[])
    write(tmp_path / "run.jsonl", records)
    assert main([str(tmp_path / "run.jsonl"), "--out", str(tmp_path)]) == 1
    page = (tmp_path / "report.md").read_text()
    top, equality = page.split("## run.jsonl")[0], page.split("### Equality")[1]
    ours[0]["turns"][0]["equality"] = ours[0]["turns"][0]["difference"] = None
    write(tmp_path / "run.jsonl", records)
    assert main([str(tmp_path / "run.jsonl"), "--out", str(tmp_path / "later")]) == 0  # a peer may fail
    later = (tmp_path / "later" / "report.md").read_text().split("### Equality")[1]
    assert cells(later, "prompt_lookup") == ["14", "1", "0", "0", "1", "0"]
    assert "1 text(s) differ" in top and "1 measurement(s) failed: dejavuu_pld" in top
    assert "fault: prompt_lookup, question qa-0, turn 1: new token 3: expected 1, got 2" in equality
    assert "near tie: prompt_lookup, question qa-1, turn 2: new token 9" in equality
    assert "failed: dejavuu_pld, question qa-0: RuntimeError: no" in equality
    assert cells(page, "dejavuu_pld")[0] == "7" and cells(page, "prompt_lookup")[0] == "8"


def test_a_run_in_progress_can_be_read(tmp_path):
    path = tmp_path / "run.jsonl"
    records = synthetic_run(path, questions=1, repeats=1)
    path.write_text(path.read_text() + '{"type": "measurement", "quest')
    assert len(RunFile.read(path).measurements) == sum(r["type"] == "measurement" for r in records)
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(ValueError, match="line 1"):
        RunFile.read(path)


def test_a_run_without_drafts_or_costs(tmp_path):
    bare = {"plain": (1.0, None, None), "stock_prompt_lookup": (0.9, None, None)}
    records = synthetic_run(tmp_path / "run.jsonl", methods=bare, questions=1, repeats=1)
    write(tmp_path / "run.jsonl", [r for r in records if r["type"] != "cost_curve"])
    assert main([str(tmp_path / "run.jsonl"), "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.glob("*.png")] == ["run-speedup-1.png"]
    assert "How steady the machine was is not known" in (tmp_path / "report.md").read_text()


def test_statistics_of_drafts(tmp_path):
    synthetic_run(tmp_path / "run.jsonl")
    measured = RunFile.read(tmp_path / "run.jsonl").usable(1)
    ours = [m for m in measured if m.method == "prompt_lookup"]
    assert acceptance_by_depth(ours) == pytest.approx({1: 0.5, 2: 0.25, 3: 0.1})
    assert tokens_per_forward(ours) == pytest.approx(1.6)
    assert tokens_per_forward(m for m in measured if m.method == "dejavuu_pld") is None
