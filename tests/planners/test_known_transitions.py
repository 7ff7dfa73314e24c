"""The share of the optimizer state (12 bytes a parameter) that moves in known transitions, exactly.

"unmoved" puts rank i on slot i, "assigned" is the best of all placements on the slots that may be used. Figures are
fractions of what all new ranks need. The first model is matrices only and its layers divide evenly, so that what a
hand finds is what the layouts give. Norms, which every tensor rank holds, vocabularies, which make stages unequal,
and ranges that end inside a layer change the figures of real models: see the 70B case.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from small_models import overlap_nbytes

from ray_etc.planners.expected import expected_layouts, expected_table
from ray_etc.planners.layout import TensorSpec
from ray_etc.planners.match import match
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.zoo import OPTIMIZER_KINDS, ZOO

HIDDEN, LAYERS = 16, 16
MATRICES = {"proj": (1, 1, 1), "qkv": (3, 1, 0), "fc1": (4, 1, 0), "fc2": (1, 4, 1)}
"""(rows, columns) in units of HIDDEN, and the dim that the tensor axis cuts."""


def matrices() -> list[TensorSpec]:
    tensors = [
        TensorSpec(kind, f"{layer}.{name}", (rows * HIDDEN, columns * HIDDEN), "float32", 4, split_dim, layer)
        for kind in OPTIMIZER_KINDS
        for layer in range(LAYERS)
        for name, (rows, columns, split_dim) in MATRICES.items()
    ]
    # Nothing follows the last layer, but the stages should be cut as if something did.
    return [*tensors, *(TensorSpec(kind, "end", (0,), "float32", 4, None, LAYERS) for kind in OPTIMIZER_KINDS)]


def shares(overlap: np.ndarray, needed: int, slots: Sequence[int]) -> tuple[float, float]:
    """What moves, of `needed` bytes: with rank i on the i-th of `slots`, and at best."""
    usable = overlap[:, list(slots)]
    best = usable[linear_sum_assignment(usable, maximize=True)].sum()
    return 1 - np.trace(usable) / needed, 1 - best / needed


@pytest.mark.parametrize(
    ("before", "after", "unmoved", "assigned"),
    [
        pytest.param((4, 1, 2), (4, 2, 2), "3/4", "1/2", id="tp4_pp2_to_tp4_dp2_pp2"),
        pytest.param((4, 1, 2), (4, 1, 4), "3/4", "1/2", id="tp4_pp2_to_tp4_pp4"),
        pytest.param((4, 1, 2), (8, 1, 2), "15/16", "1/2", id="tp4_pp2_to_tp8_pp2"),
        pytest.param((2, 2, 4), (2, 1, 4), "7/8", "1/2", id="tp2_dp2_pp4_to_tp2_pp4"),
        pytest.param((2, 1, 4), (2, 1, 2), "3/4", "1/2", id="tp2_pp4_to_tp2_pp2"),
        # By hand 75% unmoved: but buckets run backwards, so data rank 0 takes the last layers, and slot 0 has the
        # first stage. Laid forwards it would be 75%.
        pytest.param((4, 1, 2), (1, 8, 1), "1", "3/4", id="tp4_pp2_to_dp8"),
        # By hand 50% unmoved; again the buckets run backwards.
        pytest.param((1, 8, 1), (2, 2, 2), "1", "1/2", id="dp8_to_tp2_dp2_pp2"),
        pytest.param((16, 1, 2), (2, 4, 4), "15/16", "7/8", id="tp16_pp2_to_tp2_dp4_pp4"),
        pytest.param((8, 1, 1), (4, 2, 1), "7/8", "1/2", id="tp8_to_tp4_dp2"),
    ],
)
def test_share_that_moves(
    before: tuple[int, int, int], after: tuple[int, int, int], unmoved: str, assigned: str
) -> None:
    """Configurations are (TP, DP, PP); all slots of the larger one may be used."""
    old, new = (ParallelConfig(tp, pp, dp) for tp, dp, pp in (before, after))
    slots = range(max(old.world_size, new.world_size))
    found = shares(*overlap_and_need(old, new, len(slots)), slots)
    assert found == pytest.approx((float(Fraction(unmoved)), float(Fraction(assigned))), abs=1e-3)


@pytest.mark.parametrize(
    ("lost", "unmoved", "assigned"),
    [
        # By hand 50% and 29%. The 29% (2/7) holds where the middle slot goes: new range j lies in old ranges j and
        # j + 1, the later half of the ranges are better off one slot up, and slot 3 or 4 is left over.
        pytest.param(None, "1/2", "2/7", id="any_slot_may_go"),
        pytest.param(3, "2/7", "2/7", id="slot3_lost"),
        # The last range is then left with what slot 6 holds of it: 23/56, 41%.
        pytest.param(7, "1/2", "23/56", id="slot7_lost"),
    ],
)
def test_dp8_to_dp7(lost: int | None, unmoved: str, assigned: str) -> None:
    old, new = ParallelConfig(data_parallel=8), ParallelConfig(data_parallel=7)
    found = shares(*overlap_and_need(old, new, 8), [slot for slot in range(8) if slot != lost])
    assert found == pytest.approx((float(Fraction(unmoved)), float(Fraction(assigned))), abs=1e-3)


def test_llama2_70b_tp8_dp4_pp4_to_tp4_dp8_pp4() -> None:
    """By hand 88% and 50%, from ranges of whole layers. Of 20 layers a stage, ranges of 5 and 2.5 are not whole ones,
    and the vocabulary shifts those of the first and last stage: 87.2% and 49.0%, over all elements of all ranks."""
    model = ZOO["llama2-70b"]
    old, new = ParallelConfig(8, 4, 4), ParallelConfig(4, 4, 8)
    held, wanted = (
        expected_table([t for t in model.tensors(parallel.pipeline_parallel) if t.kind != "param"], parallel)
        for parallel in (old, new)
    )
    found = match(held, wanted)
    needed = found.nbytes_needed
    assert needed == pytest.approx(12 * model.num_parameters, rel=1e-4)  # norms are held by every tensor rank
    assert shares(found.overlap().rows(np.arange(128)), needed, range(128)) == pytest.approx((0.872, 0.490), abs=1e-3)


def overlap_and_need(old: ParallelConfig, new: ParallelConfig, slot_count: int) -> tuple[np.ndarray, int]:
    held = dict(enumerate(expected_layouts(matrices(), old)))
    wanted = expected_layouts(matrices(), new)
    return overlap_nbytes(held, wanted, range(slot_count)), sum(s.nbytes for layout in wanted for s in layout)
