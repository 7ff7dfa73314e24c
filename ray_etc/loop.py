"""What a train loop calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ray_etc.actors.context import Context
from ray_etc.actors.session import current_session
from ray_etc.actors.state import TrainState

if TYPE_CHECKING:
    from ray.train import Checkpoint


def get_context() -> Context:
    """Where this rank stands: Ray Train's `TrainContext` methods, `.parallel`, `.generation` and `.coordinate`."""
    return current_session().context


def steps(state: TrainState, total: int) -> Iterator[int]:
    """The step numbers from where the state stands up to `total`: the only place where a resize can happen.

    A new generation runs the train loop from its top and enters here at the step where the old one left off, with
    all of `state` moved over. The old one leaves here, by an exception that only its `finally` blocks see. A step ends
    with an update: after one that only gathers gradients no resize begins, it waits for one that does.
    """
    return current_session().steps(state, total)


def report(metrics: dict[str, Any], checkpoint: Checkpoint | None = None) -> None:
    """Report this step's metrics, and a checkpoint that was written in it. Every rank may; rank 0's are the run's.

    A checkpoint stays where it was written: `Checkpoint.from_directory(task.save_checkpoint(folder))`.
    """
    current_session().report(metrics, checkpoint)
