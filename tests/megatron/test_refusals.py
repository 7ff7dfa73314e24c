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


def test_a_checkpoint_of_remainders_of_main_weights_is_refused() -> None:
    """They come with Transformer Engine, so this is an optimizer by name only."""
    leaf = compat.FP32Optimizer.__new__(compat.FP32Optimizer)
    leaf.optimizer = SimpleNamespace(store_param_remainders=True)
    with pytest.raises(ValueError, match=r"^with store_param_remainders=True .* set it to False to save or load"):
        compat.require_whole_main_weights(leaf)
