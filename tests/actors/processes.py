"""Real processes for tests: each runs one function and reports what came of it; none outlives its test."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ray_etc.actors.transports import GlooTransport, Transport

LOOPBACK = "127.0.0.1"

# Forked from a server that has torch imported, so that a process costs milliseconds and inherits no thread.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "ray_etc.actors.mover"])


@dataclass
class Outcome:
    """What one process returned or raised; `exit_code` is -9 where it was killed."""

    value: Any = None
    error: Exception | None = None
    exit_code: int | None = None


class Board:
    """Where processes leave each other messages; `get` waits for one, so that tests need no sleeps."""

    def __init__(self, port: int) -> None:
        self._store = dist.TCPStore(LOOPBACK, port, None, False, timedelta(seconds=30), wait_for_workers=False)

    def put(self, key: str, value: bytes = b"") -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._store.get(key)


def run_processes(count: int, body: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Outcome]:
    """Run `body(rank, board, *arguments)` in `count` processes; a process that hangs fails the test."""
    store = dist.TCPStore(LOOPBACK, 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    processes, pipes = [], []
    deadline = time.monotonic() + timeout_s
    try:
        for rank in range(count):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_main, args=(theirs, store.port, rank, body, arguments), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        outcomes = []
        for rank, (process, pipe) in enumerate(zip(processes, pipes, strict=True)):
            if not multiprocessing.connection.wait([pipe], max(deadline - time.monotonic(), 0.1)):
                raise AssertionError(f"process {rank} still runs after {timeout_s} s")
            outcome = Outcome()
            with suppress(EOFError):
                outcome = pipe.recv()
            process.join(max(deadline - time.monotonic(), 0.1))
            outcome.exit_code = process.exitcode
            outcomes.append(outcome)
        return outcomes
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def wait_gone(pid: int, timeout_s: float = 30.0) -> None:
    """Until a process has ended and let go of its memory, whether or not its parent has reaped it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between open and read
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} still runs after {timeout_s} s")


def _main(pipe: Any, port: int, rank: int, body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(Outcome(value=body(rank, Board(port), *arguments)))
    except Exception as error:
        traceback.print_exc()
        pipe.send(Outcome(error=error))


def join_group(
    rank: int,
    board: Board,
    world_size: int,
    name: str = "group",
    timeout_s: float = 20.0,
    kind: type[Transport] = GlooTransport,
) -> Transport:
    """A connected member of a group on loopback."""
    transport = kind(world_size, rank, name)
    if rank == 0:
        board.put(name, transport.rendezvous(LOOPBACK))
    transport.connect(board.get(name), timeout_s)
    return transport
