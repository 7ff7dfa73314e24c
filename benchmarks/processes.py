"""Processes for a benchmark: each holds one object and answers calls to its methods, in the order they were made."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

CONTEXT = multiprocessing.get_context("spawn")
CALL_S = 300.0


class Process:
    """`kind(*arguments)` in a process of its own, with `environment` set before anything is imported there."""

    def __init__(self, kind: type, *arguments: Any, environment: Mapping[str, str] | None = None) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        before = {name: os.environ.get(name) for name in environment or {}}
        os.environ.update(environment or {})
        try:
            self._process = CONTEXT.Process(target=_serve, args=(theirs, kind, arguments))
            self._process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        theirs.close()

    def send(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def receive(self) -> Any:
        if not self._pipe.poll(CALL_S):
            raise TimeoutError(f"process {self._process.pid} did not answer within {CALL_S:.0f} s")
        error, value = self._pipe.recv()
        if error is not None:
            raise RuntimeError(f"in process {self._process.pid}: {error}")
        return value

    def let_go(self) -> None:
        """It ends once it has answered."""
        self._pipe.close()

    def end(self) -> None:
        self.let_go()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def kill(self) -> None:
        """At once, whatever it is doing."""
        self._pipe.close()
        self._process.kill()
        self._process.join()


def end_all(processes: Sequence[Process]) -> None:
    """Side by side: a process that holds much of a GPU takes seconds to end."""
    for process in processes:
        process.let_go()
    for process in processes:
        process.end()


def call_all(processes: Sequence[Process], method: str, *arguments: Any) -> list[Any]:
    """The same call to all at once; what each returned."""
    return each_its_own(processes, method, [arguments] * len(processes))


def each_its_own(processes: Sequence[Process], method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
    """One call to each at once, with arguments of its own; what each returned."""
    for process, own in zip(processes, arguments, strict=True):
        process.send(method, *own)
    return [process.receive() for process in processes]


def _serve(pipe: Any, kind: type, arguments: Sequence[Any]) -> None:
    served = None
    while True:
        try:
            method, own = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            if served is None:
                served = kind(*arguments)
            pipe.send((None, getattr(served, method)(*own)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
            time.sleep(0.01)
