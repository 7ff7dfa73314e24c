"""The picture of a plan: what its cells and bars say, and that it needs nothing from elsewhere."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from small_models import config, layouts_on, small_model

from ray_etc.planners import picture as module
from ray_etc.planners.facts import facts_of
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.picture import node_matrix, picture
from ray_etc.planners.plan import MigrationPlan
from ray_etc.planners.words import size

MODEL = small_model()


def plan_over(nodes: dict[int, str]) -> MigrationPlan:
    old, new = config(dp=3, zero=True), config(dp=len(nodes), zero=True)
    return make_plan(layouts_on(range(3), old, MODEL), layouts_on(range(len(nodes)), new, MODEL), nodes)


def titles(plan: MigrationPlan) -> list[str]:
    """What hovering shows, in the order of the picture."""
    root = ElementTree.fromstring(picture(plan, facts_of(plan)))
    return [title.text or "" for title in root.iter("title")]


def test_matrix_adds_up_in_any_number_of_cells() -> None:
    plan = plan_over({slot: f"n{slot}" for slot in range(7)})
    facts = facts_of(plan)
    whole, edges = node_matrix(plan, facts, 64)
    assert edges.tolist() == list(range(8))
    assert whole.sum(axis=1).tolist() == facts.node_sent.tolist()
    assert whole.sum(axis=0).tolist() == facts.node_received.tolist()
    coarse, edges = node_matrix(plan, facts, 3)
    assert edges.tolist() == [0, 3, 6, 7]
    rows = np.add.reduceat(whole, edges[:-1], axis=0)
    assert coarse.tolist() == np.add.reduceat(rows, edges[:-1], axis=1).tolist()


def test_every_cell_and_bar_says_its_bytes() -> None:
    plan = plan_over({slot: f"n{slot // 2}" for slot in range(6)})
    facts = facts_of(plan)
    nbytes, _ = node_matrix(plan, facts, 64)
    shown = titles(plan)
    for src, dst in np.argwhere(nbytes).tolist():
        assert f"n{src} to n{dst}: {size(int(nbytes[src, dst]))}" in shown
    for rank, sent in enumerate(facts.sent.tolist()):
        assert (f"slot {rank} sends {size(sent)}" in shown) == (sent > 0)


def test_many_nodes_and_slots_share_cells_and_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CELLS", 2)
    monkeypatch.setattr(module, "BARS", 3)
    plan = plan_over({slot: f"n{slot}" for slot in range(7)})
    shown = titles(plan)
    assert any(words.startswith("n0 - n3 to n4 - n6: ") for words in shown)
    assert f"slot 6 receives {size(int(facts_of(plan).received[6]))}" in shown


def test_names_are_escaped_and_nothing_is_loaded() -> None:
    text = picture(plan := plan_over({slot: f"<n&{slot}>" for slot in range(4)}), facts_of(plan))
    assert "<n&" not in text
    assert "http" not in text
    assert "script" not in text


def test_no_picture_of_nothing() -> None:
    layouts = layouts_on(range(2), config(tp=2), MODEL)
    plan = make_plan(layouts, layouts, {0: "a", 1: "a"})
    assert picture(plan, facts_of(plan)) == ""
