"""Bytes by link: who sends how much to whom, for a placement, without making the moves one by one.

The rules are those of `make_plan`: the own slot first, then holders on the own node, then any; the least loaded of
them. Only the loads are kept, split as finely as it takes, where `make_plan` cuts boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_etc.planners.compressed import Flows


@dataclass(frozen=True)
class Traffic:
    """Bytes of each class of link, and of each end.

    `sent` and `received` (int64 [slots]) leave and enter each slot by any wire; `node_sent` and `node_received`
    (int64 [nodes]) only what crosses between nodes.
    """

    same_slot: int
    same_node: int
    other_node: int
    sent: np.ndarray
    received: np.ndarray
    node_sent: np.ndarray
    node_received: np.ndarray

    @property
    def nbytes_wire(self) -> int:
        return self.same_node + self.other_node


@dataclass(frozen=True)
class Part:
    """The flows of one family of kinds, and where its classes are.

    `slots_of_target[c]` are the slots of the new ranks of class c, `slots_of_source[c]` those that hold class c.
    """

    flows: Flows
    slots_of_target: Sequence[np.ndarray]
    slots_of_source: Sequence[np.ndarray]


def traffic(parts: Sequence[Part], node_of_slot: np.ndarray) -> Traffic:
    """Choose senders for all flows; `node_of_slot` is int64 [slots], nodes numbered from 0.

    Flows with the least choice of senders go first, then the largest. The receivers' side and the link classes do not
    depend on that choice.
    """
    slot_count, node_count = len(node_of_slot), int(node_of_slot.max()) + 1
    sent, received = np.zeros(slot_count, dtype=np.int64), np.zeros(slot_count, dtype=np.int64)
    node_sent, node_received = np.zeros(node_count, dtype=np.int64), np.zeros(node_count, dtype=np.int64)
    same_slot = same_node = other_node = 0
    fetches: list[tuple[int, int, int, bool, np.ndarray]] = []
    for part in parts:
        for dst, nbytes, senders, is_near in _fetches(part, node_of_slot):
            if is_near and senders[0] == dst:
                same_slot += nbytes
            else:
                fetches.append((len(senders), -nbytes, dst, is_near, senders))
    fetches.sort(key=lambda fetch: fetch[:3])
    for _, negative, dst, is_near, senders in fetches:
        nbytes = -negative
        share = _level(sent[senders], nbytes)
        sent[senders] += share
        received[dst] += nbytes
        if is_near:
            same_node += nbytes
        else:
            other_node += nbytes
            np.add.at(node_sent, node_of_slot[senders], share)
            node_received[node_of_slot[dst]] += nbytes
    return Traffic(same_slot, same_node, other_node, sent, received, node_sent, node_received)


def _fetches(part: Part, node_of_slot: np.ndarray) -> list[tuple[int, int, np.ndarray, bool]]:
    """(slot, bytes, slots to take them from, on the own node?) of each flow; the own slot stands alone."""
    holders: dict[int, np.ndarray] = {}
    near: dict[tuple[int, int], np.ndarray] = {}
    found: list[tuple[int, int, np.ndarray, bool]] = []
    flows = part.flows
    for target, group, nbytes in zip(flows.target.tolist(), flows.group.tolist(), flows.nbytes.tolist(), strict=True):
        if group not in holders:
            holders[group] = np.unique(np.concatenate([part.slots_of_source[c] for c in flows.holders[group]]))
        for dst in part.slots_of_target[target].tolist():
            node = int(node_of_slot[dst])
            if (group, node) not in near:
                near[group, node] = holders[group][node_of_slot[holders[group]] == node]
            here = near[group, node]
            if dst in here:
                found.append((dst, nbytes, np.array([dst]), True))
            else:
                found.append((dst, nbytes, here if len(here) else holders[group], len(here) > 0))
    return found


def _level(load: np.ndarray, nbytes: int) -> np.ndarray:
    """Split `nbytes` over senders with `load` so that the highest load stays least: int64, in the order of `load`."""
    if len(load) == 1:
        return np.array([nbytes])
    order = np.argsort(load, kind="stable")
    rising = load[order]
    # With the k least loaded in use, they end at level[k - 1]; the next one must not be below that.
    level = (np.cumsum(rising) + nbytes) / np.arange(1, len(load) + 1)
    used = int(np.argmax(np.append(level[:-1] <= rising[1:], True))) + 1
    fine = np.maximum(level[used - 1] - rising[:used], 0)
    share = np.zeros(len(load), dtype=np.int64)
    share[order[:used]] = np.diff(np.rint(np.cumsum(fine) * (nbytes / fine.sum())).astype(np.int64), prepend=0)
    return share
