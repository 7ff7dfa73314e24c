"""What `benchmarks.handover` does with the processes of a case, and the figures that it makes of their reports."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.handover_ranks import MIB, Rank
from benchmarks.processes import Process, call_all, each_its_own, end_all
from ray_etc.actors.certificate import compare
from ray_etc.actors.context import environment_for
from ray_etc.actors.pipeline import BUFFERS
from ray_etc.actors.work import aligned
from ray_etc.planners.expected import expected_layouts
from ray_etc.planners.facts import facts_of
from ray_etc.planners.layout import RankLayout
from ray_etc.planners.links import Links
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.placement import place
from ray_etc.planners.plan import MigrationPlan
from ray_etc.planners.zoo import ModelShape

RESERVED_NBYTES = 3 * 2**30
"""Of a GPU's memory: two CUDA contexts, a communicator, and what checking the bytes takes."""
FUSED = 0.9
"""What packed messages, and copies that are summed, reach of the rates of plain ones."""
ALONE_S = 3.0
"""How long the old generation trains alone before the new one starts, and beside it once it is ready and waits."""


@dataclass(frozen=True)
class Case:
    """A resize of `model`, whose optimizer is Megatron's distributed one or not."""

    name: str
    model: ModelShape
    source: ParallelConfig
    target: ParallelConfig
    trains: bool = False

    def layouts(self) -> tuple[list[RankLayout], list[RankLayout]]:
        source, target = (
            expected_layouts(self.model.tensors(side.pipeline_parallel), side) for side in (self.source, self.target)
        )
        return source, target


def plan_of(case: Case, staging_nbytes: int) -> MigrationPlan:
    """As a run would make it: new ranks where most of their state is, and the last slots leave or join."""
    source, target = case.layouts()
    nodes = dict.fromkeys(range(max(len(source), len(target))), "node")
    usable = {slot: nodes[slot] for slot in nodes if slot < len(target) or len(target) > len(source)}
    held = dict(enumerate(source))
    chosen = place(case.model.tensors(case.target.pipeline_parallel), held, case.target, usable).slot_of_rank
    placed = dict(zip(chosen, target, strict=True))
    return make_plan(held, placed, nodes, staging_nbytes=staging_nbytes, usable=usable)


class Generations:
    """Both generations of a case: the old one with its state, the new one from `start_new` on."""

    def __init__(self, case: Case, plan: MigrationPlan, use_cpu: bool, direct_nbytes: int) -> None:
        self.case, self.plan, self.use_cpu, self.direct_nbytes = case, plan, use_cpu, direct_nbytes
        self.phases: dict[str, float] = {}
        """When each part of `start_new` began, and when all was ready, on this host's clock."""
        self.old = self._start(plan.source, case.source)
        # Beside a training that is measured the new processes start in the shadow; else at once, to save time.
        self.new: dict[int, Process] = {} if case.trains else self._start(plan.target, case.target)
        held = each_its_own(list(self.old.values()), "hold", [(plan.source[slot], True) for slot in self.old])
        self.shared = dict(zip(self.old, held, strict=True))

    def _start(self, layouts: Iterable[RankLayout], parallel: ParallelConfig) -> dict[int, Process]:
        slots, environment = len(self.plan.slots), environment_for(parallel)
        return {
            slot: start_rank(slot, self.use_cpu, slots, environment) for slot, layout in enumerate(layouts) if layout
        }

    @property
    def members(self) -> list[Process]:
        """One process a slot: the new one where there is one."""
        return [self.new.get(slot) or self.old[slot] for slot in range(len(self.plan.slots))]

    def start_new(self) -> int:
        """Everything that can be done before the pause; the bytes of staging of the rank with most."""
        plan = self.plan
        self.phases["start"] = time.monotonic()
        self.new = self.new or self._start(plan.target, self.case.target)
        call_all(list(self.new.values()), "ready")
        self.phases["hold"] = time.monotonic()
        each_its_own(list(self.new.values()), "hold", [(plan.target[slot], False) for slot in self.new])
        self.phases["connect"] = time.monotonic()
        members, group = self.members, f"handover-{time.monotonic_ns()}"
        opened = each_its_own(members, "open", [(group, rank, len(members)) for rank in range(len(members))])
        call_all(members, "connect", opened[0])
        self.phases["prepare"] = time.monotonic()
        parts = [
            (
                *(plan.for_rank(slot), plan.source[slot]),
                *(self.shared.get(slot) if slot in self.new else None, slot in self.new, self.direct_nbytes),
            )
            for slot in range(len(members))
        ]
        staging_nbytes = max(each_its_own(members, "prepare", parts))
        self.phases["ready"] = time.monotonic()
        return staging_nbytes

    def move(self) -> dict[str, Any]:
        """Move, and compare both ends' checksums; seconds, and what each rank reports."""
        start = time.monotonic()
        reports = call_all(self.members, "move")
        compared = time.monotonic()
        compare(self.plan, reports)
        end = time.monotonic()
        return {"handover_s": end - start, "compare_s": end - compared, "reports": reports}

    def end(self) -> None:
        end_all([*self.new.values(), *self.old.values()])


