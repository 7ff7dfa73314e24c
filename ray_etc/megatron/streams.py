"""The random streams of a rank, and the rule by which each coordinate of a new generation gets its own.

Megatron keeps two sorts. The shared streams (python, numpy, torch's own generators, the tracker's "data-parallel-rng")
must be equal on all tensor-parallel ranks of a stage: they draw the dropout masks of activations that every such
rank holds whole. The split streams (the tracker's others) must differ from one tensor-parallel rank to the next.

The rule. A shared stream comes from the old rank with the same pipeline index, a split stream from the one with the
same (tensor, pipeline) index; among its data-parallel replicas from the one with the same data index, or else the
lowest. Where the old generation had no such index, a fresh stream is seeded from (seed, step, pipeline) if it is
shared and from (seed, step, pipeline, tensor) if it is split.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    model_parallel_cuda_manual_seed,
)

from ray_etc.planners.parallel import Coordinate, nearest

# Megatron gives each pipeline stage a seed of its own by this stride, so that its layers start out different.
PIPELINE_SEED_STRIDE = 100


def seed_streams(seed: int, pipeline: int) -> None:
    """Seed all streams as Megatron's own training script does."""
    seed += PIPELINE_SEED_STRIDE * pipeline
    _seed_shared(seed)
    model_parallel_cuda_manual_seed(seed)


class RandomStreams:
    """All random streams of this process, as state of its coordinate."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def state_dict(self) -> dict[str, Any]:
        shared_name = get_data_parallel_rng_tracker_name()
        tracker = {name: _plain(state) for name, state in get_cuda_rng_tracker().get_states().items()}
        shared = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": _plain(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
            "tracker": {name: state for name, state in tracker.items() if name == shared_name},
        }
        return {"shared": shared, "split": {name: state for name, state in tracker.items() if name != shared_name}}

    def load_streams(self, streams: Mapping[Coordinate, dict[str, Any]], coordinate: Coordinate, step: int) -> None:
        same_stage = {at: state for at, state in streams.items() if at.pipeline == coordinate.pipeline}
        same_split = {at: state for at, state in same_stage.items() if at.tensor == coordinate.tensor}
        tracker_states = get_cuda_rng_tracker().get_states()
        if same_stage:
            shared = same_stage[nearest(same_stage, coordinate)]["shared"]
            random.setstate(shared["python"])
            np.random.set_state(shared["numpy"])
            torch.set_rng_state(shared["torch"])
            if shared["cuda"] is not None:
                torch.cuda.set_rng_state(shared["cuda"])
            tracker_states.update(shared["tracker"])
        else:
            seed = _fresh_seed(self.seed, step, coordinate.pipeline)
            _seed_shared(seed)
            torch.cuda.manual_seed(seed)
            tracker_states[get_data_parallel_rng_tracker_name()] = _seeded_state(seed)
        if same_split:
            tracker_states.update(same_split[nearest(same_split, coordinate)]["split"])
        else:
            for index, name in enumerate(sorted(set(tracker_states) - {get_data_parallel_rng_tracker_name()})):
                seed = _fresh_seed(self.seed, step, coordinate.pipeline, coordinate.tensor, index)
                tracker_states[name] = _seeded_state(seed)
        get_cuda_rng_tracker().set_states(tracker_states)


def _fresh_seed(*words: int) -> int:
    # numpy promises that a SeedSequence gives the same numbers in every version.
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def _seed_shared(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _seeded_state(seed: int) -> torch.Tensor:
    """The state that the generator behind the tracker has after `seed`; the generator is left as it was."""
    before = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(seed)
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(before)
    return state


def _plain(state: Any) -> torch.Tensor:
    """A generator's state as bytes that can be pickled; trackers made for CUDA graphs keep generators."""
    read: Callable[[], torch.Tensor] | None = getattr(state, "get_state", None)
    return (read() if read else state).clone()
