"""Plans of families of tensors against plans of single tensors, and plans under every axis carried out element by
element."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_models import carry_out, nodes_of, small_model
from test_expected_meshes import model as expert_model

from ray_etc.planners.expected import expected_table
from ray_etc.planners.facts import PlanFacts, facts_of
from ray_etc.planners.intersect import ragged
from ray_etc.planners.layout import RankLayout, TensorSpec
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.placement import plan_resize
from ray_etc.planners.plan import MigrationPlan
from ray_etc.planners.rank_plan import Move
from ray_etc.planners.table import LayoutTable

LAYERS = 4
DENSE = small_model(layers=LAYERS)
EXPERTS = expert_model(LAYERS, dense_layers=(0,))
PER_NODE = 4


def exploded(table: LayoutTable) -> LayoutTable:
    """The same layout with a family for each tensor: a row becomes one row a tensor, in the order of shards."""
    row, place = ragged(table.family_sizes[table.family])
    first = np.cumsum(table.family_sizes) - table.family_sizes
    return LayoutTable(
        table.world_size,
        tuple((tensor,) for tensors in table.families for tensor in tensors),
        first[table.family[row]] + place,
        table.rank[row],
        table.offsets[row],
        table.lengths[row],
    )


def resize(held: LayoutTable, wanted: LayoutTable, new: ParallelConfig, staging_nbytes: int) -> MigrationPlan:
    """The checked plan from what slots hold, on as many slots as there are ranks in the larger generation."""
    slots = range(held.world_size)
    plan = plan_resize(
        held,
        wanted,
        new.tensor_groups(),
        slots,
        nodes_of(slots, PER_NODE),
        usable=slots,
        staging_nbytes=staging_nbytes,
    )
    plan.check()
    return plan


def on_slots(tensors: list[TensorSpec], parallel: ParallelConfig, slot_count: int) -> LayoutTable:
    return expected_table(tensors, parallel).on(np.arange(parallel.world_size), slot_count)


def written(plan: MigrationPlan) -> dict[tuple[int, tuple[str, str]], list[int]]:
    """The numbers of the elements that moves write: by rank and tensor, rising."""
    found: dict[tuple[int, tuple[str, str]], list[int]] = {}
    for move in (*plan.local, *(move for moves in plan.rounds for move in moves)):
        tensor = plan.target[move.dst_rank][move.dst_shard].tensor
        found.setdefault((move.dst_rank, tensor.key), []).extend(elements(tensor, move))
    return {key: sorted(numbers) for key, numbers in found.items()}


def elements(tensor: TensorSpec, move: Move) -> list[int]:
    box = tuple(slice(o, o + n) for o, n in zip(move.box.offsets, move.box.lengths, strict=True))
    return np.arange(int(np.prod(tensor.shape, dtype=np.int64))).reshape(tensor.shape)[box].ravel().tolist()


TRANSITIONS = [
    (DENSE, ParallelConfig(2, 2, 2), ParallelConfig(2, 1, 3)),
    (DENSE, ParallelConfig(1, 2, 4), ParallelConfig(2, 4, 1)),
    (DENSE, ParallelConfig(4, 1, 2, distributed_optimizer=False), ParallelConfig(1, 4, 2)),
    (DENSE, ParallelConfig(2, 1, 3, fully_sharded=True), ParallelConfig(1, 2, 4, virtual_pipeline=2)),
    (EXPERTS, ParallelConfig(1, 2, 4, expert_parallel=4), ParallelConfig(1, 2, 2, expert_parallel=2)),
    (EXPERTS, ParallelConfig(2, 1, 4, expert_parallel=2), ParallelConfig(1, 2, 4, expert_parallel=4)),
]


@pytest.mark.parametrize(("tensors", "old", "new"), TRANSITIONS, ids=lambda one: str(one) if len(str(one)) < 99 else "")
def test_families_make_the_plan_of_single_tensors(
    tensors: list[TensorSpec], old: ParallelConfig, new: ParallelConfig
) -> None:
    slot_count = max(old.world_size, new.world_size)
    held, wanted = on_slots(tensors, old, slot_count), expected_table(tensors, new)
    assert len(held.families) < len(exploded(held).families)
    assert list(held) == list(exploded(held))
    staging_nbytes = 2048
    plan = resize(held, wanted, new, staging_nbytes)
    single = resize(exploded(held), exploded(wanted), new, staging_nbytes)
    assert len(plan.moves) < len(single.moves)
    carry_out(plan)
    carry_out(single)
    assert list(plan.target) == list(single.target)
    assert written(plan) == written(single)
    facts, of_single = facts_of(plan), facts_of(single)
    assert facts.nbytes_moved == of_single.nbytes_moved
    assert facts.nbytes_lower_bound == of_single.nbytes_lower_bound
    np.testing.assert_array_equal(facts.received, of_single.received)
    largest_unit = max(sum(t.itemsize for t in tensors) for tensors in held.families) * max(map(len_of_row, tensors))
    assert abs(busiest_sender(facts) - busiest_sender(of_single)) <= 2 * largest_unit


def len_of_row(tensor: TensorSpec) -> int:
    return int(np.prod(tensor.shape[1:], dtype=np.int64))


def busiest_sender(facts: PlanFacts) -> int:
    return int(facts.sent.max(initial=0))


SIZES = [1, 2, 3, 4]


@st.composite
def configs(draw: st.DrawFn, *, experts: bool) -> ParallelConfig:
    """Any configuration of at most 16 ranks."""
    tp, pp, dp, cp = draw(st.sampled_from([axes for axes in product(SIZES, [1, 2, 4], SIZES, [1, 2]) if fits(axes)]))
    ep, etp = (draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([None, 1, 2]))) if experts else (1, None)
    of_experts = ep * (tp if etp is None else etp)
    assume((tp * dp * cp) % of_experts == 0)
    fsdp = draw(st.booleans())
    parallel = ParallelConfig(
        tp,
        pp,
        dp,
        context_parallel=cp,
        expert_parallel=ep,
        expert_tensor_parallel=etp,
        virtual_pipeline=draw(st.sampled_from([1, 2])) if pp == 2 else 1,
        fully_sharded=fsdp,
        distributed_optimizer=fsdp or draw(st.booleans()),
    )
    if pp == 2 and draw(st.booleans()):
        uneven = (1, LAYERS - 1) if parallel.virtual_pipeline == 1 else (1, 2, 0, 1)
        return replace(parallel, pipeline_layers=uneven)
    return parallel


def fits(axes: tuple[int, ...]) -> bool:
    return int(np.prod(axes)) <= 16


def there_and_back(tensors: list[TensorSpec], old: ParallelConfig, new: ParallelConfig, staging_nbytes: int) -> None:
    """Carry out a resize and the one back; the second starts on the slots where the first put its ranks."""
    held = on_slots(tensors, old, max(old.world_size, new.world_size))
    there = resize(held, expected_table(tensors, new), new, staging_nbytes)
    carry_out(there)
    back = resize(there.target, expected_table(tensors, old), old, staging_nbytes)
    carry_out(back)
    assert sorted(map(as_counts, back.target)) == sorted(map(as_counts, held))


def as_counts(layout: RankLayout) -> list[str]:
    return sorted(map(str, Counter(layout).items()))


@settings(deadline=None, max_examples=8)
@given(configs(experts=False), configs(experts=False), st.sampled_from([512, 4096, 2**20]))
def test_dense_there_and_back(old: ParallelConfig, new: ParallelConfig, staging_nbytes: int) -> None:
    there_and_back(DENSE, old, new, staging_nbytes)


@settings(deadline=None, max_examples=8)
@given(configs(experts=True), configs(experts=True), st.sampled_from([512, 4096, 2**20]))
def test_experts_there_and_back(old: ParallelConfig, new: ParallelConfig, staging_nbytes: int) -> None:
    there_and_back(EXPERTS, old, new, staging_nbytes)
