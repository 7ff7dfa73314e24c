"""A rank's part in a handover that is given up, without Ray: what comes late is refused, what still runs is ended."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_session import CONTEXT

from ray_etc.actors import rank as rank_module
from ray_etc.actors.errors import ResizeFailed
from ray_etc.actors.memory import StateMemory
from ray_etc.planners.parallel import ParallelConfig


@pytest.fixture
def rank() -> Any:
    rank = rank_module.Rank.__ray_metadata__.modified_class()  # type: ignore[attr-defined]
    rank.become(CONTEXT, {})
    return rank


@pytest.mark.parametrize(
    ("parallel", "set_by_user", "connections"),
    [
        (ParallelConfig(data_parallel=2), None, None),
        (ParallelConfig(tensor_parallel=2), None, "1"),
        (ParallelConfig(context_parallel=2), None, "1"),
        (ParallelConfig(tensor_parallel=2), "8", "8"),
    ],
    ids=str,
)
def test_launches_go_one_by_one_where_megatron_relies_on_their_order(
    monkeypatch: pytest.MonkeyPatch, parallel: ParallelConfig, set_by_user: str | None, connections: str | None
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if set_by_user is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = set_by_user
    rank: Any = rank_module.Rank.__ray_metadata__.modified_class()  # type: ignore[attr-defined]
    rank.become(replace(CONTEXT, parallel=parallel), {})
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections


def test_calls_of_a_handover_that_was_given_up_are_refused_however_late_they_come(rank: Any) -> None:
    rank.end_migration("first", True)
    calls: dict[str, tuple[Any, ...]] = {
        "open_migration": ("ETC_GLOO", "first", 0, 1),
        "connect_migration": ("first", b"", 1.0),
        "prepare_move": ("first", None, (), None, False, 1),
        "move": ("first", 1.0),
    }
    for name, arguments in calls.items():
        with pytest.raises(ResizeFailed, match="the handover over first has ended"):
            getattr(rank, name)(*arguments)


def test_buffers_go_when_the_move_has_noticed_that_its_group_is_closed(
    rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_moving, is_closed = threading.Event(), threading.Event()
    happened = []

    class Moving:
        def run(self, timeout_s: float, on_event: Any) -> None:
            is_moving.set()
            assert is_closed.wait(timeout_s)
            happened.append("move ended")

        def close(self) -> None:
            happened.append("buffers gone")

    rank._mover, rank._memory = Moving(), StateMemory([torch.zeros(1)])
    monkeypatch.setattr(rank_module, "close_group", lambda group: is_closed.set())
    moving = threading.Thread(target=rank.move, args=("group", 10.0))
    moving.start()
    assert is_moving.wait(10.0)
    rank.end_migration("group", True)
    moving.join(10.0)
    assert happened == ["move ended", "buffers gone"]
    assert rank._mover is None
