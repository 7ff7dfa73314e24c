"""The memory mode by the room that ranks report, on GPUs and on slots with a limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ray_etc.actors.errors import HoldsMore
from ray_etc.actors.generation import Generation
from ray_etc.actors.headroom import Choice, Headroom
from ray_etc.actors.memory import SHADOW_NBYTES, part_of_gpu, training_nbytes
from ray_etc.actors.messages import Entered, Usage
from ray_etc.actors.outcomes import Failed, not_built
from ray_etc.actors.slots import Slot
from ray_etc.actors.tight import peak_of_slots
from ray_etc.planners.errors import DoesNotFit
from ray_etc.planners.expected import expected_layouts
from ray_etc.planners.layout import Allocations, TensorSpec
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.parallel import ParallelConfig

GIB = 2**30
MODEL = [
    TensorSpec(kind, f"{layer}", (1024, 1024, 256), "float32", 4, 0, layer)
    for kind in ("param", "exp_avg", "exp_avg_sq")
    for layer in range(20)
]
"""60 tensors of 1 GiB."""
TP2, PP2 = ParallelConfig(tensor_parallel=2), ParallelConfig(pipeline_parallel=2)


def choose(limit_nbytes: int | None = None, room: dict[int, int] | None = None, **usage: Any) -> Choice:
    """From TP2 to PP2: each rank holds 30 GiB before and after; `usage` is that of both old ranks, `room` of the new
    ones, in GiB by slot."""
    source, target = (dict(enumerate(expected_layouts(MODEL, side))) for side in (TP2, PP2))
    allocations = {
        slot: Allocations.expected(layout, together=()) for side in (source, target) for slot, layout in side.items()
    }
    old = Generation(
        0,
        TP2,
        [Slot(slot, cast(Any, None)) for slot in source],
        entered=[Entered(layout, None, Allocations.expected(layout, together=())) for layout in source.values()],
    )
    plan = make_plan(source, target, {0: "a", 1: "a"}, staging_nbytes=GIB // 2)
    reported = {slot: Usage(**usage) for slot in source}
    seen = {slot: gib * GIB for slot, gib in (room or {}).items()}
    return Headroom(old, limit_nbytes, reported).choose(plan, allocations, seen)


def gpu(total: int, reserved: int, scratch: int = 0, kept: int = 0) -> dict[str, Any]:
    return {
        "kept": kept * GIB,
        "total": total * GIB,
        "free": (total - reserved) * GIB,
        "reserved": reserved * GIB,
        "scratch": scratch * GIB,
    }


def test_without_a_limit_it_is_safe() -> None:
    assert choose(total=None, free=None, reserved=30 * GIB, scratch=0).mode == "safe"


def test_safe_while_the_new_state_fits_beside_a_training_step() -> None:
    """33 GiB of old state and activations, 30 of new state, almost 3 of staging, 4 for the process: 70."""
    roomy, close = choose(**gpu(73, 33)), choose(**gpu(70, 33))
    assert (roomy.mode, roomy.releases_early) == ("safe", False)
    assert 62 * GIB < roomy.nbytes_peak <= 63 * GIB
    assert (close.mode, close.releases_early) == ("safe", True)  # no room for a step before the old state is gone
    assert choose(**gpu(69, 33)).mode == "tight"


def test_what_new_processes_leave_counts_where_it_is_less_than_was_guessed() -> None:
    """30 GiB of new state, almost 3 of staging, 1 for the communicator: 34. The guess leaves 36, or more."""
    at = gpu(73, 33)
    guessed, seen = choose(**at), choose(room={0: 34, 1: 34}, **at)
    assert (guessed.mode, seen.mode) == ("safe", "safe")
    assert (guessed.releases_early, seen.releases_early) == (False, True)
    assert guessed.nbytes_peak == seen.nbytes_peak
    assert choose(room={1: 33}, **at).mode == "tight"
    assert choose(room={0: 99, 1: 99}, **gpu(69, 33)).mode == "tight"  # others may have taken that meanwhile
    assert choose(79 * GIB, room={0: 40, 1: 40}, **gpu(85, 33)).mode == "safe"
    assert choose(79 * GIB, room={0: 39, 1: 39}, **gpu(85, 33)).mode == "tight"  # of which 6 are not the slot's
    with pytest.raises(DoesNotFit, match=r"slot 1 on a has no room .* releasing it phase by phase"):
        choose(room={1: 0}, **at)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.distributed.DistBackendError("NCCL error: Call to CUDA function failed: Cuda failure 2 'out of memory'"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        ValueError("hidden_size must be divisible by num_attention_heads"),
    ],
    ids=["tensor", "communicator", "context", "handle", "no lack of memory"],
)
def test_only_a_build_that_lacks_memory_begins_again_in_another_mode(error: Exception) -> None:
    raised = not_built(1, TP2, Failed.of(error, None, __file__))
    assert isinstance(raised, HoldsMore) == (not isinstance(error, ValueError))
    assert str(error) in str(raised)


def test_gradients_count_twice() -> None:
    assert choose(**gpu(82, 45, scratch=10)).mode == "tight"
    roomy = choose(**gpu(92, 45, scratch=10))
    assert roomy.mode == "safe"
    assert roomy.nbytes_peak == choose(**gpu(92, 45)).nbytes_peak + 20 * GIB


def test_tight_while_the_phases_and_an_empty_process_fit() -> None:
    chosen = choose(**gpu(40, 34))
    assert chosen.mode == "tight"
    assert chosen.nbytes_peak <= 1.08 * 30 * GIB + 3 * GIB
    with pytest.raises(DoesNotFit, match=r"slot 0 on a has no room .* 0 B, "):
        choose(**gpu(37, 34))


def test_what_a_process_keeps_besides_its_state_stays_to_its_end_and_comes_anew_beside_it() -> None:
    """10 GiB of a second model: of 43 reserved 33 can be given back, and the new process has 10 of its own."""
    room, none = choose(**gpu(58, 43, kept=10)), choose(**gpu(58, 43))
    assert (room.mode, none.mode) == ("tight", "tight")
    assert room.nbytes_peak == none.nbytes_peak + 20 * GIB
    with pytest.raises(DoesNotFit, match=r"releasing it phase by phase 34\.0 GiB of 33\.0 GiB, 1\.0 GiB too much"):
        choose(**gpu(57, 43, kept=10))
    assert (choose(**gpu(89, 43)).mode, choose(**gpu(89, 43, kept=10)).mode) == ("safe", "tight")
    assert choose(**gpu(140, 43, kept=10)).nbytes_peak == choose(**gpu(140, 43)).nbytes_peak + 20 * GIB


def test_limit_of_a_slot() -> None:
    cpu: dict[str, Any] = {"total": None, "free": None, "reserved": 30 * GIB, "scratch": 0}
    assert choose(63 * GIB, **cpu).mode == "safe"
    assert choose(62 * GIB, **cpu).mode == "tight"
    with pytest.raises(DoesNotFit, match=r"needs 62\.\d GiB of 32\.0 GiB there are"):
        choose(32 * GIB, **cpu)
    assert choose(69 * GIB, **gpu(140, 33)).mode == "tight"


def test_training_leaves_room_for_the_shadow() -> None:
    assert training_nbytes(140 * GIB, 1.0, None) == 133 * GIB
    assert training_nbytes(140 * GIB, 0.5, None) == 63 * GIB
    assert training_nbytes(140 * GIB, 1.0, 80 * GIB) == 73 * GIB
    assert training_nbytes(8 * GIB, 1.0, None) == 7 * GIB
    assert SHADOW_NBYTES == 4 * GIB


def test_slots_that_share_a_gpu_do_not_count_its_free_memory_twice() -> None:
    """Half of 140 GiB each: 33 reserved by one training, 30 by the other, 4 for each process."""
    free, total = part_of_gpu(71 * GIB, 140 * GIB, 33 * GIB, 0.5)
    assert (free, total) == (33 * GIB, 70 * GIB)
    of_half: dict[str, Any] = {"total": total, "free": free, "reserved": 33 * GIB, "scratch": 0}
    of_all: dict[str, Any] = {"total": 140 * GIB, "free": 71 * GIB, "reserved": 33 * GIB, "scratch": 0}
    assert (choose(**of_half).mode, choose(**of_all).mode) == ("tight", "safe")
    assert part_of_gpu(71 * GIB, 140 * GIB, 33 * GIB, 1.0) == (71 * GIB, 140 * GIB)
    assert part_of_gpu(2 * GIB, 140 * GIB, 33 * GIB, 0.5)[0] == 2 * GIB  # the other slot's has grown past its part


def test_peak_of_a_slot_is_that_of_its_processes_together() -> None:
    """Slot 3 stays, slot 5 is leaving, so that its old rank reports for itself, and slot 8 has only a new rank."""
    plan: Any = SimpleNamespace(slots=(3, 5, 8))
    reports: Any = [SimpleNamespace(nbytes_peak=nbytes) for nbytes in (100, 200, 400)]
    assert peak_of_slots(plan, {3, 8}, reports, {3: 10, 5: 190}).tolist() == [110, 200, 400]
