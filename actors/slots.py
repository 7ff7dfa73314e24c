"""Slots: one GPU or CPU share each, reserved in Ray as a single-bundle placement group, outliving generations.

A placement group that waits for resources is the demand that Ray's autoscaler sees, so asking for a slot and asking
for a node are the same thing, and so are giving a slot up and letting a node go idle.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from ray_etc.actors.watcher import NodeDied, NodeDraining, NodeEvent


@dataclass
class Slot:
    """One reservation. `node_id` is None while it waits; `deadline` is set once its node is draining."""

    slot_id: int
    group: PlacementGroup
    node_id: str | None = None
    is_draining: bool = False
    deadline: float | None = None
    is_dead: bool = False

    @property
    def node_name(self) -> str:
        """Short enough to read, long enough to tell nodes apart."""
        return (self.node_id or "")[:12]

    @property
    def is_usable(self) -> bool:
        """A new rank may be put here."""
        return self.node_id is not None and not self.is_draining and not self.is_dead


class SlotPool:
    """The slots of one run, kept at the wanted number."""

    def __init__(self, resources: dict[str, float], label_selector: dict[str, str] | None = None) -> None:
        self._resources = resources
        self._label_selector = label_selector
        self._ids = itertools.count()
        self._slots: dict[int, Slot] = {}
        self.last_change = time.monotonic()

    def __getitem__(self, slot_id: int) -> Slot:
        return self._slots[slot_id]

    def __contains__(self, slot_id: int) -> bool:
        return slot_id in self._slots

    @property
    def usable(self) -> list[Slot]:
        return [slot for slot in list(self._slots.values()) if slot.is_usable]

    @property
    def waiting(self) -> list[Slot]:
        return [slot for slot in list(self._slots.values()) if slot.node_id is None]

    @property
    def draining(self) -> list[Slot]:
        return [slot for slot in list(self._slots.values()) if slot.is_draining and not slot.is_dead]

    def want(self, number: int, in_use: set[int]) -> None:
        """Ask Ray for more slots, or give some up, until `number` are usable or waiting.

        Waiting ones go first; a slot in use is never given up here. Slots that are draining or dead do not count,
        and go as soon as no rank is in them: left alone, Ray would look for a replacement of the lost bundle.
        """
        for slot in list(self._slots.values()):
            if (slot.is_draining or slot.is_dead) and slot.slot_id not in in_use:
                self._remove(slot)
        counted = [slot for slot in self._slots.values() if not slot.is_draining and not slot.is_dead]
        idle = [slot for slot in counted if slot.slot_id not in in_use]
        idle.sort(key=lambda slot: (slot.node_id is None, slot.slot_id))
        while len(counted) > number and idle:
            slot = idle.pop()
            counted.remove(slot)
            self._remove(slot)
        for _ in range(number - len(counted)):
            self._ask()

    def poll(self, events: list[NodeEvent]) -> None:
        """Take in which slots Ray has placed and what happened to their nodes."""
        for slot in self.waiting:
            # Not `group.ready()`: it starts a worker process in the bundle only to answer.
            table = placement_group_table(slot.group)
            if table["state"] == "CREATED":
                slot.node_id = table["bundles_to_node_id"][0]
                self.last_change = time.monotonic()
        for event in events:
            for slot in self._slots.values():
                if slot.node_id != event.node_id:
                    continue
                if isinstance(event, NodeDraining):
                    slot.is_draining, slot.deadline = True, event.deadline or time.time()
                elif isinstance(event, NodeDied):
                    slot.is_dead = True
                self.last_change = time.monotonic()

    def mark_dead(self, slot_id: int) -> None:
        """The rank in this slot died: do not put another one there, its node or GPU may be failing."""
        self._slots[slot_id].is_dead = True
        self.last_change = time.monotonic()

    def close(self) -> None:
        for slot in list(self._slots.values()):
            self._remove(slot)

    def _ask(self) -> None:
        selector = [self._label_selector] if self._label_selector else None
        group = placement_group([self._resources], bundle_label_selector=selector)
        slot = Slot(next(self._ids), group)
        self._slots[slot.slot_id] = slot

    def _remove(self, slot: Slot) -> None:
        del self._slots[slot.slot_id]
        remove_placement_group(slot.group)
