"""What the run's thread sees: outcomes of train loops, deaths, nodes, slots, reports; also while it waits for Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from ray_etc.actors.errors import ResizeFailed
from ray_etc.actors.generation import Generation
from ray_etc.actors.outcomes import not_built
from ray_etc.actors.ray_internals import is_about
from ray_etc.actors.slots import SlotPool
from ray_etc.actors.standby import Standbys
from ray_etc.actors.watcher import ClusterWatcher

TICK_S = 0.05
LEAVE_S = 5.0
"""How long the `finally` blocks of a replaced train loop may take."""


class RunEnded(Exception):  # noqa: N818
    """The running generation ended, by itself or by a death, while something waited."""


class Stopped(Exception):  # noqa: N818
    """The user stopped the run."""


class Watch:
    """The generations that have processes, and what is known of them. Only the run's thread calls its methods."""

    def __init__(self, slots: SlotPool, wanted: Callable[[], int], standbys: Standbys) -> None:
        self.slots, self.standbys = slots, standbys
        self.current: Generation | None = None
        self.preparing: Generation | None = None
        self.stop_requested = threading.Event()
        self.last_death = 0.0
        self.is_withdrawn: Callable[[], bool] = lambda: False
        """Whether nobody wants the resize under way any more."""
        self.must_finish: Callable[[], bool] = lambda: False
        """Whether the resize under way is past the point from which it can be given up without losing the state."""
        self._wanted = wanted
        self._cluster = ClusterWatcher()
        self._leaving: list[tuple[Generation, float]] = []

    def tick(self, timeout_s: float) -> None:
        """Take in what has happened; waits so long for the first outcome."""
        self._take_outcomes(timeout_s)
        self.slots.poll(self._cluster.poll())
        self.slots.want(self._wanted(), {slot_id for each in self.generations() for slot_id in each.living_slot_ids})
        for left, deadline in list(self._leaving):
            gone, _ = ray.wait(left.outcome_refs, num_returns=len(left.outcome_refs), timeout=0)
            if len(gone) == len(left.outcome_refs) or time.monotonic() > deadline:
                left.kill()
                self._leaving.remove((left, deadline))
        # Started beside a generation that trains and nothing else: what is under way needs the room, and the time.
        current = self.current if self.preparing is None and not self._leaving else None
        trains = current is not None and current.has_stepped and not current.dead
        self.standbys.tend(self.slots.usable, current if trains else None)

    def wait(self, refs: Sequence[ray.ObjectRef], timeout_s: float, what: str) -> list[Any]:
        """The results; see `Wait`.

        Raises:
            RunEnded, Stopped, ResizeFailed: waiting has become pointless.
        """
        deadline = time.monotonic() + timeout_s
        waiting = list(refs)
        known_deaths = len(self.current.dead) if self.current else 0
        known_drains = {slot.slot_id for slot in self.slots.draining}
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=TICK_S)
            for ref in done:
                try:
                    ray.get(ref)
                except RayActorError as death:
                    self._take_death(death)
                    self._check_still_worth_it(known_deaths, known_drains)
                    raise
                except RayTaskError as error:
                    raise (error.cause if isinstance(error.cause, Exception) else error) from error
            if not waiting:
                break
            self.tick(0.0)
            self._check_still_worth_it(known_deaths, known_drains)
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        return ray.get(list(refs))

    def replace_current(self, new: Generation) -> None:
        """The new generation has everything; the old one may leave its train loop."""
        old, self.current, self.preparing = self.current, new, None
        if old is not None:
            for rank in old.survivors():
                old.ranks[rank].replace.remote()
            self._leaving.append((old, time.monotonic() + LEAVE_S))

    def drop_preparing(self) -> None:
        if self.preparing is not None:
            self.preparing.kill()
        self.preparing = None

    def generations(self) -> list[Generation]:
        """All that have processes, also those that are on their way out."""
        return [*filter(None, (self.current, self.preparing)), *(left for left, _ in self._leaving)]

    def close(self) -> None:
        for generation in self.generations():
            generation.kill()
        self.standbys.close()
        self.slots.close()

    def _check_still_worth_it(self, known_deaths: int, known_drains: set[int]) -> None:
        if self.stop_requested.is_set():
            raise Stopped
        if self.current is not None:
            if len(self.current.dead) > known_deaths:
                raise RunEnded(f"rank {list(self.current.dead)[-1]} died")
            if self.current.outcomes and not self.current.dead:
                raise RunEnded("the train loop ended")
        if self.preparing is None:
            return
        if self.is_withdrawn() and not self.must_finish():
            raise ResizeFailed("the request was withdrawn")
        for rank in self.preparing.dead:
            raise ResizeFailed(f"rank {rank} of the new generation died")
        for rank, outcome in self.preparing.outcomes.items():
            raise not_built(rank, self.preparing.parallel, outcome)
        for slot in self.preparing.slots:
            drains = slot.is_draining and slot.slot_id not in known_drains and not self.must_finish()
            if slot.is_dead or drains:
                raise ResizeFailed(f"a node of the new generation {'died' if slot.is_dead else 'began to drain'}")

    def _take_outcomes(self, timeout_s: float) -> None:
        open_refs = {
            ref: (generation, rank)
            for generation in filter(None, (self.current, self.preparing))
            for rank, ref in enumerate(generation.outcome_refs)
            if rank not in generation.outcomes and rank not in generation.dead
        }
        if not open_refs:
            time.sleep(timeout_s)
            return
        ray.wait(list(open_refs), num_returns=1, timeout=timeout_s)
        done, _ = ray.wait(list(open_refs), num_returns=len(open_refs), timeout=0)
        for ref in done:
            generation, rank = open_refs[ref]
            try:
                generation.outcomes[rank] = ray.get(ref)
            except RayActorError as error:
                self._note_death(generation, rank, error)

    def _take_death(self, death: RayActorError) -> None:
        """Note whose death a failed call tells of; its train loop's outcome would say so a moment later."""
        for generation in filter(None, (self.current, self.preparing)):
            for rank, actor in enumerate(generation.ranks):
                if is_about(death, actor):
                    self._note_death(generation, rank, death)

    def _note_death(self, generation: Generation, rank: int, death: Exception) -> None:
        """No rank is put in the slot again: Ray may take a while to see that the whole node is gone."""
        if rank in generation.dead:
            return
        generation.dead[rank] = death
        self.last_death = time.monotonic()
        slot_id = generation.slots[rank].slot_id
        if generation is self.current and slot_id in self.slots:
            self.slots.mark_dead(slot_id)
