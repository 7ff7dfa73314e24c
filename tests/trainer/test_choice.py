"""Axes that are only planned for are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from ray_etc.choice import as_chooser
from ray_etc.planners.parallel import ParallelConfig

ONLY_PLANNED: list[dict[str, Any]] = [
    {"context_parallel": 2},
    {"expert_parallel": 2, "data_parallel": 2},
    {"expert_tensor_parallel": 1, "tensor_parallel": 2},
    {"virtual_pipeline": 2, "pipeline_parallel": 2},
    {"pipeline_layers": (1, 2), "pipeline_parallel": 2},
    {"fully_sharded": True},
]


@pytest.mark.parametrize("axes", ONLY_PLANNED, ids=lambda axes: next(iter(axes)))
def test_an_axis_that_is_only_planned_for_is_refused_by_name(axes: dict[str, Any]) -> None:
    parallel = ParallelConfig(**axes)
    message = f"^{next(iter(axes))}=.* not trained under yet; leave it out$"
    with pytest.raises(ValueError, match=message):
        as_chooser(parallel)
    with pytest.raises(ValueError, match=message):
        as_chooser(lambda number: parallel)(parallel.world_size)


def test_data_parallelism_fills_the_ranks() -> None:
    assert as_chooser(ParallelConfig(2, 2))(12) == ParallelConfig(2, 2, 3)
