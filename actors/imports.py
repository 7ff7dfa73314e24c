"""Imports ahead of need, in a process that nobody waits for, beside ranks that train on the same processors."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module

logger = logging.getLogger(__name__)


def import_all(modules: Iterable[str]) -> None:
    """Import what can be imported; the rest is left to whoever needs it.

    In the order in which another process began to, each import runs as it did there.
    """
    for name in modules:
        if name not in sys.modules:
            with suppress(Exception):  # made at run time, or already an error that the other process lived with
                import_module(name)


def import_all_in_idle_time(modules: Iterable[str]) -> None:
    """The same, but only while nothing else wants the processor.

    In a thread of its own: a thread may always join the scheduler's idle class, but without privileges none may leave
    it again, so the threads that will train must never have been in it.
    """

    def work() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        import_all(modules)

    thread = threading.Thread(target=work, name="imports")
    thread.start()
    thread.join()
    _leave_idle_class()


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
