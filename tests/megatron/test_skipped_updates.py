"""What counts as a step's update: one that Megatron skips is as whole as any, one that only gathers gradients is not,
and what changes before the update is not yet of that step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrix import BF16, FP16, PLAIN, mesh
from ranks import run_ranks
from trainee import trainee

from ray_etc.actors.context import Context
from ray_etc.actors.session import Session
from ray_etc.planners.parallel import ParallelConfig

OVERFLOWS = {**FP16, "initial_loss_scale": 2.0**38}
OFTEN_TOO_LARGE = {**BF16, "grad_norm_skip_threshold": 1e-9}
CONSTANT = {"dtype": torch.float16, "loss_scale": 2.0**38}


def where_it_stands(parallel: ParallelConfig, optimizer: dict[str, Any], is_updating: bool) -> tuple[int, bool]:
    """Which step a rank that is frozen after its first has its tensors from, and whether their values are others."""
    task = trainee("llama", optimizer, 4)(parallel)
    session = Session(Context("test", 0, parallel, 0, 0, 1, 0, 0))
    session.begin(0)
    steps = session.steps(task.state, 9)
    next(steps)
    before = [view.clone() for view in task.state.views()]
    if is_updating:
        task.train_step()
    next(steps)
    views = task.state.views()
    return session.freeze(1.0).next_step, not all(map(torch.equal, before, views))


@pytest.mark.parametrize("more", [{}, PLAIN], ids=["ZeRO-1", "plain"])
@pytest.mark.parametrize("optimizer", [OVERFLOWS, CONSTANT, OFTEN_TOO_LARGE], ids=str)
def test_a_step_of_which_the_update_was_skipped(optimizer: dict[str, Any], more: dict[str, Any]) -> None:
    assert run_ranks(where_it_stands, 1, mesh(**more), optimizer, True) == [(1, False)]


@pytest.mark.parametrize("optimizer", [{}, BF16, FP16, CONSTANT], ids=str)
def test_a_step_that_only_gathers_gradients(optimizer: dict[str, Any]) -> None:
    """With a loss scale, too, where such a step would be taken for one that overflowed."""
    assert run_ranks(where_it_stands, 1, mesh(), optimizer, False) == [(0, False)]


def test_a_step_with_its_update() -> None:
    assert run_ranks(where_it_stands, 1, mesh(), BF16, True) == [(1, True)]


def where_each_stage_stands(parallel: ParallelConfig, optimizer: dict[str, Any]) -> tuple[int, int]:
    """How many weights a rank updates, and where it is frozen after a step with an update and three without."""
    task = trainee("llama", optimizer, 4, num_layers=3, frozen_layers=2)(parallel)
    session = Session(Context("test", 0, parallel, torch.distributed.get_rank(), 0, 1, 0, 0))
    session.begin(0)
    for step in session.steps(task.state, 9):
        if step == 4:
            break  # as where a peer died: in the middle of a step
        if step == 0:
            task.train_step()
    weights = [weight for chunk in task.chunks for weight in chunk.parameters() if weight.requires_grad]
    return len(weights), session.freeze(1.0).next_step


@pytest.mark.parametrize("more", [{}, PLAIN], ids=["ZeRO-1", "plain"])
@pytest.mark.parametrize("optimizer", [BF16, OVERFLOWS, OFTEN_TOO_LARGE], ids=str)
def test_a_stage_that_has_nothing_to_update_stands_where_the_others_do(
    optimizer: dict[str, Any], more: dict[str, Any]
) -> None:
    """Else it would count as the newest after a death, and the others, which hold what was trained, as of no use."""
    (_, first), (weights, frozen), (_, last) = run_ranks(where_each_stage_stands, 3, mesh(pp=3, **more), optimizer)
    assert weights == 0
    assert (first, frozen, last) == (1, 1, 1)


def changed_in_half_a_step(model: str, optimizer: dict[str, Any]) -> tuple[int, list[str], bool]:
    """Where a rank stands that is frozen as its second step's update is to begin, which of its tensors are not those of
    after the first, and whether its model's own buffers are."""
    parallel = mesh(**PLAIN)
    task = trainee(model, optimizer, 4)(parallel)
    session = Session(Context("test", 0, parallel, 0, 0, 1, 0, 0))
    session.begin(0)
    steps = session.steps(task.state, 9)
    next(steps)
    task.train_step()
    next(steps)
    before = [view.clone() for view in task.state.views()]
    buffers = [buffer.clone() for chunk in task.chunks for _, buffer in chunk.named_buffers()]
    assert task.state.changed_early
    assert all(torch.equal(live, held) and live.any() for live, held in task.state.changed_early)

    def peer_died() -> None:
        raise ConnectionError("in the collective before the update")

    task.optimizer.step = peer_died
    with pytest.raises(ConnectionError):
        task.train_step()
    next_step = session.freeze(1.0).next_step
    changed = [
        shard.tensor.name
        for shard, value in zip(task.state.shards, before, strict=True)
        if not torch.equal(shard.view, value)
    ]
    now = [buffer for chunk in task.chunks for _, buffer in chunk.named_buffers()]
    return next_step, changed, all(map(torch.equal, buffers, now))


@pytest.mark.parametrize("model", ["experts, biased router", "experts, balanced by quantiles"])
def test_a_peer_dies_when_the_routers_are_a_step_ahead(model: str) -> None:
    assert run_ranks(changed_in_half_a_step, 1, model, BF16) == [(1, [], False)]
