"""Random streams: who gets whose, and that dropout goes on as it must."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from logical import load, read, whole
from ranks import run_ranks
from tiny import ONE, build, parallel

from ray_etc.planners.parallel import Coordinate, ParallelConfig

Draws = dict[str, list[float]]


def draws() -> Draws:
    """What each stream gives next."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    found = {
        "python": [random.random()],
        "numpy": [float(np.random.rand())],
        "torch": torch.rand(2).tolist(),
    }
    for name in ("model-parallel-rng", "data-parallel-rng", "expert-parallel-rng"):
        with tracker.fork(name):
            found[name] = torch.rand(2).tolist()
    return found


def train_and_draw(config: ParallelConfig, streams: dict[Coordinate, Any] | None, step: int = 2) -> tuple[Any, Draws]:
    """The streams after some training with dropout, or as taken from `streams`; and what they give next."""
    task = build(config, dropout=0.1, seed=7 if streams is None else 99)
    rank = torch.distributed.get_rank()
    if streams is None:
        task.train_step()
    else:
        task.state.streams["random"].load_streams(streams, config.coordinate(rank), step)
    return task.state.streams["random"].state_dict(), draws()


def first(config: ParallelConfig) -> tuple[dict[Coordinate, Any], dict[Coordinate, Draws]]:
    ranks = run_ranks(train_and_draw, config.world_size, config, None)
    at = [config.coordinate(rank) for rank in range(config.world_size)]
    return dict(zip(at, (r[0] for r in ranks), strict=True)), dict(zip(at, (r[1] for r in ranks), strict=True))


def then(config: ParallelConfig, streams: dict[Coordinate, Any], step: int = 2) -> dict[Coordinate, Draws]:
    ranks = run_ranks(train_and_draw, config.world_size, config, streams, step)
    return {config.coordinate(rank): drawn for rank, (_, drawn) in enumerate(ranks)}


SPLIT = ("model-parallel-rng", "expert-parallel-rng")
TRACKED = {"model-parallel-rng", "data-parallel-rng", "expert-parallel-rng"}
SHARED = ("python", "numpy", "torch", "data-parallel-rng")


def test_the_same_coordinate_goes_on() -> None:
    streams, before = first(parallel(tp=2, pp=2))
    assert then(parallel(tp=2, pp=2), streams) == before


def test_dp1_to_dp2_copies_the_replica() -> None:
    streams, before = first(ONE)
    after = then(parallel(dp=2), streams)
    assert after[Coordinate(0, 0, 0)] == after[Coordinate(0, 1, 0)] == before[Coordinate(0, 0, 0)]


def test_tp1_to_tp2_splits_only_what_must_differ() -> None:
    """Shared streams draw the dropout masks of what all tensor-parallel ranks hold whole: they must stay equal."""
    streams, before = first(ONE)
    after = then(parallel(tp=2), streams)
    old, kept, new = before[Coordinate(0, 0, 0)], after[Coordinate(0, 0, 0)], after[Coordinate(1, 0, 0, 1)]
    assert kept == old
    assert {name: new[name] for name in SHARED} == {name: old[name] for name in SHARED}
    assert all(new[name] != old[name] for name in SPLIT)


def test_pp1_to_pp2_seeds_the_new_stage_by_seed_step_and_place() -> None:
    streams, before = first(ONE)
    after = then(parallel(tp=2, pp=2), streams)
    assert after[Coordinate(0, 0, 0)] == before[Coordinate(0, 0, 0)]
    new = after[Coordinate(0, 0, 1)], after[Coordinate(1, 0, 1, 1)]
    assert all(new[0][name] == new[1][name] != before[Coordinate(0, 0, 0)][name] for name in SHARED)
    assert all(new[0][name] != new[1][name] for name in SPLIT)
    assert then(parallel(tp=2, pp=2), streams) == after, "the rule gives the same streams each time"
    assert then(parallel(tp=2, pp=2), streams, step=3)[Coordinate(0, 0, 1)] != new[0], "and others at another step"


def test_a_lost_replica_is_replaced_by_the_lowest_left() -> None:
    streams, before = first(parallel(dp=2))
    del streams[Coordinate(0, 0, 0)]
    after = then(ONE, streams)
    assert after[Coordinate(0, 0, 0)] == before[Coordinate(0, 1, 0)]


def test_generators_that_cuda_graphs_refer_to_stay_and_go_on() -> None:
    """A tracker made for CUDA graphs keeps generators in place of states, and cannot use a state."""

    def go_on() -> dict[str, tuple[bool, list[float], list[float]]]:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        def generators() -> dict[str, torch.Generator]:
            made = {name: torch.Generator().manual_seed(n) for n, name in enumerate(sorted(TRACKED))}
            get_cuda_rng_tracker().set_states(made)
            return dict(made)

        task = build(ONE)
        streams = task.state.streams["random"]
        old = generators()
        before = {name: torch.rand(1, generator=old[name]) for name in old}
        saved = streams.state_dict()
        wanted = {name: torch.rand(2, generator=old[name]).tolist() for name in old}
        new = generators()
        streams.load_streams({ONE.coordinate(0): saved}, ONE.coordinate(0), 2)
        kept = get_cuda_rng_tracker().get_states()
        assert before.keys() == kept.keys()
        return {
            name: (kept[name] is new[name], torch.rand(2, generator=new[name]).tolist(), wanted[name]) for name in new
        }

    [answers] = run_ranks(go_on, 1)
    assert answers.keys() == TRACKED
    assert all(is_same and drawn == wanted for is_same, drawn, wanted in answers.values())


@pytest.mark.parametrize("sp", [False, True], ids=["tp2", "tp2sp"])
def test_dropout_goes_on_after_tp1_to_tp2(sp: bool) -> None:
    """Were the masks of the two ranks to differ, so would the weights that they both hold, from the next step on."""

    def start() -> Any:
        task = build(ONE, dropout=0.2)
        losses = [task.train_step()["loss"] for _ in range(2)]
        return read(task.state), task.state.small_state(), losses

    def go_on(tensors: Any, small: Any) -> Any:
        task = build(parallel(tp=2, sp=sp), dropout=0.2)
        load(task.state, tensors, small)
        streams = {ONE.coordinate(0): small["streams"]["random"]}
        task.state.streams["random"].load_streams(streams, parallel(tp=2).coordinate(torch.distributed.get_rank()), 2)
        losses = [task.train_step()["loss"] for _ in range(3)]
        return read(task.state), losses

    ((shards, small, losses),) = run_ranks(start, 1)
    ranks = run_ranks(go_on, 2, whole([shards]), small)
    whole([shards for shards, _ in ranks])  # fails where replicas differ
    assert ranks[0][1] == ranks[1][1]
    assert ranks[0][1][-1] < losses[0]
