"""Which parallel configuration to use for a number of ranks."""

from __future__ import annotations

from collections.abc import Callable

from ray_etc.planners.parallel import ParallelConfig

Chooser = Callable[[int], ParallelConfig]
"""For a number of ranks, the configuration that uses all of them; ValueError where there is none."""


def as_chooser(parallel: ParallelConfig | Chooser | None) -> Chooser:
    """A configuration stands for its tensor and pipeline axes, with data parallelism filling the ranks."""
    if parallel is None:
        parallel = ParallelConfig()
    return parallel.with_world_size if isinstance(parallel, ParallelConfig) else parallel


def largest(chooser: Chooser, at_most: int, check: Callable[[ParallelConfig], str | None]) -> ParallelConfig | None:
    """The largest configuration for at most `at_most` ranks that exists and that `check` finds nothing wrong with."""
    for number in range(at_most, 0, -1):
        try:
            parallel = chooser(number)
        except ValueError:
            continue
        if check(parallel) is None:
            return parallel
    return None
