"""What rounds cost, as measured from rounds."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_specstate.scheduling import RoundCost
from hf_specstate.scheduling.cost import rising

TRUE = {1: 1.0, 2: 1.7, 4: 1.9, 8: 1.75, 16: 2.1}  # a step at two, then nearly flat, and not even rising


def learned(rounds: int = 100, noise: float = 0.05, seed: int = 0, outliers: float = 0.0) -> RoundCost:
    luck, cost = random.Random(seed), RoundCost()
    for number in range(rounds):
        width = list(TRUE)[number % len(TRUE)]
        seconds = TRUE[width] * luck.lognormvariate(0, noise)
        cost.observe(width, seconds * (20 if luck.random() < outliers else 1), 0.1)
    return cost


def test_knows_nothing_at_first():
    assert RoundCost().curve(4) == [0.0] * 5 and not RoundCost().measured


def test_learns_a_curve_that_is_no_line():
    curve = learned().curve(20)
    assert curve[1] == pytest.approx(1.0, rel=0.1)
    assert curve[2] == pytest.approx(1.7, rel=0.1)
    assert curve[6] == pytest.approx(1.83, rel=0.1), "between two that contradict each other"
    assert curve[16] == pytest.approx(2.1, rel=0.1)
    assert curve[20] > curve[16], "nothing is known there; it is not free"


@pytest.mark.parametrize("seed", range(5))
def test_never_falls(seed):
    curve = learned(rounds=12, noise=0.5, seed=seed).curve(32)[1:]
    assert curve == sorted(curve)


@pytest.mark.parametrize("seed", range(5))
def test_outliers_count_little(seed):
    curve = learned(outliers=0.1, seed=seed).curve(16)
    for width in (1, 2, 16):
        assert curve[width] == pytest.approx(TRUE[width], rel=0.25)


def test_a_first_forward_that_was_slow_is_not_believed_for_long():
    cost = RoundCost()
    for _ in range(5):
        cost.observe(1, 1.0, 0.0)
    cost.observe(16, 50.0, 0.0)
    assert cost.age(16) == float("inf"), "one sample is none"
    cost.observe(16, 2.0, 0.0)
    assert cost.curve(16)[16] < 3


def test_follows_a_machine_that_changes_its_speed():
    cost = learned(noise=0.0)
    for _ in range(15):  # seen at one width only
        cost.observe(4, 3 * TRUE[4], 0.1)
    assert cost.measured[4] == pytest.approx(3 * TRUE[4], rel=0.1)
    assert 1.5 < cost.measured[1] < 3.5, "it is the machine, so the others are slower too"


def test_one_hiccup_is_the_business_of_its_width_alone():
    cost = learned(noise=0.0)
    before = cost.measured
    cost.observe(1, 5.0, 0.1)
    for _ in range(3):
        cost.observe(1, 1.0, 0.1)
    assert cost.measured[16] == pytest.approx(before[16], rel=0.02)


def test_first_forwards_that_took_impossibly_long_are_no_measurement():
    cost = RoundCost()
    for _ in range(3):
        cost.observe(1, 1.0, 0.0)
    cost.observe(16, 1000.0, 0.0)
    assert 16 not in cost.measured and cost.curve(16)[16] == pytest.approx(16.0)
    cost.observe(8, 6.0, 0.0)
    assert cost.measured[8] == pytest.approx(6.0) and set(cost.remembered) == {1}


def test_age():
    cost = RoundCost()
    for width in (1, 1, 16, 16, 1, 1, 1):
        cost.observe(width, 1.0, 0.0)
    assert cost.age(1) == 0 and cost.age(16) == 3 and cost.age(7) == float("inf")


def test_overhead_follows():
    cost = RoundCost()
    for _ in range(50):
        cost.observe(1, 1.0, 0.2)
    cost.observe(1, 1.0, 100.0)
    assert cost.overhead < 3
    for _ in range(200):
        cost.observe(1, 1.0, 0.1)
    assert cost.overhead == pytest.approx(0.1, rel=0.2)


def test_goes_on_from_an_earlier_generation():
    first = learned()
    second = RoundCost(first.measured, first.overhead)
    assert second.curve(16) == pytest.approx(first.curve(16), rel=0.15)
    assert second.age(4) < float("inf")


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12))
def test_rising_is_isotonic_regression(values):
    fitted = rising(values, [1.0] * len(values))
    assert fitted == sorted(fitted) and sum(fitted) == pytest.approx(sum(values))
    # no rising sequence is nearer: moving any block up or down makes it worse
    error = sum((a - b) ** 2 for a, b in zip(fitted, values, strict=True))
    for level in (0.1, 1.0, 10.0):
        for cut in range(len(values) + 1):
            other = [min(v, level) for v in fitted[:cut]] + [max(v, level) for v in fitted[cut:]]
            assert sum((a - b) ** 2 for a, b in zip(other, values, strict=True)) >= error - 1e-9
