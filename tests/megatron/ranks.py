"""Ranks for a test: forked processes in one gloo group, which never outlive it."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1
FAILED_GRACE_S = 2.0
"""How long ranks may still say something after one has failed."""


class RanksFailedError(Exception):
    """Some ranks did not finish; the message has the traceback of each."""


def run_ranks(work: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90, **kwargs: Any) -> list[Any]:
    """Call `work(*args, **kwargs)` on `world_size` ranks at once and return what each returned, by rank.

    Forking is fast because torch and Megatron are imported once, here. All ranks are gone when this returns.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids = {
            _fork(partial(work, *args, **kwargs), rank, world_size, Path(folder), timeout_s): rank
            for rank in range(world_size)
        }
        left = set(pids)
        deadline = time.monotonic() + timeout_s
        failed = False
        try:
            while left and not failed and time.monotonic() < deadline:
                for pid in list(left):
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        left.discard(pid)
                        failed |= status != 0
                time.sleep(0.005)
            if failed:  # the others wait for the one that failed; let those that can still say why
                time.sleep(0.2)
        finally:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        reports = [Path(folder, f"error{rank}") for rank in range(world_size)]
        if failed or left:
            said = [f"rank {rank}: {path.read_text()}" for rank, path in enumerate(reports) if path.exists()]
            raise RanksFailedError("\n".join(said) or f"no answer within {timeout_s} s")
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(world_size)]


class Rank(Protocol):
    """A rank that lives on: it hosts an object, and calls its methods one after another."""

    who: str
    timeout_s: float
    pipe: Connection
    """Readable when a call has ended."""

    def start(self, method: str, *args: Any) -> None: ...

    def finish(self) -> Any:
        """What the method returned."""

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Address:
    """Which rank of what; `folder` is one that all ranks see."""

    generation: int
    slot: int
    rank: int
    world_size: int
    folder: Path
    timeout_s: float


Place = Callable[[Callable[[], Any], Address], Rank]
"""Has a rank host what the callable returns."""


class Worker:
    """A `Rank` in a process forked for it."""

    def __init__(self, make: Callable[[], Any], at: Address) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.who, self.timeout_s, self._error = f"rank {at.rank}", at.timeout_s, at.folder / f"error{at.rank}"
        self._pid = _fork(partial(_serve, theirs, make), at.rank, at.world_size, at.folder, at.timeout_s)
        theirs.close()

    def start(self, method: str, *args: Any) -> None:
        # Pickled here: a pipe of multiprocessing would move every tensor that it carries into shared memory.
        self.pipe.send_bytes(pickle.dumps((method, args)))

    def finish(self) -> Any:
        """What the method returned."""
        if not self.pipe.poll(self.timeout_s):
            raise RanksFailedError(f"{self.who}: no answer within {self.timeout_s} s")
        try:
            answer, error = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            error = self._error.read_text() if self._error.exists() else "killed"
        if error is not None:
            raise RanksFailedError(f"{self.who}: {error}")
        return answer

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self.pipe.close()


def finish_all(ranks: Sequence[Rank]) -> list[Any]:
    """The answers of all; where some failed, what each of those said. Those that wait for them are not waited for."""
    answers: list[Any] = [None] * len(ranks)
    said: list[str] = []
    left: dict[Any, int] = {rank.pipe: number for number, rank in enumerate(ranks)}
    while left and (ready := connection.wait(list(left), FAILED_GRACE_S if said else ranks[0].timeout_s)):
        for pipe in ready:
            number = left.pop(pipe)
            try:
                answers[number] = ranks[number].finish()
            except RanksFailedError as error:
                said.append(str(error))
    if said or left:
        raise RanksFailedError("\n".join([*said, *(f"{ranks[number].who}: no answer" for number in left.values())]))
    return answers


def _serve(pipe: Any, make: Callable[[], Any]) -> None:
    host = make()
    while True:
        method, args = pickle.loads(pipe.recv_bytes())
        try:
            answer: tuple[Any, str | None] = getattr(host, method)(*args), None
        except Exception:
            answer = None, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))


def _fork(work: Callable[[], Any], rank: int, world_size: int, folder: Path, timeout_s: float) -> int:
    # What is there already is never looked at again by the garbage collector, which Megatron's checkpoints run: looking
    # at all of torch takes a second a rank, because it copies each page that the ranks share.
    gc.freeze()
    if pid := os.fork():
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = work()
        dist.barrier()
        (folder / f"result{rank}").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
    finally:
        for child in multiprocessing.active_children():  # Megatron's checkpoint writer leaves helpers behind
            child.terminate()
            child.join(2)
        os._exit(code)
