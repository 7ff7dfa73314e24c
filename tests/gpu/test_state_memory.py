"""The memory of a rank that comes and goes on a GPU, and a model that is built without room for it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from ray_etc.actors.memory import StateMemory
from ray_etc.actors.passes import Job, Pass

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GIB = 2**30


def test_built_emptied_and_made_again() -> None:
    from ray_etc.actors.managed import ManagedMemory

    torch.zeros(1, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(free - 4 * GIB, dtype=torch.uint8, device="cuda")
    before, _ = torch.cuda.mem_get_info()
    managed = ManagedMemory()
    managed.begin()
    weights = [torch.ones(2 * GIB // 4, device="cuda") for _ in range(4)]
    table = torch.arange(1000, device="cuda")
    weights[0].mul_(3.0)
    managed.end()
    memory = StateMemory(weights)
    during, _ = torch.cuda.mem_get_info()
    assert before - during < GIB
    memory.empty()
    managed.drop()
    del filler
    torch.cuda.empty_cache()
    memory.make(range(len(weights)))
    after, _ = torch.cuda.mem_get_info()
    assert free - after > 7 * GIB
    weights[0].fill_(2.0)
    assert float((weights[0] @ weights[0]).cpu()) == 4.0 * weights[0].numel()
    assert not weights[1].any()
    assert table.sum().item() == 499500


def test_released_although_nobody_ever_mapped_it() -> None:
    views = [torch.ones(2 * GIB // 4, device="cuda") for _ in range(2)]
    memory = StateMemory(views)
    memory.share()
    before, _ = torch.cuda.mem_get_info()
    memory.release([0])
    after, _ = torch.cuda.mem_get_info()
    assert after - before >= 2 * GIB
    assert views[1].all()


def test_pass_lets_go_of_its_memory_without_a_garbage_collector() -> None:
    source = torch.ones(1 << 20, dtype=torch.int32, device="cuda")
    into, sums = torch.zeros_like(source), torch.zeros(2, dtype=torch.int64, device="cuda")
    gc.disable()
    try:
        copying = Pass([Job(source, into, left=0, arrived=1)], sums)
        copying.run()
        torch.cuda.synchronize()
        assert sums[0] == sums[1] != 0
        gone = weakref.ref(source)
        del source, copying
        assert gone() is None
    finally:
        gc.enable()
