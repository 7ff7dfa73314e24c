"""Placing a configuration that does not run yet, and previewing the move to it."""

from __future__ import annotations

import pytest

from ray_etc.planners.expected import expected_layouts
from ray_etc.planners.layout import TensorSpec
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.placement import known_tensors, place, preview

TENSORS = [
    TensorSpec(kind, f"layer{layer}", (8, 8), "float32", 4, split_dim=0, layer=layer)
    for kind in ("param", "exp_avg")
    for layer in range(4)
]


@pytest.mark.parametrize("zero", [True, False])
def test_tensors_keep_their_order_however_ranks_list_them(zero: bool) -> None:
    layouts = expected_layouts(
        TENSORS, ParallelConfig(pipeline_parallel=2, data_parallel=2, distributed_optimizer=zero)
    )
    known = known_tensors(layouts)
    for kind in ("param", "exp_avg"):
        assert [tensor for tensor in known if tensor.kind == kind] == [t for t in TENSORS if t.kind == kind]


def test_preview_tp2_to_tp2_dp2_keeps_what_is_in_place() -> None:
    held = dict(enumerate(expected_layouts(TENSORS, ParallelConfig(tensor_parallel=2))))
    nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    plan = preview(held, ParallelConfig(tensor_parallel=2, data_parallel=2), nodes, nodes)
    plan.check()
    weights = 4 * 8 * 8 * 4
    assert (
        plan.nbytes_wire == plan.nbytes_lower_bound == weights + weights // 2
    )  # new replicas' weights, half the moments


def test_place_puts_a_tensor_group_on_one_node() -> None:
    nodes = {0: "a", 1: "b", 2: "b", 3: "a"}
    slots = place(TENSORS, {}, ParallelConfig(tensor_parallel=2, data_parallel=2), nodes).slot_of_rank
    assert {frozenset(nodes[slot] for slot in slots[:2]), frozenset(nodes[slot] for slot in slots[2:])} == {
        frozenset("a"),
        frozenset("b"),
    }


def test_place_puts_experts_that_fill_a_node_on_one() -> None:
    """Although each rank would find more of its state on the other node."""
    experts = [TensorSpec("param", "experts", (4, 8, 8), "float32", 4, split_dim=1, layer=0, expert_dim=0)]
    parallel = ParallelConfig(data_parallel=8, expert_parallel=4)
    nodes = dict(enumerate("aabbaabb"))
    slots = place(experts, dict(enumerate(expected_layouts(experts, parallel))), parallel, nodes).slot_of_rank
    assert {len({nodes[slot] for slot in group}) for group in (slots[:4], slots[4:])} == {1}
