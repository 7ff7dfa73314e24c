"""Make the plan: for every element of every target shard, one source to take it from, one way and one round."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from ray_etc.planners.balance import Network
from ray_etc.planners.demands import Streams, find_demands
from ray_etc.planners.fan_out import Hops
from ray_etc.planners.layout import RankLayout
from ray_etc.planners.links import Links
from ray_etc.planners.match import Match, match
from ray_etc.planners.memory import STAGING_NBYTES
from ray_etc.planners.moves import cast_moves, local_moves, wire_moves
from ray_etc.planners.plan import MigrationPlan
from ray_etc.planners.rounds import split_rounds
from ray_etc.planners.sources import choose_hops
from ray_etc.planners.table import LayoutTable


def make_plan(
    source: Mapping[int, RankLayout],
    target: Mapping[int, RankLayout],
    nodes: Mapping[int, str],
    *,
    staging_nbytes: int = STAGING_NBYTES,
    usable: Collection[int] | None = None,
    endangered: Collection[int] = (),
    links: Links | None = None,
) -> MigrationPlan:
    """Plan the moves that turn layout `source` into layout `target`.

    Keys are slots; a slot in only one of them joins or leaves. `nodes[slot]` is the node of each slot in either.
    `staging_nbytes` bounds what a rank sends, and what it receives, in one round. `usable` are the slots on which the
    new ranks could have been placed (all of them by default); only the lower bound depends on it. What only
    `endangered` slots hold moves first. `links` are the speeds that the choice of sources goes by.

    Each target element is taken once: from its own slot where that holds it, otherwise so that the busiest link is
    least loaded, by way of another new rank where many want the same. The same input gives the same plan.

    Raises StateMissing where no source holds an element of the target in the target's shape and dtype, and
    ValueError where a slot has no node or the budget is smaller than one element.
    """
    slots = tuple(sorted(source.keys() | target.keys()))
    homeless = [slot for slot in slots if slot not in nodes]
    if homeless:
        raise ValueError(f"no node is given for slots {homeless}")
    held = LayoutTable.of([tuple(source.get(slot, ())) for slot in slots])
    wanted = LayoutTable.of([tuple(target.get(slot, ())) for slot in slots])
    found = match(held, wanted)
    columns = [rank for rank, slot in enumerate(slots) if usable is None or slot in usable]
    return plan_moves(
        found,
        np.arange(len(slots)),
        slots,
        [nodes[slot] for slot in slots],
        nbytes_lower_bound=found.nbytes_needed - _most_kept(found, columns),
        staging_nbytes=staging_nbytes,
        endangered=[rank for rank, slot in enumerate(slots) if slot in endangered],
        links=links,
    )


def plan_moves(
    found: Match,
    plan_rank: np.ndarray,
    slots: Sequence[int],
    nodes: Sequence[str],
    *,
    nbytes_lower_bound: int,
    staging_nbytes: int = STAGING_NBYTES,
    endangered: Collection[int] = (),
    links: Links | None = None,
) -> MigrationPlan:
    """The plan for a match, with new rank i on rank `plan_rank[i]` of the plan (int64).

    `slots` and `nodes` are those of the plan's ranks, which are the ranks of `found.source`; `endangered` are such
    ranks. The other arguments and the errors are those of `make_plan`.
    """
    world_size = len(slots)
    local, casts, streams = find_demands(found, plan_rank, world_size, staging_nbytes)
    number_of = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    network = Network(np.array([number_of[node] for node in nodes], dtype=np.int64), links or Links())
    hops = choose_hops(streams, network)
    urgent = _only_on(endangered, streams, hops)
    chunks = split_rounds(hops, streams, urgent, world_size, staging_nbytes)
    return MigrationPlan(
        slots=tuple(slots),
        nodes=tuple(nodes),
        source=found.source,
        target=found.target.on(plan_rank, world_size),
        bundles=found.bundles,
        moves=local_moves(found, local).and_then(wire_moves(streams, chunks)).and_then(cast_moves(casts)),
        nbytes_lower_bound=nbytes_lower_bound,
        staging_nbytes=staging_nbytes,
        endangered=tuple(sorted(endangered)),
    )


def _only_on(endangered: Collection[int], streams: Streams, hops: Hops) -> np.ndarray:
    """Whether the bytes of a segment are held by `endangered` ranks only: bool [segments]."""
    first, ranks = streams.holders_of
    is_endangered = np.isin(ranks, list(endangered))
    lost = np.add.reduceat(is_endangered, first[:-1]) == np.diff(first) if len(ranks) else np.zeros(0, dtype=bool)
    urgent = np.zeros(int(hops.segment.max(initial=-1)) + 1, dtype=bool)
    urgent[hops.segment] = lost[hops.stream]
    return urgent


def _most_kept(found: Match, columns: Sequence[int]) -> int:
    """Bytes that the best placement of the new ranks on the source's ranks `columns` keeps in place."""
    overlap = found.overlap().on(np.array(columns, dtype=np.int64)).rows(np.arange(found.target.world_size))
    ranks, places = linear_sum_assignment(overlap, maximize=True)
    return int(overlap[ranks, places].sum())
