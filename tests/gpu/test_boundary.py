"""What a move reads right after the pause is what the old rank's last step wrote, however far the GPU was behind."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from moves import plan_between
from processes import Board, run_processes

from ray_etc.actors import sharing
from ray_etc.actors.context import Context
from ray_etc.actors.mover import Mover
from ray_etc.actors.session import GenerationReplaced, Session
from ray_etc.actors.state import StateShard, TrainState
from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import Shard, TensorSpec
from ray_etc.planners.parallel import ParallelConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SHAPE = (1024, 1024)
SHARDS = tuple(Shard(TensorSpec("param", name, SHAPE, "float32", 4), Box.whole(SHAPE)) for name in ("first", "second"))
BUSY_CYCLES = 4_000_000_000
"""About two seconds."""
WRITTEN = 7.0


def old_rank(board: Board, waits_for_gpu: bool) -> None:
    """Its only step updates one tensor on the default stream, and another on a side stream, both after long kernels."""
    first, second = (torch.zeros(SHAPE, device="cuda") for _ in range(2))
    side, go = torch.cuda.Stream(), threading.Event()
    session = Session(Context("test", 0, ParallelConfig(), 0, 0, 1, 0, 0))
    state = TrainState(
        [StateShard(shard.tensor, shard.box, view) for shard, view in zip(SHARDS, (first, second), strict=True)]
    )

    def loop() -> None:
        try:
            for _ in session.steps(state, 10):
                go.wait()
                torch.cuda._sleep(BUSY_CYCLES)
                first.fill_(WRITTEN)
                with torch.cuda.stream(side):
                    torch.cuda._sleep(BUSY_CYCLES)
                    second.fill_(WRITTEN)
        except GenerationReplaced:
            pass

    thread = threading.Thread(target=loop)
    thread.start()
    assert session.wait_entered(30.0)
    shared = sharing.share(state.views())  # kept until it was read
    board.put("shared", pickle.dumps(shared))
    session.begin(0)
    board.get("ready")
    if not waits_for_gpu:
        torch.cuda.synchronize = lambda *_: None
    while not session.propose_last_step(0):
        pass
    go.set()
    session.wait_paused(60.0)
    board.put("paused")
    board.get("read")
    session.replace()
    thread.join(30.0)


def new_rank(board: Board) -> list[list[float]]:
    """Moves at once what the old rank holds, and says which values it found in each tensor."""
    targets = [torch.full(SHAPE, -1.0, device="cuda") for _ in SHARDS]
    sources = sharing.open(pickle.loads(board.get("shared")))
    plan = plan_between({0: SHARDS}, {0: SHARDS})
    mover = Mover(plan.for_rank(0), None, sources, SHARDS, targets, SHARDS)
    mover.prepare()
    mover.run(30.0)  # the first time loads modules
    board.put("ready")
    board.get("paused")
    mover.run(30.0)
    found = [target.unique().tolist() for target in targets]
    board.put("read")
    mover.close()
    return found


def body(rank: int, board: Board, waits_for_gpu: bool) -> list[list[float]] | None:
    torch.cuda.set_device(0)
    if rank == 1:
        return new_rank(board)
    old_rank(board, waits_for_gpu)
    return None


@pytest.mark.parametrize("waits_for_gpu", [True, False], ids=["as it is", "if the pause did not wait for the GPU"])
def test_move_reads_what_the_last_step_wrote(waits_for_gpu: bool) -> None:
    outcomes = run_processes(2, body, waits_for_gpu, timeout_s=120)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert outcomes[1].value == [[WRITTEN if waits_for_gpu else 0.0]] * 2
