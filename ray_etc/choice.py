"""Which parallel configuration to use for a number of ranks."""

from __future__ import annotations

from collections.abc import Callable

from ray_etc.planners.parallel import ParallelConfig

Chooser = Callable[[int], ParallelConfig]
"""For a number of ranks, the configuration that uses all of them; ValueError where there is none."""


def as_chooser(parallel: ParallelConfig | Chooser | None) -> Chooser:
    """A configuration stands for its tensor and pipeline axes, with data parallelism filling the ranks.

    Raises ValueError, as the chooser does, for a configuration that cannot be trained under.
    """
    if parallel is None:
        parallel = ParallelConfig()
    if isinstance(parallel, ParallelConfig):
        require_trainable(parallel)
        return parallel.with_world_size
    if not callable(parallel):
        raise TypeError(f"parallel={parallel!r} is neither a ParallelConfig nor a function from a number to one")
    choose = parallel

    def checked(number: int) -> ParallelConfig:
        chosen = choose(number)
        require_trainable(chosen)
        return chosen

    return checked


def require_trainable(parallel: ParallelConfig) -> None:
    """Raise ValueError where `parallel` has an axis that is planned for, but that nothing trains under yet.

    TypeError where it is no configuration.
    """
    if not isinstance(parallel, ParallelConfig):
        raise TypeError(f"{parallel!r} is no ParallelConfig")
    if parallel.fully_sharded:
        raise ValueError(
            "fully_sharded=True can be planned (`python -m ray_etc plan`), but not trained under yet; leave it out"
        )


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
