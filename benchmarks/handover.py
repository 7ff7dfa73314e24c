"""A handover of a 7B-shaped training state between two generations of processes on the same GPUs.

    python -m benchmarks.handover --json benchmarks/results/handover-2xH200.json

Each case makes the old generation's state, with known bytes, in real processes; starts the new ones beside them, which
map it by CUDA IPC; moves, compares the certificate, and checks every byte. Rates are those of the same run: one large
message each way at once, and a copy within a GPU. With one GPU both slots share it and pass for two hosts, so the wire
is a socket; a case without messages then runs one slot of the two, which is all that its GPU would do. `--layers` makes
the model shallower, so that it fits. `--cpu` runs a tiny model, to try the script. The exit status is 0 only if every
byte was right.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

from benchmarks.handover_baselines import measure_baselines
from benchmarks.handover_ranks import MIB, Rank
from benchmarks.processes import Process, call_all, each_its_own
from benchmarks.provenance import provenance
from ray_etc.actors.certificate import compare
from ray_etc.actors.pipeline import BUFFERS
from ray_etc.actors.work import aligned
from ray_etc.planners.expected import expected_layouts
from ray_etc.planners.layout import RankLayout
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.plan import MigrationPlan
from ray_etc.planners.zoo import ZOO, ModelShape

TINY = ModelShape(4, 64, 96, 4, 4, 128, kv_channels=16)
RESERVED_NBYTES = 3 * 2**30
"""Of a GPU's memory: two CUDA contexts, a communicator, and what checking the bytes takes."""
ALONE_S = 3.0
"""How long the old generation trains alone before the new one starts."""


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


def cases(model: ModelShape, half: ModelShape) -> list[Case]:
    """Those that hold the old state beside the new one on two GPUs of 141 GB; `half` where 7B would not fit."""

    def parallel(tensor: int, pipeline: int, data: int, zero: bool) -> ParallelConfig:
        return ParallelConfig(tensor, pipeline, data, distributed_optimizer=zero)

    return [
        Case("tp1_dp2_to_tp2.distributed", model, parallel(1, 1, 2, True), parallel(2, 1, 1, True), trains=True),
        Case("tp1_dp2_to_tp2.plain", model, parallel(1, 1, 2, False), parallel(2, 1, 1, False)),
        Case("tp2_to_pp2", model, parallel(2, 1, 1, False), parallel(1, 2, 1, False)),
        Case("pp2_to_tp1_dp2.distributed", model, parallel(1, 2, 1, True), parallel(1, 1, 2, True)),
        Case("pp2_to_tp1_dp2.plain", model, parallel(1, 2, 1, False), parallel(1, 1, 2, False)),
        Case("2_to_1_gpus.tp2_to_tp1", model, parallel(2, 1, 1, False), parallel(1, 1, 1, False)),
        Case("1_to_2_gpus.tp1_to_tp2", model, parallel(1, 1, 1, False), parallel(2, 1, 1, False)),
        Case("2_to_1_gpus.dp2_half_depth.distributed", half, parallel(1, 1, 2, True), parallel(1, 1, 1, True)),
        Case("1_to_2_gpus.dp2_half_depth.distributed", half, parallel(1, 1, 1, True), parallel(1, 1, 2, True)),
        Case("1_to_2_gpus.dp2_half_depth.plain", half, parallel(1, 1, 1, False), parallel(1, 1, 2, False)),
    ]


def best_plan(case: Case, staging_nbytes: int) -> MigrationPlan:
    """The plan under the placement of new ranks on slots that moves least."""
    source, target = case.layouts()
    slots = range(max(len(source), len(target)))
    nodes = dict.fromkeys(slots, "node")
    plans = [
        make_plan(dict(enumerate(source)), dict(zip(order, target, strict=True)), nodes, staging_nbytes=staging_nbytes)
        for order in permutations(slots, len(target))
    ]
    return min(plans, key=lambda plan: plan.nbytes_wire)


