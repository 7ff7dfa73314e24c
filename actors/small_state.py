"""The small state of one rank between two steps, packed: what is equal on every rank, and what belongs to a coordinate.

Only ranks unpack it. The driver passes bytes on and compares digests: unpacking there would import whatever the
user's objects are made of, Megatron for one, in the middle of the pause.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ray_etc.actors.state import TrainState
from ray_etc.planners.parallel import Coordinate


@dataclass(frozen=True)
class SmallState:
    """`replicated` and `streams` are pickled mappings from names to state dicts."""

    replicated: bytes
    streams: bytes

    @classmethod
    def of(cls, state: TrainState) -> SmallState:
        """A snapshot: pickled at once, because a state dict may hold what training goes on to change."""
        small = state.small_state()
        return cls(pickle.dumps(small["replicated"]), pickle.dumps(small["streams"]))

    def digests(self) -> dict[str, str]:
        """A digest of each replicated item, equal where the values are equal."""
        return {name: _digest(value) for name, value in pickle.loads(self.replicated).items()}


def load_small_state(
    state: TrainState, replicated: bytes, streams: Mapping[Coordinate, bytes], coordinate: Coordinate, step: int
) -> None:
    """Take over an old generation's small state, once its tensors are there.

    Args:
        replicated: of any old rank.
        streams: by coordinate of the old generation, those that may concern this rank.
        coordinate: of this rank.
        step: how many steps are whole.
    """
    state.put_back()
    values = pickle.loads(replicated)
    for name, item in state.replicated.items():
        item.load_state_dict(values[name])
    by_coordinate = {old: pickle.loads(packed) for old, packed in streams.items()}
    for name, stream in state.streams.items():
        stream.load_streams({old: states[name] for old, states in by_coordinate.items()}, coordinate, step)


def _digest(value: Any) -> str:
    """Of the value, not of its pickle, which also depends on which equal parts are the same object."""
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        digest.update(type(part).__name__.encode())
        if isinstance(part, torch.Tensor):
            part = part.detach().cpu().contiguous()
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, np.ndarray):
            digest.update(f"{part.dtype}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        elif isinstance(part, Mapping):
            for key in sorted(part, key=repr):
                add(key)
                add(part[key])
        elif isinstance(part, Sequence) and not isinstance(part, str | bytes):
            for each in part:
                add(each)
        elif isinstance(part, str | bytes | int | float | complex | bool | None):
            digest.update(repr(part).encode())
        else:
            digest.update(pickle.dumps(part))
        digest.update(b";")

    add(value)
    return digest.hexdigest()
