"""A rank: one training process, as a Ray actor in one slot, of one generation.

Until it is told which by `become`, the process is nobody's; a standby waits so, with everything imported.

`train` runs the user's loop in a thread of its own; everything else is a control call and answers while it runs.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import ray
import torch
import torch.distributed as dist

from ray_etc.actors import sharing
from ray_etc.actors.context import Context, environment_for
from ray_etc.actors.errors import ResizeFailed
from ray_etc.actors.imports import import_all, import_all_in_background
from ray_etc.actors.memory import StateMemory, limit_training
from ray_etc.actors.messages import Boundary, Entered, Load, Progress, Usage
from ray_etc.actors.mover import Mover
from ray_etc.actors.outcomes import Failed, Finished, Outcome, Replaced
from ray_etc.actors.phased import PhaseReport, RankPhase, check_derived, move_as_new, move_as_old, warm_up
from ray_etc.actors.session import GenerationReplaced, open_session
from ray_etc.actors.state import TrainState
from ray_etc.actors.transports import close_group, get_group, open_group
from ray_etc.planners.layout import RankLayout
from ray_etc.planners.parallel import Coordinate, ParallelConfig
from ray_etc.planners.rank_plan import RankPlan

if TYPE_CHECKING:
    from ray_etc.actors.host_memory import HostMemory

logger = logging.getLogger(__name__)

SCRATCH_S = 20.0
"""How long a new rank that was killed may take to give its memory back."""
LEAVE_GROUP_S = 15.0
"""How long what works for a group may take to notice that the group is closed; an abort waits 5 s, then 5 s more."""


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 4, "train": 1})
class Rank:
    """See the module's docstring. Methods stand in about the order in which a generation's life calls them."""

    def __init__(self) -> None:
        self._is_taken = threading.Event()
        self._store: dist.TCPStore | None = None
        self._on_host: HostMemory | None = None
        self._memory: StateMemory | None = None
        self._mapped: list[torch.Tensor] = []
        self._mover: Mover | None = None
        self._staging_nbytes = 0
        self._limit: tuple[float, int | None] = (0.0, None)
        self._working = threading.Lock()
        self._ended: set[str] = set()

    # Before it is a rank ---------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="train")
    def warm(self, modules: list[str], in_background: bool) -> int:
        """Import them, in this order, and answer with the process id. Makes no CUDA context by itself."""
        import_all_in_background(modules) if in_background else import_all(modules)
        if torch.cuda.is_initialized():
            logger.warning("some import of the train loop makes a CUDA context: this standby takes GPU memory")
        return os.getpid()

    @ray.method(concurrency_group="control")
    def wait_taken(self) -> None:
        """Until this process has become a rank: a call that is open all the time tells of its death at once."""
        self._is_taken.wait()

    @ray.method(concurrency_group="control")
    def become(self, context: Context, environment: dict[str, str]) -> None:
        """From now on this process is the rank of `context`."""
        self._is_taken.set()
        os.environ.update(environment)
        os.environ.update(environment_for(context.parallel))
        if ray.util.get_node_ip_address().startswith("127."):
            for library in ("GLOO", "NCCL"):  # neither looks at loopback by itself
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        self._session = open_session(context)
        self._context = context
        # Of its own: the default stream of a rank that is stuck in a collective never gets to anything again.
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    # A generation's life ---------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Rank 0 only: the store where this generation's process group meets, as (host, port)."""
        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
        return host, self._store.port

    @ray.method(concurrency_group="train")
    def train(
        self,
        loop: Callable[..., Any],
        config: dict[str, Any] | None,
        store: tuple[str, int],
        timeout_s: float,
        limit: tuple[float, int | None],
        is_emptied: bool,
    ) -> Outcome:
        """Join the generation's process group and run the user's loop to its end.

        `limit` is its share of a GPU, and what all processes of a slot may have of its memory. Where the state is
        emptied once it is built, it is built in memory of the host.
        """
        self._limit = limit
        try:
            self._session.begin_stage("join")
            self._join_world(store, timeout_s)
            self._session.begin_stage("build")
            if torch.cuda.is_available() and is_emptied:
                from ray_etc.actors.host_memory import HostMemory  # what it needs comes with torch for CUDA

                self._on_host = HostMemory()
                self._session.on_enter = self._on_host.end
                self._on_host.begin()
            elif torch.cuda.is_available():
                limit_training(*limit)
            value = loop(config) if config is not None else loop()
            if self._session.state is None:
                raise RuntimeError(
                    "the train loop returned without a state to move: iterate over ray_etc.steps(state, total=...)"
                )
            return Finished(value)
        except GenerationReplaced:
            return Replaced()
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) and self._on_host is not None and self._on_host.refusal:
                error.add_note(self._on_host.refusal)
            return Failed.of(error, self._session.current_step, __file__)
        finally:
            self._session.end()

    @ray.method(concurrency_group="control")
    def wait_entered(self, timeout_s: float, is_emptied: bool = False) -> Entered | None:
        """Until the loop stands before its first step; None where it ended instead. Then its memory is shared, or
        emptied for a tight handover."""
        if not self._session.wait_entered(timeout_s):
            return None
        state = self._state()
        self._memory = StateMemory(state.views(), state.scratch)
        if is_emptied:
            self._memory.empty()
            if self._on_host is not None:
                self._on_host.settle()
                limit_training(*self._limit)  # not before, since torch counts memory of the host, too
        shared = None if is_emptied else self._memory.share()
        room = self._memory.room(self._limit[0] or 1.0)
        return Entered(state.layout(), shared, self._memory.allocations, state.derived, self._session.stages, room)

    @ray.method(concurrency_group="control")
    def begin(self, first_step: int) -> None:
        self._session.begin(first_step)

    @ray.method(concurrency_group="control")
    def next_step(self) -> int:
        return self._session.next_step()

    @ray.method(concurrency_group="control")
    def progress(self) -> Progress:
        return self._session.progress()

    @ray.method(concurrency_group="control")
    def modules(self) -> list[str]:
        """What this process has imported, in the order in which that began."""
        return list(sys.modules)

    @ray.method(concurrency_group="control")
    def check_parallel(self, parallel: ParallelConfig) -> str | None:
        """Why this state could not live under `parallel`, or None."""
        try:
            self._state().check_parallel(parallel)
        except ValueError as error:
            return str(error)
        return None

    # Handover --------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def propose_last_step(self, step: int) -> bool:
        return self._session.propose_last_step(step)

    @ray.method(concurrency_group="control")
    def wait_paused(self, timeout_s: float) -> Boundary:
        boundary = self._session.wait_paused(timeout_s)
        return replace(boundary, nbytes_allocated=self._held_memory().nbytes_allocated())

    @ray.method(concurrency_group="control")
    def freeze(self, timeout_s: float) -> Boundary:
        return self._session.freeze(timeout_s)

    @ray.method(concurrency_group="control")
    def open_migration(self, backend: str, group: str, rank: int, world_size: int) -> bytes | None:
        """Make the migration group; member 0 says where it meets."""
        with self._at_work_for(group):
            transport = open_group(backend, group, rank, world_size)
            return transport.rendezvous() if rank == 0 else None

    @ray.method(concurrency_group="control")
    def connect_migration(self, group: str, rendezvous: bytes, timeout_s: float) -> None:
        with self._at_work_for(group):
            transport = get_group(group)
        self._session.on_move_event("connect")
        with torch.cuda.stream(self._stream):
            transport.connect(rendezvous, timeout_s)

    @ray.method(concurrency_group="control")
    def prepare_move(
        self,
        group: str,
        plan: RankPlan,
        source: RankLayout,
        shared: sharing.SharedMemory | None,
        is_new: bool,
        direct_nbytes: int,
    ) -> None:
        """Map the old rank's memory (a new rank) or take one's own (a rank that is leaving), and make the buffers."""
        with self._at_work_for(group):
            self._session.on_move_event("prepare")
            state = self._state()
            if is_new:
                self._mapped = sharing.open(shared) if shared is not None else []
                source_views, target_views, target = self._mapped, state.views(), state.layout()
            else:
                source_views, target_views, target = state.views(), [], ()
            with torch.cuda.stream(self._stream):
                self._mover = Mover(
                    *(plan, get_group(group), source_views, source, target_views, target),
                    direct_nbytes=direct_nbytes,
                )
                self._staging_nbytes = self._mover.prepare()

    @ray.method(concurrency_group="control")
    def move(self, group: str, timeout_s: float) -> PhaseReport:
        with self._at_work_for(group), torch.cuda.stream(self._stream):
            assert self._mover is not None
            memory = self._held_memory()
            memory.reset_peak()
            report = self._mover.run(timeout_s, self._session.on_move_event)
            return PhaseReport(report, memory.nbytes_peak(self._staging_nbytes))

    @ray.method(concurrency_group="control")
    def load(self, next_step: int, replicated: bytes, streams: dict[Coordinate, bytes], timeout_s: float) -> None:
        self._session.load(Load(next_step, replicated, streams), timeout_s)

    @ray.method(concurrency_group="control")
    def end_migration(self, group: str, is_given_up: bool) -> None:
        """Leave the group, the mapped memory and the buffers. What still works for the group ends with an error."""
        self._ended.add(group)
        close_group(group)
        if self._working.acquire(timeout=LEAVE_GROUP_S):
            try:
                close_group(group)  # it may have been opened in that moment
                if self._mover is not None:
                    self._mover.close()
                self._mover, self._mapped = None, []
            finally:
                self._working.release()
        if is_given_up:
            self._session.give_memory_back()

    @ray.method(concurrency_group="control")
    def resume(self) -> None:
        if self._memory is not None:
            self._memory.make_scratch(SCRATCH_S)
        self._session.resume()

    @ray.method(concurrency_group="control")
    def replace(self) -> None:
        self._session.replace()

    # Where memory is short ------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def usage(self, trims: bool, timeout_s: float) -> Usage:
        """How much memory there is, after giving back what no step needs where `trims`."""
        if trims and torch.cuda.is_available():
            self._session.trim(timeout_s)
        return self._held_memory().usage(self._limit[0] or 1.0, self._session.nbytes_between_steps)

    @ray.method(concurrency_group="control")
    def fill(self) -> sharing.SharedMemory:
        """Make all emptied memory again, scratch too, and share it."""
        self._held_memory().fill()
        return self._held_memory().share()

    @ray.method(concurrency_group="control")
    def warm_up(self) -> None:
        """See `phased.warm_up`."""
        with torch.cuda.stream(self._stream):
            warm_up(self._held_memory().device)

    @ray.method(concurrency_group="control")
    def check_derived(self) -> None:
        """See `phased.check_derived`."""
        state = self._state()
        check_derived(state.layout(), state.views(), state.derived)

    @ray.method(concurrency_group="control")
    def move_phase(
        self, group: str, part: RankPhase, shared: sharing.SharedMemory | None, is_new: bool, timeout_s: float
    ) -> PhaseReport:
        state, memory, tell = self._state(), self._held_memory(), self._session.on_move_event
        with self._at_work_for(group), torch.cuda.stream(self._stream):
            transport = get_group(group)
            if is_new:
                return move_as_new(part, memory, state.layout(), state.views(), shared, transport, timeout_s, tell)
            return move_as_old(part, memory, state.views(), transport, timeout_s, tell)

    @ray.method(concurrency_group="control")
    def release(self, numbers: Sequence[int] | None = None) -> int:
        """Give allocations of the state back for good, or all, and the scratch memory; what was held until then."""
        memory = self._held_memory()
        held = memory.nbytes_allocated()
        memory.empty_scratch()
        memory.release(range(len(memory.allocations.nbytes)) if numbers is None else numbers)
        return held

    def _held_memory(self) -> StateMemory:
        assert self._memory is not None, "the train loop has not entered ray_etc.steps()"
        return self._memory

    @contextmanager
    def _at_work_for(self, group: str) -> Iterator[None]:
        """Around what makes or uses a group. A call of a handover that is over, however late it comes, is refused."""
        with self._working:
            if group in self._ended:
                raise ResizeFailed(f"the handover over {group} has ended")
            yield

    def _state(self) -> TrainState:
        assert self._session.state is not None, "the train loop has not entered ray_etc.steps()"
        return self._session.state

    def _join_world(self, store: tuple[str, int], timeout_s: float) -> None:
        host, port = store
        rank, world_size = self._context.world_rank, self._context.parallel.world_size
        if self._store is None:
            self._store = dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_s))
        if torch.cuda.is_available():
            torch.cuda.set_device(0)
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=dist.PrefixStore("world", self._store),
            rank=rank,
            world_size=world_size,
            # No device_id: with it torch would make a communicator for each of Megatron's twenty groups at once, used
            # or not, and each costs a training beside it 11 to 15 ms (seen on an H200).
        )