class Generations:
    """Both generations of a case: the old one with its state, the new one from `start_new` on."""

    def __init__(self, case: Case, plan: MigrationPlan, use_cpu: bool, direct_nbytes: int) -> None:
        self.case, self.plan, self.use_cpu, self.direct_nbytes = case, plan, use_cpu, direct_nbytes
        self.old = self._start([slot for slot, layout in enumerate(plan.source) if layout])
        self.new: dict[int, Process] = {}
        held = each_its_own(list(self.old.values()), "hold", [(plan.source[slot], True) for slot in self.old])
        self.shared = dict(zip(self.old, held, strict=True))

    def _start(self, slots: Sequence[int]) -> dict[int, Process]:
        started = {slot: start_rank(slot, self.use_cpu) for slot in slots}
        call_all(list(started.values()), "ready")
        return started

    @property
    def members(self) -> list[Process]:
        """One process a slot: the new one where there is one."""
        return [self.new.get(slot) or self.old[slot] for slot in range(len(self.plan.slots))]

    def start_new(self) -> int:
        """Everything that can be done before the pause; the bytes of staging of the rank with most."""
        plan = self.plan
        self.new = self._start([slot for slot, layout in enumerate(plan.target) if layout])
        each_its_own(list(self.new.values()), "hold", [(plan.target[slot], False) for slot in self.new])
        members, group = self.members, f"handover-{time.monotonic_ns()}"
        opened = each_its_own(members, "open", [(group, rank, len(members)) for rank in range(len(members))])
        call_all(members, "connect", opened[0])
        return max(
            each_its_own(
                members,
                "prepare",
                [
                    (
                        *(plan.for_rank(slot), plan.source[slot]),
                        *(self.shared.get(slot) if slot in self.new else None, slot in self.new, self.direct_nbytes),
                    )
                    for slot in range(len(members))
                ],
            )
        )

    def move(self) -> dict[str, Any]:
        """Move, and compare both ends' checksums; seconds, and what each rank reports."""
        start = time.monotonic()
        reports = call_all(self.members, "move")
        compared = time.monotonic()
        compare(self.plan, reports)
        end = time.monotonic()
        return {"handover_s": end - start, "compare_s": end - compared, "reports": reports}

    def end(self) -> None:
        for process in (*self.new.values(), *self.old.values()):
            process.end()


def run_case(case: Case, rates: dict[str, float], use_cpu: bool, staging_nbytes: int, direct_nbytes: int) -> Any:
    started = time.monotonic()
    plan = best_plan(case, staging_nbytes)
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
        result = measure(case, plan, generations, rates)
    finally:
        generations.end()
    result["case_s"] = time.monotonic() - started
    return result


def measure(case: Case, plan: MigrationPlan, generations: Generations, rates: dict[str, float]) -> dict[str, Any]:
    old = list(generations.old.values())
    result: dict[str, Any] = {"case": case.name, "source": str(case.source), "target": str(case.target)}
    if case.trains:
        call_all(old, "train")
        time.sleep(ALONE_S)
    shadow_began = time.monotonic()
    staging_nbytes = generations.start_new()
    new = list(generations.new.values())
    if case.trains:
        ended_at = max(call_all(old, "pause"))
        runs = [generations.move()]
        result["pause_s"] = max(call_all(new, "begin")) - ended_at
        result |= shadow(call_all(old, "step_times"), shadow_began)
        call_all(new, "pause")
    else:
        runs = [generations.move()]
    peaks = dict.fromkeys(range(len(plan.slots)), 0)
    for slot in peaks:
        owners = [side[slot] for side in (generations.old, generations.new) if slot in side]
        peaks[slot] = sum(call_all(owners, "peak_nbytes"))
    right = call_all(new, "is_right")
    for _ in range(3):
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


def shadow(step_times: Sequence[Sequence[tuple[float, float]]], began: float) -> dict[str, float]:
    """Step time of the old generation alone, and while the new one starts beside it."""
    alone = [seconds for steps in step_times for end, seconds in steps[1:] if end < began]
    beside = [seconds for steps in step_times for end, seconds in steps if end - seconds > began]
    return {
        "step_alone_s": statistics.mean(alone),
        "step_beside_shadow_s": statistics.mean(beside),
        "step_beside_shadow_max_s": max(beside),
        "shadow_slowdown": statistics.mean(beside) / statistics.mean(alone) - 1.0,
    }


