"""What one resize did, as data."""

from __future__ import annotations

import pytest

from ray_etc.actors.record import ResizeRecord
from ray_etc.planners.parallel import ParallelConfig


def test_preparation_is_told_by_the_rank_that_took_longest_for_each_stage() -> None:
    record = ResizeRecord(1, "requested", ParallelConfig(), ParallelConfig(tensor_parallel=2))
    record.phases_began_at["prepare"] = 100.0
    record.take_in_stages(
        [
            {"import": 103.0, "join": 104.0, "build": 105.0, "warm_up": 109.0, "entered": 110.0},
            {"import": 102.0, "join": 104.5, "build": 105.5, "entered": 112.0},  # no room for a warm-up step
        ]
    )
    assert record.phases == pytest.approx({"start": 3.0, "import": 2.5, "join": 1.0, "build": 6.5, "warm_up": 1.0})
    assert record.phases_began_at == pytest.approx(
        {"prepare": 100.0, "start": 100.0, "import": 102.0, "join": 104.0, "build": 105.0, "warm_up": 109.0}
    )
