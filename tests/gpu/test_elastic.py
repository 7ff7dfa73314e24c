"""Resizes and a death on GPUs: CUDA IPC, NCCL, and a survivor whose stream is stuck in a collective.

One rank a GPU; with one GPU, two slots share it, but where it is to be full.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

import ray_etc
from ray_etc import ElasticResult, ElasticTrainer, Links, ParallelConfig, ResizeRecord, TrainState

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

GPUS = min(2, torch.cuda.device_count())

MODEL = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 352, "sequence_length": 64, "bf16": True}
LARGE = {"num_layers": 12, "hidden_size": 1536, "ffn_hidden_size": 4096, "num_attention_heads": 16, "vocab_size": 32768}
"""0.44 B parameters: 6.2 GB of state on a rank, 3.5 GB on each of two under ZeRO-1, 3.1 GB under TP2."""
SLOT_NBYTES = (17 if GPUS == 2 else 20) * 2**30
"""Of it, training takes 10 GiB under ZeRO-1, gradients and the optimizer's scratch memory included, a second model 1
GiB in either process, an empty process up to 4 GiB; of a shared GPU as much is set aside for the process that trains,
which mostly takes 1 GiB."""
FULL = 0.9
"""Of a GPU of 141 GB training may take 0.95 (see `memory.training_nbytes`), 7 GB more: LARGE's own activations and the
optimizer's scratch memory take 5. The other 7 GiB are for contexts and communicators, where the next generation begins
also for those of the old one's process."""


