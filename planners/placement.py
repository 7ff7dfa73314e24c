"""Where the ranks of a configuration that does not run yet should go, and what moving to it would take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import gcd

import numpy as np

from ray_etc.planners.assign import Assignment, assign
from ray_etc.planners.expected import expected_table
from ray_etc.planners.layout import RankLayout, TensorSpec
from ray_etc.planners.links import Links
from ray_etc.planners.match import match
from ray_etc.planners.memory import STAGING_NBYTES
from ray_etc.planners.migrate import plan_moves
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.plan import MigrationPlan
from ray_etc.planners.table import LayoutTable


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
    """Give each rank of `parallel` a slot, so that most of what it is expected to hold is in place already.

    `tensors` are the logical tensors of the state, `held[slot]` what each slot holds now, and `nodes` the node of
    each slot that may be used.
    """
    slots = sorted(nodes)
    there = LayoutTable.of([tuple(held.get(slot, ())) for slot in slots])
    # What only slots that leave hold is in nobody's place.
    found = match(there, expected_table(tensors, parallel), all_of_it=False)
    return assign(found.overlap(), slots, nodes, parallel.tensor_groups(_node_size(nodes)))


def _node_size(nodes: Mapping[int, str]) -> int:
    """Ranks that fill a node; where nodes differ, the most that fill each of them without a rest."""
    return gcd(*Counter(nodes.values()).values())


def preview(
    held: Mapping[int, RankLayout], parallel: ParallelConfig, usable: Mapping[int, str], nodes: Mapping[int, str]
) -> MigrationPlan:
    """The plan for moving to `parallel`, from layouts that no rank has reported yet: an estimate."""
    tensors = known_tensors(list(held.values()))
    slots = sorted(held.keys() | usable.keys())
    return plan_resize(
        LayoutTable.of([tuple(held.get(slot, ())) for slot in slots]),
        expected_table(tensors, parallel),
        parallel.tensor_groups(_node_size(usable)),
        slots,
        {**usable, **nodes},
        usable=usable.keys(),
        endangered=held.keys() - usable.keys(),
    )


def plan_resize(
    held: LayoutTable,
    wanted: LayoutTable,
    groups: Sequence[Sequence[int]],
    slots: Sequence[int],
    nodes: Mapping[int, str],
    *,
    usable: Collection[int],
    staging_nbytes: int = STAGING_NBYTES,
    endangered: Collection[int] = (),
    links: Links | None = None,
) -> MigrationPlan:
    """Place new ranks and plan their moves: layouts, assignment, sources and rounds at once, for any number of ranks.

    Rank i of `held` is what `slots[i]` (rising) holds, rank j of `wanted` what new rank j shall hold, and `groups` are
    new ranks to keep inside a node. New ranks go on `usable` slots only. The rest is as in `make_plan`; the lower bound
    is under the constraints of the placement. The plan is not yet checked.
    """
    found = match(held, wanted)
    columns = np.array([column for column, slot in enumerate(slots) if slot in usable], dtype=np.int64)
    free = [slots[column] for column in columns]
    chosen = assign(found.overlap().on(columns), free, nodes, groups)
    return plan_moves(
        found,
        np.searchsorted(slots, chosen.slot_of_rank),
        slots,
        [nodes[slot] for slot in slots],
        nbytes_lower_bound=found.nbytes_needed - chosen.nbytes_kept_bound,
        staging_nbytes=staging_nbytes,
        endangered=[column for column, slot in enumerate(slots) if slot in endangered],
        links=links,
    )
