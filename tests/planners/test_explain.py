"""What a user reads before anything moves."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from small_models import config, layouts_on, nodes_of, small_model

from ray_etc.planners.facts import facts_of
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.plan import MigrationPlan
from ray_etc.planners.words import size

MODEL = small_model()


def plan_for(before_slots: int, after_slots: int) -> MigrationPlan:
    return make_plan(
        layouts_on(range(before_slots), config(tp=before_slots), MODEL),
        layouts_on(range(after_slots), config(tp=2, dp=after_slots // 2), MODEL),
        nodes_of(range(max(before_slots, after_slots))),
    )


def test_tp2_to_tp2_dp2_in_words() -> None:
    plan = plan_for(2, 4)
    text = plan.explain()
    assert "2 -> 4 ranks, 4 slots on 2 nodes" in text
    assert "the least possible" in text
    assert "node0 -> node1" in text
    assert "proven optimal" in text
    assert "rounds            2 of at most 512.0 MiB" in text
    assert all(kind in text for kind in ("param", "main_param", "exp_avg"))
    assert f"on the wire       {size(plan.nbytes_wire)}" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert text == plan_for(2, 4).explain() == str(plan)


def test_nothing_moves_in_words() -> None:
    text = plan_for(2, 2).explain()
    assert "0 B, the least possible" in text
    assert "busiest" not in text


def test_notebooks_get_a_table_with_names_escaped_and_a_picture() -> None:
    html = plan_for(2, 4)._repr_html_()
    assert html.startswith("<table>")
    assert "2 -&gt; 4 ranks" in html
    assert html.endswith("</svg>")
    assert plan_for(2, 2)._repr_html_().endswith("</table>")


@pytest.mark.parametrize(
    ("before", "endangered", "deadline_s", "words"),
    [
        (4, (2, 3), 10, "all of it fits into the 10 s of notice"),
        (4, (2, 3), 1e-9, "too short: what only leaving slots hold takes .* s of 1e-09 s"),
        (2, (), 1e-9, "too short: all of it takes .* s of 1e-09 s; no slot leaves"),
    ],
)
def test_deadlines_in_words(before: int, endangered: tuple[int, ...], deadline_s: float, words: str) -> None:
    plan = replace(plan_for(before, 6 - before), endangered=endangered)
    assert re.search(rf"^deadline +{words}$", plan.explain(deadline_s=deadline_s), re.MULTILINE)


def test_what_only_leaving_slots_hold_may_be_out_in_time() -> None:
    plan = replace(plan_for(2, 4), endangered=(1,))
    facts = facts_of(plan)
    notice_s = (facts.saved_s + facts.seconds.total) / 2
    assert "is out after" in plan.explain(deadline_s=notice_s)


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1024, 5 * 2**30, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 GiB",
        "3.0 TiB",
    ]
