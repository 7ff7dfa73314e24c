"""Eight ranks that share the GPUs, each as if on a host of its own: sockets between them stand for a slow network."""

from __future__ import annotations

from typing import Any

from benchmarks.handover_driver import Case, start_rank
from benchmarks.processes import call_all, each_its_own, end_all
from ray_etc.actors.certificate import compare
from ray_etc.actors.context import environment_for
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.zoo import ModelShape

SOCKETS = {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "1"}
"""Connections to each peer, for both ways of sending; by default NCCL makes one."""


def slow_network(model: ModelShape, use_cpu: bool, staging_nbytes: int) -> dict[str, Any]:
    """TP4 DP2 to TP8, packed, against one message a slice."""
    case = Case("eight_ranks", model, ParallelConfig(4, 1, 2), ParallelConfig(8, 1, 1))
    source, target = case.layouts()
    plan = make_plan(
        dict(enumerate(source)), dict(enumerate(target)), dict.fromkeys(range(8), "node"), staging_nbytes=staging_nbytes
    )
    old, new = (
        [start_rank(slot, use_cpu, 8, {**SOCKETS, **environment_for(parallel)}) for slot in range(8)]
        for parallel in (case.source, case.target)
    )
    try:
        shared = each_its_own(old, "hold", [(layout, True) for layout in plan.source])
        each_its_own(new, "hold", [(layout, False) for layout in plan.target])
        opened = each_its_own(new, "open", [("slow", rank, 8) for rank in range(8)])
        call_all(new, "connect", opened[0])
        parts = [plan.for_rank(rank) for rank in range(8)]
        each_its_own(new, "prepare", [(parts[r], plan.source[r], shared[r], True, staging_nbytes) for r in range(8)])
        packed, sliced = [], []
        for _ in range(3):
            call_all(new, "spoil")
            reports = call_all(new, "move")
            compare(plan, reports)
            packed.append(max(max(each.wire_s, each.local_s) + each.certify_s for each in reports))
        right = call_all(new, "is_right")
        for _ in range(2):
            sliced.append(max(each_its_own(new, "move_by_slices", list(zip(parts, plan.source, strict=True)))))
        right += call_all(new, "is_right")
        call_all(new, "close")
    finally:
        end_all([*new, *old])
    return {
        "is_right": all(right),
        "environment": SOCKETS,
        "nbytes_wire": plan.nbytes_wire,
        "slices": sum(map(len, plan.rounds)),
        "rounds": len(plan.rounds),
        "packed_s": min(packed),
        "one_message_a_slice_s": min(sliced),
        "packed_times_faster": min(sliced) / min(packed),
    }
