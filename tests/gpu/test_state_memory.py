"""The memory of a rank that comes and goes on a GPU, and a model that is built without room for it."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
from processes import Board, run_processes

from ray_etc.actors import sharing
from ray_etc.actors.memory import StateMemory
from ray_etc.actors.passes import Job, Pass

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MIB = 2**20
GIB = 2**30


@pytest.fixture
def filler() -> Iterator[torch.Tensor]:
    """All but 4 GiB of a GPU; the traceback of a test that failed would keep it from the tests that follow."""
    torch.zeros(1, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(free - 4 * GIB, dtype=torch.uint8, device="cuda")
    yield filler
    filler.untyped_storage().resize_(0)
    torch.cuda.empty_cache()


def test_built_emptied_and_made_again(filler: torch.Tensor) -> None:
    from ray_etc.actors.host_memory import HostMemory

    before, _ = torch.cuda.mem_get_info()
    on_host = HostMemory()
    on_host.begin()
    weights = [torch.ones(2 * GIB // 4, device="cuda") for _ in range(4)]
    tables = [torch.arange(n, device="cuda") for n in (1000, 1 << 26)]
    weights[0].mul_(3.0)
    tables[1].neg_()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    on_host.end()
    memory = StateMemory(weights)
    during, _ = torch.cuda.mem_get_info()
    assert before - during < GIB
    assert on_host.nbytes > 8 * GIB
    addresses = [table.data_ptr() for table in tables]
    memory.empty()
    on_host.settle()
    assert 512 * MIB <= on_host.nbytes < 640 * MIB
    settled, _ = torch.cuda.mem_get_info()
    assert 256 * MIB < during - settled < GIB  # the driver has a part of it at hand
    assert addresses == [table.data_ptr() for table in tables]
    assert [table.sum().item() for table in tables] == [499500, -(((1 << 26) - 1) << 25)]
    filler.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    emptied, _ = torch.cuda.mem_get_info()
    memory.make(range(len(weights)))
    assert emptied - torch.cuda.mem_get_info()[0] > 7 * GIB
    weights[0].fill_(2.0)
    assert float((weights[0] @ weights[0]).cpu()) == 4.0 * weights[0].numel()
    assert not weights[1].any()
    del tables
    torch.cuda.empty_cache()
    assert on_host.nbytes == 0


READERS = {0: 0, 1: 1, 2: 2}
"""How often each allocation is opened, read and let go of again before it is released."""


def lending_body(rank: int, board: Board) -> list[int]:
    if rank == 1:
        shared = pickle.loads(board.get("shared"))
        for number, times in READERS.items():
            for _ in range(times):
                [view] = sharing.open(shared, [number])
                assert view[-1] == 1.0
                del view
        board.put("read")
        board.get("released")
        return []
    memory = StateMemory([torch.ones(2 * GIB // 4, device="cuda") for _ in range(len(READERS) + 1)])
    board.put("shared", pickle.dumps(memory.share()))
    board.get("read")
    given_back = []
    for number in READERS:
        before, _ = torch.cuda.mem_get_info()
        memory.release([number])
        given_back.append(torch.cuda.mem_get_info()[0] - before)
    board.put("released")
    return given_back


def test_released_however_often_it_was_mapped() -> None:
    owner, reader = run_processes(2, lending_body, timeout_s=120)
    assert [owner.error, reader.error] == [None, None]
    assert all(nbytes >= 2 * GIB for nbytes in owner.value), owner.value


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
