"""What a train loop calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ray_etc.actors.session import Context, current_session
from ray_etc.actors.state import TrainState


def get_context() -> Context:
    """Where this rank stands: Ray Train's `TrainContext` methods, `.parallel`, `.generation` and `.coordinate`."""
    return current_session().context


def steps(state: TrainState, total: int) -> Iterator[int]:
    """The step numbers from where the state stands up to `total`: the only place where a resize can happen.

    A new generation runs the train loop from its top and enters here at the step where the old one left off, with
    all of `state` moved over. The old one leaves here, by an exception that only its `finally` blocks see.
    """
    return current_session().steps(state, total)


def report(metrics: dict[str, Any]) -> None:
    """Report this step's metrics. Every rank may; rank 0's are the run's."""
    current_session().report(metrics)
