"""Imports ahead of need, in a process that nobody waits for, beside ranks that train on the same processors."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

logger = logging.getLogger(__name__)

SHARE = 0.3
"""Of one processor, that imports in the background take: they are through in half of the time that they are given."""
SHORTEST_S = 0.005
"""Of work between two rests."""


def import_all(modules: Iterable[str]) -> None:
    """Import what can be imported; the rest is left to whoever needs it.

    In the order in which another process began to, each import runs as it did there.
    """
    for name in modules:
        if name not in sys.modules:
            with suppress(Exception):  # made at run time, or already an error that the other process lived with
                import_module(name)


def import_all_in_background(modules: Iterable[str]) -> None:
    """The same, without slowing down whoever trains here: only while nothing else wants the processor, with rests.

    In a thread of its own: a thread may always join the scheduler's idle class, but without privileges none may leave
    it again, so the threads that will train must never have been in it.
    """

    def work() -> None:
        with suppress(OSError):  # some sandboxes know no such class
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        rests = _Rests()
        sys.meta_path.insert(0, rests)
        try:
            import_all(modules)
        finally:
            sys.meta_path.remove(rests)

    thread = threading.Thread(target=work, name="imports")
    thread.start()
    thread.join()
    _leave_idle_class()


class _Rests(MetaPathFinder):
    """Finds nothing; but it is asked first, in the middle of other imports too, and sleeps before it answers.

    Imports also compete for what the scheduler does not share out: memory, and the kernel's locks.
    """

    def __init__(self) -> None:
        self._thread, self._worked_until = threading.get_ident(), time.thread_time()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        worked_s = time.thread_time() - self._worked_until
        if threading.get_ident() == self._thread and worked_s > SHORTEST_S:
            time.sleep(worked_s * (1 / SHARE - 1))
            self._worked_until = time.thread_time()


def _leave_idle_class() -> None:
    """Threads that an import has started are in its class."""
    stuck = 0
    for task in map(int, os.listdir("/proc/self/task")):
        try:
            if os.sched_getscheduler(task) == os.SCHED_IDLE:
                os.sched_setscheduler(task, os.SCHED_OTHER, os.sched_param(0))
        except PermissionError:
            stuck += 1
        except ProcessLookupError:
            continue
    if stuck:
        logger.warning("%d threads that were started by imports only run in idle time from now on", stuck)
