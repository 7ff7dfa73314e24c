"""A generation's layout as arrays: what thousands of ranks hold, without an object a shard.

Layers of one shape share their geometry, and so do a weight's moments: tensors that the same ranks hold in the same
boxes are one family, and a row stands for a box of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ray_etc.planners.layout import TensorSpec


@dataclass(frozen=True, eq=False)
class LayoutTable:
    """Every shard of `world_size` ranks; row i says that `rank[i]` holds a box of each tensor of family `family[i]`.

    Tensors of a family have one shape. `family` and `rank` are int64 [rows], `offsets` and `lengths` int64
    [rows, ndim] in elements of the logical tensor, where dims that a tensor does not have are offset 0, length 1.
    Two rows may be equal: a rank that holds a tied weight twice. Empty boxes are not listed.
    """

    world_size: int
    families: tuple[tuple[TensorSpec, ...], ...]
    family: np.ndarray
    rank: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
