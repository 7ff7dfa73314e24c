"""Imports ahead of need, in a process that nobody waits for."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module


def import_all(modules: Iterable[str]) -> None:
    """Import what can be imported; the rest is left to whoever needs it.

    In the order in which another process began to, each import runs as it did there.
    """
    for name in modules:
        if name not in sys.modules:
            with suppress(Exception):  # made at run time, or already an error that the other process lived with
                import_module(name)
