"""One rank of a generation, in its own process: what actors/rank.py does, and a look at what Megatron holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from logical import RankShards, read
from oracle import NamedPart, load_with_megatron, memory_by_megatron, parts_by_megatron, save_with_megatron

from ray_etc.actors import sharing
from ray_etc.actors.context import Context
from ray_etc.actors.mover import Mover, MoveReport
from ray_etc.actors.session import open_session
from ray_etc.actors.small_state import SmallState, load_small_state
from ray_etc.actors.transports import GlooTransport, NcclTransport
from ray_etc.actors.transports.base import Deadline
from ray_etc.megatron import Task
from ray_etc.planners.layout import RankLayout
from ray_etc.planners.parallel import Coordinate, ParallelConfig
from ray_etc.planners.rank_plan import RankPlan

TIMEOUT_S = 120.0

Memory = dict[str, torch.Tensor]

Build = Callable[[ParallelConfig], Any]
"""Makes a `Task` or a `Trainee` under a configuration, in each of its ranks."""


class CountingGloo(GlooTransport):
    """Counts the bytes that are really sent."""

    nbytes_sent = 0

    def exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], timeout_s: float
    ) -> None:
        self.nbytes_sent += sum(message.nbytes for message in sends.values())
        super().exchange(sends, receives, timeout_s)


class CountingNccl(NcclTransport):
    """Counts the bytes that are really sent once it is connected."""

    nbytes_sent = 0

    def post(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
        deadline: Deadline,
    ) -> None:
        self.nbytes_sent += sum(buffer.nbytes for message in sends.values() for buffer in message)
        super().post(sends, receives, deadline)


def spoil(view: torch.Tensor) -> None:
    """Make every element worthless: NaN, or the least number."""
    view.detach().fill_(float("nan") if view.is_floating_point() else torch.iinfo(view.dtype).min)


class Host:
    """Made in a process that has joined its generation's group. It shares its memory, and moves it as it is told."""

    def __init__(self, context: Context, build: Build) -> None:
        open_session(context)
        self._context = context
        # Memory that nothing has written is NaN while the model is made, so that nothing is right by luck.
        torch.use_deterministic_algorithms(True, warn_only=True)
        self.task = build(context.parallel)
        torch.use_deterministic_algorithms(False)
        if context.generation:  # the warm-up step has left zeros
            for view in self.task.state.views():
                spoil(view)
        _wait_for_gpu()
        self._steps = 0
        self._transport: CountingGloo | CountingNccl | None = None
        self._mapped: list[torch.Tensor] = []
        self._mover: Mover | None = None

    def enter(self) -> tuple[RankLayout, sharing.SharedMemory]:
        self._shared = sharing.share(self.task.state.views())  # kept, because others may open it
        return self.task.state.layout(), self._shared

    def train(self, steps: int) -> list[dict[str, Any]]:
        self._steps += steps
        reports = []
        for _ in range(steps):
            reports.append(self.task.train_step())
            self.task.state.hold()
        _wait_for_gpu()  # as at the boundary where a rank pauses
        return reports

    def change(self, change: Callable[[Task], None]) -> None:
        with torch.no_grad():
            change(self.task)
        self.task.state.hold()

    def look(self, look: Callable[[Any], Any]) -> Any:
        return look(self.task)

    # The handover, in the order of actors/handover.py ----------------------------------------------------------------

    def open_migration(self, rank: int, world_size: int) -> bytes | None:
        kind = CountingNccl if torch.cuda.is_available() else CountingGloo
        self._transport = kind(world_size, rank, "migration")
        return self._transport.rendezvous("127.0.0.1") if rank == 0 else None

    def connect_migration(self, rendezvous: bytes) -> None:
        assert self._transport is not None
        self._transport.connect(rendezvous, TIMEOUT_S)

    def prepare_move(
        self, plan: RankPlan, source: RankLayout, shared: sharing.SharedMemory | None, is_new: bool
    ) -> None:
        state = self.task.state
        if is_new:
            self._mapped = sharing.open(shared) if shared is not None else []
            self._mover = Mover(plan, self._transport, self._mapped, source, state.views(), state.layout())
        else:
            self._mover = Mover(plan, self._transport, state.views(), source, [], ())
        self._mover.prepare()

    def move(self) -> tuple[MoveReport, int]:
        assert self._mover is not None
        assert self._transport is not None
        return self._mover.run(TIMEOUT_S), self._transport.nbytes_sent

    def small_state(self) -> tuple[int, SmallState]:
        return self._steps, SmallState.of(self.task.state)

    def load(self, next_step: int, replicated: bytes, streams: Mapping[Coordinate, bytes]) -> None:
        self._steps = next_step
        load_small_state(self.task.state, replicated, streams, self._context.coordinate, next_step)

    def end_migration(self) -> None:
        assert self._mover is not None
        assert self._transport is not None
        self._mover.close()
        self._transport.destroy_group()
        self._mover, self._transport, self._mapped = None, None, []

    # What Megatron itself says that it holds -------------------------------------------------------------------------

    def named_parts(self) -> list[NamedPart]:
        return parts_by_megatron(self.task)

    def shards(self) -> RankShards:
        return read(self.task.state)

    def memory(self) -> Memory:
        return memory_by_megatron(self.task)

    def save(self, folder: Path) -> None:
        save_with_megatron(self.task, folder)

    def reload(self, folder: Path) -> None:
        """Lose everything, and take it from a checkpoint of Megatron's."""
        state = self.task.state
        for view in [*state.views(), *(live for live, _ in state.changed_early)]:
            spoil(view)
        load_with_megatron(self.task, folder)


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