def train(config: dict[str, Any]) -> None:
    context = ray_etc.get_context()
    second = torch.full((config.get("keeps", 0) // 4,), 3.0, device="cuda")
    task = ray_etc.megatron.build(
        {**MODEL, **config.get("model", {})},
        context.parallel,
        optimizer={"lr": config.get("lr", 1e-3)},
        data=config["data"],
        global_batch_size=8,
    )
    activations_nbytes: int | None = None
    for step in ray_etc.steps(task.state, total=config["steps"]):
        if (context.generation, context.world_rank, step) == config.get("dies_in"):
            os.kill(os.getpid(), signal.SIGKILL)
        before = sums(task.state) if config.get("sums") else {}
        if activations_nbytes is None:  # of one size from then on, so that torch takes the same memory in each step
            total = config.get("allocates", 0.0) * torch.cuda.mem_get_info()[1]
            activations_nbytes = max(0, int(total) - torch.cuda.memory_allocated())
        activations = torch.empty(activations_nbytes, dtype=torch.uint8, device="cuda")
        metrics = task.train_step()
        free, total = torch.cuda.mem_get_info()
        del activations
        after = sums(task.state) if config.get("sums") else {}
        ray_etc.report({**metrics, "before": before, "after": after, "full": 1 - free / total})
        assert (second == 3.0).all()
        time.sleep(config["step_s"])


def sums(state: TrainState) -> dict[tuple[Any, ...], tuple[float, float]]:
    """Of the elements of each shard, and of their squares, by tensor and box."""
    return {
        (shard.tensor.key, shard.box.offsets, shard.box.lengths): (
            float(shard.view.sum(dtype=torch.float64)),
            float(torch.linalg.vector_norm(shard.view, dtype=torch.float64)) ** 2,
        )
        for shard in state.shards
    }


def whole(reports: dict[int, list[dict[str, Any]]], when: str) -> dict[Any, tuple[float, float]]:
    """The sums of each whole tensor, of what all ranks reported; what several hold counts once."""
    parts = {key: value for of_rank in reports.values() for key, value in of_rank[0][when].items()}
    totals: dict[Any, tuple[float, float]] = {}
    for (tensor, *_), (value, square) in parts.items():
        before = totals.get(tensor, (0.0, 0.0))
        totals[tensor] = (before[0] + value, before[1] + square)
    return totals


@pytest.fixture(scope="module")
def two_slots() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init("local", num_cpus=8, num_gpus=GPUS, include_dashboard=False, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


def trainer(parallel: ParallelConfig, slot_nbytes: int | None = None, slots: int = 2, **config: Any) -> ElasticTrainer:
    return ElasticTrainer(
        train,
        train_loop_config={"data": os.path.dirname(os.__file__) + "/json", **config},
        parallel=parallel,
        scaling_config=ray.train.ScalingConfig(
            num_workers=(1, slots), use_gpu=True, resources_per_worker={"GPU": GPUS / slots, "CPU": 1.0}
        ),
        slot_nbytes=slot_nbytes,
        links=Links(direct_nbytes=4096),  # some slices go straight, others are packed
    )


def there_and_back(slots: int = 2, **config: Any) -> tuple[list[ResizeRecord], ElasticResult]:
    """DP2 to TP2 and back, and a few steps more; with one slot, to another optimizer and back."""
    run = trainer(ParallelConfig(), model=LARGE, step_s=0.1, slots=slots, **config).start()
    while run.status().step < 3:
        time.sleep(0.1)
    other = ParallelConfig(tensor_parallel=2) if slots == 2 else ParallelConfig(distributed_optimizer=False)
    records = [run.resize(parallel=shape) for shape in (other, ParallelConfig())]
    last = run.status().step
    while run.status().step < last + 3:
        time.sleep(0.1)
    run.stop()
    return records, run.result(60.0)


def test_dp2_to_tp2_to_pp2_to_1(two_slots: None) -> None:
    run = trainer(ParallelConfig(), model=LARGE, lr=1e-4, steps=2000, step_s=0.2).start()
    while run.status().step < 3:
        time.sleep(0.1)
    shapes = [
        ParallelConfig(tensor_parallel=2),
        ParallelConfig(pipeline_parallel=2, distributed_optimizer=False),
        ParallelConfig(),
    ]
    records = [run.resize(parallel=shape) for shape in shapes]
    assert all(record.certified for record in records)
    assert all(record.nbytes_wire == record.nbytes_lower_bound for record in records)
    for record in records:
        assert record.memory_mode == "safe"
        assert record.nbytes_peak == pytest.approx(record.nbytes_peak_predicted, rel=0.05)
    pauses = [record.pause_s for record in records]
    assert None not in pauses
    run.stop()
    result = run.result(60.0)
    losses = [result.reports[step][0][0]["loss"] for step in sorted(result.reports)]
    assert sorted(result.reports) == list(range(len(losses)))
    assert losses[-1] < losses[0]


def test_rank_dies_in_plain_dp2_and_no_step_is_lost(two_slots: None) -> None:
    plain = ParallelConfig(distributed_optimizer=False)
    result = trainer(plain, steps=12, step_s=0.1, dies_in=(0, 1, 5)).fit()
    [recovery, *_] = result.resizes
    assert recovery.reason == "rank 1 died"
    assert recovery.certified
    assert recovery.next_step == 5
    assert sorted(result.reports) == list(range(12))


def test_dp2_to_tp2_and_back_where_a_slot_has_no_room_for_both_states(two_slots: None) -> None:
    records, result = there_and_back(slot_nbytes=SLOT_NBYTES, steps=400, sums=True, keeps=2**30)
    for record in records:
        assert record.certified
        assert record.memory_mode == "tight"
        assert record.nbytes_peak is not None
        assert record.nbytes_peak <= 1.05 * record.nbytes_peak_predicted
    assert sorted(result.reports) == list(range(len(result.reports)))
    for before, after in pairwise(range(len(result.reports))):
        left, found = whole(result.reports[before], "after"), whole(result.reports[after], "before")
        assert left.keys() == found.keys()
        for tensor, value in left.items():
            assert found[tensor] == pytest.approx(value, rel=1e-9, abs=1e-9), (tensor, after)


def test_there_and_back_while_training_fills_nine_tenths_of_its_gpus(two_slots: None) -> None:
    # Two trainings that share a GPU would leave more of it free.
    records, result = there_and_back(slots=GPUS, lr=1e-4, allocates=FULL, steps=2000)
    assert all(record.certified for record in records)
    assert sorted(result.reports) == list(range(len(result.reports)))
    assert min(metrics["full"] for ranks in result.reports.values() for [metrics] in ranks.values()) >= FULL
    for record in records:
        assert record.next_step is not None
        before, after = (result.reports[step][0][0] for step in (0, record.next_step))
        assert after["loss"] < before["loss"]