def run_case(
    case: Case, rates: dict[str, float], use_cpu: bool, staging_nbytes: int, direct_nbytes: int, repeats: int
) -> Any:
    started = time.monotonic()
    plan = plan_of(case, staging_nbytes)
    plan.check()
    if not use_cpu:
        gpus = torch.cuda.device_count()
        if gpus < len(plan.slots) and not plan.rounds:
            plan = first_slots(plan, gpus)
        peaks, room = predicted_peaks(plan), torch.cuda.get_device_properties(0).total_memory
        needed = max(sum(peaks[gpu::gpus]) for gpu in range(min(gpus, len(peaks)))) + RESERVED_NBYTES
        if needed > room:
            return {"case": case.name, "refused": f"needs {needed} bytes of a GPU's {room}", "is_right": True}
    generations = Generations(case, plan, use_cpu, direct_nbytes)
    try:
        result = measure(case, plan, generations, rates, repeats)
    finally:
        generations.end()
    result["case_s"] = time.monotonic() - started
    return result


def measure(
    case: Case, plan: MigrationPlan, generations: Generations, rates: dict[str, float], repeats: int
) -> dict[str, Any]:
    old = list(generations.old.values())
    result: dict[str, Any] = {"case": case.name, "source": str(case.source), "target": str(case.target)}
    if case.trains:
        call_all(old, "train")
        time.sleep(ALONE_S)
    staging_nbytes = generations.start_new()
    new = list(generations.new.values())
    if case.trains:
        time.sleep(ALONE_S)
        ended_at = max(call_all(old, "pause"))
        runs = [generations.move()]
        result["pause_s"] = max(call_all(new, "begin")) - ended_at
        result |= shadow(call_all(old, "step_times"), generations.phases)
        call_all(new, "pause")
    else:
        runs = [generations.move()]
    peaks = dict.fromkeys(range(len(plan.slots)), 0)
    for slot in peaks:
        owners = [side[slot] for side in (generations.old, generations.new) if slot in side]
        peaks[slot] = sum(call_all(owners, "peak_nbytes"))
    right = call_all(new, "is_right")
    for _ in range(repeats):
        call_all(new, "spoil")
        runs.append(generations.move())
    right += call_all(new, "is_right")
    alone_s = each_its_own(new, "copy_local", [(plan.for_rank(slot), plan.source[slot]) for slot in generations.new])
    call_all(generations.members, "close")
    result |= {
        "is_right": all(right),
        "rounds": len(plan.rounds),
        "moves": sum(map(len, plan.rounds)) + len(plan.local),
    }
    result |= figures(plan, runs, rates, alone_s)
    result |= {
        "staging_bytes": staging_nbytes,
        "peak_bytes": max(peaks.values()),
        "peak_bytes_predicted": max(predicted_peaks(plan)),
    }
    return result


