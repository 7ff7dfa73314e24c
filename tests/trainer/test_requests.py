"""What is aimed for after a request was answered, failed, withdrawn or overtaken by the end of the run."""

from __future__ import annotations

import pytest

from ray_etc.actors.errors import ResizeFailed
from ray_etc.actors.record import ResizeRecord
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.requests import Aim, RequestBox

DP2, DP4 = ParallelConfig(data_parallel=2), ParallelConfig(data_parallel=4)


def record(reason: str = "requested", error: str | None = None) -> ResizeRecord:
    return ResizeRecord(1, reason, DP2, DP4, error=error)


@pytest.fixture
def box() -> RequestBox:
    return RequestBox(Aim(2, DP2.with_world_size))


def test_success_keeps_the_new_aim(box: RequestBox) -> None:
    done = box.ask(DP4, DP4.with_world_size)
    assert box.parallel == DP4
    box.answer(record())
    assert done.result(0).parallel_to == DP4
    assert (box.aim.number, box.parallel) == (4, None)


def test_failure_brings_the_old_aim_back(box: RequestBox) -> None:
    done = box.ask(DP4, DP4.with_world_size)
    box.answer(record(error="a peer was silent"))
    with pytest.raises(ResizeFailed, match="a peer was silent"):
        done.result(0)
    assert box.aim.number == 2


def test_another_resize_is_no_answer(box: RequestBox) -> None:
    done = box.ask(DP4, DP4.with_world_size)
    box.answer(record(reason="node draining"))
    assert not done.done()


def test_withdrawn_request_is_forgotten(box: RequestBox) -> None:
    done = box.ask(DP4, DP4.with_world_size)
    box.withdraw(done)
    assert (box.aim.number, box.parallel) == (2, None)
    box.answer(record())
    assert not done.done()


def test_one_request_at_a_time(box: RequestBox) -> None:
    box.ask(DP4, DP4.with_world_size)
    with pytest.raises(ResizeFailed, match="TP1 PP1 DP4 ZeRO-1 is already asked for"):
        box.ask(DP2, DP2.with_world_size)


def test_the_end_of_the_run_answers(box: RequestBox) -> None:
    done = box.ask(DP4, DP4.with_world_size)
    box.close()
    with pytest.raises(ResizeFailed, match="the run has ended"):
        done.result(0)
    with pytest.raises(ResizeFailed, match="the run has ended"):
        box.ask(DP4, DP4.with_world_size)
