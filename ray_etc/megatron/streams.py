"""The random streams of a rank, and the rule by which each coordinate of a new generation gets its own.

Megatron keeps three sorts. The shared streams (python, numpy, torch's own, the tracker's "data-parallel-rng") must be
equal on all tensor-parallel ranks of a stage: they draw the dropout masks of activations that every such rank holds
whole. The split streams (most of the tracker's) must differ from one tensor-parallel rank to the next, and the
experts' stream (its "expert-parallel-rng") from one place among the experts to the next.

The rule. A shared stream comes from the old rank with the same pipeline index, a split stream from the one with the
same (tensor, pipeline) index, the experts' from the one with the same (expert tensor, expert, pipeline) index; among
its context- and data-parallel replicas from the one with the same data index, or else the lowest. Where the old
generation had no such index, a fresh stream is seeded from (seed, step, pipeline) if it is shared, from (seed, step,
pipeline, tensor) if it is split, and from (seed, step, pipeline, expert tensor, expert) if it is the experts'.
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
    get_expert_parallel_rng_tracker_name,
    model_parallel_cuda_manual_seed,
)

from ray_etc.planners.parallel import Coordinate, nearest, of_experts, of_stage, of_tensor

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
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": _plain(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
            "tracker": {name: _plain(state) for name, state in get_cuda_rng_tracker().get_states().items()},
        }

    def load_streams(self, streams: Mapping[Coordinate, dict[str, Any]], coordinate: Coordinate, step: int) -> None:
        shared_name, experts_name = get_data_parallel_rng_tracker_name(), get_expert_parallel_rng_tracker_name()
        tracker_states = get_cuda_rng_tracker().get_states()
        if stage := of_stage(streams, coordinate):
            shared = streams[nearest(stage, coordinate)]
            random.setstate(shared["python"])
            np.random.set_state(shared["numpy"])
            torch.set_rng_state(shared["torch"])
            if shared["cuda"] is not None:
                torch.cuda.set_rng_state(shared["cuda"])
            tracker_states[shared_name] = shared["tracker"][shared_name]
        else:
            seed = _fresh_seed(self.seed, step, coordinate.pipeline)
            _seed_shared(seed)
            torch.cuda.manual_seed(seed)
            tracker_states[shared_name] = _seeded_state(seed)
        for index, name in enumerate(sorted(set(tracker_states) - {shared_name})):
            place: tuple[int, ...] = (coordinate.tensor,)
            alike = of_tensor(streams, coordinate)
            if name == experts_name:
                place = (coordinate.expert_tensor, coordinate.expert)
                alike = of_experts(streams, coordinate)
            if alike:
                tracker_states[name] = streams[nearest(alike, coordinate)]["tracker"][name]
            else:
                seed = _fresh_seed(self.seed, step, coordinate.pipeline, *place, index)
                tracker_states[name] = _seeded_state(seed)
        held = get_cuda_rng_tracker().get_states()
        get_cuda_rng_tracker().set_states(
            {name: _put_into(held.get(name), state) for name, state in tracker_states.items()}
        )


def to_megatron(random_streams: Mapping[str, Any]) -> dict[str, Any]:
    """What `RandomStreams.state_dict` returns, by the names of Megatron's checkpoints."""
    return {
        "random_rng_state": random_streams["python"],
        "np_rng_state": random_streams["numpy"],
        "torch_rng_state": random_streams["torch"],
        "cuda_rng_state": random_streams["torch" if random_streams["cuda"] is None else "cuda"],
        "rng_tracker_states": random_streams["tracker"],
    }


def from_megatron(rng_state: Mapping[str, Any]) -> dict[str, Any]:
    """The other way round."""
    return {
        "python": rng_state["random_rng_state"],
        "numpy": rng_state["np_rng_state"],
        "torch": rng_state["torch_rng_state"],
        "cuda": rng_state["cuda_rng_state"] if torch.cuda.is_available() else None,
        "tracker": rng_state["rng_tracker_states"],
    }


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


def _put_into(held: Any, state: Any) -> Any:
    """What a tracker is to keep in place of `held`: where that is a generator, CUDA graphs refer to it, so it stays."""
    put: Callable[[Any], None] | None = getattr(held, "set_state", None)
    if put is None or state is held:
        return state
    put(state)
    return held


def _plain(state: Any) -> torch.Tensor:
    """A generator's state as bytes that can be pickled; trackers made for CUDA graphs keep generators."""
    read: Callable[[], torch.Tensor] | None = getattr(state, "get_state", None)
    return (read() if read else state).clone()
