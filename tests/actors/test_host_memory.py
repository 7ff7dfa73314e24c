"""Memory of the host for a model without room on its GPU, where the host has too little: refused with the numbers."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_session import CONTEXT

from ray_etc.actors import rank as rank_module
from ray_etc.actors.outcomes import Failed, not_built
from ray_etc.planners.parallel import ParallelConfig

host_memory = pytest.importorskip("ray_etc.actors.host_memory", reason="cuda.bindings is not installed")

GIB = 2**30


def test_a_sixteenth_of_the_host_stays_free() -> None:
    assert host_memory.lack_of_memory(56 * GIB, 0, 64 * GIB, 60 * GIB) is None
    assert host_memory.lack_of_memory(57 * GIB, 8 * GIB, 64 * GIB, 60 * GIB) == (
        "a model without room on its GPU is built in memory of the host, has 8.0 GiB of that and asked for 57.0 GiB "
        "more, of 56.0 GiB there are for it (60.0 GiB available, less a 16th of 64.0 GiB): leave room for both "
        "generations on the GPU, or use hosts with more memory"
    )
    assert "of 0 B there are" in host_memory.lack_of_memory(1, 0, 64 * GIB, GIB)


def test_this_host_is_read_rightly() -> None:
    total, available = host_memory.host_nbytes()
    assert total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert total // 100 < available < total


def test_the_driver_is_not_asked_for_what_the_host_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def reserve(nbytes: int) -> int:
        asked.append(nbytes)
        return 2 << 40

    monkeypatch.setattr(host_memory, "host_nbytes", lambda: (64 * GIB, 8 * GIB))
    memory = host_memory.HostMemory.__new__(host_memory.HostMemory)
    memory._granularity, memory._segments, memory._host = 2 << 20, {1 << 40: (GIB, None)}, None
    monkeypatch.setattr(memory, "_reserve", reserve)
    monkeypatch.setattr(memory, "_create", lambda address, nbytes, where: object())
    assert memory._allocate(5 * GIB, 0, None) is None
    assert asked == []
    assert "has 1.0 GiB of that and asked for 5.0 GiB more, of 4.0 GiB" in memory.refusal
    assert memory._allocate(3 * GIB + 1, 0, None) == 2 << 40
    assert asked == [3 * GIB + (2 << 20)]
    assert memory.refusal is None
    assert memory.nbytes == 4 * GIB + (2 << 20)


def test_a_rank_that_got_none_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rank: Any = rank_module.Rank.__ray_metadata__.modified_class()  # type: ignore[attr-defined]
    rank.become(CONTEXT, {})
    rank._on_host = SimpleNamespace(refusal="the host has 4.0 GiB")
    monkeypatch.setattr(rank, "_join_world", lambda store, timeout_s: None)

    def loop() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    outcome = rank.train(loop, None, ("", 0), 1.0, (1.0, None), False)
    assert isinstance(outcome, Failed)
    message = str(not_built(0, ParallelConfig(), outcome))
    assert message.endswith("OutOfMemoryError: CUDA out of memory\nthe host has 4.0 GiB")
