"""Histories that outlive a call: bounded, apart by tenant, saved without pickle, shared by threads."""

import copy
import sys
import threading

import numpy as np
import pytest
import torch
from families import noisy_copy, prompt, tiny

import hf_specstate
from eval.random_model import byte_tokenizer
from hf_specstate import DraftHistory
from hf_specstate.draft_history import HistoryOfRows
from hf_specstate.drafting.suffix_index import SEPARATOR

OPTIONS = dict(max_new_tokens=24, do_sample=False, return_spec_states=True)


def texts_of(history: DraftHistory) -> list[tuple[str, list[int]]]:
    return history.texts()


def speculating():
    return hf_specstate.enable(tiny("llama"))


# ---------------------------------------------------------------------- content


def test_the_oldest_texts_go_first_and_nothing_is_kept_twice():
    history = DraftHistory(max_tokens=10)
    history.add([1, 2, 3, 4])
    history.add(torch.tensor([[5, 6, 7]]), tenant="a")
    history.add([1, 2, 3, 4])
    assert len(history) == 7 and "7 of at most 10 tokens, 2 texts" in repr(history)
    history.add([8, 9, 10, 11, 12], tenant="b")
    assert texts_of(history) == [("a", [5, 6, 7]), ("b", [8, 9, 10, 11, 12])]
    history.add([1, 2, 3, 4])  # it was forgotten: it is new
    assert texts_of(history) == [("b", [8, 9, 10, 11, 12]), ("", [1, 2, 3, 4])]
    history.add(range(100))
    assert texts_of(history) == [("", list(range(90, 100)))] and len(history) == 10


def test_forgetting():
    history = DraftHistory()
    history.add([1, 2], tenant="a")
    history.add([3, 4], tenant="b")
    history.forget("a")
    history.forget("nobody")
    assert texts_of(history) == [("b", [3, 4])] and len(history) == 2
    history.add([1, 2], tenant="a")
    assert len(history) == 4
    history.clear()
    assert texts_of(history) == [] and len(history) == 0


def test_a_forgotten_text_leaves_nothing_behind():
    for history in (DraftHistory(), DraftHistory(max_tokens=2)):
        history.add([60000], tenant="a")
        history.add([1, 2])
        history.forget("a")
        out = speculating().generate(prompt(), draft_history=history, **OPTIONS)
        assert out.spec_states[0].num_tokens == 24 and all(tenant == "" for tenant, _ in texts_of(history))


class Interrupt(KeyboardInterrupt):
    """Not pytest's to act on."""


def interrupted_after(lines: int, call) -> bool:
    """Runs `call` and raises after so many lines of the package's code, as Ctrl-C may; whether it came to that."""
    left = lines

    def trace(frame, event, _):
        nonlocal left
        if "hf_specstate" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def others() -> DraftHistory:
    history = DraftHistory()
    history.add(NEW[1], NEW[0])
    return history


