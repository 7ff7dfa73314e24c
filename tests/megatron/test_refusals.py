"""What cannot be moved is refused before anything starts, with one clear line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from models import trainee
from ranks import RanksFailedError, run_ranks
from refusals import REFUSALS, Refusal

from ray_etc.megatron import compat


def train(refusal: Refusal) -> None:
    task = trainee(refusal.model, refusal.optimizer, 4, **refusal.change)(refusal.parallel)
    task.train_step()


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.what)
def test_refused(refusal: Refusal) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(train, refusal.parallel.world_size, refusal)
    told = [line for line in str(failed.value).splitlines() if refusal.says in line]
    assert told
    # By us: before the first step, and in one line.
    assert refusal.by == "Megatron" or all(line.startswith("ValueError: ") for line in told if "raise" not in line)


def test_a_precision_aware_optimizer_is_refused_where_it_could_be_made() -> None:
    """It needs Transformer Engine, so this is one by name only."""
    leaf = compat.FP32Optimizer.__new__(compat.FP32Optimizer)
    leaf.config = SimpleNamespace(optimizer="adam", use_precision_aware_optimizer=True)
    with pytest.raises(
        ValueError, match=r"^use_precision_aware_optimizer=True hides the main weights .* set it to False$"
    ):
        compat.require_known_optimizer(leaf)
