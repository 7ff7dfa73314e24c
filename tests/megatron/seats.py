"""Processes that host one rank after another, so that each generation does not cost the start of its own.

Two sit in each slot, for the two generations of a handover. On GPUs the slots share what there is, and each passes for
a host of its own: NCCL then goes over sockets, as between nodes.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from ranks import PR_SET_PDEATHSIG, Address, RanksFailedError

# Nothing is inherited: CUDA does not survive a fork of a process that has so much as asked for it.
CONTEXT = multiprocessing.get_context("spawn")

START_S = 300.0
"""Importing takes each process 10 s of a core."""
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than all that is run here
}


class Seats:
    """A `Place` of so many slots, on CPUs (`gpus` is 0) or spread over so many GPUs."""

    def __init__(self, slots: int, gpus: int) -> None:
        self._slots, self._gpus = slots, gpus
        self._seats: dict[tuple[int, int], Seat] = {}
        self._stores = Path(tempfile.mkdtemp())

    def __call__(self, make: Callable[[], Any], at: Address) -> Seat:
        if not self._seats:
            self._seats = {(side, slot): Seat(slot, self._gpus) for slot in range(self._slots) for side in (0, 1)}
            for seat in self._seats.values():
                seat.wait_started()
        # The folder of a generation is gone before its ranks have left their group.
        return self._seats[at.generation % 2, at.slot].take(make, at, self._stores / at.folder.name)

    def clear(self) -> None:
        """End all processes; the next ranks get new ones. After a failure, some may wait for others for ever."""
        for seat in self._seats.values():
            seat.end()
        self._seats = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()
        shutil.rmtree(self._stores, ignore_errors=True)


class Seat:
    """One process, and the `Rank` that it hosts now."""

    def __init__(self, slot: int, gpus: int) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.who, self.timeout_s = f"slot {slot}", 0.0
        self._unanswered = 0
        self._process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        with patch.dict(os.environ, ENVIRONMENT):  # of the process from its very start, before it looks for GPUs
            if gpus:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
                os.environ.update(NCCL_HOSTID=f"slot{slot}", CUDA_VISIBLE_DEVICES=visible.split(",")[slot % gpus])
            self._process.start()
        theirs.close()

    def wait_started(self) -> None:
        if not self.pipe.poll(START_S):
            raise RanksFailedError(f"{self.who}: has not started within {START_S} s")
        self.pipe.recv_bytes()

    def take(self, make: Callable[[], Any], at: Address, store: Path) -> Self:
        self.who, self.timeout_s = f"generation {at.generation}, rank {at.rank} in slot {at.slot}", at.timeout_s
        self.start("arrive", make, at, store)
        return self

    def start(self, method: str, *args: Any) -> None:
        self.pipe.send_bytes(pickle.dumps((method, args)))
        self._unanswered += 1

    def finish(self) -> Any:
        """What the last method returned. Those before it have been waited for too."""
        answer, deadline = None, time.monotonic() + self.timeout_s
        while self._unanswered:
            if not self.pipe.poll(max(deadline - time.monotonic(), 0.0)):
                raise RanksFailedError(f"{self.who}: no answer within {self.timeout_s} s")
            try:
                answer, error = pickle.loads(self.pipe.recv_bytes())
            except (EOFError, ConnectionError):
                error = "killed"
            self._unanswered -= 1
            if error is not None:
                raise RanksFailedError(f"{self.who}: {error}")
        return answer

    def kill(self) -> None:
        """End the rank; its process clears up by itself, and stays."""
        self.start("leave")

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _serve(pipe: Connection) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    pipe.send_bytes(b"started")
    host: Any = None
    while True:
        try:
            method, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        error, answer = None, None
        try:
            if method == "arrive":
                host = _arrive(*args)
            elif method == "leave":
                host = None
                _leave()
            else:
                answer = getattr(host, method)(*args)
        except Exception:
            error = traceback.format_exc()
        pipe.send_bytes(pickle.dumps((answer, error)))


def _arrive(make: Callable[[], Any], at: Address, store: Path) -> Any:
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=dist.FileStore(str(store), at.world_size),
        rank=at.rank,
        world_size=at.world_size,
        timeout=timedelta(seconds=at.timeout_s),
    )
    return make()


def _leave() -> None:
    """Megatron keeps its groups in globals, and the records of its routers."""
    parallel_state.destroy_model_parallel()
    destroy_moe_metrics_tracker()
    dist.destroy_process_group()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
