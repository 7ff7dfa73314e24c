"""Working weights that a rank can cast from its own main weights are not moved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_models import carry_out, config, configs_up_to, layouts_on, name_of, nodes_of, small_model

from ray_etc.planners.errors import PlanError
from ray_etc.planners.layout import TensorSpec
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.moves import CAST, MoveTable
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.plan import MigrationPlan

PLAIN = small_model()


def mixed() -> list[TensorSpec]:
    """The small model with bf16 weights that are the rounded main weights."""
    return [replace(t, derived_from="main_param") if t.kind == "param" else t for t in PLAIN]


def plan_of(tensors: list[TensorSpec], before: ParallelConfig, after: ParallelConfig) -> MigrationPlan:
    slots = range(max(before.world_size, after.world_size))
    source = layouts_on(range(before.world_size), before, tensors)
    target = layouts_on(range(after.world_size), after, tensors)
    plan = make_plan(source, target, nodes_of(slots), staging_nbytes=2**20)
    plan.check()
    carry_out(plan)
    return plan


@pytest.mark.parametrize("after", configs_up_to(4), ids=name_of)
@pytest.mark.parametrize("before", configs_up_to(4), ids=name_of)
def test_every_small_transition(before: ParallelConfig, after: ParallelConfig) -> None:
    plan, without = plan_of(mixed(), before, after), plan_of(PLAIN, before, after)
    assert without.nbytes_cast == 0
    assert plan.nbytes_wire + plan.nbytes_cast == without.nbytes_wire
    assert plan.nbytes_local == without.nbytes_local
    if not after.distributed_optimizer or after.data_parallel == 1:
        # Every new rank has all the main weights of its weights: no weight is sent.
        moved = {plan.target[move.dst_rank][move.dst_shard].tensor.kind for moves in plan.rounds for move in moves}
        assert "param" not in moved


def test_tp2_to_dp8_zero_moves_weights() -> None:
    """Each of eight replicas has an eighth of the main weights: too little to cut the stream to all of them."""
    plan = plan_of(mixed(), config(tp=2), config(dp=8, zero=True))
    assert plan.nbytes_cast == 0


def test_what_is_cast_is_said() -> None:
    assert "cast, not moved" in plan_of(mixed(), config(tp=2), config(pp=2)).explain()


@pytest.fixture
def plan() -> MigrationPlan:
    made = plan_of(mixed(), config(tp=2), config(pp=2))
    assert made.casts
    return made


def changed(plan: MigrationPlan, column: str, value: int) -> MigrationPlan:
    """The plan with another value in its first cast."""
    columns = {name: getattr(plan.moves, name).copy() for name in MoveTable.__dataclass_fields__}
    columns[column][np.flatnonzero(plan.moves.round == CAST)[0]] = value
    return replace(plan, moves=MoveTable(**columns))


def test_dropped_cast(plan: MigrationPlan) -> None:
    kept = np.flatnonzero(plan.moves.round != CAST)
    with pytest.raises(PlanError, match=r"never written"):
        replace(plan, moves=plan.moves[kept], nbytes_lower_bound=0).check()


def test_cast_of_another_ranks_weights(plan: MigrationPlan) -> None:
    first = int(np.flatnonzero(plan.moves.round == CAST)[0])
    row = int(plan.moves.source_row[first])
    table = plan.target
    alike = (table.family == table.family[row]) & (table.rank != table.rank[row])
    others = np.flatnonzero(alike).tolist() or [other for other in range(len(table.rank)) if other != row]
    with pytest.raises(PlanError, match=r"cast is from another rank|reads another tensor|outside"):
        changed(plan, "source_row", others[0]).check()


def test_cast_of_another_tensor(plan: MigrationPlan) -> None:
    first = int(np.flatnonzero(plan.moves.round == CAST)[0])
    table = plan.target
    other = int(np.flatnonzero(table.family != table.family[plan.moves.source_row[first]])[0])
    with pytest.raises(PlanError, match="reads another tensor"):
        changed(plan, "source_row", other).check()


def test_cast_from_what_is_cast_itself(plan: MigrationPlan) -> None:
    bundles = tuple(
        replace(b, tensors=tuple(replace(t, derived_from="exp_avg_sq") for t in b.tensors))
        if b.master_family is not None
        else b
        for b in plan.bundles
    )
    with pytest.raises(PlanError, match="not derived from"):
        replace(plan, bundles=bundles).check()
