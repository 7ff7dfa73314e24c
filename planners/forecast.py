"""A forecast: what a resize would move, from expected layouts, in seconds for thousands of ranks.

The plan that a resize carries out is `make_plan`'s, from the layouts that ranks report. The forecast follows the same
rules on compressed layouts, so the bytes of each link class are those of that plan for the same placement; the load
of senders is split a little more evenly than whole boxes allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_etc.planners.assign import Assignment, assign
from ray_etc.planners.compressed import Family, Flows, class_overlap, compress, flows
from ray_etc.planners.expected import expected_layouts
from ray_etc.planners.layout import TensorSpec
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.overlap import Overlap
from ray_etc.planners.overlap import Part as OverlapPart
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.plan import MigrationPlan
from ray_etc.planners.traffic import Part, Traffic, traffic


@dataclass(frozen=True)
class Forecast:
    """What would move between two configurations, in bytes.

    `nbytes_needed` is the state of all new ranks together. `nbytes_lower_bound` is what no placement of them on as few
    nodes can move less than, and `nbytes_unmoved` what rank i on slot i would move.
    """

    placement: Assignment
    traffic: Traffic
    nbytes_needed: int
    nbytes_kept_unmoved: int

    @property
    def nbytes_lower_bound(self) -> int:
        return self.nbytes_needed - self.placement.nbytes_kept_bound

    @property
    def nbytes_unmoved(self) -> int:
        return self.nbytes_needed - self.nbytes_kept_unmoved

    def least_rounds(self, staging_nbytes: int) -> int:
        """Rounds that no plan for this placement can do without, if a slot receives at most this much in each."""
        return -(-int(self.traffic.received.max()) // staging_nbytes)


def forecast(
    held: tuple[Sequence[TensorSpec], ParallelConfig],
    wanted: tuple[Sequence[TensorSpec], ParallelConfig],
    *,
    node_size: int,
    nodes_after: int,
) -> Forecast:
    """What moves from configuration `held`, rank i on slot i, to `wanted` on the first `nodes_after` nodes.

    Both are (tensors, configuration) of one model. Slots are numbered node by node, `node_size` a node; those of later
    nodes leave. Raises ValueError where the new ranks do not fit with tensor-parallel groups inside nodes.
    """
    groups, size = wanted[1].tensor_groups(), wanted[1].tensor_parallel
    if len(groups) > node_size // size * nodes_after:
        raise ValueError(
            f"{len(groups)} tensor-parallel groups of {size} do not fit on {nodes_after} nodes of {node_size} slots, "
            f"{node_size // size} a node: {node_size // size * nodes_after} fit"
        )
    families: list[tuple[Family, Family, Flows]] = []
    for old, new in zip(compress(*held), compress(*wanted), strict=True):
        families.append((old, new, flows(new, old)))
    usable = node_size * nodes_after
    slot_count = max(usable, held[1].world_size)
    parts = []
    for old, new, found in families:
        class_of_slot = np.full(slot_count, -1, dtype=np.int64)
        class_of_slot[: held[1].world_size] = old.class_of_rank
        parts.append(OverlapPart(class_overlap(found, new, old), new.class_of_rank, class_of_slot[:usable]))
    overlap = Overlap(parts)
    nodes = {slot: f"node{slot // node_size}" for slot in range(usable)}
    placement = assign(overlap, range(usable), nodes, groups)
    slot_of_rank = np.array(placement.slot_of_rank)
    moved = traffic(
        [
            Part(found, _by_class(new, slot_of_rank), _by_class(old, np.arange(held[1].world_size)))
            for old, new, found in families
        ],
        np.arange(slot_count) // node_size,
    )
    return Forecast(placement, moved, moved.same_slot + moved.nbytes_wire, overlap.nbytes_unmoved())


def plan_of(
    made: Forecast,
    held: tuple[Sequence[TensorSpec], ParallelConfig],
    wanted: tuple[Sequence[TensorSpec], ParallelConfig],
    *,
    node_size: int,
    nodes_after: int,
    staging_nbytes: int,
) -> MigrationPlan:
    """Every move of the resize that `made` forecasts, on its placement: what a resize itself would do, not yet checked.

    Arguments as of `forecast`; `staging_nbytes` as of `make_plan`. Takes half a minute where the forecast takes one
    second.
    """
    source = dict(enumerate(expected_layouts(*held)))
    target = dict(zip(made.placement.slot_of_rank, expected_layouts(*wanted), strict=True))
    nodes = {slot: f"node{slot // node_size}" for slot in source.keys() | target.keys()}
    usable = range(node_size * nodes_after)
    return make_plan(source, target, nodes, staging_nbytes=staging_nbytes, usable=usable)


def _by_class(family: Family, slot_of_rank: np.ndarray) -> list[np.ndarray]:
    """The slots of the ranks of each class."""
    order = np.argsort(family.class_of_rank, kind="stable")
    counts = np.bincount(family.class_of_rank, minlength=family.class_count)
    return np.split(slot_of_rank[order], np.cumsum(counts)[:-1])