TEXTS, NEW = [("", [1, 2, 3]), ("a", [4, 5]), ("", [6, 7, 8, 9])], ("b", [10, 11])
# name -> most tokens, the change, and what it leads to
CHANGES = {
    "add": (100, lambda history: history.add(NEW[1], NEW[0]), [*TEXTS, NEW]),
    "add and drop": (9, lambda history: history.add(NEW[1], NEW[0]), [*TEXTS[1:], NEW]),
    "forget": (100, lambda history: history.forget("a"), [TEXTS[0], TEXTS[2]]),
    "clear": (100, lambda history: history.clear(), []),
    "replace": (100, lambda history: history.replace([others()]), [NEW]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_interrupted_change_is_made_whole_or_not_at_all(name):
    """Whatever the line at which Ctrl-C arrives."""
    max_tokens, change, result = CHANGES[name]
    lines, is_interrupted = 0, True
    while is_interrupted:
        history = DraftHistory(max_tokens)
        for tenant, tokens in TEXTS:
            history.add(tokens, tenant)
        HistoryOfRows(history, 1, 1, 64).successors(
            0, 2, torch.device("cpu")
        )  # makes a table, and knows the vocabulary
        is_interrupted = interrupted_after(lines, lambda: change(history))  # noqa: B023
        found = history.texts()
        assert found in (TEXTS, result)
        assert len(history) == sum(len(tokens) for _, tokens in found)
        if not found:  # a model with another vocabulary may come, and has nothing to learn from
            table = HistoryOfRows(history, 1, 1, 32).successors(0, 2, torch.device("cpu"))
            assert (table.keys == -1).all()
        for tenant in ("", "a", "b") if found else ():
            part = history.for_tenant(tenant) if tenant else history
            with HistoryOfRows(part, 1, 1, 64).reading(0) as index:
                own = [[*tokens, SEPARATOR] for other, tokens in found if other == tenant]
                assert index.tokens.tolist() == sum(own, [])
        history.add(NEW[1], NEW[0])
        assert history.texts().count(NEW) == 1 and len(history) <= max_tokens
        lines += 1
    assert lines > 5


def test_a_copy_goes_its_own_way():
    history = DraftHistory(max_tokens=50)
    history.add([1, 2, 3], tenant="a")
    copied = copy.deepcopy(history)
    history.add([4, 5])
    assert copied.texts() == [("a", [1, 2, 3])] and copied.max_tokens == 50


def test_replacing_takes_what_the_others_hold():
    ours, theirs = DraftHistory(), DraftHistory()
    ours.add([1, 2, 3])
    theirs.add([4])
    ours.replace([theirs, ours])
    assert texts_of(ours) == [("", [4]), ("", [1, 2, 3])]
    threads = [
        threading.Thread(target=lambda pair=pair: [pair[0].replace(pair) for _ in range(50)], daemon=True)
        for pair in ((ours, theirs), (theirs, ours))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_many_texts_come_and_go():
    history = DraftHistory(max_tokens=50)
    kept = []
    for number in range(300):
        tokens = [number, *range(number % 13)]
        history.add(tokens, tenant="ab"[number % 2])
        kept.append(("ab"[number % 2], tokens))
        while sum(len(tokens) for _, tokens in kept) > 50:
            kept.pop(0)
    assert texts_of(history) == kept
    with history._reading("a") as index:
        starts, lengths = index.matches([298, 0], limit=5)
        assert index.continuations(starts[:1], 2, repeats=False).tolist() == [[1, 2]] and lengths[0] == 2


@pytest.mark.parametrize("bad", [dict(max_tokens=0), dict(max_tokens=2.5)])
def test_a_bad_bound_is_refused(bad):
    with pytest.raises(ValueError, match="max_tokens"):
        DraftHistory(**bad)


def test_bad_tokens_are_refused():
    history = DraftHistory(np.int64(10))
    for tokens in ([1, -1], ["a"], [1.5], [5, 2**31], [True], [None], torch.tensor([0.5])):
        with pytest.raises(ValueError, match="token_ids"):
            history.add(tokens)
    assert len(history) == 0
    for tokens in (np.array([1, 2]), torch.tensor([3], dtype=torch.uint8), range(4, 6), (6,), []):
        history.add(tokens)
    assert [tokens for _, tokens in texts_of(history)] == [[1, 2], [3], [4, 5], [6]]


# ---------------------------------------------------------------------- in calls


def test_a_second_call_drafts_from_the_first_one():
    model, history = speculating(), DraftHistory()
    first = model.generate(prompt(), draft_history=history, **OPTIONS)
    assert texts_of(history) == [("", first.sequences[0].tolist())]
    second = model.generate(prompt(), draft_history=history, **OPTIONS)
    assert torch.equal(first.sequences, second.sequences) and len(history) == first.sequences.shape[1]
    assert len(second.spec_states[0]) < len(first.spec_states[0])
    assert second.spec_states.acceptance_by_source["history"] > 0.5
    alone = model.generate(prompt(), **OPTIONS)
    assert len(alone.spec_states[0]) == len(first.spec_states[0])  # nothing outlives a call by itself


def test_a_seeded_answer_is_used_at_once():
    model, history = speculating(), DraftHistory()
    answer = model.generate(prompt(), max_new_tokens=24, do_sample=False)[0]
    history.add(answer)
    out = model.generate(prompt(), draft_history=history, **OPTIONS)
    assert out.spec_states[0].mean_tokens_per_forward > 6


def test_a_history_given_to_enable_serves_every_speculative_call():
    model, history = tiny("llama"), DraftHistory()
    hf_specstate.enable(model, draft_history=history)
    model.generate(prompt(), max_new_tokens=8, do_sample=False)
    assert len(history) == 0  # an ordinary call
    model.generate(prompt(), **OPTIONS)
    size = len(history)
    assert size > 0
    model.generate(prompt(seed=9), draft_history=None, **OPTIONS)
    assert len(history) == size
    hf_specstate.enable(hf_specstate.disable(model))
    model.generate(prompt(seed=9), **OPTIONS)
    assert len(history) == size


def test_an_assistant_is_joined_by_the_history():
    model, history = speculating(), DraftHistory()
    draft = tiny("llama", seed=5)  # never right
    history.add(model.generate(prompt(), max_new_tokens=24, do_sample=False)[0])
    out = model.generate(prompt(), assistant_model=draft, draft_history=history, **OPTIONS)
    assert out.spec_states.accepted_by_source["history"] > 15


def test_an_assistant_extends_what_the_history_is_sure_of():
    """It runs over it once, and drafts from its end; the rest of the record is as ever."""
    plain, history = tiny("llama"), DraftHistory()
    answer = plain.generate(prompt(), max_new_tokens=48, do_sample=False)[0]
    history.add(answer[:-16])
    model, draft, widths = speculating(), noisy_copy(plain, noise=0.02), []
    draft.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    options = dict(max_new_tokens=48, do_sample=False, return_spec_states=True, assistant_model=draft)
    options["spec_config"] = dict(max_nodes=12, strict=True)
    out = model.generate(prompt(), draft_history=history, **options)
    assert torch.equal(out.sequences[0], answer)
    rounds = out.spec_states[0].rounds
    extended = [r for r in rounds if {"history", "assistant"} <= set(r.sources)]
    # what the assistant added follows what was known, and some of it was accepted
    drafted = [[node for node, source in enumerate(r.sources) if source == "assistant"] for r in extended]
    behind = [r for r, nodes in zip(extended, drafted, strict=True) if all(r.parents[node] >= 0 for node in nodes)]
    assert any(r.sources[node] == "assistant" for r in behind for node in r.accepted)
    assert max(widths[1:]) > 4
    assert "" not in {source for r in rounds for source in r.sources}


def test_nothing_crosses_between_tenants():
    model, history = speculating(), DraftHistory()
    fresh = model.generate(prompt(), **OPTIONS).spec_states
    model.generate(prompt(), draft_history=history.for_tenant("a"), **OPTIONS)
    theirs = model.generate(prompt(), draft_history=history.for_tenant("b"), **OPTIONS).spec_states
    nobody = model.generate(prompt(), draft_history=history, **OPTIONS).spec_states
    ours = model.generate(prompt(), draft_history=history.for_tenant("a"), **OPTIONS).spec_states
    for states in (theirs, nobody):
        assert [r.token_ids for r in states[0]] == [r.token_ids for r in fresh[0]]
    assert len(ours[0]) < len(fresh[0])
    both = torch.cat([prompt(), prompt()])
    rows = [history.for_tenant("a"), history.for_tenant("c")]
    mine, other = model.generate(both, draft_history=rows, **OPTIONS).spec_states
    assert mine.acceptance_by_source["history"] > other.acceptance_by_source.get("history", 0.0)
    assert [name for name, _ in texts_of(history)] == ["a", "b", "", "c"]


def test_unsuitable_histories_are_refused_before_anything_runs():
    model = speculating()
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward was made"))
    for bad, word in (("text", "str"), ([], "0 entries"), ([DraftHistory()] * 2, "2 entries")):
        with pytest.raises(ValueError, match=word):
            model.generate(prompt(), draft_history=bad, **OPTIONS)
    with pytest.raises(ValueError, match="str"):
        hf_specstate.enable(model, draft_history="text")
    foreign = DraftHistory()
    foreign.add([10**6])
    with pytest.raises(ValueError, match="vocabulary"):
        model.generate(prompt(), draft_history=foreign, **OPTIONS)


def test_a_history_stays_with_its_vocabulary():
    history = DraftHistory()
    speculating().generate(prompt(), draft_history=history, **OPTIONS)
    with pytest.raises(ValueError, match="vocabulary"):
        hf_specstate.enable(tiny("llama", vocab_size=200)).generate(prompt(), draft_history=history, **OPTIONS)


def test_threads_share_a_history():
    model, history, failures = speculating(), DraftHistory(max_tokens=300), []
    want = {seed: model.generate(prompt(seed=seed), max_new_tokens=24, do_sample=False) for seed in range(8)}

    def work(seeds):
        try:
            for seed in seeds:
                got = model.generate(prompt(seed=seed), draft_history=history, max_new_tokens=24, do_sample=False)
                assert torch.equal(got, want[seed])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=([*range(8)] * 2,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and 0 < len(history) <= 300


# ---------------------------------------------------------------------- files


def test_a_file_gives_back_the_texts(tmp_path):
    history = DraftHistory(max_tokens=77, tokenizer=byte_tokenizer())
    history.add([1, 2, 3], tenant="a\u2028")
    history.add([4, 5])
    history.save(tmp_path / "history")
    loaded = DraftHistory.load(tmp_path / "history", tokenizer=byte_tokenizer())
    assert texts_of(loaded) == texts_of(history) and loaded.max_tokens == 77
    assert texts_of(DraftHistory.load(tmp_path / "history")) == texts_of(history)
    DraftHistory().save(tmp_path / "empty")
    assert len(DraftHistory.load(tmp_path / "empty")) == 0


def test_another_tokenizer_is_refused_by_name(tmp_path):
    history = DraftHistory(tokenizer=byte_tokenizer())
    history.save(tmp_path / "history")
    other = byte_tokenizer()
    other.add_tokens(["<more>"])
    with pytest.raises(ValueError, match="history holds the tokens of another tokenizer"):
        DraftHistory.load(tmp_path / "history", tokenizer=other)
    with pytest.raises(ValueError, match="another tokenizer"):
        DraftHistory(tokenizer=other).merge(history)


def test_damage_and_other_files_are_refused_by_name(tmp_path):
    history, path = DraftHistory(), tmp_path / "mine"
    history.add(range(40), tenant="a")
    data = history.to_bytes()
    for place in range(0, len(data), 3):
        flipped = bytearray(data)
        flipped[place] ^= 0x04
        for damaged in (bytes(flipped), data[:place]):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="mine"):
                DraftHistory.load(path)
    path.write_bytes(data.replace(b'"version":"1"', b'"version":"9"'))
    with pytest.raises(ValueError, match="mine was written by a newer version"):
        DraftHistory.load(path)
    hf_specstate.SpecStates().save(path)
    with pytest.raises(ValueError, match="mine holds no draft history"):
        DraftHistory.load(path)


def test_merging_adds_what_is_missing():
    ours, theirs = DraftHistory(), DraftHistory()
    ours.add([1, 2])
    theirs.add([1, 2])
    theirs.add([3], tenant="a")
    ours.merge(theirs)
    assert texts_of(ours) == [("", [1, 2]), ("a", [3])] and texts_of(theirs) == [("", [1, 2]), ("a", [3])]
