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
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1


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


class Worker:
    """A rank that lives on: it hosts the object that `make` returns there, and calls its methods one after another."""

    def __init__(self, make: Callable[[], Any], rank: int, world_size: int, folder: Path, timeout_s: float) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._who, self._error, self._timeout_s = f"rank {rank}", folder / f"error{rank}", timeout_s
        self._pid = _fork(partial(_serve, theirs, make), rank, world_size, folder, timeout_s)
        theirs.close()

    def start(self, method: str, *args: Any) -> None:
        # Pickled here: a pipe of multiprocessing would move every tensor that it carries into shared memory.
        self._pipe.send_bytes(pickle.dumps((method, args)))

    def finish(self) -> Any:
        """What the method returned."""
        if not self._pipe.poll(self._timeout_s):
            raise RanksFailedError(f"{self._who}: no answer within {self._timeout_s} s")
        try:
            answer, error = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            error = self._error.read_text() if self._error.exists() else "killed"
        if error is not None:
            raise RanksFailedError(f"{self._who}: {error}")
        return answer

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._pipe.close()


def finish_all(workers: Iterable[Worker]) -> list[Any]:
    """The answers of all; where some failed, what each of those said."""
    answers, said = [], []
    for worker in workers:
        try:
            answers.append(worker.finish())
        except RanksFailedError as error:
            said.append(str(error))
    if said:
        raise RanksFailedError("\n".join(said))
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