def figures(
    plan: MigrationPlan, runs: Sequence[dict[str, Any]], rates: dict[str, float], alone_s: Sequence[float]
) -> dict[str, Any]:
    """Of the run whose handover took the median time; `handover_s` of the first is what a resize would see."""
    first, typical = runs[0], sorted(runs, key=lambda run: run["handover_s"])[len(runs) // 2]
    reports = typical["reports"]
    wire_s, local_s, certify_s = (
        max(getattr(each, f"{part}_s") for each in reports) for part in ("wire", "local", "certify")
    )
    way = max(max(each.nbytes_sent, each.nbytes_received) for each in reports)
    local = max(each.nbytes_local for each in reports)
    bound = plan.nbytes_lower_bound
    facts = facts_of(plan, links_of(rates))
    on_gpus_s = max(max(each.wire_s, each.local_s) + each.certify_s for each in reports)
    return {
        "nbytes_wire": plan.nbytes_wire,
        "nbytes_wire_lower_bound": bound,
        "nbytes_one_way": way,
        "nbytes_local": local,
        "moved_over_lower_bound": plan.nbytes_wire / bound if bound else 1.0 if not plan.nbytes_wire else None,
        "handover_s": statistics.median(run["handover_s"] for run in runs),
        "handover_first_s": first["handover_s"],
        "handover_runs_s": [run["handover_s"] for run in runs],
        "handover_on_gpus_s": on_gpus_s,
        "handover_s_predicted": facts.seconds.total,
        "busiest_link_bytes": facts.busiest_link_nbytes,
        "floor_s": max(way / rates["line_bytes_per_s"], local / rates["copy_bytes_per_s"]),
        "wire_s": wire_s,
        "local_s": local_s,
        "certify_s": certify_s,
        "compare_s": typical["compare_s"],
        "certify_over_handover": (certify_s + typical["compare_s"]) / typical["handover_s"],
        "wire_bytes_per_s": way / wire_s if plan.rounds else None,
        "wire_over_line_rate": way / wire_s / rates["line_bytes_per_s"] if plan.rounds else None,
        "local_over_copy_rate": local / max(alone_s) / rates["copy_bytes_per_s"] if local else None,
        "local_beside_wire_over_copy_rate": local / local_s / rates["copy_bytes_per_s"] if local else None,
    }


def shadow(step_times: Sequence[Sequence[tuple[float, float]]], phases: dict[str, float]) -> dict[str, Any]:
    """Step time of the old generation while the new one starts beside it: over all, and in each phase.

    Against that before and after, since a GPU that gets warm gets slower by itself.
    """
    began, ready = phases["start"], phases["ready"]
    before = [seconds for steps in step_times for end, seconds in steps[1:] if end < began]
    after = [seconds for steps in step_times for end, seconds in steps if end - seconds > ready]
    alone_s = (statistics.mean(before) + statistics.mean(after)) / 2
    starts = [(end - seconds, seconds) for steps in step_times for end, seconds in steps]
    beside = [(start, seconds) for start, seconds in starts if began < start < ready]
    beside_s = statistics.mean(seconds for _, seconds in beside)
    by_phase: dict[str, list[float]] = {phase: [] for phase in phases}
    for start, seconds in beside:
        by_phase[max((at, phase) for phase, at in phases.items() if at < start)[1]].append(seconds)
    return {
        "step_alone_s": alone_s,
        "step_before_s": statistics.mean(before),
        "step_after_s": statistics.mean(after),
        "step_beside_shadow_s": beside_s,
        "step_beside_shadow_max_s": max(seconds for _, seconds in beside),
        "shadow_slowdown": beside_s / alone_s - 1.0,
        "shadow_phases": {
            phase: {"steps": len(times), "slowdown": statistics.mean(times) / alone_s - 1.0}
            for phase, times in by_phase.items()
            if times
        },
    }


def links_of(rates: dict[str, float]) -> Links:
    """The planner's table as it is by default, but for the rates of this run; packing and sums cost a tenth of each."""
    line, copy = (FUSED * rates[f"{way}_bytes_per_s"] for way in ("line", "copy"))
    return replace(Links(), same_node_bytes_per_s=line, copy_bytes_per_s=copy)


def first_slots(plan: MigrationPlan, count: int) -> MigrationPlan:
    """The part of a plan without messages that the first slots carry out, each on its own."""
    ranks = range(count)
    return make_plan(
        {plan.slots[rank]: plan.source[rank] for rank in ranks},
        {plan.slots[rank]: plan.target[rank] for rank in ranks},
        {plan.slots[rank]: plan.nodes[rank] for rank in ranks},
        staging_nbytes=plan.staging_nbytes,
    )


def predicted_peaks(plan: MigrationPlan) -> list[int]:
    """Of each slot: the old state, the new one, and the staging buffers, from the plan alone."""
    peaks = []
    for rank in range(len(plan.slots)):
        state = sum(shard.nbytes for layouts in (plan.source, plan.target) for shard in layouts[rank])
        rounds = plan.for_rank(rank).rounds
        for sides in ([each.sends for each in rounds], [each.receives for each in rounds]):
            sizes = [sum(aligned(move.nbytes) for moves in side.values() for move in moves) for side in sides]
            state += sum(max(sizes[first::BUFFERS], default=0) for first in range(BUFFERS))
        peaks.append(state)
    return peaks


def start_rank(
    slot: int, use_cpu: bool, slots: int = 2, more: Mapping[str, str] | None = None, kind: type[Rank] = Rank
) -> Process:
    """On the GPU of its slot; where slots share a GPU, as if on a host of its own. `more` is for its environment."""
    gpus = torch.cuda.device_count()
    environment = {"NCCL_SOCKET_IFNAME": "lo", **(more or {})}
    if gpus < slots:
        environment["NCCL_HOSTID"] = f"slot{slot}"
    return Process(kind, None if use_cpu else slot % gpus, environment=environment)


def measure_rates(use_cpu: bool, slots: int = 2) -> dict[str, float]:
    """The line rate, all pairs of slots both ways at once, and the copy rate, by processes that hold nothing else."""
    nbytes = (4 if use_cpu else 4096 if torch.cuda.device_count() >= slots else 256) * MIB
    ranks = [start_rank(slot, use_cpu, slots) for slot in range(slots)]
    try:
        opened = each_its_own(ranks, "open", [("rates", rank, slots) for rank in range(slots)])
        call_all(ranks, "connect", opened[0])
        line = min(each_its_own(ranks, "line_rate", [(nbytes, rank ^ 1) for rank in range(slots)]))
        copy = min([*call_all(ranks[:1], "copy_rate", (4 if use_cpu else 8192) * MIB)])
        call_all(ranks, "close")
    finally:
        end_all(ranks)
    return {"line_bytes_per_s": line, "copy_bytes_per_s": copy}
