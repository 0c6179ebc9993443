"""Running acceptance: what drafts turn out to be worth."""

import random

import pytest

from eval.schedule_world import chain
from hf_specstate import TokenTree
from hf_specstate.scheduling import Acceptance


def play(acceptance: Acceptance, truth: float, rounds: int, confidence: float = 0.5, row: int = 0, seed: int = 0):
    """Drafts of one token, of which the share `truth` is accepted."""
    luck = random.Random(seed)
    for _ in range(rounds):
        acceptance.propose(row, chain([1], [confidence]))
        acceptance.observe(row, [1 if luck.random() < truth else 0])


def estimate(acceptance: Acceptance, confidence: float = 0.5, row: int = 0) -> float:
    return acceptance.estimate(row, chain([1], [confidence]))[0]


@pytest.mark.parametrize("confidence", [0.1, 0.5, 0.9])
def test_begins_with_what_the_drafter_says(confidence):
    assert estimate(Acceptance(), confidence) == pytest.approx(confidence)


@pytest.mark.parametrize("truth", [0.05, 0.3, 0.7, 0.95])
def test_comes_to_the_truth(truth):
    acceptance = Acceptance()
    play(acceptance, truth, rounds=300)
    assert estimate(acceptance) == pytest.approx(truth, abs=0.12)


def test_is_cautious_at_first():
    acceptance = Acceptance()
    play(acceptance, truth=1.0, rounds=1)
    assert 0.5 < estimate(acceptance) < 0.65, "one hit proves little"


def test_sources_are_apart_and_joint_ones_share_what_is_known():
    acceptance = Acceptance()
    for _ in range(60):
        good, bad = TokenTree([1], [-1], [0.0], ["good"], [0.5]), TokenTree([2], [-1], [0.0], ["bad"], [0.5])
        acceptance.propose(0, good)
        acceptance.propose(0, bad)
        acceptance.observe(0, [1])
    chances = [
        acceptance.estimate(0, TokenTree([1], [-1], [0.0], [source], [0.5]))[0]
        for source in ("good", "bad", "good+new", "new")
    ]
    good, bad, joint, new = chances
    assert good > 0.8 and bad < 0.2
    assert joint > 0.6, "`good` speaks for it, though the two were never seen together"
    assert new == pytest.approx(0.5)


def test_confidences_are_apart():
    acceptance = Acceptance()
    for _ in range(80):
        play(acceptance, truth=1.0, rounds=1, confidence=0.75)
        play(acceptance, truth=0.0, rounds=1, confidence=0.35)
    assert estimate(acceptance, 0.75) - 0.75 > estimate(acceptance, 0.35) - 0.35
    assert estimate(acceptance, 0.75) > 0.8 and estimate(acceptance, 0.35) < 0.2


def test_rows_differ_but_share_a_level():
    acceptance = Acceptance()
    for seed in range(40):
        play(acceptance, truth=1.0, rounds=1, row=0, seed=seed)
        play(acceptance, truth=0.0, rounds=1, row=1, seed=seed)
    assert estimate(acceptance, row=0) > 0.65 > 0.35 > estimate(acceptance, row=1)
    assert estimate(acceptance, row=2) == pytest.approx(0.5, abs=0.1), "a new row begins between them"


def test_forgets():
    acceptance = Acceptance()
    play(acceptance, truth=1.0, rounds=200)
    assert estimate(acceptance) > 0.9
    play(acceptance, truth=0.0, rounds=16)
    assert estimate(acceptance) < 0.4, "a text that changes is noticed soon"


def test_alternatives_share_one_position():
    tree = TokenTree([1, 2, 3], [-1, -1, -1], [0.0] * 3, ["any"] * 3, [0.9, 0.8, 0.7])
    assert sum(Acceptance().estimate(0, tree)) <= 1.0 + 1e-9


def test_what_is_not_verified_is_scored_by_the_text():
    """Shadow scoring: the text goes past the proposal one token a round, as it does when speculation is off."""
    acceptance = Acceptance()
    for start in range(0, 60, 3):
        acceptance.propose(0, chain([start, start + 1, 99], [0.5] * 3))
        for token in (start, start + 1, start + 2):
            acceptance.observe(0, [token])
    deep = acceptance.estimate(0, chain([1, 2, 3], [0.5] * 3))
    assert deep[0] > 0.7 and deep[1] > 0.55 > 0.5 > deep[2]
    first, _, third = acceptance.vector("draft", 3)
    assert first > 0.9 > 0.2 > third


def test_vector_of_something_new_is_flat_and_middling():
    vector = Acceptance().vector("new", 5)
    assert len(vector) == 5 and len(set(vector)) == 1 and 0.3 < vector[0] < 0.8


def test_vector_counts_positions_not_alternatives():
    """Of four alternatives one is right: the source is right."""
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.propose(0, TokenTree([1, 2, 3, 4], [-1] * 4, [0.0] * 4, ["wide"] * 4, [0.2] * 4))
        acceptance.observe(0, [3])
    assert acceptance.vector("wide", 1)[0] > 0.9
