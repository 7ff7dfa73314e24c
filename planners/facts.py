"""Facts about a plan, in numbers: bytes and messages by kind of link, the busiest links, seconds, and peak memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ray_etc.planners.balance import Network
from ray_etc.planners.links import Links
from ray_etc.planners.memory import Memory, memory_of
from ray_etc.planners.moves import LOCAL

if TYPE_CHECKING:
    from ray_etc.planners.plan import MigrationPlan

COPY_BESIDE_WIRE = 0.2
"""As was seen on 2 H200 (benchmarks/README.md): more would slow the messages."""

LINK_CLASSES = ("same slot", "same node", "other node")


@dataclass(frozen=True)
class LinkUse:
    """What goes over one class of links. `slices` are single moves of one tensor; a message packs those of one pair
    and round. Inside a slot a slice is a copy of its own."""

    nbytes: int
    slices: int
    messages: int

    @property
    def mean_slice_nbytes(self) -> int:
        return self.nbytes // max(self.slices, 1)

    @property
    def mean_message_nbytes(self) -> int:
        return self.nbytes // max(self.messages, 1)


@dataclass(frozen=True)
class Seconds:
    """Predicted times. `local` is that of the copies inside a slot, if nothing else ran: beside the wire they have
    `COPY_BESIDE_WIRE` of their speed, and the rest follows. Copies and packing make the certificate's sums as they go.
    """

    local: float
    wire: float

    @property
    def total(self) -> float:
        return self.wire + max(self.local - COPY_BESIDE_WIRE * self.wire, 0.0)


@dataclass(frozen=True, eq=False)
class PlanFacts:
    """Everything that `explain` says of a plan.

    `links` is by LINK_CLASSES. `sent`, `received` (int64 [ranks]) are wire bytes of each slot, `node_sent`,
    `node_received` (int64 [nodes], in the order of `node_names`) what crosses between nodes. `nbytes_cast` are
    made from main weights by the ranks that need them; of the wire bytes, `nbytes_relayed` are handed on by a rank that
    received them. `saved_s` is when the last byte has left an endangered slot.
    """

    nbytes_needed: int
    nbytes_moved: int
    nbytes_lower_bound: int
    nbytes_cast: int
    nbytes_relayed: int
    links: dict[str, LinkUse]
    rounds: int
    sent: np.ndarray
    received: np.ndarray
    node_names: tuple[str, ...]
    node_sent: np.ndarray
    node_received: np.ndarray
    seconds: Seconds
    saved_s: float
    memory: Memory

    @property
    def nbytes_missed(self) -> int:
        """By how much, at most, another placement could do with less on the wire."""
        return self.nbytes_moved + self.nbytes_cast - self.nbytes_lower_bound

    @property
    def busiest_link_nbytes(self) -> int:
        """The most that any slot sends or receives."""
        return int(max(self.sent.max(initial=0), self.received.max(initial=0)))


def facts_of(plan: MigrationPlan, links: Links | None = None) -> PlanFacts:
    """The facts of `plan`; `links` are the speeds that seconds are predicted from."""
    links = links or Links()
    src, dst = plan.ends
    nbytes, rounds = plan.move_nbytes, plan.moves.round
    wire = np.flatnonzero(rounds >= 0)
    names = tuple(dict.fromkeys(plan.nodes))
    numbers = {name: number for number, name in enumerate(names)}
    node = np.array([numbers[name] for name in plan.nodes], dtype=np.int64)
    is_far = node[src] != node[dst]
    slices = np.array([len(bundle.tensors) for bundle in plan.bundles], dtype=np.int64)[plan.moves.bundle]
    uses = {}
    for name, among in zip(LINK_CLASSES, (rounds == LOCAL, (rounds >= 0) & ~is_far, is_far), strict=True):
        count = int(slices[among].sum())
        pairs = (rounds[among] * len(plan.slots) + src[among]) * len(plan.slots) + dst[among]
        messages = count if name == LINK_CLASSES[0] else len(np.unique(pairs))
        uses[name] = LinkUse(int(nbytes[among].sum()), count, messages)
    rank_count = len(plan.slots)
    round_s = _round_seconds(plan, wire, Network(node, links))
    last = rounds[wire[np.isin(src[wire], plan.endangered)]].max(initial=LOCAL)
    local = np.bincount(dst[rounds == LOCAL], nbytes[rounds == LOCAL], rank_count)
    return PlanFacts(
        nbytes_needed=int(nbytes.sum()),
        nbytes_moved=plan.nbytes_wire,
        nbytes_lower_bound=plan.nbytes_lower_bound,
        nbytes_cast=plan.nbytes_cast,
        nbytes_relayed=int(nbytes[plan.moves.is_relay & (rounds >= 0)].sum()),
        links=uses,
        rounds=plan.round_count,
        sent=_sums(src[wire], nbytes[wire], rank_count),
        received=_sums(dst[wire], nbytes[wire], rank_count),
        node_names=names,
        node_sent=_sums(node[src[is_far]], nbytes[is_far], len(names)),
        node_received=_sums(node[dst[is_far]], nbytes[is_far], len(names)),
        seconds=Seconds(float(local.max(initial=0) / links.copy_bytes_per_s), float(round_s.sum())),
        saved_s=float(round_s[: last + 1].sum()),
        memory=memory_of(plan),
    )


def _sums(owner: np.ndarray, nbytes: np.ndarray, count: int) -> np.ndarray:
    total = np.zeros(count, dtype=np.int64)
    np.add.at(total, owner, nbytes)
    return total


def _round_seconds(plan: MigrationPlan, wire: np.ndarray, network: Network) -> np.ndarray:
    """How long each round takes: its busiest link, and the fixed cost of the messages of its busiest rank."""
    src, dst = (end[wire] for end in plan.ends)
    rounds = plan.moves.round[wire]
    pair, where = np.unique((rounds * len(plan.slots) + src) * len(plan.slots) + dst, return_inverse=True)
    nbytes = np.bincount(where, plan.move_nbytes[wire], len(pair))
    rounds, ends = np.divmod(pair, len(plan.slots) ** 2)
    src, dst = np.divmod(ends, len(plan.slots))
    seconds = np.zeros(plan.round_count)
    which, link = network.used(src, dst)
    cell, where = np.unique(rounds[which] * network.link_count + link, return_inverse=True)
    busy = np.bincount(where, nbytes[which], len(cell)) * network.s_per_byte()[cell % network.link_count]
    np.maximum.at(seconds, cell // network.link_count, busy)
    fixed = np.zeros(plan.round_count)
    for end in (src, dst):
        cell, count = np.unique(rounds * len(plan.slots) + end, return_counts=True)
        np.maximum.at(fixed, cell // len(plan.slots), count * network.links.message_s)
    return seconds + fixed
