"""What a transport offers: one group of processes, one per slot, that exchange packed messages.

Built by `ray.util.collective.init_collective_group`, which holds a lock of the whole process meanwhile, so a
constructor only takes note of its arguments. Then member 0 makes a rendezvous, the driver hands it to every member,
and each calls `connect`. Nothing here waits without a deadline.
"""

from __future__ import annotations

import json
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from ray.util import get_node_ip_address
from ray.util.collective.collective_group.base_collective_group import BaseGroup

from ray_etc.actors.errors import TransportError, TransportTimeout

COLLECTIVE_TIMEOUT_S = 60.0
"""For Ray's own collective calls (`ray.util.collective.allreduce` ...), which carry no timeout."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the members of a group meet: a store on member 0's host, and what the library needs besides."""

    host: str
    port: int
    unique_id: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps([self.host, self.port, self.unique_id]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Rendezvous:
        return cls(*json.loads(data))

    @property
    def own_host(self) -> str:
        """The address under which this process is reached: on loopback where the whole group is."""
        return self.host if self.host.startswith("127.") else get_node_ip_address()


class Transport(BaseGroup):
    """A group over which each member sends each other member at most one message a round.

    One thread at a time may connect or exchange; `abort` may be called from any thread at any time.
    """

    device_type: ClassVar[str]
    """Where the messages must lie: "cpu" or "cuda"."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._store: dist.TCPStore | None = None
        self._aborted = threading.Event()

    @property
    def peers(self) -> list[int]:
        """The other members."""
        return [peer for peer in range(self.world_size) if peer != self.rank]

    @abstractmethod
    def rendezvous(self, host: str | None = None) -> bytes:
        """On member 0: open the meeting point, at `host` or else at this node's address as Ray knows it."""

    @abstractmethod
    def connect(self, rendezvous: bytes, timeout_s: float) -> None:
        """Meet the other members; afterwards `exchange` needs no further set-up.

        Raises:
            TransportTimeout: some members, named, did not come in time.
        """

    @abstractmethod
    def exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], timeout_s: float
    ) -> None:
        """Send each peer its message and fill each buffer, all at once; returns when all of it is done.

        Args:
            sends: message by peer, flat contiguous uint8. A message of no bytes is not sent.
            receives: buffer by peer, of exactly the size of what that peer sends.
            timeout_s: for the whole exchange. When it passes the group is aborted.

        Raises:
            TransportTimeout: a peer was silent.
            TransportError: a peer died or the group was aborted. The group is of no further use.
        """

    @abstractmethod
    def abort(self) -> None:
        """Break the group: an exchange blocked in another thread ends with an error within about a second."""

    @classmethod
    def why_unavailable(cls) -> str | None:
        """What is missing for this backend in this process; None where nothing is."""
        return None

    @classmethod
    def check_backend_availability(cls) -> bool:
        return cls.why_unavailable() is None

    def _open_store(self, host: str | None, unique_id: str = "") -> bytes:
        if self.rank != 0:
            raise ValueError(f"group {self.group_name}: member 0 makes the rendezvous, not member {self.rank}")
        host = host or get_node_ip_address()
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        self._store = dist.TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
        return Rendezvous(host, self._store.port, unique_id).to_bytes()

    def _meet(self, meeting: Rendezvous, deadline: Deadline) -> dist.Store:
        """Wait until every member is at the store, so that what follows finds them all and needs no long wait."""
        with self._translated(deadline, [0] if self.rank else self.peers):
            if self._store is None:
                left = timedelta(seconds=deadline.left_s())
                self._store = dist.TCPStore(meeting.host, meeting.port, None, False, left, wait_for_workers=False)
            store = dist.PrefixStore(self.group_name, self._store)
            store.set(f"here/{self.rank}", "1")
            missing = self.peers
            while missing := [peer for peer in missing if not store.check([f"here/{peer}"])]:
                if self._aborted.is_set():
                    raise TransportError(self.group_name, self.rank, missing, deadline.spent_s(), "aborted")
                if deadline.left_s() <= 0:
                    raise TransportTimeout(self.group_name, self.rank, missing, deadline.spent_s(), "never joined")
                time.sleep(0.005)
        return store

    def _check_messages(self, *sides: Mapping[int, torch.Tensor]) -> None:
        if self._aborted.is_set():
            raise TransportError(self.group_name, self.rank, self.peers, 0.0, "aborted before")
        for side in sides:
            for peer, message in side.items():
                if peer == self.rank or not 0 <= peer < self.world_size:
                    raise ValueError(f"group {self.group_name}: member {self.rank} of {self.world_size} to {peer}")
                if message.dtype != torch.uint8 or message.dim() != 1 or not message.is_contiguous():
                    raise ValueError(f"messages are flat contiguous uint8, not {message.dtype} {tuple(message.shape)}")
                if message.device.type != self.device_type:
                    raise ValueError(f"{self.backend()} carries {self.device_type} memory, not {message.device.type}")

    @contextmanager
    def _translated(self, deadline: Deadline, peers: list[int]) -> Iterator[None]:
        """Turn what a library raises into our errors, by what is known: too late, aborted, or a peer lost."""
        try:
            yield
        except TransportError:
            raise
        except (RuntimeError, KeyError) as error:  # cupy raises KeyError for an NCCL status that it has no name for
            kind, reason = TransportError, str(error).partition("\n")[0][:200]
            # Libraries round their waits to milliseconds and may give up a little early.
            if deadline.left_s() < 0.02:
                kind = TransportTimeout
            elif self._aborted.is_set():
                reason = "aborted"
            self.abort()
            raise kind(self.group_name, self.rank, peers, deadline.spent_s(), reason) from error


class Deadline:
    """A point in time, and how far away it is."""

    def __init__(self, timeout_s: float) -> None:
        self._start = time.monotonic()
        self._timeout_s = timeout_s

    def spent_s(self) -> float:
        return time.monotonic() - self._start

    def left_s(self) -> float:
        return self._timeout_s - self.spent_s()

    def left(self) -> timedelta:
        """What is left, for libraries that take a negative or zero wait for an endless one."""
        return timedelta(seconds=max(self.left_s(), 0.001))
