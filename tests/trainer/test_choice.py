"""Axes that are only planned for are refused before anything starts."""

from __future__ import annotations

import pytest

from ray_etc.choice import as_chooser
from ray_etc.planners.parallel import ParallelConfig


def test_an_axis_that_is_only_planned_for_is_refused_by_name() -> None:
    parallel = ParallelConfig(fully_sharded=True)
    message = "^fully_sharded=True .* not trained under yet; leave it out$"
    with pytest.raises(ValueError, match=message):
        as_chooser(parallel)
    with pytest.raises(ValueError, match=message):
        as_chooser(lambda number: parallel)(parallel.world_size)


def test_what_is_no_configuration_is_refused_by_its_value() -> None:
    with pytest.raises(TypeError, match=r"^parallel=2 is neither a ParallelConfig nor a function"):
        as_chooser(2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^4 is no ParallelConfig$"):
        as_chooser(lambda number: 4)(4)  # type: ignore[arg-type, return-value]


def test_data_parallelism_fills_the_ranks() -> None:
    assert as_chooser(ParallelConfig(2, 2))(12) == ParallelConfig(2, 2, 3)
    experts = ParallelConfig(2, 1, 1, context_parallel=2, expert_parallel=4, expert_tensor_parallel=1)
    assert as_chooser(experts)(12).data_parallel == 3
