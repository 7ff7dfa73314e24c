"""A user's own blend of data sets by Megatron: one cursor, and each sample of each data set once and in order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matrix import mesh
from megatron.core import parallel_state
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler
from models import BASE, LLAMA, MICRO_BATCH_SIZE, SEQUENCE
from ranks import run_ranks
from resize import Generation, hand_over, start_next
from trainee import Trainee

from ray_etc.planners.parallel import ParallelConfig

BATCH_SIZE, STEPS, SAMPLES = 12, 2, 96
WEIGHTS = {"one": 0.7, "other": 0.3}

Seen = tuple[int, tuple[int, ...]]
"""Of which data set, and its tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sets of documents of uneven length."""
    folder = tmp_path_factory.mktemp("data")
    for number, name in enumerate(WEIGHTS):
        random = np.random.default_rng(number)
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.uint16)
        for _ in range(60):
            document = torch.from_numpy(random.integers(0, 29, random.integers(10, 80)))
            builder.add_document(document, [len(document)])
        builder.finalize(str(folder / f"{name}.idx"))
    return folder


def blend(folder: Path) -> BlendedDataset:
    config = GPTDatasetConfig(
        random_seed=3,
        sequence_length=SEQUENCE,
        blend=([str(folder / name) for name in WEIGHTS], list(WEIGHTS.values())),
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        tokenizer=SimpleNamespace(eod=0, pad=0, vocab_size=29, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    train, *_ = BlendedMegatronDatasetBuilder(GPTDataset, [SAMPLES, 0, 0], lambda: True, config).build()
    assert isinstance(train, BlendedDataset)
    return train


class Blended(Trainee):
    """Trains on what Megatron's own sampler picks for its replica from where the cursor stands."""

    def __init__(self, parallel: ParallelConfig, folder: Path) -> None:
        self._data: Any = blend(folder)
        self._picked: Iterator[list[int]] = iter(())
        self.seen: list[list[Seen]] = []
        super().__init__(parallel, {**BASE, **LLAMA}, {}, BATCH_SIZE)
        self._picked = self._pick()

    def _pick(self) -> Iterator[list[int]]:
        return iter(
            MegatronPretrainingSampler(
                SAMPLES,
                self.consumed_samples,
                MICRO_BATCH_SIZE,
                parallel_state.get_data_parallel_rank(),
                parallel_state.get_data_parallel_world_size(),
            )
        )

    def _batch(self, micro_batch: int) -> torch.Tensor:
        samples = [self._data[index] for index in next(self._picked)]
        rows = [torch.cat([sample["tokens"], sample["labels"][-1:]]) for sample in samples]
        self.seen.append([(int(sample["dataset_id"]), tuple(sample["tokens"].tolist())) for sample in samples])
        return torch.stack(rows).to(torch.cuda.current_device())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._picked = self._pick()


def seen(task: Blended) -> list[list[Seen]]:
    return task.seen


def in_order(generation: Generation) -> list[Seen]:
    """What all replicas have seen, by micro-batch and then by replica; ranks of a replica saw the same."""
    replicas: dict[int, list[list[Seen]]] = {}
    for rank, of_rank in enumerate(generation.ask("look", seen)):
        data = generation.parallel.coordinate(rank).data
        assert replicas.setdefault(data, of_rank) == of_rank
    micro_batches = zip(*(replicas[data] for data in sorted(replicas)), strict=True)
    return [sample for of_replicas in micro_batches for samples in of_replicas for sample in samples]


def unbroken(folder: Path) -> list[Seen]:
    data: Any = blend(folder)
    whole = [(int(data[index]["dataset_id"]), tuple(data[index]["tokens"].tolist())) for index in range(SAMPLES)]
    assert {number for number, _ in whole[: 3 * STEPS * BATCH_SIZE]} == {0, 1}
    return whole


def test_one_to_three_to_two_replicas(folder: Path) -> None:
    """Others: growing failed on a missing loader state, shrinking dropped loaders: samples were lost or repeated."""
    [wanted] = run_ranks(unbroken, 1, folder)
    build = partial(Blended, folder=folder)
    samples: list[Seen] = []
    old = Generation(0, mesh(), range(1), build).enter()
    for parallel in (mesh(dp=3), mesh(tp=2, dp=2), None):
        old.ask("train", STEPS)
        samples += in_order(old)
        if parallel is None:
            break
        slots = range(parallel.world_size)
        new = start_next(old, parallel, slots, build)
        hand_over(old, new, slots).check()
        old.close()
        old = new
    old.close()
    assert len(samples) == 3 * STEPS * BATCH_SIZE
    assert samples == wanted[: len(samples)]