def first_slots(plan: MigrationPlan, count: int) -> MigrationPlan:
    """The part of a plan without messages that the first slots carry out, each on its own."""
    return replace(
        plan,
        slots=plan.slots[:count],
        nodes=plan.nodes[:count],
        source=plan.source[:count],
        target=plan.target[:count],
        local=tuple(move for move in plan.local if move.dst_rank < count),
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


def start_rank(slot: int, use_cpu: bool, slots: int = 2) -> Process:
    """On the GPU of its slot; where slots share a GPU, as if on a host of its own."""
    gpus = torch.cuda.device_count()
    environment = {"NCCL_SOCKET_IFNAME": "lo", **({"NCCL_HOSTID": f"slot{slot}"} if gpus < slots else {})}
    return Process(Rank, None if use_cpu else slot % gpus, environment=environment)


def slow_network(model: ModelShape, use_cpu: bool, staging_nbytes: int) -> dict[str, Any]:
    """Eight ranks that share the GPUs, so that sockets are between them: packed, against one message a slice."""
    case = Case("eight_ranks", model, ParallelConfig(4, 1, 2), ParallelConfig(8, 1, 1))
    source, target = case.layouts()
    plan = make_plan(
        dict(enumerate(source)), dict(enumerate(target)), dict.fromkeys(range(8), "node"), staging_nbytes=staging_nbytes
    )
    old, new = ([start_rank(slot, use_cpu, 8) for slot in range(8)] for _ in range(2))
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
        for process in (*new, *old):
            process.end()
    return {
        "is_right": all(right),
        "nbytes_wire": plan.nbytes_wire,
        "slices": sum(map(len, plan.rounds)),
        "rounds": len(plan.rounds),
        "packed_s": min(packed),
        "one_message_a_slice_s": min(sliced),
        "packed_times_faster": min(sliced) / min(packed),
    }


def against_baselines(
    model: ModelShape, rates: dict[str, float], use_cpu: bool, scratch: Path, staging_nbytes: int, direct_nbytes: int
) -> dict[str, Any]:
    """Checkpoints of a state, and the handover of the same state."""
    parallel = ParallelConfig(1, 1, 2), ParallelConfig(2, 1, 1)
    moved = run_case(Case("baseline_state", model, *parallel), rates, use_cpu, staging_nbytes, direct_nbytes)
    result = measure_baselines(model.tensors(), scratch, 0 if use_cpu else torch.cuda.device_count())
    result["checkpoint_s"] = {name: each["checkpoint_s"] for name, each in result.items() if isinstance(each, dict)}
    result["handover"] = moved
    result["fastest_checkpoint_over_handover"] = min(result["checkpoint_s"].values()) / moved["handover_s"]
    return result


def measure_rates(use_cpu: bool) -> dict[str, float]:
    """The line rate both ways at once and the copy rate, by processes that hold nothing else."""
    nbytes = (4 if use_cpu else 4096 if torch.cuda.device_count() > 1 else 256) * MIB
    ranks = [start_rank(slot, use_cpu) for slot in range(2)]
    try:
        opened = each_its_own(ranks, "open", [("rates", rank, 2) for rank in range(2)])
        call_all(ranks, "connect", opened[0])
        line = min(each_its_own(ranks, "line_rate", [(nbytes, 1 - rank) for rank in range(2)]))
        copy = min([*call_all(ranks[:1], "copy_rate", (4 if use_cpu else 8192) * MIB)])
        call_all(ranks, "close")
    finally:
        for rank in ranks:
            rank.end()
    return {"line_bytes_per_s": line, "copy_bytes_per_s": copy}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="ETC_GLOO and a tiny model")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--layers", type=int, default=32, help="of the model; an even number")
    parser.add_argument("--staging-mib", type=int, default=512, help="bytes that a rank sends in one round, in MiB")
    parser.add_argument("--direct-mib", type=int, default=512, help="slices of this size go without packing, in MiB")
    parser.add_argument(
        "--baseline-layers", type=int, default=4, help="of a state that is checkpointed too; 0: none"
    )
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"), help="where checkpoints are written")
    parser.add_argument("--slow-layers", type=int, default=4, help="of the state that eight ranks exchange; 0: none")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        parser.error("this needs GPUs: use --cpu to try the script")
    result: dict[str, Any] = provenance("benchmarks.handover")
    model = TINY if arguments.cpu else replace(ZOO["llama2-7b"], num_layers=arguments.layers)
    half = TINY if arguments.cpu else replace(model, num_layers=arguments.layers // 2)
    result["model"] = f"llama2-7b with {model.num_layers} layers, {model.num_parameters} parameters"
    rates = measure_rates(arguments.cpu)
    result["rates"], result["cases"] = rates, []
    print(json.dumps(rates), flush=True)
    unit = 1024 if arguments.cpu else MIB
    for case in cases(model, half):
        if arguments.only in case.name:
            done = run_case(case, rates, arguments.cpu, arguments.staging_mib * unit, arguments.direct_mib * unit)
            print(json.dumps(done), flush=True)
            result["cases"].append(done)
    sizes = (arguments.staging_mib * unit, arguments.direct_mib * unit)
    if arguments.slow_layers:
        shallow = TINY if arguments.cpu else ModelShape(arguments.slow_layers, 1024, 2816, 8, 8, 8192)
        result["eight_ranks_over_sockets"] = slow_network(shallow, arguments.cpu, sizes[0])
        print(json.dumps(result["eight_ranks_over_sockets"]), flush=True)
    if arguments.baseline_layers:
        shallow = TINY if arguments.cpu else replace(model, num_layers=arguments.baseline_layers)
        result["baselines"] = against_baselines(shallow, rates, arguments.cpu, arguments.scratch, *sizes)
        print(json.dumps(result["baselines"]), flush=True)
    result["rates_after"] = measure_rates(arguments.cpu)
    checked = [*result["cases"], result.get("eight_ranks_over_sockets", {})]
    result["ok"] = all(each.get("is_right", True) for each in checked)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
