"""Handovers in the tight mode: what both processes of a slot have allocated at the worst moment, against the plan.

State lies as Megatron lays it: moments and main weights one allocation a tensor, and so are weights under the plain
optimizer; the distributed one has all weights in a single buffer. The new processes come first and free their memory
again, as a rank does that was built for a tight handover; then the old ones fill theirs. The phases are run by the
same code as in a resize, `ray_etc.actors.tight`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.handover_driver import Case, plan_of, start_rank
from benchmarks.handover_ranks import CHUNK_NUMEL, MOVE_S, Rank, typed, with_truth
from benchmarks.processes import Process, call_all, each_its_own, end_all
from benchmarks.timing import synchronize
from ray_etc.actors import sharing
from ray_etc.actors.context import environment_for
from ray_etc.actors.generation import Generation
from ray_etc.actors.headroom import Headroom
from ray_etc.actors.memory import StateMemory, limit_training, training_nbytes
from ray_etc.actors.messages import Entered, Usage
from ray_etc.actors.mover import DIRECT_NBYTES
from ray_etc.actors.phased import PhaseReport, RankPhase, check_derived, move_as_new, move_as_old, warm_up
from ray_etc.actors.record import ResizeRecord
from ray_etc.actors.sums import as_integers
from ray_etc.actors.tight import TightMove
from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import Key, RankLayout, Shard
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.phases import PhasedPlan, cut_in_phases
from ray_etc.planners.zoo import ModelShape

FULL = 0.90
"""Of what training may take of its GPU, in the headroom case."""


class TightRank(Rank):
    """A rank whose memory comes and goes by allocations."""

    def hold_apart(self, layout: RankLayout, is_new: bool, has_flat_weights: bool, fill_to: float | None) -> Entered:
        """Make memory for `layout`, and fill it with its truth; or free it again, for a new rank.

        Where `fill_to` is given, scratch memory fills up this share of what training may have of the GPU.
        """
        self._layout = layout
        names = [s.tensor.kind if has_flat_weights and s.tensor.kind == "param" else s.tensor.key for s in layout]
        sizes: dict[Any, int] = {}
        for name, shard in zip(names, layout, strict=True):
            sizes[name] = sizes.get(name, 0) + shard.nbytes
        flat = {name: torch.empty(size, dtype=torch.uint8, device=self.device) for name, size in sizes.items()}
        starts = dict.fromkeys(sizes, 0)
        self._views = []
        for name, shard in zip(names, layout, strict=True):
            self._views.append(typed(flat[name][starts[name] : starts[name] + shard.nbytes], shard))
            starts[name] += shard.nbytes
        scratch = []
        if fill_to is not None and self.device.type == "cuda":
            limit_training(1.0, None)
            wanted = int(fill_to * _training_nbytes())
            scratch = [torch.empty(max(wanted - sum(sizes.values()), 1), dtype=torch.uint8, device=self.device)]
        self._memory = StateMemory(self._views, scratch)
        self._derived = derived_of([layout])
        if is_new:
            self._memory.empty()
        else:
            for view, shard in zip(self._views, layout, strict=True):
                for part, expected in truth_of(view, shard):
                    part.copy_(expected)
        synchronize(self.device)
        shared = None if is_new else self._memory.share()
        self._memory.trim()
        return Entered(layout, shared, self._memory.allocations, self._derived)

    def is_right(self) -> bool:
        return all(
            torch.equal(part, expected)
            for view, shard in zip(self._views, self._layout, strict=True)
            for part, expected in truth_of(view, shard)
        )

    def usage(self) -> Usage:
        return self._memory.usage()

    def warm_up(self) -> None:
        warm_up(self.device)

    def check_derived(self) -> None:
        check_derived(self._layout, self._views, self._derived)

    def move_phase(
        self, group: str, part: RankPhase, shared: sharing.SharedMemory | None, is_new: bool, timeout_s: float
    ) -> PhaseReport:
        if is_new:
            return move_as_new(part, self._memory, self._layout, self._views, shared, self._group, timeout_s)
        return move_as_old(part, self._memory, self._views, self._group, timeout_s)

    def release(self, numbers: Sequence[int]) -> int:
        held = self._memory.nbytes_allocated()
        self._memory.empty_scratch()
        self._memory.release(numbers)
        return held

    def fill(self) -> sharing.SharedMemory:
        self._memory.fill()
        return self._memory.share()


@dataclass(frozen=True)
class Remote:
    """A process as `TightMove` calls its ranks: `rank.method.remote(...)`."""

    process: Process

    def __getattr__(self, method: str) -> Any:
        def send(*arguments: Any) -> Process:
            self.process.send(method, *arguments)
            return self.process

        return SimpleNamespace(remote=send)


def wait(refs: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
    return [ref.receive() for ref in refs]


def tight_cases(model: ModelShape) -> list[Case]:
    def parallel(tensor: int, pipeline: int, data: int, zero: bool) -> ParallelConfig:
        return ParallelConfig(tensor, pipeline, data, distributed_optimizer=zero)

    return [
        Case("tight.tp1_dp2_to_tp2.distributed", model, parallel(1, 1, 2, True), parallel(2, 1, 1, True)),
        Case("tight.tp2_to_pp2.plain", model, parallel(2, 1, 1, False), parallel(1, 2, 1, False)),
    ]


def headroom_case(model: ModelShape, use_cpu: bool) -> Case:
    """Of as many layers as training has room for: TP1 DP2 to TP2 with ZeRO-1; on one GPU from the plain optimizer to
    ZeRO-1, since two slots that share it do not have it to themselves."""
    if use_cpu or torch.cuda.device_count() > 1:
        name, ranks, source, target = "tp1_dp2_to_tp2.distributed", 2, ParallelConfig(1, 1, 2), ParallelConfig(2, 1, 1)
    else:
        name, ranks, source, target = (
            "plain_to_distributed",
            1,
            ParallelConfig(distributed_optimizer=False),
            ParallelConfig(),
        )
    if not use_cpu:
        layers, nbytes = 1, 2 + 12 // ranks  # of a parameter: bf16 weights, and a part of main weights and moments
        while replace(model, num_layers=layers + 1).num_parameters * nbytes <= FULL * _training_nbytes():
            layers += 1
        model = replace(model, num_layers=layers)
    return Case(f"headroom.{name}", model, source, target)


def run_tight(case: Case, use_cpu: bool, staging_nbytes: int, fills: bool = False) -> dict[str, Any]:
    """One tight handover; where `fills`, the mode is chosen by the room that is left, as in a resize."""
    started = time.monotonic()
    plan = plan_of(case, staging_nbytes)
    plan.check()
    slots = range(len(plan.slots))
    new, old = (
        [
            start_rank(slot, use_cpu, len(slots), environment_for(parallel), TightRank) if side[slot] else None
            for slot in slots
        ]
        for side, parallel in ((plan.target, case.target), (plan.source, case.source))
    )
    try:
        entered = [
            each_its_own(
                [process for process in side if process],
                "hold_apart",
                [
                    (layout, is_new, parallel.distributed_optimizer, FULL if fills and not is_new else None)
                    for layout in layouts
                    if layout
                ],
            )
            for side, layouts, is_new, parallel in (
                (new, plan.target, True, case.target),
                (old, plan.source, False, case.source),
            )
        ]
        generations = [
            Generation(number, parallel, places, ranks, entered=each)
            for number, (parallel, side, each) in enumerate(
                ((case.source, old, entered[1]), (case.target, new, entered[0]))
            )
            for places, ranks in [_placed(side)]
        ]
        result: dict[str, Any] = {"case": case.name, "source": str(case.source), "target": str(case.target)}
        old_one, new_one = generations
        held, wanted = (
            {slot.slot_id: each.allocations for slot, each in zip(side.slots, side.entered, strict=True)}
            for side in generations
        )
        phased: PhasedPlan | None = cut_in_phases(plan, held, wanted, old_one.derived)
        if fills:
            usages = dict(enumerate(call_all([process for process in old if process], "usage")))
            limit = None if not use_cpu else int(phased.peak.max()) if phased else None
            choice = Headroom(old_one, limit, usages).choose(plan, wanted)
            phased = choice.phased
            result |= {"chosen_mode": choice.mode, "layers": case.model.num_layers}
            if not use_cpu:
                result |= {
                    "gpu_bytes": usages[0].total,
                    "free_bytes_while_training": usages[0].free,
                    "full": usages[0].reserved / _training_nbytes(),
                }
        assert phased is not None, "both states fit together: this would not be a tight handover"
        result |= _carry_out(plan, phased, old_one, new_one, [n or o for n, o in zip(new, old, strict=True)])
        result["is_right"] = all(call_all([process for process in new if process], "is_right"))
    finally:
        end_all([process for process in (*new, *old) if process])
    return {**result, "case_s": time.monotonic() - started}


def _carry_out(
    plan: Any, phased: PhasedPlan, old: Generation, new: Generation, members: Sequence[Process | None]
) -> dict[str, Any]:
    processes = [member for member in members if member]
    opened = each_its_own(processes, "open", [("tight", rank, len(processes)) for rank in range(len(processes))])
    call_all(processes, "connect", opened[0])
    call_all(processes, "warm_up")
    record = ResizeRecord(1, "benchmark", old.parallel, new.parallel)
    move = TightMove(
        plan, phased, old, new, [Remote(each) for each in processes], "tight", wait, MOVE_S, record, DIRECT_NBYTES
    )
    start = time.monotonic()
    move.carry_out()
    handover_s = time.monotonic() - start
    call_all(processes, "close")
    sides = [np.array([sum(s.nbytes for s in layout) for layout in side]) for side in (plan.source, plan.target)]
    larger = np.maximum(*sides)
    over = (move.peak - phased.staging) / np.maximum(larger, 1)
    return {
        "handover_s": handover_s,
        "phases": len(phased.phases),
        "weights_cast": any(phase.is_cast for phase in phased.phases),
        "nbytes_wire": phased.nbytes_wire,
        "nbytes_wire_lower_bound": plan.nbytes_lower_bound,
        "seconds": dict(record.phases),
        "larger_state_bytes": int(larger.max()),
        "staging_bytes": int(phased.staging.max()),
        "peak_bytes": int(move.peak.max()),
        "peak_bytes_predicted": int(phased.peak.max()),
        "peak_over_predicted": float((move.peak / phased.peak).max()),
        "tight_over_larger_state": float(over.max()),
    }


def _placed(side: Sequence[Process | None]) -> tuple[list[Any], list[Any]]:
    there = [(slot, process) for slot, process in enumerate(side) if process]
    return [SimpleNamespace(slot_id=slot) for slot, _ in there], [Remote(process) for _, process in there]


def derived_of(layouts: Sequence[RankLayout]) -> dict[Key, Key]:
    mains = {shard.tensor.key for layout in layouts for shard in layout if shard.tensor.kind == "main_param"}
    return {("param", name): (kind, name) for kind, name in mains}


def truth_of(view: torch.Tensor, shard: Shard) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of a view as integers, each with what belongs there: of a weight that is its main weight, rounded."""
    if shard.tensor.kind != "param":
        yield from with_truth(view, shard)
        return
    main = replace(shard.tensor, kind="main_param", dtype="float32", itemsize=4)
    rows = shard.box.lengths[0] if shard.box.lengths else 1
    at_once = max(1, CHUNK_NUMEL // max(1, shard.box.numel // max(1, rows)))
    for start in range(0, rows, at_once):
        box = Box(
            (shard.box.offsets[0] + start, *shard.box.offsets[1:]),
            (min(at_once, rows - start), *shard.box.lengths[1:]),
        )
        full = torch.empty(box.lengths, dtype=torch.float32, device=view.device)
        for part, expected in with_truth(full, Shard(main, box)):
            part.copy_(expected)
        yield as_integers(view[start : start + at_once]), as_integers(full.to(view.dtype))


def _training_nbytes() -> float:
    """What torch may have of a GPU while a generation trains there alone."""
    return training_nbytes(torch.cuda.get_device_properties(0).total_memory, 1.0, None)
