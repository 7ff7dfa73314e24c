from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Board, run_processes, wait_gone

from ray_etc.actors import sharing


def flat_buffer_model() -> tuple[torch.Tensor, list[torch.nn.Parameter]]:
    """As Megatron's distributed optimizer has it: parameters whose data are views of one flat buffer."""
    buffer = torch.arange(1000, dtype=torch.float32)
    parameters = [torch.nn.Parameter(torch.empty(0)) for _ in range(3)]
    for parameter, (start, shape) in zip(parameters, [(0, (10, 10)), (100, (5, 20)), (500, (7,))], strict=True):
        stop = start + int(torch.tensor(shape).prod())
        parameter.data = buffer[start:stop].view(shape)
    return buffer, parameters


def shared_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("torch_")}


def mapped(pid: int | str = "self") -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/torch_" in line]


def test_views_keep_pointing_at_the_memory_that_moved() -> None:
    buffer, parameters = flat_buffer_model()
    before = buffer.data_ptr()
    shared = sharing.share([*parameters, buffer[10:50].view(4, 10).t()])
    assert buffer.data_ptr() != before
    assert len(shared.storages) == 1
    assert [view.offset for view in shared.views] == [0, 100, 500, 10]
    assert shared.views[3].strides == (1, 10)
    with torch.no_grad():
        for parameter in parameters:
            parameter.sub_(1.0)
    assert torch.equal(buffer[:200], torch.arange(200) - 1.0)
    assert torch.equal(parameters[0].data, buffer[:100].view(10, 10))
    buffer[500] = 99
    assert float(parameters[2].detach()[0]) == 99


def test_sharing_again_moves_nothing() -> None:
    buffer, parameters = flat_buffer_model()
    first = sharing.share(parameters)
    place = buffer.data_ptr()
    assert sharing.share(parameters) == first
    assert buffer.data_ptr() == place


def test_metadata_is_small() -> None:
    buffer = torch.zeros(1 << 22)
    shared = sharing.share([buffer[i : i + 100] for i in range(0, 200_000, 100)])
    assert len(shared.storages) == 1
    assert len(pickle.dumps(shared)) < 60 * 2000


def owner_and_reader(rank: int, board: Board, kill: bool) -> Any:
    if rank == 0:
        buffer, parameters = flat_buffer_model()
        empty = torch.empty(0, 4, dtype=torch.bfloat16)
        steps = torch.tensor(7, dtype=torch.int64)
        views = [*parameters, buffer[10:50].view(4, 10).t(), empty, steps]
        board.put("shared", pickle.dumps(sharing.share(views)))
        board.get("opened")
        with torch.no_grad():
            parameters[0][0, 0] = 42
        board.put("written")
        board.get("seen")
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return None
    shared = pickle.loads(board.get("shared"))
    views = sharing.open(shared)
    board.put("opened")
    board.get("written")
    live = float(views[0][0, 0])
    board.put("seen")
    wait_gone(shared.storages[0].pid)
    shapes = [(tuple(view.shape), tuple(view.stride()), view.dtype) for view in views]
    values = [float(views[0][9, 9]), float(views[2][0]), float(views[3][1, 2]), int(views[5])]
    mapped_before = len(mapped())
    del views
    return live, shapes, values, mapped_before, len(mapped())


@pytest.mark.parametrize("kill", [False, True], ids=["owner_exits", "owner_killed"])
def test_reader_sees_the_same_memory_and_keeps_it_when_the_owner_is_gone(kill: bool) -> None:
    names = shared_names()
    owner, reader = run_processes(2, owner_and_reader, kill)
    assert owner.exit_code == (-signal.SIGKILL if kill else 0)
    assert reader.error is None
    live, shapes, values, mapped_before, mapped_after = reader.value
    assert live == 42.0
    assert shapes == [
        ((10, 10), (10, 1), torch.float32),
        ((5, 20), (20, 1), torch.float32),
        ((7,), (1,), torch.float32),
        ((10, 4), (1, 10), torch.float32),
        ((0, 4), (4, 1), torch.bfloat16),
        ((), (), torch.int64),
    ]
    assert values == [99.0, 500.0, 31.0, 7]
    assert mapped_before == 2
    assert mapped_after == 0
    assert shared_names() == names


def test_owner_that_is_gone_is_told_in_one_line() -> None:
    shared = sharing.SharedMemory((sharing.HostHandle(2**22 + 1, 5, (0, 1), 64),), ())
    with pytest.raises(FileNotFoundError, match=r"process 4194305.*one container"):
        sharing.open(shared)


def test_descriptor_that_means_another_file_by_now_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "other").open("w+b") as other:
        handle = sharing.HostHandle(os.getpid(), other.fileno(), (0, 1), 64)
        with pytest.raises(FileNotFoundError, match="no longer holds"):
            sharing.open(sharing.SharedMemory((handle,), ()))
