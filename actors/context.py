"""Where a rank stands, as its train loop sees it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ray_etc.planners.parallel import Coordinate, ParallelConfig


@dataclass(frozen=True)
class Context:
    """Where this rank stands. The methods carry the names of Ray Train's `TrainContext`.

    The world size and every rank change from generation to generation, within one call of `fit`.
    """

    experiment_name: str
    generation: int
    parallel: ParallelConfig
    world_rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    slot_id: int
    about_step: int | None = 0
    """Where the run stood when this generation was decided on; it will begin a little later. None where its model is
    built without the memory for it, so that no step can be rehearsed."""

    @property
    def coordinate(self) -> Coordinate:
        return self.parallel.coordinate(self.world_rank)

    def get_experiment_name(self) -> str:
        return self.experiment_name

    def get_world_size(self) -> int:
        return self.parallel.world_size

    def get_world_rank(self) -> int:
        return self.world_rank

    def get_local_rank(self) -> int:
        return self.local_rank

    def get_local_world_size(self) -> int:
        return self.local_world_size

    def get_node_rank(self) -> int:
        return self.node_rank


def environment_for(parallel: ParallelConfig) -> dict[str, str]:
    """What a rank needs in its environment before it touches a GPU, less what its user has set otherwise.

    Under tensor and context parallelism Megatron relies on the order in which it launches what is sent, and so on one
    queue to the GPU. Elsewhere one queue would only have streams wait for each other.
    """
    is_ordered = parallel.tensor_parallel > 1 or parallel.context_parallel > 1
    needed = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_ordered else {}
    return {name: value for name, value in needed.items() if name not in os.environ}
