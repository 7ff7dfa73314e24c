"""Weights that each rank has only its own range of between two steps (`overlap_param_gather`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matrix import BF16, GATHER, mesh
from oracle import same_bits
from ranks import run_ranks
from trainee import trainee

from ray_etc.actors.small_state import SmallState, load_small_state

Weights = dict[str, torch.Tensor]


def weights_of(task: Any) -> Weights:
    return {name: param.detach().clone() for name, param in task.chunks[0].named_parameters()}


def save_and_begin_anew(folder: Path) -> tuple[float, Weights, Weights, Weights]:
    """The share of the weights that is catalogued, and all of them: after two steps, after a save, and in a generation
    that begins as Megatron's script does, without the hooks that gather."""
    parallel = mesh(dp=2)
    task = trainee("llama", {**GATHER, **BF16, "bucket_size": 300}, 8)(parallel)
    for _ in range(2):  # the learning rate begins at 0
        task.train_step()
    own = [shard.view for shard in task.state.shards if shard.tensor.kind == "param"]
    share = sum(view.numel() for view in own) / sum(param.numel() for param in task.chunks[0].parameters())
    trained = weights_of(task)
    task.state.save_checkpoint(folder, 2)
    saved = weights_of(task)

    small, at = SmallState.of(task.state), parallel.coordinate(torch.distributed.get_rank())
    arrived = [view.detach().clone() for view in own]
    with torch.no_grad():
        for param in task.chunks[0].parameters():
            param.fill_(float("nan"))
        for view, value in zip(own, arrived, strict=True):
            view.copy_(value)
    task.chunks[0].disable_forward_pre_hook(param_sync=False)
    load_small_state(task.state, small.replicated, {at: small.streams}, at, 2)
    return share, trained, saved, weights_of(task)


def test_weights_are_whole_wherever_they_are_read_before_the_next_step(tmp_path: Path) -> None:
    (share, trained, saved, begun), (other_share, others, _, _) = ranks = run_ranks(save_and_begin_anew, 2, tmp_path)
    # Padding of the vocabulary is in no catalogue.
    assert 0.4 < share < 0.6
    assert 0.9 < share + other_share <= 1.0
    assert not all(same_bits(trained[name], others[name]) for name in trained), "nothing was left to be gathered"
    for name in begun:
        assert all(same_bits(weights[name], begun[name]) for rank in ranks for weights in rank[2:])
    assert not all(same_bits(trained[name], saved[name]) for name in trained)
