"""ETC_NCCL: one NCCL communicator over the members of a group, by cupy, ordered with torch's streams.

Ray's own NCCL backend makes a communicator a pair of members, one message a call, after cupy's stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch

from ray_etc.actors.errors import TransportError, TransportTimeout
from ray_etc.actors.transports.base import COLLECTIVE_TIMEOUT_S, Deadline, Rendezvous, Transport
from ray_etc.planners.words import size

POLL_S = 20e-6
ASYNC_CHECK_S = 0.05
ABORT_GRACE_S = 0.5
"""How long an abort waits for a call into NCCL to return before it takes the communicator away from under it."""
ABORT_S = 5.0
"""How long to wait for NCCL to give a stream back after an abort; 0.6 s was seen."""

DTYPES = {
    torch.int8: "NCCL_INT8",
    torch.uint8: "NCCL_UINT8",
    torch.int32: "NCCL_INT32",
    torch.int64: "NCCL_INT64",
    torch.float16: "NCCL_FLOAT16",
    torch.bfloat16: "NCCL_BFLOAT16",
    torch.float32: "NCCL_FLOAT32",
    torch.float64: "NCCL_FLOAT64",
}
REDUCE_OPS = {"SUM": "NCCL_SUM", "PRODUCT": "NCCL_PROD", "MIN": "NCCL_MIN", "MAX": "NCCL_MAX"}

Group = Callable[[Any, int], Any]
"""Asks a communicator for what NCCL shall do together, on a stream given by its handle."""


def _nccl() -> Any:
    from cupy.cuda import nccl  # an optional dependency: absent on machines without a GPU

    return nccl


class NcclTransport(Transport):
    """Messages in GPU memory. The GPU is the current device of the thread that connects."""

    device_type: ClassVar[str] = "cuda"

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._communicator: Any = None
        self._stream: torch.cuda.Stream | None = None
        # Held around every short call on the communicator, so that `abort` does not free it in the middle of one.
        self._in_nccl = threading.Lock()
        self._taking = threading.Lock()

    @classmethod
    def backend(cls) -> str:
        return "ETC_NCCL"

    @classmethod
    def why_unavailable(cls) -> str | None:
        if not torch.cuda.is_available():
            return "this process sees no GPU"
        try:
            return None if _nccl().available else "cupy was built without NCCL"
        except ImportError as error:
            return f"cupy is missing, install ray_etc[gpu] ({error})"

    def rendezvous(self, host: str | None = None) -> bytes:
        return self._open_store(host, bytes(_nccl().get_unique_id()).hex())

    def connect(self, rendezvous: bytes, timeout_s: float) -> None:
        """See `Transport.connect`.

        NCCL's own set-up can be neither timed nor aborted, so it starts only when every member has come, in a thread
        of its own. Where a member dies within it, that thread stays, and the process should be replaced. Should it end
        after all, it takes down what it made: left to cupy, that would be destroyed, which waits for the peers.
        """
        meeting, deadline = Rendezvous.from_bytes(rendezvous), Deadline(timeout_s)
        self._meet(meeting, deadline)
        device = torch.cuda.current_device()
        made: Future[None] = Future()

        def make() -> None:
            try:
                torch.cuda.set_device(device)
                self._take_in(_nccl().NcclCommunicator(self.world_size, bytes.fromhex(meeting.unique_id), self.rank))
                made.set_result(None)
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=make, name=f"connect {self.group_name}", daemon=True).start()
        with self._translated(deadline, self.peers):
            try:
                made.result(timeout=max(deadline.left_s(), 0.0))
            except FutureTimeout:
                self.abort()
                reason = "NCCL hangs while it connects: replace this process"
                raise TransportTimeout(self.group_name, self.rank, self.peers, deadline.spent_s(), reason) from None
            except RuntimeError as error:
                free, total = torch.cuda.mem_get_info(device)  # NCCL does not say when it is memory that ran out
                raise RuntimeError(f"{error}; this GPU has {size(free)} of {size(total)} free") from error
        self._stream = torch.cuda.Stream(device)
        # NCCL connects a pair at its first message, and waits for the peer meanwhile: have that behind us.
        buffers = torch.zeros(2, self.world_size, 16, dtype=torch.uint8, device=f"cuda:{device}")
        self.exchange(
            {peer: buffers[0, peer] for peer in self.peers},
            {peer: buffers[1, peer] for peer in self.peers},
            deadline.left_s(),
        )

    def exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], timeout_s: float
    ) -> None:
        deadline = Deadline(timeout_s)
        out = {peer: [message] for peer, message in sends.items() if message.numel()}
        into = {peer: [buffer] for peer, buffer in receives.items() if buffer.numel()}
        self._check_messages(sends, receives)
        if out or into:
            self._run(_messages(out, into), deadline, sorted({*out, *into}))

    def post(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
        deadline: Deadline,
    ) -> None:
        """Enqueue one group of messages on torch's current stream, within `guarded`; a message may be several buffers.

        Both ends list the buffers of a message in the same order and sizes.

        Raises:
            TransportError: the group was aborted, or NCCL found that a peer is gone.
        """
        if sends or receives:
            with self._translated(deadline, sorted({*sends, *receives})):
                self._enqueue(_messages(sends, receives))

    def wait(self, done: torch.cuda.Event, deadline: Deadline) -> None:
        """Until `done`, within `guarded`.

        Raises:
            TransportError, TransportTimeout: the group was aborted or the deadline has passed; `done` means nothing.
        """
        with self._translated(deadline, self.peers):
            self._wait(done, deadline)

    @contextmanager
    def guarded(self, deadline: Deadline, streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
        """Around `post` and `wait`: whatever is raised within, the group is aborted and the streams are idle after it.

        A watchdog is there for the case that the calling thread is held inside NCCL.
        """
        watchdog = threading.Timer(max(deadline.left_s(), 0.0), self.abort)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        except BaseException:
            self.abort()
            # The buffers may be freed only when NCCL is off them.
            given_up = Deadline(ABORT_S)
            while not all(stream.query() for stream in streams) and given_up.left_s() > 0:
                time.sleep(0.01)
            raise
        finally:
            watchdog.cancel()

    def abort(self) -> None:
        self._aborted.set()
        # NCCL takes half a second to give up, and might take longer: never let that hold the caller for ever.
        thread = threading.Thread(target=self._abort, name=f"abort {self.group_name}", daemon=True)
        thread.start()
        thread.join(ABORT_S)

    def _take_in(self, communicator: Any) -> None:
        with self._taking:
            if not self._aborted.is_set():
                self._communicator = communicator
                return
        communicator.abort()

    def _abort(self) -> None:
        got = self._in_nccl.acquire(timeout=ABORT_GRACE_S)
        with self._taking:
            communicator, self._communicator = self._communicator, None
        if got:  # before the abort: should that hang, nobody waits here for it
            self._in_nccl.release()
        if communicator is not None:
            with suppress(RuntimeError, KeyError):
                communicator.abort()

    def destroy_group(self) -> None:
        """Abort rather than destroy: it frees the same, and never waits for a peer."""
        self.abort()
        self._store = None

    def _run(self, group: Group, deadline: Deadline, peers: list[int]) -> None:
        """Do `group` on this transport's stream, after torch's current one and before what follows on that."""
        stream = self._connected_stream(peers)
        current, done = torch.cuda.current_stream(stream.device), torch.cuda.Event()
        stream.wait_stream(current)
        with self.guarded(deadline, [stream]), self._translated(deadline, peers):
            with torch.cuda.stream(stream):
                self._enqueue(group)
            done.record(stream)
            self._wait(done, deadline)
        current.wait_event(done)

    def _wait(self, done: torch.cuda.Event, deadline: Deadline) -> None:
        """The calling thread polls, so it sees the deadline and an abort."""
        checked = time.monotonic()
        while not done.query():
            if self._aborted.is_set() or deadline.left_s() <= 0:
                raise RuntimeError("no answer")
            if time.monotonic() - checked > ASYNC_CHECK_S:
                checked = time.monotonic()
                with self._in_nccl:
                    if (communicator := self._communicator) is not None:
                        communicator.check_async_error()
            time.sleep(POLL_S)
        if self._aborted.is_set():
            # An abort makes NCCL's kernels end as if they were done.
            raise RuntimeError("aborted")

    def _enqueue(self, group: Group) -> None:
        """Hand NCCL what `group` asks for, as one group on torch's current stream."""
        self._connected_stream(self.peers)
        with self._in_nccl:
            if (communicator := self._communicator) is None:
                raise RuntimeError("aborted")
            _nccl().groupStart()
            try:
                group(communicator, torch.cuda.current_stream().cuda_stream)
            finally:
                _nccl().groupEnd()

    def _connected_stream(self, peers: list[int]) -> torch.cuda.Stream:
        if self._stream is None:
            raise TransportError(self.group_name, self.rank, peers, 0.0, "not connected: call connect() first")
        return self._stream

    # What users of `ray.util.collective` expect. Ray passes lists with one tensor for each local device.

    def send(self, tensor: Sequence[torch.Tensor], send_options: Any) -> None:
        peer, message = send_options.dst_rank, _flat(tensor)
        self._collective(lambda comm, stream: comm.send(*_whole(message), peer, stream), [peer])

    def recv(self, tensor: Sequence[torch.Tensor], recv_options: Any) -> None:
        peer, buffer = recv_options.src_rank, _flat(tensor)
        self._collective(lambda comm, stream: comm.recv(*_whole(buffer), peer, stream), [peer])

    def allreduce(self, tensor: Sequence[torch.Tensor], allreduce_options: Any = None) -> None:
        flat, op = _flat(tensor), _reduce_op(allreduce_options)
        self._collective(lambda comm, stream: comm.allReduce(flat.data_ptr(), *_whole(flat), op, stream))

    def reduce(self, tensor: Sequence[torch.Tensor], reduce_options: Any = None) -> None:
        flat, op, root = _flat(tensor), _reduce_op(reduce_options), getattr(reduce_options, "root_rank", 0)
        self._collective(lambda comm, stream: comm.reduce(flat.data_ptr(), *_whole(flat), op, root, stream))

    def broadcast(self, tensor: Sequence[torch.Tensor], broadcast_options: Any = None) -> None:
        flat, root = _flat(tensor), getattr(broadcast_options, "root_rank", 0)
        self._collective(lambda comm, stream: comm.broadcast(flat.data_ptr(), *_whole(flat), root, stream))

    def allgather(self, tensor_list: Any, tensor: Sequence[torch.Tensor], allgather_options: Any = None) -> None:
        flat = _flat(tensor)
        gathered = torch.empty(self.world_size, flat.numel(), dtype=flat.dtype, device=flat.device)
        pointer, count, dtype = _whole(flat)
        self._collective(lambda comm, stream: comm.allGather(pointer, gathered.data_ptr(), count, dtype, stream))
        for output, part in zip(tensor_list[0], gathered, strict=True):
            output.copy_(part.view(output.shape))

    def reducescatter(self, tensor: Any, tensor_list: Any, reducescatter_options: Any = None) -> None:
        output, op = _flat(tensor), _reduce_op(reducescatter_options)
        parts = torch.stack([part.reshape(-1) for part in tensor_list[0]])
        self._collective(lambda comm, stream: comm.reduceScatter(parts.data_ptr(), *_whole(output), op, stream))

    def barrier(self, barrier_options: Any = None) -> None:
        self.allreduce([torch.zeros(1, dtype=torch.int32, device=self._stream.device if self._stream else "cuda")])

    def _collective(self, group: Group, peers: list[int] | None = None) -> None:
        deadline = Deadline(COLLECTIVE_TIMEOUT_S)
        self._run(group, deadline, self.peers if peers is None else peers)


def _messages(sends: Mapping[int, Sequence[torch.Tensor]], receives: Mapping[int, Sequence[torch.Tensor]]) -> Group:
    def group(communicator: Any, stream: int) -> None:
        uint8 = _nccl().NCCL_UINT8
        for act, side in ((communicator.send, sends), (communicator.recv, receives)):
            for peer, buffers in side.items():
                for buffer in buffers:
                    act(buffer.data_ptr(), buffer.numel(), uint8, peer, stream)

    return group


def _flat(one: Sequence[torch.Tensor]) -> torch.Tensor:
    if not one[0].is_cuda or not one[0].is_contiguous():
        raise ValueError("ETC_NCCL takes contiguous tensors on a GPU")
    return one[0].view(-1)


def _whole(flat: torch.Tensor) -> tuple[int, int, int]:
    """Pointer, count and type, as cupy wants them."""
    return flat.data_ptr(), flat.numel(), getattr(_nccl(), DTYPES[flat.dtype])


def _reduce_op(options: Any) -> int:
    return getattr(_nccl(), REDUCE_OPS[options.reduceOp.name if options is not None else "SUM"])
