"""A resize that the user asked for, from another thread than the run's."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from ray_etc.actors.errors import ResizeFailed
from ray_etc.actors.record import ResizeRecord
from ray_etc.choice import Chooser
from ray_etc.planners.parallel import ParallelConfig


@dataclass
class Aim:
    """What the run aims for: how many ranks, and which configuration for a number of them."""

    number: int
    chooser: Chooser


@dataclass(frozen=True)
class Request:
    """`before` is what was aimed for until then, should the request fail."""

    parallel: ParallelConfig
    done: Future[ResizeRecord]
    before: Aim


class RequestBox:
    """Holds at most one request. The aim changes with a request, and back where it fails or is withdrawn."""

    def __init__(self, aim: Aim) -> None:
        self.aim = aim
        self._request: Request | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def parallel(self) -> ParallelConfig | None:
        """What is asked for, if anything is."""
        request = self._request
        return request.parallel if request is not None else None

    def ask(self, parallel: ParallelConfig, chooser: Chooser) -> Future[ResizeRecord]:
        """Raises ResizeFailed where another request is under way or the run has ended."""
        with self._lock:
            if self._is_closed:
                raise ResizeFailed("the run has ended")
            if self._request is not None:
                raise ResizeFailed(f"a resize to {self._request.parallel} is already asked for")
            self._request = Request(parallel, Future(), self.aim)
            self.aim = Aim(parallel.world_size, chooser)
            return self._request.done

    def withdraw(self, done: Future[ResizeRecord]) -> None:
        """Take a request back that has not been answered."""
        with self._lock:
            if self._request is not None and self._request.done is done:
                self.aim, self._request = self._request.before, None

    def answer(self, record: ResizeRecord) -> None:
        """The record of a resize that is over: it answers the request if it was made for it."""
        with self._lock:
            request = self._request
            if request is None or not record.is_requested or record.parallel_to != request.parallel:
                return
            self._request = None
            if record.error is None:
                request.done.set_result(record)
            else:
                self.aim = request.before
                request.done.set_exception(ResizeFailed(record.error))

    def close(self) -> None:
        """The run is over: nobody waits for ever."""
        with self._lock:
            self._is_closed = True
            if self._request is not None:
                self._request.done.set_exception(ResizeFailed("the run has ended"))
                self._request = None
