"""What cannot be moved is refused before anything starts, with one clear line."""

from __future__ import annotations

import pytest
from ranks import RanksFailedError, run_ranks
from refusals import REFUSALS, Refusal
from trainee import trainee


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
