"""ETC_GLOO: a gloo group over TCP with a store of its own. It never touches torch's default process group.

Ray's own GLOO backend takes that group over, which Megatron needs, and sends to the wrong member in a group that
is a subset of the processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ray_etc.actors.errors import TransportError
from ray_etc.actors.transports.base import COLLECTIVE_TIMEOUT_S, Deadline, Rendezvous, Transport

EXCHANGE_TAG = 0
P2P_TAG = 1
ABORT_TAG = 2


class GlooTransport(Transport):
    """Messages in host memory over TCP."""

    device_type: ClassVar[str] = "cpu"

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._group: Any = None  # a dist.ProcessGroupGloo, of which torch's stubs lack half the methods

    @classmethod
    def backend(cls) -> str:
        return "ETC_GLOO"

    def rendezvous(self, host: str | None = None) -> bytes:
        return self._open_store(host)

    def connect(self, rendezvous: bytes, timeout_s: float) -> None:
        meeting, deadline = Rendezvous.from_bytes(rendezvous), Deadline(timeout_s)
        store = self._meet(meeting, deadline)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._threads = 2
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.own_host)]
        options._timeout = deadline.left()
        with self._translated(deadline, self.peers):
            self._group = dist.ProcessGroupGloo(store, self.rank, self.world_size, options)
            # From here on the group's own timeout only bounds Ray's collective calls; `exchange` brings its own.
            self._group._set_default_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))

    def exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], timeout_s: float
    ) -> None:
        deadline, group = Deadline(timeout_s), self._connected()
        self._check_messages(sends, receives)
        works: list[tuple[int, Any]] = []
        # Receives first, so that what arrives early goes straight to its buffer.
        for peer, buffer in receives.items():
            if buffer.numel():
                with self._translated(deadline, [peer]):
                    works.append((peer, group.recv([buffer], peer, EXCHANGE_TAG)))
        for peer, message in sends.items():
            if message.numel():
                with self._translated(deadline, [peer]):
                    works.append((peer, group.send([message], peer, EXCHANGE_TAG)))
        for peer, work in works:
            with self._translated(deadline, [peer]):
                work.wait(deadline.left())

    def abort(self) -> None:
        """See `Transport.abort`.

        `ProcessGroupGloo.abort` does not wake a blocked receive. But gloo closes every connection of a group when
        one wait of it times out ("Application timeout caused pair closure"), and that wakes all others, here and at
        the peers: so wait a millisecond for a message that nobody sends.
        """
        self._aborted.set()
        group, peers = self._group, self.peers
        if group is not None and peers:
            with suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peers[0], ABORT_TAG).wait(timedelta(milliseconds=1))

    def destroy_group(self) -> None:
        self.abort()
        self._group = None
        self._store = None

    def _connected(self) -> Any:
        if self._group is None:
            raise TransportError(self.group_name, self.rank, self.peers, 0.0, "not connected: call connect() first")
        return self._group

    # What users of `ray.util.collective` expect. Ray passes lists with one tensor for each local device.

    def send(self, tensor: Sequence[Any], send_options: Any) -> None:
        self._finish(self._connected().send([_tensor(tensor)], send_options.dst_rank, P2P_TAG), [send_options.dst_rank])

    def recv(self, tensor: Sequence[Any], recv_options: Any) -> None:
        self._finish(self._connected().recv([_tensor(tensor)], recv_options.src_rank, P2P_TAG), [recv_options.src_rank])

    def allreduce(self, tensor: Sequence[Any], allreduce_options: Any = None) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = _reduce_op(allreduce_options)
        self._finish(self._connected().allreduce([_tensor(tensor)], options))

    def reduce(self, tensor: Sequence[Any], reduce_options: Any = None) -> None:
        options = dist.ReduceOptions()
        options.reduceOp = _reduce_op(reduce_options)
        options.rootRank = getattr(reduce_options, "root_rank", 0)
        self._finish(self._connected().reduce([_tensor(tensor)], options))

    def broadcast(self, tensor: Sequence[Any], broadcast_options: Any = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = getattr(broadcast_options, "root_rank", 0)
        self._finish(self._connected().broadcast([_tensor(tensor)], options))

    def allgather(self, tensor_list: Sequence[Any], tensor: Sequence[Any], allgather_options: Any = None) -> None:
        outputs = [torch.as_tensor(output) for output in tensor_list[0]]
        self._finish(self._connected().allgather([outputs], [_tensor(tensor)]))

    def reducescatter(self, tensor: Any, tensor_list: Any, reducescatter_options: Any = None) -> None:
        raise NotImplementedError("ETC_GLOO has no reducescatter: use allreduce, or ETC_NCCL on GPUs")

    def barrier(self, barrier_options: Any = None) -> None:
        self._finish(self._connected().barrier())

    def _finish(self, work: Any, peers: list[int] | None = None) -> None:
        deadline = Deadline(COLLECTIVE_TIMEOUT_S)
        with self._translated(deadline, self.peers if peers is None else peers):
            work.wait(deadline.left())


def _tensor(one: Sequence[Any]) -> torch.Tensor:
    return torch.as_tensor(one[0])


def _reduce_op(options: Any) -> Any:
    """Ray's ReduceOp names are torch's."""
    return getattr(dist.ReduceOp, options.reduceOp.name) if options is not None else dist.ReduceOp.SUM
