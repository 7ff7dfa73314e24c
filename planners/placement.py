"""Where the ranks of a configuration that does not run yet should go, and what moving to it would take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray_etc.planners.assign import Assignment, assign
from ray_etc.planners.expected import expected_layouts
from ray_etc.planners.layout import RankLayout, TensorSpec
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.overlap import Overlap, overlap_nbytes
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.plan import MigrationPlan


def known_tensors(layouts: Sequence[RankLayout]) -> list[TensorSpec]:
    """Every logical tensor of a generation once, kind by kind, each in the order of the model's parameters.

    ZeRO-1 lists its optimizer state backwards, as its buckets run, so the order of the parameters decides for all.
    """
    tensors = {shard.tensor.key: shard.tensor for layout in layouts for shard in layout}
    parameters = {name: position for position, (kind, name) in enumerate(tensors) if kind == "param"}
    return sorted(tensors.values(), key=lambda tensor: (tensor.kind, parameters.get(tensor.name, len(parameters))))


def place(
    tensors: Sequence[TensorSpec], held: Mapping[int, RankLayout], parallel: ParallelConfig, nodes: Mapping[int, str]
) -> Assignment:
    """Give each rank of `parallel` a slot, on the fewest nodes, so that most of what it will hold is in place already.

    `tensors` are the logical tensors of the state, `held[slot]` what each slot holds now, and `nodes` the node of
    each slot that may be used.
    """
    slots = sorted(nodes)
    overlap = Overlap.from_dense(overlap_nbytes(held, expected_layouts(tensors, parallel), slots))
    return assign(overlap, slots, nodes, parallel.tensor_groups())


def preview(
    held: Mapping[int, RankLayout], parallel: ParallelConfig, usable: Mapping[int, str], nodes: Mapping[int, str]
) -> MigrationPlan:
    """The plan for moving to `parallel`, from layouts that no rank has reported yet: an estimate."""
    tensors = known_tensors(list(held.values()))
    slot_of_rank = place(tensors, held, parallel, usable).slot_of_rank
    target = dict(zip(slot_of_rank, expected_layouts(tensors, parallel), strict=True))
    return make_plan(held, target, {**usable, **nodes})
