"""When training is back to normal, and what the shadow costs, from the moments of steps alone."""

from __future__ import annotations

import pytest

from benchmarks.end_to_end_figures import Step, back_to_normal, largest_difference, of_all_ranks, shadow


def steps(seconds: list[float], start: float = 0.0) -> list[Step]:
    made = []
    for number, each in enumerate(seconds):
        made.append(Step(number, start, start + each, 1.0))
        start += each
    return made


def test_normal_from_the_first_of_two_normal_steps_in_a_row() -> None:
    got = back_to_normal(steps([4.0, 1.0, 2.0, 1.04, 1.0, *[1.0] * 15], start=100.5), paused_at=100.0)
    assert got["normal_step_s"] == 1.0
    assert got["steps_until_normal"] == 3
    assert got["normal_after_s"] == pytest.approx(0.5 + 4.0 + 1.0 + 2.0)
    assert got["first_steps_s"] == pytest.approx([4.0, 1.0, 2.0, 1.04, 1.0, *[1.0] * 5])


def test_too_few_steps_say_nothing_of_normal() -> None:
    got = back_to_normal(steps([1.0] * 10), paused_at=0.0)
    assert got["normal_step_s"] is got["steps_until_normal"] is got["normal_after_s"] is None


def test_shadow_is_compared_with_the_steps_before_it() -> None:
    got = shadow(steps([1.0, 3.0]), steps([2.2, 2.4]), {})
    assert got["shadow_slowdown"] == pytest.approx(0.15)
    assert got["shadow_s"] == pytest.approx(4.6)
    assert shadow([], steps([1.0]), {})["shadow_slowdown"] is None


def test_what_the_shadow_costs_is_told_by_the_stage_in_which_each_step_started() -> None:
    beside = steps([2.5, 2.0, 3.0, 2.25], start=50.0)
    got = shadow(steps([2.0] * 2), beside, {"prepare": 50.0, "start": 50.0, "import": 52.0, "build": 57.0})
    assert got["shadow_lost_s"] == pytest.approx({"start": 0.5, "import": 1.0, "build": 0.25})


def test_a_step_starts_and_ends_with_its_last_rank() -> None:
    ranks = [Step(3, 1.0, 5.0, 2.5, 0.25), Step(3, 2.0, 4.0, 2.5, 0.5)]
    assert of_all_ranks(ranks) == Step(3, 2.0, 5.0, 2.5, 0.5)


def test_losses_are_compared_where_both_have_them() -> None:
    assert largest_difference({1: 2.0, 2: 3.0, 9: 7.0}, {1: 2.25, 2: 3.0}) == 0.25
    assert largest_difference({9: 7.0}, {1: 2.25}) is None
