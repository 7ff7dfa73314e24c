"""Imports in the background: everything is there afterwards, and nothing of the manner is left."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from ray_etc.actors import imports

SOURCES = {
    "first_of_all": "",
    "outer": "import inner\nimport first_of_all",
    "inner": "import os, threading\nPOLICY, THREAD = os.sched_getscheduler(0), threading.get_ident()",
    "broken": "raise RuntimeError('always')",
    "with_thread": "import threading\nGO = threading.Event()\n"
    "THREAD = threading.Thread(target=GO.wait)\nTHREAD.start()",
}


def may_leave_the_idle_class() -> bool:
    """Tried in a thread that ends."""
    outcome: list[int] = []

    def enter_and_leave() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        outcome.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=enter_and_leave)
    thread.start()
    thread.join()
    return outcome == [os.SCHED_OTHER]


def test_imports_in_the_background_leave_the_process_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in SOURCES.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    slept: list[float] = []
    monkeypatch.setattr(imports.time, "sleep", slept.append)
    monkeypatch.setattr(imports, "SHORTEST_S", 0.0)
    finders = list(sys.meta_path)
    try:
        imports.import_all_in_background(["no_such_module", "broken", "outer", "with_thread"])
        inner, with_thread = sys.modules["inner"], sys.modules["with_thread"]
        assert inner.POLICY == os.SCHED_IDLE
        assert threading.get_ident() != inner.THREAD
        assert "first_of_all" in sys.modules
        assert "broken" not in sys.modules
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
        if may_leave_the_idle_class():
            assert os.sched_getscheduler(with_thread.THREAD.native_id) == os.SCHED_OTHER
        assert len(slept) >= 4
        assert sys.meta_path == finders
    finally:
        sys.modules["with_thread"].GO.set()
        for name in SOURCES:
            sys.modules.pop(name, None)
