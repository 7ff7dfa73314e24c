"""Warm processes: one a slot, that has imported what a rank needs and waits to become one of the next generation.

It takes the half of its slot's share that no rank of the running generation has, so it is started once the generation
before has left. It should cost the training nothing: it has no CUDA context, and imports in the background, on each
node one process after the other. All here is best effort: where no standby is warm, a new process does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from ray_etc.actors.generation import Generation, TrainJob, start_process
from ray_etc.actors.slots import Slot

logger = logging.getLogger(__name__)

RESTART_S = 5.0
"""After a standby that died, wait so long before the next one in its slot."""

IDLE_PATIENCE_S = 60.0
"""A process that is not warm by then is on a node without idle time; the next one there imports as any process does."""


@dataclass
class Standby:
    """`warm` answers with the process id once everything is imported; `until_taken` is open until then and beyond."""

    node_id: str | None
    actor: Any
    warm: ray.ObjectRef
    until_taken: ray.ObjectRef
    started_at: float
    pid: int | None = None

    @property
    def is_starved(self) -> bool:
        return self.pid is None and time.monotonic() - self.started_at > IDLE_PATIENCE_S


class Standbys:
    """The standby of each slot that has one. Only the run's thread calls its methods."""

    def __init__(self, job: TrainJob, are_wanted: bool) -> None:
        self._job, self._are_wanted = job, are_wanted
        self._standbys: dict[int, Standby] = {}
        self._not_before: dict[int, float] = {}
        self._busy_nodes: set[str | None] = set()

    @property
    def pids(self) -> dict[int, int]:
        """The processes that are warm, by slot."""
        return {slot_id: each.pid for slot_id, each in list(self._standbys.items()) if each.pid is not None}

    def tend(self, usable: Sequence[Slot], like: Generation | None) -> None:
        """Let go those whose slot is leaving or that died, and start at most one a node of those that are missing.

        Args:
            usable: the slots that should have one.
            like: the generation whose rank 0 tells what to import; None: start nothing now.
        """
        dead = self._take_in()
        slot_ids = {slot.slot_id for slot in usable}
        for slot_id, standby in list(self._standbys.items()):
            if slot_id not in slot_ids:
                self._end(slot_id)
            elif slot_id in dead:
                self._end(slot_id)
                self._not_before[slot_id] = time.monotonic() + RESTART_S
            elif standby.is_starved and standby.node_id not in self._busy_nodes:
                self._busy_nodes.add(standby.node_id)
                self._end(slot_id)
        if not self._are_wanted or like is None:
            return
        starting = {standby.node_id for standby in self._standbys.values() if standby.pid is None}
        for slot in usable:
            has_time = time.monotonic() > self._not_before.get(slot.slot_id, 0.0)
            if slot.slot_id not in self._standbys and slot.node_id not in starting and has_time:
                self._standbys[slot.slot_id] = self._start(slot, like)
                starting.add(slot.node_id)

    def take(self, slots: Sequence[Slot]) -> dict[int, Any]:
        """The living processes for these slots that are warm, by slot; they are standbys no longer.

        One that is still importing does so in the background, which takes long: a new process is quicker.
        """
        taken: dict[int, Any] = {}
        dead = self._take_in()
        for slot_id in {slot.slot_id for slot in slots} & self._standbys.keys():
            if slot_id in dead or self._standbys[slot_id].pid is None:
                self._end(slot_id)
            else:
                taken[slot_id] = self._standbys.pop(slot_id).actor
        return taken

    def are_warm(self, slots: Sequence[Slot]) -> bool:
        """Whether all of these slots have one that is warm, as far as they should."""
        return not self._are_wanted or {slot.slot_id for slot in slots} <= self.pids.keys()

    def close(self) -> None:
        for slot_id in list(self._standbys):
            self._end(slot_id)

    def _take_in(self) -> set[int]:
        """Note which have become warm; returns the slots whose process has ended by itself."""
        open_refs = {
            ref: slot_id
            for slot_id, each in self._standbys.items()
            for ref in ((each.warm, each.until_taken) if each.pid is None else (each.until_taken,))
        }
        dead = set()
        for ref in ray.wait(list(open_refs), num_returns=len(open_refs), timeout=0)[0] if open_refs else ():
            slot_id = open_refs[ref]
            try:
                self._standbys[slot_id].pid = ray.get(ref)
            except RayError as error:
                logger.info("the standby process of slot %d died: %s", slot_id, error)
                dead.add(slot_id)
        return dead

    def _start(self, slot: Slot, like: Generation) -> Standby:
        actor = start_process(slot, self._job)
        # From rank to standby, not through the driver.
        modules = like.ranks[0].modules.remote()
        warm = actor.warm.remote(modules, slot.node_id not in self._busy_nodes)
        return Standby(slot.node_id, actor, warm, actor.wait_taken.remote(), time.monotonic())

    def _end(self, slot_id: int) -> None:
        ray.kill(self._standbys.pop(slot_id).actor, no_restart=True)
